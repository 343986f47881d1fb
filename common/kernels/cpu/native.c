/* CPU kernels, called with raw pointers by common/kernels/cpu/__init__.py.
 *
 * Each kernel is written once, in the header named after it, and compiled for every instruction set variant below; the
 * variant that runs is chosen at start. Threads are those of OpenMP, shared with torch, and the helpers of borrow.h.
 */
#define _GNU_SOURCE
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define X86 1
#include <immintrin.h>
#if defined(__linux__) && defined(__LP64__) && __GNUC__ >= 11
#define AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#define LOAD_TILE_SHAPE(shape) __asm__ volatile("ldtilecfg %0" ::"m"(shape))
#ifdef FAKE_TILES /* a header that emulates tile registers in C, for tests on processors without AMX */
#include FAKE_TILES
#endif
#endif
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define UNROLL16 _Pragma("GCC unroll 16")
#define ROUND_UP(x, to) (((x) + (to) - 1) / (to) * (to))
#define EXPORT __attribute__((visibility("default")))

enum type { FLOAT32, BFLOAT16, FLOAT16 };
/* Formats of operands: float32; pairs of bfloat16; float32 stored as the bfloat16 that equals it. */
enum word_format { FLOATS, PAIRS, HALVES };

static enum word_format words_of(int type, int halves) { return type == BFLOAT16 ? PAIRS : halves ? HALVES : FLOATS; }

/* -- attention: what Python passes --------------------------------------------------------------------------------- */

#define TOKENS 64    /* positions of a tile: its packed keys and values stay in the first or second-level cache */
#define SPAN 128     /* positions that many rows are multiplied by at a time in tile registers: whole tiles */
#define SPAN_ROWS 32 /* how many of these rows at a time */
#define GROUP 16     /* positions that are packed together: every block size is a multiple */
#define MIN_TASK_ROWS 384 /* query rows times heads of a group in one task, at least */
#define MAX_UNPACKED_ROWS 4 /* most query rows times heads of a group that are attended without packing */
#define PAGE 4096    /* bytes of a memory page */
#define LOG2_E 1.44269504f
#define MIN_PART_TOKENS 512 /* least positions per part when the positions of a sequence are split over threads */

struct layer {
    const char *keys, *values; /* block 0: [block_size, kv_heads, dim]; block i is i * block_bytes further */
    const float *sinks;        /* [kv_heads * group] or NULL */
    int64_t block_bytes, block_size, window; /* window 0: none */
    int32_t kv_heads, group, k_dim, v_dim, type, element_bytes;
    float scaling, softcap; /* softcap 0: no cap */
};

struct spans {
    const int64_t *row, *length, *start, *table_at; /* [count] each; table_at: where a span's blocks begin in tables */
    const int32_t *tables;
    int64_t count;
};

struct call {
    const void *query;
    void *out;                     /* [rows, kv_heads * group, v_dim] */
    int64_t query_row, query_head; /* elements between rows, and between heads */
};

struct task { /* some rows and heads of a span, over positions [first, last) */
    const struct call *call;
    const struct task *next; /* the task that is probably computed next, or NULL (for prefetching) */
    const int32_t *table;
    long row, rows, position, first, last;
    int head, heads;
    long part; /* index of its partial result; -1 if it sees all positions */
};

struct scratch {
    uint32_t *query, *keys, *values;
    float *scores, *weights, *shrink, *out; /* of a tile of rows; out: of all rows */
    float *highest, *sums, *total; /* per row: highest score times log2 e; sum of weights by lane; total over lanes */
};

#define KEY_STEPS(layer, pairs) ((pairs) ? ((layer)->k_dim + 1) / 2 : (layer)->k_dim)

INLINE const char *key_row(const struct layer *layer, const int32_t *table, long position, int head)
{
    long place = position % layer->block_size * layer->kv_heads + head;
    return layer->keys + table[position / layer->block_size] * layer->block_bytes +
           place * layer->k_dim * layer->element_bytes;
}

INLINE const char *value_row(const struct layer *layer, const int32_t *table, long position, int head)
{
    long place = position % layer->block_size * layer->kv_heads + head;
    return layer->values + table[position / layer->block_size] * layer->block_bytes +
           place * layer->v_dim * layer->element_bytes;
}

/* -- layers: what Python passes ------------------------------------------------------------------------------------ */

#define KC_STEPS 64 /* steps of a panel that are summed from zero; they stay in L1 while all row tiles meet them */
#define A_BLOCK_BYTES (768 << 10) /* of a block of A, which meets one panel after the other and stays in L2 */
#define AMX_A_BLOCK_BYTES (1280 << 10) /* the same at most, with AMX */

