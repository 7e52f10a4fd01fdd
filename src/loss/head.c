/* Losses from hidden states: logits of a linear head, a chunk of rows at a time. */

#include "comm/leaves.h"
#include "loss/head.h"
#include "loss/internal.h"

#include <string.h>

/* Rows of a chunk are multiples of the matrix product's block, so that sums over rows do not depend on the chunk. A product's rate
 * on a GPU grows with its rows, while the gradient of the weight is read and written once a chunk. */
enum { XDI_HEAD_BLOCK = 256, XDI_HEAD_CHUNK_MOST = 2048 };

/* Of logits, where the call allocates them on a GPU. */
static const size_t xdi_head_logits_most = (size_t)256 << 20;

/* Everything of one call. */
typedef struct xdi_head_plan {
    const xd_head_loss_desc *d;
    xdi_loss_plan loss;
    int64_t rows, columns, width, chunk;
    void *student, *teacher; /* [chunk, columns] logits; the student's become their gradient */
    xd_dtype logits;         /* their dtype */
    float *hidden;           /* [chunk, width] gradient, then the hidden states of rows that are kept */
    float *tile;             /* INVARIANT: the same of one tile */
    float *one;              /* the number 1, by which rows are repeated or added up */
    void *product;           /* workspace of the matrix product */
    void *memory;            /* the workspace */
    size_t bytes;
    xd_leaf_stack *leaves; /* INVARIANT: hidden gradients of tiles */
} xdi_head_plan;

static const float xdi_head_one = 1.0f;

static bool xdi_head_wants_gradient(const xd_head_loss_desc *d) {
    return d->hidden_gradient.data || d->weight_gradient || d->bias_gradient;
}

/* ---- checks ---- */

static xd_result xdi_head_validate_side(xd_ctx *ctx, const char *name, const xd_head *head, int64_t rows,
                                        int64_t columns) {
    const xd_rows *sides[2] = { &head->hidden, &head->weight };
    for (int i = 0; i < 2; i++) {
        const char *part = i ? "weight" : "hidden";
        XD_REQUIRE(ctx, sides[i]->dtype == XD_DTYPE_F32 || sides[i]->dtype == XD_DTYPE_BF16, XD_ERROR_DTYPE,
                   "%s %s is %s: F32 or BF16 is needed", name, part, xd_dtype_name(sides[i]->dtype));
        XD_REQUIRE(ctx, sides[i]->stride == 0 || sides[i]->stride >= sides[i]->cols, XD_ERROR_SHAPE,
                   "%s %s has rows of %lld elements %lld apart", name, part, (long long)sides[i]->cols,
                   (long long)sides[i]->stride);
        XD_REQUIRE(ctx, sides[i]->data || sides[i]->rows == 0, XD_ERROR_ARGUMENT, "%s %s is NULL", name,
                   part);
    }
    XD_REQUIRE(ctx, head->hidden.rows == rows && rows >= 0, XD_ERROR_SHAPE,
               "%s hidden has %lld rows, the student %lld", name, (long long)head->hidden.rows,
               (long long)rows);
    XD_REQUIRE(ctx, head->weight.rows == columns, XD_ERROR_SHAPE,
               "%s weight has %lld rows, this rank's part of the vocabulary %lld", name,
               (long long)head->weight.rows, (long long)columns);
    XD_REQUIRE(ctx, head->hidden.cols == head->weight.cols && head->hidden.cols > 0, XD_ERROR_SHAPE,
               "%s hidden is %lld wide, its weight %lld", name, (long long)head->hidden.cols,
               (long long)head->weight.cols);
    return XD_OK;
}

static xd_result xdi_head_validate_gradient(xd_ctx *ctx, const xd_head_loss_desc *d) {
    const xd_rows *g = &d->hidden_gradient, *x = &d->student.hidden;
    if (!g->data) return XD_OK;
    XD_REQUIRE(ctx, g->dtype == XD_DTYPE_F32 || g->dtype == XD_DTYPE_BF16, XD_ERROR_DTYPE,
               "the gradient of hidden is %s: F32 or BF16 is needed", xd_dtype_name(g->dtype));
    XD_REQUIRE(ctx, g->stride == 0 || g->stride == g->cols, XD_ERROR_SHAPE,
               "the gradient of hidden has stride %lld, but must be its %lld columns without gaps",
               (long long)g->stride, (long long)g->cols);
    XD_REQUIRE(ctx, g->rows == x->rows && g->cols == x->cols, XD_ERROR_SHAPE,
               "the gradient of hidden is [%lld, %lld], not [%lld, %lld]", (long long)g->rows,
               (long long)g->cols, (long long)x->rows, (long long)x->cols);
    return XD_OK;
}

