/* bfloat16 products in the AMX tile registers: the counterpart of the loop in micro_kernel.h.
 *
 * A tile of B is 16 steps of one vector of columns of the packed panel, a tile of A is 16 words of up to 16 rows; both
 * are loaded in place. Up to 32 rows are multiplied by two vectors at a time, so that each loaded tile is used twice.
 * The sums of a row are added in the same order whatever rows are computed beside it.
 */

#define AMX_ROWS 16  /* rows of a tile */
#define AMX_STEPS 16 /* words of a row, or steps of a panel, in a tile */
#define AMX_MR (2 * AMX_ROWS)
#define PREFETCH_BYTES (8 << 10) /* prefetch distance in a panel that meets one block of rows: from memory into L1 */
#define CONVERT_PREFETCH_L2 (8 << 10) /* the same in a panel that is converted to words: from memory into L2, */
#define CONVERT_PREFETCH_L1 (2 << 10) /* and from L2 into L1 */

/* The configured tile shapes: sums are in tile registers 0 to 3, rows of A in 4 and 5, the panel of B in 6 and 7. */
struct NAME(tile_config) {
    int rows, steps;
};

/* A block of A: rows of words, ``row`` words apart. An element of float32 is stored as the sum of ``parts`` bfloat16
 * (see split_row): all first parts of a row, then all second parts, ``part`` words behind them, and so on. */
struct NAME(a_block) {
    const uint32_t *words;
    long row;
    int parts; /* 1 for bfloat16; a compile-time constant on every hot path */
    long part;
};

struct NAME(b_panel) {
    const uint32_t *words; /* [steps][row] */
    long row;
    int parts; /* parts per element: 1, or FLOAT_PARTS if A has as many */
    long part;
    int width;        /* vectors of LANES to compute */
    const char *next; /* prefetched, ``lines`` cache lines per tile of steps: into L2, */
    long lines;       /* or into L1 if ``soon``, for up to 16 rows and two vectors */
    int soon;
};

/* The compiler does not know which memory tile loads and stores access; this keeps other accesses in order with
 * them. */
#define AMX_FENCE() __asm__ volatile("" ::: "memory")

INLINE void NAME(configure_tiles)(struct NAME(tile_config) *now, int rows, int steps)
{
    if (now->rows == rows && now->steps == steps)
        return;
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    int first = rows < AMX_ROWS ? rows : AMX_ROWS, second = rows - first;
    for (int t = 0; t < 8; t++) {
        shape.bytes[t] = 64;
        shape.rows[t] = (uint8_t)(t < 4 ? first : steps);
    }
    shape.bytes[4] = (uint16_t)(steps * 4);
    shape.rows[4] = (uint8_t)first;
    if (second) {
        shape.rows[2] = shape.rows[3] = shape.rows[5] = (uint8_t)second;
        shape.bytes[5] = (uint16_t)(steps * 4);
    }
    LOAD_TILE_SHAPE(shape);
    *now = (struct NAME(tile_config)){rows, steps};
}

INLINE void NAME(release_tiles)(void) { _tile_release(); }

/* Vector work done between tile products, one item ``i`` per call. A constant at every call site, so that it is
 * inlined. */
typedef void NAME(side_work)(void *of, long i);

INLINE void NAME(no_op)(void *, long) {}

/* Load the sums of C into tiles 0 to 3 (zeros unless ``add``), and store them: up to 16 rows, or up to 32 if ``high``,
 * and ``width`` vectors (1 or 2). */
