/* The instruction sets of products with groups. They need other instructions than the rest, so they are chosen by
 * themselves, among those that the selected variant allows. */

#define NR_VECTORS 1
#define MR 4
#define HAS_BF16_DOT 0

#define LANES 4
#define NAME(x) x##_groups
#define VARIANT_NAME "portable"
#include "vectors.h"
#include "groups_portable.h"
#include "groups_end.h"

#ifdef X86
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#define LANES 16
#define NAME(x) x##_groups_avx512_vnni
#define VARIANT_NAME "avx512_vnni"
#include "vectors.h"
#include "groups_vnni.h"
#include "groups_end.h"
#pragma GCC pop_options

#if __GNUC__ >= 11
#define AVX_VNNI 1
#pragma GCC push_options
#pragma GCC target("avxvnni,avx2,fma,f16c")
#define LANES 8
#define NAME(x) x##_groups_avx_vnni
#define VARIANT_NAME "avx_vnni"
#include "vectors.h"
#include "groups_vnni.h"
#include "groups_end.h"
#pragma GCC pop_options
#endif

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define LANES 8
#define NAME(x) x##_groups_avx2
#define VARIANT_NAME "avx2"
#include "vectors.h"
#include "groups_avx2.h"
#include "groups_end.h"
#pragma GCC pop_options
#endif

#undef NR_VECTORS
#undef MR
#undef HAS_BF16_DOT

static const struct group_kernels *group_kernels = &kernels_groups;

/* Choose the kernels that go with ``variant``. */
static void use_group_kernels(const struct variant *variant)
{
    group_kernels = &kernels_groups;
#ifdef X86
    if (variant == &variant_portable)
        return;
    group_kernels = &kernels_groups_avx2;
#ifdef AVX_VNNI
    if (__builtin_cpu_supports("avxvnni"))
        group_kernels = &kernels_groups_avx_vnni;
#endif
    if (variant->lanes == 16 && __builtin_cpu_supports("avx512vnni"))
        group_kernels = &kernels_groups_avx512_vnni;
#endif
}

/* The name of the instruction set for products of groups. */
EXPORT const char *tandem_group_variant(void) { return group_kernels->name; }
