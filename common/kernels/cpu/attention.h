/* Attention of a few query rows over a block table, one tile of TOKENS positions after the other, with an online
 * softmax.
 *
 * The keys and values of a tile are packed as panels in a scratch that stays in cache, once for all query rows of the
 * key-value head, and multiplied by the micro-kernel (micro_kernel.h); scores, sums of weights and outputs are float32.
 * Decode is the case of one row per sequence: its rows are the query heads of the group; when these are few, nothing is
 * packed. While a tile is computed the next one is prefetched, so that memory is read without a pause.
 */

/* Addresses of the groups of a tile, of head 0. ``next_keys`` and ``next_values`` are those of the next tile, or
 * NULL. */
struct NAME(kv_addresses) {
    const char *keys[TOKENS / GROUP], *values[TOKENS / GROUP], *next_keys[TOKENS / GROUP], *next_values[TOKENS / GROUP];
};

/* The task that is computed ``*position`` positions (whole tiles) behind the first of ``task``: ``task`` itself or,
 * where it ends before that, the next one. Changes ``*position`` to a position of that task. NULL if there is none. */
INLINE const struct task *NAME(task_at)(const struct task *task, long *position)
{
    long end = ROUND_UP(task->last - task->first, TOKENS);
    if (*position >= end) {
        *position -= end;
        task = task->next;
    }
    if (task)
        *position += task->first;
    return task && *position < task->last ? task : NULL;
}

/* Fill ``at`` for the tile of ``task`` that begins at position ``first``. */
static void NAME(locate_tile)(const struct layer *layer, const struct task *task, long first,
                              struct NAME(kv_addresses) *at)
{
    /* touch the pages of the tile after the next: a TLB miss takes as long as reading a cache line */
    long keys = (long)GROUP * layer->kv_heads * layer->k_dim * layer->element_bytes;
    long values = (long)GROUP * layer->kv_heads * layer->v_dim * layer->element_bytes;
    long next = first - task->first + TOKENS, far = next + TOKENS;
    const struct task *next_task = NAME(task_at)(task, &next), *far_task = NAME(task_at)(task, &far);
    if (far_task && far_task->heads == layer->kv_heads)
        for (long end = far + TOKENS < far_task->last ? far + TOKENS : far_task->last; far < end; far += GROUP) {
            for (long page = 0; page < keys; page += PAGE)
                __builtin_prefetch(key_row(layer, far_task->table, far, 0) + page, 0, 3);
            for (long page = 0; page < values; page += PAGE)
                __builtin_prefetch(value_row(layer, far_task->table, far, 0) + page, 0, 3);
        }
    for (int g = 0; g < TOKENS / GROUP; g++, next += GROUP) {
        long here = first + g * GROUP;
        int more = next_task && next < next_task->last;
        at->keys[g] = here < task->last ? key_row(layer, task->table, here, task->head) : NULL;
        at->values[g] = here < task->last ? value_row(layer, task->table, here, task->head) : NULL;
        at->next_keys[g] = more ? key_row(layer, next_task->table, next, next_task->head) : NULL;
        at->next_values[g] = more ? value_row(layer, next_task->table, next, next_task->head) : NULL;
    }
}

INLINE void NAME(prefetch_row)(const char *row, long bytes)
{
    if (row)
        for (long line = 0; line < bytes; line += 64)
            __builtin_prefetch(row + line, 0, 3);
}

/* Pack a group's keys as words, [steps][NR] in each panel; positions are the columns. ``next`` is prefetched. */
INLINE void NAME(pack_keys)(const struct layer *layer, const char *from, const char *next, int pairs, uint32_t *panel)
{
    long dim = layer->k_dim, steps = KEY_STEPS(layer, pairs);
    long stride = (long)layer->kv_heads * dim * layer->element_bytes;
#if LANES == 16
    if (pairs && dim % 32 == 0) {
        for (long s = 0; s < steps; s += 16) {
            if (next)
                for (int t = 0; t < GROUP; t++)
                    __builtin_prefetch(next + t * stride + s * 4, 0, 2);
            NAME(transpose_words)(from + s * 4, stride, panel + s * NR, NR);
        }
        return;
    }
#endif
    for (int t = 0; t < GROUP; t++, from += stride) {
        uint32_t *column = panel + (t / NR) * NR * steps + t % NR;
        NAME(prefetch_row)(next ? next + t * stride : NULL, dim * layer->element_bytes);
        if (!pairs)
            for (long s = 0; s < steps; s++)
                column[s * NR] = NAME(float_bits)(NAME(load)(from, s, layer->type));
        else
            for (long s = 0; s < steps; s++) {
                const uint16_t *two = (const uint16_t *)from + 2 * s;
                column[s * NR] = two[0] | (2 * s + 1 < dim ? (uint32_t)two[1] << 16 : 0);
            }
    }
}

/* Pack a group's values as words, [value_steps][width] in each panel, from step ``step`` on; head dimensions are the
 * columns. Rows from ``live`` on may hold anything and become zero. ``next`` is prefetched. */
