/* Vector types and helpers of one variant, and the conversion of numbers to the 32-bit words that the GEMM multiplies.
 *
 * Included once per variant, between a target pragma and its end. A variant defines:
 *   NAME(x)         the name of x in this variant
 *   LANES           floats per vector
 *   NR_VECTORS, MR  vectors and rows of a register tile of the micro-kernel
 *   HAS_BF16_DOT    1 where the processor multiplies pairs of bfloat16 (AVX512-BF16)
 *
 * A word is one float32, or two bfloat16 that are adjacent in the summed dimension. The same loop (micro_kernel.h)
 * multiplies both; only the product of two vectors of words differs. float16 is converted to float32 words.
 */

#define NR (LANES * NR_VECTORS) /* columns of a packed panel */

typedef float NAME(floats) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t NAME(words) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t NAME(ints) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
#define floats NAME(floats)
#define words NAME(words)
#define ints NAME(ints)

INLINE floats NAME(broadcast)(float x) { return (floats){} + x; }

INLINE floats NAME(select)(ints where, floats yes, floats no)
{
    return (floats)(((ints)yes & where) | ((ints)no & ~where));
}

/* Element-wise maximum; where ``a`` is NaN, ``b``. */
INLINE floats NAME(max)(floats a, floats b)
{
#if LANES == 16
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return NAME(select)(a > b, a, b);
#endif
}

INLINE float NAME(reduce_add)(floats x)
{
#if LANES == 16
    return _mm512_reduce_add_ps((__m512)x);
#elif LANES == 8
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float total = 0;
    for (int i = 0; i < LANES; i++)
        total += x[i];
    return total;
#endif
}

INLINE float NAME(reduce_max)(floats x)
{
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    float best = x[0];
    for (int i = 1; i < LANES; i++)
        best = x[i] > best ? x[i] : best;
    return best;
#endif
}

INLINE int NAME(any_above)(floats x, float limit)
{
#if LANES == 16
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
    return NAME(reduce_max)(x) > limit;
#endif
}

INLINE int NAME(any_equal)(floats x, float to)
{
#if LANES == 16
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(to), _CMP_EQ_OQ) != 0;
#elif LANES == 8
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(to), _CMP_EQ_OQ)) != 0;
#else
    int found = 0;
    for (int i = 0; i < LANES; i++)
        found |= x[i] == to;
    return found;
#endif
}

/* e^x for x <= 88, with a relative error below 2e-7; 1.2e-38 below -87; NaN for NaN. */
INLINE floats NAME(exp)(floats x)
{
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    x = NAME(select)(x < -87.0f, NAME(broadcast)(-87.0f), x);
    floats shifted = x * 1.44269504f + round;
    floats whole = shifted - round;
    floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f; /* ln 2 in two parts */
    floats p = NAME(broadcast)(1.0f / 5040);
    p = p * rest + 1.0f / 720;
    p = p * rest + 1.0f / 120;
    p = p * rest + 1.0f / 24;
    p = p * rest + 1.0f / 6;
    p = p * rest + 0.5f;
    p = p * rest + 1.0f;
    p = p * rest + 1.0f;
    ints power = ((ints)shifted - 0x4B400000 + 127) << 23;
    return p * (floats)power;
}

