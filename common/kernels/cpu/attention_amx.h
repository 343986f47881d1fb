/* Attention of few rows of bfloat16 in AMX tile registers, without packing.
 *
 * Keys are multiplied in place, 16 positions per tile; the resulting scores have positions as rows and are transposed.
 * Values are multiplied in place too. A word of values holds two dimensions, not two positions, so each weight is
 * multiplied twice: as a word whose other half is zero, and as a word whose first half is. The output rows of even and
 * of odd dimensions are put in order after the last position. (An infinite value therefore also makes its neighbour
 * NaN.)
 *
 * For each tile of positions, all heads compute scores, then all weights, then all outputs: vector stores have left the
 * store buffer before they are loaded as tiles, and the other way round. Meanwhile the next tile of positions is
 * prefetched evenly, in memory order, into the second-level cache; the first level is too small for it.
 */

#define MAX_AMX_UNPACKED_ROWS 8 /* query rows times heads of a group: half of a tile's rows */

/* Tile registers of [16][rows] words, of [2 * rows][16] and of [16][16]; the intrinsics need literal numbers. */
#define TMM_SCORES 0
#define TMM_SCORES_2 1
#define TMM_QUERY 2
#define TMM_OUT 3
#define TMM_OUT_2 4
#define TMM_WEIGHTS 5
#define TMM_KV 6
#define TMM_KV_2 7

static void NAME(configure_attention_tiles)(int rows)
{
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) shape = {.palette = 1};
    for (int tile = TMM_SCORES; tile <= TMM_KV_2; tile++) {
        shape.rows[tile] = (uint8_t)(tile >= TMM_OUT && tile <= TMM_WEIGHTS ? 2 * rows : 16);
        shape.row_bytes[tile] = (uint16_t)(tile <= TMM_QUERY ? rows * 4 : 64);
    }
    LOAD_TILE_SHAPE(shape);
}

/* What is to be prefetched: keys and values of GROUP positions as pieces, in order, ``share`` bytes at a time. */
struct NAME(prefetch_stream) {
    const char *at[2 * TOKENS / GROUP + 1], *next, *end; /* NULL after the last */
    long bytes[2], piece, share;
};

INLINE void NAME(next_piece)(struct NAME(prefetch_stream) *ahead)
{
    ahead->next = ahead->at[ahead->piece];
    ahead->end = ahead->next + ahead->bytes[ahead->piece++ % 2];
}

/* Divide the next tile of positions into ``shares`` equal shares, of which prefetch_share prefetches one. */
static void NAME(plan_prefetch)(const struct layer *layer, const struct NAME(kv_addresses) *at, long shares,
                                struct NAME(prefetch_stream) *ahead)
{
    long pieces = 0;
    for (long g = 0; g < TOKENS / GROUP && at->next_keys[g]; g++) {
        ahead->at[pieces++] = at->next_keys[g];
        ahead->at[pieces++] = at->next_values[g];
    }
    ahead->at[pieces] = NULL;
    ahead->bytes[0] = (long)GROUP * layer->kv_heads * layer->k_dim * 2;
    ahead->bytes[1] = (long)GROUP * layer->kv_heads * layer->v_dim * 2;
    ahead->share = ROUND_UP(pieces / 2 * (ahead->bytes[0] + ahead->bytes[1]) / shares, 64);
    ahead->piece = 0;
    NAME(next_piece)(ahead);
}

INLINE void NAME(prefetch_share)(struct NAME(prefetch_stream) *ahead)
{
    for (long left = ahead->share; left > 0 && ahead->next;) {
        const char *line = ahead->next, *stop = line + left < ahead->end ? line + left : ahead->end;
        left -= stop - line;
        for (; line < stop; line += 64)
            __builtin_prefetch(line, 0, 2);
        ahead->next = stop;
        if (stop == ahead->end)
            NAME(next_piece)(ahead);
    }
}

