/* Kernels, warps, programs, launches and the machine that has them. */

#include "lanes.h"
#include "clocks.h"
#include "races.h"
#include "memory.h"

/* What is no operation on registers; the order is that of `machine_opcodes`. */
enum { BRANCH = 1000, RETURN, LOAD, STORE, ATOM, BARRIER, WARP_BARRIER, FENCE_ALIAS, FENCE, SHUFFLE, REDUCE,
       VOTE, MATCH, SPECIAL, PARAMETER, PACK, UNPACK, SLEEP, LOAD_MATRIX, STORE_MATRIX, TRAP };
const char *machine_opcodes = "branch return load store atom barrier warp_barrier fence_alias fence shuffle "
                              "reduce vote match special parameter pack unpack sleep load_matrix store_matrix trap";
enum { GLOBAL, SHARED };
enum { RELAXED, ACQUIRE, RELEASE = 2, ACQ_REL = 3 };
enum { ADD, OR, AND, XOR, MIN, MAX, EXCH, CAS };                     /* of ATOM and REDUCE */
enum { UP, DOWN, BUTTERFLY, INDEX };                                 /* of SHUFFLE */
enum { TID, CTAID, NTID, NCTAID, LANEID, GLOBALTIMER, CLOCK, NEVER }; /* of SPECIAL; an epoch that nobody reaches */
enum { READY, WAITING, ENDED };                                      /* a warp */
enum { FINISHED, HOST, STUCK, FAILED, PAUSED };                      /* what run() returns */

typedef struct {
    s64 op, guard, negated, d[4], s[5], immediate, target, meets, space, order, strength, bytes, count, kind, is_signed;
} Instruction;

typedef struct {
    const Instruction *code;
    s64 length, num_registers, shared_bytes, site;
    const u64 *constants; /* of the registers from first_constant on */
    s64 first_constant, num_constants;
} Kernel;

typedef struct {
    int pc, meets;
    u32 mask;
} Path; /* lanes that go on at pc, until all are at `meets` */

typedef struct Program Program;

typedef struct {
    Program *program;
    u64 (*registers)[LANES];
    u32 live;
    int index, state, depth, place; /* place among the ready */
    int is_idle;                    /* its last look found nothing new */
    u64 seen[8][2];                 /* instruction and value of the looks before */
    u64 steps;                      /* instructions until now */
    Path paths[160];
} Warp;

typedef struct {
    const Kernel *kernel; /* NULL: something that the host does */
    s64 rank, grid, num_warps, params, num_params, gang, host, num_before, first_component;
    s64 *before;          /* launches that must have ended */
    s64 started, ended, is_done;
    u64 longest;          /* instructions of its longest warp */
    s64 *order;           /* in which programs start */
    Clock *start, *end;
    Knowledge *knowledge; /* of the host's doings */
    u8 *param_bytes;
} Launch;

struct Program {
    Launch *launch;
    s64 number;
    Knowledge *knowledge;
    u8 *shared;
    Cell *cells;
    int num_live, num_waiting;
    Warp *warps;
};

typedef struct {
    Races races;
    Memory memory;
    Launch *launches;
    s64 num_launches, room_launches, first_open;
    Warp **ready;
    int num_ready, room_ready;
    s64 num_ranks, resident;      /* programs of a rank at a time */
    s64 *residents, *has_stopped; /* by rank */
    u64 random, time;
    u64 steps, progress;          /* warp instructions; and at the last sign of progress */
    u64 stuck_after;
    s64 quantum, host, clock_step, order, deepest;
    int checks_races;
    char error[400];
} Machine;

static u64 next_random(Machine *m) {
    u64 x = m->random;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return m->random = x;
}
static u64 below(Machine *m, u64 number) { return (next_random(m) >> 16) % number; }

static int fail(Machine *m, const Warp *w, const char *what, u64 value) {
    const Launch *launch = w->program->launch;
    snprintf(m->error, sizeof m->error, "%lld %lld %lld %d: %s (0x%llx)",
             (long long)(launch->kernel->site + w->paths[w->depth].pc), (long long)launch->rank,
             (long long)w->program->number, w->index, what, (unsigned long long)value);
    return 0;
}

static void set_ready(Machine *m, Warp *w) {
    if (m->num_ready == m->room_ready)
        m->ready = realloc(m->ready, (m->room_ready = m->room_ready * 2 + 64) * sizeof *m->ready);
    w->state = READY, w->place = m->num_ready;
    m->ready[m->num_ready++] = w;
}

static void set_not_ready(Machine *m, Warp *w, int state) {
    w->state = state;
    m->ready[w->place] = m->ready[--m->num_ready];
    m->ready[w->place]->place = w->place;
}
