/* distil.c - `xdistill distil`: a teacher, a text, a student that is measured honestly. */
#include "distil.h"
#include "../../examples/common/model_directory.h"
#include "command.h"
#include "bpe.h"
#include "interrupt.h"
#include "judge.h"
#include "ranks.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define DISTIL_FIELD(field) offsetof(distil_options, field)

static const option distil_table[] = {
    { .name = "--teacher",
      .value = "PATH",
      .kind = OPTION_PATH,
      .field = DISTIL_FIELD(teacher),
      .help = "a GGUF file or a Hugging Face directory of type llama, qwen2 or qwen3" },
    { .name = "--text",
      .value = "FILE",
      .kind = OPTION_PATH,
      .field = DISTIL_FIELD(text),
      .help = "UTF-8 text, 4096 bytes at least" },
    { .name = "--report-text",
      .value = "FILE",
      .kind = OPTION_PATH,
      .field = DISTIL_FIELD(report_text),
      .help = "the text that the report is of (a part of --text)" },
    { .name = "--out",
      .value = "DIR",
      .kind = OPTION_PATH,
      .field = DISTIL_FIELD(out),
      .help = "results; an interrupted run there goes on" },
    { .name = "--teacher-layers",
      .value = "N",
      .kind = OPTION_INT,
      .field = DISTIL_FIELD(teacher_layers),
      .least = 1,
      .most = 256,
      .help = "the student is the teacher's first layers and its last (a fifth of them, at least 2)" },
    { .name = "--from",
      .value = "DIR",
      .kind = OPTION_PATH,
      .field = DISTIL_FIELD(from),
      .help = "or a Hugging Face directory" },
    { .name = "--layers",
      .value = "N",
      .kind = OPTION_INT,
      .field = DISTIL_FIELD(layers),
      .least = 1,
      .most = 256,
      .help = "or this many layers of random weights" },
    { .name = "--hidden",
      .value = "N",
      .kind = OPTION_INT,
      .field = DISTIL_FIELD(hidden),
      .least = 8,
      .most = 16384,
      .help = "their width (128)" },
    { .name = "--heads",
      .value = "N",
      .kind = OPTION_INT,
      .field = DISTIL_FIELD(heads),
      .least = 1,
      .most = 256,
      .help = "their heads (4)" },
    { .name = "--vocabulary",
      .value = "N",
      .kind = OPTION_INT,
      .field = DISTIL_FIELD(vocabulary),
      .least = BPE_LEAST_ENTRIES,
      .most = BPE_MOST_ENTRIES,
      .help = "with --layers: a tokenizer of so many entries, trained on the text (the teacher's)" },
    { .name = "--tokenizer",
      .value = "FILE",
      .kind = OPTION_PATH,
      .field = DISTIL_FIELD(tokenizer),
      .help = "with --layers: a tokenizer.json" },
    { .name = "--steps",
      .value = "N",
      .kind = OPTION_INT,
      .field = DISTIL_FIELD(steps),
      .least = 1,
      .most = 1000000,
      .help = "of training (the text four times, 100 to 1000)" },
    { .name = "--batch",
      .value = "N",
      .kind = OPTION_INT,
      .field = DISTIL_FIELD(batch),
      .least = 1,
      .most = 4096,
      .help = "rows of a step (4)" },
    { .name = "--row",
      .value = "N",
      .kind = OPTION_INT,
      .field = DISTIL_FIELD(row),
      .least = 16,
      .most = 8192,
      .help = "tokens of a row (128)" },
    { .name = "--lr",
      .value = "X",
      .kind = OPTION_DOUBLE,
      .field = DISTIL_FIELD(lr),
      .from = 1e-7,
      .to = 1.0,
      .help = "learning rate (0.001; random weights 0.003)" },
    { .name = "--kd-weight",
      .value = "X",
      .kind = OPTION_DOUBLE,
      .field = DISTIL_FIELD(kd_weight),
      .from = 0.0,
      .to = 100.0,
      .help = "of the teacher (1; with another tokenizer 0.8)" },
    { .name = "--ce-weight",
      .value = "X",
      .kind = OPTION_DOUBLE,
      .field = DISTIL_FIELD(ce_weight),
      .from = 0.0,
      .to = 100.0,
      .help = "of the text itself (0; with another tokenizer 0.4)" },
    { .name = "--temperature",
      .value = "X",
      .kind = OPTION_DOUBLE,
      .field = DISTIL_FIELD(temperature),
      .from = 0.1,
      .to = 100.0,
      .help = "of teacher and student (1)" },
    { .name = "--likeliest",
      .value = "N",
      .kind = OPTION_INT,
      .field = DISTIL_FIELD(likeliest),
      .least = 1,
      .most = 512,
      .help = "tokens that the cache has of a position (6; with another tokenizer 128)" },
    { .name = "--draws",
      .value = "N",
      .kind = OPTION_INT,
      .field = DISTIL_FIELD(draws),
      .least = 0,
      .most = 512,
      .help = "and draws of the others (6; with another tokenizer 0); 0 keeps only what they have together" },
    { .name = "--live",
      .value = "",
      .kind = OPTION_FLAG,
      .field = DISTIL_FIELD(live),
      .help = "runs the teacher on every row of every step, instead of once over the text" },
    { .name = "--held-out",
      .value = "X",
      .kind = OPTION_DOUBLE,
      .field = DISTIL_FIELD(held_out),
      .from = 0.05,
      .to = 0.5,
      .help = "share of the text that is not learned from (0.2)" },
    { .name = "--seed",
      .value = "N",
      .kind = OPTION_UINT64,
      .field = DISTIL_FIELD(seed),
      .least = 1,
      .most = 1000000000,
      .help = "of rows, draws and random weights (1)" },
    { .name = "--ranks",
      .value = "N",
      .kind = OPTION_INT,
      .field = DISTIL_FIELD(ranks),
      .least = 1,
      .most = 64,
      .help = "threads (2)" },
    { .name = "--alone",
      .value = "",
      .kind = OPTION_FLAG,
      .field = DISTIL_FIELD(alone),
      .help = "trains the same student without a teacher, too (if that takes less than 15 minutes)" },
    { .name = "--no-alone",
      .value = "",
      .kind = OPTION_FLAG,
      .field = DISTIL_FIELD(no_alone),
      .help = "does not" },
    { .name = "--whole",
      .value = "",
      .kind = OPTION_FLAG,
      .field = DISTIL_FIELD(whole),
      .help = "does all steps, even if the student gets no better" },
    { .name = "--overwrite",
      .value = "",
      .kind = OPTION_FLAG,
      .field = DISTIL_FIELD(overwrite),
      .help = "replaces a finished run in DIR" },
};

