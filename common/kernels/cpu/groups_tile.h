/* Products of a panel of groups with some rows; compiled once per instruction set. Its own file defines dot_two and
 * CODE_OFFSET. */

#define VECTORS (PANEL / LANES)
#define CHAINS (LANES == 16 ? 2 : 1) /* sums of an exact product that alternate, so that an addition need not wait */
#define TILE_ROWS (LANES == 16 ? 8 : 4) /* most rows that are multiplied by the codes of a panel at a time; half as many
                                           with two terms */
#define WIDE_ROWS (LANES == 16 ? 6 : 0) /* the same with two panels, in an integer product: what is loaded of a row is
                                           used twice; 0 where there are too few registers */
#define MIN_WIDE (4 * WIDE_ROWS)        /* rows from which on that is done */
#define MOST_VECTORS (LANES == 16 ? 2 * VECTORS : VECTORS)

INLINE floats NAME(to_floats)(ints x) { return __builtin_convertvector(x, floats); }

/* The nearest integers, even ones of two. */
INLINE ints NAME(nearest)(floats x)
{
#if LANES == 16
    return (ints)_mm512_cvtps_epi32((__m512)x);
#elif LANES == 8
    return (ints)_mm256_cvtps_epi32((__m256)x);
#else
    ints whole;
    for (int i = 0; i < LANES; i++)
        whole[i] = (int32_t)lrintf(x[i]);
    return whole;
#endif
}

INLINE ints NAME(larger)(ints a, ints b) { return (a & (a > b)) | (b & ~(a > b)); }

INLINE void NAME(store_codes)(int8_t *to, ints codes)
{
    typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
    *(bytes *)to = __builtin_convertvector(codes, bytes);
}

/* -- activations --------------------------------------------------------------------------------------------------- */

/* Load activations [first, first + count) of a row in the order of the weight's columns; 0 behind the last. */
INLINE void NAME(load_input)(const struct groups *weight, const void *from, long at, enum type type, long first,
                             long count, float *to)
{
    if (!weight->order && first + count <= weight->in) {
        for (long i = 0; i < count; i += LANES)
            *(floats *)(to + i) = NAME(load_floats)(from, at + first + i, type);
        return;
    }
    for (long i = 0; i < count; i++) {
        long column = first + i;
        if (weight->order && column < weight->padded)
            column = weight->order[column];
        to[i] = column < weight->in ? NAME(load)(from, at + column, type) : 0;
    }
}

/* The largest magnitude of ``some`` [count]; NaN if there is one. */
INLINE float NAME(largest)(const float *some, long count)
{
    ints top = {};
    for (long i = 0; i < count; i += LANES) /* as integers magnitudes are ordered as the numbers are, NaN above all */
        top = NAME(larger)(*(const ints *)(some + i) & 0x7FFFFFFF, top);
#if LANES == 16
    int32_t bits = _mm512_reduce_max_epi32((__m512i)top);
#else
    int32_t bits = top[0];
    for (int i = 1; i < LANES; i++)
        bits = top[i] > bits ? top[i] : bits;
#endif
    float most;
    memcpy(&most, &bits, 4);
    return most;
}

INLINE int32_t NAME(total)(ints x)
{
#if LANES == 16
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += x[i];
    return sum;
#endif
}

/* Round the activations ``some`` [count] times ``factor`` to ``terms`` int8 each, the second ones ``apart`` further;
 * ``sums`` are those of each term. */
INLINE void NAME(round_input)(const float *some, long count, float factor, int terms, int8_t *to, long apart,
                              int32_t *sums)
{
    ints first = {}, second = {};
    for (long i = 0; i < count; i += LANES) {
        floats x = *(const floats *)(some + i) * factor;
        ints code = NAME(larger)(NAME(nearest)(x), (ints){} - 127);
        code = -NAME(larger)(-code, (ints){} - 127); /* a factor near the largest number is not precise */
        NAME(store_codes)(to + i, code);
        first += code;
        if (terms > 1) {
            code = NAME(nearest)((x - NAME(to_floats)(code)) * TERM_RATIO);
            NAME(store_codes)(to + i + apart, code);
            second += code;
        }
    }
    sums[0] = NAME(total)(first);
    sums[1] = NAME(total)(second);
}

