/* Cores of other processes, borrowed while these have nothing to compute.
 *
 * A helper is a thread of ours on such a core. Work that is cut into parts is taken part by part by whoever is free:
 * by the threads that were always ours, and by helpers as long as their core is lent, which they look up before each
 * part (a byte per core in memory that all processes share, written by who owns the core). What a part computes does not
 * depend on who does it. An owner that needs its core again shares it with a helper until the end of a part, at most.
 *
 * A helper without work looks for some for a while, since the next product is a norm away, then sleeps; it sleeps at
 * once when its core is not lent any more, and only one on a core that is lent is woken.
 */

#define BORROWING_ROWS 128     /* of which work takes long enough to share it: more than a decode step usually has */
#define MOST_PARTS 32          /* of a product: a part is much less than the whole, and much more than taking it */
#define LOOKING_NS 300000      /* how long a helper without work looks for some before it sleeps */
#define LOOKS 64               /* between two looks at the clock */
#define WAITING_TURNS 2000     /* turns of a loop in which who shared its work waits for its last parts; then it sleeps */

typedef void do_part(void *work, long part);

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
    const volatile uint8_t *lent; /* by core */
    struct helper *helpers;
    int count;
    do_part *part;
    void *work;
    long parts, next;  /* next: the part that nobody has taken yet */
    uint32_t turn;     /* odd while parts are there to be taken */
    uint32_t inside;   /* helpers that may be at a part */
    uint32_t waiting;  /* whether somebody sleeps until none is */
    uint32_t taken;    /* whether a thread shares its work now: no other does */
    uint32_t ending;
    uint64_t nanoseconds; /* that helpers worked in all */
} borrowed;

