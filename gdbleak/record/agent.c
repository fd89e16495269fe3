/* The agent: what records inside the target, with no tracer attached. Freestanding, x86-64, no libc, no TLS.
 *
 * The first bytes of malloc and its kin become jumps to the hook_* below; each goes on in a room (real_*) where the
 * tool puts the displaced instructions. Data that the tool writes or reads has a symbol of its own.
 *
 * Sampling. Every thread counts down to the next sample, in bytes or calls; the distance is drawn from an exponential
 * distribution of a known mean, so that a request is taken with probability 1 - exp(-amount / mean), whatever the
 * program's rhythm. That distribution has no memory: a counter whose state is in doubt is drawn anew at any time, as
 * when two threads share one. A taken block gets a slot (who, how much, registers, a copy of the stack) and an entry in the
 * table of live samples. free() of such a block gives both back: what is in the table at the end was not released.
 *
 * Nothing here waits for another thread, so a signal handler, a fork or a stop at any instruction is harmless. Only a
 * full ring of mapping calls makes a thread sleep, for a while, and one that sets up seccomp lets others end their calls.
 */
typedef unsigned long u64;
typedef unsigned u32;
typedef unsigned char u8;

#define SHARED __attribute__((visibility("hidden"), used))
#define SHARED_TEXT __attribute__((visibility("hidden")))
#ifndef CELLS
#define CELLS 1024          /* counters, one a cache line; a power of 2 */
#endif
#define CELLS_FACTOR -0x61c88647    /* a thread's id times that has well mixed bits on top: they choose its cell */
#define CELLS_SHIFT 42
#define CELLS_MASK ((CELLS - 1) * 64)
#define TEXT(x) TEXT_(x)
#define TEXT_(x) #x
#define FILTER_BITS 16
#define WAYS 8              /* entries of a bucket of the table: one cache line */
#define PARKED (1UL << 40)  /* nothing is due for long */
#define MOST_WAITS 20000    /* milliseconds, of all threads together */
#define MOST_LOOKS 5000000  /* at the threads in a call, of all threads together: some tenths of a second */
#define LARGEST (1UL << 47) /* request that may succeed */
#define WIDEST (1UL << 40)  /* mean distance */
#define POINT 16            /* bits behind the point of a slot's distance */

enum { PASSIVE, SAMPLING, FREES_ONLY, QUIET };  /* QUIET: as FREES_ONLY, since the program has set up seccomp */
enum { MMAP = 1, MUNMAP, MREMAP, BRK };

struct cell { u64 left, owner, mean, random, unused[4]; };  /* owner: the id of the thread that counts down here */

/* The callee-saved registers and the stack at the entry of a hooked function. */
struct frame { u64 r15, r14, r13, r12, rbx, rbp, return_address; };

/* A record: 128 bytes, then `stack_size` bytes of stack from the return address on. */
struct slot {
    u64 pointer, size;              /* the block, and what was asked for; of a mapping: the call's result */
    u64 mean, distance;             /* the mean it was taken by, and how far into the request it was due; with POINT */
    u64 before, after;              /* of a mapping call: the agent's clock */
    u64 return_address, sp, rbp, rbx, r12, r13, r14, r15;
    u32 stack_length, next, kind, ready;
};

SHARED volatile u32 state;
SHARED u64 size_mask, unit;     /* amount of a request: (size & size_mask) + unit */
SHARED u64 mean = 1, least_mean = 1;    /* the mean distance now, and the smallest it may become */
SHARED u64 quantum_target;      /* samples per quantum (2^24 ticks) above which the mean doubles; 0: it is fixed */
SHARED struct slot *slots;
SHARED u64 slot_bytes, slot_count, stack_bytes;
SHARED u64 *table, table_mask;  /* buckets - 1 */
SHARED u64 internal[64];        /* pairs: code from where a call is the allocator's own */
SHARED u64 taken, released, thinned, missed, dropped;   /* samples; of a ring: `taken` counts the records */
SHARED u64 pid;                 /* the process's own, of a ring */
SHARED u64 clock, ring_tail, waits;     /* waits: for room in the ring, since the reader was last there */
SHARED volatile u64 in_flight;  /* threads in a hook */
SHARED struct cell cells[CELLS] __attribute__((aligned(64)));
SHARED u8 filter[1 << FILTER_BITS] __attribute__((aligned(64)));

