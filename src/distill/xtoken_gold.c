#include <math.h>
#include <string.h>

/* What a shard tells the others of a chunk: its likeliest pair, and behind that its sorted tail. */
enum { XDI_GOLD_BEST, XDI_GOLD_PAIR, XDI_GOLD_TAIL };

/* ---- one chunk ---- */

/* Chunk c of sequence b. */
typedef struct xdi_gold_chunk {
    int64_t b, c;
    int64_t tail;       /* how long the tails are */
    int64_t other_best; /* the teacher's likeliest pair */
    double kl, l1;
    bool agree;
} xdi_gold_chunk;

/* The rows of the chunk, in x->rows; returns how many. */
static int64_t xdi_gold_rows(xdi_xtoken *x, const xdi_gold_chunk *chunk, const int64_t *chunks,
                             int64_t held) {
    int64_t count = 0;
    for (int64_t i = chunk->b * held; i < (chunk->b + 1) * held; i++)
        if (chunks[i] == chunk->c) x->rows[count++] = i;
    return count;
}

/* alpha of this shard's ids in x->student, beta of all the teacher's in x->teacher. */
static xd_result xdi_gold_means(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_gold_chunk *chunk) {
    const xd_xtoken_teacher *t = term->teacher;
    const int64_t at = chunk->b * t->chunks + chunk->c;
    xd_xtoken_args a = xdi_xtoken_student_args(x, xdi_gold_rows(x, chunk, t->student_chunks, x->held));
    a.cells = x->student;
    a.scale = 1.0 / ((double)term->student_sizes[at] + XD_XTOKEN_EPSILON);
    XDI_TRY(x->kernels.log_probs(&x->launch, &a));
    a = xdi_xtoken_teacher_args(x, term, xdi_gold_rows(x, chunk, t->teacher_chunks, term->held));
    a.scale = 1.0 / ((double)term->teacher_sizes[at] + XD_XTOKEN_EPSILON);
    XDI_TRY(x->kernels.log_probs(&x->launch, &a));
    XDI_TRY(xdi_xtoken_join(x, x->student, x->columns, x->d.sequence_comm, NULL));
    return xdi_xtoken_join(x, x->teacher, term->vocabulary, x->d.sequence_comm, NULL);
}

/* The KL of this shard's pairs in a cell, by u its derivative by alpha, and the likeliest. */
static xd_result xdi_gold_pairs(xdi_xtoken *x, const xd_exact_map *map, double *kl, xdi_gold_chunk *chunk) {
    xd_xtoken_args a = xdi_xtoken_student_args(x, 0);
    xdi_xtoken_zero(x, kl, 1);
    a.cells = kl;
    a.means = x->student;
    a.others = x->teacher;
    a.pair = map->student;
    a.other = map->teacher;
    a.pairs = map->pairs;
    a.reverse = x->d.reverse;
    a.slope = x->u;
    XDI_TRY(x->kernels.pair(&x->launch, &a));
    x->tails[XDI_GOLD_PAIR] = (double)a.best;
    x->tails[XDI_GOLD_BEST] = a.best < 0 ? -INFINITY : x->student[map->student[a.best] - x->vocab.begin];
    chunk->other_best = a.other_best;
    return XD_OK;
}

/* The tails: the largest probabilities of this shard's ids and of the teacher's without a partner; a shorter
 * list of this shard ends in -1, which is less than any probability. */
static xd_result xdi_gold_tails(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_gold_chunk *chunk) {
    const xd_exact_map *map = term->teacher->map;
    xd_xtoken_tail t = { x->student,   map->student_rest, map->student_rest_count,  x->vocab.begin,
                         x->vocab.end, chunk->tail,       x->tails + XDI_GOLD_TAIL, x->tail_ids,
                         x->scratch,   x->fixed };
    XDI_TRY(x->kernels.tail(&x->launch, &t));
    t.means = x->teacher;
    t.ids = map->teacher_rest;
    t.count = map->teacher_rest_count;
    t.begin = 0;
    t.end = term->vocabulary;
    t.values = x->other_tail;
    t.found = x->tail_ids + chunk->tail;
    return x->kernels.tail(&x->launch, &t);
}

/* Finds the likeliest pair of all shards, and whether the teacher has the same. */
static void xdi_gold_merge_pairs(const xdi_xtoken *x, const double *all, int64_t stride,
                                 xdi_gold_chunk *chunk) {
    double best = -INFINITY, pair = -1.0;
    for (int r = 0; r < x->vocab.ranks; r++) {
        const double *one = all + r * stride;
        if (one[XDI_GOLD_PAIR] < 0.0 || (pair >= 0.0 && one[XDI_GOLD_BEST] < best)) continue;
        if (one[XDI_GOLD_BEST] == best && pair >= 0.0 && one[XDI_GOLD_PAIR] > pair) continue;
        best = one[XDI_GOLD_BEST];
        pair = one[XDI_GOLD_PAIR];
    }
    chunk->agree = chunk->other_best >= 0 && pair == (double)chunk->other_best;
}

/* Walks the sorted tails of all shards as one list; u gets the derivative by alpha where an entry is ours.
 * Of equal entries the lowest shard's is first. x->rows holds the place in each shard's list. */
