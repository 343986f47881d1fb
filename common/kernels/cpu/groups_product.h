/* Products with weights in groups for all rows and parts: packs the activations, and shares panels between threads. */

/* Whether two weights can be multiplied by the same packed rows. */
static int same_input(const struct groups *a, const struct groups *b)
{
    return a->group == b->group && a->exact == b->exact && a->terms == b->terms && a->order == b->order &&
           a->padded == b->padded && (!a->exact || !a->minima == !b->minima);
}

/* Lay out packed rows for the parts of ``product``, one set for all that can share it; returns the bytes of a row of
 * all sets. ``inputs`` [MAX_PARTS] are the sets. */
static long layout_inputs(struct group_product *product, struct group_input *inputs)
{
    long total = 0;
    for (int i = 0; i < product->count; i++) {
        const struct groups *weight = product->parts[i];
        product->inputs[i] = inputs + i;
        for (int j = 0; j < i && product->inputs[i] == inputs + i; j++)
            if (same_input(product->parts[j], weight))
                product->inputs[i] = product->inputs[j];
        inputs[i].sums_at = ROUND_UP(group_width(weight) * (weight->exact ? (long)sizeof(float) : weight->terms), 64);
        inputs[i].row_bytes = inputs[i].sums_at + weight->padded / weight->group * (long)sizeof(struct group_sums);
        inputs[i].row_bytes = ROUND_UP(inputs[i].row_bytes, 64);
        inputs[i].row_bytes += inputs[i].row_bytes % PAGE ? 0 : 64; /* a cache keeps few rows whole pages apart */
        if (product->inputs[i] == inputs + i)
            total += inputs[i].row_bytes;
    }
    return total;
}

static void pack_inputs(const struct group_product *product, const void *from, long first, long in_row, int threads)
{
    for (int i = 0; i < product->count; i++) {
        const struct group_input *input = product->inputs[i];
        int packed = 0;
        for (int j = 0; j < i; j++)
            packed |= product->inputs[j] == input;
        if (packed)
            continue;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && product->rows >= MIN_INPUT_ROWS)
        for (long r = 0; r < product->rows; r++)
            group_kernels->pack_row(product->parts[i], from, (first + r) * in_row, product->type, input,
                                    input->rows + r * input->row_bytes);
    }
}

static void run_group_panels(const void *of, long first, long last) { group_kernels->panels(of, first, last); }

/* to[rows, out] = from[rows, in] through the parts of ``linear``, plus ``add`` unless NULL; returns 0, or -1 if out of
 * memory. */
static int multiply_groups(const struct linear *linear, const void *from, void *to, const void *add, long rows,
                           long in_row, long out_row, int threads)
{
    struct group_input inputs[MAX_PARTS];
    struct group_product product = {.type = linear->type, .activation = linear->activation, .out_row = out_row};
    const long size = linear->type == BFLOAT16 ? 2 : 4;
    long out = 0, panels = 0;
    for (const struct groups *part = linear->groups; part; part = part->next) {
        product.at[product.count] = out;
        product.parts[product.count++] = part;
        out += part->out;
        panels += group_panels_of(part);
    }
    if (linear->activation)
        panels /= 2;
    long row_bytes = layout_inputs(&product, inputs), most = INPUT_BYTES / row_bytes;
    most = most < MIN_INPUT_ROWS ? MIN_INPUT_ROWS : most;
    most = most < rows ? most : rows;
    char *memory = thread_scratch(most * row_bytes);
    if (!memory)
        return -1;
    for (int i = 0; i < product.count; i++)
        if (product.inputs[i] == inputs + i) {
            inputs[i].rows = memory;
            memory += most * inputs[i].row_bytes;
        }
    const long runs = (rows + most - 1) / most;
    most = (rows + runs - 1) / runs;
    for (long first = 0; first < rows; first += most) {
        product.rows = rows - first < most ? rows - first : most;
        product.to = (char *)to + first * out_row * size;
        product.add = add ? (const char *)add + first * out_row * size : NULL;
        pack_inputs(&product, from, first, in_row, threads);
        struct panel_job job = {run_group_panels, &product, 0, panels, 0};
        share_panels(&job, product.rows, product.rows * linear->in * PANEL, threads);
    }
    return 0;
}

static float e4m3_value(uint32_t code)
{
    uint32_t bits = (code & 127) << 20 | (code & 128) << 24;
    float value;
    memcpy(&value, &bits, 4);
    return value * 0x1p120f; /* the exponent's bias is 7, not 127 */
}

/* Write the values of column ``column`` of a weight in group ``group``, from element ``at`` of ``to`` on. */
static void write_group(const struct groups *weight, long column, long group, void *to, long at, int type)
{
    const long groups = weight->padded / weight->group, size = weight->group * weight->bits / 32; /* in words */
    const long panel = column / PANEL, lane = column % PANEL, fine = (panel * groups + group) * PANEL + lane;
    const long coarse = (panel * (groups / weight->span) + group / weight->span) * PANEL + lane;
    const uint32_t *codes = weight->codes + (panel * groups + group) * size * PANEL + lane;
    float scale = load_groups(weight->scales, coarse, weight->scale_type), minimum = 0;
    float zero = (float)(weight->zeros ? weight->zeros[fine] : weight->zero);
    scale = weight->sub_scales ? scale * (float)weight->sub_scales[fine] : scale;
    if (weight->minima)
        minimum = load_groups(weight->minima, coarse, weight->scale_type);
    minimum = weight->minima && weight->sub_minima ? minimum * (float)weight->sub_minima[fine] : minimum;
    float values[MAX_GROUP];
    const long low = weight->bits == 8 ? weight->group : weight->group / 2; /* elements in the low halves, or in all */
    for (long i = 0; i < weight->group; i++) {
        const long at_word = i < low ? i : i - low;
        uint32_t code = codes[at_word / 4 * PANEL] >> (8 * (at_word % 4) + (i < low ? 0 : 4));
        values[i] = (float)(code & (weight->bits == 8 ? 255 : 15));
    }
    if (weight->coding == CODE_INT)
        for (long i = 0; i < weight->group; i++)
            values[i] -= zero;
    else
        for (long i = 0; i < weight->group; i++)
            values[i] = weight->coding == CODE_TABLE ? weight->table[(int)values[i]] : e4m3_value((uint32_t)values[i]);
    for (long i = 0; i < weight->group; i++) {
        long k = group * weight->group + i, to_column = weight->order ? weight->order[k] : k;
        if (to_column < weight->in)
            store_groups(to, at + to_column, type, values[i] * scale + minimum);
    }
}

/* Write the values of the weight's rows ``ids`` [rows], dequantized, to ``to`` [rows, to_row] of ``type``; the weight
 * is that of an embedding. Returns 0, or -1 for an id that it has not. */
EXPORT int tandem_group_rows(const struct groups *weight, const int64_t *ids, int64_t rows, void *to, int64_t to_row,
                             int type)
{
    for (long i = 0; i < rows; i++)
        if (ids[i] < 0 || ids[i] >= weight->out)
            return -1;
    for (long i = 0; i < rows; i++)
        for (long group = 0; group < weight->padded / weight->group; group++)
            write_group(weight, ids[i], group, to, i * to_row, type);
    return 0;
}
