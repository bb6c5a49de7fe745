/* A warp accesses memory: loads, stores, atomic operations and matrices. */

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