INLINE void NAME(load_c)(int high, int width, const float *sums, long sums_row, int add)
{
    const float *below = sums + AMX_ROWS * sums_row;
    if (add) {
        _tile_loadd(0, sums, sums_row * 4);
        if (width > 1)
            _tile_loadd(1, sums + LANES, sums_row * 4);
        if (high)
            _tile_loadd(2, below, sums_row * 4);
        if (high && width > 1)
            _tile_loadd(3, below + LANES, sums_row * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
}

INLINE void NAME(store_c)(int high, int width, float *sums, long sums_row)
{
    float *below = sums + AMX_ROWS * sums_row;
    _tile_stored(0, sums, sums_row * 4);
    if (width > 1)
        _tile_stored(1, sums + LANES, sums_row * 4);
    if (high)
        _tile_stored(2, below, sums_row * 4);
    if (high && width > 1)
        _tile_stored(3, below + LANES, sums_row * 4);
}

/* The micro-kernel: up to 16 rows, or up to 32 if ``high``, times one or two vectors. ``level`` is the cache level that
 * ``next`` is prefetched into. Where both A and B are split into parts, products whose part numbers add up to ``parts``
 * or more are below the last bit of a float32 and are left out.
 *
 * ``count`` items of side work are placed between the products of one tile of steps and the next. Neither depends on
 * the other, so the processor does both at once. */
INLINE void NAME(amx_micro_kernel)(int high, int width, int level, struct NAME(a_block) rows,
                                   struct NAME(b_panel) panel, long tiles, float *sums, long sums_row, int add,
                                   NAME(side_work) *side_work, void *of, long count)
{
    NAME(load_c)(high, width, sums, sums_row, add);
    const uint32_t *row = rows.words, *words = panel.words;
    const char *next = panel.next;
    long parts = count < 2 * tiles ? count : 2 * tiles;
    for (long t = 0; t < tiles; t++, row += AMX_STEPS, words += panel.parts * AMX_STEPS * panel.row) {
        UNROLL for (int q = 0; q < panel.parts; q++)
            UNROLL for (int p = 0; p < rows.parts - q; p++) {
                const uint32_t *here = row + p * rows.part, *there = words + q * panel.part;
                int first = p == 0 && q == 0;
                _tile_loadd(4, here, rows.row * 4); /* all loads before all products: a tenth faster than alternating */
                if (high)
                    _tile_loadd(5, here + AMX_ROWS * rows.row, rows.row * 4);
                if (p == 0)
                    _tile_loadd(6, there, panel.row * 4);
                if (p == 0 && width > 1)
                    _tile_loadd(7, there + LANES, panel.row * 4);
                if (first && 2 * t < parts)
                    side_work(of, 2 * t);
                _tile_dpbf16ps(0, 4, 6);
                if (width > 1)
                    _tile_dpbf16ps(1, 4, 7);
                if (first && 2 * t + 1 < parts)
                    side_work(of, 2 * t + 1);
                if (high)
                    _tile_dpbf16ps(2, 5, 6);
                if (first) /* after the tile loads, which compete with prefetches for line fill buffers */
                    for (long line = 0; line < panel.lines; line++, next += 64)
                        __builtin_prefetch(next, 0, level == 1 ? 3 : 2);
                if (high && width > 1)
                    _tile_dpbf16ps(3, 5, 7);
            }
    }
    NAME(store_c)(high, width, sums, sums_row);
    for (long i = parts; i < count; i++)
        side_work(of, i);
}

INLINE void NAME(amx_micro_kernel_any)(int count, int width, struct NAME(a_block) rows, struct NAME(b_panel) panel,
                                       long tiles, float *sums, long sums_row, int add, NAME(side_work) *side_work,
                                       void *of, long parts)
{
    if (count > AMX_ROWS && width > 1)
        NAME(amx_micro_kernel)(1, 2, 2, rows, panel, tiles, sums, sums_row, add, side_work, of, parts);
    else if (count > AMX_ROWS)
        NAME(amx_micro_kernel)(1, 1, 2, rows, panel, tiles, sums, sums_row, add, side_work, of, parts);
    else if (width > 1 && panel.soon)
        NAME(amx_micro_kernel)(0, 2, 1, rows, panel, tiles, sums, sums_row, add, side_work, of, parts);
    else if (width > 1)
        NAME(amx_micro_kernel)(0, 2, 2, rows, panel, tiles, sums, sums_row, add, side_work, of, parts);
    else
        NAME(amx_micro_kernel)(0, 1, 2, rows, panel, tiles, sums, sums_row, add, side_work, of, parts);
}

/* The steps after the last whole tile: fewer than AMX_STEPS. */
static void NAME(amx_k_tail)(struct NAME(tile_config) *now, int count, int width, struct NAME(a_block) rows,
                             struct NAME(b_panel) panel, int steps, float *sums, long sums_row, int add)
{
    NAME(configure_tiles)(now, count, steps);
    panel.lines = 0;
    NAME(amx_micro_kernel_any)(count, width, rows, panel, 1, sums, sums_row, add, NAME(no_op), NULL, 0);
}

/* sums[r][v] = rows[r] . panel[.][v], plus the previous sums if ``add``, for ``count`` rows (at most AMX_MR) and
 * ``width`` vectors (1 or 2). Rows of sums are ``sums_row`` floats apart. */
INLINE void NAME(amx_block)(struct NAME(tile_config) *now, int count, int width, struct NAME(a_block) rows,
                            struct NAME(b_panel) panel, long steps, float *sums, long sums_row, int add,
                            NAME(side_work) *side_work, void *of, long parts)
{
    long tiles = steps / AMX_STEPS, whole = tiles * AMX_STEPS;
    AMX_FENCE();
    if (tiles) {
        NAME(configure_tiles)(now, count, AMX_STEPS);
        NAME(amx_micro_kernel_any)(count, width, rows, panel, tiles, sums, sums_row, add, side_work, of, parts);
    } else
        for (long i = 0; i < parts; i++)
            side_work(of, i);
    rows.words += whole;
    panel.words += panel.parts * whole * panel.row;
    if (whole < steps)
        NAME(amx_k_tail)(now, count, width, rows, panel, (int)(steps - whole), sums, sums_row, add || tiles);
    AMX_FENCE();
}

/* Split a row of float32 into bfloat16 that add up to it: all first parts, then all second, then all third. A float32
 * has three times 8 bits of mantissa, so nothing is lost except below 1e-38, and products with other bfloat16 are exact
 * as well. Infinities and NaN stay what they are, in the first part. */
static void NAME(split_row)(const float *from, long in, uint16_t *to)
{
    const __m512i upper = _mm512_set1_epi32((int)0xFFFF0000);
    for (long i = 0; i < in; i += LANES) {
        __mmask16 some = in - i < LANES ? (__mmask16)((1u << (in - i)) - 1) : 0xFFFF;
        __m512i x = _mm512_maskz_loadu_epi32(some, from + i);
        __mmask16 odd = _mm512_fpclass_ps_mask((__m512)x, 0x99), none = _mm512_fpclass_ps_mask((__m512)x, 0x81);
        x = _mm512_mask_or_epi32(x, none, x, _mm512_set1_epi32(0x00400000)); /* so that a NaN stays one without its
                                                                                low bits */
        for (int p = 0; p < FLOAT_PARTS; p++) {
            _mm256_mask_storeu_epi16(to + p * in + i, some, _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)));
            __m512 rest = _mm512_sub_ps((__m512)x, (__m512)_mm512_and_epi32(x, upper));
            x = _mm512_maskz_mov_epi32((__mmask16)~odd, (__m512i)rest);
        }
    }
}

