/* Operations on registers: a register holds a value for each of the 32 lanes of a warp.

   A value lies in the low bits of 64; whoever reads it casts it to the type of the operation. The
   table at the end is the list of operations that are known; an opcode that is not in it, nor among
   those of machine.c, is refused by the parser. */

#include <stdint.h>
#include <string.h>

#define LANES 32
#define EACH for (int l = 0; l < LANES; l++)

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef u16 b16;
typedef u32 b32;
typedef u64 b64;
typedef __int128 s128;
typedef unsigned __int128 u128;

typedef void Operation(u64 *d, const u64 *x, const u64 *y, const u64 *z);

/* NAME.TYPE with operands a, b, c of TYPE; the result is cast to RESULT. */
#define DEFINE(NAME, TYPE, RESULT, EXPRESSION)                                                   \
    static void NAME##_##TYPE(u64 *d, const u64 *x, const u64 *y, const u64 *z) {                \
        EACH {                                                                                   \
            TYPE a = (TYPE)x[l], b = (TYPE)y[l], c = (TYPE)z[l];                                 \
            (void)a, (void)b, (void)c;                                                           \
            d[l] = (u64)(RESULT)(EXPRESSION);                                                    \
        }                                                                                        \
    }
#define SIGNED(M, NAME, ...) M(NAME, s16, __VA_ARGS__) M(NAME, s32, __VA_ARGS__) M(NAME, s64, __VA_ARGS__)
#define UNSIGNED(M, NAME, ...) M(NAME, u16, __VA_ARGS__) M(NAME, u32, __VA_ARGS__) M(NAME, u64, __VA_ARGS__)
#define BITS(M, NAME, ...) M(NAME, b16, __VA_ARGS__) M(NAME, b32, __VA_ARGS__) M(NAME, b64, __VA_ARGS__)
#define NUMBERS(M, NAME, ...) SIGNED(M, NAME, __VA_ARGS__) UNSIGNED(M, NAME, __VA_ARGS__)
#define SAME(NAME, TYPE, EXPRESSION) DEFINE(NAME, TYPE, TYPE, EXPRESSION)
#define TRUTH(NAME, TYPE, EXPRESSION) DEFINE(NAME, TYPE, u8, EXPRESSION)

/* What PTX leaves undefined must not be relied on: it is a value that nobody expects. */
#define UNDEFINED 0x5bd1e9955bd1e995

NUMBERS(SAME, add, (u64)a + (u64)b)
NUMBERS(SAME, sub, (u64)a - (u64)b)
NUMBERS(SAME, mul_lo, (u64)a *(u64)b)
NUMBERS(SAME, mad_lo, (u64)a *(u64)b + (u64)c)
NUMBERS(SAME, min, a < b ? a : b)
NUMBERS(SAME, max, a > b ? a : b)
SAME(max_relu, s32, a > b && a > 0 ? a : b > 0 ? b : 0)
UNSIGNED(SAME, div, b ? a / b : UNDEFINED)
UNSIGNED(SAME, rem, b ? a % b : UNDEFINED)
SIGNED(SAME, div, b == 0 ? (s64)UNDEFINED : b == -1 ? -(u64)a : (u64)(a / b))
SIGNED(SAME, rem, b == 0 ? (s64)UNDEFINED : b == -1 ? 0 : a % b)
SIGNED(SAME, abs, a < 0 ? -(u64)a : (u64)a)
SIGNED(SAME, neg, -(u64)a)
SAME(mul_hi, s16, (s32)a * b >> 16)
SAME(mul_hi, u16, (u32)a * b >> 16)
SAME(mul_hi, s32, (s64)a * b >> 32)
SAME(mul_hi, u32, (u64)a * b >> 32)
SAME(mul_hi, s64, (s128)a * b >> 64)
SAME(mul_hi, u64, (u128)a * b >> 64)
DEFINE(mul_wide, s16, s32, (s32)a *b)
DEFINE(mul_wide, u16, u32, (u32)a *b)
DEFINE(mul_wide, s32, s64, (s64)a *b)
DEFINE(mul_wide, u32, u64, (u64)a *b)
DEFINE(mad_wide, s16, u32, (u64)((s32)a * b) + z[l])
DEFINE(mad_wide, u16, u32, (u32)a *b + z[l])
DEFINE(mad_wide, s32, u64, (u64)((s64)a * b) + z[l])
DEFINE(mad_wide, u32, u64, (u64)a *b + z[l])
BITS(SAME, and, a &b)
BITS(SAME, or, a | b)
BITS(SAME, xor, a ^ b)
BITS(SAME, not, ~a)
BITS(SAME, mov, a)
BITS(SAME, shl, (u32)y[l] < 8 * sizeof a ? (u64)a << (u32)y[l] : 0)
UNSIGNED(SAME, shr, (u32)y[l] < 8 * sizeof a ? a >> (u32)y[l] : 0)
SIGNED(SAME, shr, a >> ((u32)y[l] < 8 * sizeof a ? (u32)y[l] : 8 * sizeof a - 1))
BITS(SAME, selp, z[l] & 1 ? a : b)
#define BOTH(NAME, EXPRESSION) BITS(TRUTH, NAME, EXPRESSION) NUMBERS(TRUTH, NAME, EXPRESSION)
BOTH(setp_eq, a == b)
BOTH(setp_ne, a != b)
NUMBERS(TRUTH, setp_lt, a < b)
NUMBERS(TRUTH, setp_le, a <= b)
NUMBERS(TRUTH, setp_gt, a > b)
NUMBERS(TRUTH, setp_ge, a >= b)
typedef u8 pred;
SAME(and, pred, a & b & 1)
SAME(or, pred, (a | b) & 1)
SAME(xor, pred, (a ^ b) & 1)
SAME(not, pred, ~a & 1)
SAME(mov, pred, a & 1)
DEFINE(popc, b32, u32, __builtin_popcount(a))
DEFINE(popc, b64, u32, __builtin_popcountll(a))
DEFINE(clz, b32, u32, a ? __builtin_clz(a) : 32)
DEFINE(clz, b64, u32, a ? __builtin_clzll(a) : 64)

