/* Permutations that need registers of sixteen 32-bit words (AVX-512). */

/* to[column][row] = from[row][column] for 16 rows of 16 words. Source rows are ``stride`` bytes apart, destination rows
 * ``step`` words. */
INLINE void NAME(transpose_words)(const char *from, long stride, uint32_t *to, long step)
{
    __m512i a[16], b[16];
    UNROLL16 for (int i = 0; i < 16; i++)
        a[i] = _mm512_loadu_si512(from + i * stride);
    UNROLL16 for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLL16 for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    /* a[4q + c] holds, in each 128-bit lane k, column 4k + c of rows 4q to 4q + 3 */
    UNROLL16 for (int c = 0; c < 4; c++) {
        __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), high = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xDD);
        __m512i low2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        __m512i high2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xDD);
        _mm512_storeu_si512(to + (0 + c) * step, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_storeu_si512(to + (8 + c) * step, _mm512_shuffle_i32x4(low, low2, 0xDD));
        _mm512_storeu_si512(to + (4 + c) * step, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_storeu_si512(to + (12 + c) * step, _mm512_shuffle_i32x4(high, high2, 0xDD));
    }
}

/* Interleave 32 bfloat16 of a row with those of the row below it, giving 32 words. Of the two rows only the first
 * ``live`` are read; the others count as zero. */
INLINE void NAME(interleave)(const char *from, long stride, int live, __m512i *first, __m512i *second)
{
    const __m512i low =
        _mm512_set_epi64(0x002F000F002E000E, 0x002D000D002C000C, 0x002B000B002A000A, 0x0029000900280008,
                         0x0027000700260006, 0x0025000500240004, 0x0023000300220002, 0x0021000100200000);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    __m512i own = live > 0 ? _mm512_loadu_si512(from) : _mm512_setzero_si512();
    __m512i below = live > 1 ? _mm512_loadu_si512(from + stride) : _mm512_setzero_si512();
    *first = _mm512_permutex2var_epi16(own, low, below);
    *second = _mm512_permutex2var_epi16(own, high, below);
}

INLINE void NAME(interleave_words)(const char *from, long stride, int live, uint32_t *to)
{
    __m512i first, second;
    NAME(interleave)(from, stride, live, &first, &second);
    _mm512_storeu_si512(to, first);
    _mm512_storeu_si512(to + 16, second);
}