SHARED u64 lua_room, lua_current, lua_base, lua_bottom, lua_width;  /* bytes of a slot for a Lua stack; 0: none */

static u64 free_slots;          /* a stack: version << 32 | index + 1 */
static u64 fresh_slots;         /* never used yet: from here on */
static u64 quantum, taken_in_quantum;
static u32 thinning;            /* a thread is at it */
static u64 calling;             /* threads that may be in a system call of ours */
static u64 looks;               /* at those */

/* The real function: its displaced instructions, and a jump to the others. */
#define REAL(name, ...) ({ extern char real_##name[] SHARED_TEXT; ((u64 (*)(u64, ...))real_##name)(__VA_ARGS__); })
#define ARGUMENTS u64 a, u64 b, u64 c, u64 d, u64 e, u64 f, struct frame *frame
#define UNUSED (void)a, (void)b, (void)c, (void)d, (void)e, (void)f, (void)frame

/* ---- system ---------------------------------------------------------------------------------------------------- */

static inline u64 thread_id(void)
{
    u64 id;
    __asm__ volatile("mov %%fs:0, %0" : "=r"(id));
    return id;
}

static inline u64 ticks(void)
{
    u32 low, high;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    return (u64)high << 32 | low;
}

static u64 call(u64 number, u64 a, u64 b, u64 c, u64 d, u64 e, u64 f)
{
    register u64 r10 __asm__("r10") = d;
    register u64 r8 __asm__("r8") = e;
    register u64 r9 __asm__("r9") = f;
    __asm__ volatile("syscall" : "+a"(number) : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return number;
}

struct piece { u64 base, length; };

/* Copy up to `length` bytes from `from`, as far as there is memory: the kernel copies, so that no fault can happen. */
static u32 copy(u64 to, u64 from, u64 length)
{
    enum { PIECES = 24 };
    struct piece local = { to, length }, remote[PIECES];
    u64 count = 0, at = from, end = from + length;
    while (at < end && count < PIECES) {
        u64 next = (at & ~4095UL) + 4096;
        if (next > end)
            next = end;
        remote[count].base = at;
        remote[count++].length = next - at;
        at = next;
    }
    u64 got = call(310, call(39, 0, 0, 0, 0, 0, 0), (u64)&local, 1, (u64)remote, count, 0);
    return got > length ? 0 : (u32)got;
}

#define LOAD(p) __atomic_load_n(p, __ATOMIC_RELAXED)
#define ADD(p, n) __atomic_fetch_add(p, n, __ATOMIC_RELAXED)
#define SWAP(p, old, new) __atomic_compare_exchange_n(p, old, new, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)

/* ---- when the next sample is due ------------------------------------------------------------------------------- */

static u64 next_random(struct cell *cell)
{
    u64 x = cell->random ? cell->random : (thread_id() ^ ticks()) * 0x9e3779b97f4a7c15UL | 1;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    cell->random = x;
    return x * 0x2545f4914f6cdd1dUL | 1;
}

/* From the exponential distribution of mean 1: -ln(u), u uniform in (0, 1); 20 bits behind the point. The logarithm's
 * bits come from squaring the mantissa. */
static u64 variate(struct cell *cell)
{
    u64 u = next_random(cell);
    int zeros = __builtin_clzl(u);
    u64 mantissa = u << zeros, fraction = 0;                        /* in [1, 2), 63 bits after the point */
    for (int bit = 0; bit < 20; bit++) {
        unsigned __int128 square = (unsigned __int128)mantissa * mantissa >> 63;
        fraction <<= 1;
        if (square >> 64) {
            fraction |= 1;
            square >>= 1;
        }
        mantissa = (u64)square;
    }
    u64 minus_log2 = ((u64)(zeros + 1) << 20) - fraction;
    return minus_log2 * 726817UL >> 20;                             /* ln 2 = 726817 / 2^20 */
}

/* To the next sample: a distance from the distribution of that mean, rounded up. */
static u64 distance(struct cell *cell, u64 from_mean)
{
    return (u64)((unsigned __int128)from_mean * variate(cell) >> 20) + 1;
}

/* What rounding up left of a distance, POINT bits: it does not depend on the rest. By a large mean it is uniform. */
static u64 fraction(struct cell *cell, u64 from_mean)
{
    u64 random = from_mean < 1 << 10 ? from_mean * variate(cell) >> (20 - POINT) : next_random(cell) >> 32;
    return random & ((1 << POINT) - 1);
}

static struct cell *own_cell(void)
{
    return (struct cell *)((u8 *)cells + (thread_id() * CELLS_FACTOR >> CELLS_SHIFT & CELLS_MASK));
}

/* The mean for the next sample: smaller when few are taken. */
static u64 adapted_mean(void)
{
    u64 now = ticks() >> 24, before = mean;
    if (quantum_target && now != quantum) {
        if (taken_in_quantum < quantum_target / 4 && before / 2 >= least_mean)
            mean = before / 2;
        quantum = now;
        taken_in_quantum = 0;
    }
    return mean;
}

/* One was taken: the mean is larger when too many are. */
static void count_for_mean(void)
{
    u64 before = mean;
    if (quantum_target && ++taken_in_quantum > quantum_target && before < WIDEST) {
        mean = before * 2;
        taken_in_quantum = 0;
    }
}

struct sample { u64 mean, distance; };      /* as in a slot; mean 0: it is not taken */

/* Whether a request of that amount is taken. `counted`: its amount has been taken off the cell already. */
static struct sample due(u64 amount, int counted)
{
    struct sample none = { 0, 0 }, due;
    struct cell *cell = own_cell();
    int is_own = cell->owner == thread_id();
    cell->owner = thread_id();
    if (amount > LARGEST) {
        cell->left += counted && is_own ? amount : 0;
        return none;
    }
    if (state != SAMPLING) {
        cell->left = PARKED;
        cell->owner = state == QUIET ? 0 : thread_id();             /* that may end */
        return none;
    }
    due.mean = cell->mean;
    due.distance = cell->left + (counted ? amount : 0);
    if (!is_own || (long)due.distance <= 0 || counted && due.distance > amount) {
        due.mean = cell->mean = mean;
        due.distance = distance(cell, due.mean);
    }
    if (due.distance > amount) {
        cell->left = due.distance - amount;
        return none;
    }
    due.distance = (due.distance - 1 << POINT) + fraction(cell, due.mean);
    cell->mean = adapted_mean();
    cell->left = distance(cell, cell->mean);
    return due;
}

static u64 amount_of(u64 size)
{
    return (size & size_mask) + unit;
}

static int is_internal(u64 address)
{
    for (u64 *range = internal; *range; range += 2)
        if (address >= range[0] && address < range[1])
            return 1;
    return 0;
}

/* ---- slots and the table of live samples ----------------------------------------------------------------------- */

static struct slot *slot_at(u64 index)
{
    return (struct slot *)((u8 *)slots + index * slot_bytes);
}

/* An unused slot's index, or -1. */
static u64 take_slot(void)
{
    u64 head = LOAD(&free_slots);
    while ((u32)head) {
        u64 index = (u32)head - 1;
        u64 next = (head >> 32) + 1 << 32 | slot_at(index)->next;
        if (SWAP(&free_slots, &head, next))
            return index;
    }
    u64 index = LOAD(&fresh_slots);
    do
        if (index >= slot_count)
            return -1UL;
    while (!SWAP(&fresh_slots, &index, index + 1));
    return index;
}

static void give_slot(u64 index)
{
    u64 head = LOAD(&free_slots);
    do
        slot_at(index)->next = (u32)head;
    while (!SWAP(&free_slots, &head, (head >> 32) + 1 << 32 | (index + 1)));
}

static u8 *filter_of(u64 pointer)
{
    return filter + (pointer >> 4 & ((1 << FILTER_BITS) - 1));
}

/* 255 sticks: it no longer counts. */
static void count_in_filter(u64 pointer, int by)
{
    u8 *byte = filter_of(pointer), now = LOAD(byte);
    do
        if (now == 255)
            return;
    while (!SWAP(byte, &now, (u8)(now + by)));
}

static u64 *bucket(u64 pointer, int which)
{
    u64 mixed = (pointer >> 4) * (which ? 0xd6e8feb86659fd93UL : 0x9e3779b97f4a7c15UL) >> 32;
    return table + (mixed & table_mask) * WAYS;
}

/* Entries: pointer / 16 << 20 | slot index + 1. */
static int insert(u64 pointer, u64 index)
{
    u64 entry = pointer >> 4 << 20 | (index + 1);
    count_in_filter(pointer, 1);
    for (int which = 0; which < 2; which++)
        for (u64 *at = bucket(pointer, which), *end = at + WAYS; at < end; at++) {
            u64 empty = 0;
            if (!LOAD(at) && SWAP(at, &empty, entry))
                return 1;
        }
    count_in_filter(pointer, -1);
    return 0;
}

/* Take a pointer out of the table: its slot's index, or -1. */
static u64 take_out(u64 pointer)
{
    if (!LOAD(filter_of(pointer)))
        return -1UL;
    for (int which = 0; which < 2; which++)
        for (u64 *at = bucket(pointer, which), *end = at + WAYS; at < end; at++) {
            u64 entry = LOAD(at);
            if (entry && entry >> 20 == pointer >> 4 && SWAP(at, &entry, 0)) {
                count_in_filter(pointer, -1);
                return (entry & 0xfffff) - 1;
            }
        }
    return -1UL;
}

/* A copy of the running coroutine's stack, at the end of the slot. All is read by the kernel: the VM may be gone. */
static void fill_lua(struct slot *slot)
{
    u64 *to = (u64 *)((u8 *)slot + slot_bytes - lua_room);          /* thread, base, bottom, length; the stack */
    to[0] = to[1] = to[2] = to[3] = 0;
    if (copy((u64)&to[0], lua_current, lua_width) != lua_width || !to[0]
        || copy((u64)&to[1], to[0] + lua_base, lua_width) != lua_width
        || copy((u64)&to[2], to[0] + lua_bottom, lua_width) != lua_width || to[1] <= to[2]) {
        to[1] = 0;
        return;
    }
    u64 length = to[1] - to[2], most = lua_room - 32;
    if (length > most)
        length = most;
    to[3] = copy((u64)&to[4], to[1] - length, length) == length ? length : 0;
}

static void fill(struct slot *slot, struct frame *frame)
{
    if (lua_room)
        fill_lua(slot);
    slot->return_address = frame->return_address;
    slot->sp = (u64)&frame->return_address;
    slot->rbp = frame->rbp, slot->rbx = frame->rbx;
    slot->r12 = frame->r12, slot->r13 = frame->r13, slot->r14 = frame->r14, slot->r15 = frame->r15;
    slot->stack_length = copy((u64)(slot + 1), slot->sp, stack_bytes);
}

/* a * b / c, or the largest number. */
static u64 scaled(u64 a, u64 b, u64 c)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    u64 high = product >> 64, quotient, rest;
    if (high >= c)
        return -1UL;
    __asm__("divq %4" : "=a"(quotient), "=d"(rest) : "a"((u64)product), "d"(high), "r"(c) : "cc");
    return quotient;
}