/* Split two rows of float32 of a panel, ``row`` floats apart, into words of FLOAT_PARTS parts, ``part`` words apart.
 * The second and third parts of an infinity are NaN. */
INLINE void NAME(split_panel_step)(const float *from, long row, int width, uint32_t *to, long part)
{
    const __m512i upper = _mm512_set1_epi32((int)0xFFFF0000);
    UNROLL for (int v = 0; v < width; v++, from += LANES, to += LANES) {
        for (int two = 0; two < 2; two++) {
            __builtin_prefetch((const char *)(from + two * row) + CONVERT_PREFETCH_L1, 0, 3);
            __builtin_prefetch((const char *)(from + two * row) + CONVERT_PREFETCH_L2, 0, 2);
        }
        __m512i x = _mm512_loadu_si512(from), y = _mm512_loadu_si512(from + row);
        UNROLL for (int p = 0; p < FLOAT_PARTS; p++) {
            __m512i low = _mm512_srli_epi32(x, 16);
            _mm512_storeu_si512(to + p * part, _mm512_ternarylogic_epi32(low, y, upper, 0xF8)); /* low | y & upper */
            if (p + 1 < FLOAT_PARTS) {
                x = (__m512i)_mm512_sub_ps((__m512)x, (__m512)_mm512_and_epi32(x, upper));
                y = (__m512i)_mm512_sub_ps((__m512)y, (__m512)_mm512_and_epi32(y, upper));
            }
        }
    }
}

/* A panel of FLOATS, which is split into FLOAT_PARTS parts while its first block of rows is multiplied. Tiles of steps
 * go to the ``ring`` places at ``to`` in turn. */
struct NAME(converted_panel) {
    const float *from;  /* [2 * steps][columns] */
    const float *after; /* the next panel, if its first tile is to be converted behind the last of this one; else NULL */
    uint32_t *to;
    long ring, at; /* at: place of the next tile */
    int has_first; /* whether the first tile has been converted */
};

/* Convert the ``steps`` steps of one tile. */
INLINE void NAME(convert_tile)(const float *from, int width, long steps, uint32_t *to)
{
    const long row = width * LANES;
    for (long s = 0; s < steps; s++)
        NAME(split_panel_step)(from + 2 * s * row, row, width, to + s * row, AMX_STEPS * row);
}

