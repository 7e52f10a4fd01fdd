/* draw.c - features, what they may be together, and drawing. */
#include "draw.h"

#include <stdio.h>
#include <string.h>

const feature features[FEATURES] = { { "ranks", 1, 8 },
                                     { "groups", 1, 4 },
                                     { "wrap", 0, WRAP_COUNT - 1 },
                                     { "nested", 0, 1 },
                                     { "own", 0, 1 },
                                     { "reshard", 0, 2 },
                                     { "queues", 0, 2 },
                                     { "offload", 0, 1 },
                                     { "ranks2", 1, 8 },
                                     { "groups2", 1, 4 },
                                     { "wrap2", 0, WRAP_COUNT - 1 },
                                     { "nested2", 0, 1 },
                                     { "own2", 0, 1 },
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
                                     { "frozen", 0, 15 },
                                     { "together", 0, 1 },
                                     { "recompute", 0, 1 },
                                     { "inference", 0, 1 },
                                     { "clip", 0, 1 },
                                     { "averages", 0, 2 },
                                     { "optimizer", 0, 2 },
                                     { "soft", 0, 2 },
                                     { "smoothing", 0, 1 },
                                     { "ignored", 0, 1 },
                                     { "half", 0, 2 },
                                     { "sent", 0, 2 },
                                     { "skips", 0, 1 },
                                     { "thaw", 0, COMPOSE_STEPS },
                                     { "divide", 0, 2 },
                                     { "pp", 1, 8 }, /* more than 4 are none */
                                     { "stages", 1, 3 },
                                     { "uneven", 0, 3 },
                                     { "pp2", 1, 8 },
                                     { "stages2", 1, 3 },
                                     { "uneven2", 0, 3 },
                                     { "copies", 0, 3 },
                                     { "experts", 0, 6 }, /* more than 4 are none */
                                     { "ep", 1, TOY_MEMBERS },
                                     { "ep2", 1, TOY_MEMBERS },
                                     { "pushed", 0, 1 },
                                     { "pushed2", 0, 1 },
                                     { "node", 0, 1 },
                                     { "node2", 0, 1 },
                                     { "imports", 0, 2 },
                                     { "divergence", 0, 3 },
                                     { "tp", 1, 8 }, /* more than 4 are none */
                                     { "cp", 1, 8 },
                                     { "padded", 0, 3 },
                                     { "tp2", 1, 8 },
                                     { "cp2", 1, 8 },
                                     { "padded2", 0, 3 },
                                     { "filled", 0, 3 },
                                     { "hooked", 0, 9 } }; /* more than 3 are none */

enum {
    MOST_RANKS = 8,
    MOST_STAGES = 4,
    MOST_SHARE = 4
}; /* all together; of a pipeline's; of those that share a leaf */

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
    if (stages[PP] > 1 || f[COPIES] || f[HOOKED]) at[OWN] = f[TOGETHER] = 0;
    if (stages[PP] > 1 || f[COPIES]) f[TIED] = 0;
}

/* Ranks that share leaves, of as many as there are for them. */
static void settle_share(int *f, int ranks, int pp, int tp) {
    int *share = f + tp - TP;
    for (int i = TP; i <= CP; i++) {
        if (share[i] > MOST_SHARE) share[i] = 1;
        while (f[ranks] * f[pp] * share[i] * (i == CP ? share[TP] : 1) > MOST_RANKS) --share[i];
    }
}

/* Experts of a network that is not in stages, over ranks that divide the data ranks of a group. */
static void settle_experts(int *f) {
    if (f[EXPERTS] > TOY_EXPERTS || f[COPIES] || f[HOOKED] || f[PP] > 1 || f[PP2] > 1) f[EXPERTS] = 0;
    if (!f[EXPERTS]) f[EP] = f[EP2] = 1;
    while (f[RANKS] / f[GROUPS] % f[EP]) --f[EP];
    while (f[RANKS2] / f[GROUPS2] % f[EP2]) --f[EP2];
    if (f[EXPERTS]) f[PUSHED] = f[PUSHED2] = 0; /* their leaves are of several ranks */
}