static xd_result xdi_head_validate_invariant(xd_ctx *ctx, const xd_head_loss_desc *d) {
    const xd_vocab_info v = xd_vocab_describe(d->loss.vocab);
    if (xd_ctx_settings(ctx)->reduction != XD_REDUCTION_INVARIANT || !d->hidden_gradient.data) return XD_OK;
    XD_REQUIRE(ctx, xd_ctx_kernels(ctx)->device == XD_DEVICE_CPU, XD_ERROR_UNSUPPORTED,
               "the gradient of hidden in INVARIANT mode is not built for a GPU");
    XD_REQUIRE(
        ctx, v.begin % XD_HEAD_TILE == 0 || v.begin == v.size, XD_ERROR_UNSUPPORTED,
        "INVARIANT mode adds up tiles of %d columns, the vocabulary is cut at %lld: xd_vocab_desc.columns "
        "cuts it elsewhere",
        (int)XD_HEAD_TILE, (long long)v.begin);
    return XD_OK;
}

static xd_result xdi_head_validate(xd_ctx *ctx, const xd_head_loss_desc *d) {
    XD_REQUIRE(ctx, d->loss.vocab, XD_ERROR_ARGUMENT, "the loss has no vocabulary: vocab is NULL");
    const xd_vocab_info v = xd_vocab_describe(d->loss.vocab);
    const int64_t rows = d->student.hidden.rows;
    XD_REQUIRE(ctx, !d->loss.student.data && !d->loss.common.gradient.data && !d->loss.common.workspace,
               XD_ERROR_ARGUMENT, "logits, their gradient and their workspace are the head's own here");
    XD_REQUIRE(ctx, d->chunk_rows >= 0 && d->chunk_rows % XDI_HEAD_BLOCK == 0, XD_ERROR_ARGUMENT,
               "chunk_rows %lld is not a multiple of %d", (long long)d->chunk_rows, (int)XDI_HEAD_BLOCK);
    XD_TRY(xdi_head_validate_side(ctx, "student", &d->student, rows, v.end - v.begin));
    XD_REQUIRE(ctx, !d->teacher.hidden.data || !d->loss.teacher.data, XD_ERROR_ARGUMENT,
               "the teacher is given twice, by logits and by a head");
    if (d->teacher.hidden.data)
        XD_TRY(xdi_head_validate_side(ctx, "teacher", &d->teacher, rows, v.end - v.begin));
    XD_TRY(xdi_head_validate_gradient(ctx, d));
    return xdi_head_validate_invariant(ctx, d);
}

/* ---- memory ---- */

static bool xdi_head_is_narrow(const xd_head *head) {
    return head->hidden.dtype == XD_DTYPE_BF16 && head->weight.dtype == XD_DTYPE_BF16 && !head->bias;
}

/* BF16 where the caller has asked for it, the table has it, and the factors have no more digits themselves. A bias is added to
 * sums that are not rounded yet. */
static xd_dtype xdi_head_logits_dtype(xd_ctx *ctx, const xd_head_loss_desc *h) {
    const bool has = h->bf16 && xd_ctx_kernels(ctx)->products.narrow &&
                     xd_ctx_settings(ctx)->reduction != XD_REDUCTION_INVARIANT;
    const bool fit =
        xdi_head_is_narrow(&h->student) && (!h->teacher.hidden.data || xdi_head_is_narrow(&h->teacher));
    return has && fit ? XD_DTYPE_BF16 : XD_DTYPE_F32;
}