static const command_line distil_command = {
    "distil",
    "--teacher PATH --text FILE --out DIR [options]",
    "Trains a small student from a teacher on your text: caches what the teacher\n"
    "says, trains, keeps the student that is best on a part of the text that it\n"
    "does not learn from, and reports it on another such part. DIR gets the student,\n"
    "a directory that transformers opens, and report.html.",
    "xdistill distil --teacher SmolLM2.gguf --text mine.txt --out run",
    distil_table,
    (int)(sizeof distil_table / sizeof distil_table[0])
};

/* ---- names ---- */

const char *distil_arm_name(distil_arm_kind arm) {
    return arm == DISTIL_TAUGHT ? "student" : "text alone";
}

void distil_state_path(const distil_run *r, distil_arm_kind arm, char path[512]) {
    snprintf(path, 512, "%s/%s.state", r->o->out, arm == DISTIL_TAUGHT ? "student" : "alone");
}

void distil_student_name(const distil_run *r, char out[96]) {
    const nn_config *c = &r->config;
    if (r->student.kind == STUDENT_LAYERS)
        snprintf(out, 96, "the teacher's first %d of %d layers and its last, embedding frozen", c->layers - 1,
                 r->teacher.config.layers);
    else if (r->student.kind == STUDENT_RANDOM)
        snprintf(out, 96, "%d layers of width %d, random; %d tokens", c->layers, c->hidden, c->vocab);
    else
        snprintf(out, 96, "%.60s, %d layers", ranks_base_name(r->student.from), c->layers);
}

/* ---- settings ---- */

static distil_options distil_defaults(void) {
    distil_options o;
    memset(&o, 0, sizeof o);
    o.batch = 4;
    o.row = 128;
    o.ranks = 2;
    o.draws = -1;
    o.seed = 1;
    o.kd_weight = o.ce_weight = -1.0;
    o.temperature = 1.0;
    o.held_out = 0.2;
    return o;
}

