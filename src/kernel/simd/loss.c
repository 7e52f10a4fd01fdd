/* Losses on vectors of f32. Powers have base 2 and are relative to an integer near the row's maximum,
 * which need not be known beforehand: a tile that exceeds the range of the current integer is repeated
 * with a larger one, so a row is read once for its references and sums. Sums of tiles are accumulated in
 * double. Rows that f32 cannot represent, and all rows with a finding, are left to the plain kernels. */

#include "kernel/ids.h"
#include "kernel/simd/tiles.h"

#include <math.h>
#include <string.h>

/* How far a maximum may be above the integer, in powers of two. */
#define XDI_SIMD_ROOM 60.0

static xd_rows xdi_simd_one_row(xd_rows x, int64_t row) {
    x.data = xdi_simd_array_of(&x, row, 0).data;
    x.stride = xdi_simd_stride(&x);
    x.rows = 1;
    return x;
}

/* The arguments as they would be with this row alone. */
static xd_loss_args xdi_simd_row_args(const xd_loss_args *a, int64_t r) {
    xd_loss_args one = *a;
    one.student = xdi_simd_one_row(a->student, r);
    one.teacher = xdi_simd_one_row(a->teacher, r);
    one.gradient = xdi_simd_one_row(a->gradient, r);
    one.row_scale = a->row_scale + r;
    if (a->row_weight) one.row_weight = a->row_weight + r;
    one.row = a->row + r;
    one.references = a->references + r * XD_LOSS_REFERENCES;
    if (a->sums) one.sums = (double *)a->sums + r * XD_LOSS_SUMS;
    if (a->labels.data) one.labels = xdi_ids_from(a->labels, r);
    if (a->mixtures) one.mixtures = (double *)a->mixtures + r * XD_LOSS_MIXTURES;
    return one;
}

static bool xdi_simd_dtypes(const xd_loss_args *a) {
    const bool teacher =
        !a->teacher.data || a->teacher.dtype == XD_DTYPE_F32 || a->teacher.dtype == XD_DTYPE_BF16;
    const bool gradient =
        !a->gradient.data || a->gradient.dtype == XD_DTYPE_F32 || a->gradient.dtype == XD_DTYPE_BF16;
    return teacher && gradient && (a->student.dtype == XD_DTYPE_F32 || a->student.dtype == XD_DTYPE_BF16);
}

/* ---- references and sums ---- */

/* The running sum of one exponential over a row. */
typedef struct xdi_simd_sum {
    double factor;
    xdi_tile_power power;
    double sum;
    float max;
    float first;  /* the largest of the first columns, or of all */
    int64_t tile; /* the first tile that has max */
} xdi_simd_sum;

/* False when the first logits of the row are outside the range of f32. */
static bool xdi_simd_begin(const xdi_tiles *tiles, xdi_simd_array x, int64_t columns, double factor,
                           xdi_simd_sum *sum) {
    float guess = tiles->max(x, columns < 256 ? columns : 256);
    if (guess == -INFINITY) guess = tiles->max(x, columns);
    const double whole = rint((double)guess * factor);
    memset(sum, 0, sizeof *sum);
    sum->factor = factor;
    sum->max = -INFINITY;
    sum->first = guess;
    if (!xdi_simd_fits((double)guess, factor)) return false;
    sum->power = xdi_tile_power_of(factor, whole);
    return true;
}

/* Whether a tile with this maximum must be repeated; the integer is then larger by *raise. */
static bool xdi_simd_raise(xdi_simd_sum *sum, float max, double *raise) {
    const double exponent = (double)max * sum->factor;
    *raise = 0.0;
    if (!(exponent > (double)sum->power.whole + XDI_SIMD_ROOM) || !xdi_simd_fits((double)max, sum->factor))
        return false;
    const double whole = rint(exponent);
    *raise = whole - (double)sum->power.whole;
    sum->sum *= exp2(-*raise);
    sum->power = xdi_tile_power_of(sum->factor, whole);
    return true;
}

static void xdi_simd_take_max(xdi_simd_sum *sum, float max, int64_t tile) {
    if (!(max > sum->max)) return;
    sum->max = max;
    sum->tile = tile;
}

static void xdi_simd_add_tile(const xdi_tiles *tiles, xdi_simd_array x, int64_t n, int64_t tile,
                              xdi_simd_sum *sum) {
    float max;
    double raise, part = tiles->sum(x, n, sum->power, NULL, &max);
    if (xdi_simd_raise(sum, max, &raise)) part = tiles->sum(x, n, sum->power, NULL, &max);
    sum->sum += part;
    xdi_simd_take_max(sum, max, tile);
}

/* log2 of a unit of the sum relative to e^(a reference / temperature). */
static double xdi_simd_shift(const xdi_simd_sum *sum, double reference) {
    return (double)sum->power.whole - reference * (double)sum->power.factor;
}

static double xdi_simd_relative(const xdi_simd_sum *sum) {
    return sum->sum * exp2(xdi_simd_shift(sum, (double)sum->max));
}

