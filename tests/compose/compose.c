/* compose.c - draws configurations of a training run, trains each, and compares it with one rank alone, bit for bit.
 *
 *     build/compose --seed 1 --count 200    draws so many; a failure is shrunk, and its command line printed
 *     build/compose ranks=4 wrap=3 leaves=6 ...    one configuration; what is not named has its least value
 *     --table                               how often each pair of features was drawn together
 *     --quick                               ends at the first failure, as it was drawn
 */
#include "run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- features ---- */

/* What is drawn: a number between two bounds; the lowest is the plainest. */
typedef struct feature {
    const char *name;
    int least, most;
} feature;

enum {
    RANKS,
    GROUPS,
    WRAP,
    NESTED,
    OWN,
    RESHARD,
    QUEUES,
    OFFLOAD,
    RANKS2,
    GROUPS2,
    WRAP2,
    NESTED2,
    OWN2,
    RESHARD2,
    QUEUES2,
    OFFLOAD2,
    STOP,
    STEPS,
    LEAVES,
    HIDDEN,
    INNER,
    LAYERS,
    VOCAB,
    ROWS,
    TIED,
    FROZEN,
    TOGETHER,
    RECOMPUTE,
    INFERENCE,
    CLIP,
    AVERAGES,
    OPTIMIZER,
    SOFT,
    SMOOTHING,
    IGNORED,
    HALF,
    SENT,
    SKIPS,
    THAW,
    DIVIDE,
    PP,
    STAGES,
    UNEVEN,
    PP2,
    STAGES2,
    UNEVEN2,
    COPIES,
    FEATURES
};

static const feature features[FEATURES] = { { "ranks", 1, 8 },
                                            { "groups", 1, 4 },
                                            { "wrap", 0, WRAP_COUNT - 1 },
                                            { "nested", 0, 1 },
                                            { "own", 0, 2 },
                                            { "reshard", 0, 2 },
                                            { "queues", 0, 2 },
                                            { "offload", 0, 1 },
                                            { "ranks2", 1, 8 },
                                            { "groups2", 1, 4 },
                                            { "wrap2", 0, WRAP_COUNT - 1 },
                                            { "nested2", 0, 1 },
                                            { "own2", 0, 2 },
                                            { "reshard2", 0, 2 },
                                            { "queues2", 0, 2 },
                                            { "offload2", 0, 1 },
                                            { "stop", 0, 3 },
                                            { "steps", 1, COMPOSE_STEPS },
                                            { "leaves", 1, 12 },
                                            { "hidden", 1, 24 },
                                            { "inner", 1, 16 },
                                            { "layers", 0, 3 },
                                            { "vocab", 2, 24 },
                                            { "rows", 1, 3 },
                                            { "tied", 0, 1 },
                                            { "frozen", 0, 7 },
                                            { "together", 0, 1 },
                                            { "recompute", 0, 1 },
                                            { "inference", 0, 1 },
                                            { "clip", 0, 1 },
                                            { "averages", 0, 2 },
                                            { "optimizer", 0, 2 },
                                            { "soft", 0, 2 },
                                            { "smoothing", 0, 1 },
                                            { "ignored", 0, 1 },
                                            { "half", 0, 1 },
                                            { "sent", 0, 1 },
                                            { "skips", 0, 1 },
                                            { "thaw", 0, COMPOSE_STEPS },
                                            { "divide", 0, 2 },
                                            { "pp", 1, 8 }, /* more than 4 are none */
                                            { "stages", 1, 3 },
                                            { "uneven", 0, 3 },
                                            { "pp2", 1, 8 },
                                            { "stages2", 1, 3 },
                                            { "uneven2", 0, 3 },
                                            { "copies", 0, 3 } };

enum { MOST_RANKS = 8, MOST_STAGES = 4 }; /* all together; of a pipeline's ranks */

/* Which rank counts and wrappers the leaves allow; others become the nearest that are. */
static void settle_layout(int *f, int begin) {
    int *at = f + begin - RANKS;
    const int leaves = f[LEAVES];
    if (at[RANKS] > leaves) at[RANKS] = leaves;
    if (f[SENT] && at[WRAP] <= WRAP_SHARDED) at[WRAP] = WRAP_FSDP;
    if (at[WRAP] > WRAP_SHARDED || f[HALF]) at[OWN] = 0;
    if (at[WRAP] != WRAP_HSDP && at[WRAP] != WRAP_SHARDED) at[GROUPS] = 1;
    while (at[RANKS] % at[GROUPS] || leaves % at[GROUPS]) --at[GROUPS];
    const int each = leaves / at[GROUPS];
    if (at[GROUPS] > 1 && (each & (each - 1)))
        at[GROUPS] = 1; /* a group's leaves must be a node of the tree */
    if (at[WRAP] <= WRAP_SHARDED) at[RESHARD] = at[OFFLOAD] = 0;
    if (at[RANKS] / at[GROUPS] % 2 && at[RESHARD] == 2) at[RESHARD] = 1;
}

