/* The two aligners on one text of 2048 tokens a side: the sweep over byte spans, compared with the dynamic programme
 * over token strings without an anchor that divides it.
 *
 *     make bench-all  or      build/bench/align [-J FILE]
 */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "bench.h"

enum { TOKENS = 2048, MOST = 6, BYTES = TOKENS * MOST, REPEATS = 50 };

/* One side: the text divided after 1 to MOST bytes, so that half of the boundaries meet. */
typedef struct align_side {
    xd_token_span spans[TOKENS];
    xd_text strings[TOKENS];
} align_side;

typedef struct align_case {
    xd_ctx *ctx;
    char text[BYTES];
    align_side student, teacher;
    int64_t chunks;
} align_case;

static bench_machine machine;
static uint32_t seed = 5;

static uint32_t below(uint32_t n) {
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 8) % n;
}

static void require(xd_ctx *ctx, xd_result result) {
    if (result == XD_OK) return;
    fprintf(stderr, "%s: %s\n", xd_result_name(result), xd_last_error(ctx)->message);
    exit(2);
}

static void cut(align_side *side, const char *text) {
    int64_t at = 0;
    for (int i = 0; i < TOKENS; i++) {
        const int64_t left = BYTES - at, size = i + 1 == TOKENS ? left : 1 + (int64_t)below(MOST - 1);
        side->spans[i].begin = at;
        side->spans[i].end = at + size;
        side->strings[i].data = text + at;
        side->strings[i].size = size;
        at += size;
    }
}

/* Few letters, so that no triple of tokens is unique and there is no anchor. */
static void open_case(align_case *c) {
    for (int i = 0; i < BYTES; i++) c->text[i] = (char)('a' + below(3));
    cut(&c->student, c->text);
    cut(&c->teacher, c->text);
    require(NULL, xd_ctx_create(NULL, &c->ctx));
}

static void run_sweep(align_case *c) {
    const xd_align_side student = { c->student.spans, NULL, NULL, NULL, TOKENS };
    const xd_align_side teacher = { c->teacher.spans, NULL, NULL, NULL, TOKENS };
    xd_alignment out;
    require(c->ctx, xd_align_bytes(c->ctx, &student, &teacher, &out, NULL));
    c->chunks = out.count;
    xd_alignment_destroy(c->ctx, &out);
}

static void run_programme(align_case *c) {
    xd_alignment out;
    const xdi_align_dp_desc desc = { .student = { c->student.strings, TOKENS },
                                     .teacher = { c->teacher.strings, TOKENS } };
    require(c->ctx, xdi_align_segment(c->ctx, &desc, &out, NULL));
    xd_alignment_destroy(c->ctx, &out);
}

static double thread_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static double measure_sweep(void *state) {
    const double begin = thread_seconds();
    for (int i = 0; i < REPEATS; i++) run_sweep((align_case *)state);
    return (thread_seconds() - begin) / REPEATS;
}

static double measure_programme(void *state) {
    const double begin = thread_seconds();
    run_programme((align_case *)state);
    return thread_seconds() - begin;
}

int main(int argc, char **argv) {
    static align_case c;
    FILE *json = bench_open_json(argc, argv);
    const bench_arm sweep = { "sweep", &c, NULL, measure_sweep },
                    programme = { "programme", &c, NULL, measure_programme };
    bench_row row;
    double best = INFINITY;
    memset(&row, 0, sizeof row);
    row.op = "align";
    row.variant = "sweep; ref: programme";
    row.shape = "\"n\":2048,\"m\":2048";
    row.dtype = "text";
    row.ceiling_name = "";
    machine = bench_measure_machine((size_t)16 << 20);
    bench_header(&machine, "aligners, one core, time of the thread's processor");
    open_case(&c);
    const bool right = bench_run(json, &machine, &row, &sweep, &programme);
    for (int round = 0; round < BENCH_ROUNDS; round++) best = fmin(best, measure_sweep(&c));
    printf("#   %lld chunks; the sweep takes %.1f ns a token of one side\n", (long long)c.chunks,
           best * 1e9 / TOKENS);
    if (json) fclose(json);
    return right ? 0 : 1;
}