/* The lowest column of the tile that has the value. */
static int64_t xdi_simd_find(const xdi_tiles *tiles, const xd_rows *x, int64_t begin, float value) {
    const int64_t block = 64;
    for (;; begin += block) {
        const int64_t n = x->cols - begin < block ? x->cols - begin : block;
        if (!(tiles->max(xdi_simd_array_of(x, 0, begin), n) < value)) break;
    }
    while (xdi_loss_load(x, 0, begin) != (double)value) begin++;
    return begin;
}

/* All sums of one row of one shard. */
typedef struct xdi_simd_row {
    xdi_simd_sum hard, student, teacher; /* student, teacher: at the temperature */
    double cross;                        /* as in xdi_tile_pair */
    double linear, linear_reference;
    float own_from, other_from; /* of the next pair, for the reverse divergence */
    bool careful, infinite;
} xdi_simd_row;

/* How far, in powers of two, a reference may be from the logits of the most probable id so far. */
#define XDI_SIMD_NEAR 16.0

/* Moves the references of the reverse divergence to the logits of the student's most probable id, which is at or after column
 * c: the mean behind the gradient is relative to them, and the teacher's may be far below its largest. Returns whether sums of
 * this tile must be formed again. */
static bool xdi_simd_follow(const xdi_tiles *tiles, const xd_loss_args *a, int64_t c, float max,
                            xdi_simd_row *row) {
    const double factor = (double)row->student.power.factor;
    const float teacher = (float)xdi_loss_load(&a->teacher, 0, xdi_simd_find(tiles, &a->student, c, max));
    const bool near = fabs((double)max - (double)row->own_from) * factor <= XDI_SIMD_NEAR &&
                      fabs((double)teacher - (double)row->other_from) * factor <= XDI_SIMD_NEAR;
    if (near || !xdi_simd_fits((double)max, factor) || !xdi_simd_fits((double)teacher, factor)) return false;
    row->own_from = max;
    row->other_from = teacher;
    return true;
}

/* The references of a tile's pair. */
static void xdi_simd_set_from(const xd_loss_args *a, const xdi_simd_row *row, xdi_tile_pair *pair) {
    const bool reverse = a->divergence == XD_KL_REVERSE;
    pair->own_from = reverse ? row->own_from : pair->p.whole / pair->p.factor;
    pair->other_from = reverse ? row->other_from : pair->q.whole / pair->q.factor;
}

/* The pair of a tile, computed again when an integer was too small or a reference too far. */
static void xdi_simd_add_pair(const xdi_tiles *tiles, const xd_loss_args *a, xdi_tile_pair *pair, int64_t n,
                              int64_t tile, xdi_simd_row *row) {
    const bool reverse = a->divergence == XD_KL_REVERSE;
    xdi_simd_sum *own = reverse ? &row->student : &row->teacher;
    xdi_simd_sum *other = reverse ? &row->teacher : &row->student;
    for (bool followed = !reverse;;) {
        double own_raise, other_raise;
        const double own_sum = own->sum;
        pair->p = own->power;
        pair->q = other->power;
        pair->careful = row->careful;
        xdi_simd_set_from(a, row, pair);
        tiles->pair(pair, n);
        const bool raised = xdi_simd_raise(own, pair->own_max, &own_raise);
        const bool again = xdi_simd_raise(other, pair->other_max, &other_raise) || raised;
        row->cross =
            exp2(-own_raise) * (row->cross - own_sum * ((double)pair->own_weight * own_raise - other_raise));
        const bool moved =
            !followed && pair->own_max > own->max && xdi_simd_follow(tiles, a, tile, pair->own_max, row);
        followed = followed || moved;
        if (!again && !moved && (row->careful || isfinite(pair->cross))) break;
        if (!again && !moved) row->careful = true;
    }
    own->sum += pair->own;
    other->sum += pair->other;
    row->cross += pair->cross;
    row->infinite = row->infinite || pair->infinite;
    xdi_simd_take_max(own, pair->own_max, tile);
    xdi_simd_take_max(other, pair->other_max, tile);
}

/* The powers of a row's last tiles as computed for its sums, stored so that the gradient need not compute them again. Those of
 * each tile are relative to the integers in use at that time. */
typedef char xdi_simd_kept_fits[XDI_SIMD_KEPT * sizeof(float[2][XDI_TILE]) <= XDI_POOL_SCRATCH ? 1 : -1];

typedef struct xdi_simd_kept {
    int64_t begin; /* the first column of them */
    float *powers; /* [tiles kept, teacher and student, XDI_TILE] */
    float teacher_whole[XDI_SIMD_KEPT], student_whole[XDI_SIMD_KEPT];
} xdi_simd_kept;

/* The index of the stored tile that begins at column c. */
static int64_t xdi_simd_kept_tile(const xdi_simd_kept *kept, int64_t c) {
    return (c - kept->begin) / XDI_TILE;
}

