/* The one product that everything here is made of: a few rows times a packed panel, accumulated in registers.
 *
 * Rows are ``steps`` words each (a word is a float32 or a pair of bfloat16, see words.h). A panel holds ``steps`` times
 * ``width * LANES`` words, so it is read once from front to back.
 */

INLINE floats NAME(multiply)(floats sum, uint32_t a, words b, int pairs)
{
    words row = (words){} + a;
    if (!pairs)
        return sum + (floats)row * (floats)b;
#if HAS_DOT
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)row, (__m512bh)b);
#else
    sum += (floats)(row << 16) * (floats)(b << 16);
    return sum + (floats)(row & 0xFFFF0000u) * (floats)(b & 0xFFFF0000u);
#endif
}

/* sums[r][v] = sums[r][v] * keep[r] + rows[r] . panel[.][v], or without the first part where ``keep`` is NULL; rows
 * of sums are ``sums_row`` apart. ``next`` is brought nearer, ``lines`` cache lines per step; more than one are not
 * kept beyond first-level cache, since few rows want them: what the rest of the process works on stays in the
 * others. */
INLINE void NAME(tile)(int rows, int width, int pairs, const uint32_t *row, long row_stride, const uint32_t *panel,
                       long steps, float *sums, long sums_row, const float *keep, const char *next, int lines)
{
    floats acc[TILE_ROWS][TILE_VECTORS];
    if (keep) {
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < width; v++)
                acc[r][v] = *(const floats *)(sums + r * sums_row + v * LANES) * keep[r];
    } else {
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < width; v++)
                acc[r][v] = (floats){};
    }
    for (long s = 0; s < steps; s++) {
        words b[TILE_VECTORS];
        UNROLL for (int v = 0; v < width; v++)
            b[v] = *(const words *)(panel + (s * width + v) * LANES);
        UNROLL for (int line = 0; line < lines; line++)
            __builtin_prefetch(next + (s * lines + line) * 64, 0, lines > 1 ? 0 : 3);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < width; v++)
                acc[r][v] = NAME(multiply)(acc[r][v], row[r * row_stride + s], b[v], pairs);
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < width; v++)
            *(floats *)(sums + r * sums_row + v * LANES) = acc[r][v];
}

#define TILE_CASE(r, v)                                                                                               \
    case (r) * 8 + (v):                                                                                               \
        NAME(tile)(r, v, pairs, row, row_stride, panel, steps, sums, sums_row, keep, next, lines);                    \
        break;
#if TILE_VECTORS == 4
#define TILE_WIDTHS(r) TILE_CASE(r, 1) TILE_CASE(r, 2) TILE_CASE(r, 3) TILE_CASE(r, 4)
#else
#define TILE_WIDTHS(r) TILE_CASE(r, 1) TILE_CASE(r, 2)
#endif

/* The same with a number of rows and vectors that is only known now: one loop per pair of them. */
INLINE void NAME(any_tile)(int rows, int width, int pairs, const uint32_t *row, long row_stride, const uint32_t *panel,
                           long steps, float *sums, long sums_row, const float *keep, const char *next, int lines)
{
    switch (rows * 8 + width) {
        TILE_WIDTHS(1)
        TILE_WIDTHS(2)
        TILE_WIDTHS(3)
        TILE_WIDTHS(4)
#if TILE_ROWS > 4
        TILE_WIDTHS(5)
        TILE_WIDTHS(6)
#endif
    }
}

static void NAME(tile_of_words)(int rows, int width, int pairs, const uint32_t *row, long row_stride,
                                const uint32_t *panel, long steps, float *sums, long sums_row, const float *keep,
                                const char *next, int lines)
{
    if (!pairs)
        NAME(any_tile)(rows, width, 0, row, row_stride, panel, steps, sums, sums_row, keep, next, 0);
    else if (!lines)
        NAME(any_tile)(rows, width, 1, row, row_stride, panel, steps, sums, sums_row, keep, next, 0);
    else if (lines <= 1)
        NAME(any_tile)(rows, width, 1, row, row_stride, panel, steps, sums, sums_row, keep, next, 1);
    else if (lines <= 2)
        NAME(any_tile)(rows, width, 1, row, row_stride, panel, steps, sums, sums_row, keep, next, 2);
    else
        NAME(any_tile)(rows, width, 1, row, row_stride, panel, steps, sums, sums_row, keep, next, 4);
}