void settle(int *f) {
    if (f[STOP] >= f[STEPS]) f[STOP] = 0;
    if (f[COPIES] > 1) f[COPIES] = 0; /* drawn seldom: nothing is tied then, nor in storage of the caller's */
    if (f[HOOKED] > 3) f[HOOKED] = 0;
    if (f[HOOKED] && !f[FILLED]) f[FILLED] = 1;
    if (f[SOFT] == 1) f[SMOOTHING] = 0;
    settle_layout(f, RANKS);
    settle_layout(f, RANKS2);
    for (int i = RANKS2; i <= OFFLOAD2 && !f[STOP]; i++) f[i] = features[i].least;
    for (int i = PP2; i <= UNEVEN2 && !f[STOP]; i++) f[i] = features[i].least;
    for (int i = TP2; i <= PADDED2 && !f[STOP]; i++) f[i] = features[i].least;
    if (!f[STOP]) f[NODE2] = f[IMPORTS] = 0;
    if (!f[SOFT]) f[DIVERGENCE] = 0;
    settle_stages(f, RANKS, PP);
    settle_stages(f, RANKS2, PP2);
    settle_experts(f);
    settle_share(f, RANKS, PP, TP);
    settle_share(f, RANKS2, PP2, TP2);
    if (!f[OWN]) f[PUSHED] = 0;
    if (!f[OWN2]) f[PUSHED2] = 0;
    if (f[PUSHED] || f[PUSHED2])
        f[RECOMPUTE] = f[THAW] = f[SKIPS] = 0; /* frozen weights have no gradient of the caller's */
    if (f[THAW] > f[STEPS]) f[THAW] = 0;
}

static compose_layout layout_of(const int *f, int ranks, int pp, int ep, int tp) {
    const int shift = ranks - RANKS;
    const compose_layout l = { f[ranks],
                               f[GROUPS + shift],
                               f[WRAP + shift],
                               f[NESTED + shift],
                               f[OWN + shift] + f[ep + PUSHED - EP],
                               f[RESHARD + shift],
                               f[QUEUES + shift],
                               f[OFFLOAD + shift],
                               f[pp],
                               f[pp + STAGES - PP],
                               f[ep],
                               f[ep + NODE - EP],
                               f[pp + UNEVEN - PP],
                               f[tp],
                               f[tp + CP - TP],
                               f[tp + PADDED - TP],
                               0 };
    return l;
}

compose_config config_of(const int *f) {
    const toy_sizes size = { f[HIDDEN], f[INNER], f[LAYERS], f[VOCAB],  f[ROWS],   f[TIED],
                             f[FROZEN], f[HALF],  f[SKIPS],  f[COPIES], f[EXPERTS] };
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
    c.imports = f[IMPORTS];
    c.divergence = f[DIVERGENCE];
    c.filled = f[FILLED];
    c.hooked = f[HOOKED];
    c.layout = layout_of(f, RANKS, PP, EP, TP);
    c.stop = f[STOP];
    c.then = layout_of(f, RANKS2, PP2, EP2, TP2);
    return c;
}

void print_config(const int *f) {
    printf("build/compose");
    for (int i = 0; i < FEATURES; i++)
        if (f[i] != features[i].least) printf(" %s=%d", features[i].name, f[i]);
    printf("\n");
}

/* ---- drawing ---- */