/* The teacher's powers of a stored tile, followed by the student's. */
static float *xdi_simd_kept_powers(const xdi_simd_kept *kept, int64_t tile) {
    return kept->powers + tile * 2 * XDI_TILE;
}

static bool xdi_simd_scan(const xdi_tiles *tiles, const xd_loss_args *a, int64_t columns, bool hard,
                          bool soft, xdi_simd_kept *kept, xdi_simd_row *row) {
    const bool reverse = a->divergence == XD_KL_REVERSE, crossed = a->divergence != XD_JSD;
    const double factor = XDI_TILE_LOG2E / a->temperature;
    xdi_tile_pair pair;
    memset(&pair, 0, sizeof pair);
    memset(row, 0, sizeof *row);
    const xdi_simd_array x = xdi_simd_array_of(&a->student, 0, 0), y = xdi_simd_array_of(&a->teacher, 0, 0);
    if (hard && !xdi_simd_begin(tiles, x, columns, XDI_TILE_LOG2E, &row->hard)) return false;
    if (soft && !xdi_simd_begin(tiles, x, columns, factor, &row->student)) return false;
    if (soft && !xdi_simd_begin(tiles, y, columns, factor, &row->teacher)) return false;
    row->own_from = row->student.power.whole / (float)factor;
    row->other_from = row->teacher.power.whole / (float)factor;
    if (soft && reverse) (void)xdi_simd_follow(tiles, a, 0, row->student.first, row);
    row->linear_reference = hard ? (double)row->hard.power.whole / XDI_TILE_LOG2E : 0.0;
    pair.own_weight = a->divergence == XD_SOFT_CE ? 0.0f : 1.0f;
    for (int64_t c = 0; c < columns; c += XDI_TILE) {
        const int64_t n = xdi_simd_tile_at(c, columns);
        const xdi_simd_array student = xdi_simd_array_of(&a->student, 0, c),
                             teacher = xdi_simd_array_of(&a->teacher, 0, c);
        const bool keeps = kept && c >= kept->begin;
        if (hard) xdi_simd_add_tile(tiles, student, n, c, &row->hard);
        if (hard && a->uniform_weight != 0.0)
            row->linear += tiles->linear(student, n, (float)row->linear_reference);
        if (soft && crossed) {
            pair.x = reverse ? student : teacher;
            pair.y = reverse ? teacher : student;
            if (keeps) pair.kept = xdi_simd_kept_powers(kept, xdi_simd_kept_tile(kept, c));
            xdi_simd_add_pair(tiles, a, &pair, n, c, row);
        } else if (soft) {
            xdi_simd_add_tile(tiles, student, n, c, &row->student);
            xdi_simd_add_tile(tiles, teacher, n, c, &row->teacher);
        }
        if (!keeps) continue;
        kept->student_whole[xdi_simd_kept_tile(kept, c)] = row->student.power.whole;
        kept->teacher_whole[xdi_simd_kept_tile(kept, c)] = row->teacher.power.whole;
    }
    return true;
}

/* CROSS of kernel/loss.h from the tiles' sum. */
static double xdi_simd_cross(const xd_loss_args *a, const xdi_simd_row *row, const double *ref) {
    const double student = xdi_simd_shift(&row->student, ref[XD_LOSS_MAX]);
    const double teacher = xdi_simd_shift(&row->teacher, ref[XD_LOSS_TEACHER_MAX]);
    const double at_arg = xdi_simd_shift(&row->teacher, ref[XD_LOSS_TEACHER_AT_ARG]);
    switch (a->divergence) {
    case XD_KL_FORWARD:
        return XDI_TILE_LN2 * exp2(teacher) * (row->cross + row->teacher.sum * (teacher - student));
    case XD_SOFT_CE: return XDI_TILE_LN2 * exp2(teacher) * (row->teacher.sum * student - row->cross);
    case XD_KL_REVERSE:
        return XDI_TILE_LN2 * exp2(student) * (row->cross + row->student.sum * (student - at_arg));
    default: return 0.0;
    }
}

/* Whether the student has a single class in this shard: its probability is then exactly 1, which a sum relative to an integer
 * would miss by the rounding of f32. Any other row is told by its first columns. */
static bool xdi_simd_is_single(const xd_loss_args *a, int64_t columns) {
    int64_t classes = 0;
    for (int64_t c = 0; c < columns && classes < 2; c++)
        if (xdi_loss_load(&a->student, 0, c) > -INFINITY) classes++;
    return classes < 2;
}

/* References and sums of the one row in a, and its powers where `kept` is given. False when it is a row for
 * the plain kernels; no reference and no sum is then written. */
