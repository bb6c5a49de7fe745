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

static u32 new_reader(Races *races) {
    u32 found = races->free_reader;
    if (found) {
        races->free_reader = races->readers[found].next;
        return found;
    }
    if (races->num_readers + 1 >= races->room_readers) {
        u32 room = races->room_readers * 2 + 1024;
        races->readers = grown(races->readers, races->room_readers, room, sizeof(Reader));
        races->room_readers = room;
    }
    return ++races->num_readers;
}

static void free_readers(Races *races, Cell *cell) {
    while (cell->readers) {
        u32 first = cell->readers;
        cell->readers = races->readers[first].next;
        races->readers[first].next = races->free_reader;
        races->free_reader = first;
    }
}

/* Notes a read; earlier ones that are ordered before it need not be remembered. */
static void note_read(Races *races, const Knowledge *me, Cell *cell, const Access *new) {
    u32 *link = &cell->readers;
    while (*link) {
        Reader *reader = &races->readers[*link];
        Access *old = &reader->access;
        int alike = old->alias == new->alias && old->strength == new->strength;
        if (old->program == new->program && old->phase == new->phase && alike) {
            if (old->thread != new->thread) old->kind |= SEVERAL;
            old->turn = new->turn;
            return;
        }
        if (alike && is_ordered(races, me, new->thread, old, 0)) {
            u32 gone = *link;
            *link = reader->next;
            reader->next = races->free_reader;
            races->free_reader = gone;
        } else
            link = &reader->next;
    }
    u32 added = new_reader(races); /* which may move the pool */
    races->readers[added] = (Reader){*new, cell->readers};
    cell->readers = added;
}

/* A thread accesses a cell: compare with who did before, and note it. */
static void note(Races *races, const Knowledge *me, Cell *cell, const Access *new, u64 address) {
    if (!(new->kind & SAME) || cell->written.kind & ATOMIC) compare(races, me, &cell->written, new, address);
    if (new->kind & WRITES) {
        for (u32 i = cell->readers; i; i = races->readers[i].next)
            compare(races, me, &races->readers[i].access, new, address);
        free_readers(races, cell);
        cell->written = *new;
    } else
        note_read(races, me, cell, new);
}

/* What a thread knows, as a clock that others may be given: it releases. NULL: too many do.
   `by_fence`: what it knew at its last fence that releases. */
static Clock *released(Races *races, Knowledge *me, u32 thread, int by_fence) {
    u32 own = new_component(races, me->component, thread), n = races->num_components;
    if (!own) return NULL;
    Clock *clock = new_clock(races);
    memcpy(clock->known, me->known, n * 4);
    memcpy(clock->fenced, me->fenced, n * 4);
    int has_fence = me->fence_phase[thread] == me->phase;
    if (has_fence) {
        join(clock->fenced, me->known, n);
        clock->fenced[own] = me->fence_turn[thread];
    }
    int num_learnt = by_fence ? (int)me->release_learnt[thread] : me->num_learnt;
    for (int i = 0; i < num_learnt; i++) {
        if (me->learnt[i].thread != thread) continue;
        const Clock *other = me->learnt[i].clock;
        join(clock->known, other->known, n);
        int before_fence = has_fence && (u32)i < me->fence_learnt[thread];
        join(clock->fenced, before_fence ? other->known : other->fenced, n);
    }
    clock->known[own] = by_fence ? me->release_turn[thread] : me->turns[thread]++;
    return clock;
}

/* A write of `thread` takes the place of what was in the cell; `goes_on`: it is a read-modify-write. */
static int release(Races *races, Knowledge *me, u32 thread, Cell *cell, int strength, int releases, int goes_on) {
    int by_fence = !releases && strength && me->release_phase[thread] == me->phase;
    if (by_fence) {
        releases = 1;
        strength = strength < me->release_strength[thread] ? strength : me->release_strength[thread];
    }
    if (!cell->flag && !releases) return 1;
    if (!cell->flag) {
        if (races->num_flags + 1 >= races->room_flags) {
            u32 room = races->room_flags * 2 + 256;
            races->flags = grown(races->flags, races->room_flags, room, sizeof(Flag));
            races->room_flags = room;
        }
        cell->flag = ++races->num_flags;
    }
    Flag *flag = &races->flags[cell->flag];
    if (!goes_on) {
        for (int i = 0; i < flag->number; i++) forget(flag->releases[i].clock);
        flag->number = 0;
    }
    if (!releases) return 1;
    Clock *clock = released(races, me, thread, by_fence);
    if (!clock) return 0;
    for (int i = 0; i < flag->number; i++) {
        Release *old = &flag->releases[i];
        if (old->strength == strength && old->rank == me->rank) {
            join(clock->known, old->clock->known, races->num_components);
            join(clock->fenced, old->clock->fenced, races->num_components);
            forget(old->clock);
            old->clock = clock;
            return 1;
        }
    }
    if (flag->number == flag->room)
        flag->releases = realloc(flag->releases, (flag->room = flag->room * 2 + 1) * sizeof(Release));
    flag->releases[flag->number++] = (Release){clock, strength, me->rank};
    return 1;
}

static void learn(Knowledge *me, u32 thread, Clock *clock) {
    for (int j = 0; j < 4; j++)
        if (me->merged[j] == clock) return;
    for (int j = 0; j < me->num_learnt; j++)
        if (me->learnt[j].thread == thread && me->learnt[j].clock == clock) return;
    if (me->num_learnt == me->room)
        me->learnt = realloc(me->learnt, (me->room = me->room * 2 + 4) * sizeof(Learnt));
    me->learnt[me->num_learnt++] = (Learnt){thread, shared_clock(clock)};
}