/* Pack the activations ``some`` [each] from column ``first`` on, as floats or as codes, into a packed row. */
INLINE void NAME(pack_some)(const struct groups *weight, long first, long each, int terms, const float *some,
                            char *row, struct group_sums *sums)
{
    const long group = weight->group, apart = group_width(weight);
    float scale = 1, factor = 1;
    if (weight->exact)
        memcpy(row + first * sizeof(float), some, each * sizeof(float));
    else {
        float most = NAME(largest)(some, each);
        scale = most / 127;
        factor = most < SMALLEST_INPUT ? 0 : 127 / most;
    }
    sums += first / group;
    for (long k = 0; k < each; k += group) {
        struct group_sums of = {scale, 0, {0, 0}};
        if (weight->exact && weight->minima)
            for (long i = k; i < k + group; i++)
                of.total += some[i];
        if (!weight->exact) {
            NAME(round_input)(some + k, group, factor, terms, (int8_t *)row + first + k, apart, of.codes);
            of.total = scale * ((float)of.codes[0] + (float)of.codes[1] * (1.0f / TERM_RATIO));
        }
        if (first + k < weight->padded)
            *sums++ = of;
    }
}

INLINE void NAME(pack_typed)(const struct groups *weight, const void *from, long at, enum type type, int terms,
                             const struct group_input *input, char *to)
{
    const long group = weight->group, each = weight->exact || group > MIN_INPUT_GROUP ? group : MIN_INPUT_GROUP;
    float some[MAX_GROUP];
    for (long first = 0; first < weight->padded; first += each) {
        NAME(load_input)(weight, from, at, type, first, each, some);
        NAME(pack_some)(weight, first, each, terms, some, to, (struct group_sums *)(to + input->sums_at));
    }
}

/* Pack the row that begins at element ``at`` of ``from``, all terms. */
static void NAME(pack_row)(const struct groups *weight, const void *from, long at, enum type type,
                           const struct group_input *input, char *to)
{
    if (type == FLOAT32 && weight->terms == 1)
        NAME(pack_typed)(weight, from, at, FLOAT32, 1, input, to);
    else if (type == FLOAT32)
        NAME(pack_typed)(weight, from, at, FLOAT32, 2, input, to);
    else if (weight->terms == 1)
        NAME(pack_typed)(weight, from, at, BFLOAT16, 1, input, to);
    else
        NAME(pack_typed)(weight, from, at, BFLOAT16, 2, input, to);
}

/* -- scales -------------------------------------------------------------------------------------------------------- */

INLINE floats NAME(load_scales)(const void *from, long at, int type)
{
    if (type == FLOAT32)
        return NAME(load_floats)(from, at, FLOAT32);
    if (type == BFLOAT16)
        return NAME(load_floats)(from, at, BFLOAT16);
#if LANES == 16
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)from + at)));
#elif LANES == 8
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)from + at)));
#else
    floats x;
    for (int i = 0; i < LANES; i++)
        x[i] = NAME(load)(from, at + i, FLOAT16);
    return x;
#endif
}

/* LANES signed or unsigned bytes as float32. */
INLINE floats NAME(load_bytes)(const void *from, long at, int is_signed)
{
    const uint8_t *bytes = (const uint8_t *)from + at;
#if LANES == 16
    __m128i some = _mm_loadu_si128((const __m128i *)bytes);
    return (floats)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(some) : _mm512_cvtepu8_epi32(some));
#elif LANES == 8
    __m128i some = _mm_loadl_epi64((const __m128i *)bytes);
    return (floats)_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(some) : _mm256_cvtepu8_epi32(some));
#else
    floats x;
    for (int i = 0; i < LANES; i++)
        x[i] = is_signed ? (float)(int8_t)bytes[i] : (float)bytes[i];
    return x;
#endif
}

INLINE words NAME(load_codes)(const uint32_t *from) { return *(const words *)from; }

/* -- the sum of a group ---------------------------------------------------------------------------------------------- */

