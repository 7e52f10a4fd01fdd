/* INVARIANT mode's sums of losses have the same bits on every level, however the vocabulary is cut. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "exact_numbers.h"
#include "xd_test.h"
#include "xd_test_cpu.h"

enum { ROWS = 3, MOST = 5000, K = 9 };

typedef struct problem {
    xd_dtype dtype;
    int64_t columns;
    double temperature, uniform_weight;
    xd_divergence divergence;
    bool hard, soft;
    float student[ROWS * MOST], teacher[ROWS * MOST];
    uint16_t narrow_student[ROWS * MOST], narrow_teacher[ROWS * MOST];
} problem;

static problem p;

static void fill(int kind, int64_t columns) {
    uint64_t state = (uint64_t)(kind * 1000 + columns);
    p.columns = columns;
    for (int64_t i = 0; i < ROWS * columns; i++) {
        const double spread = kind == 2 ? 6e3 : kind == 6 ? 3e4 : 8.0;
        p.student[i] = (float)(spread * (uniform(&state) - 0.5));
        p.teacher[i] = (float)(spread * (uniform(&state) - 0.5));
        if (kind == 1 && random_bits(&state) % 50 == 0) p.teacher[i] = -INFINITY;
        if (kind == 1 && random_bits(&state) % 5 == 0 && p.teacher[i] == -INFINITY) p.student[i] = -INFINITY;
        if (kind == 3 && i / columns == 1 && i % columns == columns / 2) p.student[i] = -INFINITY;
        if (kind == 4 && i / columns == 1 && i % columns == columns / 2) p.student[i] = -3e38f;
        if (kind == 5 && i / columns == 2) p.student[i] = i % columns == 0 ? (float)NAN : 0.0f;
        p.narrow_student[i] = xd_bf16_from_f32(p.student[i]);
        p.narrow_teacher[i] = xd_bf16_from_f32(p.teacher[i]);
    }
}

typedef struct sums {
    xd_fixed stats[ROWS * XD_LOSS_SUMS], mixtures[ROWS * XD_LOSS_MIXTURES], topk[ROWS * XD_TOPK_SUMS];
    double references[ROWS * XD_LOSS_REFERENCES];
    xd_loss_row row[ROWS];
} sums;

/* Columns [begin, end) of a side. */
static xd_rows rows_of(bool teacher, int64_t begin, int64_t end) {
    xd_rows x = { NULL, p.dtype, ROWS, end - begin, p.columns };
    x.data = (teacher ? p.teacher : p.student) + begin;
    if (p.dtype == XD_DTYPE_BF16) x.data = (teacher ? p.narrow_teacher : p.narrow_student) + begin;
    return x;
}

static void add(xd_fixed *to, const xd_fixed *from, int count) {
    for (int i = 0; i < count; i++) {
        to[i].high += from[i].high;
        to[i].low += from[i].low;
    }
}

/* Shard `shard` of `shards`, whose offsets these are. */
static xd_vocab_shard place(const int64_t *offsets, int shard, int shards) {
    const xd_vocab_shard out = {
        offsets[shard], offsets[shard + 1], offsets[shards], shard, shards, offsets
    };
    return out;
}

static void run_topk(xd_ctx *ctx, const double *scale, const int64_t *offsets, int shards, sums *out) {
    const xd_topk_kernels *k = &xd_ctx_kernels(ctx)->topk;
    const xd_launch launch = xd_ctx_launch(ctx);
    int64_t ids[ROWS * K], order[K];
    double maxima[ROWS], values[ROWS * K];
    xd_topk_args a;
    memset(&a, 0, sizeof a);
    for (int i = 0; i < ROWS * K; i++) ids[i] = (int64_t)i * 37 % p.columns;
    for (int r = 0; r < ROWS; r++) maxima[r] = out->references[r * XD_LOSS_REFERENCES + XD_LOSS_MAX];
    a.ids = ids;
    a.k = K;
    a.temperature = p.temperature;
    a.fixed = a.outside = true;
    a.row_scale = scale;
    a.maxima = maxima;
    a.values = values;
    a.order = order;
    for (int shard = 0; shard < shards; shard++) {
        xd_fixed part[ROWS * XD_TOPK_SUMS];
        a.vocab = place(offsets, shard, shards);
        a.logits = rows_of(false, a.vocab.begin, a.vocab.end);
        a.sums = part;
        CHECK(k->stats(&launch, &a) == XD_OK);
        add(out->topk, part, ROWS * XD_TOPK_SUMS);
    }
}

static void fill_args(xd_loss_args *a, const double *scale, const int64_t *labels, const int64_t *offsets) {
    memset(a, 0, sizeof *a);
    a->labels = xd_ids_of(labels, XD_DTYPE_I64);
    a->row_scale = scale;
    a->vocab = place(offsets, 0, 1);
    a->temperature = p.temperature;
    a->divergence = p.divergence;
    a->beta = 0.4;
    a->target_weight = 0.9;
    a->uniform_weight = p.uniform_weight;
    a->hard_weight = p.hard ? 0.5 : 0.0;
    a->soft_weight = p.soft ? 0.5 : 0.0;
    a->fixed = true;
}

/* The part of shard a->vocab, as a rank that knows the references of whole rows has it. */
static void run_shard(const xd_loss_kernels *k, const xd_launch *launch, xd_loss_args *a, bool mixed,
                      sums *out) {
    xd_fixed part[ROWS * XD_LOSS_SUMS], mixtures[ROWS * XD_LOSS_MIXTURES];
    a->student = rows_of(false, a->vocab.begin, a->vocab.end);
    if (p.soft) a->teacher = rows_of(true, a->vocab.begin, a->vocab.end);
    a->sums = part;
    a->mixtures = mixtures;
    if (!mixed) {
        CHECK(k->stats(launch, a) == XD_OK);
        add(out->stats, part, ROWS * XD_LOSS_SUMS);
    } else {
        CHECK(k->mixture(launch, a) == XD_OK);
        add(out->mixtures, mixtures, ROWS * XD_LOSS_MIXTURES);
    }
}

