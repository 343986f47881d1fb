/* The AMX tile registers emulated in plain C, so that AMX kernels can be tested on a CPU without AMX.
 *
 * native.c is compiled with this header as FAKE_TILES (tests/unit/common/kernels/test_tiles.py). The order of the sums in
 * a product follows the description of TDPBF16PS in Intel's Software Developer's Manual, volume 2. Operations on which a
 * processor would fault abort the process: tiles without a shape, and products of tiles whose shapes do not match.
 */
#include <stdio.h>

static __thread struct {
    int rows[8], bytes[8];
    uint8_t data[8][16][64] __attribute__((aligned(64)));
} fake_tiles;

static void fake_expect(int holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "tiles: %s\n", what);
    abort();
}

static void fake_shape(const void *shape)
{
    const uint8_t *bytes = shape;
    fake_expect(bytes[0] == 1 && bytes[1] == 0, "a shape of another palette, or one that goes on in the middle");
    memset(&fake_tiles, 0, sizeof fake_tiles);
    for (int t = 0; t < 8; t++) {
        uint16_t row;
        memcpy(&row, bytes + 16 + 2 * t, sizeof row);
        fake_expect(row <= 64 && bytes[48 + t] <= 16 && !row == !bytes[48 + t], "a shape that is too large");
        fake_tiles.bytes[t] = row;
        fake_tiles.rows[t] = bytes[48 + t];
    }
}

static void fake_zero(int tile)
{
    fake_expect(fake_tiles.rows[tile], "a tile without a shape");
    memset(fake_tiles.data[tile], 0, sizeof fake_tiles.data[tile]);
}

static void fake_load(int tile, const void *from, long stride)
{
    fake_zero(tile);
    for (int r = 0; r < fake_tiles.rows[tile]; r++)
        memcpy(fake_tiles.data[tile][r], (const char *)from + r * stride, fake_tiles.bytes[tile]);
}

static void fake_store(int tile, void *to, long stride)
{
    fake_expect(fake_tiles.rows[tile], "a tile without a shape");
    for (int r = 0; r < fake_tiles.rows[tile]; r++)
        memcpy((char *)to + r * stride, fake_tiles.data[tile][r], fake_tiles.bytes[tile]);
}

/* Denormal numbers are flushed to 0, in the inputs of a product and in its results. */
static inline float fake_normal(float x)
{
    return __builtin_fabsf(x) < FLT_MIN ? 0.0f : x;
}

static inline float fake_half(uint32_t word)
{
    float x;
    memcpy(&x, &word, sizeof x);
    return fake_normal(x);
}

__attribute__((target("avx512f,fma"), optimize("O3"))) static void fake_product(int sum, int left, int right)
{
    const int rows = fake_tiles.rows[sum], steps = fake_tiles.rows[right], columns = fake_tiles.bytes[sum] / 4;
    fake_expect(rows && steps && columns, "a tile without a shape");
    fake_expect(fake_tiles.rows[left] == rows && fake_tiles.bytes[left] == steps * 4, "rows that do not fit");
    fake_expect(fake_tiles.bytes[right] == columns * 4, "columns that do not fit");
    for (int r = 0; r < rows; r++) {
        float *to = (float *)fake_tiles.data[sum][r], even[16] = {}, odd[16] = {};
        const uint32_t *words = (const uint32_t *)fake_tiles.data[left][r];
        for (int s = 0; s < steps; s++) {
            const uint32_t *others = (const uint32_t *)fake_tiles.data[right][s];
            const float low = fake_half(words[s] << 16), high = fake_half(words[s] & 0xFFFF0000u);
            for (int c = 0; c < 16; c++) {
                even[c] = fake_normal(__builtin_fmaf(low, fake_half(others[c] << 16), even[c]));
                odd[c] = fake_normal(__builtin_fmaf(high, fake_half(others[c] & 0xFFFF0000u), odd[c]));
            }
        }
        for (int c = 0; c < columns; c++)
            to[c] = fake_normal(to[c] + fake_normal(even[c] + odd[c]));
    }
}

static void fake_release(void) { memset(&fake_tiles, 0, sizeof fake_tiles); }

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef LOAD_TILE_SHAPE
#define _tile_loadd(tile, from, stride) fake_load(tile, from, stride)
#define _tile_stored(tile, to, stride) fake_store(tile, to, stride)
#define _tile_zero(tile) fake_zero(tile)
#define _tile_dpbf16ps(sum, left, right) fake_product(sum, left, right)
#define _tile_release() fake_release()
#define LOAD_TILE_SHAPE(shape) fake_shape(&(shape))
