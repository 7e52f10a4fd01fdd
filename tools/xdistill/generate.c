/* generate.c - `xdistill generate`: what a model writes. */
#include "../../examples/common/sample.h"
#include "command.h"
#include "lm.h"
#include "ranks.h"
#include "reader.h"
#include "text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct generate_options {
    const char *model, *prompt;
    int tokens;
    double temperature, top_p;
    uint64_t seed;
} generate_options;

#define GENERATE_FIELD(field) offsetof(generate_options, field)

static const option generate_table[] = {
    { .name = "--model",
      .value = "PATH",
      .kind = OPTION_PATH,
      .field = GENERATE_FIELD(model),
      .help = "a GGUF file or a Hugging Face directory of type llama, qwen2 or qwen3" },
    { .name = "--prompt",
      .value = "TEXT",
      .kind = OPTION_TEXT,
      .field = GENERATE_FIELD(prompt),
      .takes = "a text",
      .help = "what it goes on from" },
    { .name = "--tokens",
      .value = "N",
      .kind = OPTION_INT,
      .field = GENERATE_FIELD(tokens),
      .least = 1,
      .most = 4096,
      .help = "at most (100); the model's end of text ends it, too" },
    { .name = "--temperature",
      .value = "X",
      .kind = OPTION_DOUBLE,
      .field = GENERATE_FIELD(temperature),
      .from = 0.0,
      .to = 10.0,
      .help = "0 takes the likeliest token (0.8)" },
    { .name = "--top-p",
      .value = "X",
      .kind = OPTION_DOUBLE,
      .field = GENERATE_FIELD(top_p),
      .from = 0.01,
      .to = 1.0,
      .help = "draws from the likeliest tokens that have this probability together (0.95)" },
    { .name = "--seed",
      .value = "N",
      .kind = OPTION_UINT64,
      .field = GENERATE_FIELD(seed),
      .least = 1,
      .most = 1000000000,
      .help = "of the draws (1)" },
};

static const command_line generate_command = { "generate",
                                               "--model PATH --prompt TEXT [options]",
                                               "Prints a prompt and what the model writes behind it.",
                                               "xdistill generate --model run/student --prompt \"Once upon\"",
                                               generate_table,
                                               (int)(sizeof generate_table / sizeof generate_table[0]) };

/* A token and its probability. */
typedef struct generate_choice {
    double probability;
    int32_t id;
} generate_choice;

static int generate_compare(const void *a, const void *b) {
    const generate_choice *x = (const generate_choice *)a, *y = (const generate_choice *)b;
    if (x->probability != y->probability) return x->probability < y->probability ? 1 : -1;
    return (x->id > y->id) - (x->id < y->id);
}

/* Draws from the likeliest tokens; `choices` has room for `count`. */
static int32_t generate_draw(const generate_options *o, const float *logits, int count,
                             generate_choice *choices, double uniform) {
    double most = -INFINITY, sum = 0.0, held = 0.0, passed = 0.0;
    int32_t best = 0;
    int kept = 0;
    for (int i = 0; i < count; i++)
        if ((double)logits[i] > most) most = (double)logits[best = i];
    if (o->temperature == 0.0) return best;
    for (int i = 0; i < count; i++) {
        choices[i].id = i;
        choices[i].probability = exp(((double)logits[i] - most) / o->temperature);
        sum += choices[i].probability;
    }
    qsort(choices, (size_t)count, sizeof *choices, generate_compare);
    for (; kept < count && held < o->top_p * sum; kept++) held += choices[kept].probability;
    for (int i = 0; i < kept; i++) {
        passed += choices[i].probability;
        if (passed > uniform * held) return choices[i].id;
    }
    return choices[kept - 1].id;
}

/* The prompt and what was drawn, and the model that reads it. */
typedef struct generator {
    reader reader;
    generate_choice *choices;
    int32_t *ids;
    int count, seen; /* ids; of them read by the model */
} generator;

