/* Who has accessed what, and whether that is ordered: the happens-before relation of PTX.

   Clocks are vectors. A program (CTA) has a component that counts its barriers: its entry says up to
   which barrier the accesses of all its threads are known. A thread that releases has another one,
   for what it alone did since the last barrier. What a clock says of proxies is the same again, for
   what a proxy fence for aliases lies behind. When the host has waited for everything, it begins
   anew: what came before is ordered before all that follows. */

#include <stdio.h>
#include <stdlib.h>

enum { WEAK, OF_CTA, OF_GPU, OF_SYS };               /* strength of an access: its scope */
enum { READS = 1, WRITES = 2, ATOMIC = 4, SEVERAL = 8, /* of a record: kinds of access; of several threads; */
       SAME = 16 };                                    /* a write of what is there already */
enum { MOST_OTHERS = 512 };                          /* threads that release and are not a program's first */
enum { RACE, NO_PROXY_FENCE };                       /* what is reported */

typedef struct {
    u32 program, phase, turn, site; /* program: component, 0 nobody; turn: the thread's releases */
    u16 thread, alias;
    u8 strength, kind, bytes, unused;
} Access;

typedef struct {
    Access access;
    u32 next;
} Reader; /* one of those who have read a cell since it was written, in the pool of readers */

typedef struct {
    Access written;
    u32 readers, flag; /* in the pools of readers and of flags; 0 none */
} Cell;

typedef struct {
    int references;
    u32 *known, *fenced;
} Clock;

typedef struct {
    Clock *clock;
    u16 strength, rank;
} Release;

typedef struct {
    Release *releases;
    int number, room;
} Flag; /* what an acquire of the value that is in a cell learns */

typedef struct {
    u32 thread;
    Clock *clock;
} Learnt; /* by one thread since the last barrier */

typedef struct {
    u32 component, rank, phase, num_threads;
    u32 *known, *fenced;          /* by all of its threads, at the last barrier */
    u32 *turns;                   /* by thread, counted from 1 */
    u32 *fence_phase, *fence_turn, *fence_learnt;       /* by thread: its last proxy fence */
    int goes_on;                                        /* a thread accesses memory behind its fence */
    u32 *release_phase, *release_turn, *release_learnt; /* by thread: its last fence that releases, */
    u8 *release_strength;                               /* for the strong writes that follow */
    Learnt *learnt;
    int num_learnt, room;
    Learnt *seen; /* by strong reads, which a fence that acquires may follow */
    u8 *seen_strength;
    int num_seen, room_seen;
    Clock *merged[4]; /* the clocks that were merged last: polls find the same again and again */
    int next_merged;
} Knowledge;

typedef struct {
    u32 first, second, kind, first_kind, second_kind;
    u64 address, count;
} Report;

typedef struct {
    u32 floor; /* programs below are behind everything */
    u32 num_programs, num_components, next_component;
    u32 *rank_of;              /* by program, from floor on, as what follows */
    u32 *first_thread;         /* by program: thread + 1 that has the component num_programs + program */
    u32 (*others)[3];          /* program, thread, component of further threads that release */
    u32 num_others;
    Reader *readers;
    u32 num_readers, room_readers, free_reader;
    Flag *flags;
    u32 num_flags, room_flags;
    Report *reports;
    u32 num_reports, room_reports;
    u64 num_clocks;
} Races;

static void *grown(void *memory, u64 old, u64 new, u64 size) {
    memory = realloc(memory, new * size);
    memset((char *)memory + old * size, 0, (new - old) * size);
    return memory;
}

/* So many programs come next, and whatever was done is behind them. */
static void begin(Races *races, u32 num_programs) {
    for (u32 n = 1; n <= races->num_flags; n++) {
        Flag *flag = &races->flags[n];
        for (int i = 0; i < flag->number; i++) {
            Clock *clock = flag->releases[i].clock;
            if (--clock->references == 0) free(clock->known), free(clock->fenced), free(clock);
        }
        flag->number = 0;
    }
    races->floor += races->num_programs;
    races->num_programs = num_programs, races->num_others = 0;
    races->next_component = 2 * num_programs, races->num_components = 2 * num_programs + MOST_OTHERS;
    races->rank_of = realloc(races->rank_of, num_programs * 4 + 4);
    races->first_thread = realloc(races->first_thread, num_programs * 4 + 4);
    memset(races->first_thread, 0, num_programs * 4);
    races->others = realloc(races->others, MOST_OTHERS * sizeof *races->others);
}

