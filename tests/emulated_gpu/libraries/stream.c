/* What streams do: at once, or where a graph is captured, whenever that is launched. */

#include "gpu.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CAPTURE_UNSUPPORTED 900 /* by CUDA's number */
typedef struct Work {
    struct Work *next;
    void (*run)(void *);
    max_align_t arguments[];
} Work;
struct Graph {
    Work *first, **last;
};
static __thread Graph *captured;

API void gpu_do(void (*run)(void *), const void *arguments, size_t bytes) {
    if (!captured) {
        run((void *)arguments);
        return;
    }
    Work *work = malloc(sizeof *work + bytes);
    work->next = NULL, work->run = run;
    memcpy(work->arguments, arguments, bytes);
    *captured->last = work, captured->last = &work->next;
}

API void gpu_begin_capture(void) {
    captured = malloc(sizeof *captured);
    captured->first = NULL, captured->last = &captured->first;
}
API Graph *gpu_end_capture(void) {
    Graph *graph = captured;
    captured = NULL;
    return graph;
}
API int gpu_is_capturing(void) { return captured != NULL; }
API int gpu_wait(void) { return captured ? CAPTURE_UNSUPPORTED : gpu_error(); }
API void gpu_run_graph(Graph *graph) {
    for (Work *work = graph->first; work; work = work->next) work->run(work->arguments);
}
API void gpu_free_graph(Graph *graph) {
    for (Work *work = graph->first, *next; work; work = next) next = work->next, free(work);
    free(graph);
}

static void run_copy(void *arguments) {
    const Copy *copy = arguments;
    for (size_t row = 0; row < copy->height; row++)
        memmove((char *)copy->to + row * copy->to_pitch, (const char *)copy->from + row * copy->from_pitch, copy->width);
}
API void gpu_copy_rows(Copy copy) { gpu_do(run_copy, &copy, sizeof copy); }
API void gpu_copy(void *to, const void *from, size_t bytes) { gpu_copy_rows((Copy){to, from, bytes, 1, 0, 0}); }

static void run_fill(void *arguments) {
    const Fill *fill = arguments;
    if (fill->bytes == 1) memset(fill->at, fill->value, fill->count);
    for (size_t n = 0; n < fill->count && fill->bytes == 2; n++) ((uint16_t *)fill->at)[n] = fill->value;
    for (size_t n = 0; n < fill->count && fill->bytes == 4; n++) ((uint32_t *)fill->at)[n] = fill->value;
}
API void gpu_fill(Fill fill) { gpu_do(run_fill, &fill, sizeof fill); }

typedef struct {
    void (*function)(void *);
    void *argument;
} Call;
static void run_call(void *arguments) { ((Call *)arguments)->function(((Call *)arguments)->argument); }
API void gpu_call(void (*function)(void *), void *argument) {
    Call call = {function, argument};
    gpu_do(run_call, &call, sizeof call);
}

API void *gpu_handle(void) {
    static uintptr_t last = 0x10000;
    return (void *)__sync_add_and_fetch(&last, 16);
}
API double gpu_milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}
API double *gpu_event(void) { return calloc(1, sizeof(double)); }
