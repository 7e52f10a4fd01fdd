/* Teachers that were run before: losses on a cache of their predictions, and on the likelihood of chunks. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "makers.h"
#include "vocab_calls.h"
#include "xd_test.h"
#include "xtoken_mesh.h"

#include <stdlib.h>
#include <unistd.h>

/* ---- a cache of the problem's teacher ---- */

enum { CACHED_IDS = 3 };

/* Writes `length` rows of each sequence as a document, whose tokens are the labels, and opens the cache. */
static void make_cache(problem *p, float *logits, const int64_t *labels, int length, int size,
                       xd_cache_coding coding) {
    char path[64];
    int32_t ids[TEACHER_LENGTH], next[TEACHER_LENGTH];
    xd_teacher_cache_desc desc;
    xd_teacher_cache_writer *w = NULL;
    snprintf(path, sizeof path, "/tmp/xdistill-test-chunks-%ld", (long)getpid());
    memset(&desc, 0, sizeof desc);
    desc.vocabulary = size;
    desc.temperature = p->settings.temperature;
    desc.k = CACHED_IDS;
    desc.coding = coding;
    desc.teacher_hash = 77;
    CHECK_EQ_INT(cache_writer_create(p->ctx, path, &desc, &w), XD_OK);
    for (int b = 0; b < SEQUENCES; b++) {
        xd_teacher_cache_block block;
        memset(&block, 0, sizeof block);
        for (int i = 0; i < length; i++) {
            ids[i] = i == 0 ? 1 : next[i - 1];
            next[i] = i == length - 1 ? -1 : (int32_t)labels[b * length + i];
        }
        block.logits = rows_of(logits + b * length * size, length, size);
        block.ids = ids;
        block.next = next;
        CHECK_EQ_INT(xd_teacher_cache_writer_document(w, NULL, 0), XD_OK);
        CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &block), XD_OK);
    }
    CHECK_EQ_INT(xd_teacher_cache_writer_commit(w), XD_OK);
    CHECK_EQ_INT(cache_open(p->ctx, path, NULL, &p->cache), XD_OK);
    remove(path);
    for (int i = 0; i < SEQUENCES * length; i++)
        p->cache_positions[i] = i % length == length - 1 ? -1 : i; /* the last predicts nothing */
}

static void open_cached(problem *p, xd_reduction reduction, xd_cache_coding coding) {
    open_problem_as(p, XD_XTOKEN_CACHED, reduction);
    make_cache(p, p->teacher, p->teacher_labels, TEACHER_LENGTH, TEACHER_SIZE, coding);
}

/* The student and its teacher speak the same tokens: a chunk is a position, there is no projection. */
static void open_same(problem *p) {
    open_problem_as(p, XD_XTOKEN_CACHED, XD_REDUCTION_DETERMINISTIC);
    make_cache(p, p->same, p->labels, STUDENT_LENGTH, STUDENT_SIZE, XD_CACHE_F32);
    for (int i = 0; i < STUDENT_ROWS; i++) {
        const int64_t at = i % STUDENT_LENGTH;
        p->student_chunks[i] = at < CHUNKS ? at : -1;
    }
}

static xd_xtoken_teacher same_teacher(problem *p) {
    xd_xtoken_teacher t = teacher_of(p, 0);
    t.logits.rows = STUDENT_ROWS;
    t.teacher_chunks = p->student_chunks;
    t.cached.projection = NULL;
    return t;
}

/* ---- what the loss says, by loops over everything ---- */

static double probability(const float *row, int size, int id, double temperature) {
    double sum = 0.0;
    for (int v = 0; v < size; v++) sum += exp((double)row[v] / temperature);
    return exp((double)row[id] / temperature) / sum;
}

/* p M of one student row, for every teacher id. */
static void project_row(const problem *p, int row, const xd_projection *m, double *out) {
    const float *x = p->student + row * STUDENT_SIZE;
    for (int u = 0; u < STUDENT_SIZE; u++) out[u] = 0.0;
    for (int v = 0; v < STUDENT_SIZE; v++) {
        const double q = probability(x, STUDENT_SIZE, v, p->settings.temperature);
        if (!m) out[v] += q;
        for (int64_t e = m ? m->row_begin[v] : 0; m && e < m->row_begin[v + 1]; e++)
            out[m->teacher_id[e]] += (double)m->weight[e] * q;
    }
}

