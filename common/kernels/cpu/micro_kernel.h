/* The GEMM micro-kernel: up to MR rows of A times a packed panel of B, accumulated in registers.
 *
 * A row of A is ``steps`` words (a word is a float32 or a pair of bfloat16, see vectors.h). A panel is [steps][width *
 * LANES] words and is read once from front to back. In the HALVES format the panel holds bfloat16, and each element
 * becomes a float32 when it is loaded; other execution units than those of the products do this.
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

/* ``keep`` of micro_kernel after its first KC_STEPS steps: all previous sums are kept. */
static const float NAME(keep_all)[MR] = {[0 ... MR - 1] = 1};

/* sums[r][v] = sums[r][v] * keep[r] + rows[r] . panel[.][v]; without the first term where ``keep`` is NULL. Rows of
 * sums are ``sums_row`` floats apart.
 *
 * Each slice of KC_STEPS steps is summed from zero and then added to the sums. The error of a sum of n steps then grows
 * as sqrt(KC_STEPS + n / KC_STEPS) instead of sqrt(n), and a caller that splits the steps at multiples of KC_STEPS gets
 * the same bits as one that does not.
 *
 * ``next`` is prefetched, ``lines`` cache lines per step (for HALVES as many lines as a step has, if ``lines`` is not
 * 0). More than one line per step means that few row tiles use the panel: it then goes to the first-level cache only,
 * and what the rest of the process works on stays in the others. Where PREFETCH_TO_L2 is set, the levels differ
 * (LOCALITY_*). */
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

/* The same with ``rows`` and ``width`` known only at run time: one unrolled loop for each combination. */
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

/* The same with format and ``lines`` known only at run time; ``lines`` is rounded up to 0, 1, 2 or 4 (0 for FLOATS). */
static void NAME(gemm_tile)(int rows, int width, enum word_format as, const uint32_t *row, long row_stride,
                            const void *panel, long steps, float *sums, long sums_row, const float *keep,
                            const char *next, int lines)
{
    if (as == HALVES && lines)
        MICRO_KERNEL_AS(HALVES, 1);
    else if (as == HALVES)
        MICRO_KERNEL_AS(HALVES, 0);
    else if (as == FLOATS) /* no prefetch: so many bytes are read per product that it gains nothing */
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