#define MIN_MC 96        /* rows: a block of A that had fewer whole rows is cut into slices of kc elements */
#define AMX_MIN_MC 192   /* the same with AMX, which is done with a weight sooner than memory delivers the next */
#define MAX_MC 384       /* rows of a block that is cut so: more would make kc smaller and reload sums more often */
#define MAX_KC 2048      /* elements: most of kc where several blocks meet a panel, which stays in cache */
#define KC_MULTIPLE 128  /* elements: whole tiles, and KC_STEPS pairs, so that sums are added in the same order */
#define PARTIAL_C_BYTES (2 << 20) /* per thread, of the partial sums between slices of kc */
#define FLOAT_PARTS 3             /* bfloat16 parts of a float32 */

enum activation { NONE, SILU, GELU_TANH };

struct linear { /* y = x @ weight.T + bias; with an activation, that of every other vector of columns times its
                   neighbour */
    const void *packed;       /* words, or halves of them */
    const float *bias;        /* [columns] or NULL */
    int64_t in, columns, out; /* columns: of the weight, rounded up to vectors; out: elements that are written */
    int32_t type, activation;
    int32_t halves; /* whether a float32 weight is packed as the bfloat16 that equals it */
    const struct groups *groups; /* the parts of a weight in groups, NULL for any other; they have the biases */
};

#include "groups.h"

struct product {
    const void *from, *add; /* add: [rows, out_row], added to the result; may be ``to``, or NULL */
    void *to;
    int64_t rows, in_row, out_row; /* in_row, out_row: elements between rows */
    int64_t first, in; /* the slice of summed elements that ``from`` holds */
    float *sums;       /* [rows, sums_row], of columns from sums_first on: partial sums of earlier slices; NULL if
                          there is one slice */
    int64_t sums_row, sums_first;
};

struct norm {
    const float *weight; /* [dim] or NULL */
    int64_t dim;
    float epsilon;
};

struct rotary {
    int64_t row, query_heads, key_heads, dim, rotated; /* row: elements between rows; rotated: how many of dim, the
                                                          first */
    struct norm query_norm, key_norm;                  /* per head; weight NULL: none */
};

struct decoder_layer { /* the attention has the heads of the rotary embedding */
    const struct norm *input_norm, *mlp_norm;
    const struct linear *qkv, *out, *gate_up, *down;
    const struct rotary *rotary;
    const struct layer *attention;
};

struct decoder {
    const struct decoder_layer *layers;
    int64_t count;
    const void *embedding; /* [vocabulary, hidden size]; NULL for one in groups */
    const struct groups *embedding_groups;
    int64_t vocabulary;
    const void *cos, *sin; /* [positions, rotated], of every position a pass may have */
    const struct norm *norm;
    const struct linear *head;
};

struct pass { /* the rows of one step on their way through the decoder */
    const int64_t *ids, *positions, *block, *offset; /* [rows] each; block, offset: a row's place in the pool */
    const int64_t *keep;                             /* [kept] rows that need logits, ascending */
    const struct spans *spans;
    void *logits;                                   /* [kept, vocabulary] */
    int64_t *peaks;                                 /* [kept], as tandem_peaks writes them */
    void *hidden, *normed, *qkv, *attended, *gated; /* buffers for intermediate results, [rows, ...] each; rows of
                                                       gated have room for one cache line more */
    void *cos, *sin;                                /* [rows, rotated] */
    int64_t rows, kept;
    int32_t threads;
};

/* -- the variants -------------------------------------------------------------------------------------------------- */

struct variant {
    const char *name;
    int lanes, nr, task_rows;
    int mr, one_pass_rows; /* rows that meet a panel at a time; most rows that read a panel once, or again from L1 */
    void (*attend_rows)(const struct layer *, const struct task *, const struct scratch *);
    void (*write_rows)(const struct layer *, const struct task *, const struct scratch *);
    void (*pack_b)(const void *, long, long, enum word_format, void *);
    void (*linear_panels)(const struct linear *, const struct product *, long, long);
    void (*norm_rows)(const struct norm *, const void *, void *, long, int);
    uint64_t (*read_words)(const uint64_t *, long, long);
    void (*rotate_rows)(const struct rotary *, void *, long, const void *, const void *, int);
    void (*argmax_rows)(const void *, long, long, int, int64_t *);
    void (*split_row)(const float *, long, uint16_t *); /* NULL without AMX, which multiplies float32 in parts */
};

#define VARIANT(text, mr, one_pass_rows, split)                                                                        \
    {text, LANES, NR, TASK_ROWS, mr, one_pass_rows, NAME(attend_rows), NAME(write_rows), NAME(pack_b),                 \
     NAME(linear_panels), NAME(norm_rows), NAME(read_words), NAME(rotate_rows), NAME(argmax_rows), split}

#define KC_LOOP_TILES 3 /* most row tiles that are all multiplied by one slice of a panel before the next slice */
#define PREFETCH_TO_L2 0 /* whether the micro-kernel prefetches into L2: Zen 4 allows so few prefetches into L1 at a
                            time that they reach half the bandwidth of sequential reads */
#ifdef X86
#define LANES 16
#define NR_VECTORS 4
#define MR 6
#define HAS_BF16_DOT 1
#ifdef AMX
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,avx2,fma,f16c,prfchw")
#define HAS_AMX 1
#define NAME(x) x##_amx_bf16
#define VARIANT_NAME "amx_bf16"
#include "variant.h"
#undef HAS_AMX
#undef NAME
#undef VARIANT_NAME
#pragma GCC pop_options
#endif

