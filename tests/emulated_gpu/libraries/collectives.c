/* libnccl.so.2: collectives between processes of one machine.

   The ranks of a communicator share a page. Each says there where its data is, and the others read it from that process
   (process_vm_readv) between two barriers. A call catches up with its stream, and waits for the other
   ranks at once. What is in a group runs when the group ends. Sums are made in the order of ranks, in long double, which
   holds every int64. What is not defined here refuses, made from the names in the real library. */

#include "gpu.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#define GIVE(place, value) \
    do { *(place) = (value); return 0; } while (0)
#define VERSION 22809 /* 2.28.9, which torch 2.11 brings */
#define MOST_RANKS 64
#define UNIQUE_BYTES 16 /* of an identifier */
enum { SYSTEM_ERROR = 2, INVALID_USAGE = 5, REMOTE_ERROR = 6 }; /* by NCCL's numbers, as all below */
enum { SUM, PRODUCT, MAX, MIN, AVERAGE };

typedef struct {
    unsigned char bytes[128];
} Id;
typedef struct {
    _Atomic int arrived, turn; /* of the barrier */
    struct {
        _Atomic int process;
        const void *data; /* that a collective reads of this rank */
        struct {
            const void *data; /* of the message to another rank */
            _Atomic unsigned sent, received;
        } mail[MOST_RANKS];
    } rank[MOST_RANKS];
} Page;
typedef struct {
    int ranks, rank, splits;
    Id id;
    Page *page;
    _Atomic int is_aborted;
} Communicator;
typedef struct Call {
    int (*run)(const struct Call *);
    Communicator *of;
    const void *from;
    void *to;
    size_t count;
    int type, operation, peer; /* the root or the other rank; -1: all have the result */
} Call;

/* Waiting for other ranks. */
static int pause_in(Communicator *of, int round) {
    if (of->is_aborted) return REMOTE_ERROR;
    round < 1000 ? sched_yield() : usleep(50);
    return 0;
}
static int barrier(Communicator *of) {
    Page *page = of->page;
    int turn = page->turn, error = 0;
    if (++page->arrived == of->ranks) {
        page->arrived = 0;
        page->turn++;
    }
    for (int round = 0; page->turn == turn && !error; round++) error = pause_in(of, round);
    return error;
}
static int await(Communicator *of, _Atomic unsigned *counter, unsigned least) {
    int error = 0;
    for (int round = 0; (int)(*counter - least) < 0 && !error; round++) error = pause_in(of, round);
    return error;
}

/* Reading what another rank has. */
static int read_from(Communicator *of, int rank, void *to, const void *from, size_t bytes) {
    if (rank == of->rank) return memmove(to, from, bytes), 0;
    for (size_t done = 0; done < bytes;) {
        struct iovec own = {(char *)to + done, bytes - done}, other = {(char *)from + done, bytes - done};
        ssize_t count = process_vm_readv(of->page->rank[rank].process, &own, 1, &other, 1, 0);
        if (count <= 0) {
            fprintf(stderr, "emulated GPU: the memory of rank %d cannot be read: %s\n", rank, strerror(errno));
            if (errno == EPERM || errno == ENOSYS)
                fprintf(stderr, "emulated GPU: allow process_vm_readv, in containers with --cap-add=SYS_PTRACE\n");
            return SYSTEM_ERROR;
        }
        done += count;
    }
    return 0;
}

