/* Products of a panel of groups with some rows; compiled once per instruction set. Its own file defines dot_two and
 * CODE_OFFSET. */

#define VECTORS (PANEL / LANES)
#define CHAINS (LANES == 16 ? 2 : 1) /* sums of an exact product that alternate, so that an addition need not wait */
#define TILE_ROWS (LANES == 16 ? 8 : 4) /* most rows that are multiplied by codes at a time */

/* -- activations --------------------------------------------------------------------------------------------------- */

/* Load activations [first, first + count) of a row in the order of the weight's columns; 0 behind the last. */
INLINE void NAME(load_input)(const struct groups *weight, const void *from, long at, enum type type, long first,
                             long count, float *to)
{
    if (!weight->order && first + count <= weight->in) {
        for (long i = 0; i < count; i++)
            to[i] = NAME(load)(from, at + first + i, type);
        return;
    }
    for (long i = 0; i < count; i++) {
        long column = first + i;
        if (weight->order && column < weight->padded)
            column = weight->order[column];
        to[i] = column < weight->in ? NAME(load)(from, at + column, type) : 0;
    }
}

/* Round ``count`` activations to int8: the largest magnitude becomes 127. Returns the scale. */
INLINE float NAME(round_input)(const float *from, long count, int8_t *to)
{
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    int32_t top = 0;
    for (long i = 0; i < count; i++) {
        int32_t size = (int32_t)(NAME(float_bits)(from[i]) & 0x7FFFFFFF);
        top = size > top ? size : top;
    }
    float most;
    memcpy(&most, &top, 4);
    float scale = most / 127, divisor = scale == 0 ? 1 : scale;
    for (long i = 0; i < count; i++) {
        int32_t code = (int32_t)NAME(float_bits)(from[i] / divisor + round) - 0x4B400000;
        code = code > 127 ? 127 : code; /* a scale below the normal numbers is not precise */
        to[i] = (int8_t)(code < -127 ? -127 : code);
    }
    return scale;
}

/* Pack the activations ``some`` [each] from column ``first`` on, as floats or as codes, into a packed row. With
 * several terms, ``some`` becomes what the codes leave of it. */
INLINE void NAME(pack_some)(const struct groups *weight, long first, long each, float *some, char *row,
                            struct group_sums *sums)
{
    const long group = weight->group;
    int8_t *codes = (int8_t *)row + first;
    float scale = 1;
    if (weight->exact)
        memcpy(row + first * sizeof(float), some, each * sizeof(float));
    else
        scale = NAME(round_input)(some, each, codes);
    sums += first / group;
    for (long k = 0; k < each && first + k < weight->padded; k += group, sums++) {
        float total = 0;
        int32_t whole = 0;
        if (weight->exact && weight->minima)
            for (long i = k; i < k + group; i++)
                total += some[i];
        if (!weight->exact)
            for (long i = k; i < k + group; i++)
                whole += codes[i];
        *sums = (struct group_sums){scale, weight->exact ? total : scale * (float)whole, (float)whole};
    }
    if (weight->terms > 1)
        for (long i = 0; i < each; i++)
            some[i] -= scale * (float)codes[i];
}

INLINE void NAME(pack_typed)(const struct groups *weight, const void *from, long at, enum type type,
                             const struct group_input *input, char *to)
{
    const long group = weight->group, each = weight->exact || group > MIN_INPUT_GROUP ? group : MIN_INPUT_GROUP;
    float some[MAX_GROUP];
    for (long first = 0; first < weight->padded; first += each) {
        NAME(load_input)(weight, from, at, type, first, each, some);
        for (int term = 0; term < weight->terms; term++) {
            char *row = to + term * input->row_bytes;
            NAME(pack_some)(weight, first, each, some, row, (struct group_sums *)(row + input->sums_at));
        }
    }
}