static bool xdi_simd_partials(const xdi_tiles *tiles, const xd_loss_args *a, xdi_simd_kept *kept, double *ref,
                              double *sums) {
    const int64_t columns = a->vocab.end - a->vocab.begin;
    const bool hard_loss = xdi_loss_has_hard(a);
    const bool soft = a->teacher.data && a->soft_weight != 0.0;
    const bool shared =
        soft && a->temperature == 1.0 && a->uniform_weight == 0.0; /* one sum for both losses */
    const bool hard = !soft || (hard_loss && !shared);
    double reference[XD_LOSS_REFERENCES] = { 0.0, 0.0, 0.0, 0.0 }, sum[XD_LOSS_SUMS];
    xdi_simd_row row;
    if (!xdi_simd_dtypes(a) || xdi_simd_is_single(a, columns) ||
        !xdi_simd_scan(tiles, a, columns, hard, soft, kept, &row))
        return false;
    const xdi_simd_sum *student = soft ? &row.student : &row.hard;
    if (!xdi_simd_fits((double)student->max, student->factor) || row.infinite) return false;
    if (soft && !xdi_simd_fits((double)row.teacher.max, row.teacher.factor)) return false;
    const int64_t arg = xdi_simd_find(tiles, &a->student, student->tile, student->max);
    memset(sum, 0, sizeof sum);
    reference[XD_LOSS_MAX] = (double)student->max;
    reference[XD_LOSS_ARG] = (double)(arg + a->vocab.begin);
    if (soft) {
        reference[XD_LOSS_TEACHER_AT_ARG] = xdi_loss_load(&a->teacher, 0, arg);
        reference[XD_LOSS_TEACHER_MAX] = (double)row.teacher.max;
        sum[XD_LOSS_SOFT] = xdi_simd_relative(&row.student);
        sum[XD_LOSS_TEACHER] = xdi_simd_relative(&row.teacher);
        sum[XD_LOSS_CROSS] = xdi_simd_cross(a, &row, reference);
    }
    if (hard_loss) sum[XD_LOSS_HARD] = hard ? xdi_simd_relative(&row.hard) : sum[XD_LOSS_SOFT];
    if (hard_loss && a->uniform_weight != 0.0)
        sum[XD_LOSS_LINEAR] =
            row.linear + (double)columns * ((double)(float)row.linear_reference - reference[XD_LOSS_MAX]);
    const int64_t target = hard_loss ? xd_id_at(a->labels, 0) - a->vocab.begin : -1;
    if (target >= 0 && target < columns)
        sum[XD_LOSS_TARGET] = xdi_loss_load(&a->student, 0, target) - reference[XD_LOSS_MAX];
    for (int i = 0; i < XD_LOSS_SUMS; i++)
        if (!isfinite(sum[i])) return false;
    memcpy(ref, reference, sizeof reference);
    memcpy(sums, sum, sizeof sum);
    return true;
}

/* Returns whether the powers were stored. */
static bool xdi_simd_loss_row_partials(const xd_launch *launch, const xdi_tiles *tiles,
                                       const xd_loss_kernels *plain, const xd_loss_args *one,
                                       xdi_simd_kept *kept) {
    if (one->row_scale[0] != 0.0 && xdi_simd_partials(tiles, one, kept, one->references, (double *)one->sums))
        return kept != NULL;
    plain->references(launch, one);
    plain->stats(launch, one);
    return false;
}

/* The largest element and its lowest column, as xdi_loss_row_max finds them. False for rows that are not all
 * numbers, or all -infinity. */
static bool xdi_simd_row_max(const xdi_tiles *tiles, const xd_rows *x, int64_t columns, double *max,
                             int64_t *column) {
    float largest = -INFINITY;
    int64_t tile = 0;
    for (int64_t c = 0; c < columns; c += XDI_TILE) {
        const float here = tiles->max(xdi_simd_array_of(x, 0, c), xdi_simd_tile_at(c, columns));
        if (!(here < INFINITY)) return false;
        if (!(here > largest)) continue;
        largest = here;
        tile = c;
    }
    if (largest == -INFINITY) return false;
    *max = (double)largest;
    *column = xdi_simd_find(tiles, x, tile, largest);
    return true;
}

static void xdi_simd_loss_references_rows(const xd_launch *launch, const void *args, int64_t begin,
                                          int64_t end, int slot) {
    const xd_loss_args *a = (const xd_loss_args *)args;
    const xd_loss_kernels *plain = xdi_loss_kernels_cpu_plain();
    const xdi_tiles *tiles = xdi_simd_tiles(launch);
    const int64_t columns = a->vocab.end - a->vocab.begin;
    const bool soft = a->teacher.data && a->soft_weight != 0.0;
    (void)slot;
    for (int64_t r = begin; r < end; r++) {
        const xd_loss_args one = xdi_simd_row_args(a, r);
        double max, teacher_max = 0.0;
        int64_t arg, teacher_arg;
        if (one.row_scale[0] == 0.0 || !xdi_simd_dtypes(a) ||
            !xdi_simd_row_max(tiles, &one.student, columns, &max, &arg) ||
            (soft && !xdi_simd_row_max(tiles, &one.teacher, columns, &teacher_max, &teacher_arg))) {
            plain->references(launch, &one);
            continue;
        }
        one.references[XD_LOSS_MAX] = max;
        one.references[XD_LOSS_ARG] = (double)(arg + a->vocab.begin);
        one.references[XD_LOSS_TEACHER_AT_ARG] = soft ? xdi_loss_load(&one.teacher, 0, arg) : 0.0;
        one.references[XD_LOSS_TEACHER_MAX] = teacher_max;
    }
}