INLINE void NAME(pack_values)(const struct layer *layer, const char *from, const char *next, int live, int pairs,
                              long value_steps, long step, uint32_t *to)
{
    long dim = layer->v_dim, padded = ROUND_UP(dim, LANES), stride = (long)layer->kv_heads * dim * layer->element_bytes;
    int per_step = pairs ? 2 : 1;
#if LANES == 16
    if (pairs && dim % 32 == 0) {
        for (int t = 0; t < GROUP; t += 2)
            for (long d = 0; d < dim; d += 32) {
                long column = d / NR * NR, width = dim - column < NR ? dim - column : NR;
                if (next) {
                    __builtin_prefetch(next + t * stride + d * 2, 0, 2);
                    __builtin_prefetch(next + (t + 1) * stride + d * 2, 0, 2);
                }
                NAME(interleave_words)(from + t * stride + d * 2, stride, live - t,
                                       to + column * value_steps + (step + t / 2) * width + d - column);
            }
        return;
    }
#endif
    for (int t = 0; t < GROUP; t += per_step, step++, from += per_step * stride) {
        for (int each = 0; each < per_step; each++)
            NAME(prefetch_row)(next ? next + (t + each) * stride : NULL, dim * layer->element_bytes);
        for (long column = 0; column < padded; column += NR) {
            long width = padded - column < NR ? padded - column : NR;
            uint32_t *row = to + column * value_steps + step * width;
            long here = dim - column < width ? dim - column : width;
            const uint16_t *own = (const uint16_t *)from + column, *below = (const uint16_t *)(from + stride) + column;
            if (live <= t)
                memset(row, 0, width * 4);
            else if (!pairs)
                for (long d = 0; d < here; d++)
                    row[d] = NAME(float_bits)(NAME(load)(from, column + d, layer->type));
            else if (live > t + 1)
                for (long d = 0; d < here; d++)
                    row[d] = own[d] | (uint32_t)below[d] << 16;
            else
                for (long d = 0; d < here; d++)
                    row[d] = own[d];
            for (long d = here; d < width; d++)
                row[d] = 0;
        }
    }
}

/* Pack the keys and values of a tile for one head, ``head`` behind the first of the task, as positions ``start`` and
 * following of the scratch. Panels of values have ``value_steps`` steps; values from position ``valid`` on become
 * zero. */
INLINE void NAME(pack_kv_tile)(const struct layer *layer, const struct NAME(kv_addresses) *at, int head, long start,
                               long valid, long value_steps, int pairs, const struct scratch *s)
{
    long steps = KEY_STEPS(layer, pairs), end = start + TOKENS < valid ? start + TOKENS : valid;
    long key_head = (long)head * layer->k_dim * layer->element_bytes;
    long value_head = (long)head * layer->v_dim * layer->element_bytes;
    long packed = HAS_AMX && pairs ? ROUND_UP(end, 2 * GROUP) : end;
    for (long group = start; group < packed; group += GROUP) {
        int g = (int)((group - start) / GROUP);
        if (group < end)
            NAME(pack_keys)(layer, at->keys[g] + key_head, at->next_keys[g] ? at->next_keys[g] + key_head : NULL,
                            pairs, s->keys + group / NR * NR * steps + group % NR);
        NAME(pack_values)(layer, at->values[g] + value_head,
                          at->next_values[g] ? at->next_values[g] + value_head : NULL, (int)(valid - group), pairs,
                          value_steps, pairs ? group / 2 : group, s->values);
    }
}