/* What cannot be together; NULL when all is well. */
static const char *distil_conflict(const distil_options *o) {
    const bool random = o->layers || o->hidden || o->heads;
    if ((o->teacher_layers != 0) + (o->from != NULL) + random > 1)
        return "--teacher-layers, --from and --layers name three students: give one";
    if ((o->hidden || o->heads) && !o->layers) return "--hidden and --heads are of --layers";
    if (o->vocabulary && o->tokenizer) return "--vocabulary and --tokenizer name two tokenizers: give one";
    if ((o->vocabulary || o->tokenizer) && !o->layers)
        return "--vocabulary and --tokenizer are of --layers: other students know their tokens";
    if (o->alone && o->no_alone) return "--alone and --no-alone contradict each other";
    if (o->live && (o->likeliest || o->draws >= 0))
        return "--likeliest and --draws are of a cache, --live has none";
    if (o->kd_weight == 0.0 && o->ce_weight <= 0.0) return "--kd-weight and --ce-weight are both 0";
    return NULL;
}

/* What works with the teacher's tokenizer, and with another: draws stand for themselves, projected lists are of the likeliest. */
static void distil_choose_teaching(distil_options *o, bool other) {
    if (o->likeliest == 0) o->likeliest = other ? 128 : 6;
    if (o->draws < 0) o->draws = other ? 0 : 6;
    if (o->kd_weight < 0.0) o->kd_weight = other ? 0.8 : 1.0;
    if (o->ce_weight < 0.0) o->ce_weight = other ? 0.4 : 0.0;
}

static void distil_choose(distil_run *r) {
    const distil_options *o = r->o;
    const double tokens = (double)r->text[TEXT_TRAIN].count, step = (double)o->batch * o->row;
    const int fifth = r->teacher.config.layers / 5, least = r->teacher.config.layers < 2 ? 1 : 2;
    r->student.kind = o->from ? STUDENT_FROM : o->layers ? STUDENT_RANDOM : STUDENT_LAYERS;
    r->student.layers = o->layers           ? o->layers
                        : o->teacher_layers ? o->teacher_layers
                        : fifth > least     ? fifth
                                            : least;
    r->student.hidden = o->hidden ? o->hidden : 128;
    r->student.heads = o->heads ? o->heads : 4;
    r->student.from = o->from;
    r->student.seed = o->seed;
    r->student.own = r->own.tokenizer != NULL;
    r->student.vocabulary = r->own.tokenizer ? xd_tokenizer_describe(r->own.tokenizer).size : 0;
    r->steps = o->steps ? o->steps : (int)fmin(fmax(4.0 * tokens / step, 100.0), 1000.0);
}

static double distil_rate(const distil_run *r) {
    return r->o->lr != 0.0 ? r->o->lr : r->student.kind == STUDENT_RANDOM ? 3e-3 : 1e-3;
}

/* Everything that the bits of a run depend on. */
static void distil_say_facts(distil_run *r) {
    const distil_options *o = r->o;
    const nn_config *c = &r->config;
    snprintf(r->facts, sizeof r->facts,
             "teacher %.80s, tokenizer %016llx, text %08x, held out %g, student %d layers of %d (kind %d), "
             "steps %d, batch %d, "
             "row %d, lr %g, kd "
             "%g, ce %g, temperature %g, likeliest %d, draws %d%s, seed %llu, ranks %d",
             r->teacher.name, (unsigned long long)xd_tokenizer_describe(distil_tokenizer(r)).hash,
             xd_crc32c(0, r->split.data[TEXT_TRAIN], r->split.bytes[TEXT_TRAIN]), o->held_out, c->layers,
             c->hidden, (int)r->student.kind, r->steps, o->batch, o->row, distil_rate(r), o->kd_weight,
             o->ce_weight, o->temperature, o->likeliest, o->draws, o->live ? ", live" : "",
             (unsigned long long)o->seed, o->ranks);
}

/* ---- the run ---- */