static xd_result xdi_simd_loss_references(const xd_launch *launch, const xd_loss_args *a) {
    return xdi_spread_rows(launch, a->student.rows, xdi_loss_columns(a), xdi_simd_loss_references_rows, a);
}

/* The references are those of this shard, which the sweep computes itself. */
static void xdi_simd_loss_stats_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                     int slot) {
    const xd_loss_args *a = (const xd_loss_args *)args;
    const xd_loss_kernels *plain = xdi_loss_kernels_cpu_plain();
    const xdi_tiles *tiles = xdi_simd_tiles(launch);
    (void)slot;
    for (int64_t r = begin; r < end; r++) {
        const xd_loss_args one = xdi_simd_row_args(a, r);
        double ref[XD_LOSS_REFERENCES], sums[XD_LOSS_SUMS];
        if (one.row_scale[0] != 0.0 && xdi_simd_partials(tiles, &one, NULL, ref, sums) &&
            memcmp(ref, one.references, sizeof ref) == 0)
            memcpy(one.sums, sums, sizeof sums);
        else
            plain->stats(launch, &one);
    }
}

static xd_result xdi_simd_loss_stats(const xd_launch *launch, const xd_loss_args *a) {
    if (a->fixed) return xdi_exact_stats(launch, a);
    return xdi_spread_rows(launch, a->student.rows, xdi_loss_columns(a), xdi_simd_loss_stats_rows, a);
}

/* ---- Jensen-Shannon divergence ---- */

XD_PRIVATE xdi_simd_power xdi_simd_normalised(double factor, double max, double log_sum) {
    const double narrow = (double)(float)factor, log2_all = max * narrow + log_sum * XDI_TILE_LOG2E;
    xdi_simd_power p;
    p.power = xdi_tile_power_of(factor, rint(log2_all));
    p.rest = log2_all - rint(log2_all);
    return p;
}

static xdi_simd_power xdi_simd_student(const xd_loss_args *a, const xd_loss_row *row) {
    return xdi_simd_normalised(XDI_TILE_LOG2E / a->temperature, row->max, row->soft_log);
}

static xdi_simd_power xdi_simd_teacher(const xd_loss_args *a, const xd_loss_row *row) {
    return xdi_simd_normalised(XDI_TILE_LOG2E / a->temperature, row->teacher_max, row->teacher_log);
}

/* Whether the row is in the range of the vector kernels. */
static bool xdi_simd_accepts(const xd_loss_args *a, const xd_loss_row *row) {
    const double factor = XDI_TILE_LOG2E / a->temperature;
    const bool mixed = a->teacher.data && a->divergence == XD_JSD;
    if (fabs(row->mean) > 1e5) return false; /* logits of very large magnitude contribute */
    if (!xdi_simd_dtypes(a) || (mixed && !(a->beta > 1e-30 && 1.0 - a->beta > 1e-30))) return false;
    return xdi_simd_fits(row->max, factor) && xdi_simd_fits(row->max, XDI_TILE_LOG2E) &&
           xdi_simd_fits(row->teacher_max, factor);
}

static xdi_tile_mixture xdi_simd_mixture(const xd_loss_args *a, const xdi_simd_power *student,
                                         const xdi_simd_power *teacher, double top) {
    xdi_tile_mixture m;
    m.p = student->power;
    m.q = teacher->power;
    m.p_rest = (float)student->rest;
    m.q_rest = (float)teacher->rest;
    m.q_share = (float)a->beta;
    m.p_share = 1.0f - m.q_share; /* equal rows: the two shares of the mixture add up to exactly 1 */
    m.top = (float)(top * XDI_TILE_LOG2E);
    return m;
}

static void xdi_simd_mixture_row(const xdi_tiles *tiles, const xd_loss_args *a, int64_t columns,
                                 double *sums) {
    const xdi_simd_power student = xdi_simd_student(a, a->row), teacher = xdi_simd_teacher(a, a->row);
    const xdi_tile_mixture m = xdi_simd_mixture(a, &student, &teacher, a->row->top);
    double p_sum = 0.0, q_sum = 0.0;
    for (int64_t c = 0; c < columns; c += XDI_TILE) {
        double p, q;
        tiles->mixture(xdi_simd_array_of(&a->student, 0, c), xdi_simd_array_of(&a->teacher, 0, c), &m,
                       xdi_simd_tile_at(c, columns), &p, &q);
        p_sum += p;
        q_sum += q;
    }
    sums[XD_LOSS_STUDENT_MIXTURE] = XDI_TILE_LN2 * exp2(-student.rest) * p_sum;
    sums[XD_LOSS_TEACHER_MIXTURE] = XDI_TILE_LN2 * exp2(-teacher.rest) * q_sum;
}

