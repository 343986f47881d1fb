/* Integer products of groups by AVX2. Its instruction for unsigned times signed bytes adds two products in 16 bits,
 * which is enough for codes below 128 only. Others are shifted to -128..127; their sign is moved to the activation. */

/* What is subtracted from codes before they are multiplied. */
#define CODE_OFFSET(kind) ((kind) == INTEGER_8 ? 128 : 0)
#define CODE_SIZES_DIFFER 1 /* whether codes below 128 or 64 are multiplied otherwise */

/* Two products each of codes of 8 columns and ``a``, four int8 of one row, as 16-bit numbers. */
INLINE __m256i NAME(products)(words codes, int32_t a, enum group_kind kind)
{
    __m256i own = (__m256i)codes, row = _mm256_set1_epi32(a);
    if (kind == INTEGER_8) {
        own = _mm256_xor_si256(own, _mm256_set1_epi8((char)0x80));
        row = _mm256_sign_epi8(row, own);
        own = _mm256_abs_epi8(own);
    }
    return _mm256_maddubs_epi16(own, row);
}

/* sum + codes . a + codes2 . a2. */
INLINE ints NAME(dot_two)(ints sum, words codes, int32_t a, words codes2, int32_t a2, enum group_kind kind)
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i first = NAME(products)(codes, a, kind), second = NAME(products)(codes2, a2, kind);
    if (kind == INTEGER_4 || kind == INTEGER_6) /* the sum of four products fits into 16 bits */
        return sum + (ints)_mm256_madd_epi16(_mm256_add_epi16(first, second), ones);
    return sum + (ints)_mm256_madd_epi16(first, ones) + (ints)_mm256_madd_epi16(second, ones);
}

#include "groups_tile.h"