/* Three quarters of the slots are in use: double the mean and keep the samples that would have been due by it, too.
 * The distance of a sample is its mean times an exponential variate of mean 1, so it grows with the mean. */
static void thin(void)
{
    u32 idle = 0;
    if (LOAD(&taken) - LOAD(&released) - LOAD(&thinned) < slot_count / 4 * 3 || !SWAP(&thinning, &idle, 1))
        return;
    u64 wider = mean < WIDEST ? mean * 2 : mean;
    mean = least_mean = wider;
    for (u64 *at = table, *end = table + (table_mask + 1) * WAYS; at < end; at++) {
        u64 entry = LOAD(at);
        if (!entry)
            continue;
        struct slot *slot = slot_at((entry & 0xfffff) - 1);
        u64 pointer = slot->pointer;
        if (slot->mean >= wider)
            continue;
        u64 further = scaled(slot->distance, wider, slot->mean);
        if (further < amount_of(slot->size) << POINT) {
            slot->distance = further;
            slot->mean = wider;
        } else if (SWAP(at, &entry, 0)) {
            count_in_filter(pointer, -1);
            give_slot((entry & 0xfffff) - 1);
            ADD(&thinned, 1);
        }
    }
    thinning = 0;
}

/* From here to end_calls() the thread may make system calls of ours: if it may. */
static int begin_calls(void)
{
    ADD(&calling, 1);
    if (state == SAMPLING)
        return 1;
    ADD(&calling, -1UL);
    return 0;
}

