/* Whole losses across tokenizers on a GPU: against the CPU's, and on many ranks against one. */
#include "cuda_test.h"

static xd_result either_loss(xd_ctx *ctx, const xd_xtoken_desc *desc, xd_xtoken_values *out);

#define XTOKEN_LOSS either_loss
#include "xtoken_mesh.h"

/* How the next calls are made; between calls of a test, while no rank runs, it changes. */
static struct Form {
    bool on_gpu = true, bf16 = false, uploaded = false, own_workspace = false;
} form;

/* Arrays of a call in the dtype of the form, on the host or on the GPU. What has one address has one copy. */
struct Arrays {
    struct One {
        float *from;
        int64_t count;
        std::vector<unsigned char> bytes;
        Device *device;
    };
    std::vector<One> all;
    ~Arrays() {
        for (const One &one : all) delete one.device;
    }

    xd_rows bring(xd_rows rows) {
        const xd_dtype dtype = form.bf16 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
        float *from = (float *)rows.data;
        if (!from) return rows;
        rows.dtype = dtype;
        for (One &one : all)
            if (one.from == from) {
                rows.data = one.device ? one.device->at<void>() : one.bytes.data();
                return rows;
            }
        One one = { from, rows.rows * rows.cols, {}, nullptr };
        one.bytes.resize((size_t)one.count * xd_dtype_size(dtype) + 1);
        for (int64_t i = 0; i < one.count; i++) xd_store_f64(one.bytes.data(), dtype, i, from[i]);
        if (form.on_gpu) one.device = new Device(one.bytes);
        all.push_back(std::move(one));
        return bring(rows);
    }
    /* The gradient back to where the caller has it. */
    void take_home(const void *gradient) {
        const xd_dtype dtype = form.bf16 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
        for (One &one : all) {
            if (one.from != gradient) continue;
            if (one.device) one.bytes = one.device->host<unsigned char>();
            for (int64_t i = 0; i < one.count; i++)
                one.from[i] = (float)xd_load_f64(one.bytes.data(), dtype, i);
        }
    }
};

static xd_result call_loss(xd_ctx *ctx, const xd_xtoken_desc *desc, xd_xtoken_values *out) {
    Arrays arrays;
    Device *workspace = nullptr;
    xd_projection near[3] = {};
    xd_xtoken_desc d = *desc;
    std::vector<xd_xtoken_teacher> teachers(desc->teachers, desc->teachers + desc->teacher_count);
    d.teachers = teachers.data();
    d.student = arrays.bring(d.student);
    d.gradient = arrays.bring(d.gradient);
    for (size_t i = 0; i < teachers.size(); i++) {
        teachers[i].logits = arrays.bring(teachers[i].logits);
        if (!form.uploaded) continue;
        if (teachers[i].kind != XD_XTOKEN_PROJECTED) continue;
        CHECK(xd_projection_upload(ctx, teachers[i].projection, &near[i]) == XD_OK);
        teachers[i].projection = &near[i];
    }
    if (form.own_workspace && form.on_gpu) {
        d.workspace_bytes = xd_xtoken_workspace_bytes(&d);
        workspace = new Device(std::vector<unsigned char>(d.workspace_bytes, 0xff));
        d.workspace = workspace->at<void>();
    }
    const xd_result result = xd_xtoken_loss(ctx, &d, out);
    if (result == XD_OK) arrays.take_home(desc->gradient.data);
    for (xd_projection &one : near) xd_projection_drop(ctx, &one);
    delete workspace;
    return result;
}

/* The context has a GPU for the length of the call, and a vocabulary of its own there. */
static xd_result either_loss(xd_ctx *ctx, const xd_xtoken_desc *desc, xd_xtoken_values *out) {
    const xd_vocab_info info = xd_vocab_describe(desc->vocab);
    xd_xtoken_desc d = *desc;
    xd_cuda *cuda = nullptr;
    xd_vocab *vocab = nullptr;
    cudaStream_t stream = nullptr;
    if (!form.on_gpu) return call_loss(ctx, desc, out);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    xd_ctx_set_stream(ctx, stream);
    CHECK(xd_cuda_create(ctx, nullptr, &cuda) == XD_OK);
    CHECK(xd_vocab_create(ctx, info.tp, info.begin, info.end, info.size, &vocab) == XD_OK);
    d.vocab = vocab;
    const xd_result result = call_loss(ctx, &d, out);
    xd_vocab_destroy(vocab);
    xd_cuda_destroy(cuda);
    xd_ctx_set_stream(ctx, nullptr);
    cudaStreamDestroy(stream);
    return result;
}

