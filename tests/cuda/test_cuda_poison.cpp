/* Numbers that no training run should hold, in device memory: the table of tests/test_poison.c asks the same of a GPU as of
 * the CPU. cuda_poison.h says how its calls get there, and names the families that have no device form.
 *
 * A sample runs: of losses across tokenizers every 4001st case, of other losses every 499th, of the rest every 11th; of wide
 * vocabularies an 11th of that; in orders and streams other than the usual ones a fifth. XDISTILL_POISON=all runs all cases, a
 * number N every Nth, and XDISTILL_POISON_ONLY=name those of the calls whose names contain it. */
#include "cuda_test.h"

#include <cmath>

/* The largest element of a row differs from itself by 0, and 0 times an infinite 1 / tau would be NaN. */
XD_TEST(poison_a_temperature_whose_inverse_f32_cannot_hold_leaves_gradients_finite) {
    enum { ROWS = 3, COLS = 7 };
    Gpu gpu;
    Random random(3);
    std::vector<float> x(ROWS * COLS), y(ROWS * COLS);
    for (size_t i = 0; i < x.size(); i++) x[i] = 3.0f * random.unit(), y[i] = 3.0f * random.unit();
    const std::vector<xd_loss_report> none(1);
    const std::vector<int64_t> label(ROWS, 2);
    Device student(x), teacher(y), gradient(x), report(none), labels(label);
    xd_loss_report *at = report.at<xd_loss_report>();
    xd_vocab *vocab = nullptr;
    CHECK_EQ_INT(vocab_even(gpu.ctx, nullptr, COLS, &vocab), XD_OK);
    xd_loss_desc d = {};
    d.vocab = vocab;
    d.student = xd_rows_of(student.at(), XD_DTYPE_F32, ROWS, COLS);
    d.teacher = xd_rows_of(teacher.at(), XD_DTYPE_F32, ROWS, COLS);
    d.common.gradient = xd_rows_of(gradient.at(), XD_DTYPE_F32, ROWS, COLS);
    d.common.status = &at->status;
    d.soft_weight = 1.5;
    d.temperature = 1e-41;
    d.common.labels = xd_ids_of(labels.at(), XD_DTYPE_I64);
    for (int minimal = 0; minimal < 2; minimal++) {
        d.divergence = minimal ? XD_MFT : XD_KL_FORWARD;
        CHECK_EQ_INT(xd_loss(gpu.ctx, &d, &at->values), XD_OK);
        gpu.wait();
        for (float g : gradient.host<float>()) CHECK(std::isfinite(g));
    }
    xd_vocab_destroy(vocab);
}

#include "cuda_poison.h"

/* Of a C program: families name the fields that they have, and the others are 0. */
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#define POISON_BACKEND
#include "../test_poison.c"

XD_TEST(poison_each_family_of_the_table_runs_on_a_gpu_or_is_excused) {
    for (const poison_family *family : families) {
        if (gpu_serves(family) != gpu_excuses(family)) continue;
        printf("%s: neither among the families of cuda_poison.h nor excused there, or both\n", family->name);
        CHECK(false);
    }
}

/* How many cases of a family stand for one that runs: kernels run slowly in the emulation, most of all those of long lists. */
static long stride_of(const poison_family *family) {
    const char *given = getenv("XDISTILL_POISON");
    const long less = getenv("EMU_ORDER") || getenv("EMU_STREAMS") ? 5 : 1;
    if (given) return atol(given) > 0 ? atol(given) : 1;
    if (!strncmp(family->name, "xd_xtoken", 9)) return 4001 * less;
    return (strstr(family->name, "_loss") ? 499 : 11) * less;
}

/* Families of the same stride run together, so that a sample goes on from one to the next. */
static void run_families(const poison_family *const *from, int of, long less, int64_t size) {
    const poison_family *run[sizeof families / sizeof *families], *some[sizeof families / sizeof *families];
    const int count = chosen(from, of, run);
    for (int first = 0; first < count; first++) {
        const long stride = stride_of(run[first]);
        int together = 0;
        bool done = false;
        for (int i = 0; i < first; i++) done = done || stride_of(run[i]) == stride;
        for (int i = first; i < count && !done; i++)
            if (stride_of(run[i]) == stride) some[together++] = run[i];
        if (together) poison_run_sized(some, together, stride * less, size);
    }
}

XD_TEST(poison_in_device_memory_is_told_and_stays_in_its_unit) {
    poison_all.backend = &gpu_backend;
    run_families(families, (int)(sizeof families / sizeof *families), 1, 0);
    run_families(wide, (int)(sizeof wide / sizeof *wide), 11, POISON_WIDE);
    poison_report("poison on a GPU");
}

/* J is chosen without the rows that hold NaN or infinity in any column. The sample of all cases is too small to find
 * that a kernel lets one pass, so these run apart: variants whose columns outside J nobody else reads, on one rank. */
static bool build_chosen_columns(poison_scene *s) {
    const poison_xtoken_variant *v = poison_xtoken_variants + s->variant;
    return v->few && v->bare && poison_xtoken_build(s);
}

static poison_verdict expect_of_logits(const poison_scene *s, const poison_part *part, double value) {
    const bool logits = !strcmp(part->name, "student") || !strcmp(part->name, "teacher");
    return logits && !(value < (double)INFINITY) ? poison_expect_xtoken(s, part, value) : POISON_SKIP;
}

XD_TEST(poison_outside_the_chosen_columns_is_told) {
    poison_family of_columns = poison_family_xtoken;
    const poison_family *const one[] = { &of_columns };
    of_columns.layouts[POISON_VOCABULARY] = of_columns.layouts[POISON_ROWS_SPLIT] = false;
    of_columns.build = build_chosen_columns;
    of_columns.expect = expect_of_logits;
    const long cases = poison_all.cases, violations = poison_all.violations;
    poison_all.backend = &gpu_backend;
    poison_run(one, 1, getenv("EMU_ORDER") || getenv("EMU_STREAMS") ? 10 : 2);
    CHECK(poison_all.cases > cases);
    if (poison_all.violations > violations) poison_report("poison outside J on a GPU");
}

XD_CUDA_TEST_MAIN()