static void end_calls(void)
{
    ADD(&calling, -1UL);
}

static void keep(u64 pointer, u64 size, struct sample by, struct frame *frame)
{
    thin();
    count_for_mean();
    u64 index = pointer >> 48 ? -1UL : take_slot();
    if (index == -1UL) {
        ADD(&dropped, 1);
        return;
    }
    struct slot *slot = slot_at(index);
    slot->pointer = pointer, slot->size = size, slot->mean = by.mean, slot->distance = by.distance;
    fill(slot, frame);
    u64 stale = take_out(pointer);                                  /* its free was not seen */
    if (stale != -1UL) {
        ADD(&missed, 1);
        ADD(&released, 1);
        give_slot(stale);
    }
    if (insert(pointer, index)) {
        ADD(&taken, 1);
    } else {
        ADD(&dropped, 1);
        give_slot(index);
    }
}

static void record(u64 pointer, u64 size, struct sample by, struct frame *frame)
{
    if (begin_calls()) {
        keep(pointer, size, by, frame);
        end_calls();
    }
}

/* ---- allocation and release ------------------------------------------------------------------------------------ */

#define ENTER ADD(&in_flight, 1)
#define LEAVE ADD(&in_flight, -1UL)

/* A function that returns the address of a new block of `size` bytes, which the real one of `real` makes. */
#define ALLOCATES_BY(name, real, size, counted, ...)                                                            \
    SHARED u64 agent_##name(ARGUMENTS)                                                                          \
    {                                                                                                           \
        UNUSED;                                                                                                 \
        ENTER;                                                                                                  \
        struct sample by = due(amount_of(size), counted);                                                       \
        u64 pointer = REAL(real, __VA_ARGS__);                                                                  \
        if (by.mean && pointer && !is_internal(frame->return_address))                                          \
            record(pointer, size, by, frame);                                                                   \
        LEAVE;                                                                                                  \
        return pointer;                                                                                         \
    }