/* Communicators. */
static int join(Communicator **made, int ranks, int rank, Id id) {
    char name[64] = "/emulated_gpu_";
    for (int n = 0; n < UNIQUE_BYTES; n++) sprintf(name + strlen(name), "%02x", id.bytes[n]);
    int file = shm_open(name, O_CREAT | O_RDWR, 0600);
    if (ranks > MOST_RANKS || file < 0 || ftruncate(file, sizeof(Page))) return SYSTEM_ERROR;
    Communicator *of = calloc(1, sizeof *of);
    of->ranks = ranks, of->rank = rank, of->id = id;
    of->page = mmap(NULL, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (of->page == MAP_FAILED) return SYSTEM_ERROR;
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY); /* else, in many distributions, only parents may read a process */
    of->page->rank[rank].process = getpid();
    *made = of;
    int error = barrier(of), probe = 0; /* so that it fails here where processes may not be read at all */
    of->page->rank[rank].data = &of->rank;
    if (!error) error = barrier(of);
    if (!error) error = read_from(of, (rank + 1) % ranks, &probe, of->page->rank[(rank + 1) % ranks].data, sizeof probe);
    if (!error) error = barrier(of);
    if (rank == 0) shm_unlink(name);
    return error;
}
API int ncclGetVersion(int *version) { GIVE(version, VERSION); }
API int ncclGetUniqueId(Id *id) {
    memset(id, 0, sizeof *id);
    return getrandom(id->bytes, UNIQUE_BYTES, 0) == UNIQUE_BYTES ? 0 : SYSTEM_ERROR;
}
API int ncclCommInitRank(Communicator **made, int ranks, Id id, int rank) { return join(made, ranks, rank, id); }
API int ncclCommInitRankConfig(Communicator **made, int ranks, Id id, int rank, void *config) {
    return join(made, ranks, rank, id);
}
API int ncclCommInitRankScalable(Communicator **made, int ranks, int rank, int ids, Id *id, void *config) {
    return join(made, ranks, rank, *id);
}
/* The ranks of one colour, in the order of their keys. Their identifier is made of the old one, without a message. */
API int ncclCommSplit(Communicator *of, int color, int key, Communicator **made, void *config) {
    int own[2] = {color, key}, ranks = 0, rank = 0;
    of->page->rank[of->rank].data = own;
    int error = barrier(of);
    for (int n = 0; n < of->ranks && !error; n++) {
        int other[2];
        error = read_from(of, n, other, of->page->rank[n].data, sizeof other);
        if (error || other[0] != color) continue;
        ranks++;
        rank += other[1] < key || (other[1] == key && n < of->rank);
    }
    if (!error) error = barrier(of);
    if (error) return error;
    *made = NULL;
    Id id = of->id;
    int salt[2] = {++of->splits, color};
    for (int n = 0; n < 8; n++) id.bytes[n] ^= ((unsigned char *)salt)[n], id.bytes[n + 8] += 17;
    return color < 0 ? 0 : join(made, ranks, rank, id);
}
API int ncclCommAbort(Communicator *of) { GIVE(&of->is_aborted, 1); }
API int ncclCommCount(const Communicator *of, int *ranks) { GIVE(ranks, of->ranks); }
API int ncclCommUserRank(const Communicator *of, int *rank) { GIVE(rank, of->rank); }
API int ncclCommCuDevice(const Communicator *of, int *device) { GIVE(device, gpu_current()); }
API int ncclCommGetAsyncError(Communicator *of, int *error) { GIVE(error, 0); }
API int ncclMemAlloc(void **at, size_t bytes) { GIVE(at, gpu_allocate(bytes, OF_DEVICE)); }
API int ncclMemFree(void *at) { return gpu_free(at), 0; }
API const char *ncclGetErrorString(int error) { return error ? "an error of the emulated GPU" : "no error"; }
API const char *ncclGetLastError(Communicator *of) { return ""; }

/* Numbers, to and from long double. */
#define EACH_TYPE(CASE) \
    CASE(0, int8_t, , ) CASE(1, uint8_t, , ) CASE(2, int32_t, , ) CASE(3, uint32_t, , ) CASE(4, int64_t, , ) CASE(5, uint64_t, , ) \
    CASE(6, _Float16, , ) CASE(7, float, , ) CASE(8, double, , ) CASE(9, uint16_t, from_bfloat16, to_bfloat16)
static const size_t BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* of every type, FP8 too */

