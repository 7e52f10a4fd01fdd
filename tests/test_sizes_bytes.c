/* Functions that return bytes: sizes that would wrap are 0, whatever numbers the desc has, and the others are as large as what they
 * must hold. Under the undefined behaviour sanitizer no product on the way there overflows. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_private.h" /* xdi_: the scene has private structs */
#if defined(XD_TEST_LAYERS)
#    include "comm/internal.h"
#    include "tensor/internal.h"
#endif
#include "vocab_calls.h"
#include "planned.h"
#include "xd_test.h"
#include "xd_test_topology.h"
#include "ids_scene.h"
#include "sizes_xtoken.h"

#include <stdlib.h>

/* They are not counted one by one: the bound is twice the logarithm, and one more. */
XD_TEST(a_stack_of_any_number_of_leaves_is_measured_at_once) {
    const xd_leaf_stack_desc all = { .leaves = { 0, INT64_MAX, INT64_MAX }, .elements = 1 };
    const xd_leaf_stack_desc beyond = { .leaves = { 1, INT64_MAX, INT64_MAX }, .elements = 1 };
    CHECK_EQ_INT(xdi_leaf_stack_bytes(&all), (2 * 63 + 1) * sizeof(float));
    CHECK_EQ_INT(xdi_leaf_stack_bytes(&beyond), 0);
}

XD_TEST(bytes_that_do_not_fit_into_a_size_are_0) {
    xd_ctx *ctx = NULL;
    xd_vocab *vocab = NULL;
    xd_layout *layout = NULL;
    const xd_topology topology = line_of("dp", 1);
    const int64_t huge = (int64_t)1 << 61;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(vocab_even(ctx, NULL, IDS_VOCAB, &vocab) == XD_OK);
    const xd_layout_desc large = { .ndim = 2, .shape = { huge / 1024, 1024 }, .topology = &topology };
    CHECK(xd_layout_create(ctx, &large, &layout) == XD_OK);
    CHECK(xdi_tensor_bytes(layout, 0, XD_DTYPE_U8) == (size_t)huge);
    CHECK_EQ_INT(xdi_tensor_bytes(layout, 0, XD_DTYPE_F64), 0); /* 2^64 */
    for (int shift = 40; shift < 63; shift++) {
        static float somewhere;
        const int64_t rows = ((int64_t)1 << shift) + 5;
        const xd_ids labels = xd_ids_of(&somewhere, XD_DTYPE_I32);
        xd_loss_values values;
        xd_loss_desc d = { .vocab = vocab, .hard_weight = 1.0, .common.labels = labels };
        xd_topk_desc k = { .vocab = vocab, .k = 3 };
        xd_head_loss_desc h = { .loss = { .vocab = vocab, .hard_weight = 1.0, .common.labels = labels } };
        h.chunk_rows = (rows + 255) / 256 * 256;
        d.student = k.student = xd_rows_of(&somewhere, XD_DTYPE_F32, rows, IDS_VOCAB);
        h.student.hidden = xd_rows_of(&somewhere, XD_DTYPE_F32, rows, 8);
        h.student.weight = xd_rows_of(&somewhere, XD_DTYPE_F32, IDS_VOCAB, 8);
        k.teacher = k.student;
        const size_t bytes[3] = { PLANNED_WORKSPACE(ctx, xd_loss(ctx, &d, &values)),
                                  PLANNED_WORKSPACE(ctx, xd_topk_kl_loss(ctx, &k, &values)),
                                  PLANNED_WORKSPACE(ctx, xd_head_loss(ctx, &h, &values)) };
        for (int i = 0; i < 3; i++) CHECK(bytes[i] == 0 || bytes[i] / 8 >= (size_t)rows);
        CHECK(shift < 60 || (bytes[0] == 0 && bytes[1] == 0 && bytes[2] == 0));
        CHECK(shift > 44 || (bytes[0] > 0 && bytes[1] > 0 && bytes[2] > 0));
    }
    xd_layout_destroy(layout);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
}

/* Numbers that no call expects, and some that it does. */
static const int64_t extremes[] = { 0,
                                    1,
                                    -1,
                                    3,
                                    8,
                                    12,
                                    256,
                                    INT32_MAX,
                                    (int64_t)INT32_MAX + 1,
                                    INT32_MIN,
                                    1LL << 40,
                                    1LL << 53,
                                    1LL << 60,
                                    (1LL << 61) + 7,
                                    (1LL << 62) - 256,
                                    INT64_MAX,
                                    INT64_MIN,
                                    INT64_MAX / 8 };
enum { EXTREMES = sizeof extremes / sizeof *extremes };

static uint32_t noise = 17;

static int64_t extreme(void) {
    noise = noise * 1664525u + 1013904223u;
    return extremes[(noise >> 8) % EXTREMES];
}

/* A number of the desc: mostly what it was, so that one that is wrong is not refused because of another. */
static int64_t perhaps(int64_t number) {
    noise = noise * 1664525u + 1013904223u;
    return (noise >> 8) % 3 == 0 ? extreme() : number;
}

static void disturb(xd_rows *rows) {
    rows->rows = perhaps(rows->rows);
    rows->cols = perhaps(rows->cols);
    rows->stride = perhaps(rows->stride);
}

/* 0, or at least this many. */
static bool holds(size_t bytes, double rows, double each) {
    return bytes == 0 || (double)bytes >= rows * each;
}