#define ALLOCATES(name, size, counted, ...) ALLOCATES_BY(name, name, size, counted, __VA_ARGS__)

ALLOCATES(malloc, a, 1, a)
ALLOCATES(calloc, a * b, 1, a, b)
ALLOCATES(memalign, b, 0, a, b)
ALLOCATES(aligned_alloc, b, 0, a, b)
ALLOCATES(valloc, a, 0, a)
ALLOCATES(pvalloc, a, 0, a)
ALLOCATES(create, a, 1, a, b)
ALLOCATES(mallocx, a, 1, a, b)
ALLOCATES(new_nothrow, a, 1, a, b)
ALLOCATES(new_array_nothrow, a, 1, a, b)
ALLOCATES(new_aligned_nothrow, a, 1, a, b, c)
ALLOCATES(new_array_aligned_nothrow, a, 1, a, b, c)

/* An exception cannot pass a frame of ours: the operator that throws none does the work. If it fails, the one that may
 * throw runs in our place (COUNTED_OR_REAL). */
ALLOCATES_BY(new, new_nothrow, a, 1, a, b)
ALLOCATES_BY(new_array, new_array_nothrow, a, 1, a, b)
ALLOCATES_BY(new_aligned, new_aligned_nothrow, a, 1, a, b, c)
ALLOCATES_BY(new_array_aligned, new_array_aligned_nothrow, a, 1, a, b, c)