/* Where a context is full, its later half is read again as a new one. */
static xd_result generator_create(xd_ctx *ctx, const generate_options *o, const lm *m, const tokens *prompt,
                                  generator *g) {
    bool failed = false;
    g->count = (int)prompt->count;
    const int all = g->count + o->tokens, room = all < m->positions ? all : m->positions;
    const int most = g->count > room / 2 ? g->count : room / 2 + 1;
    XD_TRY(reader_create(ctx, m, room, most < room ? most : room, &g->reader));
    g->choices = (generate_choice *)ranks_room(ctx, m->config.vocab, sizeof *g->choices, &failed);
    g->ids = (int32_t *)ranks_room(ctx, all, sizeof *g->ids, &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for %d tokens", all);
    memcpy(g->ids, prompt->ids, (size_t)g->count * sizeof *g->ids);
    return XD_OK;
}

static void generator_free(xd_ctx *ctx, generator *g) {
    reader_free(ctx, &g->reader);
    xd_release(ctx, g->choices);
    xd_release(ctx, g->ids);
}

/* What follows all ids. */
static const float *generator_read(generator *g) {
    reader *r = &g->reader;
    const int room = r->cache.room;
    if (g->count - g->seen > room - r->cache.past) {
        const int kept = g->seen == 0 ? room : (room + 1) / 2; /* a prompt may be longer than a context */
        reader_restart(r);
        g->seen = g->count - kept;
    }
    const float *logits = reader_read(r, g->ids + g->seen, g->count - g->seen);
    g->seen = g->count;
    return logits;
}

static void generator_run(const generate_options *o, const lm *m, generator *g) {
    const int size = xd_tokenizer_describe(m->tokenizer).size; /* of the columns, some may be padding */
    for (int i = 0; i < o->tokens; i++) {
        const float *logits = generator_read(g);
        const int32_t id = generate_draw(o, logits, size, g->choices, sample_random(o->seed, 3, (uint64_t)i));
        if (id == m->end_of_text) break;
        g->ids[g->count++] = id;
    }
}

static xd_result generate_print(xd_ctx *ctx, const lm *m, const generator *g) {
    size_t length = 0;
    bool failed = false;
    xd_decode_desc desc = { .ids = g->ids, .count = g->count, .out = NULL, .capacity = 0 };
    XD_TRY(xd_tokenizer_decode(ctx, m->tokenizer, &desc, &length));
    char *text = (char *)ranks_room(ctx, (int64_t)length, 1, &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for %zu bytes", length);
    desc.out = text;
    desc.capacity = length;
    const xd_result result = xd_tokenizer_decode(ctx, m->tokenizer, &desc, &length);
    if (result == XD_OK) printf("%.*s\n", (int)length, text);
    xd_release(ctx, text);
    return result;
}

static xd_result generate_from(xd_ctx *ctx, const generate_options *o, lm *m, const tokens *prompt) {
    generator g;
    memset(&g, 0, sizeof g);
    XD_REQUIRE(ctx, prompt->count > 0, XD_ERROR_ARGUMENT, "the prompt has no token");
    XD_TRY(lm_load_weights(ctx, m));
    xd_result result = generator_create(ctx, o, m, prompt, &g);
    if (result == XD_OK) {
        generator_run(o, m, &g);
        result = generate_print(ctx, m, &g);
    }
    generator_free(ctx, &g);
    return result;
}

static xd_result generate_run(xd_ctx *ctx, const generate_options *o) {
    lm m;
    tokens prompt;
    XD_TRY(lm_open(ctx, o->model, &m));
    xd_result result = tokens_encode(ctx, m.tokenizer, o->prompt, strlen(o->prompt), &prompt);
    if (result == XD_OK) result = generate_from(ctx, o, &m, &prompt);
    tokens_free(ctx, &prompt);
    lm_free(ctx, &m);
    return result;
}

int command_generate(xd_ctx *ctx, int count, char **words) {
    generate_options o;
    int status;
    memset(&o, 0, sizeof o);
    o.tokens = 100;
    o.temperature = 0.8;
    o.top_p = 0.95;
    o.seed = 1;
    if (!command_parse(&generate_command, count, words, &o, &status)) return status;
    if (!o.model || !o.prompt) return command_lacks(&generate_command, !o.model ? "--model" : "--prompt");
    return command_end(ctx, "generate", generate_run(ctx, &o));
}
