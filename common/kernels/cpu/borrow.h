/* Cores of other processes, borrowed while these have nothing to compute.
 *
 * A helper is a thread of ours on such a core. Work that is cut into parts is taken part by part by whoever is free:
 * by the threads that were always ours, and by helpers as long as they have their core, which they look up before each
 * part. What a part computes does not depend on who does it. An owner that needs its core again shares it with a helper
 * until the end of a part, at most.
 *
 * All processes share a byte per core. Its owner writes whether it lends the core; of several that would borrow it one
 * has it at a time, since those that took turns in the middle of parts would keep each other's owners waiting. Whoever
 * dies with a core has it until its owner lends it again.
 *
 * A helper without work looks for some for a while, since the next product is a norm away, then sleeps; it sleeps at
 * once when its core is not to be had any more, and is woken when there is work and it is.
 */

#define BORROWING_ROWS 16      /* of which work takes long enough to share it, in a step of fewer a core is soon done */
#define MIN_PARTS 32           /* of a product: a part is much less than the whole, and much more than taking it */
#define PARTS_PER_WORKER 4     /* of whoever works on a product, at least */
#define PART_MULTIPLICATIONS 50000000 /* multiplications of a part: a quarter of a millisecond, or a few */
#define SPIN_NS 300000         /* how long a helper without work looks for some before it sleeps */
#define SPINS_PER_CLOCK_READ 64 /* between two looks at the clock */
#define JOIN_SPINS 2000        /* turns of a loop in which who shared its work waits for its last parts; then it sleeps */

enum core { KEPT, LENT, BORROWED };

typedef void part_fn(void *work, long part);

#ifdef __linux__
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct helper {
    pthread_t thread;
    int core;
    uint32_t asleep;
};

static struct {
    uint8_t *cores; /* enum core, by number */
    struct helper *helpers;
    int count;
    part_fn *part;
    void *work;
    long parts, next;  /* next: the part that nobody has taken yet */
    uint32_t turn;     /* odd while parts are there to be taken */
    uint32_t in_flight; /* helpers that may be at a part */
    uint32_t waiting;  /* whether somebody sleeps until none is */
    uint32_t busy;     /* whether a thread shares its work now: no other does */
    uint32_t ending;
    uint64_t nanoseconds; /* of processor time that helpers worked in all */
} borrowed;