SHARED u64 agent_posix_memalign(ARGUMENTS)
{
    UNUSED;
    ENTER;
    struct sample by = due(amount_of(c), 0);
    u64 error = REAL(posix_memalign, a, b, c);
    if (by.mean && !(u32)error && *(u64 *)a && !is_internal(frame->return_address))
        record(*(u64 *)a, c, by, frame);
    LEAVE;
    return error;
}

#define REALLOCATES(name)                                                                                       \
    SHARED u64 agent_##name(ARGUMENTS)                                                                          \
    {                                                                                                           \
        UNUSED;                                                                                                 \
        ENTER;                                                                                                  \
        struct sample by = due(amount_of(b), 0);                                                                \
        /* first: another thread may get that address */                                                        \
        u64 before = a && state != PASSIVE ? take_out(a) : -1UL;                                                \
        u64 pointer = REAL(name, a, b, c);                                                                      \
        if (before != -1UL) {                                                                                   \
            if ((pointer || !b) || !insert(a, before)) {                                                        \
                ADD(&released, 1);                                                                              \
                give_slot(before);                                                                              \
            }                                                                                                   \
        }                                                                                                       \
        if (by.mean && pointer && !is_internal(frame->return_address))                                          \
            record(pointer, b, by, frame);                                                                      \
        LEAVE;                                                                                                  \
        return pointer;                                                                                         \
    }

REALLOCATES(realloc)
REALLOCATES(rallocx)

SHARED u64 agent_free(ARGUMENTS)
{
    UNUSED;
    ENTER;
    u64 index = state != PASSIVE ? take_out(a) : -1UL;
    if (index != -1UL) {
        ADD(&released, 1);
        give_slot(index);
    }
    LEAVE;
    return 0;
}

/* ---- mappings: every call, into a ring ------------------------------------------------------------------------- */

static void note(u32 kind, u64 before, u64 result, ARGUMENTS)
{
    u64 head = LOAD(&taken);
    do
        while (head - LOAD(&ring_tail) >= slot_count) {             /* full: wait, but not for a reader that died */
            u64 millisecond[2] = { 0, 1000000 };
            if (state != SAMPLING || call(39, 0, 0, 0, 0, 0, 0) != pid)     /* nobody reads what a child has copied */
                return;
            if (ADD(&waits, 1) > MOST_WAITS) {
                ADD(&dropped, 1);
                return;
            }
            call(35, (u64)millisecond, 0, 0, 0, 0, 0);
            head = LOAD(&taken);
        }
    while (!SWAP(&taken, &head, head + 1));
    struct slot *slot = slot_at(head % slot_count);
    slot->kind = kind;
    slot->pointer = result;
    slot->before = before;
    slot->after = ADD(&clock, 1);
    fill(slot, frame);
    u64 arguments[6] = { a, b, c, d, e, f }, *to = (u64 *)((u8 *)slot + slot_bytes - sizeof arguments);
    for (int k = 0; k < 6; k++)
        to[k] = arguments[k];
    __atomic_store_n(&slot->ready, (u32)head + 1, __ATOMIC_RELEASE);
}