#ifdef FAKE_TILES /* leave the other variants out: they are tested as installed, and this compiles much sooner */
#undef LANES
#undef NR_VECTORS
#undef MR
#undef HAS_BF16_DOT
#else
#define HAS_AMX 0
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c,prfchw")
#define NAME(x) x##_avx512_bf16
#define VARIANT_NAME "avx512_bf16"
#include "variant.h"
#undef NAME
#undef VARIANT_NAME
#undef KC_LOOP_TILES
#define KC_LOOP_TILES 2
#undef PREFETCH_TO_L2
#define PREFETCH_TO_L2 1
#define NAME(x) x##_avx512_bf16_zen4
#define VARIANT_NAME "avx512_bf16_zen4"
#include "variant.h"
#undef KC_LOOP_TILES
#define KC_LOOP_TILES 3
#undef PREFETCH_TO_L2
#define PREFETCH_TO_L2 0
#undef HAS_BF16_DOT
#undef NAME
#undef VARIANT_NAME
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define HAS_BF16_DOT 0
#define NAME(x) x##_avx512
#define VARIANT_NAME "avx512"
#include "variant.h"
#undef LANES
#undef NR_VECTORS
#undef NAME
#undef VARIANT_NAME
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define LANES 8
#define NR_VECTORS 2
#define NAME(x) x##_avx2
#define VARIANT_NAME "avx2"
#include "variant.h"
#undef LANES
#undef NR_VECTORS
#undef MR
#undef HAS_BF16_DOT
#undef NAME
#undef VARIANT_NAME
#pragma GCC pop_options
#endif
#endif

#undef HAS_AMX
#define HAS_AMX 0
#define LANES 4
#define NR_VECTORS 2
#define MR 4
#define HAS_BF16_DOT 0
#define NAME(x) x##_portable
#define VARIANT_NAME "portable"
#include "variant.h"

static const struct variant *const variants[] = {
#ifdef AMX
    &variant_amx_bf16,
#endif
#if defined X86 && !defined FAKE_TILES
    &variant_avx512_bf16_zen4, &variant_avx512_bf16, &variant_avx512, &variant_avx2,
#endif
    &variant_portable,
};
static const struct variant *active = &variant_portable;

#undef NAME
#undef VARIANT_NAME
#undef LANES
#undef NR_VECTORS
#undef MR
#undef HAS_BF16_DOT
#include "groups_variants.h"

#ifdef AMX
/* Whether the processor has AMX and the kernel lets this process use it, for which it must be asked. */
static int request_amx(void)
{
#ifdef FAKE_TILES
    return 1;
#else
    const int request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
           syscall(SYS_arch_prctl, request, tile_data) == 0;
#endif
}
#endif

static int runs_here(const struct variant *variant)
{
#ifdef X86
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    int dot = avx512 && __builtin_cpu_supports("avx512bf16");
#ifdef AMX
    if (variant == &variant_amx_bf16)
        return dot && request_amx();
#endif
#ifndef FAKE_TILES
    if (variant == &variant_avx512_bf16_zen4)
        return dot && __builtin_cpu_is("amdfam19h");
    if (variant == &variant_avx512_bf16)
        return dot;
    if (variant == &variant_avx512)
        return avx512;
    if (variant == &variant_avx2)
        return avx2;
#endif
#endif
    return variant == &variant_portable;
}

/* Raised with every change of the interface to Python, so that a library of older sources is not used. */
EXPORT int tandem_interface(void) { return 13; }

/* The name of the ``index``-th variant that runs here, the fastest first; NULL after the last. */
EXPORT const char *tandem_variant(int index)
{
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++)
        if (runs_here(variants[i]) && index-- == 0)
            return variants[i]->name;
    return NULL;
}

/* Select the variant ``name``; returns 0, or -1 if it does not run here. */
EXPORT int tandem_use(const char *name)
{
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++)
        if (!strcmp(variants[i]->name, name) && runs_here(variants[i])) {
            active = variants[i];
            use_group_kernels(active);
            return 0;
        }
    return -1;
}

/* -- a thread's memory for intermediate results -------------------------------------------------------------------- */

static __thread char *thread_memory;
static __thread size_t thread_bytes;

/* At least ``bytes`` bytes for this thread, kept for its next call; NULL if out of memory. */
static char *thread_scratch(size_t bytes)
{
    if (bytes > thread_bytes) {
        free(thread_memory);
        thread_bytes = ROUND_UP(bytes, 4096);
        if (!(thread_memory = aligned_alloc(64, thread_bytes)))
            thread_bytes = 0;
    }
    return thread_memory;
}

#include "borrow.h"

/* -- attention ----------------------------------------------------------------------------------------------------- */