/* Add the products of one group to ``sums`` [rows][terms]. ``row``: int8 of the first row; terms are ``width`` apart,
 * rows ``row_bytes``, and panels of ``codes`` ``apart`` words. Codes ``ahead`` words further are prefetched into L2:
 * some processors allow few prefetches into L1. */
INLINE void NAME(integer_dots)(int rows, int panels, int terms, enum group_kind kind, long group,
                               const uint32_t *codes, long apart, long ahead, const char *row, long row_bytes,
                               long width, ints (*sums)[MOST_VECTORS])
{
    const long half = kind == INTEGER_4 ? group / 2 : 4, stride = kind == INTEGER_4 ? 4 : 8;
    const int lines = kind == INTEGER_4 ? 1 : 2, vectors = panels * VECTORS; /* lines: words of a column per step */
    for (long t = 0; t < group / 8; t++) {
        words low[MOST_VECTORS], high[MOST_VECTORS];
        if (ahead)
            UNROLL for (int line = 0; line < lines * panels; line++)
                __builtin_prefetch(codes + line / lines * apart + (lines * t + line % lines) * PANEL + ahead, 0, 2);
        UNROLL for (int v = 0; v < vectors; v++) {
            const uint32_t *from = codes + v / VECTORS * apart + lines * t * PANEL + v % VECTORS * LANES;
            low[v] = NAME(load_codes)(from);
            if (kind == INTEGER_4) {
                high[v] = low[v] >> 4 & 0x0F0F0F0Fu;
                low[v] &= 0x0F0F0F0Fu;
            } else
                high[v] = NAME(load_codes)(from + PANEL);
        }
        UNROLL for (int r = 0; r < rows * terms; r++) {
            const char *at = row + r / terms * row_bytes + r % terms * width + t * stride;
            int32_t a, b;
            memcpy(&a, at, 4);
            memcpy(&b, at + half, 4);
            UNROLL for (int v = 0; v < vectors; v++)
                sums[r][v] = NAME(dot_two)(sums[r][v], low[v], a, high[v], b, kind);
        }
    }
}

INLINE floats NAME(look_up)(const float *table, ints index)
{
#if LANES == 16
    return (floats)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
#elif LANES == 8
    return (floats)_mm256_i32gather_ps(table, (__m256i)index, 4);
#else
    floats x;
    for (int i = 0; i < LANES; i++)
        x[i] = table[index[i]];
    return x;
#endif
}

/* The values of the codes in the lowest byte or 4 bits of each word. */
INLINE floats NAME(values)(enum group_kind kind, words codes, floats zero, const float *table)
{
    if (kind == EXACT_TABLE)
        return NAME(look_up)(table, (ints)(codes & 15));
    codes = codes & (kind == EXACT_4 ? 15 : 255);
    if (kind != EXACT_E4M3)
        return NAME(to_floats)((ints)codes) - zero;
    words bits = (codes & 127) << 20 | (codes & 128) << 24;
    return (floats)bits * 0x1p120f; /* the exponent's bias is 7, not 127 */
}

