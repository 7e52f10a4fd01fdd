/* pair.c - `xdistill pair`: what two tokenizers share, how their tokens of a text line up, and the projection between them. */
#define _POSIX_C_SOURCE 200809L /* stat */
#include "command.h"
#include "pair_steps.h"
#include "ranks.h"
#include "vocabulary.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

typedef struct pair_options {
    const char *student, *teacher, *text, *out, *show;
    xd_tokenizer_preset student_preset, teacher_preset;
    int pieces, keep, steps, ranks;
    uint64_t seed;
    bool reverse, special, no_exact;
} pair_options;

#define PAIR_FIELD(field) offsetof(pair_options, field)

static bool pair_parse_student(const char *text, void *options) {
    return vocabulary_preset(text, &((pair_options *)options)->student_preset);
}

static bool pair_parse_teacher(const char *text, void *options) {
    return vocabulary_preset(text, &((pair_options *)options)->teacher_preset);
}

static const option pair_table[] = {
    { .name = "--student",
      .value = "PATH",
      .kind = OPTION_PATH,
      .field = PAIR_FIELD(student),
      .help = "a tokenizer.json, a model directory, a GGUF file, a SentencePiece model, or a rank file" },
    { .name = "--teacher",
      .value = "PATH",
      .kind = OPTION_PATH,
      .field = PAIR_FIELD(teacher),
      .help = "the same of the teacher" },
    { .name = "--text",
      .value = "FILE",
      .kind = OPTION_PATH,
      .field = PAIR_FIELD(text),
      .help = "UTF-8 text whose tokens are aligned" },
    { .name = "--out",
      .value = "FILE",
      .kind = OPTION_PATH,
      .field = PAIR_FIELD(out),
      .help = "gets the projection; in a folder, under the name that a cache of projections has" },
    { .name = "--show",
      .value = "FILE",
      .kind = OPTION_PATH,
      .field = PAIR_FIELD(show),
      .help = "instead of all this: what a projection file holds, and whether it is whole" },
    { .name = "--steps",
      .value = "N",
      .kind = OPTION_INT,
      .field = PAIR_FIELD(steps),
      .least = 0,
      .most = 100000,
      .help = "with --text: of training between small random models with these vocabularies (0)" },
    { .name = "--ranks",
      .value = "N",
      .kind = OPTION_INT,
      .field = PAIR_FIELD(ranks),
      .least = 1,
      .most = 64,
      .help = "threads that share the student's vocabulary there (2)" },
    { .name = "--seed",
      .value = "N",
      .kind = OPTION_UINT64,
      .field = PAIR_FIELD(seed),
      .least = 1,
      .most = 1000000000,
      .help = "of its rows and weights (1)" },
    { .name = "--pieces",
      .value = "N",
      .kind = OPTION_INT,
      .field = PAIR_FIELD(pieces),
      .least = 1,
      .most = 64,
      .help = "first pieces of a token that get votes (4)" },
    { .name = "--keep",
      .value = "N",
      .kind = OPTION_INT,
      .field = PAIR_FIELD(keep),
      .least = 1,
      .most = 4096,
      .help = "teacher ids that are kept of a student id (4)" },
    { .name = "--reverse",
      .value = "",
      .kind = OPTION_FLAG,
      .field = PAIR_FIELD(reverse),
      .help = "the teacher's tokens vote, too" },
    { .name = "--special",
      .value = "",
      .kind = OPTION_FLAG,
      .field = PAIR_FIELD(special),
      .help = "special tokens that look alike vote" },
    { .name = "--no-exact",
      .value = "",
      .kind = OPTION_FLAG,
      .field = PAIR_FIELD(no_exact),
      .help = "tokens that both have are split into pieces like any other" },
    { .name = "--student-preset",
      .value = "NAME",
      .kind = OPTION_PARSED,
      .takes = VOCABULARY_PRESETS,
      .parse = pair_parse_student,
      .help = "rules of a rank file: " VOCABULARY_PRESETS },
    { .name = "--teacher-preset",
      .value = "NAME",
      .kind = OPTION_PARSED,
      .takes = VOCABULARY_PRESETS,
      .parse = pair_parse_teacher,
      .help = "the same of the teacher" },
};

