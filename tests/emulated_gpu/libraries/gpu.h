/* A GPU that is not there: what its libraries share. Everything below is in libcuda.so.1.

   Its memory is memory of the process, so copies are real. A stream does what it is given in its order, at once or
   later (`stream.c`), and a graph does it when it is launched. Kernels are those that `execute.c` is told to execute; a
   launch of another is refused. */

#define _GNU_SOURCE
#include <stddef.h>

#define API __attribute__((visibility("default")))
#define NAME "NVIDIA H100 80GB HBM3"
#define TOTAL_BYTES (80ull << 30)
#define FREE_BYTES (78ull << 30)
#define CUDA_RELEASE 13000
#define MULTIPROCESSORS 132
#define MOST_DEVICES 8

enum { OF_HOST = 1, OF_DEVICE = 2 }; /* kinds of memory, as CU_MEMORYTYPE_HOST and _DEVICE */

/* Devices: EMULATED_GPU_DEVICES says how many exist (one), CUDA_VISIBLE_DEVICES which of them are visible. */
int gpu_existing(void); /* of the machine */
int gpu_count(void);    /* visible */
int gpu_number(int device); /* among those of the machine */
int gpu_current(void);      /* of this thread */
int gpu_choose(int device); /* whether it exists */
int gpu_attribute(int attribute);

/* Memory. */
void *gpu_allocate(size_t bytes, int kind);
int gpu_free(void *at); /* whether it was given back */
void gpu_note(void *at, size_t bytes, int kind);
size_t gpu_forget(void *at);
int gpu_kind(const void *at, int *device); /* 0 is no memory of ours */

/* Streams. */
typedef struct Graph Graph;
typedef struct {
    void *to;
    const void *from;
    size_t width, height, to_pitch, from_pitch; /* bytes; height is rows */
} Copy;
typedef struct {
    void *at;
    unsigned value;
    size_t bytes, count; /* of a value; values */
} Fill;
typedef struct Stream Stream; /* CUDA's handles are pointers to it, but that of the default one, which is NULL */
typedef struct Event Event;
void *gpu_stream(int is_beside_default); /* else what it does is in one order with the default one */
void gpu_do(void *stream, void (*run)(void *), const void *arguments, size_t bytes);
void gpu_copy(void *to, const void *from, size_t bytes, void *stream);
void gpu_copy_rows(Copy copy, void *stream);
void gpu_fill(Fill fill, void *stream);
void gpu_call(void (*function)(void *), void *argument, void *stream);
void gpu_catch_up(void *stream); /* return when it has done everything; in a capture at once */
int gpu_wait(void *stream);      /* as well: an error, or 0; none is allowed in a capture */
int gpu_wait_for_all(void);
int gpu_is_done(void *stream); /* 600: not yet; or an error, or 0 */
Event *gpu_event(void);
void gpu_record(Event *event, void *stream);
int gpu_has_happened(const Event *event); /* 600: not yet; or an error, or 0 */
int gpu_await_event(const Event *event);
int gpu_elapsed(const Event *start, const Event *end, float *milliseconds);
void gpu_put_behind(void *stream, const Event *event);
void *gpu_handle(void); /* a new one, of anything else */
double gpu_milliseconds(void);
void gpu_begin_capture(void);
Graph *gpu_end_capture(void);
int gpu_is_capturing(void);
void gpu_run_graph(Graph *graph, void *stream);
void gpu_free_graph(Graph *graph);

/* Launches. */
typedef struct Function Function;
Function *gpu_function(const char *name);
const char *gpu_name(const Function *function);
int gpu_launch(const Function *function, int grid, int threads, void **values, void *stream); /* an error, or 0 */
int gpu_error(void); /* of a launch before: CUDA's number, or 0 */

int gpu_lookup(const char *name, void **function); /* 0, or 500: not found */
int gpu_lacks(const char *name);                   /* 801: not supported; said if EMULATED_GPU_TRACE is set */
const char *gpu_error_name(int error);
int gpu_refuses(const char *name); /* what would compute: 801, which is said */