/* One rank on both sides. */
static void compare(problem *p) {
    call c[2];
    xd_xtoken_values values[2];
    double most = 1e-30;
    for (int gpu = 0; gpu < 2; gpu++) {
        form.on_gpu = gpu == 1;
        open_call(p, &c[gpu]);
        values[gpu] = run_call(p, &c[gpu]);
        xd_vocab_destroy(c[gpu].vocab);
    }
    const double near = 3e-6 * fmax(1.0, fabs(values[0].loss));
    CHECK_NEAR(values[1].loss, values[0].loss, near);
    CHECK_NEAR(values[1].kd, values[0].kd, near);
    CHECK_NEAR(values[1].ce, values[0].ce, near);
    CHECK_NEAR(values[1].balance, values[0].balance, near);
    CHECK(values[1].right == values[0].right && values[1].tokens == values[0].tokens);
    CHECK(values[1].selected == values[0].selected);
    for (int i = 0; i < p->teacher_count; i++) {
        const xd_xtoken_teacher_values *a = &c[0].teacher_values[i], *b = &c[1].teacher_values[i];
        CHECK_NEAR(b->divergence, a->divergence, near);
        CHECK_NEAR(b->tail, a->tail, near);
        CHECK_NEAR(b->weight, a->weight, 1e-6);
        CHECK(b->agreeing == a->agreeing && b->compared == a->compared && b->denominator == a->denominator);
    }
    CHECK(c[1].status.not_finite == c[0].status.not_finite);
    CHECK(c[1].status.label_out_of_range == c[0].status.label_out_of_range);
    CHECK(c[1].status.nothing_counted == c[0].status.nothing_counted);
    CHECK(c[1].status.first_row == c[0].status.first_row);
    for (float g : c[0].gradient) most = fmax(most, fabs((double)g));
    for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++)
        CHECK_NEAR(c[1].gradient[i], c[0].gradient[i], (form.bf16 ? 0.004 : 3e-6) * most);
}

