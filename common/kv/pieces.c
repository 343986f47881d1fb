/* XXH3-64 of bytes that lie in many places and, in the same pass, their copies to as many others.
 *
 * The hash is specified at https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md: inputs of more than 240
 * bytes, with the default secret and no seed. It equals what the xxhash package gives for the concatenated bytes. Every
 * byte is loaded once, hashed and stored, so a writer that changes the source meanwhile changes both the hash and the
 * copy, or neither.
 */
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define X86 1
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

#define STRIPE 64           /* bytes that are accumulated at once: eight 64-bit words */
#define BLOCK_STRIPES 16    /* stripes after which the accumulators are scrambled */
#define PREFETCH_BYTES 1024 /* prefetch distance */

/* Of a piece this many ahead, one line in FAR_STEP bytes is prefetched, up to FAR_BYTES: its pages are in the TLB when
 * its turn comes, and the processor's own prefetcher continues what it sees begun. */
#define FAR_PIECES 2
#define FAR_STEP 1024
#define FAR_BYTES 16384

/* Offsets in the secret: the keys of the last stripe, of scrambling and of the final merge. */
#define LAST_STRIPE_KEY 121
#define SCRAMBLE_KEY 128
#define MERGE_KEY 11

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u
#define PRIME_AVALANCHE 0x165667919E3779F9u

/* The bytes hashed must be the bytes stored: keeps the compiler from loading them again from memory that may change. */
#define LOAD_ONCE(data) __asm__("" : "+m"(data))

typedef uint64_t stripe __attribute__((vector_size(STRIPE), aligned(1), may_alias));

static const uint8_t secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

struct pieces {
    const int64_t *from, *to, *bytes; /* [count] each: addresses, and lengths in bytes; ``to`` NULL: only hash */
    int64_t count, total;             /* total: bytes of all pieces, more than 240 */
};

/* Stores a stripe at an address of some alignment, bypassing the caches where the processor can: the copy is not needed
 * soon, and its cache lines need not be read first. */
typedef void store(uint8_t *to, const stripe *data);

INLINE void accumulate(stripe *acc, const stripe *data, const uint8_t *key)
{
#if defined(__clang__) || __GNUC__ >= 12
    stripe neighbours = __builtin_shufflevector(*data, *data, 1, 0, 3, 2, 5, 4, 7, 6);
#else
    stripe neighbours = __builtin_shuffle(*data, (stripe){1, 0, 3, 2, 5, 4, 7, 6});
#endif
    stripe mixed = *data ^ *(const stripe *)key;
    *acc += neighbours + (mixed & 0xFFFFFFFFu) * (mixed >> 32);
}

INLINE void scramble(stripe *acc)
{
    *acc = (*acc ^ (*acc >> 47) ^ *(const stripe *)(secret + SCRAMBLE_KEY)) * PRIME32_1;
}

/* Accumulate stripe ``number`` of the input. */
INLINE void accumulate_stripe(stripe *acc, const stripe *data, int64_t number)
{
    int64_t in_block = number % BLOCK_STRIPES;
    accumulate(acc, data, secret + 8 * in_block);
    if (in_block == BLOCK_STRIPES - 1)
        scramble(acc);
}

/* The last STRIPE bytes of the input, read back from the copy if there is one. */
INLINE stripe last_stripe(const struct pieces *pieces)
{
    stripe last;
    const int64_t *place = pieces->to ? pieces->to : pieces->from;
    int64_t missing = STRIPE;
    for (int64_t i = pieces->count - 1; missing; i--) {
        int64_t length = pieces->bytes[i] < missing ? pieces->bytes[i] : missing;
        missing -= length;
        memcpy((uint8_t *)&last + missing, (const uint8_t *)place[i] + pieces->bytes[i] - length, length);
    }
    return last;
}

INLINE uint64_t merge_accumulators(const stripe *acc, uint64_t total)
{
    uint64_t sum = total * PRIME64_1, key[2];
    for (int i = 0; i < 4; i++) {
        memcpy(key, secret + MERGE_KEY + 16 * i, sizeof key);
        unsigned __int128 both = (unsigned __int128)((*acc)[2 * i] ^ key[0]) * ((*acc)[2 * i + 1] ^ key[1]);
        sum += (uint64_t)both ^ (uint64_t)(both >> 64);
    }
    sum = (sum ^ sum >> 37) * PRIME_AVALANCHE;
    return sum ^ sum >> 32;
}