static const command_line pair_command = {
    "pair",
    "--student PATH --teacher PATH [options]",
    "Builds the projection from a student's vocabulary to a teacher's, and prints\n"
    "what it covers and what both share. With a text it prints how tokens line up,\n"
    "and what training between these vocabularies takes.",
    "xdistill pair --student run/student --teacher smollm2.gguf --out s.xdproj",
    pair_table,
    (int)(sizeof pair_table / sizeof pair_table[0])
};

typedef struct pair_sides {
    xd_tokenizer *student, *teacher;
    xd_projection projection;
} pair_sides;

/* ---- vocabularies ---- */

static double pair_percent(int64_t part, int64_t whole) {
    return whole ? 100.0 * (double)part / (double)whole : 0.0;
}

/* Student tokens of text whose bytes are a token of the teacher's, and all of them. */
static void pair_overlap(const pair_sides *s, int64_t *same, int64_t *all) {
    const int32_t size = xd_tokenizer_describe(s->student).size;
    *same = *all = 0;
    for (int32_t id = 0; id < size; id++) {
        const xd_token token = xd_tokenizer_token(s->student, id);
        if (token.kind != XD_TOKEN_KIND_NORMAL) continue;
        ++*all;
        if (xd_tokenizer_find(s->teacher, token.bytes, token.length) >= 0) ++*same;
    }
}

static void pair_print_matrix(const xd_projection *p) {
    printf("student tokenizer   %016llx\n", (unsigned long long)p->origin.student_hash);
    printf("teacher tokenizer   %016llx\n", (unsigned long long)p->origin.teacher_hash);
    printf("matrix              %lld x %lld, %lld entries\n", (long long)p->student_size,
           (long long)p->teacher_size, (long long)p->entries);
}

static void pair_print(const pair_sides *s, const xd_projection_report *r) {
    int64_t same = 0, all = 0;
    pair_overlap(s, &same, &all);
    pair_print_matrix(&s->projection);
    printf("student tokens      %lld\n", (long long)r->tokens);
    printf("  of text           %lld, of which %lld are the teacher's too (%.2f%%)\n", (long long)all,
           (long long)same, pair_percent(same, all));
    printf("  covered           %lld (%.2f%%)\n", (long long)r->covered, pair_percent(r->covered, r->tokens));
    printf("  the same in both  %lld (%.2f%%)\n", (long long)r->exact, pair_percent(r->exact, r->tokens));
    printf("  without mapping   %lld\n", (long long)(r->tokens - r->covered));
    printf("  pieces cut off    %lld\n", (long long)r->cut);
    printf("pieces a token      %.3f\n", r->mean_pieces);
    printf("bytes lost          %.3f%%\n", 100.0 * r->lost_bytes);
    printf("votes lost          %.3f%%\n", 100.0 * r->lost_mass);
}

static xd_result pair_save(xd_ctx *ctx, const char *out, const xd_projection *p) {
    char name[XD_PROJECTION_NAME_BYTES], path[640];
    struct stat info;
    xd_projection_cache_name(&p->origin, name);
    const bool folder = stat(out, &info) == 0 && S_ISDIR(info.st_mode);
    snprintf(path, sizeof path, "%s%s%s", out, folder ? "/" : "", folder ? name : "");
    XD_TRY(command_check_output(ctx, path, "projection", "XDPROJ"));
    XD_TRY(xd_projection_save(ctx, path, p));
    printf("written to          %s\n", path);
    return XD_OK;
}

static xd_result pair_build(xd_ctx *ctx, const pair_options *o, pair_sides *s) {
    xd_projection_options options = xd_projection_defaults();
    xd_projection_report report;
    if (o->pieces) options.max_pieces = o->pieces;
    if (o->keep) options.k = o->keep;
    options.reverse = o->reverse;
    options.special_pairs = o->special;
    options.disable_exact = o->no_exact;
    const xd_projection_desc desc = { s->student, s->teacher, &options, NULL };
    const double start = xd_now(ctx);
    XD_TRY(xd_projection_build(ctx, &desc, &s->projection, &report));
    const double seconds = xd_now(ctx) - start;
    pair_print(s, &report);
    printf("built in            %.1f s, %.0f MiB at most so far\n", seconds, ranks_peak_mib());
    return o->out ? pair_save(ctx, o->out, &s->projection) : XD_OK;
}

/* ---- a text ---- */