/* Pack the group's query rows as tiles of words, [k_dim / 32][16][rows] for each head. */
static void NAME(pack_query_tiles)(const struct layer *layer, const struct task *task, uint32_t *to)
{
    long rows = task->rows * layer->group, steps = layer->k_dim / 2;
    for (long i = 0; i < task->heads * rows; i++) {
        long head = i / rows, row = i % rows;
        long at = (task->row + row / layer->group) * task->call->query_row +
                  ((task->head + head) * layer->group + row % layer->group) * task->call->query_head;
        const uint16_t *from = (const uint16_t *)task->call->query + at;
        for (long step = 0; step < steps; step++)
            memcpy(to + (head * steps + step) * rows + row, from + 2 * step, 4);
    }
}

/* Scores of a head's rows against ``groups`` (1 or 2) groups of positions, to [16 * groups][stride]. */
INLINE void NAME(score_tiles)(const struct layer *layer, const char *const *keys, long inside, const uint32_t *query,
                              long rows, int groups, float *to, long stride, struct NAME(prefetch_stream) *ahead)
{
    long row_bytes = (long)layer->kv_heads * layer->k_dim * 2;
    _tile_zero(TMM_SCORES);
    if (groups > 1)
        _tile_zero(TMM_SCORES_2);
    for (long d = 0; d < layer->k_dim; d += 32) {
        _tile_loadd(TMM_QUERY, query + d / 2 * rows, rows * 4);
        _tile_loadd(TMM_KV, keys[0] + inside + d * 2, row_bytes);
        _tile_dpbf16ps(TMM_SCORES, TMM_KV, TMM_QUERY);
        NAME(prefetch_share)(ahead);
        if (groups > 1) {
            _tile_loadd(TMM_KV_2, keys[1] + inside + d * 2, row_bytes);
            _tile_dpbf16ps(TMM_SCORES_2, TMM_KV_2, TMM_QUERY);
            NAME(prefetch_share)(ahead);
        }
    }
    _tile_stored(TMM_SCORES, to, stride * 4);
    if (groups > 1)
        _tile_stored(TMM_SCORES_2, to + 16 * stride, stride * 4);
}

/* Copy the last values of a sequence, of one head, to [GROUP][v_dim]; rows from ``live`` on, which may hold anything,
 * become zero. */
static const char *NAME(copy_values)(const struct layer *layer, const char *values, long live, char *to)
{
    long bytes = (long)layer->v_dim * 2, row_bytes = bytes * layer->kv_heads;
    for (long t = 0; t < live; t++)
        memcpy(to + t * bytes, values + t * row_bytes, bytes);
    memset(to + live * bytes, 0, (GROUP - live) * bytes);
    return to;
}

/* out [2 * rows][v_dim / 2] += weights [2 * rows][TOKENS] . values of one head, for 32 dimensions from ``d`` on, or 64
 * if ``both``. */
INLINE void NAME(add_values)(long v_dim, const char *const *values, const long *row_bytes, long groups, long d,
                             int both, const float *weights, float *out, struct NAME(prefetch_stream) *ahead)
{
    _tile_loadd(TMM_OUT, out + d / 2, v_dim * 2);
    if (both)
        _tile_loadd(TMM_OUT_2, out + d / 2 + 16, v_dim * 2);
    for (long g = 0; g < groups; g++) {
        _tile_loadd(TMM_WEIGHTS, weights + g * GROUP, TOKENS * 4);
        _tile_loadd(TMM_KV, values[g] + d * 2, row_bytes[g]);
        _tile_dpbf16ps(TMM_OUT, TMM_WEIGHTS, TMM_KV);
        NAME(prefetch_share)(ahead);
        if (both) {
            _tile_loadd(TMM_KV_2, values[g] + d * 2 + 64, row_bytes[g]);
            _tile_dpbf16ps(TMM_OUT_2, TMM_WEIGHTS, TMM_KV_2);
            NAME(prefetch_share)(ahead);
        }
    }
    _tile_stored(TMM_OUT, out + d / 2, v_dim * 2);
    if (both)
        _tile_stored(TMM_OUT_2, out + d / 2 + 16, v_dim * 2);
}

