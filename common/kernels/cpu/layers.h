/* The parts of a transformer layer outside attention: linear layers over packed weights, norms, rotary embeddings. */

/* -- linear -------------------------------------------------------------------------------------------------------- */

#define AMX_NR (2 * LANES) /* columns of B that a block of rows is multiplied by at a time */

/* Pack the weight [columns, in] (B of the GEMM) as panels of words or halves, [words of in][width] each. Columns behind
 * the last are zero. */
static void NAME(pack_b)(const void *weight, long columns, long in, enum word_format as, void *to)
{
    if (HAS_AMX && as == HALVES)
        as = PAIRS;
    long steps = as == PAIRS ? in / 2 : in, padded = ROUND_UP(columns, LANES);
    long most = HAS_AMX ? AMX_NR : NR;
    for (long first = 0; first < padded; first += most) {
        long width = padded - first < most ? padded - first : most, panel = first * steps;
        for (long c = 0; c < width; c++)
            for (long s = 0; s < steps; s++) {
                long at = panel + s * width + c, from = (first + c) * steps + s;
                if (as == HALVES)
                    ((uint16_t *)to)[at] = first + c < columns ? ((const uint16_t *)weight)[from] : 0;
                else
                    ((uint32_t *)to)[at] = first + c < columns ? ((const uint32_t *)weight)[from] : 0;
            }
    }
}

/* Finish the sums of a tile and write the results. In this order, each where there is one: bias; the activation of
 * each vector times its neighbour (gate and up projection); the addition of ``product->add``. Rows of sums are
 * ``sums_row`` floats apart. */
INLINE void NAME(epilogue_tile)(const struct linear *linear, const struct product *product, long row, int rows,
                                long column, int width, const float *sums, long sums_row)
{
    int step = linear->activation ? 2 : 1;
    for (int r = 0; r < rows; r++, sums += sums_row)
        for (int v = 0; v < width; v += step) {
            long at = column + v * LANES;
            floats x = *(const floats *)(sums + v * LANES);
            if (linear->bias)
                x += *(const floats *)(linear->bias + at);
            if (linear->activation) {
                floats up = *(const floats *)(sums + (v + 1) * LANES);
                if (linear->bias)
                    up += *(const floats *)(linear->bias + at + LANES);
                x = NAME(apply_activation)(x, linear->activation) * up;
                at /= 2;
            }
            long to = (row + r) * product->out_row + at;
            if (at + LANES <= linear->out) {
                if (product->add)
                    x += NAME(load_floats)(product->add, to, linear->type);
                NAME(store_floats)(product->to, to, linear->type, x);
            } else
                for (long i = 0; at + i < linear->out; i++)
                    NAME(store)(product->to, to + i, linear->type,
                                x[i] + (product->add ? NAME(load)(product->add, to + i, linear->type) : 0));
        }
}

#if HAS_BF16_DOT
/* epilogue_tile for two adjacent vectors of bfloat16 results without bias. */
INLINE void NAME(epilogue_two)(floats x, floats y, const uint16_t *add, uint16_t *to, enum activation activation)
{
    if (activation) {
        NAME(store_bf16)(to, NAME(apply_activation)(x, activation) * y);
        return;
    }
    if (add) {
        x += NAME(load_floats)(add, 0, BFLOAT16);
        y += NAME(load_floats)(add, LANES, BFLOAT16);
    }
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x));
}

#if !HAS_AMX
INLINE void NAME(epilogue_pairs)(const struct product *product, long row, int rows, long column, int width,
                                 const float *sums, long sums_row, const uint16_t *add, enum activation activation)
{
    for (int r = 0; r < rows; r++, sums += sums_row)
        for (int v = 0; v < width; v += 2) {
            long at = (row + r) * product->out_row + column + v * LANES / (activation ? 2 : 1);
            const floats *two = (const floats *)(sums + v * LANES);
            NAME(epilogue_two)(two[0], two[1], add ? add + at : NULL, (uint16_t *)product->to + at, activation);
        }
}

/* epilogue_tile for bfloat16 without bias, where all vectors are whole; results begin at ``column``. */
static __attribute__((noinline)) void NAME(epilogue_plain)(const struct linear *linear, const struct product *product,
                                                           long row, int rows, long column, int width,
                                                           const float *sums, long sums_row)
{
    if (linear->activation == SILU)
        NAME(epilogue_pairs)(product, row, rows, column, width, sums, sums_row, NULL, SILU);
    else if (linear->activation == GELU_TANH)
        NAME(epilogue_pairs)(product, row, rows, column, width, sums, sums_row, NULL, GELU_TANH);
    else if (product->add)
        NAME(epilogue_pairs)(product, row, rows, column, width, sums, sums_row, product->add, NONE);
    else
        NAME(epilogue_pairs)(product, row, rows, column, width, sums, sums_row, NULL, NONE);
}
#endif
#endif