/* The desc of the loss over logits that do not exist yet; a pointer that is not NULL stands for them. */
static xd_loss_desc xdi_head_loss_desc(const xd_head_loss_desc *h, xd_dtype dtype) {
    static const char somewhere = 0; /* never read */
    xd_loss_desc d = h->loss;
    d.student.data = (void *)&somewhere;
    d.student.dtype = dtype;
    d.student.rows = h->student.hidden.rows;
    d.student.cols = h->student.weight.rows;
    d.student.stride = 0;
    if (h->teacher.hidden.data) d.teacher = d.student;
    if (xdi_head_wants_gradient(h)) d.common.gradient = d.student;
    return d;
}

static void xdi_head_begin(xd_ctx *ctx, const xd_head_loss_desc *desc, xdi_head_plan *p) {
    const xd_dtype logits = xdi_head_logits_dtype(ctx, desc);
    const xd_loss_desc d = xdi_head_loss_desc(desc, logits);
    memset(p, 0, sizeof *p);
    p->d = desc;
    p->rows = desc->student.hidden.rows;
    p->columns = desc->student.weight.rows;
    p->width = desc->student.hidden.cols;
    p->logits = logits;
    p->loss.d = xdi_loss_defaults(&d);
    p->loss.reduction = xdi_loss_reduction(&p->loss.d);
}

static bool xdi_head_layout(xdi_head_plan *p, bool invariant, xd_arena *arena) {
    const int64_t chunk = p->chunk, width = p->width;
    const int64_t hidden = p->d->hidden_gradient.data ? width : 0;
    size_t most; /* no size wraps if these do not */
    bool fits = true;
    if (!xdi_size_multiply((size_t)chunk, (size_t)p->columns, &most) ||
        !xdi_size_multiply(most, sizeof(float), &most) ||
        !xdi_size_multiply((size_t)chunk, (size_t)width, &most) ||
        !xdi_size_multiply(most, sizeof(float), &most) || !xdi_loss_layout(&p->loss, chunk, arena))
        return false;
    const int64_t logits = chunk * p->columns;
    const size_t size = xd_dtype_size(p->logits);
    p->student = xdi_arena_array(arena, logits, size, &fits);
    p->teacher = xdi_arena_array(arena, p->d->teacher.hidden.data ? logits : 0, size, &fits);
    p->hidden = (float *)xdi_arena_array(arena, chunk * (p->d->weight_gradient ? width : hidden),
                                         sizeof(float), &fits);
    p->tile = (float *)xdi_arena_array(arena, chunk * (invariant ? hidden : 0), sizeof(float), &fits);
    p->one = (float *)xdi_arena_array(arena, 1, sizeof(float), &fits);
    p->product = xdi_arena_array(arena, XD_MATMUL_WORKSPACE_BYTES, 1, &fits);
    return fits;
}

/* ---- rows of a chunk ---- */

static int64_t xdi_head_least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Blocks of rows whose logits take at most xdi_head_logits_most on the rank that has the most columns, at least one. */
static int64_t xdi_head_rows_allocated(const xdi_head_plan *p) {
    const xd_vocab_info v = xd_vocab_describe(p->d->loss.vocab);
    int64_t widest = 1;
    for (int r = 0; r < v.ranks; r++) {
        const int64_t columns = v.offsets[r + 1] - v.offsets[r];
        widest = columns > widest ? columns : widest;
    }
    const int64_t sides = p->d->teacher.hidden.data ? 2 : 1;
    const int64_t each = (int64_t)xd_dtype_size(p->logits) * sides * XDI_HEAD_BLOCK;
    const int64_t blocks = (int64_t)xdi_head_logits_most / each / widest;
    return (blocks > 1 ? blocks : 1) * XDI_HEAD_BLOCK;
}

/* Whether `bytes` of workspace hold chunks of so many rows. */
static bool xdi_head_holds(xdi_head_plan *p, bool invariant, int64_t rows, size_t bytes) {
    xd_arena planning = xd_arena_over(NULL, 0);
    p->chunk = rows;
    return xdi_head_layout(p, invariant, &planning) && planning.peak <= bytes;
}

/* Whether the ranks of the vocabulary must have the same chunk_rows of 0: their exchanges are those of chunks. */
static bool xdi_head_shares_rows(const xdi_head_plan *p) {
    return !p->d->chunk_rows && p->rows > XDI_HEAD_BLOCK && xd_vocab_describe(p->d->loss.vocab).ranks > 1;
}