static long futex(uint32_t *word, int what, uint32_t value)
{
    return syscall(SYS_futex, word, what | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void pause_a_little(void)
{
#ifdef X86
    _mm_pause();
#endif
}

static int is_lent(const struct helper *helper) { return borrowed.lent[helper->core]; }

/* The turn that has parts for this helper, which it has not ``seen``; 0 for none. */
static uint32_t turn_for(const struct helper *helper, uint32_t seen)
{
    uint32_t turn = __atomic_load_n(&borrowed.turn, __ATOMIC_SEQ_CST);
    return turn % 2 && turn != seen && is_lent(helper) ? turn : 0;
}

/* Looks for work, then sleeps until there is some; 0 at the end of all. */
static uint32_t find_work(struct helper *helper, uint32_t seen)
{
    for (;;) {
        uint32_t turn;
        uint64_t since = now_ns();
        for (long looks = 1; is_lent(helper) && !__atomic_load_n(&borrowed.ending, __ATOMIC_SEQ_CST); looks++) {
            if ((turn = turn_for(helper, seen)))
                return turn;
            if (looks % LOOKS == 0 && now_ns() - since > LOOKING_NS)
                break;
            pause_a_little();
        }
        __atomic_store_n(&helper->asleep, 1, __ATOMIC_SEQ_CST);
        turn = turn_for(helper, seen);
        int ending = __atomic_load_n(&borrowed.ending, __ATOMIC_SEQ_CST);
        if (!turn && !ending)
            futex(&helper->asleep, FUTEX_WAIT, 1);
        __atomic_store_n(&helper->asleep, 0, __ATOMIC_SEQ_CST);
        if (turn || ending)
            return turn;
    }
}

/* Takes parts for as long as there are any and, for a helper, its core is lent. */
static void take_parts(const struct helper *helper)
{
    while (!helper || is_lent(helper)) {
        long part = __atomic_fetch_add(&borrowed.next, 1, __ATOMIC_SEQ_CST);
        if (part >= borrowed.parts)
            return;
        borrowed.part(borrowed.work, part);
    }
}

static void *help(void *of)
{
    struct helper *helper = of;
    uint32_t turn = 0;
    while ((turn = find_work(helper, turn))) {
        __atomic_fetch_add(&borrowed.inside, 1, __ATOMIC_SEQ_CST);
        /* who shares its work waits for those inside, and lets nobody else in: one of us sees the other */
        if (__atomic_load_n(&borrowed.turn, __ATOMIC_SEQ_CST) == turn) {
            uint64_t since = now_ns();
            take_parts(helper);
            __atomic_fetch_add(&borrowed.nanoseconds, now_ns() - since, __ATOMIC_RELAXED);
        }
        __atomic_fetch_sub(&borrowed.inside, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&borrowed.waiting, __ATOMIC_SEQ_CST))
            futex(&borrowed.inside, FUTEX_WAKE, 1);
    }
    free(thread_memory);
    return NULL;
}

/* Whether a core can be borrowed now, by this thread; then share_parts has to follow. */
static int may_borrow(int64_t rows)
{
    int lent = 0;
    if (rows >= BORROWING_ROWS)
        for (int i = 0; i < borrowed.count && !lent; i++)
            lent = is_lent(borrowed.helpers + i);
    return lent && !__atomic_exchange_n(&borrowed.taken, 1, __ATOMIC_SEQ_CST);
}

/* Does ``parts`` parts of ``work`` with ``threads`` threads of our own and all helpers whose cores are lent. */
static void share_parts(do_part *part, void *work, long parts, int threads)
{
    borrowed.part = part;
    borrowed.work = work;
    borrowed.parts = parts;
    __atomic_store_n(&borrowed.next, 0, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&borrowed.turn, 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < borrowed.count; i++) {
        struct helper *helper = borrowed.helpers + i;
        if (is_lent(helper) && __atomic_exchange_n(&helper->asleep, 0, __ATOMIC_SEQ_CST))
            futex(&helper->asleep, FUTEX_WAKE, 1);
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    take_parts(NULL);
    __atomic_fetch_add(&borrowed.turn, 1, __ATOMIC_SEQ_CST);
    uint32_t inside;
    for (long turns = 0; (inside = __atomic_load_n(&borrowed.inside, __ATOMIC_SEQ_CST)); turns++)
        if (turns < WAITING_TURNS)
            pause_a_little();
        else {
            __atomic_store_n(&borrowed.waiting, 1, __ATOMIC_SEQ_CST);
            futex(&borrowed.inside, FUTEX_WAIT, inside);
        }
    __atomic_store_n(&borrowed.waiting, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&borrowed.taken, 0, __ATOMIC_SEQ_CST);
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

/* Starts a helper on each of ``cores`` [count], which borrows it while its byte of ``lent``, indexed by core, is not
 * zero; helpers from before end. How many there are: a core that this process may not use gets none. */
EXPORT int tandem_borrow(const uint8_t *lent, const int32_t *cores, int count)
{
    sigset_t all, before;
    tandem_give_back();
    if (!(borrowed.helpers = calloc(count, sizeof *borrowed.helpers)))
        return 0;
    borrowed.lent = lent;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of Python */
    for (int i = 0; i < count; i++) {
        struct helper *helper = borrowed.helpers + borrowed.count;
        cpu_set_t only;
        pthread_attr_t attributes;
        CPU_ZERO(&only);
        CPU_SET(cores[i], &only);
        helper->core = cores[i];
        pthread_attr_init(&attributes);
        if (!pthread_attr_setaffinity_np(&attributes, sizeof only, &only) &&
            !pthread_create(&helper->thread, &attributes, help, helper))
            borrowed.count++;
        pthread_attr_destroy(&attributes);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return borrowed.count;
}

/* Seconds that helpers have worked in all. */
EXPORT double tandem_borrowed_s(void)
{
    return (double)__atomic_load_n(&borrowed.nanoseconds, __ATOMIC_RELAXED) / 1e9;
}
#else
static int may_borrow(int64_t rows) { return (void)rows, 0; }
static void share_parts(do_part *part, void *work, long parts, int threads)
{
    (void)threads;
    for (long i = 0; i < parts; i++)
        part(work, i);
}
EXPORT void tandem_give_back(void) {}
EXPORT int tandem_borrow(const uint8_t *lent, const int32_t *cores, int count)
{
    return (void)lent, (void)cores, (void)count, 0;
}
EXPORT double tandem_borrowed_s(void) { return 0; }
#endif