#define MAPS(name, kind, ...)                                                                                   \
    SHARED u64 agent_##name(ARGUMENTS)                                                                          \
    {                                                                                                           \
        ENTER;                                                                                                  \
        u64 before = ADD(&clock, 1);                                                                            \
        u64 result = REAL(name, __VA_ARGS__);                                                                   \
        if (begin_calls()) {                                                                                    \
            note(kind, before, result, a, b, c, d, e, f, frame);                                                \
            end_calls();                                                                                        \
        }                                                                                                       \
        LEAVE;                                                                                                  \
        return result;                                                                                          \
    }

MAPS(mmap, MMAP, a, b, c, d, e, f)
MAPS(munmap, MUNMAP, a, b)
MAPS(mremap, MREMAP, a, b, c, d, e)
MAPS(brk, BRK, a)

/* ---- seccomp: a filter may forbid our system calls, at the price of the program's life --------------------------- */

/* Whether that was new. */
static int keep_quiet(void)
{
    u32 sampling = SAMPLING;
    int is_new = SWAP(&state, &sampling, QUIET);
    while (LOAD(&calling) && ADD(&looks, 1) < MOST_LOOKS)
        __builtin_ia32_pause();
    return is_new;
}

#define RESTRICTS(name, when)                                                                                   \
    SHARED u64 agent_##name(ARGUMENTS)                                                                          \
    {                                                                                                           \
        UNUSED;                                                                                                 \
        int is_new = (when) && keep_quiet();                                                                    \
        u64 result = REAL(name, a, b, c, d, e, f);                                                              \
        u32 quiet = QUIET;                                                                                      \
        if (is_new && (int)result < 0)                                                                          \
            SWAP(&state, &quiet, SAMPLING);                                                                     \
        return result;                                                                                          \
    }

enum { SECCOMP = 317, SET_SECCOMP = 22, SET_TSC = 26, FIRST_QUESTION = 2 };
RESTRICTS(prctl, (u32)a == SET_SECCOMP || (u32)a == SET_TSC)        /* the time stamp counter, which we read */
RESTRICTS(syscall, (u32)a == SECCOMP ? (u32)b < FIRST_QUESTION : (u32)b == SET_SECCOMP || (u32)b == SET_TSC)

/* ---- entries: what the jumps lead to --------------------------------------------------------------------------- */

/* A return address into the agent lies below a word that points to the word above it, and is overwritten at once when
 * it has been used: so it can be told from a stale one (see inject.refer_to). */
#define CALL(name) "push %rsp\n call agent_" #name "\n push $0\n add $16, %rsp\n"

/* Call agent_NAME with the arguments as they are and, as the seventh, the struct frame. */
#define FRAMED(name)                                                                                            \
    "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n" CALL(name) "add $48, %rsp\n"

#define ENTRY(name) ".globl hook_" #name "\n.hidden hook_" #name "\n.balign 64\nhook_" #name ":\n"

/* 64 bytes for the displaced instructions. */
#define ROOM(name) ".globl real_" #name "\n.hidden real_" #name "\nreal_" #name ": .skip 64, 0xcc\n"

/* Every call is looked at. */
#define ALWAYS(name) __asm__(".text\n" ENTRY(name) FRAMED(name) "ret\n" ROOM(name));

/* Count an amount down, of bytes or calls, that `amount` puts into rax; most calls go straight on. */
#define COUNT_DOWN(name, amount)                                                                                \
    "mov %fs:0, %rax\n imul $" TEXT(CELLS_FACTOR) ", %rax, %r10\n shr $" TEXT(CELLS_SHIFT) ", %r10\n"           \
    "and $" TEXT(CELLS_MASK) ", %r10d\n lea cells(%rip), %r11\n"                                                \
    "cmp %rax, 8(%r10,%r11)\n jne slow_" #name "\n" amount                                                     \
    "sub %rax, (%r10,%r11)\n jbe slow_" #name "\n js slow_" #name "\n"