static double divergence(const double *q, const double *a, bool reverse) {
    double value = 0.0, left_q = 1.0, left_a = 1.0;
    for (int u = 0; u <= STUDENT_SIZE; u++) {
        const bool tail = u == STUDENT_SIZE;
        if (!tail && a[u] == 0.0) continue; /* not in J */
        const double x = tail ? left_q : q[u], y = tail ? left_a : a[u];
        value += (reverse ? x : -y) * (log(x + 1e-10) - log(fmax(y, 0.0) + 1e-10));
        left_q -= x;
        left_a -= y;
    }
    return value;
}

/* Sum of w_c d(c), and D. */
static double cached_divergence(problem *p, const xd_xtoken_teacher *t, double *denominator) {
    double total = 0.0;
    *denominator = 0.0;
    for (int slot = 0; slot < SEQUENCES * CHUNKS; slot++) {
        const int b = slot / CHUNKS, c = slot % CHUNKS;
        double q[STUDENT_SIZE] = { 0 }, a[STUDENT_SIZE] = { 0 }, y[STUDENT_SIZE], students = 0.0,
               teachers = 0.0;
        for (int i = 0; i < STUDENT_ROWS; i++) {
            if (i / STUDENT_LENGTH != b || t->student_chunks[i] != c) continue;
            project_row(p, i, t->cached.projection, y);
            for (int u = 0; u < STUDENT_SIZE; u++) q[u] += y[u];
            students += 1.0;
        }
        for (int64_t i = 0; i < t->logits.rows; i++) {
            int32_t ids[CACHED_IDS];
            double probabilities[CACHED_IDS];
            if (i / (t->logits.rows / SEQUENCES) != b || t->teacher_chunks[i] != c) continue;
            CHECK_EQ_INT(cache_entries(p->ctx, p->cache, t->cached.positions[i], ids, probabilities), XD_OK);
            for (int j = 0; j < CACHED_IDS; j++) a[ids[j]] += probabilities[j];
            teachers += 1.0;
        }
        if (students == 0.0 || teachers == 0.0 || !p->mask[slot] || p->sample_weight[b] == 0.0f) continue;
        if (p->settings.exact_only && !p->exact[slot]) continue;
        for (int u = 0; u < STUDENT_SIZE; u++) q[u] /= students;
        for (int u = 0; u < STUDENT_SIZE; u++) a[u] /= teachers;
        total += (double)p->sample_weight[b] * divergence(q, a, p->settings.reverse);
        *denominator += (double)p->sample_weight[b];
    }
    return total;
}

static void check_cached(problem *p, call *c) {
    double denominator;
    const double total = cached_divergence(p, &c->teachers[0], &denominator);
    const double tau = p->settings.temperature;
    const xd_xtoken_values values = run_call(p, c);
    CHECK_NEAR(c->teacher_values[0].denominator, denominator, 1e-12);
    CHECK_NEAR(c->teacher_values[0].divergence, total, 1e-6);
    CHECK_NEAR(values.kd, tau * tau * total / denominator, 1e-6);
    CHECK_NEAR(values.loss, 0.8 * values.kd + 0.6 * values.ce, 1e-12);
    CHECK(c->status.not_finite == 0);
}

XD_TEST(a_cached_chunk_is_the_union_of_its_positions_and_a_tail) {
    for (int i = 0; i < 12; i++) {
        problem p;
        call c;
        open_cached(&p, XD_REDUCTION_DETERMINISTIC, (xd_cache_coding)(i % 3));
        p.settings.reverse = i / 3 % 2 == 1;
        p.settings.exact_only = i >= 6;
        p.settings.tile = i == 1 ? 2 : 0;
        p.mask[1] = (uint8_t)(i < 6);
        open_call(&p, &c);
        check_cached(&p, &c);
        xd_vocab_destroy(c.vocab);
        close_problem(&p);
    }
}

XD_TEST(one_tokenizer_needs_no_projection) {
    for (int reverse = 0; reverse < 2; reverse++) {
        problem p;
        call c;
        open_same(&p);
        p.settings.reverse = reverse == 1;
        open_call(&p, &c);
        c.teachers[0] = same_teacher(&p);
        check_cached(&p, &c);
        xd_vocab_destroy(c.vocab);
        close_problem(&p);
    }
}

