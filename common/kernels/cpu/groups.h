/* Products with weights in groups of 8-bit or 4-bit codes (common/quantization/weight.py): what Python passes, and what
 * the instruction sets share.
 *
 * A weight is cut into panels of 16 columns of the result, the same for all instruction sets, so that packed weights
 * can be kept in a file. A word is 4 bytes of codes of one column: of 8 bits, 4 elements that follow each other in the
 * summed dimension; of 4 bits, 4 in the low halves, and in the high halves the 4 that are half a group further.
 *
 * An *exact* product multiplies float32 activations by the values of codes. An *integer* product rounds activations to
 * int8 first, with a scale per row and group; with two terms, what is left is rounded to int8 once more, in steps of
 * 1/TERM_RATIO of the scale. In all, the sum of a group is multiplied by its scale and added to those before it. The
 * order of additions depends on the weight alone, so the result of a row depends neither on the number of rows nor on
 * threads.
 */

#define PANEL 16              /* columns of a panel */
#define MIN_INPUT_GROUP 32    /* fewest activations that share a scale */
#define MAX_GROUP 128         /* most columns of a group */
#define TERM_RATIO 254        /* what rounding leaves is at most half a step of the scale: 127 of these */
#define SMALLEST_INPUT 1e-36f /* groups of smaller activations count as zeros: 127 divided by them may be infinite */
#define MAX_PARTS 4           /* most weights of a product */
#define INPUT_BYTES (768 << 10) /* of packed rows that meet one panel after the other and stay in L2 */
#define MIN_INPUT_ROWS 16     /* rows that are packed at a time, at least */
#define PREFETCH_WORDS (8 << 10 >> 2) /* prefetch distance in codes, which are read from front to back */

enum coding { CODE_INT, CODE_E4M3, CODE_TABLE };

struct groups { /* a weight, or one of several whose results follow each other in a row; with an activation, the gate,
                   and the values */
    const uint32_t *codes;              /* words [panels][steps][PANEL] */
    const void *scales, *minima;        /* [panels][groups / span][PANEL] of scale_type; minima may be NULL */
    const int8_t *sub_scales;           /* [panels][groups][PANEL] or NULL */
    const uint8_t *sub_minima, *zeros;  /* the same */
    const float *bias, *table;          /* [panels * PANEL] or NULL; [16] or NULL */
    const int32_t *order;               /* [padded] or NULL */
    const struct groups *next;          /* the next part of the product, or NULL */
    int64_t in, padded, out;            /* padded: ``in`` in whole groups */
    int32_t bits, coding, group, span, zero, most, scale_type, exact;
    int32_t terms; /* int8 numbers that an activation is rounded to the sum of: 1 or 2; 1 in an exact product */
};

/* How the codes of a panel are multiplied. */
enum group_kind { INTEGER_4, INTEGER_8, INTEGER_7, INTEGER_6, EXACT_4, EXACT_8, EXACT_E4M3, EXACT_TABLE };

struct group_sums { /* of one row and one group of the weight */
    float scale;      /* of the activations; 1 in an exact product */
    float total;      /* sum of the activations, as far as they are used: in float32, or of codes times the scale */
    int32_t codes[2]; /* sum of the codes of each term */
};

struct group_input { /* packed rows: codes [terms][width] or float32 [width], then group_sums [groups] */
    char *rows;
    long row_bytes, sums_at;
};

struct group_product {
    const struct groups *parts[MAX_PARTS];
    const struct group_input *inputs[MAX_PARTS];
    long at[MAX_PARTS]; /* the first column of each part's result */
    int count;
    enum type type;
    int activation;
    const void *add; /* [rows, out_row], added to the result; may be ``to``, or NULL */
    void *to;
    long rows, out_row;
};

struct group_kernels {
    const char *name;
    void (*pack_row)(const struct groups *, const void *, long, enum type, const struct group_input *, char *);
    void (*panels)(const struct group_product *, long, long);
};

static long group_panels_of(const struct groups *weight) { return (weight->out + PANEL - 1) / PANEL; }

/* Elements of a packed row. */
static long group_width(const struct groups *weight)
{
    long each = weight->group < MIN_INPUT_GROUP && !weight->exact ? MIN_INPUT_GROUP : weight->group;
    return ROUND_UP(weight->padded, each);
}

static enum group_kind group_kind(const struct groups *weight)
{
    if (weight->coding != CODE_INT)
        return weight->coding == CODE_E4M3 ? EXACT_E4M3 : EXACT_TABLE;
    if (weight->exact)
        return weight->bits == 4 ? EXACT_4 : EXACT_8;
    return weight->bits == 4 ? INTEGER_4 : weight->most < 64 ? INTEGER_6 : weight->most < 128 ? INTEGER_7 : INTEGER_8;
}