/* Reserve ``bytes`` of scratch, rounded up to cache lines; advances ``at``. NULL if ``memory`` is, to add up sizes. */
static void *arena_alloc(char *memory, size_t *at, size_t bytes)
{
    char *part = memory ? memory + *at : NULL;
    *at += ROUND_UP(bytes, 64);
    return part;
}

static size_t layout_scratch(const struct layer *layer, long rows, char *memory, struct scratch *s)
{
    long padded = ROUND_UP(layer->v_dim, active->nr), tokens = ROUND_UP(TOKENS, active->nr);
    long tile = ROUND_UP(rows, 16); /* rows of all heads form one tile when they are few, and are transposed 16 at a
                                       time */
    size_t scores = tile * tokens * 4, span = 2 * SPAN_ROWS * SPAN * 4;
    size_t at = 0;
    s->query = arena_alloc(memory, &at, rows * layer->k_dim * 4 + 4 * rows);
    s->keys = arena_alloc(memory, &at, SPAN * layer->k_dim * 4 + 4 * SPAN);
    s->values = arena_alloc(memory, &at, SPAN * padded * 4);
    s->scores = arena_alloc(memory, &at, scores > span ? scores : span);
    s->weights = arena_alloc(memory, &at, 2 * scores > span ? 2 * scores : span);
    s->shrink = arena_alloc(memory, &at, tile * 4);
    s->out = arena_alloc(memory, &at, rows * padded * 4);
    s->highest = arena_alloc(memory, &at, rows * 4);
    s->sums = arena_alloc(memory, &at, rows * active->lanes * 4);
    s->total = arena_alloc(memory, &at, rows * 4);
    return at;
}

struct tasks {
    struct task *list;
    long count, room, parts;
};

static int add_task(struct tasks *tasks, struct task task)
{
    if (tasks->count == tasks->room) {
        long room = tasks->room ? 2 * tasks->room : 64;
        struct task *list = realloc(tasks->list, room * sizeof *list);
        if (!list)
            return -1;
        tasks->list = list;
        tasks->room = room;
    }
    tasks->list[tasks->count++] = task;
    return 0;
}

static int add_parts(struct tasks *tasks, struct task task, long parts)
{
    if (parts <= 1) {
        task.part = -1;
        return add_task(tasks, task);
    }
    long each = ROUND_UP((task.last - task.first + parts - 1) / parts, TOKENS), end = task.last;
    for (task.part = tasks->parts; task.first < end; task.first += each, task.part++) {
        task.last = task.first + each < end ? task.first + each : end;
        if (add_task(tasks, task))
            return -1;
    }
    tasks->parts = task.part;
    return 0;
}

/* Add the tasks of span ``i``. One with few rows is one task of all heads, so that its KV is read in memory order, or
 * several that split its positions if there are fewer spans than needed to keep all threads busy. One with many rows
 * becomes a task per head and run of rows. Returns 0, or -1 if out of memory. */
static int add_span(struct tasks *tasks, const struct layer *layer, const struct spans *spans, long i, int threads)
{
    struct task task = {.table = spans->tables + spans->table_at[i]};
    long at_once = active->task_rows;
    while (at_once > MIN_TASK_ROWS && layer->kv_heads * (spans->length[i] * layer->group / at_once + 1) < 2 * threads)
        at_once /= 2;
    long most = at_once / layer->group > 0 ? at_once / layer->group : 1;
    int all_heads = spans->length[i] * layer->group <= 16;
    for (long done = 0; done < spans->length[i]; done += most) {
        task.rows = spans->length[i] - done < most ? spans->length[i] - done : most;
        task.row = spans->row[i] + done;
        task.position = spans->start[i] + done;
        task.last = task.position + task.rows;
        long first_visible = layer->window ? task.position - layer->window + 1 : 0;
        task.first = first_visible > 0 ? first_visible / GROUP * GROUP : 0;
        task.heads = all_heads ? layer->kv_heads : 1;
        for (task.head = 0; task.head < layer->kv_heads; task.head += task.heads) {
            int split = all_heads && spans->count < 2 * threads && threads > 1;
            long parts = split ? (2 * threads + spans->count - 1) / spans->count : 1;
            long most_parts = (task.last - task.first) / MIN_PART_TOKENS;
            if (add_parts(tasks, task, parts < most_parts ? parts : most_parts))
                return -1;
        }
    }
    return 0;
}

/* Merge the partial result of one task, [rows of all heads][padded + 2], into ``s``. */
static void merge_part(const struct scratch *s, const float *part, long rows, long padded)
{
    for (long i = 0; i < rows; i++, part += padded + 2) {
        float top = part[padded] > s->highest[i] ? part[padded] : s->highest[i];
        float own = exp2f(s->highest[i] - top), other = exp2f(part[padded] - top);
        for (long d = 0; d < padded; d++)
            s->out[i * padded + d] = s->out[i * padded + d] * own + part[d] * other;
        s->total[i] = s->total[i] * own + part[padded + 1] * other;
        s->highest[i] = top;
    }
}