/* The same for an exact product: ``row`` is float32, ``zero`` of each column is subtracted from codes. */
INLINE void NAME(exact_dots)(int rows, enum group_kind kind, long group, const uint32_t *panel, long ahead,
                             const char *row, long row_bytes, const floats *zero, const float *table,
                             floats (*sums)[MOST_VECTORS])
{
    const int halves = kind == EXACT_4 || kind == EXACT_TABLE ? 2 : 1;
    const long steps = group / 4 / halves;
    floats part[TILE_ROWS][VECTORS][CHAINS] = {};
    for (long t = 0; t < steps; t++) {
        words codes[VECTORS];
        __builtin_prefetch(panel + t * PANEL + ahead, 0, 2);
        UNROLL for (int v = 0; v < VECTORS; v++)
            codes[v] = NAME(load_codes)(panel + t * PANEL + v * LANES);
        UNROLL for (int half = 0; half < halves; half++)
            UNROLL for (int byte = 0; byte < 4; byte++) {
                const char *at = row + (half * (group / 2) + 4 * t + byte) * 4;
                floats x[VECTORS];
                UNROLL for (int v = 0; v < VECTORS; v++)
                    x[v] = NAME(values)(kind, codes[v] >> (8 * byte + 4 * half), zero[v], table);
                UNROLL for (int r = 0; r < rows; r++) {
                    float a;
                    memcpy(&a, at + r * row_bytes, 4);
                    UNROLL for (int v = 0; v < VECTORS; v++)
                        part[r][v][byte % CHAINS] += x[v] * a;
                }
            }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            sums[r][v] = part[r][v][0] + (CHAINS > 1 ? part[r][v][CHAINS - 1] : (floats){});
}

/* -- a tile ---------------------------------------------------------------------------------------------------------- */

struct NAME(group_at) { /* one group of a panel */
    const uint32_t *codes;
    long ahead;             /* prefetch distance */
    long fine;              /* where its numbers begin in those of all groups */
    long apart, fine_apart; /* words of codes, and numbers, from a panel to the next */
    floats scale[MOST_VECTORS], minimum[MOST_VECTORS];
};

/* Add one group's share of the products to ``acc``. ``row``: the packed activations of the group, of the first row. */
INLINE void NAME(add_group)(int rows, int panels, int terms, enum group_kind kind, const struct groups *weight,
                            const struct NAME(group_at) *group, const char *row, const struct group_sums *input,
                            long row_bytes, long width, floats (*acc)[MOST_VECTORS])
{
    const int exact = kind >= EXACT_4, vectors = panels * VECTORS;
    const int32_t zero = weight->zeros ? 0 : weight->zero, shift = exact ? 0 : CODE_OFFSET(kind);
    floats sums[TILE_ROWS][MOST_VECTORS], zeros[MOST_VECTORS];
    const struct group_sums *of[TILE_ROWS];
    UNROLL for (int r = 0; r < rows; r++)
        of[r] = (const struct group_sums *)((const char *)input + r * row_bytes);
    UNROLL for (int v = 0; v < vectors; v++)
        if (weight->zeros) {
            long fine = group->fine + v / VECTORS * group->fine_apart + v % VECTORS * LANES;
            zeros[v] = NAME(load_bytes)(weight->zeros, fine, 0);
        } else
            zeros[v] = NAME(broadcast)((float)zero);
    if (exact) {
        NAME(exact_dots)(rows, kind, weight->group, group->codes, group->ahead, row, row_bytes, zeros, weight->table,
                         sums);
    } else {
        ints whole[TILE_ROWS][MOST_VECTORS]; /* of each row and term, less the sum of its codes times their zero */
        UNROLL for (int r = 0; r < rows * terms; r++)
            UNROLL for (int v = 0; v < vectors; v++)
                whole[r][v] = (ints){} + of[r / terms]->codes[r % terms] * (shift - zero);
        NAME(integer_dots)(rows, panels, terms, kind, weight->group, group->codes, group->apart, group->ahead, row,
                           row_bytes, width, whole);
        if (weight->zeros)
            UNROLL for (int r = 0; r < rows * terms; r++)
                UNROLL for (int v = 0; v < vectors; v++)
                    whole[r][v] -= NAME(nearest)(zeros[v]) * of[r / terms]->codes[r % terms];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < vectors; v++) {
                sums[r][v] = NAME(to_floats)(whole[r * terms][v]); /* exact: below 2^24 */
                if (terms > 1)
                    sums[r][v] += NAME(to_floats)(whole[r * terms + 1][v]) * (1.0f / TERM_RATIO);
            }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) {
            floats scale = exact ? group->scale[v] : (floats)(group->scale[v] * of[r]->scale);
            acc[r][v] += scale * sums[r][v];
            if (weight->minima)
                acc[r][v] += group->minimum[v] * of[r]->total;
        }
}

/* Write the products of ``rows`` rows, from ``row`` on, with ``panels`` panels to ``to``
 * [rows][panels * PANEL]. */
