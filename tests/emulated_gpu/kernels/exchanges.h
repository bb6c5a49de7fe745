/* Lanes of a warp exchange values. */

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
