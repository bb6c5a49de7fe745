/* Memory of several ranks, at its own addresses, and shared memory of programs.

   Global memory is that of this process: a region is a range of addresses that one rank may use.
   Regions with the same cells are the same memory mapped several times. */

typedef struct {
    u64 start, size;
    Cell *cells;
    u32 shift;      /* a cell has 1 << shift bytes */
    u16 alias;
    s32 rank;       /* whose addresses these are; -1 everybody's */
} Region;

typedef struct {
    Region *regions; /* sorted by start; those of several ranks do not overlap */
    int number;
} Memory;

static int add_region(Memory *memory, Region added) {
    int at = memory->number;
    while (at && memory->regions[at - 1].start > added.start) at--;
    if (at && memory->regions[at - 1].start + memory->regions[at - 1].size > added.start) return 0;
    if (at < memory->number && added.start + added.size > memory->regions[at].start) return 0;
    memory->regions = realloc(memory->regions, (memory->number + 1) * sizeof(Region));
    memmove(memory->regions + at + 1, memory->regions + at, (memory->number - at) * sizeof(Region));
    memory->regions[at] = added;
    memory->number++;
    return 1;
}

static const Region *region_of(const Memory *memory, u64 address, u32 bytes, s32 rank) {
    int low = 0, high = memory->number;
    while (low < high) {
        int middle = (low + high) / 2;
        if (memory->regions[middle].start <= address)
            low = middle + 1;
        else
            high = middle;
    }
    if (!low) return NULL;
    const Region *found = &memory->regions[low - 1];
    if (address + bytes > found->start + found->size) return NULL;
    return rank < 0 || found->rank < 0 || found->rank == rank ? found : NULL;
}

static u64 read_value(const void *from, u32 bytes) {
    u64 value = 0;
    memcpy(&value, from, bytes);
    return value;
}

/* Notes an access to every cell that it touches. */
static void note_cells(Races *races, const Knowledge *me, Cell *cells, u64 offset, u32 shift, const Access *access, u64 address) {
    for (u64 i = offset >> shift; i <= (offset + access->bytes - 1) >> shift; i++)
        note(races, me, &cells[i], access, address);
}