/* softmax_row for a whole tile of positions without mask and cap. */
INLINE float NAME(softmax_full_tile)(float scale, const float *scores, uint16_t *weights, float *highest, float *sums)
{
    floats x[TOKENS / LANES];
    UNROLL16 for (int v = 0; v < TOKENS / LANES; v++)
        x[v] = *(const floats *)(scores + v * LANES);
    floats best = NAME(max)(x[0], x[1]), other = NAME(max)(x[2], x[3]);
    UNROLL16 for (int v = 4; v < TOKENS / LANES; v += 2) {
        best = NAME(max)(x[v], best);
        other = NAME(max)(x[v + 1], other);
    }
    best = NAME(max)(best, other) * scale;
    float shrink = 1, top = *highest;
    if (NAME(any_above)(best, top)) {
        top = NAME(reduce_max)(best);
        shrink = NAME(exp2)(NAME(broadcast)(*highest - top))[0];
        *highest = top;
    }
    floats sum = *(floats *)sums * shrink, more = {};
    UNROLL16 for (int v = 0; v < TOKENS / LANES; v += 2) {
        floats low = NAME(exp2_bf16)(x[v] * scale - top), high = NAME(exp2_bf16)(x[v + 1] * scale - top);
        _mm512_storeu_si512(weights + v * LANES, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
        sum += low;
        more += high;
    }
    *(floats *)sums = sum + more;
    return shrink;
}

/* Widen a row's weights to words, for even dimensions with the weight in the low half and for odd ones in the high
 * half; the other half is zero. */
INLINE void NAME(spread_weights)(const uint16_t *weights, long tokens, float *even, float *odd)
{
    for (long t = 0; t < tokens; t += 16) {
        __m512i word = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(weights + t)));
        _mm512_storeu_si512(even + t, word);
        _mm512_storeu_si512(odd + t, _mm512_slli_epi32(word, 16));
    }
}

/* Attend one tile of positions for the rows of all heads of a task. */
static void NAME(attend_amx_tile)(const struct layer *layer, const struct task *task, const struct scratch *s,
                                  const struct NAME(kv_addresses) *at, long first, long valid)
{
    long rows = task->rows * layer->group, heads = task->heads, count = heads * rows, wide = ROUND_UP(count, 16);
    long groups = (valid + GROUP - 1) / GROUP, v_dim = layer->v_dim, half = v_dim / 2;
    float *by_position = s->weights; /* scratch that is free until there are weights */
    struct NAME(prefetch_stream) ahead;
    AMX_FENCE();
    NAME(plan_prefetch)(layer, at, heads * groups * (layer->k_dim + v_dim) / 32 + count, &ahead);
    for (long head = 0; head < heads; head++)
        for (long g = 0; g < groups; g += 2) {
            const uint32_t *query = s->query + head * rows * layer->k_dim / 2;
            float *to = by_position + g * GROUP * wide + head * rows;
            long inside = head * layer->k_dim * 2;
            if (g + 1 < groups)
                NAME(score_tiles)(layer, at->keys + g, inside, query, rows, 2, to, wide, &ahead);
            else
                NAME(score_tiles)(layer, at->keys + g, inside, query, rows, 1, to, wide, &ahead);
        }
    AMX_FENCE();
    for (long row = 0; row < count; row += 16)
        for (long g = 0; g < groups; g++)
            NAME(transpose_words)((const char *)(by_position + g * GROUP * wide + row), wide * 4,
                                  (uint32_t *)s->scores + row * TOKENS + g * GROUP, TOKENS);
    for (long row = 0; row < count; row++) {
        long position = task->position + row % rows / layer->group, place = row / rows * rows + row;
        long low = layer->window ? position - layer->window + 1 - first : 0;
        long high = position + 1 - first < valid ? position + 1 - first : valid;
        uint16_t weights[TOKENS];
        float *even = s->out + place * half, *odd = even + rows * half;
        float *scores = s->scores + row * TOKENS, *highest = s->highest + row, *sums = s->sums + row * LANES, shrink;
        if (low <= 0 && high >= TOKENS && layer->softcap <= 0)
            shrink = NAME(softmax_full_tile)(layer->scaling * LOG2_E, scores, weights, highest, sums);
        else
            shrink = NAME(softmax_row)(layer, scores, weights, groups * GROUP, low, high, 1, highest, sums);
        NAME(spread_weights)(weights, groups * GROUP, s->weights + place * TOKENS,
                             s->weights + (place + rows) * TOKENS);
        if (shrink != 1)
            for (long d = 0; d < half; d += LANES) {
                *(floats *)(even + d) *= shrink;
                *(floats *)(odd + d) *= shrink;
            }
        NAME(prefetch_share)(&ahead);
    }
    for (long head = 0, d; head < heads; head++) {
        const char *values[TOKENS / GROUP];
        long row_bytes[TOKENS / GROUP];
        const float *weights = s->weights + 2 * head * rows * TOKENS;
        float *out = s->out + head * rows * v_dim;
        for (long g = 0; g < groups; g++) {
            int part = valid - g * GROUP < GROUP;
            values[g] = at->values[g] + head * v_dim * 2;
            row_bytes[g] = part ? v_dim * 2 : v_dim * 2 * layer->kv_heads;
            if (part)
                values[g] = NAME(copy_values)(layer, values[g], valid - g * GROUP, (char *)s->values);
        }
        AMX_FENCE();
        for (d = 0; d + 64 <= v_dim; d += 64)
            NAME(add_values)(v_dim, values, row_bytes, groups, d, 1, weights, out, &ahead);
        if (d < v_dim)
            NAME(add_values)(v_dim, values, row_bytes, groups, d, 0, weights, out, &ahead);
        AMX_FENCE(); /* the copied values in the scratch are overwritten next */
    }
}