/* 2^x for x <= 127, with a relative error below 3e-7; 0 where the result is too small; NaN for NaN. */
INLINE floats NAME(exp2)(floats x)
{
#if LANES == 16
    x = NAME(max)(NAME(broadcast)(-200.0f), x); /* -inf minus itself would be NaN */
    floats whole = (floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const float round = 12582912.0f; /* as in exp */
    x = NAME(max)(NAME(broadcast)(-127.0f), x); /* 2^-127 comes out as 0 below */
    floats shifted = x + round, whole = shifted - round;
#endif
    floats rest = x - whole;
    floats p = NAME(broadcast)(0.00132764720f); /* fitted to minimize the relative error on [-0.5, 0.5] */
    p = p * rest + 0.00967554148f;
    p = p * rest + 0.0555071327f;
    p = p * rest + 0.240221197f;
    p = p * rest + 0.693146967f;
    p = p * rest + 1.0f;
#if LANES == 16
    return (floats)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    return p * (floats)(((ints)shifted - 0x4B400000 + 127) << 23);
#endif
}

INLINE floats NAME(tanh)(floats x)
{
    floats wide = NAME(select)(x > 20.0f, NAME(broadcast)(20.0f), NAME(select)(x < -20.0f, NAME(broadcast)(-20.0f), x));
    floats e = NAME(exp)(wide * 2.0f);
    floats large = (e - 1.0f) / (e + 1.0f);
    floats small = x - x * x * x * (1.0f / 3); /* e - 1 loses digits near zero */
    ints tiny = (x < 0.01f) & (x > -0.01f);
    return NAME(select)(tiny, small, large);
}

INLINE floats NAME(apply_activation)(floats x, enum activation activation)
{
    if (activation == SILU)
        return x / (NAME(exp)(NAME(select)(x < -80.0f, NAME(broadcast)(80.0f), -x)) + 1.0f);
    return x * 0.5f * (NAME(tanh)((x + x * x * x * 0.044715f) * 0.797884561f) + 1.0f);
}

/* -- bfloat16 ------------------------------------------------------------------------------------------------------ */

INLINE uint16_t NAME(float_to_bf16)(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

INLINE void NAME(store_bf16)(uint16_t *to, floats x)
{
#if HAS_BF16_DOT
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
    words bits = (words)x, nan = (words)(x != x);
    bits = (nan & (bits | 0x400000)) | (~nan & (bits + 0x7FFF + (bits >> 16 & 1)));
    *(halves *)to = __builtin_convertvector(bits >> 16, halves);
#endif
}

/* -- elements of memory, by type ----------------------------------------------------------------------------------- */

INLINE float NAME(load)(const void *from, long at, enum type type)
{
    if (type == FLOAT32)
        return ((const float *)from)[at];
    if (type == FLOAT16)
        return (float)((const _Float16 *)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE void NAME(store)(void *to, long at, enum type type, float x)
{
    if (type == FLOAT32)
        ((float *)to)[at] = x;
    else if (type == FLOAT16)
        ((_Float16 *)to)[at] = (_Float16)x;
    else
        ((uint16_t *)to)[at] = NAME(float_to_bf16)(x);
}

INLINE floats NAME(load_floats)(const void *from, long at, enum type type)
{
    if (type == FLOAT32)
        return *(const floats *)((const float *)from + at);
#if LANES == 16
    __m256i halves = _mm256_loadu_si256((const __m256i *)((const uint16_t *)from + at));
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#elif LANES == 8
    __m128i halves = _mm_loadu_si128((const __m128i *)((const uint16_t *)from + at));
    return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#else
    floats x;
    for (int i = 0; i < LANES; i++)
        x[i] = NAME(load)(from, at + i, BFLOAT16);
    return x;
#endif
}

INLINE void NAME(store_floats)(void *to, long at, enum type type, floats x)
{
    if (type == FLOAT32)
        *(floats *)((float *)to + at) = x;
    else
        NAME(store_bf16)((uint16_t *)to + at, x);
}

INLINE uint32_t NAME(float_bits)(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* XOR of all words [first, last), read four vectors at a time at memory bandwidth. The result depends on every load, so
 * that the compiler keeps them all. */
static uint64_t NAME(read_words)(const uint64_t *from, long first, long last)
{
    words mixed[4] = {};
    const long step = LANES / 2;
    for (long i = first; i < last; i += 4 * step) {
        __builtin_prefetch(from + i + 512, 0, 3);
        __builtin_prefetch(from + i + 520, 0, 3);
        __builtin_prefetch(from + i + 528, 0, 3);
        __builtin_prefetch(from + i + 536, 0, 3);
        UNROLL for (int v = 0; v < 4; v++)
            mixed[v] ^= *(const words *)(from + i + v * step);
    }
    mixed[0] ^= mixed[1] ^ mixed[2] ^ mixed[3];
    uint64_t total = 0;
    for (int i = 0; i < LANES; i++)
        total ^= (uint64_t)mixed[0][i] << (i % 2 * 32);
    return total;
}