static void save_part(const struct scratch *s, float *part, long rows, long padded)
{
    for (long i = 0; i < rows; i++, part += padded + 2) {
        memcpy(part, s->out + i * padded, padded * 4);
        part[padded] = s->highest[i];
        part[padded + 1] = s->total[i];
    }
}

static int merge_parts(const struct layer *layer, const struct tasks *tasks, const float *parts, size_t bytes,
                       long rows)
{
    struct scratch s;
    char *memory = thread_scratch(bytes);
    if (!memory)
        return -1;
    layout_scratch(layer, rows, memory, &s);
    long padded = ROUND_UP(layer->v_dim, active->lanes);
    for (long i = 0; i < tasks->count;) {
        const struct task *task = tasks->list + i;
        if (task->part < 0) {
            i++;
            continue;
        }
        long count = task->rows * layer->group * task->heads;
        for (long r = 0; r < count; r++) {
            s.highest[r] = -FLT_MAX;
            s.total[r] = 0;
        }
        memset(s.out, 0, count * padded * 4);
        for (; i < tasks->count && tasks->list[i].part >= 0 && tasks->list[i].row == task->row; i++)
            merge_part(&s, parts + tasks->list[i].part * rows * (padded + 2), count, padded);
        active->write_rows(layer, task, &s);
    }
    return 0;
}

/* One call of tandem_attend, shared by its threads. */
struct attend_job {
    const struct layer *layer;
    const struct tasks *tasks;
    float *parts;
    size_t bytes; /* of scratch per thread */
    long rows;    /* most rows of all heads of a task */
    int failed;
};

static void attend_part(void *of, long i)
{
    struct attend_job *work = of;
    const struct layer *layer = work->layer;
    const struct task *task = work->tasks->list + i;
    long padded = ROUND_UP(layer->v_dim, active->lanes);
    struct scratch s;
    char *memory = thread_scratch(work->bytes);
    if (!memory) {
        __atomic_store_n(&work->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    layout_scratch(layer, work->rows, memory, &s);
    active->attend_rows(layer, task, &s);
    if (task->part < 0)
        active->write_rows(layer, task, &s);
    else
        save_part(&s, work->parts + task->part * work->rows * (padded + 2), task->rows * layer->group * task->heads,
                  padded);
}

/* Attention of the rows of all spans; returns 0, or -1 if out of memory. */
EXPORT int tandem_attend(const struct layer *layer, const struct spans *spans, const void *query, void *out,
                         int64_t query_row, int64_t query_head, int threads)
{
    struct call call = {query, out, query_row, query_head};
    struct tasks tasks = {0};
    struct scratch sizes;
    struct attend_job work = {.layer = layer, .tasks = &tasks};
    long rows = 0;
    for (long i = 0; i < spans->count && !work.failed; i++) {
        work.failed = add_span(&tasks, layer, spans, i, threads);
        rows += spans->length[i];
    }
    for (long i = 0; i < tasks.count; i++) {
        long own = tasks.list[i].rows * layer->group * tasks.list[i].heads;
        tasks.list[i].call = &call;
        tasks.list[i].next = i + 1 < tasks.count ? tasks.list + i + 1 : NULL;
        work.rows = own > work.rows ? own : work.rows;
    }
    work.bytes = layout_scratch(layer, work.rows, NULL, &sizes);
    long padded = ROUND_UP(layer->v_dim, active->lanes);
    work.parts = tasks.parts ? malloc(tasks.parts * work.rows * (padded + 2) * sizeof *work.parts) : NULL;
    work.failed |= tasks.parts && !work.parts;
    if (!work.failed && acquire_helpers(rows)) {
        run_shared(attend_part, &work, tasks.count, threads);
    } else if (!work.failed) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && tasks.count > 1)
        for (long i = 0; i < tasks.count; i++)
            attend_part(&work, i);
    }
    if (!work.failed && tasks.parts)
        work.failed = merge_parts(layer, &tasks, work.parts, work.bytes, work.rows);
    free(work.parts);
    free(tasks.list);
    return work.failed ? -1 : 0;
}

/* -- layers -------------------------------------------------------------------------------------------------------- */

/* Floats per vector of the selected variant; weights are packed for it. */
EXPORT int tandem_lanes(void) { return active->lanes; }

/* Pack ``weight`` [columns, in] into ``to``, ROUND_UP(columns, lanes) * in elements, for rows of ``type``: in that
 * type, or with ``halves`` as bfloat16 for rows of float32. ``in`` is even. */
EXPORT void tandem_pack(const void *weight, int64_t columns, int64_t in, int type, int halves, void *to)
{
    active->pack_b(weight, columns, in, words_of(type, halves), to);
}

/* Panels [first, last) of a product, shared by threads, ``each`` of them per part. */
struct panel_job {
    void (*run)(const void *of, long first, long last);
    const void *of;
    long first, last, each;
};

static void panel_part(void *of, long i)
{
    const struct panel_job *job = of;
    long first = job->first + i * job->each, last = first + job->each;
    job->run(job->of, first, last < job->last ? last : job->last);
}