/* Put the dimensions of the outputs in order: of each head, [2][rows][v_dim / 2] becomes [rows][v_dim]. */
static void NAME(interleave_outputs)(const struct scratch *s, long heads, long rows, long v_dim)
{
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    float *before = (float *)s->values, *out = s->out;
    for (long head = 0; head < heads; head++) {
        memcpy(before, out, rows * v_dim * 4);
        for (long row = 0; row < rows; row++)
            for (long d = 0; d < v_dim; d += 32, out += 32) {
                __m512 even = _mm512_loadu_ps(before + (row * v_dim + d) / 2);
                __m512 odd = _mm512_loadu_ps(before + ((rows + row) * v_dim + d) / 2);
                _mm512_storeu_ps(out, _mm512_permutex2var_ps(even, low, odd));
                _mm512_storeu_ps(out + 16, _mm512_permutex2var_ps(even, high, odd));
            }
    }
}

/* attend_rows for few rows of bfloat16. */
static void NAME(attend_amx)(const struct layer *layer, const struct task *task, const struct scratch *s)
{
    long rows = task->rows * layer->group, count = task->heads * rows;
    struct NAME(kv_addresses) at;
    for (long i = 0; i < count; i++)
        s->highest[i] = -FLT_MAX;
    memset(s->sums, 0, count * LANES * sizeof(float));
    memset(s->out, 0, count * layer->v_dim * sizeof(float));
    NAME(pack_query_tiles)(layer, task, s->query);
    NAME(configure_attention_tiles)((int)rows);
    for (long first = task->first; first < task->last; first += TOKENS) {
        NAME(locate_tile)(layer, task, first, &at);
        NAME(attend_amx_tile)(layer, task, s, &at, first, task->last - first < TOKENS ? task->last - first : TOKENS);
    }
    NAME(release_tiles)();
    NAME(interleave_outputs)(s, task->heads, rows, layer->v_dim);
    for (long i = 0; i < count; i++)
        s->total[i] = NAME(reduce_add)(*(floats *)(s->sums + i * LANES));
}