static void remember(Knowledge *me, u32 thread, Clock *clock, int strength) {
    for (int j = 0; j < me->num_seen; j++)
        if (me->seen[j].thread == thread && me->seen[j].clock == clock) return;
    if (me->num_seen == me->room_seen) {
        me->room_seen = me->room_seen * 2 + 4;
        me->seen = realloc(me->seen, me->room_seen * sizeof(Learnt));
        me->seen_strength = realloc(me->seen_strength, me->room_seen);
    }
    me->seen_strength[me->num_seen] = strength;
    me->seen[me->num_seen++] = (Learnt){thread, shared_clock(clock)};
}

/* A strong read: `thread` learns what the writers of the value in the cell released, each within the
   other's scope; at once where the read acquires, else at a fence that follows. */
static void acquire(Races *races, Knowledge *me, u32 thread, const Cell *cell, int strength, int acquires) {
    if (!cell->flag) return;
    const Flag *flag = &races->flags[cell->flag];
    for (int i = 0; i < flag->number; i++) {
        const Release *found = &flag->releases[i];
        int narrower = strength < found->strength ? strength : found->strength;
        if (narrower < OF_GPU || (narrower == OF_GPU && found->rank != me->rank)) continue;
        if (acquires)
            learn(me, thread, found->clock);
        else
            remember(me, thread, found->clock, found->rank == me->rank ? OF_GPU : OF_SYS);
    }
}

/* A fence that acquires, releases or both, at the scope `strength`; a release by it counts for
   writes before the next barrier of the program. */
static void fence_scope(Knowledge *me, u32 thread, int order, int strength) {
    int kept = 0;
    if (order & 1)
        for (int i = 0; i < me->num_seen; i++) {
            Learnt *seen = &me->seen[i];
            if (seen->thread == thread && me->seen_strength[i] <= strength) {
                learn(me, thread, seen->clock);
                forget(seen->clock);
            } else {
                me->seen_strength[kept] = me->seen_strength[i];
                me->seen[kept++] = *seen;
            }
        }
    else
        kept = me->num_seen;
    me->num_seen = kept;
    if (order & 2) {
        me->release_phase[thread] = me->phase;
        me->release_turn[thread] = me->turns[thread]++;
        me->release_learnt[thread] = me->num_learnt;
        me->release_strength[thread] = strength;
    }
}

/* A proxy fence for aliases: what the thread knows by now it may read through any address. */
static void fence(Knowledge *me, u32 thread) {
    me->fence_phase[thread] = me->phase;
    me->fence_turn[thread] = me->turns[thread]++;
    me->fence_learnt[thread] = me->num_learnt;
}

/* All threads meet at a barrier: each knows what any of them knew. */
static void meet(Races *races, Knowledge *me) {
    u32 n = races->num_components;
    u32 fences = 0;
    for (u32 thread = 0; thread < me->num_threads; thread++)
        fences += me->fence_phase[thread] == me->phase;
    if (fences) join(me->fenced, me->known, n);
    if (fences == me->num_threads && !me->goes_on) me->fenced[me->component - races->floor] = me->phase;
    me->goes_on = 0;
    for (int i = 0; i < me->num_learnt; i++) {
        u32 thread = me->learnt[i].thread;
        int before_fence = me->fence_phase[thread] == me->phase && (u32)i < me->fence_learnt[thread];
        Clock *clock = me->learnt[i].clock;
        join(me->fenced, before_fence ? clock->known : clock->fenced, n);
    }
    for (int i = 0; i < me->num_learnt; i++) {
        Clock *clock = me->learnt[i].clock;
        join(me->known, clock->known, n);
        forget(me->merged[me->next_merged]);
        me->merged[me->next_merged] = clock;
        me->next_merged = (me->next_merged + 1) % 4;
    }
    me->num_learnt = 0;
    me->known[me->component - races->floor] = me->phase++;
}

/* A program starts behind what `start` knows; NULL nothing. */
static Knowledge *new_knowledge(Races *races, u32 component, u32 rank, u32 num_threads, const Clock *start) {
    Knowledge *me = calloc(1, sizeof *me);
    u32 n = races->num_components;
    me->component = component, me->rank = rank, me->phase = 1, me->num_threads = num_threads;
    me->known = calloc(n, 4), me->fenced = calloc(n, 4);
    me->turns = calloc(num_threads, 4);
    me->fence_phase = calloc(num_threads, 4);
    me->fence_turn = calloc(num_threads, 4);
    me->fence_learnt = calloc(num_threads, 4);
    me->release_phase = calloc(num_threads, 4);
    me->release_turn = calloc(num_threads, 4);
    me->release_learnt = calloc(num_threads, 4);
    me->release_strength = calloc(num_threads, 1);
    for (u32 thread = 0; thread < num_threads; thread++) me->turns[thread] = 1;
    if (start) memcpy(me->known, start->known, n * 4), memcpy(me->fenced, start->fenced, n * 4);
    races->rank_of[component - races->floor] = rank;
    return me;
}

static void free_knowledge(Knowledge *me) {
    for (int i = 0; i < me->num_learnt; i++) forget(me->learnt[i].clock);
    for (int i = 0; i < 4; i++) forget(me->merged[i]);
    for (int i = 0; i < me->num_seen; i++) forget(me->seen[i].clock);
    free(me->release_phase), free(me->release_turn), free(me->release_learnt), free(me->release_strength);
    free(me->seen), free(me->seen_strength);
    free(me->known), free(me->fenced), free(me->turns), free(me->fence_phase);
    free(me->fence_turn), free(me->fence_learnt), free(me->learnt), free(me);
}