/* Whether this product holds the last elements of the sum, so that its sums are complete. */
INLINE int NAME(is_last_kc)(const struct linear *linear, const struct product *product)
{
    return product->first + product->in == linear->in;
}

#if HAS_AMX
/* A block of complete sums whose epilogue runs while the next block is computed. */
struct NAME(epilogue) {
    const struct linear *linear;
    const struct product *product;
    const float *sums;
    long sums_row, row, column, out_row;
    int width;
    const uint16_t *add, *next; /* of the block: what is added; next: results of the next block, prefetched */
    uint16_t *to;
};

/* The epilogue of row ``r`` of the block: whole vectors of bfloat16 without bias. */
INLINE void NAME(epilogue_row)(const struct NAME(epilogue) *block, long r, enum activation activation, int add)
{
    long at = r * block->out_row;
    const floats *two = (const floats *)(block->sums + r * block->sums_row);
    __builtin_prefetch(block->next + at, 1, 3);
    NAME(epilogue_two)(two[0], two[1], add ? block->add + at : NULL, block->to + at, activation);
}

#define EPILOGUE(name, activation, add)                                                                                \
    INLINE void NAME(epilogue_##name)(void *block, long r) { NAME(epilogue_row)(block, r, activation, add); }
EPILOGUE(sums, NONE, 0)
EPILOGUE(added, NONE, 1)
EPILOGUE(silu, SILU, 0)
EPILOGUE(gelu, GELU_TANH, 0)

static __attribute__((noinline)) void NAME(epilogue_any)(void *of, long r)
{
    const struct NAME(epilogue) *block = of;
    NAME(epilogue_tile)(block->linear, block->product, block->row + r, 1, block->column, block->width,
                        block->sums + r * block->sums_row, 0);
}

/* Where a thread converts panels to words: a whole panel if more than one block of rows meets it, else two tiles in
 * turn. */
static __thread uint32_t NAME(converted_words)[FLOAT_PARTS * MAX_KC / 2 * AMX_NR] __attribute__((aligned(64)));

/* Columns [first, last) of the result for all rows; elements of A have ``each`` parts. Each panel is multiplied by all
 * rows, which stay in the second-level cache beside it. Meanwhile the next panel is prefetched into that cache, and
 * ``side_work`` runs the epilogue of the previous block. PAIRS are used in place; FLOATS are converted to words by
 * the first block of rows, for all the others. */
INLINE void NAME(amx_columns)(const struct linear *linear, const struct product *product, long first, long last,
                              enum word_format as, int each, NAME(side_work) *side_work)
{
    struct NAME(tile_config) now = {};
    const long size = as == FLOATS ? 4 : 2; /* bytes of an element */
    long steps = product->in / 2, stride = product->in_row / 2, which = 0, parts = 0;
    long blocks = (product->rows + AMX_MR - 1) / AMX_MR, prefetching = blocks - (as != PAIRS);
    float sums[2][AMX_MR * AMX_NR] __attribute__((aligned(64)));
    struct NAME(epilogue) epilogue = {.linear = linear, .product = product, .out_row = product->out_row};
    epilogue.sums_row = product->sums ? product->sums_row : AMX_NR;
    struct NAME(converted_panel) converted = {.to = NAME(converted_words),
        .ring = blocks > 1 ? MAX_KC / 2 / AMX_STEPS : 2};
    for (long column = first; column < last; column += AMX_NR) {
        long width = last - column < AMX_NR ? last - column : AMX_NR;
        const char *weight = (const char *)linear->packed + (column * linear->in + width * product->first) * size;
        const char *next = weight + (blocks == 1 ? PREFETCH_BYTES : linear->in * width * size);
        struct NAME(b_panel) panel = {.words = as == PAIRS ? (const uint32_t *)weight : converted.to, .row = width,
                                    .width = (int)(width / LANES), .next = next,
                                    .parts = as == FLOATS ? FLOAT_PARTS : 1, .part = AMX_STEPS * width};
        panel.lines = prefetching ? (2 * AMX_STEPS * width * size / 64 + prefetching - 1) / prefetching : 0;
        panel.soon = blocks == 1;
        converted.from = (const float *)weight;
        converted.after = NULL;
        if (blocks == 1 && steps % AMX_STEPS == 0 && last - column >= 2 * AMX_NR) /* the next panel has the same
                                                                                     width */
            converted.after = converted.from + AMX_NR * linear->in;
        for (long row = 0; row < product->rows; row += AMX_MR, which ^= 1) {
            int rows = product->rows - row < AMX_MR ? (int)(product->rows - row) : AMX_MR;
            long at = row * product->out_row + (linear->activation ? column / 2 : column);
            float *own = sums[which];
            if (product->sums)
                own = product->sums + row * product->sums_row + column - product->sums_first;
            struct NAME(a_block) from = {.words = (const uint32_t *)product->from + row * stride, .row = stride,
                                      .parts = each, .part = steps};
            epilogue.next = (const uint16_t *)product->to + at;
            if (as == PAIRS || row) {
                NAME(amx_block)(&now, rows, panel.width, from, panel, steps, own, epilogue.sums_row, product->first > 0,
                                side_work, &epilogue, parts);
                panel.next += steps / AMX_STEPS * panel.lines * 64;
                if (panel.next >= next + steps * 2 * width * size)
                    panel.lines = 0;
            } else {
                for (long i = 0; i < parts; i++)
                    side_work(&epilogue, i);
                NAME(amx_first_block)(&now, rows, from, panel, &converted, steps, own, epilogue.sums_row,
                                      product->first > 0);
            }
            epilogue.sums = own;
            epilogue.row = row;
            epilogue.column = column;
            epilogue.width = panel.width;
            epilogue.to = (uint16_t *)product->to + at;
            epilogue.add = (const uint16_t *)product->add + at;
            parts = NAME(is_last_kc)(linear, product) ? rows : 0;
        }
        converted.has_first = converted.after != NULL;
        if (!converted.has_first)
            converted.at = 0;
    }
    NAME(release_tiles)();
    for (long i = 0; i < parts; i++)
        side_work(&epilogue, i);
}

#define AMX_COLUMNS(name, as, each, way)                                                                               \
    static __attribute__((noinline)) void NAME(columns_##name)(const struct linear *linear,                            \
                                                               const struct product *product, long first, long last)   \
    {                                                                                                                  \
        NAME(amx_columns)(linear, product, first, last, as, each, NAME(epilogue_##way));                               \
    }
AMX_COLUMNS(sums, PAIRS, 1, sums)
AMX_COLUMNS(added, PAIRS, 1, added)
AMX_COLUMNS(silu, PAIRS, 1, silu)
AMX_COLUMNS(gelu, PAIRS, 1, gelu)
AMX_COLUMNS(any, PAIRS, 1, any)
AMX_COLUMNS(split, PAIRS, FLOAT_PARTS, any)
AMX_COLUMNS(floats, FLOATS, FLOAT_PARTS, any)

typedef void NAME(columns)(const struct linear *, const struct product *, long, long);

/* Columns of panels [first, last) for all rows, in tile registers. */
static void NAME(linear_panels)(const struct linear *linear, const struct product *product, long first, long last)
{
    static NAME(columns) *const pairs[] = {NAME(columns_sums), NAME(columns_added), NAME(columns_silu),
                                           NAME(columns_gelu), NAME(columns_any), NAME(columns_split)};
    first *= NR;
    long end = last * NR < linear->columns ? last * NR : linear->columns;
    if (linear->type == FLOAT32 && !linear->halves) {
        NAME(columns_floats)(linear, product, first, end);
        return;
    }
    int plain = !linear->bias && end / (linear->activation ? 2 : 1) <= linear->out && end % AMX_NR == 0;
    int way = 4;
    if (linear->type == FLOAT32)
        way = 5;
    else if (plain && !linear->activation)
        way = product->add ? 1 : 0;
    else if (plain && !product->add)
        way = linear->activation == SILU ? 2 : 3;
    pairs[way](linear, product, first, end);
}
#else
/* Prefetch where a tile's results go and what is added to them: ``columns`` results of each of ``rows`` rows, from
 * ``row`` and ``column`` on. */
INLINE void NAME(prefetch_c)(const struct linear *linear, const struct product *product, long row, int rows,
                             long column, int columns)
{
    long size = linear->type == BFLOAT16 ? 2 : 4;
    for (int r = 0; r < rows; r++) {
        long at = ((row + r) * product->out_row + column) * size;
        for (long end = at + columns * size; at < end; at += 64) {
            __builtin_prefetch((const char *)product->to + at, 1, 3);
            if (product->add)
                __builtin_prefetch((const char *)product->add + at, 0, 3);
        }
    }
}

/* Columns of panels [first, last) for all rows, which stay in the second-level cache beside a panel. With at most
 * KC_LOOP_TILES row tiles, all of them are multiplied by one slice of the panel before the next slice, which so stays
 * in the first-level cache. The first row tiles prefetch what comes next. */
static void NAME(linear_panels)(const struct linear *linear, const struct product *product, long first, long last)
{
    enum word_format as = words_of(linear->type, linear->halves);
    long each = as == PAIRS ? 2 : 1, steps = product->in / each, stride = product->in_row / each;
    long word = as == HALVES ? 2 : 4; /* bytes of the panel per word */
    long padded = linear->columns, tiles = (product->rows + MR - 1) / MR;
    long ahead = tiles <= KC_LOOP_TILES ? KC_STEPS : linear->in / each,
        some = tiles > 1 && ahead < steps ? ahead : steps;
    int ahead_lines = as == HALVES || tiles > 3 ? 1 : tiles == 1 ? 4 : 2, most = as == HALVES ? 1 : NR_VECTORS;
    int lines = as == FLOATS ? 0 : ahead_lines;
    float sums[KC_LOOP_TILES][MR * NR];
    long sums_row = product->sums ? product->sums_row : NR;
    for (long panel = first; panel < last; panel++) {
        long column = panel * NR;
        int width = (int)((padded - column < NR ? padded - column : NR) / LANES);
        const char *weight = (const char *)linear->packed;
        weight += (column * (linear->in / each) + width * LANES * (product->first / each)) * word;
        int halved = linear->activation ? 2 : 1, columns = width * LANES / halved;
        long out = column / halved;
#if HAS_BF16_DOT
        int plain = as == PAIRS && !linear->bias && width % 2 == 0 && out + columns <= linear->out &&
                    !(product->add && linear->activation);
#endif
        for (long done = 0; done < steps; done += some) {
            long now = steps - done < some ? steps - done : some, tile = 0;
            int finished = done + now == steps && NAME(is_last_kc)(linear, product);
            for (long row = 0; row < product->rows; row += MR, tile++) {
                int rows = product->rows - row < MR ? (int)(product->rows - row) : MR;
                float *own = sums[tiles <= KC_LOOP_TILES ? tile : 0];
                if (product->sums)
                    own = product->sums + row * sums_row + column - product->sums_first;
                const char *here = weight + done * width * LANES * word;
                const char *next = here + ahead * width * LANES * word + tile * now * ahead_lines * 64;
                if (finished)
                    NAME(prefetch_c)(linear, product, row, rows, out, columns);
                NAME(gemm_tile)(rows, width, as, (const uint32_t *)product->from + row * stride + done, stride,
                                here, now, own, sums_row, done || product->first ? NAME(keep_all) : NULL, next,
                                tile * ahead_lines < most ? lines : 0);
                if (!finished)
                    continue;
#if HAS_BF16_DOT
                if (plain) {
                    NAME(epilogue_plain)(linear, product, row, rows, out, width, own, sums_row);
                    continue;
                }
#endif
                NAME(epilogue_tile)(linear, product, row, rows, column, width, own, sums_row);
            }
        }
    }
}

#endif

/* -- norm and rotary embeddings ------------------------------------------------------------------------------------ */

INLINE void NAME(norm_row)(const struct norm *norm, const void *from, long at, void *to, long out, enum type type)
{
    long dim = norm->dim, i = 0;
    floats squares[4] = {}; /* four sums, so that an addition need not wait for the one before it */
    float rest = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES)
        UNROLL for (int v = 0; v < 4; v++) {
            floats x = NAME(load_floats)(from, at + i + v * LANES, type);
            squares[v] += x * x;
        }
    for (; i + LANES <= dim; i += LANES) {
        floats x = NAME(load_floats)(from, at + i, type);
        squares[0] += x * x;
    }
    for (; i < dim; i++)
        rest += NAME(load)(from, at + i, type) * NAME(load)(from, at + i, type);
    float sum = NAME(reduce_add)((squares[0] + squares[1]) + (squares[2] + squares[3])) + rest;
    float scale = 1 / sqrtf(sum / (float)dim + norm->epsilon);
    for (i = 0; i + LANES <= dim; i += LANES) {
        floats x = NAME(load_floats)(from, at + i, type) * scale;
        NAME(store_floats)(to, out + i, type, x * *(const floats *)(norm->weight + i));
    }
    for (; i < dim; i++)
        NAME(store)(to, out + i, type, NAME(load)(from, at + i, type) * scale * norm->weight[i]);
}

static void NAME(norm_rows)(const struct norm *norm, const void *from, void *to, long rows, int type)
{
    for (long row = 0; row < rows; row++)
        if (type == FLOAT32)
            NAME(norm_row)(norm, from, row * norm->dim, to, row * norm->dim, FLOAT32);
        else
            NAME(norm_row)(norm, from, row * norm->dim, to, row * norm->dim, BFLOAT16);
}

INLINE void NAME(rotate_head)(void *x, long at, const void *cos, const void *sin, long angle, long rotated,
                              enum type type)
{
    long half = rotated / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        floats low = NAME(load_floats)(x, at + i, type), high = NAME(load_floats)(x, at + half + i, type);
        floats c = NAME(load_floats)(cos, angle + i, type), s = NAME(load_floats)(sin, angle + i, type);
        floats c2 = NAME(load_floats)(cos, angle + half + i, type), s2 = NAME(load_floats)(sin, angle + half + i, type);
        NAME(store_floats)(x, at + i, type, low * c - high * s);
        NAME(store_floats)(x, at + half + i, type, high * c2 + low * s2);
    }
    for (; i < half; i++) {
        float low = NAME(load)(x, at + i, type), high = NAME(load)(x, at + half + i, type);
        NAME(store)(x, at + i, type, low * NAME(load)(cos, angle + i, type) - high * NAME(load)(sin, angle + i, type));
        NAME(store)(x, at + half + i, type,
                    high * NAME(load)(cos, angle + half + i, type) + low * NAME(load)(sin, angle + half + i, type));
    }
}

INLINE void NAME(rotate_typed)(const struct rotary *rotary, void *x, long rows, const void *cos, const void *sin,
                               enum type type)
{
    for (long row = 0; row < rows; row++)
        for (long head = 0; head < rotary->query_heads + rotary->key_heads; head++) {
            long at = row * rotary->row + head * rotary->dim;
            const struct norm *norm = head < rotary->query_heads ? &rotary->query_norm : &rotary->key_norm;
            if (norm->weight)
                NAME(norm_row)(norm, x, at, x, at, type);
            NAME(rotate_head)(x, at, cos, sin, row * rotary->rotated, rotary->rotated, type);
        }
}

/* Apply the per-head norm, if any, and the rotary embedding to the queries and keys of rows [rows][query heads, key
 * heads, ...], in place. */
static void NAME(rotate_rows)(const struct rotary *rotary, void *x, long rows, const void *cos, const void *sin,
                              int type)
{
    if (type == FLOAT32)
        NAME(rotate_typed)(rotary, x, rows, cos, sin, FLOAT32);
    else
        NAME(rotate_typed)(rotary, x, rows, cos, sin, BFLOAT16);
}

/* -- argmax -------------------------------------------------------------------------------------------------------- */

/* Index of the largest of ``columns`` numbers from ``at`` on, the first among equals; -1 if one of them is NaN or the
 * largest is infinite. Two passes: finding the maximum of several vectors at a time is faster without their indices. */
INLINE int64_t NAME(argmax_row)(const void *from, long at, long columns, enum type type)
{
    floats best[4] = {NAME(broadcast)(-INFINITY), NAME(broadcast)(-INFINITY), NAME(broadcast)(-INFINITY),
        NAME(broadcast)(-INFINITY)};
    ints odd[4] = {};
    long i = 0;
    for (; i + 4 * LANES <= columns; i += 4 * LANES)
        UNROLL for (int v = 0; v < 4; v++) {
            floats x = NAME(load_floats)(from, at + i + v * LANES, type);
            odd[v] |= x != x;
            best[v] = NAME(max)(x, best[v]);
        }
    float top = NAME(reduce_max)(NAME(max)(NAME(max)(best[0], best[1]), NAME(max)(best[2], best[3])));
    ints strange = odd[0] | odd[1] | odd[2] | odd[3];
    for (; i < columns; i++) {
        float x = NAME(load)(from, at + i, type);
        strange |= (ints){} - (x != x);
        top = x > top ? x : top;
    }
    for (int lane = 0; lane < LANES; lane++)
        if (strange[lane])
            return -1;
    if (top == INFINITY || top == -INFINITY)
        return -1;
    for (i = 0; i + LANES <= columns && !NAME(any_equal)(NAME(load_floats)(from, at + i, type), top);)
        i += LANES;
    while (NAME(load)(from, at + i, type) != top)
        i++;
    return i;
}

static void NAME(argmax_rows)(const void *from, long rows, long columns, int type, int64_t *peaks)
{
    for (long row = 0; row < rows; row++)
        peaks[row] = type == FLOAT32 ? NAME(argmax_row)(from, row * columns, columns, FLOAT32)
                                     : NAME(argmax_row)(from, row * columns, columns, BFLOAT16);
}
