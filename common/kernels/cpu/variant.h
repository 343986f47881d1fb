/* Everything that is compiled once per variant. */
#include "words.h"
#if LANES == 16
#include "shuffles.h"
#endif
#include "tiles.h"
#if HAS_AMX
#include "amx.h"
#endif
#include "attention.h"
#include "layers.h"

/* Tiles multiply so fast that packing keys and values has to be shared by more rows. */
#if HAS_AMX
#define ROWS_AT_ONCE (4 * MAX_ROWS)
#define BLOCK BLOCK_ROWS
#define FEW BLOCK_ROWS
#define SPLIT NAME(split_row)
#else
#define ROWS_AT_ONCE MAX_ROWS
#define BLOCK TILE_ROWS
#define FEW (FEW_TILES * TILE_ROWS)
#define SPLIT NULL
#endif

static const struct variant NAME(variant) = VARIANT(VARIANT_NAME, BLOCK, FEW, SPLIT);
#undef floats
#undef words
#undef ints
#undef PANEL
#undef ROWS_AT_ONCE
#undef BLOCK
#undef FEW
#undef SPLIT
#undef TILE_CASE
#undef TILE_WIDTHS