/* What the student says is what was cached: nothing is lost, and nothing is to be learnt. */
XD_TEST(a_student_that_equals_its_cache_loses_nothing) {
    problem p;
    call c;
    open_same(&p);
    memcpy(p.student, p.same, sizeof p.student);
    p.settings.ce_weight = 0.0;
    open_call(&p, &c);
    c.teachers[0] = same_teacher(&p);
    const xd_xtoken_values values = run_call(&p, &c);
    CHECK_NEAR(values.kd, 0.0, 1e-9);
    CHECK_EQ_INT((int)c.teacher_values[0].agreeing, (int)c.teacher_values[0].compared);
    for (int i = 0; i < STUDENT_ROWS * STUDENT_SIZE; i++) CHECK_NEAR(c.gradient[i], 0.0, 1e-7);
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

XD_TEST(gradients_of_a_cache_agree_with_finite_differences) {
    for (int i = 0; i < 4; i++) {
        problem p;
        call c;
        if (i < 2)
            open_cached(&p, XD_REDUCTION_DETERMINISTIC, XD_CACHE_8_BITS);
        else
            open_same(&p);
        p.settings.reverse = i % 2 == 1;
        open_call(&p, &c);
        if (i >= 2) c.teachers[0] = same_teacher(&p);
        check_differences(&p, &c);
        xd_vocab_destroy(c.vocab);
        close_problem(&p);
    }
}

/* More entries than a tile has room for: the loss is that of small tiles, to the bit of the gradient. */
XD_TEST(a_long_text_is_cut_into_tiles) {
    enum { LENGTH = 1200, SIZE = 37 };
    problem p;
    call c;
    xd_teacher_cache_desc desc;
    xd_teacher_cache_writer *w = NULL;
    xd_teacher_cache_block block;
    xd_xtoken_values values[2];
    char path[64];
    float *student = (float *)malloc(sizeof(float) * LENGTH * SIZE * 4);
    int64_t *places = (int64_t *)malloc(sizeof(int64_t) * LENGTH);
    int32_t *ids = (int32_t *)malloc(sizeof(int32_t) * LENGTH * 2);
    snprintf(path, sizeof path, "/tmp/xdistill-test-chunks-%ld", (long)getpid());
    open_problem(&p, XD_XTOKEN_CACHED);
    fill(student, 2 * LENGTH * SIZE, 6.0);
    for (int i = 0; i < LENGTH; i++) {
        places[i] = i;
        ids[i] = i % SIZE;
        ids[LENGTH + i] = i == LENGTH - 1 ? -1 : (i + 1) % SIZE;
    }
    memset(&desc, 0, sizeof desc);
    memset(&block, 0, sizeof block);
    desc.vocabulary = SIZE;
    desc.k = 16;
    desc.temperature = 1.5;
    block.logits = rows_of(student + LENGTH * SIZE, LENGTH, SIZE);
    block.ids = ids;
    block.next = ids + LENGTH;
    CHECK_EQ_INT(cache_writer_create(p.ctx, path, &desc, &w), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_document(w, NULL, 0), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &block), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_commit(w), XD_OK);
    CHECK_EQ_INT(cache_open(p.ctx, path, NULL, &p.cache), XD_OK);
    remove(path);
    open_call(&p, &c);
    xd_vocab_destroy(c.vocab);
    CHECK_EQ_INT(vocab_even(p.ctx, NULL, SIZE, &c.vocab), XD_OK);
    c.d.vocab = c.vocab;
    c.d.student = rows_of(student, LENGTH, SIZE);
    c.d.sequences = 1;
    c.d.common.labels.data = NULL;
    c.d.common.row_weight = NULL;
    c.teachers[0].logits.rows = LENGTH;
    c.teachers[0].student_chunks = c.teachers[0].teacher_chunks = c.teachers[0].cached.positions = places;
    c.teachers[0].chunks = LENGTH;
    c.teachers[0].chunk_mask = c.teachers[0].chunk_exact = NULL;
    c.teachers[0].cached.projection = NULL;
    for (int i = 0; i < 2; i++) {
        c.d.tile = i == 0 ? 0 : 64;
        c.d.common.gradient = rows_of(student + (2 + i) * LENGTH * SIZE, LENGTH, SIZE);
        values[i] = run_call(&p, &c);
    }
    CHECK_EQ_INT((int)c.teacher_values[0].compared, LENGTH);
    CHECK(values[0].kd > 0.0 && values[0].kd == values[1].kd);
    CHECK(memcmp(student + 2 * LENGTH * SIZE, student + 3 * LENGTH * SIZE, sizeof(float) * LENGTH * SIZE) ==
          0);
    free(student);
    free(places);
    free(ids);
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

/* ---- likelihoods ---- */

/* Log-probabilities, at temperature 1, of what the teacher's rows predict. */
static void fill_target_log_probs(problem *p) {
    for (int i = 0; i < TEACHER_ROWS; i++)
        p->target_log_probs[i] = (float)log(
            probability(p->teacher + i * TEACHER_SIZE, TEACHER_SIZE, (int)p->teacher_labels[i], 1.0));
}

static void open_likelihood(problem *p, xd_reduction reduction, int form) {
    open_problem_as(p, XD_XTOKEN_LIKELIHOOD, reduction);
    p->likelihood = (xd_likelihood_form)(form & 1);
    p->lengths = (form & 2) != 0;
    for (int i = 0; i < SEQUENCES * CHUNKS; i++) p->chunk_length[i] = (float)(1 + i % 4);
    fill_target_log_probs(p);
}

static double coins(double s, double t) {
    return exp(t) * (t - s) + (1.0 - exp(t)) * (log(1.0 - exp(t)) - log(1.0 - exp(s)));
}

static double likelihood_divergence(const problem *p) {
    double total = 0.0;
    for (int slot = 0; slot < SEQUENCES * CHUNKS; slot++) {
        const int b = slot / CHUNKS, c = slot % CHUNKS;
        const double length = p->lengths ? (double)p->chunk_length[slot] : 1.0;
        double s = 0.0, t = 0.0;
        for (int i = b * STUDENT_LENGTH; i < (b + 1) * STUDENT_LENGTH; i++)
            if (p->student_chunks[i] == c)
                s += log(probability(p->student + i * STUDENT_SIZE, STUDENT_SIZE, (int)p->labels[i], 1.0));
        for (int i = b * TEACHER_LENGTH; i < (b + 1) * TEACHER_LENGTH; i++)
            if (p->teacher_chunks[i] == c) t += (double)p->target_log_probs[i];
        if (s == 0.0 || t == 0.0 || !p->mask[slot]) continue;
        s /= length;
        t /= length;
        double one = (s - t) * (s - t);
        if (p->likelihood == XD_LIKELIHOOD_KL) one = p->settings.reverse ? coins(t, s) : coins(s, t);
        total += (double)p->sample_weight[b] * one;
    }
    return total;
}

XD_TEST(likelihoods_of_chunks_are_sums_over_their_own_tokens) {
    for (int i = 0; i < 16; i++) {
        problem p;
        call c;
        open_likelihood(&p, XD_REDUCTION_DETERMINISTIC, i % 4);
        p.settings.reverse = i / 4 % 2 == 1;
        p.known = i >= 8;
        p.mask[1] = (uint8_t)(i % 2);
        open_call(&p, &c);
        const xd_xtoken_values values = run_call(&p, &c);
        const double total = likelihood_divergence(&p);
        CHECK_NEAR(c.teacher_values[0].divergence, total, 1e-5);
        CHECK_NEAR(values.kd, total / c.teacher_values[0].denominator, 1e-5); /* no tau^2 */
        CHECK(c.teacher_values[0].compared == 0.0 && c.status.not_finite == 0);
        xd_vocab_destroy(c.vocab);
        close_problem(&p);
    }
}

XD_TEST(gradients_of_likelihoods_agree_with_finite_differences) {
    for (int i = 0; i < 8; i++) {
        problem p;
        call c;
        open_likelihood(&p, XD_REDUCTION_DETERMINISTIC, i % 4);
        p.settings.reverse = i >= 4;
        open_call(&p, &c);
        check_differences(&p, &c);
        xd_vocab_destroy(c.vocab);
        close_problem(&p);
    }
}

/* A cache, a list and the logits give one likelihood; its temperature does not matter for it. */
XD_TEST(a_cache_knows_the_likelihood_of_its_text) {
    problem p;
    call c;
    xd_xtoken_values values[3];
    open_likelihood(&p, XD_REDUCTION_DETERMINISTIC, 2);
    for (int i = 0; i < 3; i++) {
        if (i == 2) make_cache(&p, p.teacher, p.teacher_labels, TEACHER_LENGTH, TEACHER_SIZE, XD_CACHE_F32);
        p.known = i == 1;
        p.settings.temperature = i == 2 ? 3.0 : 1.5;
        open_call(&p, &c);
        values[i] = run_call(&p, &c);
        CHECK_NEAR(values[i].kd, values[0].kd, 1e-5);
        xd_vocab_destroy(c.vocab);
    }
    close_problem(&p);
}

/* Certain and impossible chunks: the logarithms have a floor, and what is infinite is found. */
XD_TEST(certain_and_impossible_chunks_stay_finite) {
    for (int i = 0; i < 4; i++) {
        problem p;
        call c;
        open_likelihood(&p, XD_REDUCTION_DETERMINISTIC, XD_LIKELIHOOD_KL);
        p.settings.reverse = i % 2 == 1;
        p.known = true;
        p.student[p.labels[0]] = 200.0f; /* chunk 0 of the first sequence is this row alone */
        if (i >= 2) p.target_log_probs[0] = 0.0f, p.target_log_probs[1] = 0.0f;
        p.target_log_probs[2] = -1e4f; /* chunk 1 */
        open_call(&p, &c);
        const xd_xtoken_values values = run_call(&p, &c);
        CHECK(isfinite(values.loss) && c.status.not_finite == 0);
        for (int v = 0; v < STUDENT_ROWS * STUDENT_SIZE; v++) CHECK(isfinite(c.gradient[v]));
        p.target_log_probs[2] = -INFINITY;
        p.likelihood = XD_LIKELIHOOD_SQUARED;
        c.teachers[0] = teacher_of(&p, 0);
        run_call(&p, &c);
        CHECK_EQ_INT(c.status.not_finite, 1);
        CHECK_EQ_INT(c.status.first_row, 1); /* chunk 1 of the first sequence */
        xd_vocab_destroy(c.vocab);
        close_problem(&p);
    }
}

/* ---- several teachers ---- */

XD_TEST(cached_teachers_are_weighed_beside_others) {
    for (int mode = 0; mode < 2; mode++) {
        problem p;
        call c;
        open_cached(&p, XD_REDUCTION_DETERMINISTIC, XD_CACHE_8_BITS);
        p.kinds[1] = XD_XTOKEN_LIKELIHOOD;
        p.kinds[2] = XD_XTOKEN_PROJECTED;
        p.teacher_count = 3;
        p.settings.mode = mode == 0 ? XD_XTOKEN_SUM : XD_XTOKEN_SELECT;
        if (mode == 0) p.settings.score = XD_XTOKEN_SCORE_CE;
        p.settings.normalise_by_vocabulary = mode == 0;
        open_call(&p, &c);
        for (int i = 0; i < SEQUENCES; i++) /* the cache has no token behind the last; let nobody score it */
            p.teacher_labels[(i + 1) * TEACHER_LENGTH - 1] = XD_IGNORE_INDEX;
        const xd_xtoken_values values = run_call(&p, &c);
        if (mode == 0) CHECK_NEAR(c.teacher_values[0].weight, c.teacher_values[2].weight, 1e-3);
        if (mode == 0) CHECK_NEAR(c.teacher_values[0].weight, c.teacher_values[1].weight, 1e-12);
        CHECK(mode == 0 || values.selected >= 0);
        check_differences(&p, &c);
        xd_vocab_destroy(c.vocab);
        close_problem(&p);
    }
}

/* ---- many ranks ---- */

XD_TEST(every_mesh_has_the_loss_and_gradient_of_one_rank) {
    for (int i = 0; i < 8; i++) {
        problem p;
        if (i < 4)
            open_cached(&p, i < 2 ? XD_REDUCTION_DETERMINISTIC : XD_REDUCTION_INVARIANT, XD_CACHE_8_BITS);
        else
            open_likelihood(&p, i < 6 ? XD_REDUCTION_DETERMINISTIC : XD_REDUCTION_INVARIANT, i % 4);
        p.settings.reverse = i % 2 == 1;
        p.settings.balance = i % 2 == 1;
        p.known = i == 6;
        check_meshes(&p);
        close_problem(&p);
    }
}

XD_TEST(every_mesh_weighs_cached_teachers_alike) {
    for (int i = 0; i < 2; i++) {
        problem p;
        open_cached(&p, i ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC, XD_CACHE_16_BITS);
        p.kinds[1] = XD_XTOKEN_LIKELIHOOD;
        p.kinds[2] = XD_XTOKEN_GOLD;
        p.teacher_count = 3;
        p.settings.score = XD_XTOKEN_SCORE_CE;
        check_meshes(&p);
        close_problem(&p);
    }
}

/* ---- refusals ---- */

static void check_refused(problem *p, call *c, xd_result result, const char *says) {
    xd_xtoken_values values;
    values.loss = 42.0;
    CHECK_EQ_INT(xd_xtoken_loss(p->ctx, &c->d, &values), result);
    CHECK(strstr(xd_last_error(p->ctx)->message, says) != NULL);
    CHECK(values.loss == 42.0 && c->gradient[0] == 0.0f);
    c->teachers[0] = teacher_of(p, 0);
    c->d.temperature = p->settings.temperature;
    c->d.score = XD_XTOKEN_SCORE_NONE;
}

XD_TEST(a_cache_that_does_not_fit_is_refused) {
    problem p;
    call c;
    xd_projection_origin origin;
    xd_projection wrong;
    open_cached(&p, XD_REDUCTION_DETERMINISTIC, XD_CACHE_8_BITS);
    open_call(&p, &c);
    c.d.temperature = 1.0;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "cached at temperature 1.5, the loss is at 1");
    memset(&origin, 0, sizeof origin);
    origin.teacher_hash = 78;
    c.teachers[0].cached.origin = &origin;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "000000000000004e");
    c.teachers[0].cached.cache = NULL;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "no cache");
    c.teachers[0].cached.positions = NULL;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "no positions");
    p.cache_positions[3] = SEQUENCES * TEACHER_LENGTH;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "row 3 is position 18 of a cache of 18");
    p.cache_positions[3] = -1; /* it has a chunk */
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "row 3 is position -1");
    p.cache_positions[3] = 3;
    c.teachers[0].vocabulary = TEACHER_SIZE + 1;
    check_refused(&p, &c, XD_ERROR_SHAPE, "12 ids but its cache 11");
    wrong = p.projection;
    wrong.teacher_size--;
    c.teachers[0].cached.projection = &wrong;
    check_refused(&p, &c, XD_ERROR_SHAPE, "10 columns but its cache 11");
    wrong = p.projection;
    wrong.student_size--;
    c.teachers[0].cached.projection = &wrong;
    check_refused(&p, &c, XD_ERROR_SHAPE, "12 rows but the student's vocabulary 13");
    c.teachers[0].logits.data = p.teacher;
    check_refused(&p, &c, XD_ERROR_SHAPE, "beside its cache");
    c.d.score = XD_XTOKEN_SCORE_ENTROPY;
    check_refused(&p, &c, XD_ERROR_UNSUPPORTED, "entropy");
    c.teachers[0].kind = (xd_xtoken_kind)5;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "kind 5");
    run_call(&p, &c);
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