static void xdi_simd_loss_row_mixture(const xd_launch *launch, const xdi_tiles *tiles,
                                      const xd_loss_kernels *plain, const xd_loss_args *one) {
    const int64_t columns = one->vocab.end - one->vocab.begin;
    const bool counts = one->row_scale[0] != 0.0 && one->row->finding == (int)XD_ROW_FINE;
    if (counts && xdi_simd_accepts(one, one->row))
        xdi_simd_mixture_row(tiles, one, columns, (double *)one->mixtures);
    else
        plain->mixture(launch, one);
}

static void xdi_simd_loss_mixture_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                       int slot) {
    const xd_loss_args *a = (const xd_loss_args *)args;
    const xd_loss_kernels *plain = xdi_loss_kernels_cpu_plain();
    const xdi_tiles *tiles = xdi_simd_tiles(launch);
    (void)slot;
    for (int64_t r = begin; r < end; r++) {
        const xd_loss_args one = xdi_simd_row_args(a, r);
        xdi_simd_loss_row_mixture(launch, tiles, plain, &one);
    }
}

static xd_result xdi_simd_loss_mixture(const xd_launch *launch, const xd_loss_args *a) {
    if (a->fixed) return xdi_exact_mixtures(launch, a);
    return xdi_spread_rows(launch, a->student.rows, xdi_loss_columns(a), xdi_simd_loss_mixture_rows, a);
}

/* ---- gradient ---- */

static xdi_tile_soft xdi_simd_soft_gradient(const xd_loss_args *a, double weight, xdi_tile_gradient *g) {
    const xd_loss_row *row = a->row;
    const xdi_simd_power student = xdi_simd_student(a, row), teacher = xdi_simd_teacher(a, row);
    const double scale = weight * exp2(-student.rest);
    g->p = student.power;
    g->q = teacher.power;
    g->soft_scale = (float)scale;
    switch (a->divergence) {
    case XD_KL_REVERSE:
        g->soft_scale = (float)(scale * XDI_TILE_LN2);
        g->mean = (float)(row->mean * XDI_TILE_LOG2E);
        g->student_from = (float)row->max;
        g->teacher_from = (float)row->teacher_at_arg;
        return XDI_TILE_REVERSE;
    case XD_JSD:
        g->soft_scale = (float)(scale * XDI_TILE_LN2 * (1.0 - a->beta));
        g->mixture = xdi_simd_mixture(a, &student, &teacher, row->top + row->mean);
        return XDI_TILE_MIXTURE;
    default: g->teacher_scale = (float)(weight * exp2(-teacher.rest)); return XDI_TILE_FORWARD;
    }
}

XD_PRIVATE bool xdi_simd_streams(const xd_rows *gradient, const void *student, const void *teacher) {
    const int64_t size = (int64_t)xd_dtype_size(gradient->dtype);
    if (gradient->data == student || gradient->data == teacher) return false;
    return gradient->rows * xdi_simd_stride(gradient) * size > XDI_STREAMED;
}

/* How a row's gradient goes through memory. */
typedef struct xdi_simd_path {
    bool streamed; /* past the caches */
    bool followed; /* by the sums of the next row: memory would be idle while powers are computed */
} xdi_simd_path;

/* The next row's first lines, which the gradient of the tile at column c prefetches. A fourth of the row, and for f32
 * only: more of it would evict the current row, and rows of bf16 are limited by the powers, not by memory. */
static void xdi_simd_ask_ahead(const xd_loss_args *a, int64_t c, xdi_tile_gradient *g) {
    if (!a->teacher.data || g->x.bf16 || g->y.bf16) return;
    g->ahead[0] = (const char *)xdi_simd_array_of(&a->student, 1, c / 4).data;
    g->ahead[1] = (const char *)xdi_simd_array_of(&a->teacher, 1, c / 4).data;
}

static void xdi_simd_gradient_row(const xdi_tiles *tiles, const xd_loss_args *a, int64_t columns,
                                  xdi_simd_path path) {
    const bool hard = xdi_loss_has_hard(a);
    const bool soft = a->teacher.data && a->soft_weight != 0.0;
    const double hard_scale = a->row_scale[0] * a->hard_weight;
    xdi_tile_gradient g;
    xdi_tile_soft kind = XDI_TILE_NONE;
    memset(&g, 0, sizeof g);
    if (soft) kind = xdi_simd_soft_gradient(a, a->row_scale[0] * a->soft_weight / a->temperature, &g);
    if (hard) {
        const xdi_simd_power p = xdi_simd_normalised(XDI_TILE_LOG2E, a->row->max, a->row->hard_log);
        g.h = p.power;
        g.hard_scale = (float)(hard_scale * exp2(-p.rest));
        g.uniform = (float)(hard_scale * a->uniform_weight);
        g.hard = !(kind == XDI_TILE_FORWARD && a->temperature == 1.0 && a->uniform_weight == 0.0);
        if (!g.hard) g.soft_scale += g.hard_scale; /* the same power */
    }
    for (int64_t c = 0; c < columns; c += XDI_TILE) {
        g.x = xdi_simd_array_of(&a->student, 0, c);
        g.y = xdi_simd_array_of(&a->teacher, 0, c);
        g.out = xdi_simd_array_of(&a->gradient, 0, c);
        g.streamed = path.streamed && (uintptr_t)g.out.data % XDI_SIMD_LINE == 0;
        if (path.followed) xdi_simd_ask_ahead(a, c, &g);
        const int64_t n = xdi_simd_tile_at(c, columns);
        if (a->fixed)
            tiles->invariant(&g, kind, n);
        else
            tiles->gradient(&g, kind, n);
    }
}

