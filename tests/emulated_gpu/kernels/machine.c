/* A machine that executes compiled PTX: warps of programs of several ranks, one step at a time.

   Python (machine.py) decodes kernels, registers memory and adds launches; this file executes. All
   choices are taken from one random number generator, so a seed gives the same run again. */

#include "machine.h"
#include "accesses.h"
#include "exchanges.h"
#include "warps.h"

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
        if (m->has_stopped[launch->rank] && !launch->is_done) end_launch(m, launch);
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
    for (int tries = 0; w->is_idle && tries < 12 && tries < m->num_ready; tries++) w = m->ready[below(m, m->num_ready)];
    return w;
}

Machine *new_machine(s64 num_ranks, s64 resident, u64 seed, s64 quantum, s64 order, s64 stuck_after, s64 checks_races) {
    Machine *m = calloc(1, sizeof *m);
    m->num_ranks = num_ranks, m->resident = resident, m->quantum = quantum, m->stuck_after = stuck_after;
    m->residents = calloc(num_ranks, sizeof(s64)), m->has_stopped = calloc(num_ranks, sizeof(s64));
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
    free(m->ready), free(m->residents), free(m->has_stopped), free(m);
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
s64 has_stopped(const Machine *m, s64 rank) { return m->has_stopped[rank]; }
u64 steps_of(const Machine *m) { return m->steps; }
u64 longest_of(const Machine *m, s64 launch) { return m->launches[launch].longest; }
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
