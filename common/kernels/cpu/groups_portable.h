/* Integer products of groups on any processor. */

#define CODE_OFFSET(kind) 0
#define CODE_SIZES_DIFFER 0 /* whether codes below 128 or 64 are multiplied otherwise */

/* sum + codes . a + codes2 . a2, where ``a`` is four int8 of one row. */
INLINE ints NAME(dot_two)(ints sum, words codes, int32_t a, words codes2, int32_t a2, enum group_kind kind)
{
    (void)kind;
    UNROLL for (int byte = 0; byte < 4; byte++) {
        sum += (ints)(codes >> 8 * byte & 255) * (int32_t)(int8_t)(a >> 8 * byte);
        sum += (ints)(codes2 >> 8 * byte & 255) * (int32_t)(int8_t)(a2 >> 8 * byte);
    }
    return sum;
}

#include "groups_tile.h"