/* The gradient of the stored tiles, from their powers. A hard loss uses the same ones. */
static void xdi_simd_kept_row(const xdi_tiles *tiles, const xd_loss_args *a, int64_t columns,
                              const xdi_simd_kept *kept, bool streamed) {
    const double hard_scale = a->labels.data ? a->row_scale[0] * a->hard_weight : 0.0;
    const double soft_scale = a->row_scale[0] * a->soft_weight / a->temperature;
    const xdi_simd_power p = xdi_simd_student(a, a->row), q = xdi_simd_teacher(a, a->row);
    const double p_all = (double)p.power.whole + p.rest, q_all = (double)q.power.whole + q.rest;
    xdi_tile_kept g;
    for (int64_t c = kept->begin; c < columns; c += XDI_TILE) {
        const int64_t tile = xdi_simd_kept_tile(kept, c);
        g.q = xdi_simd_kept_powers(kept, tile);
        g.p = g.q + XDI_TILE;
        g.p_scale = (float)((hard_scale + soft_scale) * exp2((double)kept->student_whole[tile] - p_all));
        g.q_scale = (float)(soft_scale * exp2((double)kept->teacher_whole[tile] - q_all));
        g.out = xdi_simd_array_of(&a->gradient, 0, c);
        g.streamed = streamed && (uintptr_t)g.out.data % XDI_SIMD_LINE == 0;
        tiles->kept(&g, xdi_simd_tile_at(c, columns));
    }
}

/* A column where most of the probability may be, so that f32 would cancel: left to the plain formula. */
typedef struct xdi_simd_column {
    int64_t at; /* -1: not on this shard */
    double x, y;
} xdi_simd_column;

static xdi_simd_column xdi_simd_column_of(const xd_loss_args *a, int64_t at, int64_t columns) {
    xdi_simd_column column = { -1, 0.0, 0.0 };
    if (at < 0 || at >= columns) return column;
    column.at = at;
    column.x = xdi_loss_load(&a->student, 0, at);
    if (a->teacher.data) column.y = xdi_loss_load(&a->teacher, 0, at);
    return column;
}

static void xdi_simd_loss_row_grad(const xd_launch *launch, const xdi_tiles *tiles,
                                   const xd_loss_kernels *plain, const xd_loss_args *one,
                                   const xdi_simd_kept *kept, xdi_simd_path path) {
    const int64_t begin = one->vocab.begin, columns = one->vocab.end - begin;
    const bool counts = one->row_scale[0] != 0.0 && one->row->finding == (int)XD_ROW_FINE;
    xdi_simd_column exact[2];
    if (!counts || !xdi_simd_accepts(one, one->row)) {
        plain->grad(launch, one);
        return;
    }
    exact[0] = xdi_simd_column_of(one, (int64_t)one->row->argmax - begin, columns);
    exact[1] = xdi_simd_column_of(one, one->labels.data ? xd_id_at(one->labels, 0) - begin : -1, columns);
    xdi_simd_gradient_row(tiles, one, kept ? kept->begin : columns, path);
    if (kept) xdi_simd_kept_row(tiles, one, columns, kept, path.streamed);
    for (int i = 0; i < 2; i++)
        if (exact[i].at >= 0)
            xdi_loss_store(&one->gradient, 0, exact[i].at,
                           xdi_loss_gradient_at(one, 0, exact[i].at, exact[i].x, exact[i].y));
    for (int64_t c = columns; c < one->gradient.cols; c++) xdi_loss_store(&one->gradient, 0, c, 0.0);
}

static void xdi_simd_loss_grad_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                    int slot) {
    const xd_loss_args *a = (const xd_loss_args *)args;
    const xd_loss_kernels *plain = xdi_loss_kernels_cpu_plain();
    const xdi_tiles *tiles = xdi_simd_tiles(launch);
    const xdi_simd_path path = { xdi_simd_streams(&a->gradient, a->student.data, a->teacher.data), false };
    (void)slot;
    for (int64_t r = begin; r < end; r++) {
        const xd_loss_args one = xdi_simd_row_args(a, r);
        xdi_simd_loss_row_grad(launch, tiles, plain, &one, NULL, path);
    }
    tiles->fence();
}

static xd_result xdi_simd_loss_grad(const xd_launch *launch, const xd_loss_args *a) {
    return xdi_spread_rows(launch, a->student.rows, xdi_loss_columns(a), xdi_simd_loss_grad_rows, a);
}