/* What chunk_rows 0 stands for on this rank. More rows than a block make a product on the CPU no faster; in a capture, ranks that
 * cannot agree take a block. */
static int64_t xdi_head_rows_chosen(xd_ctx *ctx, xdi_head_plan *p, bool invariant) {
    const int64_t block = XDI_HEAD_BLOCK, blocks = (p->rows + block - 1) / block;
    int64_t rows = xdi_head_least(XDI_HEAD_CHUNK_MOST, blocks * block);
    if (p->loss.kernels->device == XD_DEVICE_CPU || rows <= block) return block;
    if (xdi_head_shares_rows(p) && xdi_comm_is_recording(xd_vocab_describe(p->d->loss.vocab).tp))
        return block;
    if (!p->d->workspace || xdi_plan_is_open(ctx)) return xdi_head_least(rows, xdi_head_rows_allocated(p));
    while (rows > block &&
           !xdi_head_holds(p, invariant, xdi_head_least(rows, p->rows), p->d->workspace_bytes))
        rows -= block;
    return rows;
}

/* The workspace, the caller's or one of the device, and its blocks. */
static xd_result xdi_head_allocate(xd_ctx *ctx, xdi_head_plan *p, bool invariant, size_t needed,
                                   void **owned) {
    p->memory = p->d->workspace;
    p->bytes = p->d->workspace_bytes;
    if (!p->memory) {
        p->bytes = needed;
        p->memory = *owned = p->loss.kernels->memory.allocate(ctx, needed);
        XD_REQUIRE(ctx, p->memory, XD_ERROR_MEMORY, "no room for a workspace of %zu bytes", needed);
    }
    xd_arena arena = xd_arena_over(p->memory, p->bytes);
    XD_REQUIRE(ctx, xdi_head_layout(p, invariant, &arena), XD_ERROR_ARGUMENT,
               "workspace has %zu bytes but the loss needs %zu", p->bytes, needed);
    return XD_OK;
}

/* The ranks of a vocabulary take the fewest rows that one of them has room for. */
static xd_result xdi_head_share_rows(xd_ctx *ctx, xdi_head_plan *p) {
    xd_comm *tp = xd_vocab_describe(p->d->loss.vocab).tp;
    if (!xdi_head_shares_rows(p) || xdi_comm_is_recording(tp)) return XD_OK;
    int64_t least = 0;
    XD_TRY(xd_all_reduce(tp, &p->chunk, &least, 1, XD_DTYPE_I64, XD_MIN));
    if (least == p->chunk) return XD_OK;
    xd_arena arena = xd_arena_over(p->memory, p->bytes);
    p->chunk = least;
    (void)xdi_head_layout(p, xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT,
                          &arena); /* of fewer rows */
    return XD_OK;
}

/* Everything before the first exchange, local to this rank. */
static xd_result xdi_head_prepare(xd_ctx *ctx, const xd_head_loss_desc *desc, xdi_head_plan *p,
                                  void **owned) {
    xd_arena planning = xd_arena_over(NULL, 0);
    const bool invariant = xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT;
    XD_TRY(xdi_head_validate(ctx, desc));
    xdi_head_begin(ctx, desc, p);
    p->loss.kernels = xd_ctx_kernels(ctx);
    XD_TRY(xdi_loss_validate(ctx, &p->loss.d, &p->loss.reduction));
    xdi_loss_fill_args(ctx, &p->loss);
    p->chunk = desc->chunk_rows ? desc->chunk_rows : xdi_head_rows_chosen(ctx, p, invariant);
    if (p->rows > 0) p->chunk = xdi_head_least(p->chunk, p->rows);
    XD_REQUIRE(ctx, xdi_head_layout(p, invariant, &planning), XD_ERROR_ARGUMENT,
               "the workspace would not fit into memory");
    p->loss.bytes = planning.peak;
    if (xdi_plan_is_open(ctx)) return XD_OK;
    XD_TRY(xdi_head_allocate(ctx, p, invariant, planning.peak, owned));
    if (p->loss.kernels->products.prepare) {
        const xd_launch launch = xd_ctx_launch(ctx);
        XD_TRY(p->loss.kernels->products.prepare(&launch));
    }
    if (!invariant || !desc->hidden_gradient.data) return XD_OK;
    const xd_vocab_info v = xd_vocab_describe(desc->loss.vocab);
    const xd_leaves tiles = { (v.begin + XD_HEAD_TILE - 1) / XD_HEAD_TILE,
                              (p->columns + XD_HEAD_TILE - 1) / XD_HEAD_TILE,
                              (v.size + XD_HEAD_TILE - 1) / XD_HEAD_TILE };
    xd_leaf_stack_desc leaves;
    memset(&leaves, 0, sizeof leaves);
    leaves.leaves = tiles;
    leaves.elements = p->chunk * p->width;
    return xd_leaf_stack_create(ctx, &leaves, &p->leaves);
}

