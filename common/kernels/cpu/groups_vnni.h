/* Integer products of groups by VNNI: four unsigned codes of each column times four int8, in one instruction. Vectors
 * of 16 columns (AVX512-VNNI) or 8 (AVX-VNNI). */

#define CODE_OFFSET(kind) 0
#define CODE_SIZES_DIFFER 0 /* whether codes below 128 or 64 are multiplied otherwise */

/* sum + codes . a, where ``a`` is four int8 of one row. */
INLINE ints NAME(dot)(ints sum, words codes, int32_t a, enum group_kind kind)
{
    (void)kind;
#if LANES == 16
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(a));
#else
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(a));
#endif
}

INLINE ints NAME(dot_two)(ints sum, words codes, int32_t a, words codes2, int32_t a2, enum group_kind kind)
{
    return NAME(dot)(NAME(dot)(sum, codes, a, kind), codes2, a2, kind);
}

#include "groups_tile.h"
