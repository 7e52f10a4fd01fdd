/* Whole losses across tokenizers on a GPU: against the CPU's, and on many ranks against one. */
#include "cuda_test.h"

static xd_result either_loss(xd_ctx *ctx, const xd_xtoken_desc *desc, xd_xtoken_values *out);

#define XTOKEN_LOSS either_loss
#include "planned.h"
#include "xtoken_mesh.h"

#include <unistd.h>

/* How the next calls are made; between calls of a test, while no rank runs, it changes. */
static struct Form { bool on_gpu = true, bf16 = false, uploaded = false, own_workspace = false, narrow = false; } form;

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

/* The same labels in 32 bits. */
static void narrow_ids(xd_ids *ids, int64_t count, std::vector<int32_t> *labels) {
    if (!ids->data) return;
    for (int64_t i = 0; i < count; i++) labels->push_back((int32_t)xd_id_at(*ids, i));
    *ids = xd_ids_of(labels->data(), XD_DTYPE_I32);
}

static xd_result call_loss(xd_ctx *ctx, const xd_xtoken_desc *desc, xd_xtoken_values *out) {
    Arrays arrays;
    Device *workspace = nullptr;
    xd_projection near[3] = {};
    xd_xtoken_desc d = *desc;
    std::vector<xd_xtoken_teacher> teachers(desc->teachers, desc->teachers + desc->teacher_count);
    d.teachers = teachers.data();
    std::vector<int32_t> labels[4];
    if (form.narrow) narrow_ids(&d.common.labels, d.student.rows, &labels[3]);
    for (size_t i = 0; i < teachers.size() && form.narrow; i++)
        narrow_ids(&teachers[i].labels, teachers[i].logits.rows, &labels[i]);
    d.student = arrays.bring(d.student);
    d.common.gradient = arrays.bring(d.common.gradient);
    for (size_t i = 0; i < teachers.size(); i++) {
        teachers[i].logits = arrays.bring(teachers[i].logits);
        if (!form.uploaded) continue;
        const xd_projection **projection = teachers[i].kind == XD_XTOKEN_CACHED
                                               ? &teachers[i].cached.projection
                                               : &teachers[i].projected.projection;
        if (!*projection) continue;
        CHECK(xd_projection_upload(ctx, *projection, &near[i]) == XD_OK);
        *projection = &near[i];
    }
    const Device scale(std::vector<double>(1, d.common.scale ? *d.common.scale : 1.0));
    const Device denominator(
        std::vector<xd_denominator>(1, d.common.denominator ? *d.common.denominator : xd_denominator()));
    if (form.own_workspace && form.on_gpu) {
        if (d.common.scale) d.common.scale = scale.at<double>();
        if (d.common.denominator) d.common.denominator = denominator.at<xd_denominator>();
        d.common.workspace_bytes = PLANNED_WORKSPACE(ctx, xd_xtoken_loss(ctx, &d, out));
        workspace = new Device(std::vector<unsigned char>(d.common.workspace_bytes, 0xff));
        d.common.workspace = workspace->at<void>();
    }
    const xd_result result = xd_xtoken_loss(ctx, &d, out);
    if (result == XD_OK) arrays.take_home(desc->common.gradient.data);
    for (xd_projection &one : near) xd_projection_unload(ctx, &one);
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
    CHECK(vocab_of(ctx, info.tp, { info.begin, info.end }, info.size, &vocab) == XD_OK);
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

/* The scale and the denominator lie on the host or, with the workspace, on the GPU. */
XD_TEST(masks_scales_and_denominators_are_those_of_the_cpu) {
    for (int way = 0; way < 6; way++) {
        const double scale = way == 4 ? (double)NAN : 2.5;
        const xd_denominator denominator = { 7.0, way == 5 ? 0.0 : 1.0 / 7.0, 7, 0 };
        uint8_t mask[STUDENT_ROWS];
        problem p;
        memset(mask, 1, sizeof mask);
        mask[3] = mask[8] = 0;
        open_problem(&p, way % 2 ? XD_XTOKEN_SAME : XD_XTOKEN_PROJECTED);
        p.settings.common.mask = mask;
        p.settings.common.scale = &scale;
        p.settings.common.denominator = &denominator;
        form.own_workspace = way / 2 == 1 || way == 5;
        form.narrow = way % 3 == 0;
        compare(&p);
        form = Form();
        close_problem(&p);
    }
}

/* ---- teachers of one tokenizer ---- */

XD_TEST(one_tokenizer_is_compared_as_on_the_cpu) {
    for (int way = 0; way < 16; way++) {
        problem p;
        open_problem_as(&p, XD_XTOKEN_SAME,
                        way / 4 % 2 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        p.settings.columns = way % 3 == 0 ? 99 : way % 3 == 1 ? 8 : 1; /* all, some, one */
        p.settings.reverse = way % 2 == 1;
        p.settings.compat = way / 2 % 2 == 1;
        p.settings.balance = way / 8 % 2 == 1;
        p.settings.tile = way % 5;
        form.bf16 = way % 7 == 3;
        form.own_workspace = way % 3 == 2;
        compare(&p);
        form = Form();
        close_problem(&p);
    }
}

XD_TEST(logits_are_averaged_as_on_the_cpu) {
    for (int reverse = 0; reverse < 2; reverse++) {
        problem p;
        open_problem(&p, XD_XTOKEN_SAME);
        p.kinds[1] = p.kinds[2] = XD_XTOKEN_SAME;
        p.teacher_count = 3;
        p.settings.mode = XD_XTOKEN_AVERAGED_LOGITS;
        p.settings.reverse = reverse == 1;
        compare(&p);
        close_problem(&p);
    }
}

/* A row that is NaN on either side, columns of no probability, rows that do not count. */
XD_TEST(odd_rows_of_one_tokenizer_have_the_findings_of_the_cpu) {
    for (int way = 0; way < 4; way++) {
        problem p;
        open_problem_as(&p, XD_XTOKEN_SAME, way / 2 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        p.settings.columns = way % 2 ? 8 : 99;
        for (int t = 0; t < STUDENT_ROWS; t++) p.same[t * STUDENT_SIZE + 2] = -INFINITY;
        p.same[4 * STUDENT_SIZE] = NAN;
        p.student[9 * STUDENT_SIZE] = NAN;
        p.labels[2] = STUDENT_SIZE;
        compare(&p);
        close_problem(&p);
    }
}

/* ---- teachers that ran before ---- */

/* The problem's teacher, or the one of the student's own tokenizer, in a cache whose tokens are the labels. */
static void make_cache(problem *p, bool same, xd_cache_coding coding, int64_t k) {
    const int length = same ? STUDENT_LENGTH : TEACHER_LENGTH, size = same ? STUDENT_SIZE : TEACHER_SIZE;
    float *logits = same ? p->same : p->teacher;
    const int64_t *labels = same ? p->labels : p->teacher_labels;
    const std::string path = "/tmp/xdistill-test-cuda-" + std::to_string((long)getpid());
    int32_t ids[TEACHER_LENGTH], next[TEACHER_LENGTH];
    xd_teacher_cache_desc desc = {};
    xd_teacher_cache_writer *w = nullptr;
    desc.vocabulary = size;
    desc.temperature = p->settings.temperature;
    desc.k = k;
    desc.coding = coding;
    desc.teacher_hash = 77;
    CHECK(cache_writer_create(p->ctx, path.c_str(), &desc, &w) == XD_OK);
    for (int b = 0; b < SEQUENCES; b++) {
        xd_teacher_cache_block block = {};
        for (int i = 0; i < length; i++) {
            ids[i] = i == 0 ? 1 : next[i - 1];
            next[i] = i == length - 1 ? -1 : (int32_t)labels[b * length + i];
        }
        block.logits = rows_of(logits + b * length * size, length, size);
        block.ids = ids;
        block.next = next;
        CHECK(xd_teacher_cache_writer_document(w, nullptr, 0) == XD_OK);
        CHECK(xd_teacher_cache_writer_append(w, &block) == XD_OK);
    }
    CHECK(xd_teacher_cache_writer_commit(w) == XD_OK);
    CHECK(cache_open(p->ctx, path.c_str(), nullptr, &p->cache) == XD_OK);
    remove(path.c_str());
    for (int i = 0; i < SEQUENCES * length; i++)
        p->cache_positions[i] = i % length == length - 1 ? -1 : i; /* the last predicts nothing */
}

static void open_cached(problem *p, xd_reduction reduction, xd_cache_coding coding) {
    open_problem_as(p, XD_XTOKEN_CACHED, reduction);
    make_cache(p, false, coding, 3);
}

XD_TEST(cached_chunks_are_those_of_the_cpu) {
    for (int way = 0; way < 16; way++) {
        problem p;
        open_cached(&p, way / 4 % 2 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC,
                    (xd_cache_coding)(way % 3));
        p.settings.reverse = way % 2 == 1;
        p.settings.exact_only = way % 3 == 1;
        p.settings.balance = way / 8 % 2 == 1;
        p.settings.tile = way % 5;
        p.mask[1] = (uint8_t)(way % 4 != 2);
        form.bf16 = way % 7 == 3;
        form.uploaded = form.own_workspace = way % 3 == 2;
        compare(&p);
        form = Form();
        close_problem(&p);
    }
}

/* One tokenizer: a chunk is a position, and there is no projection. */
XD_TEST(cached_positions_need_no_projection) {
    for (int way = 0; way < 4; way++) {
        problem p;
        call c[2];
        open_problem_as(&p, XD_XTOKEN_CACHED, way / 2 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        make_cache(&p, true, XD_CACHE_F32, way % 2 ? STUDENT_SIZE : 4);
        p.settings.reverse = way % 2 == 1;
        xd_xtoken_values values[2];
        for (int i = 0; i < STUDENT_ROWS; i++)
            p.student_chunks[i] = i % STUDENT_LENGTH < CHUNKS ? i % STUDENT_LENGTH : -1;
        for (int gpu = 0; gpu < 2; gpu++) {
            form.on_gpu = gpu == 1;
            open_call(&p, &c[gpu]);
            c[gpu].teachers[0].logits.rows = STUDENT_ROWS;
            c[gpu].teachers[0].teacher_chunks = p.student_chunks;
            c[gpu].teachers[0].cached.projection = nullptr;
            values[gpu] = run_call(&p, &c[gpu]);
            xd_vocab_destroy(c[gpu].vocab);
        }
        form = Form();
        CHECK_NEAR(values[1].loss, values[0].loss, 3e-6 * fabs(values[0].loss));
        CHECK(values[0].kd > 0.0 && c[0].teacher_values[0].compared == c[1].teacher_values[0].compared);
        for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++)
            CHECK_NEAR(c[1].gradient[i], c[0].gradient[i], 3e-6);
        close_problem(&p);
    }
}

/* A row that is NaN spoils its chunk; sequences that do not count, no chunk at all. */
XD_TEST(odd_cached_chunks_have_the_findings_of_the_cpu) {
    for (int way = 0; way < 8; way++) {
        problem p;
        open_cached(&p, way / 4 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC, XD_CACHE_8_BITS);
        p.student[4 * STUDENT_SIZE] = NAN;
        p.labels[2] = STUDENT_SIZE;
        p.settings.tile = 2;
        if (way % 2) p.sample_weight[1] = 0.0f;
        if (way / 2 % 2) memset(p.mask, 0, sizeof p.mask);
        compare(&p);
        close_problem(&p);
    }
}

/* ---- likelihoods ---- */

/* From logits, from given numbers, or from a cache. */
static void open_likelihood(problem *p, xd_reduction reduction, int way) {
    open_problem_as(p, XD_XTOKEN_LIKELIHOOD, reduction);
    p->likelihood = (xd_likelihood_form)(way & 1);
    p->lengths = (way & 2) != 0;
    p->known = way % 3 == 1;
    for (int i = 0; i < SEQUENCES * CHUNKS; i++) p->chunk_length[i] = (float)(1 + i % 4);
    for (int i = 0; i < TEACHER_ROWS; i++) p->target_log_probs[i] = -0.25f * (float)(1 + i % 7);
    if (way % 3 == 2) make_cache(p, false, XD_CACHE_16_BITS, 3);
}

XD_TEST(likelihoods_are_those_of_the_cpu) {
    for (int way = 0; way < 24; way++) {
        problem p;
        open_likelihood(&p, way / 4 % 2 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC, way);
        p.settings.reverse = way / 8 % 2 == 1;
        p.settings.exact_only = way % 5 == 1;
        p.settings.balance = way % 7 == 2;
        form.bf16 = way % 7 == 3;
        form.own_workspace = way % 2 == 1;
        compare(&p);
        form = Form();
        close_problem(&p);
    }
}

/* Labels outside, a row that is NaN on either side, an impossible token. */
XD_TEST(odd_likelihoods_have_the_findings_of_the_cpu) {
    for (int way = 0; way < 6; way++) {
        problem p;
        open_likelihood(&p, way / 3 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC, way);
        p.student[4 * STUDENT_SIZE] = NAN;
        p.teacher[11 * TEACHER_SIZE] = NAN;
        p.labels[8] = STUDENT_SIZE;
        p.target_log_probs[2] = -INFINITY;
        compare(&p);
        close_problem(&p);
    }
}

/* ---- several teachers ---- */

XD_TEST(teachers_of_all_kinds_add_up_as_on_the_cpu) {
    static const xd_xtoken_kind others[6][2] = {
        { XD_XTOKEN_SAME, XD_XTOKEN_PROJECTED },  { XD_XTOKEN_GOLD, XD_XTOKEN_LIKELIHOOD },
        { XD_XTOKEN_LIKELIHOOD, XD_XTOKEN_SAME }, { XD_XTOKEN_CACHED, XD_XTOKEN_LIKELIHOOD },
        { XD_XTOKEN_PROJECTED, XD_XTOKEN_GOLD },  { XD_XTOKEN_SAME, XD_XTOKEN_SAME }
    };
    for (int way = 0; way < 12; way++) {
        problem p;
        open_cached(&p, way % 4 / 2 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC, XD_CACHE_16_BITS);
        p.kinds[1] = others[way % 6][0];
        p.kinds[2] = others[way % 6][1];
        p.teacher_count = 3;
        if (way >= 9) p.settings.mode = XD_XTOKEN_SELECT;
        if (way / 3 == 2) p.settings.score = XD_XTOKEN_SCORE_CE;
        p.settings.normalise_by_vocabulary = way / 3 == 2;
        p.settings.balance = way % 5 == 0;
        compare(&p);
        close_problem(&p);
    }
}

/* Scores of what has logits. */
XD_TEST(one_tokenizer_and_likelihoods_are_scored_as_on_the_cpu) {
    for (int score = 1; score < 4; score++) {
        problem p;
        open_likelihood(&p, XD_REDUCTION_DETERMINISTIC, 0);
        p.kinds[1] = XD_XTOKEN_SAME;
        p.teacher_count = 2;
        p.settings.score = (xd_xtoken_score)score;
        compare(&p);
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
    given.teachers[0].projected.column_ids = ids;
    const xd_xtoken_values b = run_call(&p, &given);
    CHECK(a.loss == b.loss && memcmp(whole.gradient, given.gradient, sizeof whole.gradient) == 0);
    xd_vocab_destroy(whole.vocab);
    xd_vocab_destroy(given.vocab);
    close_problem(&p);
}

/* On a GPU every problem meets every mesh, as on the CPU. On the emulation, where they are most of its time, a mesh of ranks on
 * their own and one in order: `turn` counts from where the test before ended, two reductions of a problem beside each other, so
 * that each mesh is met with both, and kernels of each kind of teacher with several meshes. */
static void meet_meshes(problem *p, int turn) {
#if defined(XD_EMU)
    check_some_meshes(p, turn);
#else
    (void)turn;
    check_meshes(p);
#endif
}

XD_TEST(every_mesh_has_the_loss_and_gradient_of_one_rank) {
    for (int way = 0; way < 4; way++) {
        problem p;
        open_problem_as(&p, way / 2 ? XD_XTOKEN_GOLD : XD_XTOKEN_PROJECTED,
                        way % 2 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        p.settings.reverse = p.settings.balance = way % 3 == 1;
        p.settings.tile = 2 + way;
        meet_meshes(&p, way);
        close_problem(&p);
    }
}

XD_TEST(every_mesh_compares_one_tokenizer_and_likelihoods_alike) {
    for (int way = 0; way < 8; way++) {
        problem p;
        const xd_reduction reduction = way % 2 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC;
        if (way < 4)
            open_problem_as(&p, XD_XTOKEN_SAME, reduction);
        else
            open_likelihood(&p, reduction, way);
        p.settings.columns = way < 2 ? 99 : 8;
        p.settings.reverse = p.settings.balance = way % 3 == 1;
        p.settings.tile = way % 4;
        meet_meshes(&p, 4 + way);
        close_problem(&p);
    }
}

XD_TEST(every_mesh_reads_a_cache_alike) {
    for (int way = 0; way < 4; way++) {
        problem p;
        open_cached(&p, way % 2 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC,
                    way / 2 ? XD_CACHE_F32 : XD_CACHE_8_BITS);
        p.settings.reverse = p.settings.balance = way % 3 == 1;
        p.settings.tile = way;
        meet_meshes(&p, 12 + way);
        close_problem(&p);
    }
}

XD_TEST(every_mesh_averages_logits_alike) {
    problem p;
    open_problem_as(&p, XD_XTOKEN_SAME, XD_REDUCTION_INVARIANT);
    p.kinds[1] = XD_XTOKEN_SAME;
    p.teacher_count = 2;
    p.settings.mode = XD_XTOKEN_AVERAGED_LOGITS;
    meet_meshes(&p, 16);
    close_problem(&p);
}

XD_TEST(every_mesh_weighs_several_teachers_alike) {
    for (int cached = 0; cached < 2; cached++) {
        problem p;
        open_cached(&p, XD_REDUCTION_INVARIANT, XD_CACHE_16_BITS);
        p.kinds[0] = cached ? XD_XTOKEN_CACHED : XD_XTOKEN_PROJECTED;
        p.kinds[1] = cached ? XD_XTOKEN_LIKELIHOOD : XD_XTOKEN_GOLD;
        p.kinds[2] = XD_XTOKEN_SAME;
        p.teacher_count = 3;
        p.settings.score = cached ? XD_XTOKEN_SCORE_CE : XD_XTOKEN_SCORE_ENTROPY;
        meet_meshes(&p, 18 + 2 * cached);
        close_problem(&p);
    }
}

/* More ranks than a sequence has positions: one of them has none of the student's. */
XD_TEST(ranks_without_positions_take_part) {
    for (int way = 0; way < 10; way++) {
        problem p;
        call one;
        open_cached(&p, way % 2 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC, XD_CACHE_8_BITS);
        p.kinds[0] = (xd_xtoken_kind)(way / 2);
        open_call(&p, &one);
        const xd_xtoken_values whole = run_call(&p, &one);
#if defined(XD_EMU) /* each kind of teacher on its own and in order, with one reduction each */
        check_mesh(&p, &one, &whole, 1, 8, 1, (way + way / 2) % 2 == 1);
#else
        check_mesh(&p, &one, &whole, 1, 8, 1, false);
        check_mesh(&p, &one, &whole, 1, 8, 1, true);
#endif
        xd_vocab_destroy(one.vocab);
        close_problem(&p);
    }
}

/* One rank alone has a wrong chunk id: every rank is told, and none waits. */
XD_TEST(ranks_fail_alike_when_one_has_a_bad_input) {
    problem p;
    xd_error error;
    mesh_job *job = (mesh_job *)calloc(1, sizeof *job);
    open_cached(&p, XD_REDUCTION_DETERMINISTIC, XD_CACHE_8_BITS);
    job->p = &p;
    job->dp = job->cp = job->tp = 2;
    job->spoilt = 5;
    CHECK(xd_run_threads(8, nullptr, mesh_body, job, &error) == XD_OK);
    for (int r = 0; r < 8; r++)
        CHECK(job->results[r] == (r == job->spoilt ? XD_ERROR_ARGUMENT : XD_ERROR_PEER));
    free(job);
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
    xd_projection_unload(p.ctx, &near);
    xd_projection_unload(p.ctx, &near); /* empty by now */
    xd_cuda_destroy(cuda);
    close_problem(&p);
}

/* In every kind, and nothing is written. */
XD_TEST(bad_teachers_and_small_workspaces_are_refused) {
    for (int kind = 0; kind < 5; kind++) {
        problem p;
        call c;
        xd_xtoken_values values;
        open_cached(&p, XD_REDUCTION_DETERMINISTIC, XD_CACHE_8_BITS);
        p.kinds[0] = (xd_xtoken_kind)kind;
        open_call(&p, &c);
        c.d.common.workspace = &p; /* not looked at */
        c.d.common.workspace_bytes = 100;
        values.loss = 42.0;
        CHECK(either_loss(p.ctx, &c.d, &values) == XD_ERROR_ARGUMENT);
        c.d.common.workspace = nullptr;
        if (kind == XD_XTOKEN_SAME) c.teachers[0].logits.rows--;
        if (kind == XD_XTOKEN_CACHED) c.d.temperature = 2.0;
        if (kind == XD_XTOKEN_LIKELIHOOD) c.d.common.labels.data = nullptr;
        if (kind == XD_XTOKEN_PROJECTED) c.teachers[0].projected.projection = nullptr;
        if (kind == XD_XTOKEN_GOLD) c.teachers[0].gold.map = nullptr;
        const xd_result result = either_loss(p.ctx, &c.d, &values);
        CHECK(result == XD_ERROR_ARGUMENT || (kind == XD_XTOKEN_SAME && result == XD_ERROR_SHAPE));
        CHECK(values.loss == 42.0 && c.gradient[0] == 0.0f);
        xd_vocab_destroy(c.vocab);
        close_problem(&p);
    }
}

XD_CUDA_TEST_MAIN()