/* What is read before any weight is. */
static xd_result distil_read(distil_run *r) {
    const distil_options *o = r->o;
    const text_split_desc split = { o->text, o->held_out, o->report_text };
    XD_TRY(text_split_load(r->ctx, &split, &r->split));
    XD_TRY(lm_open(r->ctx, o->teacher, &r->teacher));
    XD_TRY(distil_choose_tokenizer(r));
    XD_TRY(distil_encode(r));
    distil_choose_teaching(r->o, r->own.tokenizer != NULL);
    distil_choose(r);
    XD_TRY(student_config(r->ctx, &r->student, &r->teacher, &r->config));
    distil_say_facts(r);
    r->plan = (cache_plan){ .teacher = &r->teacher,
                            .text = distil_teacher_text(r, TEXT_TRAIN),
                            .folder = r->cache_folder,
                            .k = o->likeliest,
                            .draws = o->draws,
                            .temperature = o->temperature,
                            .ranks = o->ranks,
                            .seed = o->seed };
    XD_REQUIRE(r->ctx, o->ranks <= o->batch, XD_ERROR_ARGUMENT,
               "--ranks %d share --batch %d rows: each needs one", o->ranks, o->batch);
    XD_REQUIRE(r->ctx, o->likeliest <= r->teacher.config.vocab, XD_ERROR_ARGUMENT,
               "--likeliest %d of %d tokens", o->likeliest, r->teacher.config.vocab);
    XD_REQUIRE(r->ctx, o->row <= r->teacher.positions, XD_ERROR_ARGUMENT,
               "--row %d: %s reads at most %d tokens", o->row, r->teacher.name, r->teacher.positions);
    XD_REQUIRE(r->ctx, r->text[TEXT_TRAIN].count > o->row + 1, XD_ERROR_DATA,
               "the text has %lld tokens to learn from, a row takes %d", (long long)r->text[TEXT_TRAIN].count,
               o->row + 1);
    return XD_OK;
}

/* Measures some weights of some model on the report's part. */
typedef struct distil_measure {
    const nn_config *config;
    const float *weights;
    const tokens *text;
    int row;
    double bits; /* rank 0's */
} distil_measure;

static xd_result distil_measure_rank(xd_comm *world, void *argument) {
    distil_measure *m = (distil_measure *)argument;
    double bits = 0.0;
    judge j;
    xd_result result = xd_agree(world, judge_create(world, m->config, m->row, &j));
    if (result == XD_OK) result = judge_bits(&j, m->weights, m->text, &bits);
    if (result == XD_OK && xd_comm_rank(world) == 0) m->bits = bits;
    judge_free(&j);
    return result;
}

static xd_result distil_report_bits(distil_run *r, const nn_config *config, const float *weights,
                                    const tokens *text, double *bits) {
    distil_measure m = { config, weights, text, r->o->row, 0.0 };
    XD_TRY(ranks_run(r->ctx, r->o->ranks, distil_measure_rank, &m));
    *bits = m.bits;
    return XD_OK;
}

/* Students are measured as they are saved: in bf16. */
static void distil_round(const distil_run *r, float *weights) {
    const int64_t count = lm_weight_count(&r->config);
    for (int64_t i = 0; i < count; i++) weights[i] = xd_f32_from_bf16(xd_bf16_from_f32(weights[i]));
}

static xd_result distil_teach(distil_run *r, distil_arm_kind kind) {
    distil_arm *arm = &r->arms[kind];
    char state[512];
    lesson_desc desc;
    memset(&desc, 0, sizeof desc);
    distil_state_path(r, kind, state);
    desc.name = distil_arm_name(kind);
    desc.student = r->config;
    desc.frozen_ends = r->student.kind == STUDENT_LAYERS;
    desc.start = r->start;
    desc.text = &r->text[TEXT_TRAIN];
    desc.choose = &r->text[TEXT_CHOOSE];
    desc.teacher = kind == DISTIL_TAUGHT && !r->o->live ? &r->cache : NULL;
    desc.live = kind == DISTIL_TAUGHT && r->o->live ? &r->teacher : NULL;
    desc.pair = r->own.tokenizer && kind == DISTIL_TAUGHT ? &r->pair : NULL;
    desc.kd_weight = r->o->kd_weight;
    desc.ce_weight = r->o->ce_weight;
    desc.temperature = r->o->temperature;
    desc.learning_rate = distil_rate(r);
    desc.rows = r->o->batch;
    desc.row = r->o->row;
    desc.steps = r->steps;
    desc.ranks = r->o->ranks;
    desc.stop_early = !r->o->whole;
    desc.seed = r->o->seed;
    desc.state = state;
    desc.facts = r->facts;
    XD_TRY(lesson_run(r->ctx, &desc, &arm->lesson));
    distil_round(r, arm->lesson.best);
    distil_round(r, arm->lesson.last);
    printf("%s: measuring the report's part\n", distil_arm_name(kind));
    XD_TRY(distil_report_bits(r, &r->config, arm->lesson.best, &r->text[TEXT_REPORT], &arm->best));
    XD_TRY(distil_report_bits(r, &r->config, arm->lesson.last, &r->text[TEXT_REPORT], &arm->last));
    arm->done = true;
    return XD_OK;
}

