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

static const struct variant NAME(variant) = VARIANT(VARIANT_NAME);
#undef floats
#undef words
#undef ints
#undef PANEL
#undef TILE_CASE
#undef TILE_WIDTHS