XD_TEST(loss_and_gradient_are_those_of_the_cpu) {
    for (int way = 0; way < 24; way++) {
        problem p;
        open_problem_as(&p, way % 5 < 2 ? XD_XTOKEN_GOLD : XD_XTOKEN_PROJECTED,
                        way / 8 % 2 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        p.settings.reverse = way % 2 == 1;
        p.settings.compat = way / 2 % 2 == 1;
        p.settings.exact_only = way % 3 == 1;
        p.settings.balance = way / 4 % 2 == 1;
        p.settings.tile = way % 5;
        form.bf16 = way % 7 == 3;
        form.uploaded = form.own_workspace = way % 3 == 2;
        compare(&p);
        form = Form();
        close_problem(&p);
    }
}

XD_TEST(several_teachers_are_weighed_as_on_the_cpu) {
    for (int score = 0; score < 5; score++) {
        problem p;
        open_problem(&p, XD_XTOKEN_PROJECTED);
        p.kinds[1] = score % 2 ? XD_XTOKEN_GOLD : XD_XTOKEN_PROJECTED;
        p.teacher_count = 2;
        if (score < 4) p.settings.score = (xd_xtoken_score)score;
        if (score == 4) p.settings.mode = XD_XTOKEN_SELECT;
        p.settings.normalise_by_vocabulary = score == 1;
        compare(&p);
        close_problem(&p);
    }
}

/* A row that is NaN, columns of no probability, a label outside, weights of zero, no labels. */
XD_TEST(odd_inputs_have_the_findings_of_the_cpu) {
    for (int way = 0; way < 8; way++) {
        problem p;
        open_problem_as(&p, way / 4 ? XD_XTOKEN_GOLD : XD_XTOKEN_PROJECTED,
                        way / 2 % 2 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        for (int t = 0; t < TEACHER_ROWS; t++) p.teacher[t * TEACHER_SIZE + 2] = -INFINITY;
        p.student[4 * STUDENT_SIZE] = NAN;
        if (way % 2) p.labels[2] = STUDENT_SIZE;
        if (way % 2) p.sample_weight[1] = 0.0f;
        compare(&p);
        close_problem(&p);
    }
}

XD_TEST(nothing_that_counts_is_zero) {
    problem p;
    open_problem(&p, XD_XTOKEN_PROJECTED);
    memset(p.mask, 0, sizeof p.mask);
    for (int i = 0; i < STUDENT_ROWS; i++) p.labels[i] = XD_IGNORE_INDEX;
    compare(&p);
    close_problem(&p);
}

/* Columns chosen where the teacher ran: its rows hold these alone. */
XD_TEST(given_columns_are_those_chosen_here) {
    problem p;
    call whole, given;
    int64_t ids[SEQUENCES * 4];
    float chosen[TEACHER_ROWS * 4];
    open_problem(&p, XD_XTOKEN_PROJECTED);
    p.settings.columns = 4;
    for (int i = 0; i < TEACHER_ROWS; i++)
        for (int j = 0; j < 4; j++) {
            const int64_t id = 1 + 2 * j + i / TEACHER_LENGTH;
            ids[i / TEACHER_LENGTH * 4 + j] = id;
            chosen[i * 4 + j] = p.teacher[i * TEACHER_SIZE + id] += 9.0f; /* the largest by far */
        }
    open_call(&p, &whole);
    const xd_xtoken_values a = run_call(&p, &whole);
    open_call(&p, &given);
    given.teachers[0].logits = rows_of(chosen, TEACHER_ROWS, 4);
    given.teachers[0].column_ids = ids;
    const xd_xtoken_values b = run_call(&p, &given);
    CHECK(a.loss == b.loss && memcmp(whole.gradient, given.gradient, sizeof whole.gradient) == 0);
    xd_vocab_destroy(whole.vocab);
    xd_vocab_destroy(given.vocab);
    close_problem(&p);
}

XD_TEST(every_mesh_has_the_loss_and_gradient_of_one_rank) {
    for (int way = 0; way < 4; way++) {
        problem p;
        open_problem_as(&p, way / 2 ? XD_XTOKEN_GOLD : XD_XTOKEN_PROJECTED,
                        way % 2 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        p.settings.reverse = p.settings.balance = way % 3 == 1;
        p.settings.tile = 2 + way;
        check_meshes(&p);
        close_problem(&p);
    }
}

XD_TEST(every_mesh_weighs_several_teachers_alike) {
    problem p;
    open_problem_as(&p, XD_XTOKEN_PROJECTED, XD_REDUCTION_INVARIANT);
    p.kinds[1] = XD_XTOKEN_GOLD;
    p.teacher_count = 2;
    p.settings.score = XD_XTOKEN_SCORE_ENTROPY;
    check_meshes(&p);
    close_problem(&p);
}

/* What is on the GPU is not the host's to copy. */
XD_TEST(a_projection_is_uploaded_once) {
    problem p;
    xd_cuda *cuda = nullptr;
    xd_projection near = {}, again = {};
    open_problem(&p, XD_XTOKEN_PROJECTED);
    CHECK(xd_cuda_create(p.ctx, nullptr, &cuda) == XD_OK);
    CHECK(xd_projection_upload(p.ctx, &p.projection, &near) == XD_OK);
    CHECK(near.entries == p.projection.entries && near.row_begin != p.projection.row_begin);
    CHECK(xd_projection_upload(p.ctx, &near, &again) == XD_ERROR_ARGUMENT);
    CHECK(again.row_begin == nullptr);
    xd_projection_drop(p.ctx, &near);
    xd_projection_drop(p.ctx, &near); /* empty by now */
    xd_cuda_destroy(cuda);
    close_problem(&p);
}

XD_TEST(other_kinds_and_small_workspaces_are_refused) {
    problem p;
    call c;
    xd_xtoken_values values;
    open_problem(&p, XD_XTOKEN_SAME);
    open_call(&p, &c);
    CHECK(either_loss(p.ctx, &c.d, &values) == XD_ERROR_UNSUPPORTED);
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
    open_problem(&p, XD_XTOKEN_PROJECTED);
    open_call(&p, &c);
    c.d.workspace = &p; /* not looked at */
    c.d.workspace_bytes = 100;
    CHECK(either_loss(p.ctx, &c.d, &values) == XD_ERROR_ARGUMENT);
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

XD_CUDA_TEST_MAIN()