/* Pack the row that begins at element ``at`` of ``from``, all terms. */
static void NAME(pack_row)(const struct groups *weight, const void *from, long at, enum type type,
                           const struct group_input *input, char *to)
{
    if (type == FLOAT32)
        NAME(pack_typed)(weight, from, at, FLOAT32, input, to);
    else
        NAME(pack_typed)(weight, from, at, BFLOAT16, input, to);
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

INLINE floats NAME(to_floats)(ints x) { return __builtin_convertvector(x, floats); }

INLINE words NAME(load_codes)(const uint32_t *from) { return *(const words *)from; }

/* -- the sum of a group ---------------------------------------------------------------------------------------------- */

/* Add the products of one group to ``sums``. ``row``: int8 of the first row, the next is ``row_bytes`` further. Codes
 * ``ahead`` words further are prefetched into L2: some processors allow few prefetches into L1. */
INLINE void NAME(integer_dots)(int rows, enum group_kind kind, long group, const uint32_t *panel, long ahead,
                               const char *row, long row_bytes, ints (*sums)[VECTORS])
{
    const long half = kind == INTEGER_4 ? group / 2 : 4, stride = kind == INTEGER_4 ? 4 : 8;
    const int lines = kind == INTEGER_4 ? 1 : 2; /* words of a column per step */
    for (long t = 0; t < group / 8; t++) {
        words low[VECTORS], high[VECTORS];
        UNROLL for (int line = 0; line < lines; line++)
            __builtin_prefetch(panel + (lines * t + line) * PANEL + ahead, 0, 2);
        UNROLL for (int v = 0; v < VECTORS; v++)
            if (kind == INTEGER_4) {
                words both = NAME(load_codes)(panel + t * PANEL + v * LANES);
                low[v] = both & 0x0F0F0F0Fu;
                high[v] = both >> 4 & 0x0F0F0F0Fu;
            } else {
                low[v] = NAME(load_codes)(panel + 2 * t * PANEL + v * LANES);
                high[v] = NAME(load_codes)(panel + (2 * t + 1) * PANEL + v * LANES);
            }
        UNROLL for (int r = 0; r < rows; r++) {
            int32_t a, b;
            memcpy(&a, row + r * row_bytes + t * stride, 4);
            memcpy(&b, row + r * row_bytes + t * stride + half, 4);
            UNROLL for (int v = 0; v < VECTORS; v++)
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
                             floats (*sums)[VECTORS])
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
    long ahead; /* prefetch distance */
    long fine;  /* where its numbers begin in those of all groups */
    floats scale[VECTORS], minimum[VECTORS];
};

/* Add one group's share of the products to ``acc``. ``row``: the packed activations of the group, of the first row. */
INLINE void NAME(add_group)(int rows, enum group_kind kind, const struct groups *weight,
                            const struct NAME(group_at) *group, const char *row, const struct group_sums *input,
                            long row_bytes, floats (*acc)[VECTORS])
{
    const int exact = kind >= EXACT_4, shift = exact ? 0 : CODE_OFFSET(kind);
    floats sums[TILE_ROWS][VECTORS], zero[VECTORS];
    const struct group_sums *of[TILE_ROWS];
    UNROLL for (int r = 0; r < rows; r++)
        of[r] = (const struct group_sums *)((const char *)input + r * row_bytes);
    UNROLL for (int v = 0; v < VECTORS; v++)
        if (weight->zeros)
            zero[v] = NAME(load_bytes)(weight->zeros, group->fine + v * LANES, 0) - (float)shift;
        else
            zero[v] = NAME(broadcast)((float)(weight->zero - shift));
    if (exact) {
        NAME(exact_dots)(rows, kind, weight->group, group->codes, group->ahead, row, row_bytes, zero, weight->table,
                         sums);
    } else {
        ints whole[TILE_ROWS][VECTORS] = {};
        NAME(integer_dots)(rows, kind, weight->group, group->codes, group->ahead, row, row_bytes, whole);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) /* exact: below 2^24 */
                sums[r][v] = NAME(to_floats)(whole[r][v]) - zero[v] * of[r]->codes;
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) {
            floats scale = exact ? group->scale[v] : (floats)(group->scale[v] * of[r]->scale);
            acc[r][v] += scale * sums[r][v];
            if (weight->minima)
                acc[r][v] += group->minimum[v] * of[r]->total;
        }
}

/* Write the products of ``rows`` rows, from ``row`` on, with a panel to ``to`` [rows][PANEL]. */
INLINE void NAME(group_tile)(int rows, enum group_kind kind, const struct groups *weight,
                             const struct group_input *input, long row, long panel, float *to)
{
    const long groups = weight->padded / weight->group, spans = groups / weight->span;
    const long size = weight->group * weight->bits / 32 * PANEL; /* words of a group */
    const long bytes = weight->group * (kind >= EXACT_4 ? (long)sizeof(float) : 1);
    const char *from = input->rows + row * input->row_bytes;
    const struct group_sums *sums = (const struct group_sums *)(from + input->sums_at);
    struct NAME(group_at) group = {.codes = weight->codes + panel * groups * size, .fine = panel * groups * PANEL};
    floats acc[TILE_ROWS][VECTORS] = {};
    group.ahead = row ? 0 : PREFETCH_WORDS; /* the first rows bring a panel, the others find it */
    for (long span = 0; span < spans; span++) {
        floats scale[VECTORS], minimum[VECTORS] = {};
        UNROLL for (int v = 0; v < VECTORS; v++) {
            long coarse = (panel * spans + span) * PANEL + v * LANES;
            group.scale[v] = scale[v] = NAME(load_scales)(weight->scales, coarse, weight->scale_type);
            if (weight->minima)
                group.minimum[v] = minimum[v] = NAME(load_scales)(weight->minima, coarse, weight->scale_type);
        }
        for (long i = 0; i < weight->span; i++) {
            UNROLL for (int v = 0; v < VECTORS; v++) {
                if (weight->sub_scales)
                    group.scale[v] = scale[v] * NAME(load_bytes)(weight->sub_scales, group.fine + v * LANES, 1);
                if (weight->minima && weight->sub_minima)
                    group.minimum[v] = minimum[v] * NAME(load_bytes)(weight->sub_minima, group.fine + v * LANES, 0);
            }
            NAME(add_group)(rows, kind, weight, &group, from, sums, input->row_bytes, acc);
            group.codes += size;
            group.fine += PANEL;
            from += bytes;
            sums++;
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            *(floats *)(to + r * PANEL + v * LANES) = acc[r][v];
}

#define GROUP_TILE_OF(kind)                                                                                           \
    case kind:                                                                                                        \
        NAME(group_tile)(rows, kind, weight, input, row, panel, to);                                                  \
        break;

INLINE void NAME(group_tile_any)(int rows, const struct groups *weight, const struct group_input *input, long row,
                                 long panel, float *to)
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
            NAME(group_tile)(rows, INTEGER_8, weight, input, row, panel, to);
            break;
#endif
        GROUP_TILE_OF(EXACT_4)
        GROUP_TILE_OF(EXACT_8)
        GROUP_TILE_OF(EXACT_E4M3)
        GROUP_TILE_OF(EXACT_TABLE)
    }
}

static void NAME(packed_rows)(int rows, const struct groups *weight, const struct group_input *input, long row,
                             long panel, float *to)
{
#if LANES == 16
    if (rows == 8)
        NAME(group_tile_any)(8, weight, input, row, panel, to);
    else
#endif
    if (rows == 4)
        NAME(group_tile_any)(4, weight, input, row, panel, to);
    else if (rows == 2)
        NAME(group_tile_any)(2, weight, input, row, panel, to);
    else
        NAME(group_tile_any)(1, weight, input, row, panel, to);
}

/* Write the products of ``rows`` rows (a power of two, at most TILE_ROWS), from ``row`` on, with a panel to ``to``
 * [rows][PANEL]: the sums of the products of their terms. */
static void NAME(group_rows)(int rows, const struct groups *weight, const struct group_input *input, long row,
                             long panel, float *to)
{
    if (weight->terms == 1) {
        NAME(packed_rows)(rows, weight, input, row, panel, to);
        return;
    }
    float terms[2 * TILE_ROWS * PANEL];
    for (int done = 0, some; done < 2 * rows; done += some) {
        some = 2 * rows < TILE_ROWS ? 2 * rows : TILE_ROWS;
        NAME(packed_rows)(some, weight, input, 2 * row + done, panel, terms + done * PANEL);
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < PANEL; i++)
            to[r * PANEL + i] = terms[2 * r * PANEL + i] + terms[(2 * r + 1) * PANEL + i];
}

/* -- all rows -------------------------------------------------------------------------------------------------------- */

/* Finish a tile and write it, from column ``at`` of the result on: bias; the activation of the gate times the values
 * ``up``, if there is one; the addition. */
INLINE void NAME(finish_tile)(const struct group_product *product, const struct groups *weight, long row, int rows,
                              long panel, long at, const float *sums, const float *up)
{
    long left = weight->out - panel * PANEL, first = panel * PANEL;
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS && v * LANES < left; v++) {
            long from = r * PANEL + v * LANES, to = (row + r) * product->out_row + at + v * LANES;
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

/* Compute the columns of panels [first, last), counted over all parts; with an activation, over the gate. */
static void NAME(group_panels)(const struct group_product *product, long first, long last)
{
    long panel = first;
    int part = 0;
    for (long unit = first; unit < last; unit++, panel++) {
        while (panel >= group_panels_of(product->parts[part])) {
            panel -= group_panels_of(product->parts[part]);
            part++;
        }
        const struct groups *weight = product->parts[part];
        long at = product->at[part] + panel * PANEL;
        for (long row = 0; row < product->rows;) {
            int rows = TILE_ROWS;
            while (rows > product->rows - row)
                rows /= 2;
            float sums[TILE_ROWS * PANEL], up[TILE_ROWS * PANEL];
            NAME(group_rows)(rows, weight, product->inputs[part], row, panel, sums);
            if (product->activation)
                NAME(group_rows)(rows, product->parts[1], product->inputs[1], row, panel, up);
            NAME(finish_tile)(product, weight, row, rows, panel, at, sums, product->activation ? up : NULL);
            row += rows;
        }
    }
}
