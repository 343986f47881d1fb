/* The end of an instruction set of groups: what the next one defines anew. */
static const struct group_kernels NAME(kernels) = {VARIANT_NAME, NAME(pack_row), NAME(group_panels)};
#undef VECTORS
#undef CHAINS
#undef TILE_ROWS
#undef CODE_SIZES_DIFFER
#undef CODE_OFFSET
#undef GROUP_TILE_OF
#undef EXACT_TILE_OF
#undef TILE_CASE
#undef WIDE_ROWS
#undef MIN_WIDE
#undef MOST_VECTORS
#undef LANES
#undef NR
#undef NAME
#undef VARIANT_NAME
#undef floats
#undef words
#undef ints