static Clock *new_clock(Races *races) {
    Clock *clock = malloc(sizeof *clock);
    clock->references = 1;
    clock->known = calloc(races->num_components, 4);
    clock->fenced = calloc(races->num_components, 4);
    races->num_clocks++;
    return clock;
}

static void forget(Clock *clock) {
    if (clock && --clock->references == 0) {
        free(clock->known), free(clock->fenced), free(clock);
    }
}

static Clock *shared_clock(Clock *clock) {
    clock->references++;
    return clock;
}

static void join(u32 *target, const u32 *source, u32 number) {
    for (u32 i = 0; i < number; i++) target[i] = target[i] > source[i] ? target[i] : source[i];
}

/* The component of a thread that has released, 0 where it never has. */
static u32 component_of(const Races *races, u32 program, u32 thread) {
    if (races->first_thread[program - races->floor] == thread + 1) return races->num_programs + program - races->floor;
    for (u32 i = 0; i < races->num_others; i++)
        if (races->others[i][0] == program && races->others[i][1] == thread) return races->others[i][2];
    return 0;
}

static u32 new_component(Races *races, u32 program, u32 thread) {
    u32 found = component_of(races, program, thread);
    if (found) return found;
    if (!races->first_thread[program - races->floor]) {
        races->first_thread[program - races->floor] = thread + 1;
        return races->num_programs + program - races->floor;
    }
    if (races->next_component == races->num_components) return 0;
    u32 *other = races->others[races->num_others++];
    other[0] = program, other[1] = thread, other[2] = races->next_component++;
    return other[2];
}

static int covers(const Races *races, const u32 *vector, const Access *old, u32 own_component) {
    if (vector[old->program - races->floor] >= old->phase) return 1;
    return own_component && vector[own_component] >= old->turn;
}

/* Whether `old` happens before what `thread` does now; with a proxy fence between them if asked. */
static int is_ordered(const Races *races, const Knowledge *me, u32 thread, const Access *old, int fenced) {
    if (old->program < races->floor) return 1;
    int several = old->kind & SEVERAL;
    int same = old->program == me->component && old->thread == thread && !several;
    if (same && !fenced) return 1;
    u32 own = several ? 0 : component_of(races, old->program, old->thread);
    if (covers(races, fenced ? me->fenced : me->known, old, own)) return 1;
    int has_fence = fenced && me->fence_phase[thread] == me->phase;
    if (has_fence && same && old->turn <= me->fence_turn[thread]) return 1;
    if (has_fence && covers(races, me->known, old, own)) return 1;
    for (int i = 0; i < me->num_learnt; i++) {
        if (me->learnt[i].thread != thread) continue;
        int before_fence = has_fence && (u32)i < me->fence_learnt[thread];
        const Clock *clock = me->learnt[i].clock;
        if (covers(races, fenced && !before_fence ? clock->fenced : clock->known, old, own)) return 1;
    }
    return 0;
}

/* PTX: both strong, each within the other's scope, of the same bytes. */
static int is_morally_strong(const Races *races, const Access *a, const Access *b) {
    if (a->strength == WEAK || b->strength == WEAK || a->bytes != b->bytes) return 0;
    u8 narrower = a->strength < b->strength ? a->strength : b->strength;
    if (narrower == OF_CTA) return a->program == b->program;
    return narrower == OF_SYS || races->rank_of[a->program - races->floor] == races->rank_of[b->program - races->floor];
}

static void report(Races *races, const Access *old, const Access *new, int kind, u64 address) {
    for (u32 i = 0; i < races->num_reports; i++) {
        Report *known = &races->reports[i];
        if (known->first == old->site && known->second == new->site && known->kind == (u32)kind) {
            known->count++;
            return;
        }
    }
    if (races->num_reports == races->room_reports) {
        races->room_reports = races->room_reports * 2 + 16;
        races->reports = realloc(races->reports, races->room_reports * sizeof(Report));
    }
    races->reports[races->num_reports++] =
        (Report){old->site, new->site, kind, old->kind, new->kind, address, 1};
}

static void compare(Races *races, const Knowledge *me, const Access *old, const Access *new, u64 address) {
    if (old->program < races->floor || is_morally_strong(races, old, new)) return;
    if (!is_ordered(races, me, new->thread, old, 0))
        report(races, old, new, RACE, address);
    else if (old->alias != new->alias && !is_ordered(races, me, new->thread, old, 1))
        report(races, old, new, NO_PROXY_FENCE, address);
}
