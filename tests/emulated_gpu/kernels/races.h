/* What is remembered of every cell of memory, and what is learnt through flags and fences. */

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