INLINE uint64_t digest(const struct pieces *pieces, store *stream, uintptr_t alignment)
{
    stripe acc = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    int64_t accumulated = 0, stripes = (pieces->total - 1) / STRIPE, buffered = 0; /* stripes: all but the last */
    stripe buffer;                                                         /* its first ``buffered`` bytes are filled */
    for (int64_t i = 0; i < pieces->count; i++) {
        const uint8_t *from = (const uint8_t *)pieces->from[i];
        uint8_t *to = pieces->to ? (uint8_t *)pieces->to[i] : NULL;
        int64_t left = pieces->bytes[i];
        const uint8_t *far_piece =
            i + FAR_PIECES < pieces->count ? (const uint8_t *)pieces->from[i + FAR_PIECES] : from;
        for (int64_t at = 0; i + FAR_PIECES < pieces->count && at < pieces->bytes[i + FAR_PIECES] && at < FAR_BYTES;
             at += FAR_STEP)
            __builtin_prefetch(far_piece + at, 0, 2);
        const uint8_t *next = i + 1 < pieces->count ? (const uint8_t *)pieces->from[i + 1] : from;
        while (left && (buffered || left < STRIPE || accumulated == stripes)) {
            int64_t length = left < STRIPE - buffered ? left : STRIPE - buffered;
            memcpy((uint8_t *)&buffer + buffered, from, length);
            LOAD_ONCE(buffer);
            if (to) {
                memcpy(to, (uint8_t *)&buffer + buffered, length);
                to += length;
            }
            from += length;
            left -= length;
            buffered += length;
            if (buffered == STRIPE) {
                buffered = 0;
                if (accumulated < stripes)
                    accumulate_stripe(&acc, &buffer, accumulated++);
            }
        }
        int64_t whole_stripes = left / STRIPE < stripes - accumulated ? left / STRIPE : stripes - accumulated;
        int streams = to && (uintptr_t)to % alignment == 0;
        for (int64_t s = 0; s < whole_stripes; s++, from += STRIPE) {
            int64_t beyond = (s + 1) * STRIPE + PREFETCH_BYTES - left;
            __builtin_prefetch(beyond > 0 ? next + beyond - STRIPE : from + PREFETCH_BYTES, 0, 3);
            stripe data = *(const volatile stripe *)from; /* one load, as LOAD_ONCE */
            accumulate_stripe(&acc, &data, accumulated++);
            if (streams)
                stream(to + s * STRIPE, &data);
            else if (to)
                *(stripe *)(to + s * STRIPE) = data;
        }
        left -= whole_stripes * STRIPE;
        if (left) { /* less than a stripe, or part of the last */
            if (to)
                to += whole_stripes * STRIPE;
            memcpy(&buffer, from, left);
            LOAD_ONCE(buffer);
            if (to)
                memcpy(to, &buffer, left);
            buffered = left < STRIPE ? left : 0;
        }
    }
    stripe last = last_stripe(pieces);
    accumulate(&acc, &last, secret + LAST_STRIPE_KEY);
    return merge_accumulators(&acc, pieces->total);
}

#ifdef X86
INLINE void store_128(uint8_t *to, const stripe *data)
{
    for (int i = 0; i < STRIPE / 16; i++)
        _mm_stream_si128((__m128i *)to + i, _mm_loadu_si128((const __m128i *)data + i));
}

static uint64_t digest_any(const struct pieces *pieces) { return digest(pieces, store_128, 16); }

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,prefer-vector-width=512")
INLINE void store_512(uint8_t *to, const stripe *data) { _mm512_stream_si512((void *)to, *(const __m512i_u *)data); }

static uint64_t digest_512(const struct pieces *pieces) { return digest(pieces, store_512, 64); }
#pragma GCC pop_options
#else
INLINE void store_plain(uint8_t *to, const stripe *data) { *(stripe *)to = *data; }

static uint64_t digest_any(const struct pieces *pieces) { return digest(pieces, store_plain, 1); }
#endif

/* Raised with every change of the interface to Python, so that a library of older sources is not used. */
EXPORT int tandem_pieces_interface(void) { return 1; }

/* XXH3-64 of all pieces, concatenated; each is also copied if ``to`` is not NULL. Uses 512-bit vectors if ``wide`` and
 * the processor has them. */
EXPORT uint64_t tandem_digest(const int64_t *from, const int64_t *to, const int64_t *bytes, int64_t count,
                              int64_t total, int wide)
{
    const struct pieces pieces = {from, to, bytes, count, total};
#ifdef X86
    if (!wide || !__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512dq"))
        wide = 0;
    uint64_t hash = wide ? digest_512(&pieces) : digest_any(&pieces);
    _mm_sfence(); /* make the stores that bypassed the caches visible before the caller says that they are there */
    return hash;
#else
    (void)wide;
    return digest_any(&pieces);
#endif
}