static float from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}
static uint16_t to_bfloat16(float value) { /* the nearest, of two the even one */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static int widen(long double *to, const void *from, size_t count, int type) {
    switch (type) {
#define CASE(number, c_type, widened, narrowed) \
    case number: \
        for (size_t n = 0; n < count; n++) to[n] = widened(((const c_type *)from)[n]); \
        return 0;
        EACH_TYPE(CASE)
#undef CASE
    default: return INVALID_USAGE;
    }
}
static void narrow(void *to, const long double *from, size_t count, int type) {
    switch (type) {
#define CASE(number, c_type, widened, narrowed) \
    case number: \
        for (size_t n = 0; n < count; n++) ((c_type *)to)[n] = narrowed(from[n]); \
        return;
        EACH_TYPE(CASE)
#undef CASE
    }
}
static long double combine(int operation, long double one, long double other) {
    switch (operation) {
    case PRODUCT: return one * other;
    case MAX: return one > other ? one : other;
    case MIN: return one < other ? one : other;
    default: return one + other;
    }
}

/* Collectives: all say where their data is, all read, and none goes on before all have read. */
static int begin(const Call *call) {
    call->of->page->rank[call->of->rank].data = call->from;
    return barrier(call->of);
}
static int end(const Call *call, int error) { return error ? error : barrier(call->of); }
/* `bytes` of a rank's data from `offset` on. */
static int read_data(const Call *call, int rank, void *to, size_t offset, size_t bytes) {
    return read_from(call->of, rank, to, (const char *)call->of->page->rank[rank].data + offset, bytes);
}
/* Into `to`, once all have read: `count` elements of every rank from `first` on, combined. */
static int reduce(const Call *call, size_t first) {
    Communicator *of = call->of;
    const size_t count = call->count, width = BYTES[call->type];
    if (call->operation > AVERAGE) return INVALID_USAGE;
    const int has_result = call->peer < 0 || call->peer == of->rank;
    long double *result = malloc(count * sizeof *result + 1), *other = malloc(count * sizeof *other + 1);
    void *bytes = malloc(count * width + 1);
    int error = begin(call);
    for (int rank = 0; rank < of->ranks && has_result && !error; rank++) {
        error = read_data(call, rank, bytes, first * width, count * width);
        if (!error) error = widen(rank ? other : result, bytes, count, call->type);
        for (size_t n = 0; n < count && rank && !error; n++) result[n] = combine(call->operation, result[n], other[n]);
    }
    for (size_t n = 0; n < count && has_result && call->operation == AVERAGE; n++) result[n] /= of->ranks;
    error = end(call, error);
    if (has_result && !error) narrow(call->to, result, count, call->type);
    free(result), free(other), free(bytes);
    return error;
}
static int all_reduce(const Call *call) { return reduce(call, 0); }
static int reduce_scatter(const Call *call) { return reduce(call, call->of->rank * call->count); }
static int all_gather(const Call *call) {
    size_t bytes = call->count * BYTES[call->type];
    int error = begin(call);
    for (int rank = 0; rank < call->of->ranks && !error; rank++)
        error = read_data(call, rank, (char *)call->to + rank * bytes, 0, bytes);
    return end(call, error);
}
static int all_to_all(const Call *call) {
    size_t bytes = call->count * BYTES[call->type];
    int error = begin(call);
    for (int rank = 0; rank < call->of->ranks && !error; rank++)
        error = read_data(call, rank, (char *)call->to + rank * bytes, call->of->rank * bytes, bytes);
    return end(call, error);
}
static int broadcast(const Call *call) {
    int error = begin(call);
    if (!error) error = read_data(call, call->peer, call->to, 0, call->count * BYTES[call->type]);
    return end(call, error);
}

/* Messages: one at a time from a rank to another. */
static int send(const Call *call) {
    __auto_type mail = &call->of->page->rank[call->of->rank].mail[call->peer];
    int error = await(call->of, &mail->received, mail->sent);
    mail->data = call->from;
    if (!error) mail->sent++;
    return error;
}
static int end_send(const Call *call) {
    __auto_type mail = &call->of->page->rank[call->of->rank].mail[call->peer];
    return await(call->of, &mail->received, mail->sent);
}
static int receive(const Call *call) {
    __auto_type mail = &call->of->page->rank[call->peer].mail[call->of->rank];
    int error = await(call->of, &mail->sent, mail->received + 1);
    if (!error) error = read_from(call->of, call->peer, call->to, mail->data, call->count * BYTES[call->type]);
    if (!error) mail->received++;
    return error;
}

/* Groups. Collectives run in their order, and all messages are sent before any is awaited. */
typedef struct {
    Call *calls;
    int count;
} Group;
static __thread Group current; /* that is open */
static __thread int room, depth;

static int run_group(Group group) {
    int error = 0;
    for (int n = 0; n < group.count && !error; n++)
        if (group.calls[n].run != receive) error = group.calls[n].run(group.calls + n);
    for (int n = 0; n < group.count && !error; n++)
        if (group.calls[n].run == receive) error = receive(group.calls + n);
    for (int n = 0; n < group.count && !error; n++)
        if (group.calls[n].run == send) error = end_send(group.calls + n);
    return error;
}
static void run_captured(void *group) { run_group(*(Group *)group); }
static int close_group(void) {
    Group group = current;
    current.count = 0;
    if (!gpu_is_capturing()) return run_group(group);
    group.calls = malloc(group.count * sizeof *group.calls + 1); /* the graph's */
    memcpy(group.calls, current.calls, group.count * sizeof *group.calls);
    return gpu_do(NULL, run_captured, &group, sizeof group), 0;
}
static int add(Call call, void *stream) {
    gpu_catch_up(stream);
    if (current.count == room) current.calls = realloc(current.calls, (room = 2 * room + 64) * sizeof *current.calls);
    current.calls[current.count++] = call;
    return depth ? 0 : close_group();
}
API int ncclGroupStart(void) { return depth++, 0; }
API int ncclGroupEnd(void) { return --depth ? 0 : close_group(); }
API int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Communicator *of, void *stream) {
    return add((Call){all_reduce, of, from, to, count, type, operation, -1}, stream);
}
API int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, Communicator *of, void *stream) {
    return add((Call){all_reduce, of, from, to, count, type, operation, root}, stream);
}
API int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, Communicator *of, void *stream) {
    return add((Call){reduce_scatter, of, from, to, count, type, operation, -1}, stream);
}
API int ncclAllGather(const void *from, void *to, size_t count, int type, Communicator *of, void *stream) {
    return add((Call){all_gather, of, from, to, count, type, 0, -1}, stream);
}
API int ncclAlltoAll(const void *from, void *to, size_t count, int type, Communicator *of, void *stream) {
    return add((Call){all_to_all, of, from, to, count, type, 0, -1}, stream);
}
API int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Communicator *of, void *stream) {
    return add((Call){broadcast, of, from, to, count, type, 0, root}, stream);
}
API int ncclBcast(void *at, size_t count, int type, int root, Communicator *of, void *stream) {
    return add((Call){broadcast, of, at, at, count, type, 0, root}, stream);
}
API int ncclSend(const void *from, size_t count, int type, int to, Communicator *of, void *stream) {
    return add((Call){send, of, from, NULL, count, type, 0, to}, stream);
}
API int ncclRecv(void *to, size_t count, int type, int from, Communicator *of, void *stream) {
    return add((Call){receive, of, NULL, to, count, type, 0, from}, stream);
}
