/* Everything that is compiled once per variant. */
#include "vectors.h"
#if LANES == 16
#include "shuffles.h"
#endif
#include "micro_kernel.h"
#if HAS_AMX
#include "amx.h"
#endif
#include "attention.h"
#include "layers.h"

/* AMX multiplies so fast that more query rows have to share the cost of packing keys and values. */
#if HAS_AMX
#define TASK_ROWS (4 * MIN_TASK_ROWS)
#define GEMM_MR AMX_MR
#define ONE_PASS_ROWS AMX_MR
#define SPLIT_ROW NAME(split_row)
#else
#define TASK_ROWS MIN_TASK_ROWS
#define GEMM_MR MR
#define ONE_PASS_ROWS (KC_LOOP_TILES * MR)
#define SPLIT_ROW NULL
#endif

static const struct variant NAME(variant) = VARIANT(VARIANT_NAME, GEMM_MR, ONE_PASS_ROWS, SPLIT_ROW);
#undef floats
#undef words
#undef ints
#undef NR
#undef TASK_ROWS
#undef GEMM_MR
#undef ONE_PASS_ROWS
#undef SPLIT_ROW
#undef MICRO_KERNEL_CASE
#undef MICRO_KERNEL_WIDTHS