/* Run ``job`` for a product of ``rows`` rows, with ``multiplications`` per panel. */
static void share_panels(struct panel_job *job, long rows, long multiplications, int threads)
{
    long panels = job->last - job->first;
    if (acquire_helpers(rows)) {
        long by_size = multiplications * panels / PART_MULTIPLICATIONS;
        long by_hands = PARTS_PER_WORKER * max_workers(threads), most = by_size > by_hands ? by_size : by_hands;
        long parts = most > MIN_PARTS ? most : MIN_PARTS;
        job->each = (panels + parts - 1) / parts;
        run_shared(panel_part, job, (panels + job->each - 1) / job->each, threads);
        return;
    }
    if (threads > panels)
        threads = (int)panels;
    if (threads <= 1) {
        job->run(job->of, job->first, job->last);
        return;
    }
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int i = 0; i < threads; i++)
        job->run(job->of, job->first + panels * i / threads, job->first + panels * (i + 1) / threads);
}

struct gemm_job {
    const struct linear *linear;
    const struct product *product;
};

static void run_gemm_panels(const void *of, long first, long last)
{
    const struct gemm_job *work = of;
    active->linear_panels(work->linear, work->product, first, last);
}

/* Compute the columns of panels [first, last). */
static void gemm_panels(const struct linear *linear, const struct product *product, long first, long last, int threads)
{
    struct gemm_job work = {linear, product};
    struct panel_job job = {run_gemm_panels, &work, first, last, 0};
    share_panels(&job, product->rows, product->rows * product->in * active->nr, threads);
}

#include "groups_product.h"

/* The blocking of a GEMM, as BLIS calls it: ``mc`` rows of A times ``kc`` elements stay in the second-level cache while
 * they meet all columns of ``nc_panels`` panels of B. */
struct blocking {
    long mc, kc, nc_panels, packed_row, sums_row; /* packed_row in bytes, sums_row in floats */
    int split, packed;
};

static struct blocking choose_blocking(const struct linear *linear, long rows, long in_row, int threads)
{
    struct blocking blocking = {.nc_panels = (linear->columns + active->nr - 1) / active->nr};
    long size = linear->type == BFLOAT16 ? 2 : 4, fits = A_BLOCK_BYTES;
    blocking.split = active->split_row && linear->type == FLOAT32;
    if (active->split_row)
        fits = AMX_A_BLOCK_BYTES;
    long bytes = blocking.split ? 2 * FLOAT_PARTS : size, most = fits / (linear->in * bytes), chunks = 1;
    int least = active->split_row ? AMX_MIN_MC : MIN_MC;
    int below_least = most < rows && most < least; /* whole rows would mean reading the weight from memory for a few
                                                      rows at a time */
    most = below_least ? MAX_MC : most ? most : 1;
    long runs = (rows + most - 1) / most;
    blocking.mc = ROUND_UP((rows + runs - 1) / runs, active->mr);
    if (below_least)
        chunks = (blocking.mc * linear->in * bytes + fits - 1) / fits;
    if (rows > active->one_pass_rows && linear->in > MAX_KC * chunks)
        chunks = (linear->in + MAX_KC - 1) / MAX_KC;
    blocking.kc = ROUND_UP((linear->in + chunks - 1) / chunks, KC_MULTIPLE);
    if (blocking.kc < linear->in) {
        long fit = PARTIAL_C_BYTES * threads / (blocking.mc * active->nr * (long)sizeof(float));
        long groups = fit ? (blocking.nc_panels + fit - 1) / fit : blocking.nc_panels;
        blocking.nc_panels = (blocking.nc_panels + groups - 1) / groups;
        blocking.sums_row = blocking.nc_panels * active->nr;
        blocking.sums_row += blocking.sums_row * (long)sizeof(float) % PAGE ? 0 : 16;
    }
    /* A cache keeps few rows that are whole pages apart: they share its sets. */
    blocking.packed = blocking.split || blocking.sums_row || (rows >= active->mr && in_row * size % PAGE == 0);
    blocking.packed_row = blocking.kc * bytes;
    blocking.packed_row += blocking.packed_row % PAGE ? 0 : 64;
    return blocking;
}

/* Pack the rows of the product (A), product->in elements each, contiguously into ``packed``. */
static void pack_a(const struct blocking *blocking, const struct product *product, long size, char *packed, int threads)
{
    const char *from = product->from;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && product->rows >= threads)
    for (long r = 0; r < product->rows; r++) {
        const char *row = from + r * product->in_row * size;
        if (blocking->split)
            active->split_row((const float *)row, product->in, (uint16_t *)(packed + r * blocking->packed_row));
        else
            memcpy(packed + r * blocking->packed_row, row, product->in * size);
    }
}