/* A pipeline of as many ranks as there are for it. */
static void settle_stages(int *f, int begin, int pp) {
    int *at = f + begin - RANKS, *stages = f + pp - PP;
    if (stages[PP] > MOST_STAGES) stages[PP] = 1;
    while (stages[PP] * at[RANKS] > MOST_RANKS) --stages[PP];
    if (stages[PP] == 1) stages[STAGES] = 1;
    if (stages[PP] * stages[STAGES] == 1) stages[UNEVEN] = 0;
    if (stages[PP] > 1 || f[COPIES]) at[OWN] = f[TOGETHER] = 0;
    if (stages[PP] > 1 || f[COPIES]) f[TIED] = 0;
}

static void settle(int *f) {
    if (f[STOP] >= f[STEPS]) f[STOP] = 0;
    if (f[COPIES] > 1) f[COPIES] = 0; /* drawn seldom: nothing is tied then, nor in storage of the caller's */
    if (f[SOFT] == 1) f[SMOOTHING] = 0;
    settle_layout(f, RANKS);
    settle_layout(f, RANKS2);
    for (int i = RANKS2; i <= OFFLOAD2 && !f[STOP]; i++) f[i] = features[i].least;
    for (int i = PP2; i <= UNEVEN2 && !f[STOP]; i++) f[i] = features[i].least;
    settle_stages(f, RANKS, PP);
    settle_stages(f, RANKS2, PP2);
    if (f[OWN] == 2 || f[OWN2] == 2)
        f[RECOMPUTE] = f[THAW] = 0; /* frozen weights have no gradient of the caller's */
    if (f[THAW] > f[STEPS]) f[THAW] = 0;
}

static compose_layout layout_of(const int *f, int ranks, int pp) {
    const int shift = ranks - RANKS;
    const compose_layout l = { f[ranks],       f[GROUPS + shift],   f[WRAP + shift],    f[NESTED + shift],
                               f[OWN + shift], f[RESHARD + shift],  f[QUEUES + shift],  f[OFFLOAD + shift],
                               f[pp],          f[pp + STAGES - PP], f[pp + UNEVEN - PP] };
    return l;
}

static compose_config config_of(const int *f) {
    const toy_sizes size = { f[HIDDEN], f[INNER],  f[LAYERS], f[VOCAB], f[ROWS],
                             f[TIED],   f[FROZEN], f[HALF],   f[SKIPS], f[COPIES] };
    compose_config c;
    memset(&c, 0, sizeof c);
    c.size = size;
    c.leaves = f[LEAVES];
    c.steps = f[STEPS];
    c.together = f[TOGETHER];
    c.recompute = f[RECOMPUTE];
    c.inference = f[INFERENCE];
    c.clip = f[CLIP];
    c.averages = f[AVERAGES];
    c.optimizer = f[OPTIMIZER];
    c.soft = f[SOFT];
    c.smoothing = f[SMOOTHING];
    c.ignored = f[IGNORED];
    c.sent = f[SENT];
    c.thaw = f[THAW];
    c.divide = f[DIVIDE];
    c.layout = layout_of(f, RANKS, PP);
    c.stop = f[STOP];
    c.then = layout_of(f, RANKS2, PP2);
    return c;
}

static void print_config(const int *f) {
    printf("build/compose");
    for (int i = 0; i < FEATURES; i++)
        if (f[i] != features[i].least) printf(" %s=%d", features[i].name, f[i]);
    printf("\n");
}

/* ---- one configuration ---- */

static char directory[64];

/* NULL, or what is wrong. */
static const char *judge(const int *f) {
    static compose_result one, many;
    compose_config c = config_of(f), alone = c;
    memset(&alone.layout, 0, sizeof alone.layout);
    alone.layout.ranks = alone.layout.groups = alone.layout.pp = alone.layout.stages = 1;
    if (c.sent) alone.layout.wrap = WRAP_FSDP; /* which rounds on one rank too */
    alone.stop = 0;
    if (!compose_run(&alone, directory, &one)) return one.message;
    if (!compose_run(&c, directory, &many)) return many.message;
    return compose_compare(&c, &one, &many);
}

