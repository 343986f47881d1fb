/* Cores lent by other processes while these have nothing to compute.
 *
 * A helper is a thread of ours that is pinned to such a core. Work is cut into parts, which free threads take one by
 * one: our own threads, and helpers as long as their core is lent, which they check before each part. The result of a
 * part does not depend on the thread that computes it. An owner that needs its core back shares it with a helper until
 * the end of the current part, at most.
 *
 * All processes share one byte per core. Its owner writes whether the core is lent. Of several processes that want to
 * borrow it, one holds it at a time: if they alternated in the middle of parts, each would keep the owner waiting for
 * the other. A process that dies while it has borrowed a core keeps it until the owner lends it again.
 *
 * A helper without work spins for a while, since the next GEMM is only a norm away, and then sleeps. It sleeps at once
 * when its core is no longer lent, and is woken when there is work and the core is.
 */

#define BORROWING_ROWS 16      /* steps with fewer rows are over too soon to share */
#define MIN_PARTS 32           /* of a GEMM: a part is much shorter than the whole, and much longer than taking it */
#define PARTS_PER_WORKER 4     /* least parts of a GEMM per thread that works on it */
#define PART_MULTIPLICATIONS 50000000 /* of a part, about: a quarter of a millisecond, or a few */
#define SPIN_NS 300000         /* how long a helper without work spins before it sleeps */
#define SPINS_PER_CLOCK_READ 64 /* spins between two clock reads */
#define JOIN_SPINS 2000        /* spins in which the sharing thread waits for the last parts before it sleeps */

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
    uint8_t *cores; /* enum core, indexed by core number */
    struct helper *helpers;
    int count;
    part_fn *part;
    void *work;
    long parts, next;   /* next: the first part that no thread has taken */
    uint32_t turn;      /* odd while there are parts to take */
    uint32_t in_flight; /* helpers that may be computing a part */
    uint32_t waiting;   /* whether the sharing thread sleeps until in_flight is 0 */
    uint32_t busy;      /* lock: whether a thread is sharing its work */
    uint32_t ending;
    uint64_t nanoseconds; /* processor time of all helpers so far */
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

/* Compare and swap the state of the helper's core; returns whether it was ``from``. */
static int cas_core_state(const struct helper *helper, enum core from, enum core to)
{
    uint8_t expected = from;
    return __atomic_compare_exchange_n(borrowed.cores + helper->core, &expected, to, 0, __ATOMIC_SEQ_CST,
                                       __ATOMIC_RELAXED);
}

/* The current turn if it has parts, is not ``seen`` (one that this helper has finished) and the core is lent; else
 * 0. */
static uint32_t open_turn(const struct helper *helper, uint32_t seen)
{
    uint32_t turn = __atomic_load_n(&borrowed.turn, __ATOMIC_SEQ_CST);
    return turn % 2 && turn != seen && core_is(helper, LENT) ? turn : 0;
}

/* Spin, then sleep, until there is a turn with parts for this helper, and return it; 0 when helpers are to end. */
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

/* Take the next part; returns whether there was one. */
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
        /* the sharing thread closes the turn, then waits for in_flight to be 0; we count ourselves in, then look at the
         * turn: one of the two sees the other */
        uint32_t open = __atomic_load_n(&borrowed.turn, __ATOMIC_SEQ_CST);
        if (open == turn && cas_core_state(helper, LENT, BORROWED)) {
            uint64_t since = time_ns(CLOCK_THREAD_CPUTIME_ID);
            long part;
            int more = 1;
            while (core_is(helper, BORROWED) && (more = next_part(&part)))
                borrowed.part(borrowed.work, part);
            if (more)
                turn = 0; /* the owner took its core back: join this turn again if it is lent again */
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

/* Whether a lent core can be used now, and if so lock the helpers for this thread, which must then call run_shared. */
static int acquire_helpers(int64_t rows)
{
    int lent = 0;
    if (rows >= BORROWING_ROWS)
        for (int i = 0; i < borrowed.count && !lent; i++)
            lent = core_is(borrowed.helpers + i, LENT);
    return lent && !__atomic_exchange_n(&borrowed.busy, 1, __ATOMIC_SEQ_CST);
}

/* Compute ``parts`` parts of ``work`` on ``threads`` threads of our own and on all helpers whose cores are lent. */
static void run_shared(part_fn *part, void *work, long parts, int threads)
{
    borrowed.part = part;
    borrowed.work = work;
    borrowed.parts = parts;
    __atomic_store_n(&borrowed.next, 0, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&borrowed.turn, 1, __ATOMIC_SEQ_CST);
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (long i;;) {
        wake_helpers(); /* before each part: a core may have been lent since the previous one */
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

/* End all helpers. Must not be called while another thread computes. */
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

/* Start a helper on each of ``cores`` [count]; it borrows its core while ``states``, one byte per core number, says
 * that the core is lent. Earlier helpers end. Returns the number of helpers: a core that this process may not use gets
 * none. */
EXPORT int tandem_borrow(uint8_t *states, const int32_t *cores, int count)
{
    sigset_t all, before;
    tandem_give_back();
    if (!(borrowed.helpers = calloc(count, sizeof *borrowed.helpers)))
        return 0;
    borrowed.cores = states;
    sigfillset(&all); /* signals go to Python's threads, except those that a fault raises in the faulting thread */
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

/* Our own threads plus the cores that could be borrowed. */
static long max_workers(int threads) { return threads + borrowed.count; }

/* Processor time of all helpers so far, in seconds. */
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