INLINE void NAME(group_tile)(int rows, int panels, int terms, enum group_kind kind, const struct groups *weight,
                             const struct group_input *input, long row, long panel, float *to)
{
    const long groups = weight->padded / weight->group, spans = groups / weight->span;
    const long size = weight->group * weight->bits / 32 * PANEL; /* words of a group */
    const long bytes = weight->group * (kind >= EXACT_4 ? (long)sizeof(float) : 1);
    const char *from = input->rows + row * input->row_bytes;
    const struct group_sums *sums = (const struct group_sums *)(from + input->sums_at);
    const int vectors = panels * VECTORS;
    const long width = group_width(weight);
    struct NAME(group_at) group = {.codes = weight->codes + panel * groups * size, .fine = panel * groups * PANEL,
                                   .apart = groups * size, .fine_apart = groups * PANEL};
    floats acc[TILE_ROWS][MOST_VECTORS] = {};
    group.ahead = row ? 0 : PREFETCH_WORDS; /* the first rows bring a panel, the others find it */
    for (long span = 0; span < spans; span++) {
        floats scale[MOST_VECTORS], minimum[MOST_VECTORS] = {};
        UNROLL for (int v = 0; v < vectors; v++) {
            long coarse = ((panel + v / VECTORS) * spans + span) * PANEL + v % VECTORS * LANES;
            group.scale[v] = scale[v] = NAME(load_scales)(weight->scales, coarse, weight->scale_type);
            if (weight->minima)
                group.minimum[v] = minimum[v] = NAME(load_scales)(weight->minima, coarse, weight->scale_type);
        }
        for (long i = 0; i < weight->span; i++) {
            UNROLL for (int v = 0; v < vectors; v++) {
                long fine = group.fine + v / VECTORS * group.fine_apart + v % VECTORS * LANES;
                if (weight->sub_scales)
                    group.scale[v] = scale[v] * NAME(load_bytes)(weight->sub_scales, fine, 1);
                if (weight->minima && weight->sub_minima)
                    group.minimum[v] = minimum[v] * NAME(load_bytes)(weight->sub_minima, fine, 0);
            }
            NAME(add_group)(rows, panels, terms, kind, weight, &group, from, sums, input->row_bytes, width, acc);
            group.codes += size;
            group.fine += PANEL;
            from += bytes;
            sums++;
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++)
            *(floats *)(to + r * panels * PANEL + v * LANES) = acc[r][v];
}

#define GROUP_TILE_OF(kind)                                                                                           \
    case kind:                                                                                                        \
        NAME(group_tile)(rows, panels, terms, kind, weight, input, row, panel, to);                                   \
        break;
#define EXACT_TILE_OF(kind)                                                                                           \
    case kind:                                                                                                        \
        if (panels == 1 && terms == 1)                                                                                \
            NAME(group_tile)(rows, 1, 1, kind, weight, input, row, panel, to);                                        \
        break;

INLINE void NAME(tile_of)(int rows, int panels, int terms, const struct groups *weight,
                          const struct group_input *input, long row, long panel, float *to)
{
    switch (group_kind(weight)) {
        GROUP_TILE_OF(INTEGER_4)
        GROUP_TILE_OF(INTEGER_8)
#if CODE_SIZES_DIFFER
        GROUP_TILE_OF(INTEGER_7)
        GROUP_TILE_OF(INTEGER_6)
#else
        case INTEGER_7:
        case INTEGER_6:
            NAME(group_tile)(rows, panels, terms, INTEGER_8, weight, input, row, panel, to);
            break;
#endif
        EXACT_TILE_OF(EXACT_4)
        EXACT_TILE_OF(EXACT_8)
        EXACT_TILE_OF(EXACT_E4M3)
        EXACT_TILE_OF(EXACT_TABLE)
    }
}

#define TILE_CASE(rows, panels, terms)                                                                                \
    case ((rows) * 2 + (panels)) * 2 + (terms):                                                                       \
        NAME(tile_of)(rows, panels, terms, weight, input, row, panel, to);                                            \
        break;

/* Write the products of ``rows`` rows, from ``row`` on, with ``panels`` panels to ``to`` [rows][panels * PANEL]. Rows
 * are WIDE_ROWS / terms with two panels, else a power of two, at most TILE_ROWS / terms. */
static void NAME(group_rows)(int rows, int panels, const struct groups *weight, const struct group_input *input,
                             long row, long panel, float *to)
{
    switch ((rows * 2 + panels) * 2 + weight->terms) {
        TILE_CASE(1, 1, 1)
        TILE_CASE(2, 1, 1)
        TILE_CASE(4, 1, 1)
        TILE_CASE(1, 1, 2)
        TILE_CASE(2, 1, 2)
#if LANES == 16
        TILE_CASE(8, 1, 1)
        TILE_CASE(4, 1, 2)
        TILE_CASE(WIDE_ROWS, 2, 1)
        TILE_CASE(WIDE_ROWS / 2, 2, 2)
#endif
    }
}

/* -- all rows -------------------------------------------------------------------------------------------------------- */

/* Finish a tile and write it, from column ``at`` of the result on: bias; the activation of the gate times the values
 * ``up``, if there is one; the addition. */
INLINE void NAME(finish_tile)(const struct group_product *product, const struct groups *weight, long row, int rows,
                              long panel, int panels, long at, const float *sums, const float *up)
{
    long left = weight->out - panel * PANEL, first = panel * PANEL;
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < panels * VECTORS && v * LANES < left; v++) {
            long from = r * panels * PANEL + v * LANES, to = (row + r) * product->out_row + at + v * LANES;
            floats x = *(const floats *)(sums + from);
            if (weight->bias)
                x += *(const floats *)(weight->bias + first + v * LANES);
            if (up) {
                floats y = *(const floats *)(up + from);
                if (weight->next->bias)
                    y += *(const floats *)(weight->next->bias + first + v * LANES);
                x = NAME(apply_activation)(x, product->activation) * y;
            }
            if ((v + 1) * LANES <= left) {
                if (product->add)
                    x += NAME(load_floats)(product->add, to, product->type);
                NAME(store_floats)(product->to, to, product->type, x);
            } else
                for (int i = 0; i < left - v * LANES; i++)
                    NAME(store)(product->to, to + i, product->type,
                                x[i] + (product->add ? NAME(load)(product->add, to + i, product->type) : 0));
        }
}