/* Sums of all rows, cut over `shards`. */
static void run(xd_cpu_level level, const int64_t *offsets, int shards, sums *out) {
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    const double scale[ROWS] = { 0.5, 1.0, 0.25 };
    const int64_t labels[ROWS] = { 0, p.columns - 1, p.columns / 2 }, whole[2] = { 0, p.columns };
    const bool mixed = p.soft && p.divergence == XD_JSD;
    xd_loss_args a;
    memset(&desc, 0, sizeof desc);
    memset(out, 0, sizeof *out);
    desc.cpu = level;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    const xd_loss_kernels *k = &xd_ctx_kernels(ctx)->loss;
    const xd_launch launch = xd_ctx_launch(ctx);
    fill_args(&a, scale, labels, whole);
    a.references = out->references;
    a.all_references = out->references;
    a.all_sums = out->stats;
    a.row = out->row;
    a.student = rows_of(false, 0, p.columns);
    if (p.soft) a.teacher = rows_of(true, 0, p.columns);
    CHECK(k->references(&launch, &a) == XD_OK);
    for (int mixture = 0; mixture <= (mixed ? 1 : 0); mixture++) {
        for (int shard = 0; shard < shards; shard++) {
            a.vocab = place(offsets, shard, shards);
            run_shard(k, &launch, &a, mixture == 1, out);
        }
        a.vocab = place(whole, 0, 1);
        a.all_mixtures = out->mixtures;
        CHECK((mixture ? k->mixture_combine(&launch, &a) : k->combine(&launch, &a)) == XD_OK);
    }
    run_topk(ctx, scale, offsets, shards, out);
    for (int i = 0; i < ROWS * XD_LOSS_SUMS; i++)
        if (i % XD_LOSS_SUMS != XD_LOSS_BAD) out->stats[i] = normal(out->stats[i]);
    for (int i = 0; i < ROWS * XD_LOSS_MIXTURES; i++) out->mixtures[i] = normal(out->mixtures[i]);
    for (int i = 0; i < ROWS * XD_TOPK_SUMS; i++)
        if (i % XD_TOPK_SUMS != XD_TOPK_BAD) out->topk[i] = normal(out->topk[i]);
    xd_ctx_destroy(ctx);
}

static void compare_sums(const sums *a, const sums *b) {
    for (int r = 0; r < ROWS; r++) {
        CHECK_EQ_INT(a->row[r].finding, b->row[r].finding);
        CHECK(memcmp(&a->row[r].hard, &b->row[r].hard, sizeof(double)) == 0);
        CHECK(memcmp(&a->row[r].soft, &b->row[r].soft, sizeof(double)) == 0);
        if (a->row[r].finding == (int)XD_ROW_FINE) /* a broken row counts once a shard */
            CHECK(memcmp(a->stats + r * XD_LOSS_SUMS, b->stats + r * XD_LOSS_SUMS,
                         XD_LOSS_SUMS * sizeof(xd_fixed)) == 0);
    }
    CHECK(memcmp(a->mixtures, b->mixtures, sizeof a->mixtures) == 0);
    for (int r = 0; r < ROWS; r++)
        if (!isnan(a->references[r * XD_LOSS_REFERENCES + XD_LOSS_MAX]))
            CHECK(memcmp(a->topk + r * XD_TOPK_SUMS, b->topk + r * XD_TOPK_SUMS,
                         XD_TOPK_SUMS * sizeof(xd_fixed)) == 0);
}

/* Every level, the vocabulary whole and in four shards, one of them empty, against the plain level. A sum that
 * runs over may do so on one shard only, and not in parts. */
static void compare(bool in_parts) {
    static sums plain, fast;
    const int64_t whole[2] = { 0, p.columns };
    const int64_t cut[5] = { 0, 3, 3, p.columns - p.columns / 3, p.columns };
    run(XD_CPU_PLAIN, whole, 1, &plain);
    XD_TEST_LEVELS(level, XD_CPU_PLAIN) {
        run((xd_cpu_level)level, whole, 1, &fast);
        compare_sums(&plain, &fast);
        if (!in_parts) continue;
        run((xd_cpu_level)level, cut, 4, &fast);
        compare_sums(&plain, &fast);
    }
}

static void compare_all(int kind, int64_t columns) {
    fill(kind, columns);
    for (int narrow = 0; narrow < 2; narrow++)
        for (int divergence = 0; divergence < 5; divergence++) {
            p.dtype = narrow ? XD_DTYPE_BF16 : XD_DTYPE_F32;
            p.divergence = divergence < 4 ? (xd_divergence)divergence : XD_KL_FORWARD;
            p.soft = divergence < 4;
            p.hard = divergence != 1;
            p.temperature = (divergence + narrow) % 2 ? 2.5 : 1.0;
            p.uniform_weight = divergence == 2 || divergence == 4 ? 0.1 / (double)columns : 0.0;
            compare(kind != 6);
        }
}

XD_TEST(sums_of_losses_have_the_same_bits_on_every_level_however_they_are_cut) {
    for (int64_t columns = K; columns <= 66; columns++) compare_all(0, columns);
    compare_all(0, 2048);
    compare_all(0, MOST - 1);
}

XD_TEST(so_have_those_of_masked_broken_and_huge_rows) {
    for (int kind = 1; kind < 7; kind++) {
        compare_all(kind, 40);
        compare_all(kind, 2500);
    }
}

XD_TEST_MAIN()
