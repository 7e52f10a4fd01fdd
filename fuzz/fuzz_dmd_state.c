/* Any text is the state of a distillation, or refused in words, and then nothing has changed. What is taken is written again and
 * taken once more. */
#include "fuzz.h"

enum { BINS = 4 };

static xd_result nothing(void *user, const xd_network_call *call) {
    (void)user, (void)call;
    return XD_OK;
}

static xd_dmd *distillation(void) {
    static const int64_t feature = 6;
    static const double rungs[] = { 0.999, 0.75, 0.4, 0.0 };
    static xd_dmd *dmd;
    static int users[XD_DMD_ROLES];
    if (dmd) return dmd;
    xd_dmd_desc d = xd_dmd_defaults(XD_DMD_MODELOPT);
    for (int role = 0; role < (int)XD_DMD_ROLES; role++) {
        d.networks[role].user = &users[role];
        d.networks[role].predicts = XD_PREDICT_FLOW;
        d.networks[role].forward = d.networks[role].backward = nothing;
    }
    d.networks[XD_DMD_TEACHER].feature_count = 1;
    d.networks[XD_DMD_TEACHER].feature_elements = &feature;
    d.networks[XD_DMD_DISCRIMINATOR].heads = 1;
    d.sizes.samples = d.sizes.step_samples = 2;
    d.sizes.elements = 6;
    d.rungs.steps = 3;
    d.rungs.list = rungs;
    d.gan.weight = 0.5;
    d.gan.fdistill.on = true;
    d.gan.fdistill.bins = BINS;
    d.gan.fdistill.rate = 0.75;
    d.seed = 7;
    if (xd_dmd_create(fuzz_ctx(), &d, &dmd) != XD_OK)
        fprintf(stderr, "%s\n", xd_last_error(fuzz_ctx())->message);
    FUZZ_CHECK(dmd != NULL);
    return dmd;
}

/* Counters, and the text that has the bins too, with all their bits. */
typedef struct position {
    xd_dmd_record record;
    char *text;
} position;

static position position_of(xd_dmd *dmd) {
    position p;
    memset(&p, 0, sizeof p);
    p.record = xd_dmd_describe(dmd);
    FUZZ_CHECK(xd_dmd_state_save(dmd, &p.text) == XD_OK);
    return p;
}

static bool position_is(position *a, position *b) {
    const bool same = memcmp(&a->record, &b->record, sizeof a->record) == 0 && strcmp(a->text, b->text) == 0;
    xd_release(fuzz_ctx(), a->text);
    xd_release(fuzz_ctx(), b->text);
    return same;
}

/* Means that a later step divides by. */
static void check_bins(const char *text) {
    const char *at = strstr(text, "\"bins\":[");
    FUZZ_CHECK(at != NULL);
    at += strlen("\"bins\":[");
    for (int i = 0; i < BINS; i++) {
        char *end = NULL;
        const double bin = strtod(at, &end);
        FUZZ_CHECK(end > at && *end == (i < BINS - 1 ? ',' : ']') && bin > 0.0 && bin <= 1e308);
        at = end + 1;
    }
}

static void use(xd_dmd *dmd) {
    position taken = position_of(dmd);
    FUZZ_CHECK(taken.record.step >= 0 && taken.record.warm_up >= 0 && taken.record.seed == 7);
    for (int role = 0; role < (int)XD_DMD_TEACHER; role++)
        FUZZ_CHECK(taken.record.updates[role] >= 0 && taken.record.updates[role] <= taken.record.step);
    check_bins(taken.text);
    FUZZ_CHECK(xd_dmd_state_load(dmd, taken.text, NULL) == XD_OK);
    position again = position_of(dmd);
    FUZZ_CHECK(position_is(&taken, &again));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static const xd_dmd_state_desc strict, loose = { 15, true };
    xd_dmd *dmd = distillation();
    char *text = (char *)malloc(bytes + 1);
    FUZZ_CHECK(text != NULL);
    if (bytes) memcpy(text, data, bytes);
    text[bytes] = '\0';
    for (int i = 0; i < 2; i++) {
        position before = position_of(dmd);
        if (xd_dmd_state_load(dmd, text, i ? &loose : &strict) == XD_OK) {
            xd_release(fuzz_ctx(), before.text);
            use(dmd);
            continue;
        }
        position after = position_of(dmd);
        FUZZ_CHECK(position_is(&before, &after) && xd_last_error(fuzz_ctx())->message[0]);
    }
    if (getenv("FUZZ_SHOW")) { /* to make seeds of */
        char *shown = NULL;
        FUZZ_CHECK(xd_dmd_state_save(dmd, &shown) == XD_OK);
        puts(shown);
        xd_release(fuzz_ctx(), shown);
    }
    free(text);
    return 0;
}