static long futex(uint32_t *word, int what, uint32_t value)
{
    return syscall(SYS_futex, word, what | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static uint64_t time_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void cpu_pause(void)
{
#ifdef X86
    _mm_pause();
#endif
}

static int core_is(const struct helper *helper, enum core state)
{
    return __atomic_load_n(borrowed.cores + helper->core, __ATOMIC_RELAXED) == state;
}

/* Makes the helper's core, if it is ``from``, ``to``; whether it was. */
static int cas_core_state(const struct helper *helper, enum core from, enum core to)
{
    uint8_t expected = from;
    return __atomic_compare_exchange_n(borrowed.cores + helper->core, &expected, to, 0, __ATOMIC_SEQ_CST,
                                       __ATOMIC_RELAXED);
}

/* The turn that has parts for this helper, which it has not ``seen``; 0 for none. */
static uint32_t open_turn(const struct helper *helper, uint32_t seen)
{
    uint32_t turn = __atomic_load_n(&borrowed.turn, __ATOMIC_SEQ_CST);
    return turn % 2 && turn != seen && core_is(helper, LENT) ? turn : 0;
}

/* Looks for work, then sleeps until there is some; 0 at the end of all. */
static uint32_t wait_for_work(struct helper *helper, uint32_t seen)
{
    for (;;) {
        uint32_t turn;
        uint64_t since = time_ns(CLOCK_MONOTONIC);
        for (long looks = 1; core_is(helper, LENT) && !__atomic_load_n(&borrowed.ending, __ATOMIC_SEQ_CST); looks++) {
            if ((turn = open_turn(helper, seen)))
                return turn;
            if (looks % SPINS_PER_CLOCK_READ == 0 && time_ns(CLOCK_MONOTONIC) - since > SPIN_NS)
                break;
            cpu_pause();
        }
        __atomic_store_n(&helper->asleep, 1, __ATOMIC_SEQ_CST);
        turn = open_turn(helper, seen);
        int ending = __atomic_load_n(&borrowed.ending, __ATOMIC_SEQ_CST);
        if (!turn && !ending)
            futex(&helper->asleep, FUTEX_WAIT, 1);
        __atomic_store_n(&helper->asleep, 0, __ATOMIC_SEQ_CST);
        if (turn || ending)
            return turn;
    }
}

/* The part that is to be done next; whether there is one. */
static int next_part(long *part)
{
    return (*part = __atomic_fetch_add(&borrowed.next, 1, __ATOMIC_SEQ_CST)) < borrowed.parts;
}

static void wake_helpers(void)
{
    for (int i = 0; i < borrowed.count; i++) {
        struct helper *helper = borrowed.helpers + i;
        if (__atomic_load_n(&helper->asleep, __ATOMIC_SEQ_CST) && core_is(helper, LENT) &&
            __atomic_exchange_n(&helper->asleep, 0, __ATOMIC_SEQ_CST))
            futex(&helper->asleep, FUTEX_WAKE, 1);
    }
}

static void *helper_main(void *of)
{
    struct helper *helper = of;
    uint32_t turn = 0;
    while ((turn = wait_for_work(helper, turn))) {
        __atomic_fetch_add(&borrowed.in_flight, 1, __ATOMIC_SEQ_CST);
        /* who shares its work waits for those inside, and lets nobody else in: one of us sees the other */
        uint32_t open = __atomic_load_n(&borrowed.turn, __ATOMIC_SEQ_CST);
        if (open == turn && cas_core_state(helper, LENT, BORROWED)) {
            uint64_t since = time_ns(CLOCK_THREAD_CPUTIME_ID);
            long part;
            int more = 1;
            while (core_is(helper, BORROWED) && (more = next_part(&part)))
                borrowed.part(borrowed.work, part);
            if (more)
                turn = 0; /* it had to leave, and comes back if it may */
            cas_core_state(helper, BORROWED, LENT);
            __atomic_fetch_add(&borrowed.nanoseconds, time_ns(CLOCK_THREAD_CPUTIME_ID) - since, __ATOMIC_RELAXED);
        }
        __atomic_fetch_sub(&borrowed.in_flight, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&borrowed.waiting, __ATOMIC_SEQ_CST))
            futex(&borrowed.in_flight, FUTEX_WAKE, 1);
    }
    free(thread_memory);
    return NULL;
}

/* Whether a core can be borrowed now, by this thread; then run_shared has to follow. */
static int acquire_helpers(int64_t rows)
{
    int lent = 0;
    if (rows >= BORROWING_ROWS)
        for (int i = 0; i < borrowed.count && !lent; i++)
            lent = core_is(borrowed.helpers + i, LENT);
    return lent && !__atomic_exchange_n(&borrowed.busy, 1, __ATOMIC_SEQ_CST);
}

/* Does ``parts`` parts of ``work`` with ``threads`` threads of our own and all helpers whose cores are lent. */
static void run_shared(part_fn *part, void *work, long parts, int threads)
{
    borrowed.part = part;
    borrowed.work = work;
    borrowed.parts = parts;
    __atomic_store_n(&borrowed.next, 0, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&borrowed.turn, 1, __ATOMIC_SEQ_CST);
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (long i;;) {
        wake_helpers(); /* before each part: a core may have been lent since the one before */
        if (!next_part(&i))
            break;
        part(work, i);
    }
    __atomic_fetch_add(&borrowed.turn, 1, __ATOMIC_SEQ_CST);
    uint32_t in_flight;
    for (long turns = 0; (in_flight = __atomic_load_n(&borrowed.in_flight, __ATOMIC_SEQ_CST)); turns++)
        if (turns < JOIN_SPINS)
            cpu_pause();
        else {
            __atomic_store_n(&borrowed.waiting, 1, __ATOMIC_SEQ_CST);
            futex(&borrowed.in_flight, FUTEX_WAIT, in_flight);
        }
    __atomic_store_n(&borrowed.waiting, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&borrowed.busy, 0, __ATOMIC_SEQ_CST);
}

/* Ends all helpers; not while another thread computes. */
EXPORT void tandem_give_back(void)
{
    __atomic_store_n(&borrowed.ending, 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < borrowed.count; i++) {
        __atomic_store_n(&borrowed.helpers[i].asleep, 0, __ATOMIC_SEQ_CST);
        futex(&borrowed.helpers[i].asleep, FUTEX_WAKE, 1);
        pthread_join(borrowed.helpers[i].thread, NULL);
    }
    free(borrowed.helpers);
    borrowed.helpers = NULL;
    borrowed.count = 0;
    __atomic_store_n(&borrowed.ending, 0, __ATOMIC_SEQ_CST);
}

/* Starts a helper on each of ``cores`` [count], which borrows it while its byte of ``states``, indexed by core, says
 * that it is lent; helpers from before end. How many there are: a core that this process may not use gets none. */
EXPORT int tandem_borrow(uint8_t *states, const int32_t *cores, int count)
{
    sigset_t all, before;
    tandem_give_back();
    if (!(borrowed.helpers = calloc(count, sizeof *borrowed.helpers)))
        return 0;
    borrowed.cores = states;
    sigfillset(&all); /* signals are for the threads of Python, but for those that a fault sends to who made it */
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 0; i < count; i++) {
        struct helper *helper = borrowed.helpers + borrowed.count;
        cpu_set_t only;
        pthread_attr_t attributes;
        CPU_ZERO(&only);
        CPU_SET(cores[i], &only);
        helper->core = cores[i];
        pthread_attr_init(&attributes);
        if (!pthread_attr_setaffinity_np(&attributes, sizeof only, &only) &&
            !pthread_create(&helper->thread, &attributes, helper_main, helper))
            borrowed.count++;
        pthread_attr_destroy(&attributes);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return borrowed.count;
}

/* Threads of our own, and cores that could be borrowed. */
static long max_workers(int threads) { return threads + borrowed.count; }

/* Seconds of processor time that helpers have worked in all. */
EXPORT double tandem_borrowed_s(void)
{
    return (double)__atomic_load_n(&borrowed.nanoseconds, __ATOMIC_RELAXED) / 1e9;
}
#else
static int acquire_helpers(int64_t rows) { return (void)rows, 0; }
static void run_shared(part_fn *part, void *work, long parts, int threads)
{
    (void)threads;
    for (long i = 0; i < parts; i++)
        part(work, i);
}
static long max_workers(int threads) { return threads; }
EXPORT void tandem_give_back(void) {}
EXPORT int tandem_borrow(uint8_t *states, const int32_t *cores, int count)
{
    return (void)states, (void)cores, (void)count, 0;
}
EXPORT double tandem_borrowed_s(void) { return 0; }
#endif