#define ENTRIES(name, size)                                                                                     \
    ENTRY(name) COUNT_DOWN(name, size) ROOM(name)                                                               \
    ENTRY(name##_calls) COUNT_DOWN(name, "mov $1, %eax\n") "jmp real_" #name "\n slow_" #name ":"
#define COUNTED(name, size) __asm__(".text\n" ENTRIES(name, size) FRAMED(name) "ret\n");

/* Where agent_NAME returns 0, the real function runs with the registers as they were. */
#define COUNTED_OR_REAL(name, size)                                                                             \
    __asm__(".text\n" ENTRIES(name, size)                                                                       \
        "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n mov %rdi, %rbx\n mov %rsi, %rbp\n" \
        CALL(name)                                                                                              \
        "mov %rbx, %rdi\n mov %rbp, %rsi\n mov 32(%rsp), %rbx\n mov 40(%rsp), %rbp\n add $48, %rsp\n"           \
        "test %rax, %rax\n je real_" #name "\n ret\n");

/* Most pointers were not sampled, as the filter tells. The real function runs when the agent is off the stack. */
#define RELEASES(name)                                                                                          \
    __asm__(".text\n" ENTRY(name)                                                                               \
        "mov %edi, %eax\n shr $4, %eax\n movzwl %ax, %eax\n lea filter(%rip), %r10\n cmpb $0, (%r10,%rax)\n"     \
        "jne slow_" #name "\n" ROOM(name)                                                                       \
        "slow_" #name ": push %rdi\n push %rsi\n push %rdx\n push %rdx\n" CALL(free)                             \
        "pop %rdx\n pop %rdx\n pop %rsi\n pop %rdi\n jmp real_" #name "\n");

#define BY_SIZE "lea 16(%rdi), %rax\n"
COUNTED(malloc, BY_SIZE)
COUNTED(calloc, "mov %rdi, %rax\n imul %rsi, %rax\n add $16, %rax\n")
COUNTED(create, BY_SIZE)
COUNTED(mallocx, BY_SIZE)
COUNTED(new_nothrow, BY_SIZE) COUNTED(new_aligned_nothrow, BY_SIZE)
COUNTED(new_array_nothrow, BY_SIZE) COUNTED(new_array_aligned_nothrow, BY_SIZE)
COUNTED_OR_REAL(new, BY_SIZE) COUNTED_OR_REAL(new_aligned, BY_SIZE)
COUNTED_OR_REAL(new_array, BY_SIZE) COUNTED_OR_REAL(new_array_aligned, BY_SIZE)
RELEASES(free) RELEASES(free_sized) RELEASES(free_aligned_sized) RELEASES(dallocx) RELEASES(sdallocx)
RELEASES(destroy)
RELEASES(delete) RELEASES(delete_sized) RELEASES(delete_nothrow)
RELEASES(delete_aligned) RELEASES(delete_sized_aligned) RELEASES(delete_aligned_nothrow)
RELEASES(delete_array) RELEASES(delete_array_sized) RELEASES(delete_array_nothrow)
RELEASES(delete_array_aligned) RELEASES(delete_array_sized_aligned) RELEASES(delete_array_aligned_nothrow)
ALWAYS(realloc) ALWAYS(rallocx)
ALWAYS(memalign) ALWAYS(aligned_alloc) ALWAYS(posix_memalign) ALWAYS(valloc) ALWAYS(pvalloc)
ALWAYS(prctl)
/* Its seventh argument lies on the stack: only what has fewer is called from us. */
__asm__(".text\n" ENTRY(syscall) "cmp $317, %edi\n je slow_syscall\n cmp $157, %edi\n je slow_syscall\n" ROOM(syscall)
        "slow_syscall:" FRAMED(syscall) "ret\n");
ALWAYS(mmap) ALWAYS(munmap) ALWAYS(mremap) ALWAYS(brk)
