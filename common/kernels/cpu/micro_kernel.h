/* The one product that everything here is made of: a few rows times a packed panel, accumulated in registers.
 *
 * Rows are ``steps`` words each (a word is a float32 or a pair of bfloat16, see vectors.h). A panel holds ``steps`` times
 * ``width * LANES`` of them, so it is read once from front to back. Where they lie as HALVES each becomes a float32 when
 * it is read, beside the products, which other units of the processor do.
 */

#undef LOCALITY_ONE_TILE
#undef LOCALITY_SOME_TILES
#undef LOCALITY_MANY_TILES
#if PREFETCH_TO_L2
#define LOCALITY_ONE_TILE 3
#define LOCALITY_SOME_TILES 2
#define LOCALITY_MANY_TILES 3
#else
#define LOCALITY_ONE_TILE 0
#define LOCALITY_SOME_TILES 0
#define LOCALITY_MANY_TILES 3
#endif

INLINE words NAME(load_words)(const char *panel, long at, enum word_format as)
{
    return as == HALVES ? (words)NAME(load_floats)(panel, at, BFLOAT16)
                        : *(const words *)((const uint32_t *)panel + at);
}

INLINE floats NAME(fma)(floats sum, uint32_t a, words b, enum word_format as)
{
    words row = (words){} + a;
    if (as != PAIRS)
        return sum + (floats)row * (floats)b;
#if HAS_BF16_DOT
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)row, (__m512bh)b);
#else
    sum += (floats)(row << 16) * (floats)(b << 16);
    return sum + (floats)(row & 0xFFFF0000u) * (floats)(b & 0xFFFF0000u);
#endif
}

/* What of a tile's sums is kept when more steps are added to them. */
static const float NAME(keep_all)[MR] = {[0 ... MR - 1] = 1};

/* sums[r][v] = sums[r][v] * keep[r] + rows[r] . panel[.][v], or without the first part where ``keep`` is NULL; rows
 * of sums are ``sums_row`` apart. Every KC_STEPS steps are summed from zero and then added to the sums: the error of a
 * sum of n steps grows as the root of KC_STEPS + n / KC_STEPS instead of that of n, and a caller that comes back to
 * its sums after whole blocks of steps gets the same bits as one that does not. ``next`` is brought nearer, ``lines``
 * cache lines per step (of HALVES as many as a step has, if any); more than one are not kept beyond first-level cache,
 * since few rows want them: what the rest of the process works on stays in the others. Not so where PREFETCH_TO_L2. */
INLINE void NAME(micro_kernel)(int rows, int width, enum word_format as, const uint32_t *row, long row_stride,
                               const void *panel, long steps, float *sums, long sums_row, const float *keep,
                               const char *next, int lines)
{
    const int step = width * LANES * (as == HALVES ? 2 : 4);
    long s = 0;
    do {
        floats acc[MR][NR_VECTORS];
        const long end = steps - s < KC_STEPS ? steps : s + KC_STEPS;
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < width; v++)
                acc[r][v] = (floats){};
        for (; s < end; s++) {
            words b[NR_VECTORS];
            UNROLL for (int v = 0; v < width; v++)
                b[v] = NAME(load_words)(panel, (s * width + v) * LANES, as);
            if (as != HALVES)
                UNROLL for (int line = 0; line < lines; line++) {
                    const char *at = next + (s * lines + line) * 64;
                    if (lines > 2)
                        __builtin_prefetch(at, 0, LOCALITY_ONE_TILE);
                    else if (lines > 1)
                        __builtin_prefetch(at, 0, LOCALITY_SOME_TILES);
                    else
                        __builtin_prefetch(at, 0, LOCALITY_MANY_TILES);
                }
            else if (lines)
                UNROLL for (int byte = 0; byte < step; byte += 64)
                    __builtin_prefetch(next + s * step + byte, 0, 3);
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int v = 0; v < width; v++)
                    acc[r][v] = NAME(fma)(acc[r][v], row[r * row_stride + s], b[v], as);
        }
        if (keep) {
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int v = 0; v < width; v++) {
                    floats *sum = (floats *)(sums + r * sums_row + v * LANES);
                    *sum = *sum * keep[r] + acc[r][v];
                }
        } else {
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int v = 0; v < width; v++)
                    *(floats *)(sums + r * sums_row + v * LANES) = acc[r][v];
        }
        keep = NAME(keep_all);
    } while (s < steps);
}

#define MICRO_KERNEL_CASE(r, v)                                                                                       \
    case (r) * 8 + (v):                                                                                               \
        NAME(micro_kernel)(r, v, as, row, row_stride, panel, steps, sums, sums_row, keep, next, lines);               \
        break;
#if NR_VECTORS == 4
#define MICRO_KERNEL_WIDTHS(r)                                                                                        \
    MICRO_KERNEL_CASE(r, 1) MICRO_KERNEL_CASE(r, 2) MICRO_KERNEL_CASE(r, 3) MICRO_KERNEL_CASE(r, 4)
#else
#define MICRO_KERNEL_WIDTHS(r) MICRO_KERNEL_CASE(r, 1) MICRO_KERNEL_CASE(r, 2)
#endif

/* The same with a number of rows and vectors that is only known now: one loop per pair of them. */
INLINE void NAME(micro_kernel_any)(int rows, int width, enum word_format as, const uint32_t *row, long row_stride,
                                   const void *panel, long steps, float *sums, long sums_row, const float *keep,
                                   const char *next, int lines)
{
    switch (rows * 8 + width) {
        MICRO_KERNEL_WIDTHS(1)
        MICRO_KERNEL_WIDTHS(2)
        MICRO_KERNEL_WIDTHS(3)
        MICRO_KERNEL_WIDTHS(4)
#if MR > 4
        MICRO_KERNEL_WIDTHS(5)
        MICRO_KERNEL_WIDTHS(6)
#endif
    }
}

#undef MICRO_KERNEL_AS
#define MICRO_KERNEL_AS(as, lines)                                                                                    \
    NAME(micro_kernel_any)(rows, width, as, row, row_stride, panel, steps, sums, sums_row, keep, next, lines)

static void NAME(gemm_tile)(int rows, int width, enum word_format as, const uint32_t *row, long row_stride,
                            const void *panel, long steps, float *sums, long sums_row, const float *keep,
                            const char *next, int lines)
{
    if (as == HALVES && lines)
        MICRO_KERNEL_AS(HALVES, 1);
    else if (as == HALVES)
        MICRO_KERNEL_AS(HALVES, 0);
    else if (as == FLOATS) /* fetching ahead gains nothing, as so many bytes are read for each product */
        MICRO_KERNEL_AS(FLOATS, 0);
    else if (!lines)
        MICRO_KERNEL_AS(PAIRS, 0);
    else if (lines <= 1)
        MICRO_KERNEL_AS(PAIRS, 1);
    else if (lines <= 2)
        MICRO_KERNEL_AS(PAIRS, 2);
    else
        MICRO_KERNEL_AS(PAIRS, 4);
}