/* On the plain level: as on the others in INVARIANT mode, so that its gradients have their bits. */
static xd_result xdi_simd_loss_grad_plain(const xd_launch *launch, const xd_loss_args *a) {
    return a->fixed ? xdi_simd_loss_grad(launch, a) : xdi_loss_kernels_cpu_plain()->grad(launch, a);
}

/* ---- all of it, row by row ---- */

/* Whether a row's gradient can use the powers of its sums, and storing them pays. Not for f32, where the row itself
 * fills the caches. A hard loss together with the soft one must use the same powers. */
static bool xdi_simd_keeps(const xd_loss_args *a) {
    const bool hard = xdi_loss_has_hard(a), soft = xdi_loss_has_soft(a);
    const bool shared = a->temperature == 1.0 && a->uniform_weight == 0.0;
    const bool narrow = a->student.dtype == XD_DTYPE_BF16 && a->teacher.dtype == XD_DTYPE_BF16 &&
                        a->gradient.dtype == XD_DTYPE_BF16;
    return soft && narrow && a->gradient.data && a->vocab.shards == 1 && a->divergence == XD_KL_FORWARD &&
           (!hard || shared);
}

/* Where to store a row's powers; NULL without memory: then they are computed twice. */
static void xdi_simd_keep(xd_ctx *ctx, const xd_loss_args *a, float **powers, int64_t *begin) {
    const int64_t tiles = (xdi_loss_columns(a) + XDI_TILE - 1) / XDI_TILE;
    const int64_t most = XDI_SIMD_KEPT, count = tiles < most ? tiles : most;
    *begin = (tiles - count) * XDI_TILE;
    *powers = (float *)xdi_scratch_take(ctx, (size_t)count * sizeof(float[2][XDI_TILE]));
}

static void xdi_simd_fused_row(const xd_launch *launch, const xdi_tiles *tiles, const xd_loss_kernels *plain,
                               xd_loss_args *one, xdi_simd_kept *kept, xdi_simd_path path) {
    const bool mixed = one->teacher.data && one->soft_weight != 0.0 && one->divergence == XD_JSD;
    const bool is_kept = xdi_simd_loss_row_partials(launch, tiles, plain, one, kept);
    if (one->vocab.shards > 1) return;
    one->all_references = one->references;
    one->all_sums = one->sums;
    one->all_mixtures = one->mixtures;
    plain->combine(launch, one);
    if (mixed) {
        xdi_simd_loss_row_mixture(launch, tiles, plain, one);
        plain->mixture_combine(launch, one);
    }
    if (one->gradient.data) xdi_simd_loss_row_grad(launch, tiles, plain, one, is_kept ? kept : NULL, path);
}

/* The entry's arguments, and where its first thread stores powers; NULL: they are not stored. */
typedef struct xdi_simd_fused {
    const xd_loss_args *a;
    float *powers;
    int64_t begin; /* the first column of them */
    bool streamed;
} xdi_simd_fused;

static void xdi_simd_fused_piece(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                 int slot) {
    const xdi_simd_fused *f = (const xdi_simd_fused *)args;
    const xd_loss_kernels *plain = xdi_loss_kernels_cpu_plain();
    const xdi_tiles *tiles = xdi_simd_tiles(launch);
    xdi_simd_path path = { f->streamed, false };
    xdi_simd_kept kept;
    kept.begin = f->begin;
    kept.powers = slot > 0 ? (float *)xdi_parallel_scratch(launch->ctx, slot) : f->powers;
    for (int64_t r = begin; r < end; r++) {
        xd_loss_args one = xdi_simd_row_args(f->a, r);
        path.followed = r + 1 < end;
        xdi_simd_fused_row(launch, tiles, plain, &one, f->powers ? &kept : NULL, path);
    }
    tiles->fence();
}

static xd_result xdi_simd_loss_fused(const xd_launch *launch, const xd_loss_args *a) {
    xdi_simd_fused f = { a, NULL, 0, xdi_simd_streams(&a->gradient, a->student.data, a->teacher.data) };
    if (xdi_simd_keeps(a)) xdi_simd_keep(launch->ctx, a, &f.powers, &f.begin);
    const xd_result result =
        xdi_spread_rows(launch, a->student.rows, xdi_loss_columns(a), xdi_simd_fused_piece, &f);
    xdi_scratch_give(launch->ctx, f.powers);
    return result;
}

XD_PRIVATE void xdi_simd_loss_fill_plain(xd_loss_kernels *kernels) {
    kernels->grad = xdi_simd_loss_grad_plain;
}

/* The loss entries that are faster with vectors. */
XD_PRIVATE void xdi_simd_loss_fill(xd_loss_kernels *kernels) {
    kernels->references = xdi_simd_loss_references;
    kernels->stats = xdi_simd_loss_stats;
    kernels->mixture = xdi_simd_loss_mixture;
    kernels->grad = xdi_simd_loss_grad;
    kernels->fused = xdi_simd_loss_fused;
}