static void pair_print_text(const tokens *student, const tokens *teacher, const xd_align_report *r) {
    printf("text                %zu bytes, %lld and %lld tokens\n", student->bytes, (long long)student->count,
           (long long)teacher->count);
    printf("chunks              %lld, %.4f a student token\n", (long long)r->chunks,
           student->count ? (double)r->chunks / (double)student->count : 0.0);
    printf("  exact             %lld (%.2f%%)\n", (long long)r->exact, pair_percent(r->exact, r->chunks));
    printf("  of one side       %lld\n", (long long)r->one_sided);
    printf("  bytes lost        %lld\n", (long long)r->lost_bytes);
}

static xd_result pair_train(xd_ctx *ctx, const pair_options *o, const pair_sides *s, const pairing *text) {
    const pair_steps_desc desc = { text, &s->projection, o->steps, o->ranks, o->seed };
    pair_steps done;
    XD_TRY(pair_steps_run(ctx, &desc, &done));
    printf("steps               %d of %d rows of %d tokens on %d ranks\n", o->steps, (int)PAIR_STEPS_ROWS,
           (int)PAIR_STEPS_ROW, o->ranks);
    printf("  loss              %.4f -> %.4f\n", done.first_loss, done.last_loss);
    printf("  a step            %.2f s, %.0f MiB at most\n", done.seconds / o->steps, ranks_peak_mib());
    return XD_OK;
}

static xd_result pair_align(xd_ctx *ctx, const pair_options *o, const pair_sides *s, const tokens both[2]) {
    pairing text;
    xd_align_report report;
    XD_TRY(pairing_align(ctx, &both[0], &both[1], &text, &report));
    pair_print_text(&both[0], &both[1], &report);
    const xd_result result = o->steps ? pair_train(ctx, o, s, &text) : XD_OK;
    pairing_free(ctx, &text);
    return result;
}

static xd_result pair_text(xd_ctx *ctx, const pair_options *o, const pair_sides *s) {
    char *text = NULL;
    size_t bytes = 0;
    tokens both[2];
    memset(both, 0, sizeof both);
    XD_TRY(text_load(ctx, o->text, &text, &bytes));
    xd_result result = tokens_encode(ctx, s->student, text, bytes, &both[0]);
    if (result == XD_OK) result = tokens_encode(ctx, s->teacher, text, bytes, &both[1]);
    if (result == XD_OK) result = pair_align(ctx, o, s, both);
    tokens_free(ctx, &both[0]);
    tokens_free(ctx, &both[1]);
    xd_release(ctx, text);
    return result;
}

/* ---- the command ---- */

/* A damaged file is refused. */
static xd_result pair_show(xd_ctx *ctx, const char *path, xd_projection *p) {
    XD_TRY(xd_projection_load(ctx, &(xd_projection_load_desc){ .path = path }, p));
    pair_print_matrix(p);
    printf("pieces, kept        %lld, %lld\n", (long long)p->origin.options.max_pieces,
           (long long)p->origin.options.k);
    return XD_OK;
}

static xd_result pair_run(xd_ctx *ctx, const pair_options *o, pair_sides *s) {
    if (o->show) return pair_show(ctx, o->show, &s->projection);
    XD_TRY(vocabulary_open(ctx, o->student, o->student_preset, &s->student));
    XD_TRY(vocabulary_open(ctx, o->teacher, o->teacher_preset, &s->teacher));
    XD_TRY(pair_build(ctx, o, s));
    return o->text ? pair_text(ctx, o, s) : XD_OK;
}

int command_pair(xd_ctx *ctx, int count, char **words) {
    pair_options o;
    pair_sides s;
    int status;
    memset(&o, 0, sizeof o);
    memset(&s, 0, sizeof s);
    o.ranks = 2;
    o.seed = 1;
    if (!command_parse(&pair_command, count, words, &o, &status)) return status;
    if (!o.show && (!o.student || !o.teacher))
        return command_lacks(&pair_command, !o.student ? "--student" : "--teacher");
    if (o.steps && !o.text) return command_lacks(&pair_command, "--text");
    const xd_result result = pair_run(ctx, &o, &s);
    xd_projection_destroy(ctx, &s.projection);
    xd_tokenizer_destroy(s.student);
    xd_tokenizer_destroy(s.teacher);
    return command_end(ctx, "pair", result);
}