/* Each feature as small as the failure allows. */
static void shrink(int *f) {
    for (int again = 1; again;) {
        again = 0;
        for (int i = 0; i < FEATURES; i++)
            for (int value = features[i].least; value < f[i]; value++) {
                int smaller[FEATURES];
                memcpy(smaller, f, sizeof smaller);
                smaller[i] = value;
                settle(smaller);
                if (smaller[i] != value || !judge(smaller)) continue;
                memcpy(f, smaller, sizeof smaller);
                again = 1;
                break;
            }
    }
}

/* ---- drawing ---- */

static uint64_t next_bits(uint64_t *state) {
    uint64_t x = (*state += 0x9e3779b97f4a7c15u);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static void draw(uint64_t seed, int *f) {
    uint64_t state = seed * 0x2545f4914f6cdd1du;
    for (int i = 0; i < FEATURES; i++)
        f[i] = features[i].least +
               (int)(next_bits(&state) % (uint64_t)(features[i].most - features[i].least + 1));
    settle(f);
}

/* ---- pairs ---- */

static long pairs[FEATURES][FEATURES];

static void count_pairs(const int *f) {
    for (int i = 0; i < FEATURES; i++)
        for (int j = 0; j < FEATURES; j++)
            pairs[i][j] += f[i] > features[i].least && f[j] > features[j].least;
}

static void print_pairs(bool table) {
    long least = -1;
    int a = 0, b = 0, rare = 0;
    for (int i = 0; i < FEATURES; i++)
        for (int j = i + 1; j < FEATURES; j++) {
            rare += pairs[i][j] < 20;
            if (least >= 0 && pairs[i][j] >= least) continue;
            least = pairs[i][j];
            a = i;
            b = j;
        }
    for (int i = 0; i < FEATURES && table; i++) {
        printf("%-10s", features[i].name);
        for (int j = 0; j <= i; j++) printf(" %ld", pairs[i][j]);
        printf("\n");
    }
    printf("%d pairs of features; the rarest, %s with %s, was drawn %ld times; %d pairs less than 20 times\n",
           FEATURES * (FEATURES - 1) / 2, features[a].name, features[b].name, least, rare);
}

/* ---- the program ---- */

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static int run_many(uint64_t seed, long count, bool table, bool quick) {
    double *seconds = (double *)calloc((size_t)count + 1, sizeof *seconds);
    long failed = 0;
    for (long n = 0; n < count && failed < (quick ? 1 : 3); n++) {
        int f[FEATURES];
        draw(seed + (uint64_t)n, f);
        count_pairs(f);
        const double begin = seconds_now();
        const char *problem = judge(f);
        seconds[n] = seconds_now() - begin;
        if (!problem) continue;
        failed++;
        printf("seed %llu: %s\n", (unsigned long long)seed + (unsigned long long)n, problem);
        if (!quick) {
            shrink(f);
            printf("the smallest that still fails (%s):\n", judge(f));
        }
        print_config(f);
    }
    qsort(seconds, (size_t)count, sizeof *seconds, by_value);
    print_pairs(table);
    if (count > 0) printf("median %.3f s, longest %.3f s\n", seconds[count / 2], seconds[count - 1]);
    printf("%ld passed, %ld failed\n", count - failed, failed);
    free(seconds);
    return failed > 0;
}

static bool set_feature(const char *word, int *f) {
    for (int i = 0; i < FEATURES; i++) {
        const size_t length = strlen(features[i].name);
        if (strncmp(word, features[i].name, length) || word[length] != '=') continue;
        f[i] = atoi(word + length + 1);
        if (f[i] >= features[i].least && f[i] <= features[i].most) return true;
        fprintf(stderr, "%s: %s goes from %d to %d\n", word, features[i].name, features[i].least,
                features[i].most);
        return false;
    }
    fprintf(stderr, "unknown: %s\n", word);
    return false;
}

static int run_one(int *f) {
    settle(f);
    const char *problem = judge(f);
    print_config(f);
    printf("%s\n%d passed, %d failed\n", problem ? problem : "the bits of one rank", !problem,
           problem != NULL);
    return problem != NULL;
}

int main(int argc, char **argv) {
    uint64_t seed = 1;
    long count = 0;
    bool table = false, quick = false;
    int f[FEATURES], status = 2;
    char command[128];
    for (int i = 0; i < FEATURES; i++) f[i] = features[i].least;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0)
            quick = true;
        else if (strcmp(argv[i], "--table") == 0)
            table = true;
        else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc)
            seed = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--count") == 0 && i + 1 < argc)
            count = atol(argv[++i]);
        else if (!set_feature(argv[i], f))
            return 2;
    }
    snprintf(directory, sizeof directory, "/tmp/xdistill-compose-%ld", (long)getpid());
    status = count > 0 ? run_many(seed, count, table, quick) : run_one(f);
    snprintf(command, sizeof command, "rm -rf '%s'", directory);
    return system(command) ? 2 : status;
}