/* to[rows, out] = from[rows, in] through ``linear``, plus ``add`` unless NULL; returns 0, or -1 if out of memory. */
EXPORT int tandem_linear(const struct linear *linear, const void *from, void *to, const void *add, int64_t rows,
                         int64_t in_row, int64_t out_row, int threads)
{
    if (!rows)
        return 0;
    if (linear->groups)
        return multiply_groups(linear, from, to, add, rows, in_row, out_row, threads);
    struct blocking blocking = choose_blocking(linear, rows, in_row, threads);
    long size = linear->type == BFLOAT16 ? 2 : 4, panels = (linear->columns + active->nr - 1) / active->nr;
    long most = rows < blocking.mc ? rows : blocking.mc;
    size_t packed_bytes = blocking.packed ? ROUND_UP(most * blocking.packed_row, 64) : 0;
    size_t bytes = packed_bytes + most * blocking.sums_row * sizeof(float);
    char *memory = bytes ? thread_scratch(bytes) : NULL;
    if (bytes && !memory)
        return -1;
    for (long start = 0; start < rows; start += blocking.mc) {
        long count = rows - start < blocking.mc ? rows - start : blocking.mc;
        struct product some = {.to = (char *)to + start * out_row * size, .rows = count, .out_row = out_row};
        some.add = add ? (const char *)add + start * out_row * size : NULL;
        some.sums = blocking.sums_row ? (float *)(memory + packed_bytes) : NULL;
        some.sums_row = blocking.sums_row;
        for (long panel = 0; panel < panels; panel += blocking.nc_panels)
            for (long first = 0; first < linear->in; first += blocking.kc) {
                some.first = first;
                some.in = linear->in - first < blocking.kc ? linear->in - first : blocking.kc;
                some.sums_first = panel * active->nr;
                some.from = (const char *)from + (start * in_row + first) * size;
                some.in_row = in_row;
                if (blocking.packed) {
                    pack_a(&blocking, &some, size, memory, threads);
                    some.from = memory;
                    some.in_row = blocking.packed_row / (blocking.split ? 2 : size);
                }
                long last = panel + blocking.nc_panels < panels ? panel + blocking.nc_panels : panels;
                gemm_panels(linear, &some, panel, last, threads);
            }
    }
    return 0;
}

EXPORT void tandem_norm(const struct norm *norm, const void *from, void *to, int64_t rows, int type)
{
    active->norm_rows(norm, from, to, rows, type);
}

EXPORT void tandem_rotate(const struct rotary *rotary, void *x, int64_t rows, const void *cos, const void *sin,
                          int type)
{
    active->rotate_rows(rotary, x, rows, cos, sin, type);
}

/* Write to ``peaks`` [rows] the index of the largest number of each row [columns] of ``from``; -1 if it is not
 * finite. */
EXPORT void tandem_peaks(const void *from, int64_t rows, int64_t columns, int type, int64_t *peaks)
{
    active->argmax_rows(from, rows, columns, type, peaks);
}

/* Store the keys and values of row i at offset ``offset[i]`` of block ``block[i]``, for all rows. */
EXPORT void tandem_store(const struct layer *layer, const char *key, const char *value, int64_t rows, int64_t key_row,
                         int64_t value_row, const int64_t *block, const int64_t *offset)
{
    long size = layer->element_bytes, keys = layer->kv_heads * layer->k_dim * size;
    long values = layer->kv_heads * layer->v_dim * size;
    for (long i = 0; i < rows; i++) {
        long place = block[i] * layer->block_bytes;
        memcpy((char *)layer->keys + place + offset[i] * keys, key + i * key_row * size, keys);
        memcpy((char *)layer->values + place + offset[i] * values, value + i * value_row * size, values);
    }
}

/* -- a whole decoder ----------------------------------------------------------------------------------------------- */

/* Copy the rows ``from[index[i]]``, ``bytes`` each, contiguously. */
static void gather_rows(void *to, const void *from, const int64_t *index, int64_t rows, size_t bytes)
{
    for (long i = 0; i < rows; i++)
        memcpy((char *)to + i * bytes, (const char *)from + index[i] * bytes, bytes);
}

/* Move the rows of ``index`` (ascending) to the front of ``rows``, ``bytes`` each. */
static void compact_rows(void *rows, const int64_t *index, int64_t count, size_t bytes)
{
    for (long i = 0; i < count; i++)
        memmove((char *)rows + i * bytes, (const char *)rows + index[i] * bytes, bytes);
}

/* Look up the embeddings and rotary angles of all rows; returns -1 if a token is outside the vocabulary. */
static int embed_rows(const struct decoder *decoder, const struct pass *pass)
{
    for (long i = 0; i < pass->rows; i++)
        if (pass->ids[i] < 0 || pass->ids[i] >= decoder->vocabulary)
            return -1;
    const struct decoder_layer *layer = decoder->layers;
    size_t size = layer->attention->element_bytes, angle = layer->rotary->rotated * size;
    if (decoder->embedding_groups) {
        int type = decoder->layers->qkv->type;
        if (tandem_group_rows(decoder->embedding_groups, pass->ids, pass->rows, pass->hidden, decoder->norm->dim, type))
            return -1;
    } else
        gather_rows(pass->hidden, decoder->embedding, pass->ids, pass->rows, decoder->norm->dim * size);
    gather_rows(pass->cos, decoder->cos, pass->positions, pass->rows, angle);
    gather_rows(pass->sin, decoder->sin, pass->positions, pass->rows, angle);
    return 0;
}