/* The best student, as a directory, and what it writes. */
static xd_result distil_save(distil_run *r, distil_arm_kind kind) {
    distil_arm *arm = &r->arms[kind];
    char path[512], beginning[TEXT_BEGINNING];
    nn_model model;
    const bool own = r->own.tokenizer != NULL;
    const int32_t end = own ? r->own.end_of_text : r->teacher.end_of_text;
    const model_extras extras = { .tokenizer_text = own ? r->own.json : r->teacher.tokenizer_text,
                                  .tokenizer_bytes = own ? r->own.json_bytes : r->teacher.tokenizer_bytes,
                                  .end_token = end < 0 ? NULL
                                               : own   ? r->own.end_token
                                                       : r->teacher.end_token,
                                  .end_of_text = end,
                                  .positions = r->teacher.positions };
    snprintf(path, sizeof path, "%s/%s", r->o->out, kind == DISTIL_TAUGHT ? "student" : "alone");
    const char *problem = nn_model_init(&r->config, NULL, NULL, &model);
    XD_REQUIRE(r->ctx, !problem, XD_ERROR_ARGUMENT, "model: %s", problem);
    text_beginning(r->split.data[TEXT_REPORT], r->split.bytes[TEXT_REPORT], beginning);
    xd_result result = sample_write(r->ctx, &model, arm->lesson.best, distil_tokenizer(r), beginning,
                                    r->o->seed, arm->sample);
    if (result == XD_OK) result = model_directory_save(r->ctx, path, &model, arm->lesson.best, &extras);
    nn_model_free(&model);
    return result;
}

static xd_result distil_cache(distil_run *r) {
    const double start = xd_now(r->ctx);
    XD_TRY(cache_write(r->ctx, &r->plan));
    r->cache_seconds = xd_now(r->ctx) - start;
    return cached_open(r->ctx, &r->plan, &r->cache);
}

static xd_result distil_go(distil_run *r) {
    interrupt_listen();
    XD_TRY(distil_read(r));
    XD_TRY(distil_open_folder(r));
    XD_TRY(distil_plan(r));
    XD_TRY(lm_load_weights(r->ctx, &r->teacher));
    if (!r->o->live) XD_TRY(distil_cache(r));
    XD_TRY(distil_pair(r));
    XD_TRY(student_weights(r->ctx, &r->student, &r->teacher, &r->config, &r->start));
    XD_TRY(distil_report_bits(r, &r->teacher.config, r->teacher.weights, distil_teacher_text(r, TEXT_REPORT),
                              &r->teacher_bits));
    for (int arm = 0; arm < (r->wants_alone ? DISTIL_ARMS : DISTIL_ALONE); arm++) {
        XD_TRY(distil_teach(r, (distil_arm_kind)arm));
        XD_TRY(distil_save(r, (distil_arm_kind)arm));
    }
    XD_TRY(distil_write(r));
    distil_forget_states(r->o->out);
    distil_print(r);
    return XD_OK;
}

static void distil_free(distil_run *r) {
    for (int arm = 0; arm < DISTIL_ARMS; arm++) lesson_free(r->ctx, &r->arms[arm].lesson);
    xd_release(r->ctx, r->start);
    cached_close(r->ctx, &r->cache);
    pairing_free(r->ctx, &r->pair);
    for (int p = 0; p < TEXT_PARTS; p++) {
        tokens_free(r->ctx, &r->text[p]);
        tokens_free(r->ctx, &r->teacher_text[p]);
    }
    distil_tokenizer_free(r);
    lm_free(r->ctx, &r->teacher);
    text_split_free(r->ctx, &r->split);
    folder_lock_release(r->ctx, r->lock);
}

int command_distil(xd_ctx *ctx, int count, char **words) {
    distil_options o = distil_defaults();
    distil_run r;
    int status;
    if (!command_parse(&distil_command, count, words, &o, &status)) return status;
    if (!o.teacher || !o.text || !o.out)
        return command_lacks(&distil_command, !o.teacher ? "--teacher" : !o.text ? "--text" : "--out");
    if (distil_conflict(&o)) {
        fprintf(stderr, "xdistill distil: %s\n", distil_conflict(&o));
        return COMMAND_BROKEN;
    }
    memset(&r, 0, sizeof r);
    r.ctx = ctx;
    r.o = &o;
    const xd_result result = distil_go(&r);
    distil_free(&r);
    return command_end(ctx, "distil", result);
}