static uint64_t next_bits(uint64_t *state) {
    uint64_t x = (*state += 0x9e3779b97f4a7c15u);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Each feature by itself, but that a pair is not at its least before all is settled. */
static void draw_with(uint64_t *state, int a, int b, int *f) {
    for (int i = 0; i < FEATURES; i++) {
        const int from = features[i].least + (i == a || i == b);
        f[i] = from + (int)(next_bits(state) % (uint64_t)(features[i].most - from + 1));
    }
    settle(f);
}

static bool has(const int *f, int i) {
    return f[i] > features[i].least;
}

/* ---- pairs ---- */

static long pairs[FEATURES][FEATURES];

/* Pairs that no configuration has. */
typedef struct apart {
    int one;
    int others[12]; /* 0: no more */
    const char *why;
} apart;

static const apart apart_list[] = {
    { OWN, { RESHARD, OFFLOAD, HALF, SENT }, "storage of the caller is DDP's, in F32" },
    { OWN2, { RESHARD2, OFFLOAD2, HALF, SENT }, "storage of the caller is DDP's, in F32" },
    { PUSHED, { RESHARD, OFFLOAD, HALF, SENT }, "storage of the caller is DDP's, in F32" },
    { PUSHED2, { RESHARD2, OFFLOAD2, HALF, SENT }, "storage of the caller is DDP's, in F32" },
    { OWN, { PP, STAGES, UNEVEN, COPIES }, "the caller gives storage for a whole network" },
    { OWN2, { PP2, STAGES2, UNEVEN2, COPIES }, "the caller gives storage for a whole network" },
    { PUSHED, { PP, STAGES, UNEVEN, COPIES }, "the caller gives storage for a whole network" },
    { PUSHED2, { PP2, STAGES2, UNEVEN2, COPIES }, "the caller gives storage for a whole network" },
    { PUSHED,
      { RECOMPUTE, THAW, SKIPS, EXPERTS, EP, EP2 },
      "whole leaves are pushed, of weights that train" },
    { PUSHED2,
      { RECOMPUTE, THAW, SKIPS, EXPERTS, EP, EP2 },
      "whole leaves are pushed, of weights that train" },
    { TOGETHER, { PP, STAGES, UNEVEN, PP2, STAGES2, UNEVEN2, COPIES }, "a schedule has its own order" },
    { TIED, { PP, STAGES, UNEVEN, PP2, STAGES2, UNEVEN2, COPIES }, "a tie is within one stage" },
    { HOOKED, { OWN, OWN2, PUSHED, PUSHED2, TOGETHER, EXPERTS, EP, EP2 }, "a build makes stages" },
    { EXPERTS, { PP, STAGES, UNEVEN, PP2, STAGES2, UNEVEN2, COPIES }, "stages of the toy have no experts" },
    { EP, { PP, STAGES, UNEVEN, PP2, STAGES2, UNEVEN2, COPIES }, "stages of the toy have no experts" },
    { EP2, { PP, STAGES, UNEVEN, PP2, STAGES2, UNEVEN2, COPIES }, "stages of the toy have no experts" },
};
enum { APART = sizeof apart_list / sizeof *apart_list };

/* Why a pair is never drawn, or NULL. */
static const char *why_apart(int a, int b) {
    for (int i = 0; i < APART; i++)
        for (const int *other = apart_list[i].others; *other; other++)
            if ((apart_list[i].one == a && *other == b) || (apart_list[i].one == b && *other == a))
                return apart_list[i].why;
    return NULL;
}

void count_pairs(const int *f) {
    for (int i = 0; i < FEATURES; i++)
        for (int j = 0; j < FEATURES; j++) pairs[i][j] += has(f, i) && has(f, j);
}

/* Of those that go together. */
static long rarest_pair(int *a, int *b) {
    long least = -1;
    for (int i = 0; i < FEATURES; i++)
        for (int j = i + 1; j < FEATURES; j++) {
            if ((least >= 0 && pairs[i][j] >= least) || why_apart(i, j)) continue;
            least = pairs[i][j];
            *a = i;
            *b = j;
        }
    return least;
}

void draw(uint64_t seed, int *f) {
    enum { TRIES = 5000 };
    uint64_t state = seed * 0x2545f4914f6cdd1du;
    int a = FEATURES, b = FEATURES;
    draw_with(&state, a, b, f);
    if (seed % 2 == 0 || rarest_pair(&a, &b) >= DRAW_GOAL) return;
    for (int i = 0; i < TRIES && !(has(f, a) && has(f, b)); i++) draw_with(&state, a, b, f);
}

static void print_table(void) {
    for (int i = 0; i < FEATURES; i++) {
        printf("%-10s", features[i].name);
        for (int j = 0; j <= i; j++) printf(why_apart(i, j) ? " -" : " %ld", pairs[i][j]);
        printf("\n");
    }
    for (int i = 0; i < APART; i++) {
        printf("%s not with", features[apart_list[i].one].name);
        for (const int *other = apart_list[i].others; *other; other++) printf(" %s", features[*other].name);
        printf(": %s\n", apart_list[i].why);
    }
}

bool print_pairs(bool table, long goal) {
    int a = 0, b = 0, never = 0, rare = 0, wrong = 0;
    const long least = rarest_pair(&a, &b);
    for (int i = 0; i < FEATURES; i++)
        for (int j = i + 1; j < FEATURES; j++) {
            const bool alone = why_apart(i, j) != NULL;
            never += alone;
            wrong += alone && pairs[i][j] > 0;
            rare += !alone && pairs[i][j] < DRAW_GOAL;
        }
    if (table) print_table();
    printf("%d pairs of features, %d of them never together; ", FEATURES * (FEATURES - 1) / 2, never);
    printf("the rarest, %s with %s, was drawn %ld times; %d pairs less than %d times\n", features[a].name,
           features[b].name, least, rare, DRAW_GOAL);
    if (wrong) printf("%d pairs that do not go together were drawn\n", wrong);
    return wrong == 0 && least >= goal;
}