/* The first half of a layer: store this step's keys and values in the pool; returns -1 if out of memory. */
static int store_kv(const struct decoder_layer *layer, const struct pass *pass)
{
    const struct rotary *rotary = layer->rotary;
    int type = layer->qkv->type;
    tandem_norm(layer->input_norm, pass->hidden, pass->normed, pass->rows, type);
    if (tandem_linear(layer->qkv, pass->normed, pass->qkv, NULL, pass->rows, layer->qkv->in, rotary->row,
                      pass->threads))
        return -1;
    tandem_rotate(rotary, pass->qkv, pass->rows, pass->cos, pass->sin, type);
    const char *key = (char *)pass->qkv + rotary->query_heads * rotary->dim * layer->attention->element_bytes;
    const char *value = key + rotary->key_heads * rotary->dim * layer->attention->element_bytes;
    tandem_store(layer->attention, key, value, pass->rows, rotary->row, rotary->row, pass->block, pass->offset);
    return 0;
}

/* Elements between rows of the down projection's input: one cache line more where rows would be whole pages apart, of
 * which a cache keeps few. */
static int64_t gated_row(const struct linear *down)
{
    long size = down->type == BFLOAT16 ? 2 : 4;
    return down->in * size % PAGE ? down->in : down->in + 64 / size;
}

/* The second half of a layer: attention over the pool, and the gated MLP; returns -1 if out of memory. In the ``last``
 * layer only the rows to keep are computed after attention, and they move to the front. */
static int attend_and_gate(const struct decoder_layer *layer, const struct pass *pass, int last)
{
    const struct linear *out = layer->out, *gate_up = layer->gate_up, *down = layer->down;
    const struct rotary *rotary = layer->rotary;
    if (tandem_attend(layer->attention, pass->spans, pass->qkv, pass->attended, rotary->row, rotary->dim,
                      pass->threads))
        return -1;
    long rows = pass->rows;
    if (last && pass->kept < rows) {
        rows = pass->kept;
        compact_rows(pass->attended, pass->keep, rows, out->in * layer->attention->element_bytes);
        compact_rows(pass->hidden, pass->keep, rows, out->out * layer->attention->element_bytes);
    }
    if (tandem_linear(out, pass->attended, pass->hidden, pass->hidden, rows, out->in, out->out, pass->threads))
        return -1;
    tandem_norm(layer->mlp_norm, pass->hidden, pass->normed, rows, gate_up->type);
    if (tandem_linear(gate_up, pass->normed, pass->gated, NULL, rows, gate_up->in, gated_row(down), pass->threads))
        return -1;
    return tandem_linear(down, pass->gated, pass->hidden, pass->hidden, rows, gated_row(down), down->out,
                         pass->threads);
}

/* Compute the logits of the rows to keep, and their peaks; returns -1 if out of memory. */
static int make_logits(const struct decoder *decoder, const struct pass *pass)
{
    const struct linear *head = decoder->head;
    tandem_norm(decoder->norm, pass->hidden, pass->normed, pass->kept, head->type);
    if (tandem_linear(head, pass->normed, pass->logits, NULL, pass->kept, head->in, head->out, pass->threads))
        return -1;
    tandem_peaks(pass->logits, pass->kept, head->out, head->type, pass->peaks);
    return 0;
}

/* Run halves [first, last) of the decoder's layers, two per layer; the embedding comes before the first and the logits
 * after the last of all. A caller with work between the halves of a layer, when its keys and values are in the pool,
 * runs a few at a time. All in one call is faster: what Python does between two kernels runs on cold caches. Returns 0,
 * -1 if out of memory, -2 for a token outside the vocabulary. */
EXPORT int tandem_decode(const struct decoder *decoder, const struct pass *pass, int64_t first, int64_t last)
{
    if (first == 0 && embed_rows(decoder, pass))
        return -2;
    for (long half = first; half < last; half++) {
        const struct decoder_layer *layer = decoder->layers + half / 2;
        if (half % 2 ? attend_and_gate(layer, pass, half + 1 == 2 * decoder->count) : store_kv(layer, pass))
            return -1;
    }
    return last == 2 * decoder->count ? make_logits(decoder, pass) : 0;
}

/* -- measuring ----------------------------------------------------------------------------------------------------- */

/* Read every byte of ``words`` [count], a multiple of 32, and return a value that depends on each: measures memory
 * bandwidth. */
EXPORT uint64_t tandem_read(const uint64_t *words, int64_t count, int threads)
{
    uint64_t total = 0;
#pragma omp parallel for schedule(static, 1) num_threads(threads) reduction(^ : total)
    for (int part = 0; part < threads; part++)
        total ^= active->read_words(words, count / 32 * part / threads * 32, count / 32 * (part + 1) / threads * 32);
    return total;
}
