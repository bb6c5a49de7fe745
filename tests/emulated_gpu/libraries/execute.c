/* Kernels that do something: those whose decoded PTX Python hands over are executed by the machine of tests/emulated_gpu/kernels.

   A launch runs to its end. Where it waits for another rank, which is another process over the same memory, it
   goes round until that has come. Nothing looks for races here. */

#include "gpu.h"
#include "../kernels/machine.c"
#include <sched.h>

#define STEPS_AT_ONCE 100000 /* of warps, between looks at the clock */
struct Function {
    const char *name;
    const Kernel *kernel; /* NULL: launches are refused */
    const int (*parameters)[2]; /* offset and bytes of each */
    int count;
};
typedef struct {
    const Kernel *kernel;
    int grid, num_warps, bytes;
    u8 parameters[];
} Execution;
static int error; /* of the device, from then on */

API int gpu_error(void) { return error; }
API Function *gpu_function(const char *name) {
    Function *made = calloc(1, sizeof *made);
    made->name = strdup(name);
    return made;
}
API const char *gpu_name(const Function *function) { return function->name; }

/* Called from Python; what is passed stays there. */
API void gpu_execute(Function *function, const Kernel *kernel, const int (*parameters)[2], int count) {
    function->parameters = parameters, function->count = count;
    function->kernel = kernel;
}

static void execute(void *arguments) {
    const Execution *launch = arguments;
    if (error) return;
    Machine *m = new_machine(1, 1 << 20, 0, 64, 1, 1ll << 62, 0);
    add_memory(m, 0, 1ull << 63, NULL, 0, 0, -1);
    s64 first = begin_work(m, launch->grid);
    add_launch(m, launch->kernel, 0, launch->grid, launch->num_warps, launch->parameters, launch->bytes, 0, &first, 0, first);
    s64 turn = PAUSED;
    while (turn == PAUSED) {
        m->time = 1e6 * gpu_milliseconds();
        turn = run(m, STEPS_AT_ONCE);
        if (turn == PAUSED) sched_yield();
    }
    if (turn != FINISHED) fprintf(stderr, "emulated GPU: %s\n", error_of(m));
    if (turn != FINISHED || has_stopped(m, 0)) error = 719; /* launch failed, as after a trap */
    free_machine(m);
}

API int gpu_launch(const Function *function, int grid, int threads, void **values, void *stream) {
    if (!function->kernel) return error ? error : gpu_refuses(function->name);
    int last = function->count - 1, bytes = last < 0 ? 0 : function->parameters[last][0] + function->parameters[last][1];
    Execution *launch = calloc(1, sizeof *launch + bytes);
    launch->kernel = function->kernel, launch->grid = grid, launch->num_warps = threads / LANES, launch->bytes = bytes;
    for (int n = 0; n <= last; n++) memcpy(launch->parameters + function->parameters[n][0], values[n], function->parameters[n][1]);
    gpu_do(stream, execute, launch, sizeof *launch + bytes);
    free(launch);
    return error;
}
