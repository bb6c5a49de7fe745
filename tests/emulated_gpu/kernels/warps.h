/* A warp's way through its code: branches, barriers, the end, and every instruction between. */

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
    for (int n = 0; n < launch->num_warps; n++) {
        if (p->warps[n].steps > launch->longest) launch->longest = p->warps[n].steps;
        free(p->warps[n].registers);
    }
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

/* A rank's device does nothing from now on, as after a trap on a GPU; its launches count as done. */
static void stop_rank(Machine *m, s64 rank) {
    m->has_stopped[rank] = 1;
    for (int n = 0; n < m->num_ready;) {
        Program *p = m->ready[n]->program;
        if (p->launch->rank != rank) {
            n++;
            continue;
        }
        for (int w = 0; w < p->launch->num_warps; w++)
            if (p->warps[w].state == READY) set_not_ready(m, &p->warps[w], ENDED);
        end_program(m, p);
        n = 0;
    }
    for (s64 n = m->first_open; n < m->num_launches; n++)
        if (m->launches[n].rank == rank && !m->launches[n].is_done) end_launch(m, &m->launches[n]);
}

/* One instruction of a warp: 0 failed, 1 go on, 2 others should have a turn, 3 the warp has stopped. */
static int step(Machine *m, Warp *w) {
    const Kernel *kernel = w->program->launch->kernel;
    Path *top = &w->paths[w->depth];
    if (top->pc < 0 || top->pc >= kernel->length) return fail(m, w, "left its code", top->pc);
    const Instruction *i = &kernel->code[top->pc];
    u64(*r)[LANES] = w->registers;
    u32 mask = top->mask;
    m->steps++, w->steps++;
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
    case TRAP:
        if (!mask) break;
        stop_rank(m, w->program->launch->rank);
        return 3;
    default: return fail(m, w, "an operation that the machine does not know", i->op);
    }
    if (!ok) return 0;
    top->pc++;
    if (top->pc == top->meets) drop_ended_paths(w);
    return result;
}
