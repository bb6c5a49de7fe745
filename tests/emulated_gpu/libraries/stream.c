/* What streams do, each in its order: at once, or by a thread of the stream's own, which holds it back.

   Where EMULATED_GPU_HOLDS is a seed, every second piece of work, by chance, is held back: until somebody waits for it,
   or for some milliseconds from when its turn has come. So work of different streams that nobody has put in order comes in another one, whichever
   stream is the engine's. What is held back runs C alone and never Python, so its thread needs no lock that whoever
   waits for it may hold, and spins for other ranks while others run. What Python and collectives compute is not put
   into a stream: it catches up with its stream, and is done by whoever calls (`gpu_catch_up`).
   In a graph work is kept, in the order of the calls, and done whenever it is launched. */

#include "gpu.h"
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CAPTURE_UNSUPPORTED 900 /* by CUDA's numbers */
#define NOT_READY 600
#define LONGEST 40.0 /* milliseconds that work is held back */
typedef struct Work {
    struct Work *next;
    void (*run)(void *);
    long number;  /* of its stream's */
    double held, until; /* milliseconds, from when it is the first; and until then */
    max_align_t arguments[];
} Work;
struct Graph {
    Work *first, **last;
};
struct Stream {
    Work *first, **last;
    long given, done, wanted; /* pieces of work: until now; and up to which somebody waits */
    int has_thread;
    Stream *next;
};
static __thread Graph *captured;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all streams */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Stream own[MOST_DEVICES], *all; /* of each device, its default one; those that were made */

API void *gpu_stream(int is_beside_default) {
    if (!is_beside_default) return NULL; /* it comes in one order with the default one */
    Stream *made = calloc(1, sizeof *made);
    pthread_mutex_lock(&lock);
    made->next = all, all = made;
    pthread_mutex_unlock(&lock);
    return made;
}
static Stream *stream_of(void *handle) { /* CUDA's own names for the default one are small numbers */
    return (uintptr_t)handle < 16 ? &own[gpu_current()] : handle;
}

/* With the lock. */
static void want(Stream *stream, long number) {
    if (stream->wanted >= number) return;
    stream->wanted = number;
    pthread_cond_broadcast(&changed);
}
static void await(Stream *stream, long number) {
    want(stream, number);
    while (stream->done < number) pthread_cond_wait(&changed, &lock);
}
static void end(Stream *stream) {
    stream->done++;
    pthread_cond_broadcast(&changed);
}
static double held_for(void) {
    static uint64_t random;
    static int holds = -1;
    if (holds < 0) {
        const char *seed = getenv("EMULATED_GPU_HOLDS");
        holds = seed && *seed;
        random = 0x9E3779B97F4A7C15u * (2 * (holds ? strtoull(seed, NULL, 10) : 0) + 1) + gpu_number(gpu_current());
    }
    random = random * 6364136223846793005u + 1442695040888963407u;
    return holds && random >> 63 ? LONGEST * (random >> 32 & 0xFFFF) / 0x10000 : 0;
}
static void *work_through(void *given) {
    Stream *stream = given;
    pthread_mutex_lock(&lock);
    for (;;) {
        Work *work = stream->first;
        double now = gpu_milliseconds();
        int is_first = work && work->number == stream->done + 1;
        if (is_first && !work->until) work->until = now + work->held;
        if (!is_first) {
            pthread_cond_wait(&changed, &lock);
        } else if (now < work->until && stream->wanted < work->number) {
            struct timespec until;
            clock_gettime(CLOCK_REALTIME, &until);
            long nanoseconds = until.tv_nsec + (work->until - now) * 1e6;
            until.tv_sec += nanoseconds / 1000000000, until.tv_nsec = nanoseconds % 1000000000;
            pthread_cond_timedwait(&changed, &lock, &until);
        } else {
            pthread_mutex_unlock(&lock);
            work->run(work->arguments);
            pthread_mutex_lock(&lock);
            if (!(stream->first = work->next)) stream->last = &stream->first;
            free(work);
            end(stream);
        }
    }
    return NULL;
}
static void add(Stream *stream, void (*run)(void *), const void *arguments, size_t bytes, double held) {
    Work *work = malloc(sizeof *work + bytes);
    *work = (Work){NULL, run, ++stream->given, held};
    memcpy(work->arguments, arguments, bytes);
    if (!stream->has_thread) {
        pthread_t thread;
        stream->last = &stream->first, stream->has_thread = 1;
        pthread_create(&thread, NULL, work_through, stream);
        pthread_detach(thread);
    }
    *stream->last = work, stream->last = &work->next;
    pthread_cond_broadcast(&changed);
}

static void keep(void (*run)(void *), const void *arguments, size_t bytes) {
    Work *work = malloc(sizeof *work + bytes);
    *work = (Work){NULL, run};
    memcpy(work->arguments, arguments, bytes);
    *captured->last = work, captured->last = &work->next;
}
static void give(Stream *stream, void (*run)(void *), const void *arguments, size_t bytes, double held) {
    pthread_mutex_lock(&lock);
    int is_at_once = stream->given == stream->done && held == 0;
    if (is_at_once) {
        stream->given++;
        pthread_mutex_unlock(&lock);
        run((void *)arguments);
        pthread_mutex_lock(&lock);
        end(stream);
    } else {
        add(stream, run, arguments, bytes, held);
    }
    pthread_mutex_unlock(&lock);
}
API void gpu_do(void *stream, void (*run)(void *), const void *arguments, size_t bytes) {
    if (captured) keep(run, arguments, bytes);
    else give(stream_of(stream), run, arguments, bytes, held_for());
}