/* ---- one chunk ---- */

/* Rows [row, row + rows) of a matrix. */
static xd_rows xdi_head_rows(const xd_rows *x, int64_t row, int64_t rows) {
    xd_rows part = *x;
    const int64_t stride = x->stride ? x->stride : x->cols;
    part.data = (char *)x->data + (size_t)(row * stride) * (size_t)xd_dtype_size(x->dtype);
    part.rows = rows;
    return part;
}

/* 1, repeated: a column of `rows` ones that takes four bytes. */
static xd_matrix xdi_head_ones(const xdi_head_plan *p, int64_t rows) {
    xd_matrix ones = { p->one, XD_DTYPE_F32, rows, 1, 0, 0 };
    return ones;
}

static xd_result xdi_head_multiply(const xd_launch *launch, const xdi_head_plan *p, xd_matrix a, xd_matrix b,
                                   float *out, bool accumulate) {
    const xd_matmul_args args = { a, b, out, b.cols, accumulate, p->d->bf16, XD_DTYPE_F32 };
    return p->loss.kernels->matmul(launch, &args);
}

/* logits = hidden weight^T + bias for some rows. */
static xd_result xdi_head_logits(const xd_launch *launch, const xdi_head_plan *p, const xd_head *head,
                                 int64_t row, int64_t rows, void *logits) {
    const xd_rows hidden = xdi_head_rows(&head->hidden, row, rows);
    const xd_matrix weight = xd_matrix_transposed(xd_matrix_of_rows(&head->weight));
    if (head->bias) {
        const xd_matrix bias = { head->bias, XD_DTYPE_F32, 1, p->columns, p->columns, 1 };
        const xd_matmul_args args = {
            xdi_head_ones(p, rows), bias, (float *)logits, p->columns, false, false, XD_DTYPE_F32
        };
        XD_TRY(p->loss.kernels->matmul(launch, &args));
    }
    const xd_matmul_args args = { xd_matrix_of_rows(&hidden), weight,     (float *)logits, p->columns,
                                  head->bias != NULL,         p->d->bf16, p->logits };
    return p->loss.kernels->matmul(launch, &args);
}

/* Of the logits, which have been replaced by their gradient. */
static xd_matrix xdi_head_gradient(const xdi_head_plan *p, int64_t rows, int64_t begin, int64_t columns) {
    const char *from = (const char *)p->student + (size_t)begin * xd_dtype_size(p->logits);
    xd_matrix g = { from, p->logits, rows, columns, p->columns, 1 };
    return g;
}

/* INVARIANT: tile by tile, each a leaf of the canonical tree over the whole vocabulary. */
static xd_result xdi_head_hidden_tiles(const xd_launch *launch, xdi_head_plan *p, int64_t rows) {
    xd_leaf_stack_reset(p->leaves);
    for (int64_t c = 0; c < p->columns; c += XD_HEAD_TILE) {
        const int64_t n = p->columns - c < XD_HEAD_TILE ? p->columns - c : (int64_t)XD_HEAD_TILE;
        const xd_rows weight = xdi_head_rows(&p->d->student.weight, c, n);
        XD_TRY(xdi_head_multiply(launch, p, xdi_head_gradient(p, rows, c, n), xd_matrix_of_rows(&weight),
                                 p->tile, false));
        XD_TRY(xd_leaf_stack_push(p->leaves, p->tile));
    }
    return XD_OK;
}

