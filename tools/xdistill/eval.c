/* eval.c - `xdistill eval`: bits per byte of a model on a text. */
#include "command.h"
#include "judge.h"
#include "lm.h"
#include "ranks.h"

#include <stdio.h>
#include <string.h>

typedef struct eval_options {
    const char *model, *text;
    int row, ranks, repeat;
} eval_options;

#define EVAL_FIELD(field) offsetof(eval_options, field)

static const option eval_table[] = {
    { .name = "--model",
      .value = "PATH",
      .kind = OPTION_PATH,
      .field = EVAL_FIELD(model),
      .help = "a GGUF file or a Hugging Face directory of type llama, qwen2 or qwen3" },
    { .name = "--text",
      .value = "FILE",
      .kind = OPTION_PATH,
      .field = EVAL_FIELD(text),
      .help = "UTF-8 text" },
    { .name = "--row",
      .value = "N",
      .kind = OPTION_INT,
      .field = EVAL_FIELD(row),
      .least = 2,
      .most = 8192,
      .help = "tokens read at once; a token is predicted from those before it in its row (1024, or the "
              "model's context)" },
    { .name = "--ranks",
      .value = "N",
      .kind = OPTION_INT,
      .field = EVAL_FIELD(ranks),
      .least = 1,
      .most = 64,
      .help = "threads (2)" },
    { .name = "--repeat",
      .value = "N",
      .kind = OPTION_INT,
      .field = EVAL_FIELD(repeat),
      .least = 1,
      .most = 100,
      .help = "times that the text is read; the fastest is told (1)" },
};

static const command_line eval_command = { "eval",
                                           "--model PATH --text FILE [options]",
                                           "Prints the bits per byte of a model on a text.",
                                           "xdistill eval --model run/student --text other.txt",
                                           eval_table,
                                           (int)(sizeof eval_table / sizeof eval_table[0]) };

typedef struct eval_job {
    const lm *model;
    const tokens *text;
    int row;
    double bits;
} eval_job;

/* Ranks share rows; of one row, its positions. */
static bool eval_splits(const eval_job *job, int ranks) {
    return job->row == job->text->count - 1 && job->row >= ranks;
}

static xd_result eval_rows(xd_comm *world, const eval_job *job, double *bits) {
    judge j;
    xd_result result = xd_agree(world, judge_create(world, &job->model->config, job->row, &j));
    if (result == XD_OK) result = judge_bits(&j, job->model->weights, job->text, bits);
    judge_free(&j);
    return result;
}

static xd_result eval_rank(xd_comm *world, void *argument) {
    eval_job *job = (eval_job *)argument;
    double bits = 0.0;
    XD_TRY(eval_splits(job, xd_comm_size(world))
               ? judge_context(world, &job->model->config, job->model->weights, job->text, &bits)
               : eval_rows(world, job, &bits));
    if (xd_comm_rank(world) == 0) job->bits = bits;
    return XD_OK;
}

/* The fastest of some runs. */
static xd_result eval_time(xd_ctx *ctx, const eval_options *o, eval_job *job, double *seconds) {
    for (int i = 0; i < o->repeat; i++) {
        const double start = xd_now(ctx);
        XD_TRY(ranks_run(ctx, o->ranks, eval_rank, job));
        const double took = xd_now(ctx) - start;
        if (i == 0 || took < *seconds) *seconds = took;
    }
    return XD_OK;
}

static xd_result eval_text(xd_ctx *ctx, const eval_options *o, lm *m, const tokens *text) {
    eval_job job = { m, text, o->row ? o->row : 1024, 0.0 };
    double seconds = 0.0;
    if (job.row > m->positions && !o->row) job.row = m->positions;
    XD_REQUIRE(ctx, job.row <= m->positions, XD_ERROR_ARGUMENT, "--row %d: %s reads at most %d tokens",
               job.row, m->name, m->positions);
    if (job.row >= text->count && text->count > 2) job.row = (int)text->count - 1;
    XD_TRY(lm_load_weights(ctx, m));
    XD_TRY(eval_time(ctx, o, &job, &seconds));
    /* The first token is read and not predicted. */
    const int64_t bytes = text->spans[text->count - 1].end - text->spans[0].end;
    printf("%s: %.4f bits per byte of %lld bytes, %lld tokens in rows of %d, %.1f s,\n"
           "%.0f tokens/s, %.0f MiB at most\n",
           m->name, job.bits, (long long)bytes, (long long)text->count, job.row, seconds,
           (double)text->count / seconds, ranks_peak_mib());
    return XD_OK;
}

static xd_result eval_run(xd_ctx *ctx, const eval_options *o) {
    lm m;
    tokens text;
    char *data = NULL;
    size_t bytes = 0;
    XD_TRY(text_load(ctx, o->text, &data, &bytes));
    xd_result result = lm_open(ctx, o->model, &m);
    if (result == XD_OK) {
        result = tokens_encode(ctx, m.tokenizer, data, bytes, &text);
        if (result == XD_OK) result = eval_text(ctx, o, &m, &text);
        tokens_free(ctx, &text);
        lm_free(ctx, &m);
    }
    xd_release(ctx, data);
    return result;
}

int command_eval(xd_ctx *ctx, int count, char **words) {
    eval_options o;
    int status;
    memset(&o, 0, sizeof o);
    o.ranks = 2;
    o.repeat = 1;
    if (!command_parse(&eval_command, count, words, &o, &status)) return status;
    if (!o.model || !o.text) return command_lacks(&eval_command, !o.model ? "--model" : "--text");
    return command_end(ctx, "eval", eval_run(ctx, &o));
}