/* The origin of the tokenizers in use changes no value where it is the cache's, and is a refusal where it is not. */
XD_TEST(a_cache_is_held_to_the_tokenizers_in_use) {
    problem p;
    call c;
    open_cached(&p, XD_REDUCTION_DETERMINISTIC, XD_CACHE_8_BITS);
    open_call(&p, &c);
    const xd_xtoken_values any = run_call(&p, &c);
    const xd_teacher_cache_desc made = xd_teacher_cache_describe(p.cache).desc;
    xd_projection_origin origin;
    xd_xtoken_cached *cached = &c.teachers[0].cached;
    memset(&origin, 0, sizeof origin);
    origin.student_hash = made.student_hash;
    origin.teacher_hash = made.teacher_hash;
    cached->origin = &origin;
    const xd_xtoken_values same = run_call(&p, &c);
    CHECK(any.loss != 0.0 && memcmp(&any, &same, sizeof any) == 0);
    memset(c.gradient, 0, sizeof c.gradient);
    origin.teacher_hash++;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "made for the tokenizers");
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

XD_TEST(likelihoods_without_labels_are_refused) {
    problem p;
    call c;
    open_likelihood(&p, XD_REDUCTION_DETERMINISTIC, 2);
    open_call(&p, &c);
    c.d.common.labels.data = NULL;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "the student has no labels");
    c.d.common.labels.data = p.labels;
    c.teachers[0].labels.data = NULL;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "neither labels nor");
    c.teachers[0].likelihood.form = (xd_likelihood_form)2;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "form 2");
    p.chunk_length[7] = 0.0f;
    check_refused(&p, &c, XD_ERROR_ARGUMENT, "chunk 1 of sequence 1 has length 0");
    p.chunk_length[7] = 1.0f;
    p.labels[1] = XD_IGNORE_INDEX; /* of chunk 1, which counts */
    run_call(&p, &c);
    CHECK_EQ_INT(c.status.not_finite, 1);
    xd_vocab_destroy(c.vocab);
    close_problem(&p);
}

XD_TEST_MAIN()