/* amx_micro_kernel for a panel that is converted on the way: each tile is converted while the one before it is
 * multiplied. The caller has converted the first. */
INLINE void NAME(amx_convert_kernel)(int high, int width, struct NAME(a_block) rows,
                                     struct NAME(converted_panel) *converted, long tiles, float *sums, long sums_row,
                                     int add)
{
    const int products = FLOAT_PARTS * (FLOAT_PARTS + 1) / 2;
    const long row = width * LANES, tile = FLOAT_PARTS * AMX_STEPS * row;
    AMX_FENCE();
    NAME(load_c)(high, width, sums, sums_row, add);
    const uint32_t *words = rows.words;
    for (long t = 0; t < tiles; t++, words += AMX_STEPS) {
        AMX_FENCE(); /* the tile that has been converted is loaded now */
        const uint32_t *here = converted->to + converted->at * tile;
        converted->at = converted->at + 1 < converted->ring ? converted->at + 1 : 0;
        uint32_t *next = converted->to + converted->at * tile;
        const float *from = t + 1 < tiles ? converted->from + (t + 1) * AMX_STEPS * 2 * row : converted->after;
        int step = 0;
        UNROLL for (int q = 0; q < FLOAT_PARTS; q++)
            UNROLL for (int p = 0; p < FLOAT_PARTS - q; p++) {
                const uint32_t *left = words + p * rows.part, *right = here + q * AMX_STEPS * row;
                _tile_loadd(4, left, rows.row * 4);
                if (high)
                    _tile_loadd(5, left + AMX_ROWS * rows.row, rows.row * 4);
                if (p == 0)
                    _tile_loadd(6, right, row * 4);
                if (p == 0 && width > 1)
                    _tile_loadd(7, right + LANES, row * 4);
                _tile_dpbf16ps(0, 4, 6);
                if (width > 1)
                    _tile_dpbf16ps(1, 4, 7);
                if (high)
                    _tile_dpbf16ps(2, 5, 6);
                if (high && width > 1)
                    _tile_dpbf16ps(3, 5, 7);
                if (from)
                    UNROLL16 for (int i = 0; i < (AMX_STEPS + products - 1) / products; i++, step++)
                        if (step < AMX_STEPS)
                            NAME(split_panel_step)(from + 2 * step * row, row, width, next + step * row,
                                                   AMX_STEPS * row);
            }
    }
    NAME(store_c)(high, width, sums, sums_row);
    AMX_FENCE();
}

/* amx_block for the first block of rows that meets such a panel; ``panel`` is where the converted words are stored. */
static __attribute__((noinline)) void NAME(amx_first_block)(struct NAME(tile_config) *now, int count,
                                                            struct NAME(a_block) rows, struct NAME(b_panel) panel,
                                                            struct NAME(converted_panel) *converted, long steps,
                                                            float *sums, long sums_row, int add)
{
    rows.parts = panel.parts = FLOAT_PARTS;
    const long tiles = steps / AMX_STEPS, rest = steps % AMX_STEPS, tile = FLOAT_PARTS * panel.part;
    AMX_FENCE();
    if (tiles) {
        NAME(configure_tiles)(now, count, AMX_STEPS);
        if (!converted->has_first)
            NAME(convert_tile)(converted->from, panel.width, AMX_STEPS, converted->to + converted->at * tile);
        if (count > AMX_ROWS && panel.width > 1)
            NAME(amx_convert_kernel)(1, 2, rows, converted, tiles, sums, sums_row, add);
        else if (count > AMX_ROWS)
            NAME(amx_convert_kernel)(1, 1, rows, converted, tiles, sums, sums_row, add);
        else if (panel.width > 1)
            NAME(amx_convert_kernel)(0, 2, rows, converted, tiles, sums, sums_row, add);
        else
            NAME(amx_convert_kernel)(0, 1, rows, converted, tiles, sums, sums_row, add);
    }
    if (rest) {
        panel.words = converted->to + converted->at * tile;
        rows.words += tiles * AMX_STEPS;
        NAME(convert_tile)(converted->from + tiles * 2 * panel.part, panel.width, rest,
                           converted->to + converted->at * tile);
        AMX_FENCE();
        NAME(amx_k_tail)(now, count, panel.width, rows, panel, (int)rest, sums, sums_row, add || tiles);
    }
    AMX_FENCE();
}
