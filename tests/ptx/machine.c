/* A machine that executes compiled PTX: warps of programs of several ranks, one step at a time.

   Python (machine.py) decodes kernels, registers memory and adds launches; this file executes. All
   choices are taken from one random number generator, so a seed gives the same run again. */

#include "lanes.h"
#include "races.h"
#include "memory.h"

/* What is no operation on registers; the order is that of `machine_opcodes`. */
enum { BRANCH = 1000, RETURN, LOAD, STORE, ATOM, BARRIER, WARP_BARRIER, FENCE_ALIAS, FENCE, SHUFFLE, REDUCE,
       VOTE, MATCH, SPECIAL, PARAMETER, PACK, UNPACK, SLEEP, LOAD_MATRIX, STORE_MATRIX };
const char *machine_opcodes = "branch return load store atom barrier warp_barrier fence_alias fence shuffle "
                              "reduce vote match special parameter pack unpack sleep load_matrix store_matrix";
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
    Path paths[160];
} Warp;

typedef struct {
    const Kernel *kernel; /* NULL: something that the host does */
    s64 rank, grid, num_warps, params, num_params, gang, host, num_before, first_component;
    s64 *before;          /* launches that must have ended */
    s64 started, ended, is_done;
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
    s64 *residents;               /* by rank */
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

/* ---- memory ---- */

typedef struct {
    u8 *at;
    Cell *cells; /* the one of the first byte */
    u64 offset, address;
    u32 shift;
    u16 alias;
} Place;

static int find_place(Machine *m, Warp *w, const Instruction *i, u64 address, u32 bytes, Place *place) {
    Program *p = w->program;
    if (address % bytes) return fail(m, w, "address is not aligned", address);
    if (i->space == SHARED) {
        address = (u32)address;
        if (address + bytes > (u64)p->launch->kernel->shared_bytes) return fail(m, w, "not in shared memory", address);
        *place = (Place){p->shared + address, p->cells, address, address, 0, 0};
        return 1;
    }
    const Region *region = region_of(&m->memory, address, bytes, p->launch->rank);
    if (!region) return fail(m, w, "no memory of this rank at the address", address);
    *place = (Place){(u8 *)address, region->cells, address - region->start, address, region->shift, region->alias};
    return 1;
}

static Access access_of(const Warp *w, int lane, const Instruction *i, const Place *place, u32 bytes, int kind) {
    const Knowledge *k = w->program->knowledge;
    u32 thread = w->index * LANES + lane, site = w->program->launch->kernel->site + (i - w->program->launch->kernel->code);
    return (Access){k->component, k->phase, k->turns[thread], site, thread, place->alias, i->strength, kind, bytes, 0};
}

static int visit(Machine *m, Warp *w, int lane, const Instruction *i, const Place *place, u32 bytes, int kind) {
    if (!m->checks_races) return 1;
    Access access = access_of(w, lane, i, place, bytes, kind);
    note_cells(&m->races, w->program->knowledge, place->cells, place->offset, place->shift, &access, place->address);
    Cell *cell = &place->cells[place->offset >> place->shift];
    u32 thread = access.thread;
    if (w->program->knowledge->fence_phase[thread] == w->program->knowledge->phase) w->program->knowledge->goes_on = 1;
    if (kind & READS && i->strength) acquire(&m->races, w->program->knowledge, thread, cell, i->strength, i->order & ACQUIRE);
    if (kind & WRITES) {
        int goes_on = kind & ATOMIC, releases = i->order & RELEASE && i->strength;
        if (!release(&m->races, w->program->knowledge, thread, cell, i->strength, releases, goes_on))
            return fail(m, w, "too many threads release", 0);
        for (u64 c = (place->offset >> place->shift) + 1; c <= (place->offset + bytes - 1) >> place->shift; c++)
            release(&m->races, w->program->knowledge, thread, &place->cells[c], 0, 0, goes_on);
    }
    return 1;
}

/* A warp that looks at a flag again and finds the same has its turn less often. */
static void look(Warp *w, const Instruction *i, u64 value) {
    u64 *seen = w->seen[((u64)i / sizeof *i) % 8];
    w->is_idle = seen[0] == (u64)i && seen[1] == value;
    seen[0] = (u64)i, seen[1] = value;
}

static int load(Machine *m, Warp *w, const Instruction *i, u32 mask) {
    u64(*r)[LANES] = w->registers, all = 0;
    for (int lane = 0; lane < LANES; lane++) {
        if (!(mask >> lane & 1)) continue;
        Place place;
        u32 bytes = i->bytes * i->count;
        if (!find_place(m, w, i, r[i->s[0]][lane] + i->immediate, bytes, &place)) return 0;
        if (!visit(m, w, lane, i, &place, bytes, READS)) return 0;
        for (int part = 0; part < i->count; part++) {
            u64 value = read_value(place.at + part * i->bytes, i->bytes);
            if (i->is_signed) value = i->bytes == 1 ? (u64)(s8)value : i->bytes == 2 ? (u64)(s16)value : i->bytes == 4 ? (u64)(s32)value : value;
            all = all * 31 + value;
            if (i->d[part] >= 0) r[i->d[part]][lane] = value;
        }
    }
    if (i->strength && i->space == GLOBAL && mask) look(w, i, all);
    return 1;
}

static int store(Machine *m, Warp *w, const Instruction *i, u32 mask) {
    u64(*r)[LANES] = w->registers;
    for (int lane = 0; lane < LANES; lane++) {
        if (!(mask >> lane & 1)) continue;
        Place place;
        u32 bytes = i->bytes * i->count;
        if (!find_place(m, w, i, r[i->s[0]][lane] + i->immediate, bytes, &place)) return 0;
        u8 values[32];
        for (int part = 0; part < i->count; part++) memcpy(values + part * i->bytes, &r[i->s[1 + part]][lane], i->bytes);
        int changes = memcmp(place.at, values, bytes) != 0;
        /* the compiler has several threads write the same to shared memory, where they hold the same */
        int kind = WRITES | (i->space == SHARED && !changes ? SAME : 0);
        if (!visit(m, w, lane, i, &place, bytes, kind)) return 0;
        if (i->space == GLOBAL && changes) m->progress = m->steps;
        memcpy(place.at, values, bytes);
    }
    return 1;
}

static u64 combined(int kind, u64 old, u64 value, u64 swap, u32 bytes, int is_signed) {
    if (is_signed && bytes == 4) old = (u64)(s32)old, value = (u64)(s32)value;
    int less = is_signed ? (s64)value < (s64)old : value < old;
    switch (kind) {
    case ADD: return old + value;
    case OR: return old | value;
    case AND: return old & value;
    case XOR: return old ^ value;
    case MIN: return less ? value : old;
    case MAX: return less ? old : value;
    case CAS: return old == value ? swap : old;
    default: return value;
    }
}

static u64 truncated(u64 value, u32 bytes) { return bytes == 8 ? value : value & ((1ull << 8 * bytes) - 1); }

static int atom(Machine *m, Warp *w, const Instruction *i, u32 mask) {
    u64(*r)[LANES] = w->registers;
    int is_new = 0, first = below(m, LANES);
    u64 all = 0;
    for (int n = 0; n < LANES; n++) {
        int lane = (first + n) % LANES;
        if (!(mask >> lane & 1)) continue;
        Place place;
        if (!find_place(m, w, i, r[i->s[0]][lane] + i->immediate, i->bytes, &place)) return 0;
        if (!visit(m, w, lane, i, &place, i->bytes, READS | WRITES | ATOMIC)) return 0;
        u64 old = read_value(place.at, i->bytes), swap = i->s[2] >= 0 ? truncated(r[i->s[2]][lane], i->bytes) : 0;
        u64 value = truncated(combined(i->kind, old, truncated(r[i->s[1]][lane], i->bytes), swap, i->bytes, i->is_signed), i->bytes);
        memcpy(place.at, &value, i->bytes);
        is_new |= value != old;
        all = all * 31 + value;
        if (i->d[0] >= 0) r[i->d[0]][lane] = old;
    }
    if (is_new && i->space == GLOBAL) m->progress = m->steps;
    if (i->space == GLOBAL && mask) look(w, i, all);
    return 1;
}

/* ldmatrix and stmatrix, 8 rows of 16 bytes a matrix: a lane has one word of each. */
static int matrix(Machine *m, Warp *w, const Instruction *i, u32 mask) {
    u64(*r)[LANES] = w->registers;
    if (mask != ~0u) return fail(m, w, "not all lanes of the warp are here", mask);
    u64 found[4][LANES];
    for (int number = 0; number < i->count; number++)
        for (int lane = 0; lane < LANES; lane++) {
            Place place;
            u64 row = r[i->s[0]][number * 8 + lane / 4] + i->immediate;
            if (row % 16) return fail(m, w, "row of a matrix is not aligned", row);
            if (!find_place(m, w, i, row + lane % 4 * 4, 4, &place)) return 0;
            int same = i->op == STORE_MATRIX && memcmp(place.at, &r[i->s[1 + number]][lane], 4) == 0;
            int kind = i->op == LOAD_MATRIX ? READS : WRITES | (same ? SAME : 0);
            if (!visit(m, w, lane, i, &place, 4, kind)) return 0;
            if (i->op == LOAD_MATRIX)
                found[number][lane] = read_value(place.at, 4);
            else
                memcpy(place.at, &r[i->s[1 + number]][lane], 4);
        }
    if (i->op == LOAD_MATRIX)
        for (int number = 0; number < i->count; number++) memcpy(r[i->d[number]], found[number], sizeof found[number]);
    return 1;
}

/* ---- lanes of a warp exchange values ---- */

static int members(Machine *m, Warp *w, const Instruction *i, u32 mask) {
    u32 named = 0;
    for (int lane = 0; lane < LANES; lane++)
        if (mask >> lane & 1) named = (u32)w->registers[i->s[i->count - 1]][lane];
    return named == mask ? 1 : fail(m, w, "the lanes that are named are not those that are here", named ^ mask);
}

static int shuffle(Machine *m, Warp *w, const Instruction *i, u32 mask) {
    u64(*r)[LANES] = w->registers, found[LANES], is_inside[LANES];
    if (!members(m, w, i, mask)) return 0;
    memcpy(found, r[i->d[0]], sizeof found);
    if (i->d[1] >= 0) memcpy(is_inside, r[i->d[1]], sizeof is_inside);
    for (int lane = 0; lane < LANES; lane++) {
        if (!(mask >> lane & 1)) continue;
        int b = r[i->s[1]][lane] & 31, c = r[i->s[2]][lane] & 31, segment = r[i->s[2]][lane] >> 8 & 31;
        int most = (lane & segment) | (c & ~segment), least = lane & segment, from, inside;
        if (i->kind == UP) from = lane - b, inside = from >= most;
        else if (i->kind == DOWN) from = lane + b, inside = from <= most;
        else if (i->kind == BUTTERFLY) from = lane ^ b, inside = from <= most;
        else from = least | (b & ~segment), inside = from <= most;
        if (!inside) from = lane;
        if (!(mask >> from & 1)) return fail(m, w, "a value of a lane that is not here", from);
        found[lane] = (u32)r[i->s[0]][from];
        is_inside[lane] = inside;
    }
    memcpy(r[i->d[0]], found, sizeof found);
    if (i->d[1] >= 0) memcpy(r[i->d[1]], is_inside, sizeof is_inside);
    return 1;
}

static int reduce(Machine *m, Warp *w, const Instruction *i, u32 mask) {
    u64(*r)[LANES] = w->registers, all = 0;
    if (!members(m, w, i, mask)) return 0;
    int is_first = 1;
    for (int lane = 0; lane < LANES; lane++) {
        if (!(mask >> lane & 1)) continue;
        u64 value = truncated(r[i->s[0]][lane], 4);
        all = is_first ? value : truncated(combined(i->kind, all, value, 0, 4, i->is_signed), 4);
        is_first = 0;
    }
    for (int lane = 0; lane < LANES; lane++)
        if (mask >> lane & 1) r[i->d[0]][lane] = all;
    return 1;
}

enum { BALLOT, ANY, ALL };
static int vote(Machine *m, Warp *w, const Instruction *i, u32 mask) {
    u64(*r)[LANES] = w->registers;
    if (!members(m, w, i, mask)) return 0;
    u32 yes = 0;
    for (int lane = 0; lane < LANES; lane++)
        if (mask >> lane & 1 && (r[i->s[0]][lane] ^ i->immediate) & 1) yes |= 1u << lane;
    for (int lane = 0; lane < LANES; lane++)
        if (mask >> lane & 1) r[i->d[0]][lane] = i->kind == BALLOT ? yes : i->kind == ANY ? yes != 0 : yes == mask;
    return 1;
}

static int match(Machine *m, Warp *w, const Instruction *i, u32 mask) {
    u64(*r)[LANES] = w->registers, found[LANES];
    if (!members(m, w, i, mask)) return 0;
    for (int lane = 0; lane < LANES; lane++) {
        u32 same = 0;
        for (int other = 0; other < LANES; other++)
            if (mask >> other & 1 && truncated(r[i->s[0]][other], i->bytes) == truncated(r[i->s[0]][lane], i->bytes)) same |= 1u << other;
        found[lane] = mask >> lane & 1 ? same : r[i->d[0]][lane];
    }
    memcpy(r[i->d[0]], found, sizeof found);
    return 1;
}

static u64 special(Machine *m, const Warp *w, int kind, int lane) {
    const Launch *launch = w->program->launch;
    switch (kind) {
    case TID: return w->index * LANES + lane;
    case CTAID: return w->program->number;
    case NTID: return launch->num_warps * LANES;
    case NCTAID: return launch->grid;
    case LANEID: return lane;
    case NEVER: return 1ull << 40;
    default: return m->time += 1 + below(m, m->clock_step);
    }
}

/* ---- control ---- */

static void drop_ended_paths(Warp *w) {
    while (w->depth >= 0) {
        Path *top = &w->paths[w->depth];
        top->mask &= w->live;
        if (top->mask && top->pc != top->meets) return;
        w->depth--;
    }
}

static int branch(Machine *m, Warp *w, const Instruction *i, u32 taken) {
    Path *top = &w->paths[w->depth];
    u32 others = top->mask & ~taken;
    if (!others) top->pc = i->target;
    else if (!taken) top->pc++;
    else {
        Path sides[2] = {{i->target, i->meets, taken}, {top->pc + 1, i->meets, others}};
        int first = below(m, 2);
        if (top->meets == i->meets) w->depth--;
        else top->pc = i->meets;
        if (w->depth + 3 >= (int)(sizeof w->paths / sizeof *w->paths)) return fail(m, w, "lanes diverge too deeply", 0);
        w->paths[++w->depth] = sides[first];
        w->paths[++w->depth] = sides[1 - first];
    }
    drop_ended_paths(w);
    return 1;
}

static int barrier(Machine *m, Warp *w) {
    Program *p = w->program;
    if (w->paths[w->depth].mask != ~0u)
        return fail(m, w, "a barrier of the program where only some lanes of a warp are", w->paths[w->depth].mask);
    if (p->num_live != p->launch->num_warps) return fail(m, w, "a barrier for which a warp does not live long enough", p->num_live);
    w->paths[w->depth].pc++;
    drop_ended_paths(w);
    if (++p->num_waiting < p->num_live) {
        set_not_ready(m, w, WAITING);
        return 1;
    }
    meet(&m->races, p->knowledge);
    p->num_waiting = 0;
    for (int n = 0; n < p->launch->num_warps; n++)
        if (p->warps[n].state == WAITING) set_ready(m, &p->warps[n]);
    return 1;
}

static void end_launch(Machine *m, Launch *launch) {
    launch->is_done = 1;
    m->progress = m->steps;
    while (m->first_open < m->num_launches && m->launches[m->first_open].is_done) m->first_open++;
}

static void end_program(Machine *m, Program *p) {
    Launch *launch = p->launch;
    meet(&m->races, p->knowledge);
    join(launch->end->known, p->knowledge->known, m->races.num_components);
    join(launch->end->fenced, p->knowledge->fenced, m->races.num_components);
    free_knowledge(p->knowledge);
    if (p->cells)
        for (s64 b = 0; b < launch->kernel->shared_bytes; b++) free_readers(&m->races, &p->cells[b]);
    for (int n = 0; n < launch->num_warps; n++) free(p->warps[n].registers);
    free(p->warps), free(p->shared), free(p->cells), free(p);
    m->progress = m->steps;
    if (!launch->gang) m->residents[launch->rank]--;
    if (++launch->ended == launch->grid) {
        if (launch->gang) m->residents[launch->rank] -= launch->grid; /* its programs end together too */
        end_launch(m, launch);
    }
}

static int leave(Machine *m, Warp *w, u32 mask) {
    Program *p = w->program;
    w->live &= ~mask;
    w->paths[w->depth].pc++; /* of lanes whose guard is false */
    drop_ended_paths(w);
    if (w->live) return 1;
    set_not_ready(m, w, ENDED);
    if (p->num_waiting) return fail(m, &p->warps[0], "a warp ends while others wait for it at a barrier", 0);
    if (--p->num_live == 0) end_program(m, p);
    return 1;
}

/* One instruction of a warp: 0 failed, 1 go on, 2 others should have a turn, 3 the warp has stopped. */
static int step(Machine *m, Warp *w) {
    const Kernel *kernel = w->program->launch->kernel;
    Path *top = &w->paths[w->depth];
    if (top->pc < 0 || top->pc >= kernel->length) return fail(m, w, "left its code", top->pc);
    const Instruction *i = &kernel->code[top->pc];
    u64(*r)[LANES] = w->registers;
    u32 mask = top->mask;
    m->steps++;
    if (i->guard >= 0) {
        u32 chosen = 0;
        const u64 *guard = r[i->guard];
        EACH chosen |= (u32)(guard[l] & 1) << l;
        mask &= i->negated ? ~chosen : chosen;
    }
    if (i->op < BRANCH) {
        static const u64 nothing[LANES];
        const u64 *s[3];
        for (int n = 0; n < 3; n++) s[n] = i->s[n] >= 0 ? r[i->s[n]] : nothing;
        if (mask == ~0u && i->d[0] != i->s[0] && i->d[0] != i->s[1] && i->d[0] != i->s[2])
            operations[i->op].run(r[i->d[0]], s[0], s[1], s[2]);
        else if (mask) {
            u64 result[LANES], *d = r[i->d[0]];
            operations[i->op].run(result, s[0], s[1], s[2]);
            EACH d[l] = mask >> l & 1 ? result[l] : d[l];
        }
        top->pc++;
        if (top->pc == top->meets) drop_ended_paths(w);
        return 1;
    }
    int ok = 1, result = 1;
    switch (i->op) {
    case BRANCH: return branch(m, w, i, mask);
    case BARRIER: return mask == top->mask ? (barrier(m, w) ? (w->state == READY ? 2 : 3) : 0) : fail(m, w, "guarded barrier", mask);
    case WARP_BARRIER:
        if (w->program->launch->num_warps > 1) return fail(m, w, "bar.warp.sync in a program of several warps is not modelled", 0);
        if (mask != ~0u) return fail(m, w, "a barrier of the warp where only some lanes are", mask);
        meet(&m->races, w->program->knowledge);
        break;
    case RETURN: {
        Program *p = w->program;
        int is_last = p->num_live == 1 && w->live == mask;
        if (!leave(m, w, mask)) return 0;
        return is_last || w->state != READY ? 3 : 1;
    }
    case LOAD: ok = load(m, w, i, mask), result = i->space == GLOBAL ? 2 : 1; break;
    case STORE: ok = store(m, w, i, mask), result = i->space == GLOBAL ? 2 : 1; break;
    case ATOM: ok = atom(m, w, i, mask), result = 2; break;
    case LOAD_MATRIX:
    case STORE_MATRIX: ok = matrix(m, w, i, mask); break;
    case FENCE_ALIAS:
        for (int lane = 0; lane < LANES; lane++)
            if (mask >> lane & 1) fence(w->program->knowledge, w->index * LANES + lane);
        break;
    case FENCE:
        for (int lane = 0; lane < LANES; lane++)
            if (mask >> lane & 1) fence_scope(w->program->knowledge, w->index * LANES + lane, i->order, i->strength);
        break;
    case SHUFFLE: ok = !mask || shuffle(m, w, i, mask); break;
    case REDUCE: ok = !mask || reduce(m, w, i, mask); break;
    case VOTE: ok = !mask || vote(m, w, i, mask); break;
    case MATCH: ok = !mask || match(m, w, i, mask); break;
    case SPECIAL:
        for (int lane = 0; lane < LANES; lane++)
            if (mask >> lane & 1) r[i->d[0]][lane] = special(m, w, i->kind, lane);
        break;
    case PARAMETER: {
        u64 value = read_value(w->program->launch->param_bytes + i->immediate, i->bytes);
        EACH if (mask >> l & 1) r[i->d[0]][l] = value;
        break;
    }
    case PACK: {
        u64 packed[LANES];
        EACH {
            packed[l] = 0;
            for (int part = 0; part < i->count; part++)
                packed[l] |= truncated(r[i->s[part]][l], i->bytes) << 8 * i->bytes * part;
        }
        EACH if (mask >> l & 1) r[i->d[0]][l] = packed[l];
        break;
    }
    case UNPACK: {
        u64 value[LANES];
        memcpy(value, r[i->s[0]], sizeof value);
        for (int part = 0; part < i->count; part++)
            if (i->d[part] >= 0)
                EACH if (mask >> l & 1) r[i->d[part]][l] = truncated(value[l] >> 8 * i->bytes * part, i->bytes);
        break;
    }
    case SLEEP: result = 2; break;
    default: return fail(m, w, "an operation that the machine does not know", i->op);
    }
    if (!ok) return 0;
    top->pc++;
    if (top->pc == top->meets) drop_ended_paths(w);
    return result;
}

/* ---- what runs when ---- */

static int can_begin(const Machine *m, const Launch *launch) {
    for (s64 n = 0; n < launch->num_before; n++)
        if (!m->launches[launch->before[n]].is_done) return 0;
    return 1;
}

static void begin_launch(Machine *m, Launch *launch) {
    launch->start = new_clock(&m->races), launch->end = new_clock(&m->races);
    for (s64 n = 0; n < launch->num_before; n++) {
        if (!m->launches[launch->before[n]].end) continue;
        join(launch->start->known, m->launches[launch->before[n]].end->known, m->races.num_components);
        join(launch->start->fenced, m->launches[launch->before[n]].end->fenced, m->races.num_components);
    }
    join(launch->end->known, launch->start->known, m->races.num_components);
    join(launch->end->fenced, launch->start->fenced, m->races.num_components);
    launch->order = malloc((launch->grid + 1) * sizeof(s64));
    for (s64 n = 0; n < launch->grid; n++) launch->order[n] = m->order == 2 ? launch->grid - 1 - n : n;
    if (m->order == 0)
        for (s64 n = launch->grid - 1; n > 0; n--) {
            s64 other = below(m, n + 1), moved = launch->order[n];
            launch->order[n] = launch->order[other], launch->order[other] = moved;
        }
    if (launch->grid == 0) end_launch(m, launch);
}

static void start_program(Machine *m, Launch *launch) {
    Program *p = calloc(1, sizeof *p);
    const Kernel *kernel = launch->kernel;
    p->launch = launch;
    p->number = launch->order[launch->started++];
    p->num_live = launch->num_warps;
    p->knowledge = new_knowledge(&m->races, launch->first_component + p->number, launch->rank, launch->num_warps * LANES, launch->start);
    p->shared = malloc(kernel->shared_bytes + 1);
    p->cells = calloc(kernel->shared_bytes + 1, sizeof(Cell));
    for (s64 b = 0; b < kernel->shared_bytes; b++) p->shared[b] = next_random(m) >> 24;
    p->warps = calloc(launch->num_warps, sizeof(Warp));
    for (int n = 0; n < launch->num_warps; n++) {
        Warp *w = &p->warps[n];
        w->program = p, w->index = n, w->live = ~0u, w->depth = 0;
        w->paths[0] = (Path){0, -1, ~0u};
        w->registers = malloc(kernel->num_registers * sizeof *w->registers);
        memset(w->registers, 0xa5, kernel->num_registers * sizeof *w->registers);
        for (s64 c = 0; c < kernel->num_constants; c++)
            for (int lane = 0; lane < LANES; lane++) w->registers[kernel->first_constant + c][lane] = kernel->constants[c];
        set_ready(m, w);
    }
    m->residents[launch->rank]++;
    m->progress = m->steps;
}

/* Starts something that waits to start, chosen by chance; whether it has, or 2 for the host's turn. */
static int start_something(Machine *m) {
    Launch *chosen = NULL;
    u64 number = 0;
    for (s64 n = m->first_open; n < m->num_launches; n++) {
        Launch *launch = &m->launches[n];
        if (launch->is_done || (launch->start && launch->started == launch->grid && launch->kernel)) continue;
        if (!launch->start) {
            if (!can_begin(m, launch)) continue;
            begin_launch(m, launch);
            if (launch->is_done) continue;
        }
        s64 needed = launch->gang && !launch->started ? launch->grid : 1;
        if (launch->kernel && m->residents[launch->rank] + needed > m->resident) continue;
        if (below(m, ++number) == 0) chosen = launch;
    }
    if (!chosen) return 0;
    if (!chosen->kernel) {
        m->host = chosen - m->launches;
        return 2;
    }
    do start_program(m, chosen);
    while (chosen->gang && chosen->started < chosen->grid);
    return 1;
}

static Warp *choose_warp(Machine *m) {
    Warp *w = m->ready[below(m, m->num_ready)];
    for (int tries = 0; w->is_idle && tries < 12; tries++) w = m->ready[below(m, m->num_ready)];
    return w;
}

Machine *new_machine(s64 num_ranks, s64 resident, u64 seed, s64 quantum, s64 order, s64 stuck_after, s64 checks_races) {
    Machine *m = calloc(1, sizeof *m);
    m->num_ranks = num_ranks, m->resident = resident, m->quantum = quantum, m->stuck_after = stuck_after;
    m->residents = calloc(num_ranks, sizeof(s64));
    m->random = seed * 0x9E3779B97F4A7C15u + 0x123456789;
    for (int n = 0; n < 8; n++) next_random(m);
    m->clock_step = 8, m->order = order, m->checks_races = checks_races;
    m->races.num_programs = 1; /* 0 is nobody */
    begin(&m->races, 0);
    return m;
}

void free_machine(Machine *m) {
    for (s64 n = 0; n < m->num_launches; n++) {
        Launch *launch = &m->launches[n];
        forget(launch->start), forget(launch->end);
        free(launch->before), free(launch->order), free(launch->param_bytes);
    }
    Races *races = &m->races;
    for (u32 n = 0; n < races->room_flags; n++) {
        for (int i = 0; i < races->flags[n].number; i++) forget(races->flags[n].releases[i].clock);
        free(races->flags[n].releases);
    }
    free(races->rank_of), free(races->first_thread), free(races->others), free(races->readers);
    free(races->flags), free(races->reports), free(m->memory.regions), free(m->launches);
    free(m->ready), free(m->residents), free(m);
}

/* Work of so many programs is added next; the first of them. All that was added before has ended. */
s64 begin_work(Machine *m, s64 num_programs) {
    for (s64 n = 0; n < m->num_launches; n++) {
        Launch *launch = &m->launches[n];
        forget(launch->start), forget(launch->end);
        launch->start = launch->end = NULL;
    }
    begin(&m->races, num_programs);
    return m->races.floor;
}

Cell *new_cells(u64 number) { return calloc(number, sizeof(Cell)); }
void free_cells(Cell *cells) { free(cells); }

s64 add_memory(Machine *m, u64 start, u64 size, Cell *cells, u32 shift, u32 alias, s64 rank) {
    return add_region(&m->memory, (Region){start, size, cells, shift, alias, rank});
}

s64 add_launch(Machine *m, const Kernel *kernel, s64 rank, s64 grid, s64 num_warps, const u8 *params, s64 num_params, s64 gang,
               const s64 *before, s64 num_before, s64 first_component) {
    if (m->num_launches == m->room_launches) {
        s64 room = m->room_launches * 2 + 64;
        Launch *moved = malloc(room * sizeof *moved); /* programs point to theirs, so add before running */
        if (m->num_launches) memcpy(moved, m->launches, m->num_launches * sizeof *moved);
        free(m->launches);
        m->launches = moved, m->room_launches = room;
    }
    Launch *launch = &m->launches[m->num_launches];
    *launch = (Launch){.kernel = kernel, .rank = rank, .grid = grid, .num_warps = num_warps, .gang = gang,
                       .num_before = num_before, .first_component = first_component};
    launch->before = malloc((num_before + 1) * sizeof(s64));
    memcpy(launch->before, before, num_before * sizeof(s64));
    launch->param_bytes = malloc(num_params + 1);
    memcpy(launch->param_bytes, params, num_params);
    return m->num_launches++;
}

/* What the host reads or writes within its turn, at system scope if `strength` says so. */
s64 host_access(Machine *m, u64 address, u64 size, s64 kind, s64 strength, s64 site) {
    Launch *launch = &m->launches[m->host];
    const Region *region = region_of(&m->memory, address, size, launch->rank);
    if (!region) return 0;
    Knowledge *me = new_knowledge(&m->races, launch->first_component, launch->rank, 1, launch->start);
    for (u64 at = 0; at < size; at += 1u << region->shift) {
        Access access = {me->component, 1, 1, site, 0, region->alias, strength, kind, 1u << region->shift, 0};
        note_cells(&m->races, me, region->cells, address - region->start + at, region->shift, &access, address + at);
        if (kind & WRITES) release(&m->races, me, 0, &region->cells[(address - region->start + at) >> region->shift], 0, 0, 0);
    }
    free_knowledge(me);
    return 1;
}

void end_host(Machine *m) {
    Launch *launch = &m->launches[m->host];
    u32 own = launch->first_component - m->races.floor;
    launch->end->known[own] = ~0u;
    m->races.rank_of[own] = launch->rank;
    launch->ended = 1;
    end_launch(m, launch);
}

s64 run(Machine *m, u64 most) {
    u64 until = m->steps + most;
    while (m->steps < until) {
        int is_full = m->num_ready && below(m, 4);
        if (!is_full) {
            int started = start_something(m);
            if (started == 2) return HOST;
            if (!started && !m->num_ready) {
                if (m->first_open == m->num_launches) return FINISHED;
                return STUCK;
            }
            if (!m->num_ready) continue;
        }
        if (m->steps - m->progress > m->stuck_after) return STUCK;
        Warp *w = choose_warp(m);
        u64 yields = m->quantum > 1 ? 1 + below(m, m->quantum) : 1;
        for (int result = 1; result != 3;) {
            result = step(m, w);
            if (!result) return FAILED;
            if (result == 2 && --yields == 0) break;
            if (m->steps - m->progress > m->stuck_after) break;
        }
        m->time++;
    }
    return PAUSED;
}

const char *error_of(const Machine *m) { return m->error; }
u64 steps_of(const Machine *m) { return m->steps; }
s64 host_turn(const Machine *m) { return m->host; }
s64 num_reports(const Machine *m) { return m->races.num_reports; }
const Report *reports_of(const Machine *m) { return m->races.reports; }
void set_clock(Machine *m, s64 step) { m->clock_step = step; }
s64 num_operations(void) { return sizeof operations / sizeof *operations; }
const char *operation_name(s64 number) { return operations[number].name; }
const char *special_opcodes(void) { return machine_opcodes; }

/* Where the warps that have not ended are: site, rank, program, warp, state of each. */
s64 where(const Machine *m, s64 (*found)[4], s64 most) {
    s64 number = 0;
    for (int n = 0; n < m->num_ready && number < most; n++) {
        const Warp *w = m->ready[n];
        const Launch *launch = w->program->launch;
        found[number][0] = launch->kernel->site + w->paths[w->depth].pc, found[number][1] = launch->rank;
        found[number][2] = w->program->number, found[number++][3] = w->index;
    }
    return number;
}