/* Bits from `first` on, `length` of them; a signed field is extended by its highest bit. */
static u64 field(u64 value, u32 first, u32 length, int width, int is_signed) {
    first &= 255, length &= 255;
    if (length == 0) return 0;
    u64 top = first + length - 1 < (u32)width - 1 ? first + length - 1 : (u32)width - 1;
    u64 sign = is_signed ? value >> top & 1 : 0, found = 0;
    for (u32 bit = 0; bit < (u32)width; bit++)
        found |= (bit < length && first + bit < (u32)width ? value >> (first + bit) & 1 : sign) << bit;
    return found;
}
SAME(bfe, u32, field(a, (u32)y[l], (u32)z[l], 32, 0))
SAME(bfe, s32, field((u32)a, (u32)y[l], (u32)z[l], 32, 1))
SAME(bfe, u64, field(a, (u32)y[l], (u32)z[l], 64, 0))
SAME(bfe, s64, field((u64)a, (u32)y[l], (u32)z[l], 64, 1))

/* Bytes of two words, chosen by the nibbles of the third; a nibble's high bit repeats the sign. */
static u32 permuted(u32 low, u32 high, u32 selector) {
    u64 bytes = (u64)high << 32 | low;
    u32 found = 0;
    for (int i = 0; i < 4; i++) {
        u32 nibble = selector >> 4 * i & 15, byte = bytes >> 8 * (nibble & 7) & 255;
        found |= (nibble & 8 ? (byte >> 7) * 255 : byte) << 8 * i;
    }
    return found;
}
SAME(prmt, b32, permuted(a, b, c))
typedef u32 s16x2; /* two halves of a word */
typedef u32 u16x2;
#define HALVES(A, B) (((A) + (B)) & 0xffff) | (((A) >> 16) + ((B) >> 16)) << 16
SAME(add, s16x2, HALVES(a, b))
SAME(add, u16x2, HALVES(a, b))
SAME(shf_r_wrap, b32, ((u64)b << 32 | a) >> (c & 31))
SAME(shf_l_wrap, b32, ((u64)b << 32 | a) << (c & 31) >> 32)

#define CONVERT(TO, FROM)                                                                         \
    static void cvt_##TO##_##FROM(u64 *d, const u64 *x, const u64 *y, const u64 *z) {             \
        (void)y, (void)z;                                                                         \
        EACH d[l] = (u64)(TO)(FROM)x[l];                                                          \
    }
#define CONVERT_TO(M, TO) M(TO, u8) M(TO, s8) M(TO, u16) M(TO, s16) M(TO, u32) M(TO, s32) M(TO, u64) M(TO, s64)
#define CONVERSIONS(M) CONVERT_TO(M, u8) CONVERT_TO(M, s8) CONVERT_TO(M, u16) CONVERT_TO(M, s16) \
    CONVERT_TO(M, u32) CONVERT_TO(M, s32) CONVERT_TO(M, u64) CONVERT_TO(M, s64)
CONVERSIONS(CONVERT)

typedef struct {
    const char *name; /* as in PTX, with _ for the dots */
    Operation *run;
} Known;

#define ROW(NAME, TYPE, ...) {#NAME "_" #TYPE, NAME##_##TYPE},
#define ROW_CVT(TO, FROM) {"cvt_" #TO "_" #FROM, cvt_##TO##_##FROM},
#define ROWS_OF_BITS(NAME) BITS(ROW, NAME, )
#define ROWS(NAME) NUMBERS(ROW, NAME, )
static const Known operations[] = {
    ROWS(add) ROWS(sub) ROWS(mul_lo) ROWS(mad_lo) ROWS(min) ROWS(max) ROWS(div) ROWS(rem)
    SIGNED(ROW, abs, ) SIGNED(ROW, neg, ) ROWS(mul_hi) ROW(mul_wide, s16) ROW(mul_wide, u16)
    ROW(mul_wide, s32) ROW(mul_wide, u32) ROW(mad_wide, s16) ROW(mad_wide, u16)
    ROW(mad_wide, s32) ROW(mad_wide, u32) ROWS_OF_BITS(and) ROWS_OF_BITS(or) ROWS_OF_BITS(xor)
    ROWS_OF_BITS(not) ROWS_OF_BITS(mov) ROWS_OF_BITS(shl) ROWS(shr) ROWS_OF_BITS(selp)
    ROWS_OF_BITS(setp_eq) ROWS(setp_eq) ROWS_OF_BITS(setp_ne) ROWS(setp_ne) ROWS(setp_lt)
    ROWS(setp_le) ROWS(setp_gt) ROWS(setp_ge) ROW(and, pred) ROW(or, pred) ROW(xor, pred)
    ROW(not, pred) ROW(mov, pred) ROW(popc, b32) ROW(popc, b64) ROW(clz, b32) ROW(clz, b64)
    ROW(bfe, u32) ROW(bfe, s32) ROW(bfe, u64) ROW(bfe, s64) ROW(prmt, b32) ROW(add, s16x2)
    ROW(max_relu, s32) ROW(add, u16x2) ROW(shf_r_wrap, b32) ROW(shf_l_wrap, b32) CONVERSIONS(ROW_CVT)
};
