/* Devices and their memory. */

#include "gpu.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static int existing = 1, count = 1, numbers[MOST_DEVICES] = {0, 1, 2, 3, 4, 5, 6, 7};
static __thread int current;

__attribute__((constructor)) static void find_devices(void) {
    const char *all = getenv("EMULATED_GPU_DEVICES"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    count = existing = all ? atoi(all) : 1;
    if (!visible) return;
    count = 0;
    for (const char *at = visible; at && *at; at = strchr(at, ','), at += at != NULL) {
        int number = *at >= '0' && *at <= '9' ? atoi(at) : 0; /* else the UUID of a device: there it is one */
        if (number >= existing || count == MOST_DEVICES) break;
        numbers[count++] = number;
    }
}

API int gpu_existing(void) { return existing; }
API int gpu_count(void) { return count; }
API int gpu_number(int device) { return numbers[device]; }
API int gpu_current(void) { return current; }
API int gpu_choose(int device) {
    if (device < 0 || device >= count) return 0;
    current = device;
    return 1;
}

/* By CUdevice_attribute, whose numbers cudaDeviceAttr shares: of an H100, as far as anybody asks. */
API int gpu_attribute(int attribute) {
    static const int values[][2] = {
        {1, 1024},        /* threads of a block */
        {2, 1024},        /* and of its dimensions */
        {3, 1024},
        {4, 64},
        {5, 2147483647},  /* blocks of a grid's dimensions */
        {6, 65535},
        {7, 65535},
        {8, 49152},       /* shared memory of a block */
        {9, 65536},       /* constant memory */
        {10, 32},         /* lanes of a warp */
        {12, 65536},      /* registers of a block */
        {13, 1980000},    /* clock, kHz */
        {15, 1},          /* copies beside kernels */
        {16, MULTIPROCESSORS},
        {19, 1},          /* maps memory of the host */
        {31, 1},          /* concurrent kernels */
        {36, 2619000},    /* memory's clock, kHz */
        {37, 5120},       /* and width, bits */
        {38, 50 << 20},   /* L2 */
        {39, 2048},       /* threads of a multiprocessor */
        {40, 3},          /* copy engines */
        {41, 1},          /* unified addresses */
        {75, 9},          /* compute capability */
        {76, 0},
        {78, 1},          /* priorities of streams */
        {81, 233472},     /* shared memory of a multiprocessor */
        {82, 65536},      /* its registers */
        {83, 1},          /* managed memory */
        {95, 1},          /* cooperative launches */
        {97, 232448},     /* shared memory of a block that asks for it */
        {102, 1},         /* virtual memory */
        {103, 1},         /* that is shared by file descriptors */
        {106, 32},        /* blocks of a multiprocessor */
        {111, 1024},      /* shared memory that is reserved */
        {115, 1},         /* pools of memory */
        {120, 1},         /* clusters */
    };
    for (size_t n = 0; n < sizeof values / sizeof *values; n++)
        if (values[n][0] == attribute) return values[n][1];
    return 0;
}

typedef struct {
    char *at;
    size_t bytes;
    int kind, device, is_of_graph;
} Range;
static Range *ranges;
static int number, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

API void gpu_note(void *at, size_t bytes, int kind) {
    pthread_mutex_lock(&lock);
    if (number == room) ranges = realloc(ranges, (room = 2 * room + 1024) * sizeof *ranges);
    ranges[number++] = (Range){at, bytes, kind, current, gpu_is_capturing()};
    pthread_mutex_unlock(&lock);
}

/* What is allocated in a capture stays for the graph, as in the pool that PyTorch keeps for it. */
API size_t gpu_forget(void *at) {
    size_t bytes = 0;
    pthread_mutex_lock(&lock);
    for (int n = 0; n < number && !bytes; n++)
        if (ranges[n].at == at && !ranges[n].is_of_graph) bytes = ranges[n].bytes, ranges[n] = ranges[--number];
    pthread_mutex_unlock(&lock);
    return bytes;
}

API int gpu_kind(const void *at, int *device) {
    int kind = 0;
    pthread_mutex_lock(&lock);
    for (int n = 0; n < number && !kind; n++)
        if ((char *)at >= ranges[n].at && (char *)at < ranges[n].at + ranges[n].bytes)
            kind = ranges[n].kind, *device = ranges[n].device;
    pthread_mutex_unlock(&lock);
    return kind;
}

API void *gpu_allocate(size_t bytes, int kind) {
    size_t pages = bytes ? (bytes + 4095) / 4096 * 4096 : 4096;
    void *at = mmap(NULL, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return NULL;
    gpu_note(at, pages, kind);
    return at;
}

API int gpu_free(void *at) {
    size_t bytes = gpu_forget(at);
    if (bytes) munmap(at, bytes);
    return bytes != 0;
}
