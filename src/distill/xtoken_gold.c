#include <math.h>
#include <string.h>

/* What a shard tells the others of a chunk: its likeliest pair, and behind that its sorted tail. */
enum { XDI_GOLD_BEST, XDI_GOLD_PAIR, XDI_GOLD_TAIL };

/* ---- the largest of a list ---- */

static bool xdi_gold_before(const xdi_xtoken_item *a, const xdi_xtoken_item *b) {
    return a->value > b->value || (a->value == b->value && a->id < b->id);
}

static void xdi_gold_sift(xdi_xtoken_item *heap, int64_t at, int64_t count) {
    const xdi_xtoken_item item = heap[at];
    for (int64_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && xdi_gold_before(&heap[child + 1], &heap[child])) child++;
        if (!xdi_gold_before(&heap[child], &item)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = item;
}

/* The k first of the list, in order from its end: items[count - 1 - i] is number i. */
static void xdi_gold_select(xdi_xtoken_item *items, int64_t count, int64_t k) {
    for (int64_t at = count / 2; at-- > 0;) xdi_gold_sift(items, at, count);
    for (int64_t i = 0; i < k; i++) {
        const int64_t last = count - 1 - i;
        const xdi_xtoken_item largest = items[0];
        items[0] = items[last];
        xdi_gold_sift(items, 0, last);
        items[last] = largest;
    }
}

/* ---- one chunk ---- */

/* Chunk c of sequence b, with its tail's length on this shard and as compared. */
typedef struct xdi_gold_chunk {
    int64_t b, c;
    int64_t mine, student_count,
        teacher_count; /* tail entries of this shard; lists in x->items, teacher_items */
    int64_t tail;
    double kl, l1;
    bool agree;
} xdi_gold_chunk;

static void xdi_gold_add_teacher(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t row) {
    const xd_rows *y = &term->teacher->logits;
    double max = -INFINITY, sum = 0.0;
    for (int64_t u = 0; u < term->vocabulary; u++) {
        const double z = xdi_loss_load(y, row, u) / x->d.temperature;
        if (!(z <= max)) max = z;
    }
    for (int64_t u = 0; u < term->vocabulary; u++)
        sum += exp(xdi_loss_load(y, row, u) / x->d.temperature - max);
    const double lse = max + log(sum);
    for (int64_t u = 0; u < term->vocabulary; u++)
        xdi_xtoken_add(x, x->teacher, u, xdi_loss_load(y, row, u) / x->d.temperature - lse);
}

/* alpha of this shard's ids in x->student, beta of all the teacher's in x->teacher. */
static xd_result xdi_gold_means(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_gold_chunk *chunk) {
    const xd_xtoken_teacher *t = term->teacher;
    const int64_t at = chunk->b * t->chunks + chunk->c;
    xdi_xtoken_zero(x, x->student, x->columns);
    xdi_xtoken_zero(x, x->teacher, term->vocabulary);
    for (int64_t i = chunk->b * x->held; i < (chunk->b + 1) * x->held; i++)
        for (int64_t v = 0; v < x->columns && t->student_chunks[i] == chunk->c; v++)
            xdi_xtoken_add(x, x->student, v,
                           xdi_loss_load(&x->d.student, i, v) / x->d.temperature - x->lse[i]);
    for (int64_t i = chunk->b * term->held; i < (chunk->b + 1) * term->held; i++)
        if (t->teacher_chunks[i] == chunk->c) xdi_gold_add_teacher(x, term, i);
    XDI_TRY(xdi_xtoken_join(x, x->student, x->columns, x->d.sequence_comm, NULL));
    XDI_TRY(xdi_xtoken_join(x, x->teacher, term->vocabulary, x->d.sequence_comm, NULL));
    for (int64_t v = 0; v < x->columns; v++)
        x->student[v] /= (double)term->student_sizes[at] + XDI_XTOKEN_EPSILON;
    for (int64_t u = 0; u < term->vocabulary; u++)
        x->teacher[u] /= (double)term->teacher_sizes[at] + XDI_XTOKEN_EPSILON;
    return XD_OK;
}

/* The KL of this shard's pairs in a cell, by u its derivative by alpha, and the likeliest. */
static void xdi_gold_pairs(xdi_xtoken *x, const xd_exact_map *map, double *kl) {
    double best = -INFINITY, pair = -1.0;
    xdi_xtoken_zero(x, kl, 1);
    memset(x->u, 0, (size_t)x->columns * sizeof *x->u);
    for (int64_t i = 0; i < map->pairs; i++) {
        const int64_t v = map->student[i] - x->vocab.begin;
        if (v < 0 || v >= x->columns) continue;
        const double alpha = x->student[v], beta = x->teacher[map->teacher[i]];
        const double p = exp(x->d.reverse ? alpha : beta);
        if (p != 0.0) xdi_xtoken_add(x, kl, 0, p * (x->d.reverse ? alpha - beta : beta - alpha));
        if (p != 0.0) x->u[v] = x->d.reverse ? p * (alpha - beta + 1.0) : -p;
        if (pair >= 0.0 && !(alpha > best)) continue;
        best = alpha;
        pair = (double)i;
    }
    x->tails[XDI_GOLD_BEST] = best;
    x->tails[XDI_GOLD_PAIR] = pair;
}

/* The tails: this shard's ids and the teacher's without a partner, the largest first; a shorter list of
 * this shard ends in -1, which is less than any probability. */
static void xdi_gold_tails(xdi_xtoken *x, const xd_exact_map *map, xdi_gold_chunk *chunk) {
    chunk->student_count = chunk->teacher_count = 0;
    for (int64_t i = 0; i < map->student_rest_count; i++) {
        const int64_t v = map->student_rest[i] - x->vocab.begin;
        if (v < 0 || v >= x->columns) continue;
        x->items[chunk->student_count].value = exp(x->student[v]);
        x->items[chunk->student_count++].id = v;
    }
    for (int64_t i = 0; i < map->teacher_rest_count; i++) {
        x->teacher_items[chunk->teacher_count].value = exp(x->teacher[map->teacher_rest[i]]);
        x->teacher_items[chunk->teacher_count++].id = map->teacher_rest[i];
    }
    chunk->mine = chunk->student_count < chunk->tail ? chunk->student_count : chunk->tail;
    xdi_gold_select(x->items, chunk->student_count, chunk->mine);
    xdi_gold_select(x->teacher_items, chunk->teacher_count, chunk->tail);
    for (int64_t i = 0; i < chunk->tail; i++)
        x->tails[XDI_GOLD_TAIL + i] = i < chunk->mine ? x->items[chunk->student_count - 1 - i].value : -1.0;
}

/* Finds the likeliest pair of all shards, and whether the teacher has the same. */
static void xdi_gold_merge_pairs(xdi_xtoken *x, const xd_exact_map *map, const double *all, int64_t stride,
                                 xdi_gold_chunk *chunk) {
    double best = -INFINITY, pair = -1.0;
    int64_t teacher = 0;
    for (int r = 0; r < x->vocab.ranks; r++) {
        const double *one = all + r * stride;
        if (one[XDI_GOLD_PAIR] < 0.0 || (pair >= 0.0 && one[XDI_GOLD_BEST] < best)) continue;
        if (one[XDI_GOLD_BEST] == best && pair >= 0.0 && one[XDI_GOLD_PAIR] > pair) continue;
        best = one[XDI_GOLD_BEST];
        pair = one[XDI_GOLD_PAIR];
    }
    for (int64_t i = 1; i < map->pairs; i++)
        if (x->teacher[map->teacher[i]] > x->teacher[map->teacher[teacher]]) teacher = i;
    chunk->agree = map->pairs > 0 && pair == (double)teacher;
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
        const double y = x->teacher_items[chunk->teacher_count - 1 - i].value;
        const int64_t mine = place[owner]++;
        chunk->l1 += fabs(largest - y);
        if (owner != x->vocab.rank || mine >= chunk->mine) continue;
        const double sign = largest > y ? 1.0 : largest < y ? -1.0 : 0.0;
        x->u[x->items[chunk->student_count - 1 - mine].id] = sign * largest;
    }
}