/* Compute and write ``rows`` rows, from ``row`` on, of ``panels`` panels of ``part``, from column ``at`` of the result
 * on. */
static void NAME(write_tile)(const struct group_product *product, int part, long row, int rows, long panel, int panels,
                             long at)
{
    float sums[TILE_ROWS * 2 * PANEL], up[TILE_ROWS * 2 * PANEL];
    NAME(group_rows)(rows, panels, product->parts[part], product->inputs[part], row, panel, sums);
    if (product->activation)
        NAME(group_rows)(rows, panels, product->parts[1], product->inputs[1], row, panel, up);
    NAME(finish_tile)(product, product->parts[part], row, rows, panel, panels, at, sums,
                      product->activation ? up : NULL);
}

/* Compute and write rows from ``row`` on of one panel of ``part``. */
static void NAME(write_panel)(const struct group_product *product, int part, long row, long panel, long at, int most)
{
    while (row < product->rows) {
        int rows = most;
        while (rows > product->rows - row)
            rows /= 2;
        NAME(write_tile)(product, part, row, rows, panel, 1, at);
        row += rows;
    }
}

/* Compute the columns of panels [first, last), counted over all parts; with an activation, over the gate. */
static void NAME(group_panels)(const struct group_product *product, long first, long last)
{
    long panel = first;
    int part = 0, panels;
    for (long unit = first; unit < last; unit += panels, panel += panels) {
        while (panel >= group_panels_of(product->parts[part])) {
            panel -= group_panels_of(product->parts[part]);
            part++;
        }
        const struct groups *weight = product->parts[part], *up = product->activation ? product->parts[1] : weight;
        const int terms = weight->terms > up->terms ? weight->terms : up->terms;
        const int wide = weight->terms == up->terms && !weight->exact && !up->exact ? WIDE_ROWS / terms : 0;
        long at = product->at[part] + panel * PANEL, row = 0;
        panels = wide && product->rows >= MIN_WIDE && panel + 1 < group_panels_of(weight) && unit + 1 < last ? 2 : 1;
        for (; panels == 2 && row + wide <= product->rows; row += wide)
            NAME(write_tile)(product, part, row, wide, panel, 2, at);
        for (int i = 0; i < panels; i++)
            NAME(write_panel)(product, part, row, panel + i, at + i * PANEL, TILE_ROWS / terms);
    }
}