#if HAS_BF16_DOT
/* 2^x with a relative error below 8e-5, a twentieth of the error of rounding to bfloat16. */
INLINE floats NAME(exp2_bf16)(floats x)
{
    floats rest = (floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    floats p = NAME(broadcast)(0.0780244f);
    p = p * rest + 0.22606733f;
    p = p * rest + 0.69583348f;
    p = p * rest + 0.99992522f;
    return (floats)_mm512_scalef_ps((__m512)p, (__m512)x);
}

#endif

/* The softmax weight 2^x, as exact as the type in which it is multiplied. */
INLINE floats NAME(weight)(floats x, int pairs)
{
#if HAS_BF16_DOT
    if (pairs)
        return NAME(exp2_bf16)(x);
#endif
    return NAME(exp2)(x);
}

/* Turn one row's scores [tokens] into softmax weights: apply the cap, mask positions outside [low, high), and take
 * powers of two relative to the highest score so far. Adds the weights to ``sums`` by lane. Returns the factor by which
 * earlier sums and outputs shrink. */
INLINE float NAME(softmax_row)(const struct layer *layer, float *scores, void *weights, long tokens, long low,
                               long high, int pairs, float *highest, float *sums)
{
    float scale = (layer->softcap > 0 ? 1 : layer->scaling) * LOG2_E;
    floats best = NAME(broadcast)(-INFINITY), sum = {};
    ints lane;
    for (int i = 0; i < LANES; i++)
        lane[i] = i;
    for (long t = 0; t < tokens; t += LANES) {
        floats x = *(floats *)(scores + t);
        if (layer->softcap > 0)
            *(floats *)(scores + t) = x = NAME(tanh)(x * (layer->scaling / layer->softcap)) * layer->softcap;
        if (t < low || t + LANES > high) {
            ints within = (lane + (int)t >= (int)low) & (lane + (int)t < (int)high);
            *(floats *)(scores + t) = x = NAME(select)(within, x, NAME(broadcast)(-INFINITY));
        }
        best = NAME(max)(x, best);
    }
    float shrink = 1, top = *highest;
    best *= scale;
    if (NAME(any_above)(best, top)) {
        top = NAME(reduce_max)(best);
        shrink = NAME(exp2)(NAME(broadcast)(*highest - top))[0];
        *highest = top;
    }
    for (long t = 0; t < tokens; t += LANES) {
        floats weight = NAME(weight)(*(floats *)(scores + t) * scale - top, pairs);
        sum += weight;
        if (pairs)
            NAME(store_bf16)((uint16_t *)weights + t, weight);
        else
            *(floats *)((float *)weights + t) = weight;
    }
    *(floats *)sums = *(floats *)sums * shrink + sum;
    return shrink;
}

/* Copy the query rows of key-value head ``head`` as words, [row][head of the group][steps]. */
INLINE void NAME(pack_queries)(const struct layer *layer, const struct task *task, int head, int pairs, uint32_t *to)
{
    long dim = layer->k_dim, steps = KEY_STEPS(layer, pairs);
    for (long row = 0; row < task->rows; row++)
        for (int h = 0; h < layer->group; h++, to += steps) {
            long at = (task->row + row) * task->call->query_row + (head * layer->group + h) * task->call->query_head;
            if (pairs) {
                to[steps - 1] = 0;
                memcpy(to, (const uint16_t *)task->call->query + at, dim * 2);
            } else
                for (long d = 0; d < dim; d++)
                    to[d] = NAME(float_bits)(NAME(load)(task->call->query, at + d, layer->type));
        }
}

/* How many of the ``tokens`` positions from ``first`` on lie before the end of what the ``rows`` query rows from
 * ``row`` on can see; 0 if they see none of them. */
INLINE long NAME(visible_tokens)(const struct layer *layer, const struct task *task, long row, int rows, long first,
                                 long tokens)
{
    long first_position = task->position + row / layer->group;
    long end = task->position + (row + rows - 1) / layer->group + 1 - first;
    long start = layer->window ? first_position - layer->window + 1 - first : 0;
    return end <= 0 || start >= tokens ? 0 : end < tokens ? end : tokens;
}

/* Attend one tile of positions for all query rows of one key-value head. */
INLINE void NAME(attend_tile)(const struct layer *layer, const struct task *task, const struct scratch *s, long first,
                              long tokens, long valid, int head, int pairs)
{
    long steps = KEY_STEPS(layer, pairs), padded = ROUND_UP(layer->v_dim, LANES), count = task->rows * layer->group;
    long value_steps = pairs ? tokens / 2 : tokens;
    const uint32_t *query = s->query + (long)head * count * steps;
    float *out = s->out + (long)head * count * padded;
    for (long row = 0; row < count; row += MR) {
        int rows = count - row < MR ? (int)(count - row) : MR;
        long here = ROUND_UP(NAME(visible_tokens)(layer, task, row, rows, first, tokens), GROUP);
        if (!here)
            continue;
        for (long column = 0; column < here; column += NR)
            /* a panel of keys is NR_VECTORS wide in memory even where fewer are filled */
            NAME(gemm_tile)(rows, NR_VECTORS, pairs, query + row * steps, steps, s->keys + column * steps, steps,
                            s->scores + column, TOKENS, NULL, NULL, 0);
        for (int r = 0; r < rows; r++) {
            long position = task->position + (row + r) / layer->group, place = head * count + row + r;
            long low = layer->window ? position - layer->window + 1 - first : 0;
            long high = position + 1 - first < valid ? position + 1 - first : valid;
            void *weights = (char *)s->weights + r * TOKENS * 4;
            s->shrink[r] = NAME(softmax_row)(layer, s->scores + r * TOKENS, weights, here, low, high, pairs,
                                             s->highest + place, s->sums + place * LANES);
        }
        for (long column = 0; column < padded; column += NR) {
            int width = (int)((padded - column < NR ? padded - column : NR) / LANES);
            NAME(gemm_tile)(rows, width, pairs, (const uint32_t *)s->weights, TOKENS,
                            s->values + column * value_steps, pairs ? here / 2 : here, out + row * padded + column,
                            padded, s->shrink, NULL, 0);
        }
    }
}

#if HAS_AMX
/* Up to SPAN_ROWS query rows of one head and their state over SPAN positions. */
struct NAME(row_block) {
    const struct layer *layer;
    const struct task *task;
    const struct scratch *s;
    long row, first, valid, here; /* here: positions to compute */
    int head, rows, each, done;   /* each: rows to softmax per item of side work; done: rows that have weights */
    long position, query;         /* of the next row: its position behind ``first``, its place in the group */
    float *scores, *out;          /* [rows][SPAN], [rows][padded] */
    uint16_t *weights;            /* [rows][SPAN] */
};

/* Turn the scores of one row into weights, and shrink its earlier sums. */
static __attribute__((noinline)) void NAME(softmax_block_row)(const struct NAME(row_block) *block, long r, long place,
                                                              long low, long high)
{
    const struct layer *layer = block->layer;
    long padded = ROUND_UP(layer->v_dim, LANES), some = ROUND_UP(high > 0 ? high : 0, LANES);
    float *scores = block->scores + r * SPAN, *out = block->out + r * padded, shrink;
    float *highest = block->s->highest + place, *sums = block->s->sums + place * LANES;
    uint16_t *weights = block->weights + r * SPAN;
    shrink = NAME(softmax_row)(layer, scores, weights, some, low, high, 1, highest, sums);
    if (some < block->here)
        memset(weights + some, 0, (block->here - some) * 2);
    if (shrink != 1)
        for (long d = 0; d < padded; d += LANES)
            *(floats *)(out + d) *= shrink;
}

#define MAX_WEIGHT_SUM 0x1p60f /* limit of the sum of weights of a row: sums of many such rows stay finite */

/* Weights of ``count`` positions (whole pairs of vectors) relative to ``highest``; with ``all`` every position counts,
 * else those before ``high``. Returns their sum. */
INLINE floats NAME(exp_row)(const float *scores, uint16_t *weights, long count, long high, int all, float scale,
                            float highest)
{
    floats sum = {};
    UNROLL for (long t = 0; t < count; t += 2 * LANES) {
        floats first = NAME(exp2_bf16)(*(const floats *)(scores + t) * scale - highest);
        floats second = NAME(exp2_bf16)(*(const floats *)(scores + t + LANES) * scale - highest);
        if (!all) {
            uint32_t within = high >= t + 2 * LANES ? ~0u : high > t ? ~(~0u << (high - t)) : 0;
            first = (floats)_mm512_maskz_mov_ps((__mmask16)within, (__m512)first);
            second = (floats)_mm512_maskz_mov_ps((__mmask16)(within >> LANES), (__m512)second);
        }
        _mm512_storeu_si512(weights + t, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
        sum += first + second;
    }
    return sum;
}

/* Turn the next row of scores into weights. They are relative to the highest score of the earlier spans, or to the
 * first score of the row, so that no pass over the scores has to find the maximum first: powers are as exact above 1 as
 * below. Falls back to softmax_block_row where weights become too large. */
INLINE void NAME(softmax_next_row)(struct NAME(row_block) *block)
{
    const struct layer *layer = block->layer;
    long r = block->done++, position = block->position;
    long place = block->head * block->task->rows * layer->group + block->row + r;
    long low = layer->window ? position - layer->window + 1 : 0;
    long high = position + 1 < block->valid ? position + 1 : block->valid;
    const float *scores = block->scores + r * SPAN;
    uint16_t *weights = block->weights + r * SPAN;
    float *highest = block->s->highest + place, scale = layer->scaling * LOG2_E;
    if (++block->query == layer->group) {
        block->query = 0;
        block->position++;
    }
    if (low <= 0 && high > 0 && layer->softcap <= 0) {
        floats sum;
        if (*highest == -FLT_MAX && fabsf(scores[0] * scale) < FLT_MAX)
            *highest = scores[0] * scale;
        if (high >= SPAN)
            sum = NAME(exp_row)(scores, weights, SPAN, high, 1, scale, *highest);
        else
            sum = NAME(exp_row)(scores, weights, block->here, high, 0, scale, *highest);
        if (!NAME(any_above)(sum, MAX_WEIGHT_SUM)) {
            *(floats *)(block->s->sums + place * LANES) += sum;
            return;
        }
    }
    NAME(softmax_block_row)(block, r, place, low, high);
}

static void NAME(softmax_some_rows)(void *of, long)
{
    struct NAME(row_block) *block = of;
    for (int i = 0; i < block->each && block->done < block->rows; i++)
        NAME(softmax_next_row)(block);
}

/* Compute the scores of ``block``; as side work, turn those of ``other`` (NULL: none) into weights. */
static void NAME(score_block)(struct NAME(tile_config) *now, const struct NAME(row_block) *block,
                              struct NAME(row_block) *other)
{
    long steps = KEY_STEPS(block->layer, 1), count = block->task->rows * block->layer->group;
    struct NAME(a_block) query = {.words = block->s->query + (block->head * count + block->row) * steps, .row = steps,
                               .parts = 1};
    for (long column = 0; column < block->here; column += 2 * LANES) {
        struct NAME(b_panel) keys = {.words = block->s->keys + column / NR * NR * steps + column % NR,
                                   .row = NR, .parts = 1};
        NAME(amx_block)(now, block->rows, 2, query, keys, steps, block->scores + column, SPAN, 0,
                        NAME(softmax_some_rows), other, other ? steps / AMX_STEPS * 2 : 0);
    }
}

/* Add the values of ``block`` by their weights; as side work, turn the scores of ``other`` (NULL: none) into
 * weights. */
static void NAME(add_block)(struct NAME(tile_config) *now, const struct NAME(row_block) *block,
                            struct NAME(row_block) *other)
{
    long padded = ROUND_UP(block->layer->v_dim, LANES), steps = block->here / 2;
    struct NAME(a_block) weights = {.words = (const uint32_t *)block->weights, .row = SPAN / 2, .parts = 1};
    for (long column = 0; column < padded; column += 2 * LANES) {
        long start = column / NR * NR;
        struct NAME(b_panel) values = {.words = block->s->values + start * (SPAN / 2) + column - start,
                                     .row = padded - start < NR ? padded - start : NR, .parts = 1};
        NAME(amx_block)(now, block->rows, (int)((padded - column) / LANES), weights, values, steps, block->out + column,
                        padded, 1, NAME(softmax_some_rows), other, other ? steps / AMX_STEPS * 2 : 0);
    }
}

/* Attend SPAN positions for all query rows of one key-value head, one block of rows after the other, as a pipeline:
 * while one block gets its weights, the block behind it gets its scores and the block before it the sum of its
 * values. */
static void NAME(attend_span)(const struct layer *layer, const struct task *task, const struct scratch *s, long first,
                              long valid, int head)
{
    struct NAME(tile_config) now = {};
    struct NAME(row_block) blocks[3], *scored = NULL, *weighed = NULL;
    long padded = ROUND_UP(layer->v_dim, LANES), count = task->rows * layer->group, steps = KEY_STEPS(layer, 1), n = 0;
    for (long row = 0; row < count || scored || weighed; row += SPAN_ROWS) {
        struct NAME(row_block) *block = NULL;
        if (row < count) {
            int rows = count - row < SPAN_ROWS ? (int)(count - row) : SPAN_ROWS;
            long here = ROUND_UP(NAME(visible_tokens)(layer, task, row, rows, first, valid), 2 * AMX_STEPS);
            if (!here)
                continue;
            block = blocks + n % 3;
            *block = (struct NAME(row_block)){
                .layer = layer, .task = task, .s = s, .row = row, .first = first, .valid = valid, .here = here,
                .head = head, .rows = rows, .position = task->position + row / layer->group - first,
                .query = row % layer->group, .scores = s->scores + n % 2 * SPAN_ROWS * SPAN,
                .out = s->out + (head * count + row) * padded,
                .weights = (uint16_t *)s->weights + n % 2 * SPAN_ROWS * SPAN};
            n++;
        }
        if (scored) {
            long parts = (block ? block->here / LANES * (steps / AMX_STEPS) : 0) +
                         (weighed ? (padded + LANES) / (2 * LANES) * (weighed->here / AMX_STEPS) : 0);
            scored->each = parts ? (int)((scored->rows + parts - 1) / parts) : 1;
        }
        if (block)
            NAME(score_block)(&now, block, scored);
        if (weighed)
            NAME(add_block)(&now, weighed, scored);
        while (scored && scored->done < scored->rows)
            NAME(softmax_some_rows)(scored, 0);
        weighed = scored;
        scored = block;
    }
    NAME(release_tiles)();
}

/* Attend SPAN positions for all query rows of all heads of a task. */
static void NAME(attend_heads)(const struct layer *layer, const struct task *task, const struct scratch *s, long first)
{
    long valid = task->last - first < SPAN ? task->last - first : SPAN;
    struct NAME(kv_addresses) at[SPAN / TOKENS];
    for (long t = 0; t < valid; t += TOKENS)
        NAME(locate_tile)(layer, task, first + t, at + t / TOKENS);
    for (int head = 0; head < task->heads; head++) {
        for (long t = 0; t < valid; t += TOKENS)
            NAME(pack_kv_tile)(layer, at + t / TOKENS, head, t, valid, SPAN / 2, 1, s);
        NAME(attend_span)(layer, task, s, first, valid, head);
    }
}
#endif

#if HAS_AMX
#include "attention_amx.h"
#endif

/* -- few rows --------------------------------------------------------------------------------------------------------
 *
 * A decode row has too few heads to pay for packing, which would take most of the time. Keys are multiplied in place,
 * with one vector of partial sums per position; these are then reduced to scores, one per lane. bfloat16 values are
 * paired in registers. The keys of 16 positions of all heads are computed, then their values: pieces that are adjacent
 * in memory, since only sequential reads reach full bandwidth. What comes next is prefetched in the same order, at
 * several distances: the processor drops prefetches while too many loads are under way, and the more are asked for at
 * once the more it drops. */

#undef PREFETCH_DISTANCES
#if PREFETCH_TO_L2
#define PREFETCH_DISTANCES 3
#else
#define PREFETCH_DISTANCES 2
#endif
#define UNPACKED_BF16 (HAS_BF16_DOT && !HAS_AMX) /* whether bfloat16 rows are attended unpacked too */

/* Prefetch distances in bytes, short enough that the lines are still in the cache they went to when they are used. */
static const long NAME(prefetch_distance)[PREFETCH_DISTANCES] = {
#if PREFETCH_TO_L2
    48 << 10,
#endif
    24 << 10, 8 << 10};

/* The pieces of a tile in the order in which they are read, then those of the next tile. */
struct NAME(pieces) {
    const char *at[4 * TOKENS / GROUP];
    long heads, whole[PREFETCH_DISTANCES], rest[PREFETCH_DISTANCES]; /* per distance: whole pieces, and heads of a
                                                                        piece */
};

static void NAME(order_pieces)(const struct layer *layer, const struct NAME(kv_addresses) *at, long groups,
                               struct NAME(pieces) *pieces)
{
    long head = (long)GROUP * layer->k_dim * layer->element_bytes, heads = layer->kv_heads;
    long most = heads * 2 * TOKENS / GROUP;
    pieces->heads = heads;
    for (int i = 0; i < PREFETCH_DISTANCES; i++) {
        long ahead = NAME(prefetch_distance)[i] / head < most ? NAME(prefetch_distance)[i] / head : most;
        pieces->whole[i] = ahead / heads;
        pieces->rest[i] = ahead % heads;
    }
    for (long g = 0; g < groups; g++) {
        pieces->at[2 * g] = at->keys[g];
        pieces->at[2 * g + 1] = at->values[g];
    }
    for (long g = 0; g < TOKENS / GROUP; g++) { /* no next tile: prefetch something that is in cache */
        pieces->at[2 * (groups + g)] = at->next_keys[g] ? at->next_keys[g] : at->keys[0];
        pieces->at[2 * (groups + g) + 1] = at->next_values[g] ? at->next_values[g] : at->values[0];
    }
}

/* Where the prefetches beside the computation of one head's part of a piece are. */
struct NAME(prefetch_cursor) {
    const char *from[PREFETCH_DISTANCES];
};

/* The cursor for the part of ``head`` in piece number ``piece``; the part has ``bytes`` bytes. */
INLINE struct NAME(prefetch_cursor) NAME(prefetch_cursor_at)(const struct NAME(pieces) *pieces, long piece, long head,
                                                             long bytes)
{
    struct NAME(prefetch_cursor) cursor;
    UNROLL for (int i = 0; i < PREFETCH_DISTANCES; i++) {
        long ahead = head + pieces->rest[i], next = ahead >= pieces->heads;
        cursor.from[i] = pieces->at[piece + pieces->whole[i] + next] + (next ? ahead - pieces->heads : ahead) * bytes;
    }
    return cursor;
}

INLINE void NAME(prefetch_line)(struct NAME(prefetch_cursor) *cursor)
{
    UNROLL for (int i = 0; i < PREFETCH_DISTANCES; i++) {
        __builtin_prefetch(cursor->from[i], 0, PREFETCH_TO_L2 ? 2 : 3);
        cursor->from[i] += 64;
    }
}

INLINE void NAME(prefetch_lines)(struct NAME(prefetch_cursor) *cursor, long lines)
{
    for (long line = 0; line < lines; line++)
        NAME(prefetch_line)(cursor);
}

/* -- of float32 */

/* Reduce four vectors to four floats. */
INLINE void NAME(reduce_add_4)(const floats *a, float *to)
{
#if LANES == 8
    __m256 low = _mm256_hadd_ps((__m256)a[0], (__m256)a[1]), high = _mm256_hadd_ps((__m256)a[2], (__m256)a[3]);
    __m256 halves = _mm256_hadd_ps(low, high);
    _mm_storeu_ps(to, _mm256_castps256_ps128(halves) + _mm256_extractf128_ps(halves, 1));
#else
    for (int i = 0; i < 4; i++)
        to[i] = NAME(reduce_add)(a[i]);
#endif
}

/* Scores of a head's query rows [dim] against the 16 positions of a group, four positions at a time: more of them would
 * not fit into registers. */
INLINE void NAME(score_floats)(const float *query, const char *keys, long stride, long dim, float *scores, int rows,
                               struct NAME(prefetch_cursor) cursor)
{
    for (int t = 0; t < GROUP; t += 4, keys += 4 * stride) {
        floats sums[MAX_UNPACKED_ROWS][4] = {};
        for (long d = 0; d < dim; d += LANES) {
            NAME(prefetch_lines)(&cursor, LANES / 4);
            UNROLL for (int i = 0; i < 4; i++) {
                floats key = *(const floats *)((const float *)(keys + i * stride) + d);
                UNROLL for (int r = 0; r < rows; r++)
                    sums[r][i] += *(const floats *)(query + r * dim + d) * key;
            }
        }
        UNROLL for (int r = 0; r < rows; r++)
            NAME(reduce_add_4)(sums[r], scores + r * GROUP + t);
    }
}

/* out[r][d] = out[r][d] * shrink[r] + weights[r] . values[.][d] for ``width`` vectors of dimensions and the first
 * ``live`` positions of a group. */
INLINE void NAME(add_floats)(const char *values, long stride, int live, const float *weights, const float *shrink,
                             float *out, long padded, int rows, int width, struct NAME(prefetch_cursor) *cursor)
{
    floats sums[MAX_UNPACKED_ROWS][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < width; v++)
            sums[r][v] = *(const floats *)(out + r * padded + v * LANES) * shrink[r];
    for (int t = 0; t < live; t++, values += stride) {
        NAME(prefetch_lines)(cursor, (width * LANES + 15) / 16);
        UNROLL for (int v = 0; v < width; v++) {
            floats value = *(const floats *)((const float *)values + v * LANES);
            UNROLL for (int r = 0; r < rows; r++)
                sums[r][v] += value * weights[r * GROUP + t];
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < width; v++)
            *(floats *)(out + r * padded + v * LANES) = sums[r][v];
}

#if UNPACKED_BF16
/* -- of bfloat16 */

/* Reduce each of four vectors within its 128-bit lanes; the four results are the elements of each lane of one
 * vector. */
INLINE __m512 NAME(reduce_4_to_lanes)(const __m512 *a)
{
    __m512 low = _mm512_unpacklo_ps(a[0], a[1]) + _mm512_unpackhi_ps(a[0], a[1]);
    __m512 high = _mm512_unpacklo_ps(a[2], a[3]) + _mm512_unpackhi_ps(a[2], a[3]);
    return (__m512)_mm512_unpacklo_pd((__m512d)low, (__m512d)high) +
           (__m512)_mm512_unpackhi_pd((__m512d)low, (__m512d)high);
}

/* Add up the lanes of each of four vectors; the result of vector i is lane i. */
INLINE __m512 NAME(reduce_lanes_4)(const __m512 *a)
{
    __m512 low = _mm512_shuffle_f32x4(a[0], a[1], 0x88) + _mm512_shuffle_f32x4(a[0], a[1], 0xDD);
    __m512 high = _mm512_shuffle_f32x4(a[2], a[3], 0x88) + _mm512_shuffle_f32x4(a[2], a[3], 0xDD);
    return _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xDD);
}

/* Scores of a head's query rows [dim] against the 16 positions of a group, four positions at a time: more of them would
 * not fit into registers. */
INLINE void NAME(score_pairs)(const uint16_t *query, const char *keys, long stride, long dim, float *scores, int rows,
                              struct NAME(prefetch_cursor) cursor)
{
    __m512 fours[MAX_UNPACKED_ROWS][4];
    UNROLL for (int i = 0; i < 4; i++, keys += 4 * stride) {
        __m512 sums[MAX_UNPACKED_ROWS][4] = {};
        for (long d = 0; d < dim; d += 32)
            UNROLL for (int t = 0; t < 4; t++) {
                NAME(prefetch_line)(&cursor);
                __m512bh key = (__m512bh)_mm512_loadu_si512(keys + t * stride + d * 2);
                UNROLL for (int r = 0; r < rows; r++)
                    sums[r][t] =
                        _mm512_dpbf16_ps(sums[r][t], key, (__m512bh)_mm512_loadu_si512(query + r * dim + d));
            }
        UNROLL for (int r = 0; r < rows; r++)
            fours[r][i] = NAME(reduce_4_to_lanes)(sums[r]);
    }
    UNROLL for (int r = 0; r < rows; r++)
        _mm512_storeu_ps(scores + r * GROUP, NAME(reduce_lanes_4)(fours[r]));
}

/* out[r][d] = out[r][d] * shrink[r] + weights[r] . values[.][d] for 32 * ``parts`` dimensions and the first ``live``
 * positions of a group. */
INLINE void NAME(add_pairs)(const char *values, long stride, int live, const int *weights, const float *shrink,
                            float *out, long padded, int rows, int parts, struct NAME(prefetch_cursor) *cursor)
{
    __m512 sums[MAX_UNPACKED_ROWS][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < 2 * parts; v++)
            sums[r][v] = _mm512_loadu_ps(out + r * padded + v * 16) * shrink[r];
    for (int t = 0; t < live; t += 2) {
        __m512i pairs[4];
        UNROLL for (int p = 0; p < parts; p++) {
            NAME(prefetch_line)(cursor);
            NAME(interleave)(values + t * stride + p * 64, stride, live - t, pairs + p * 2, pairs + p * 2 + 1);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            NAME(prefetch_lines)(cursor, parts * (r + 1) / rows - parts * r / rows);
            __m512bh weight = (__m512bh)_mm512_set1_epi32(weights[r * GROUP / 2 + t / 2]);
            UNROLL for (int v = 0; v < 2 * parts; v++)
                sums[r][v] = _mm512_dpbf16_ps(sums[r][v], weight, (__m512bh)pairs[v]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < 2 * parts; v++)
            _mm512_storeu_ps(out + r * padded + v * 16, sums[r][v]);
}
#endif

/* score_floats, or score_pairs for bfloat16. */
INLINE void NAME(score_group)(const uint32_t *query, const char *keys, long stride, long dim, float *scores, int rows,
                              int pairs, struct NAME(prefetch_cursor) cursor)
{
#if UNPACKED_BF16
    if (pairs) {
        NAME(score_pairs)((const uint16_t *)query, keys, stride, dim, scores, rows, cursor);
        return;
    }
#endif
    NAME(score_floats)((const float *)query, keys, stride, dim, scores, rows, cursor);
}

/* add_floats, or add_pairs for bfloat16, over all dimensions of a head. */
INLINE void NAME(add_head)(const struct layer *layer, const char *values, int live, const float *weights,
                           const float *shrink, float *out, int rows, int pairs, struct NAME(prefetch_cursor) cursor)
{
    long dim = layer->v_dim, stride = layer->kv_heads * dim * layer->element_bytes, column = 0;
    long padded = ROUND_UP(dim, LANES);
#if UNPACKED_BF16
    if (pairs) {
        const int *pair = (const int *)weights;
        for (; column + 64 <= dim; column += 64)
            NAME(add_pairs)(values + column * 2, stride, live, pair, shrink, out + column, padded, rows, 2, &cursor);
        if (column < dim)
            NAME(add_pairs)(values + column * 2, stride, live, pair, shrink, out + column, padded, rows, 1, &cursor);
        return;
    }
#endif
    for (; column + 4 * LANES <= dim; column += 4 * LANES)
        NAME(add_floats)(values + column * 4, stride, live, weights, shrink, out + column, padded, rows, 4, &cursor);
    for (; column < dim; column += LANES)
        NAME(add_floats)(values + column * 4, stride, live, weights, shrink, out + column, padded, rows, 1, &cursor);
}

/* Attend one tile of positions for the few rows of all heads of a task: as attend_tile, but without packing and 16
 * positions at a time. */
INLINE void NAME(attend_unpacked)(const struct layer *layer, const struct task *task, const struct scratch *s,
                                  const struct NAME(kv_addresses) *at, long first, long tokens, long valid, int rows,
                                  int pairs)
{
    long bytes = layer->element_bytes, key_bytes = layer->k_dim * bytes, value_bytes = layer->v_dim * bytes;
    long steps = KEY_STEPS(layer, pairs), padded = ROUND_UP(layer->v_dim, LANES), heads = task->heads;
    long words = pairs ? GROUP / 2 : GROUP, groups = tokens / GROUP, count = heads * rows;
    struct NAME(pieces) pieces;
    NAME(order_pieces)(layer, at, groups, &pieces);
    long positions[MAX_UNPACKED_ROWS]; /* of a head's rows: computed once, since a division per group is slow */
    for (long row = 0; row < rows; row++)
        positions[row] = task->position + row / layer->group;
    for (long g = 0; g < groups; g++) {
        long start = first + g * GROUP, live = valid - g * GROUP < GROUP ? valid - g * GROUP : GROUP;
        for (long head = 0; head < heads; head++)
            NAME(score_group)(s->query + head * rows * steps, at->keys[g] + head * key_bytes,
                              layer->kv_heads * key_bytes, layer->k_dim, s->scores + head * rows * GROUP, rows, pairs,
                              NAME(prefetch_cursor_at)(&pieces, 2 * g, head, GROUP * key_bytes));
        for (long row = 0; row < count; row++) {
            long position = positions[row % rows];
            long low = layer->window ? position - layer->window + 1 - start : 0;
            long high = position + 1 - start < live ? position + 1 - start : live;
            s->shrink[row] = NAME(softmax_row)(layer, s->scores + row * GROUP, s->weights + row * words, GROUP, low,
                                               high, pairs, s->highest + row, s->sums + row * LANES);
        }
        for (long head = 0; head < heads; head++) {
            const char *values = at->values[g] + head * value_bytes;
            struct NAME(prefetch_cursor) cursor = NAME(prefetch_cursor_at)(&pieces, 2 * g + 1, head,
                                                                           GROUP * value_bytes);
            const float *weights = s->weights + head * rows * words, *shrink = s->shrink + head * rows;
            float *out = s->out + head * rows * padded;
            if (live == GROUP)
                NAME(add_head)(layer, values, GROUP, weights, shrink, out, rows, pairs, cursor);
            else
                NAME(add_head)(layer, values, (int)live, weights, shrink, out, rows, pairs, cursor);
        }
    }
}

/* Whether attend_unpacked can be used: few rows, and dimensions that are whole vectors. */
INLINE int NAME(fits_unpacked)(const struct layer *layer, long count, int pairs)
{
    if (count > MAX_UNPACKED_ROWS)
        return 0;
#if UNPACKED_BF16
    if (pairs)
        return layer->k_dim % 32 == 0 && layer->v_dim % 32 == 0;
#endif
    return layer->type == FLOAT32 && layer->k_dim % LANES == 0 && layer->v_dim % LANES == 0;
}

static void NAME(attend_unpacked_rows)(const struct layer *layer, const struct task *task, const struct scratch *s,
                                       const struct NAME(kv_addresses) *at, long first, long valid, long rows,
                                       int pairs)
{
    long tokens = ROUND_UP(valid, GROUP);
#if UNPACKED_BF16
    if (pairs)
        switch (rows) {
            case 1: NAME(attend_unpacked)(layer, task, s, at, first, tokens, valid, 1, 1); return;
            case 2: NAME(attend_unpacked)(layer, task, s, at, first, tokens, valid, 2, 1); return;
            case 3: NAME(attend_unpacked)(layer, task, s, at, first, tokens, valid, 3, 1); return;
            case 4: NAME(attend_unpacked)(layer, task, s, at, first, tokens, valid, 4, 1); return;
        }
#endif
    switch (rows) {
        case 1: NAME(attend_unpacked)(layer, task, s, at, first, tokens, valid, 1, 0); break;
        case 2: NAME(attend_unpacked)(layer, task, s, at, first, tokens, valid, 2, 0); break;
        case 3: NAME(attend_unpacked)(layer, task, s, at, first, tokens, valid, 3, 0); break;
        case 4: NAME(attend_unpacked)(layer, task, s, at, first, tokens, valid, 4, 0); break;
    }
}

INLINE void NAME(attend_typed)(const struct layer *layer, const struct task *task, const struct scratch *s, int pairs)
{
    long steps = KEY_STEPS(layer, pairs), padded = ROUND_UP(layer->v_dim, LANES), count = task->rows * layer->group;
    struct NAME(kv_addresses) at;
#if HAS_AMX
    if (pairs && count <= MAX_AMX_UNPACKED_ROWS && layer->k_dim % 32 == 0 && layer->v_dim % 32 == 0) {
        NAME(attend_amx)(layer, task, s);
        return;
    }
#endif
    for (int head = 0; head < task->heads; head++)
        NAME(pack_queries)(layer, task, task->head + head, pairs, s->query + (long)head * count * steps);
    for (long i = 0; i < task->heads * count; i++)
        s->highest[i] = -FLT_MAX;
    memset(s->sums, 0, task->heads * count * LANES * sizeof(float));
    memset(s->out, 0, task->heads * count * padded * sizeof(float));
    long first = task->first;
#if HAS_AMX
    if (pairs)
        for (; first < task->last; first += SPAN)
            NAME(attend_heads)(layer, task, s, first);
#endif
    for (; first < task->last; first += TOKENS) {
        long valid = task->last - first < TOKENS ? task->last - first : TOKENS;
        NAME(locate_tile)(layer, task, first, &at);
        if (NAME(fits_unpacked)(layer, count, pairs)) {
            NAME(attend_unpacked_rows)(layer, task, s, &at, first, valid, count, pairs);
            continue;
        }
        for (int head = 0; head < task->heads; head++) {
            NAME(pack_kv_tile)(layer, &at, head, 0, valid, ROUND_UP(valid, GROUP) / (pairs ? 2 : 1), pairs, s);
            NAME(attend_tile)(layer, task, s, first, ROUND_UP(valid, GROUP), valid, head, pairs);
        }
    }
    for (long i = 0; i < task->heads * count; i++)
        s->total[i] = NAME(reduce_add)(*(floats *)(s->sums + i * LANES));
}

/* Attend the rows and heads of a task over its positions; leaves sums, highest scores and outputs in the scratch. */
static void NAME(attend_rows)(const struct layer *layer, const struct task *task, const struct scratch *s)
{
    if (layer->type == BFLOAT16)
        NAME(attend_typed)(layer, task, s, 1);
    else
        NAME(attend_typed)(layer, task, s, 0);
}

/* Write the outputs of a task that has seen all of its positions: divided by the sum of the weights, attention sinks
 * included. */
static void NAME(write_rows)(const struct layer *layer, const struct task *task, const struct scratch *s)
{
    long padded = ROUND_UP(layer->v_dim, LANES), count = task->rows * layer->group;
    for (int head = 0; head < task->heads; head++)
        for (long i = 0; i < count; i++) {
            long row = task->row + i / layer->group, h = (task->head + head) * layer->group + i % layer->group;
            float total = s->total[head * count + i], highest = s->highest[head * count + i], scale = 1;
            if (layer->sinks) {
                float sink = layer->sinks[h] * LOG2_E, top = sink > highest ? sink : highest;
                scale = exp2f(highest - top);
                total = total * scale + exp2f(sink - top);
            }
            const float *from = s->out + ((long)head * count + i) * padded;
            long at = (row * layer->kv_heads * layer->group + h) * layer->v_dim, d = 0;
            if (layer->type == BFLOAT16)
                for (; d + LANES <= layer->v_dim; d += LANES)
                    NAME(store_bf16)((uint16_t *)task->call->out + at + d,
                                     *(const floats *)(from + d) * (scale / total));
            for (; d < layer->v_dim; d++)
                NAME(store)(task->call->out, at + d, layer->type, from[d] * (scale / total));
        }
}