/* Adds the tiles of all ranks; a single rank adds its tiles in the same tree. */
static xd_result xdi_head_hidden_tree(xd_ctx *ctx, xdi_head_plan *p, const xd_vocab_info *v) {
    const int64_t count = p->chunk * p->width;
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = xd_leaf_stack_forest(p->leaves);
    c.recv = p->hidden;
    c.count = count;
    c.dtype = XD_DTYPE_F32;
    c.op = XD_SUM;
    c.leaves.first = (v->begin + XD_HEAD_TILE - 1) / XD_HEAD_TILE;
    c.leaves.count = (p->columns + XD_HEAD_TILE - 1) / XD_HEAD_TILE;
    c.leaves.total = (v->size + XD_HEAD_TILE - 1) / XD_HEAD_TILE;
    if (v->tp) return xd_collective_run(v->tp, &c);
    return xd_reduce_leaves(ctx, p->hidden, &c.send, &c.leaves, 1, count, count, XD_DTYPE_F32, XD_SUM);
}

/* Rows of the chunk that begins at `row`, zero where they do not count or have a finding: zero times NaN is NaN. */
static xd_result xdi_head_keep(const xd_launch *launch, xdi_head_plan *p, int64_t row, xd_rows from, void *to,
                               bool judge) {
    xd_kept_rows a;
    a.from = from;
    a.to = xd_rows_of(to, from.dtype, from.rows, from.cols);
    a.row_scale = p->loss.row_scale + row;
    a.row = p->loss.rows + row;
    a.judge = judge;
    return p->loss.kernels->rows.keep(launch, &a);
}

/* hidden_gradient of some rows: this rank's columns, summed over the vocabulary's group, in the dtype asked
 * for. */
static xd_result xdi_head_hidden(const xd_launch *launch, xdi_head_plan *p, int64_t row, int64_t rows) {
    const xd_vocab_info v = xd_vocab_describe(p->d->loss.vocab);
    const xd_rows to = xdi_head_rows(&p->d->hidden_gradient, row, rows);
    if (p->leaves) {
        XD_TRY(xdi_head_hidden_tiles(launch, p, rows));
        XD_TRY(xdi_head_hidden_tree(launch->ctx, p, &v));
    } else {
        XD_TRY(xdi_head_multiply(launch, p, xdi_head_gradient(p, rows, 0, p->columns),
                                 xd_matrix_of_rows(&p->d->student.weight), p->hidden, false));
        if (v.tp) XD_TRY(xd_all_reduce(v.tp, p->hidden, p->hidden, rows * p->width, XD_DTYPE_F32, XD_SUM));
    }
    XD_TRY(
        xdi_head_keep(launch, p, row, xd_rows_of(p->hidden, XD_DTYPE_F32, rows, p->width), p->hidden, true));
    const xd_cast_array cast = { to.data, p->hidden, rows * p->width, to.dtype, XD_DTYPE_F32 };
    return p->loss.kernels->optimizer.cast(launch, &cast, 1);
}

/* First the gradient of the hidden states: rows where it is not finite take no part in the others. */
static xd_result xdi_head_gradients(const xd_launch *launch, xdi_head_plan *p, int64_t row, int64_t rows) {
    const xd_rows hidden = xdi_head_rows(&p->d->student.hidden, row, rows);
    const xd_matrix g = xd_matrix_transposed(xdi_head_gradient(p, rows, 0, p->columns));
    if (p->d->hidden_gradient.data) {
        XD_TRY(xdi_head_hidden(launch, p, row, rows));
        XD_TRY(xdi_head_keep(launch, p, row, xd_rows_of(p->student, p->logits, rows, p->columns), p->student,
                             false));
    }
    if (p->d->weight_gradient) {
        const xd_rows kept = xd_rows_of(p->hidden, hidden.dtype, rows, p->width);
        XD_TRY(xdi_head_keep(launch, p, row, hidden, p->hidden, false));
        XD_TRY(xdi_head_multiply(launch, p, g, xd_matrix_of_rows(&kept), p->d->weight_gradient, true));
    }
    if (!p->d->bias_gradient) return XD_OK;
    const xd_matmul_args sum = {
        g, xdi_head_ones(p, rows), p->d->bias_gradient, 1, true, false, XD_DTYPE_F32
    };
    return p->loss.kernels->matmul(launch, &sum);
}