static void xdi_gold_merge_tails(xdi_xtoken *x, const double *all, int64_t stride, xdi_gold_chunk *chunk) {
    int64_t *place = x->rows;
    memset(place, 0, (size_t)x->vocab.ranks * sizeof *place);
    chunk->l1 = 0.0;
    for (int64_t i = 0; i < chunk->tail; i++) {
        int owner = 0;
        double largest = -2.0;
        for (int r = 0; r < x->vocab.ranks; r++) {
            const double value = place[r] < chunk->tail ? all[r * stride + XDI_GOLD_TAIL + place[r]] : -2.0;
            if (!(value <= largest)) {
                largest = value;
                owner = r;
            }
        }
        const double y = x->other_tail[i];
        const int64_t mine = place[owner]++;
        chunk->l1 += fabs(largest - y);
        if (owner != x->vocab.rank || x->tail_ids[mine] < 0) continue;
        const double sign = largest > y ? 1.0 : largest < y ? -1.0 : 0.0;
        x->u[x->tail_ids[mine]] = (float)(sign * largest);
    }
}

/* dz = (dlp - p sum dlp) / tau, dlp = u * factor. */
static xd_result xdi_gold_gradient(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_gold_chunk *chunk,
                                   double factor) {
    const int64_t count = xdi_gold_rows(x, chunk, term->teacher->student_chunks, x->held);
    xd_xtoken_args a = xdi_xtoken_student_args(x, count);
    double *sum = x->row_sums; /* one cell */
    xdi_xtoken_zero(x, sum, 1);
    a.cells = sum;
    a.u = x->u;
    a.scale = factor / x->d.temperature;
    XDI_TRY(x->kernels.total(&x->launch, &a));
    XDI_TRY(xdi_xtoken_join(x, sum, 1, x->vocab.tp, NULL));
    const double shift = sum[0] * a.scale;
    for (int64_t i = 0; i < count; i++) x->row_delta[i] = shift;
    a.delta = x->row_delta;
    return x->kernels.gradient(&x->launch, &a);
}

static xd_result xdi_gold_finish(xdi_xtoken *x, xdi_xtoken_term *term, const xdi_gold_chunk *chunk) {
    const int64_t at = chunk->b * term->teacher->chunks + chunk->c;
    const double weight = xdi_xtoken_weight(x, term, chunk->b, chunk->c), value = chunk->kl + chunk->l1;
    if (x->owner) {
        xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_COMPARED, 1.0);
        xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_AGREEING, chunk->agree ? 1.0 : 0.0);
        xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_DIVERGENCE,
                       isfinite(value) ? weight * chunk->kl : 0.0);
        xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_TAIL, isfinite(value) ? weight * chunk->l1 : 0.0);
        if (!isfinite(value)) xdi_xtoken_found(x, at, value);
    }
    if (!x->write || !isfinite(value)) return XD_OK;
    return xdi_gold_gradient(x, term, chunk,
                             weight * xdi_xtoken_factor(x, term) /
                                 ((double)term->student_sizes[at] + XD_XTOKEN_EPSILON));
}

static xd_result xdi_gold_run(xdi_xtoken *x, xdi_xtoken_term *term, xdi_gold_chunk *chunk) {
    const int64_t stride = XDI_GOLD_TAIL + chunk->tail;
    const double *all = x->tails;
    double *kl = x->row_sums; /* one cell */
    XDI_TRY(xdi_gold_means(x, term, chunk));
    XDI_TRY(xdi_gold_pairs(x, term->teacher->map, kl, chunk));
    XDI_TRY(xdi_xtoken_join(x, kl, 1, x->vocab.tp, NULL));
    chunk->kl = kl[0];
    if (chunk->tail > 0) XDI_TRY(xdi_gold_tails(x, term, chunk));
    if (x->vocab.tp) {
        XDI_TRY(xdi_comm_all_gather_equal(x->vocab.tp, x->tails, x->all_tails, stride, XD_DTYPE_F64));
        all = x->all_tails;
    }
    xdi_gold_merge_pairs(x, all, stride, chunk);
    xdi_gold_merge_tails(x, all, stride, chunk);
    return xdi_gold_finish(x, term, chunk);
}

XD_PRIVATE int64_t xdi_xtoken_tail(const xd_xtoken_desc *d, const xd_exact_map *map) {
    const int64_t rest =
        map->student_rest_count < map->teacher_rest_count ? map->student_rest_count : map->teacher_rest_count;
    return rest < d->tail ? rest : d->tail;
}

XD_PRIVATE xd_result xdi_xtoken_gold(xdi_xtoken *x, xdi_xtoken_term *term) {
    for (int64_t b = 0; b < x->d.sequences; b++)
        for (int64_t c = 0; c < term->teacher->chunks; c++) {
            xdi_gold_chunk chunk;
            memset(&chunk, 0, sizeof chunk);
            chunk.b = b;
            chunk.c = c;
            chunk.tail = xdi_xtoken_tail(&x->d, term->teacher->map);
            if (xdi_xtoken_looks(x, term, b, c)) XDI_TRY(xdi_gold_run(x, term, &chunk));
        }
    return XD_OK;
}