/* dz = (dlp - p sum dlp) / tau, dlp = u * factor. */
static xd_result xdi_gold_gradient(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_gold_chunk *chunk,
                                   double factor) {
    double *sum = x->row_sums; /* one cell */
    xdi_xtoken_zero(x, sum, 1);
    for (int64_t v = 0; v < x->columns; v++) xdi_xtoken_add(x, sum, 0, x->u[v]);
    for (int64_t v = 0; v < x->columns; v++) x->u[v] *= factor / x->d.temperature;
    XDI_TRY(xdi_xtoken_join(x, sum, 1, x->vocab.tp, NULL));
    sum[0] *= factor / x->d.temperature;
    for (int64_t i = chunk->b * x->held; i < (chunk->b + 1) * x->held; i++)
        if (term->teacher->student_chunks[i] == chunk->c) xdi_xtoken_write(x, i, x->u, false, sum[0]);
    return XD_OK;
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
                                 ((double)term->student_sizes[at] + XDI_XTOKEN_EPSILON));
}

static xd_result xdi_gold_run(xdi_xtoken *x, xdi_xtoken_term *term, xdi_gold_chunk *chunk) {
    const xd_exact_map *map = term->teacher->map;
    const int64_t stride = XDI_GOLD_TAIL + chunk->tail;
    const double *all = x->tails;
    double *kl = x->row_sums; /* one cell */
    XDI_TRY(xdi_gold_means(x, term, chunk));
    xdi_gold_pairs(x, map, kl);
    XDI_TRY(xdi_xtoken_join(x, kl, 1, x->vocab.tp, NULL));
    chunk->kl = kl[0];
    xdi_gold_tails(x, map, chunk);
    if (x->vocab.tp) {
        XDI_TRY(xdi_comm_all_gather_equal(x->vocab.tp, x->tails, x->all_tails, stride, XD_DTYPE_F64));
        all = x->all_tails;
    }
    xdi_gold_merge_pairs(x, map, all, stride, chunk);
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