/* Points the loss at the chunk's rows. */
static void xdi_head_point(xdi_head_plan *p, int64_t row, int64_t rows) {
    xd_loss_args *a = &p->loss.args;
    a->student.data = p->student;
    a->student.rows = rows;
    if (p->d->teacher.hidden.data) {
        a->teacher.data = p->teacher;
        a->teacher.rows = rows;
    } else if (p->loss.d.teacher.data) {
        a->teacher = xdi_head_rows(&p->loss.d.teacher, row, rows);
    }
    if (p->loss.d.common.gradient.data) a->gradient = a->student;
    if (p->loss.d.common.labels.data) a->labels = xdi_ids_from(p->loss.d.common.labels, row);
    a->row_scale = p->loss.row_scale + row;
    if (p->loss.d.common.row_weight) a->row_weight = p->loss.d.common.row_weight + row;
    a->row = p->loss.rows + row;
    a->sums = a->references + rows * XD_LOSS_REFERENCES; /* one block, so that one exchange carries both */
}

static xd_result xdi_head_chunk(const xd_launch *launch, xdi_head_plan *p, int64_t row, int64_t rows) {
    XD_TRY(xdi_head_logits(launch, p, &p->d->student, row, rows, p->student));
    if (p->d->teacher.hidden.data) XD_TRY(xdi_head_logits(launch, p, &p->d->teacher, row, rows, p->teacher));
    xdi_head_point(p, row, rows);
    XD_TRY(xdi_loss_rows(launch, &p->loss));
    return p->loss.d.common.gradient.data ? xdi_head_gradients(launch, p, row, rows) : XD_OK;
}

static xd_result xdi_head_run(xd_ctx *ctx, xdi_head_plan *p, xd_loss_values *out) {
    xd_launch launch = xd_ctx_launch(ctx);
    xd_row_args rows;
    launch.workspace = p->product;
    launch.workspace_bytes = XD_MATMUL_WORKSPACE_BYTES;
    XD_TRY(
        p->loss.kernels->memory.copy(&launch, p->one, &xdi_head_one, sizeof xdi_head_one, XD_COPY_TO_DEVICE));
    if (p->leaves) memset(p->tile, 0, (size_t)(p->chunk * p->width) * sizeof *p->tile);
    XD_TRY(xdi_reduction_begin(ctx, &p->loss.reduction, p->loss.row_scale, p->loss.words, &rows));
    for (int64_t row = 0; row < p->rows; row += p->chunk)
        XD_TRY(xdi_head_chunk(&launch, p, row, p->rows - row < p->chunk ? p->rows - row : p->chunk));
    rows.loss_rows = p->loss.rows;
    rows.row_loss = p->loss.d.common.row_loss;
    return xdi_reduction_end(ctx, &p->loss.reduction, &rows, out);
}

XD_API xd_result xd_head_loss(xd_ctx *ctx, const xd_head_loss_desc *desc, xd_loss_values *out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, desc);
    XDI_LIVE(xd_vocab, desc->loss.vocab);
    xdi_head_plan plan;
    void *owned = NULL;
    memset(&plan, 0, sizeof plan);
    xd_result result = xdi_head_prepare(ctx, desc, &plan, &owned);
    if (result == XD_OK) result = xdi_loss_check_out(ctx, plan.rows, out);
    if (xdi_plan_is_open(ctx)) return xdi_plan_add_workspace(ctx, result, plan.loss.bytes);
    result = xdi_vocab_agree(desc->loss.vocab ? xd_vocab_describe(desc->loss.vocab).tp : NULL,
                             desc->loss.common.comm, result);
    if (result == XD_OK) result = xdi_head_share_rows(ctx, &plan);
    if (result == XD_OK) result = xdi_head_run(ctx, &plan, out);
    xd_leaf_stack_destroy(plan.leaves);
    if (owned) plan.loss.kernels->memory.release(ctx, owned);
    return result;
}