XD_TEST(workspaces_of_any_numbers_are_0_or_large_enough) {
    xsizes *s = (xsizes *)calloc(1, sizeof *s);
    static float somewhere[64];
    int64_t sized = 0, refused = 0;
    CHECK(xd_ctx_create(NULL, &s->base.ctx) == XD_OK);
    xd_ctx *ctx = s->base.ctx;
    xd_loss_values values;
    xd_xtoken_values xtoken;
    s->base.ranks = 1;
    xsizes_open(s);
    for (int i = 0; i < 40000; i++) {
        xsizes_set_xtoken(s, i % XKINDS);
        xd_xtoken_desc *x = &s->xtoken[i % XKINDS];
        xd_xtoken_teacher *teacher = &s->teacher[i % XKINDS];
        xd_loss_desc loss = { .vocab = s->vocab, .soft_weight = 1.0, .student = xrows(somewhere, XR, XV) };
        xd_topk_desc topk = { .vocab = s->vocab, .k = 3, .student = xrows(somewhere, XR, XV) };
        xd_head_loss_desc head = { .loss = { .vocab = s->vocab, .hard_weight = 1.0 } };
        loss.teacher = loss.student;
        if (i % 2) topk.teacher = topk.student;
        loss.divergence = i % 3 ? XD_KL_FORWARD : XD_JSD;
        head.student.hidden = xrows(somewhere, XR, 8);
        head.student.weight = xrows(somewhere, XV, 8);
        if (i % 2) head.teacher = head.student;
        if (i % 4 == 1) head.hidden_gradient = head.student.hidden;
        disturb(&loss.student), disturb(&loss.teacher), disturb(&topk.student), disturb(&topk.teacher);
        disturb(&head.student.hidden), disturb(&head.student.weight), disturb(&head.teacher.hidden);
        disturb(&head.hidden_gradient), disturb(&x->student), disturb(&teacher->logits);
        topk.k = perhaps(topk.k), head.chunk_rows = perhaps(256);
        x->sequences = perhaps(x->sequences), x->columns = perhaps(x->columns), x->tail = perhaps(x->tail);
        x->tile = perhaps(x->tile), teacher->chunks = perhaps(teacher->chunks);
        teacher->vocabulary = perhaps(teacher->vocabulary);
        if (i % 7 == 0) x->mode = XD_XTOKEN_AVERAGED_LOGITS;
        if (i % 5 == 0) x->score = XD_XTOKEN_SCORE_CE;
        loss.common.labels = topk.common.labels = head.loss.common.labels =
            xd_ids_of(somewhere, XD_DTYPE_I32);
        const size_t bytes[4] = { PLANNED_WORKSPACE(ctx, xd_loss(ctx, &loss, &values)),
                                  PLANNED_WORKSPACE(ctx, xd_topk_kl_loss(ctx, &topk, &values)),
                                  PLANNED_WORKSPACE(ctx, xd_head_loss(ctx, &head, &values)),
                                  PLANNED_WORKSPACE(ctx, xd_xtoken_loss(ctx, x, &xtoken)) };
        CHECK(holds(bytes[0], (double)loss.student.rows, 24.0));
        CHECK(holds(bytes[1], (double)topk.student.rows, 8.0 * (double)topk.k));
        CHECK(holds(bytes[2], (double)head.student.hidden.rows, 8.0));
        CHECK(holds(bytes[3], (double)x->student.rows, 33.0));
        for (int j = 0; j < 4; j++) sized += bytes[j] > 0, refused += bytes[j] == 0;
    }
    CHECK(sized > 10000 && refused > 10000);
    xsizes_close(s);
    xd_ctx_destroy(s->base.ctx);
    free(s);
}

/* Layouts of large shapes, any rank, any dtype. */
XD_TEST(tensors_of_any_numbers_have_0_bytes_or_all) {
    const xd_topology topology = line_of("dp", 3);
    xd_ctx *ctx = NULL;
    int64_t made = 0;
    CHECK(xd_ctx_create(&(xd_ctx_desc){ .log_level = XD_LOG_NONE }, &ctx) == XD_OK);
    for (int i = 0; i < 4000; i++) {
        xd_layout *layout = NULL;
        xd_layout_desc d = { .ndim = 1 + i % 3, .topology = &topology };
        for (int j = 0; j < d.ndim; j++) d.shape[j] = extreme();
        d.placement[0].kind = i % 2 ? XD_SHARD : XD_REPLICATE;
        d.placement[0].sections = (int)perhaps(1);
        const xd_result result = xd_layout_create(ctx, &d, &layout);
        CHECK((result == XD_OK) == (layout != NULL));
        for (int rank = -1; rank < 4 && layout; rank++)
            for (int dtype = -1; dtype <= (int)XD_DTYPE_COUNT; dtype++) {
                const xd_tensor view = xd_tensor_view(layout, rank, NULL, XD_DTYPE_F32);
                const size_t size = xd_dtype_size((xd_dtype)dtype);
                const size_t count = (size_t)xd_tensor_numel(&view);
                const bool fits = size == 0 || count <= SIZE_MAX / size;
                CHECK(xdi_tensor_bytes(layout, rank, (xd_dtype)dtype) == (fits ? count * size : 0));
            }
        made += layout != NULL;
        xd_layout_destroy(layout);
    }
    CHECK(made > 100);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