/* Waiting for work, which is not held back any more: here, or in another stream. */
API void gpu_catch_up(void *handle) {
    if (captured) return;
    Stream *stream = stream_of(handle);
    pthread_mutex_lock(&lock);
    await(stream, stream->given);
    pthread_mutex_unlock(&lock);
}
API int gpu_wait(void *stream) {
    if (captured) return CAPTURE_UNSUPPORTED;
    gpu_catch_up(stream);
    return gpu_error();
}
API int gpu_wait_for_all(void) {
    if (captured) return CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&lock);
    for (int n = 0; n < MOST_DEVICES; n++) await(&own[n], own[n].given);
    for (Stream *each = all; each; each = each->next) await(each, each->given);
    pthread_mutex_unlock(&lock);
    return gpu_error();
}
API int gpu_is_done(void *handle) {
    Stream *stream = stream_of(handle);
    int error = gpu_error();
    return error || stream->done == stream->given ? error : NOT_READY;
}

/* Events, which are never given back: work may yet write to one. */
struct Event {
    Stream *stream; /* NULL: not recorded */
    long number;    /* of the work that it stands for */
    double milliseconds;
};
API Event *gpu_event(void) { return calloc(1, sizeof(Event)); }
static void note_time(void *event) { (*(Event **)event)->milliseconds = gpu_milliseconds(); }
API void gpu_record(Event *event, void *handle) {
    if (captured) return;
    Stream *stream = stream_of(handle);
    give(stream, note_time, &event, sizeof event, 0);
    pthread_mutex_lock(&lock);
    event->stream = stream, event->number = stream->given;
    pthread_mutex_unlock(&lock);
}
API int gpu_has_happened(const Event *event) {
    int error = gpu_error();
    return error || !event->stream || event->stream->done >= event->number ? error : NOT_READY;
}
API int gpu_await_event(const Event *event) {
    pthread_mutex_lock(&lock);
    if (event->stream) await(event->stream, event->number);
    pthread_mutex_unlock(&lock);
    return gpu_error();
}
API int gpu_elapsed(const Event *start, const Event *end, float *milliseconds) {
    int error = gpu_has_happened(start) ? gpu_has_happened(start) : gpu_has_happened(end);
    *milliseconds = end->milliseconds - start->milliseconds;
    return error;
}

typedef struct {
    Stream *waiting, *other;
    long own_number, number;
} Dependency;
static void run_dependency(void *arguments) {
    const Dependency *on = arguments;
    pthread_mutex_lock(&lock);
    while (on->other->done < on->number) {
        if (on->waiting->wanted >= on->own_number) want(on->other, on->number);
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
}
API void gpu_put_behind(void *handle, const Event *event) {
    if (captured || !event->stream) return;
    Stream *stream = stream_of(handle);
    pthread_mutex_lock(&lock);
    Dependency on = {stream, event->stream, stream->given + 1, event->number};
    if (stream != on.other && on.other->done < on.number) add(stream, run_dependency, &on, sizeof on, 0);
    pthread_mutex_unlock(&lock);
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
API void gpu_run_graph(Graph *graph, void *stream) { /* at once: Python computes in it, whose copies may be held back */
    for (Work *work = graph->first; work; work = work->next) gpu_catch_up(stream), work->run(work->arguments);
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
API void gpu_copy_rows(Copy copy, void *stream) {
    int device; /* from or to memory that is not page-locked CUDA copies before it returns */
    if (captured || (gpu_kind(copy.to, &device) && gpu_kind(copy.from, &device))) {
        gpu_do(stream, run_copy, &copy, sizeof copy);
    } else {
        gpu_catch_up(stream);
        run_copy(&copy);
    }
}
API void gpu_copy(void *to, const void *from, size_t bytes, void *stream) { gpu_copy_rows((Copy){to, from, bytes, 1, 0, 0}, stream); }

static void run_fill(void *arguments) {
    const Fill *fill = arguments;
    if (fill->bytes == 1) memset(fill->at, fill->value, fill->count);
    for (size_t n = 0; n < fill->count && fill->bytes == 2; n++) ((uint16_t *)fill->at)[n] = fill->value;
    for (size_t n = 0; n < fill->count && fill->bytes == 4; n++) ((uint32_t *)fill->at)[n] = fill->value;
}
API void gpu_fill(Fill fill, void *stream) { gpu_do(stream, run_fill, &fill, sizeof fill); }

typedef struct {
    void (*function)(void *);
    void *argument;
} Call;
static void run_call(void *arguments) { ((Call *)arguments)->function(((Call *)arguments)->argument); }
API void gpu_call(void (*function)(void *), void *argument, void *stream) {
    Call call = {function, argument};
    gpu_do(stream, run_call, &call, sizeof call);
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
