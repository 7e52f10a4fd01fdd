/* Schedules of pipelines against rules that are checked one by one, and against simulators that know nothing of ticks. */
#include "xdistill.h"

#include "xd_test.h"

#include <stdlib.h>

enum { RANKS = 8, VIRTUAL = 4, MICRO_BATCHES = 16, ROOM = 512 * RANKS, MOST_STAGES = RANKS * VIRTUAL };

static xd_ctx *ctx;

typedef struct table {
    xd_pipeline_schedule schedule;
    int p, v, stages;
    int64_t m, ticks;
    xd_pipeline_work work[ROOM];
} table;

static xd_pipeline_work at(const table *t, int64_t tick, int rank) {
    return t->work[tick * t->p + rank];
}

static int stage_of(const table *t, int rank, xd_pipeline_work w) {
    return w.virtual_stage * t->p + rank;
}

static bool table_make(table *t, int p, int v, int64_t m, bool forward_only) {
    int64_t counted = 0;
    memset(t, 0, sizeof *t);
    t->p = p;
    t->v = v;
    t->m = m;
    t->stages = p * v;
    t->schedule.ranks = p;
    t->schedule.virtual_stages = v;
    t->schedule.micro_batches = m;
    t->schedule.forward_only = forward_only;
    if (xd_pipeline_table(ctx, &t->schedule, 0, NULL, &counted) != XD_OK) return false;
    CHECK(counted * p <= ROOM);
    CHECK(xd_pipeline_table(ctx, &t->schedule, ROOM, t->work, &t->ticks) == XD_OK);
    CHECK_EQ_INT(t->ticks, counted);
    return true;
}

/* ---- rules ---- */

/* When each item is done; every item once. */
typedef struct times {
    int64_t forward[MOST_STAGES][MICRO_BATCHES], backward[MOST_STAGES][MICRO_BATCHES];
} times;

static void note(int64_t *slot, int64_t tick) {
    CHECK_EQ_INT(*slot, -1);
    *slot = tick;
}

static times times_of(const table *t) {
    times d;
    memset(&d, -1, sizeof d);
    for (int64_t k = 0; k < t->ticks; k++)
        for (int r = 0; r < t->p; r++) {
            const xd_pipeline_work w = at(t, k, r);
            if (w.kind == XD_PIPELINE_FORWARD) note(&d.forward[stage_of(t, r, w)][w.micro_batch], k);
            if (w.kind == XD_PIPELINE_BACKWARD) note(&d.backward[stage_of(t, r, w)][w.micro_batch], k);
        }
    return d;
}

/* What an item reads was put out in an earlier tick; micro-batches in order. */
static void check_order(const table *t) {
    const times d = times_of(t);
    const bool trains = !t->schedule.forward_only;
    for (int s = 0; s < t->stages; s++)
        for (int64_t i = 0; i < t->m; i++) {
            CHECK(d.forward[s][i] >= 0 && (d.backward[s][i] >= 0) == trains);
            if (i > 0) CHECK(d.forward[s][i] > d.forward[s][i - 1]);
            if (s > 0) CHECK(d.forward[s][i] > d.forward[s - 1][i]);
            if (!trains) continue;
            if (i > 0) CHECK(d.backward[s][i] > d.backward[s][i - 1]);
            CHECK(d.backward[s][i] > d.forward[s][i]);
            if (s + 1 < t->stages) CHECK(d.backward[s][i] > d.backward[s + 1][i]);
        }
}

/* The bubble as it is documented. */
static void check_bubble(const table *t) {
    const int64_t passes = t->schedule.forward_only ? 1 : 2, p = t->p, m = t->m;
    int64_t bubble = passes * (p - 1);
    if (m < p) bubble += passes * (t->v - 1) * (p - m);
    CHECK_EQ_INT(t->ticks, passes * t->v * m + bubble);
}

/* Counts of a rank, computed from the table in another way: by looking at every pair of times. */
static void check_counts(const table *t, int rank) {
    const times d = times_of(t);
    const bool trains = !t->schedule.forward_only;
    xd_pipeline_counts c;
    int64_t forwards = 0, inputs = 0, gradients = 0, sends = 0, receives = 0;
    CHECK(xd_pipeline_measure(ctx, &t->schedule, rank, &c) == XD_OK);
    for (int64_t k = 0; k < t->ticks; k++) {
        int64_t flying = 0, kept = 0, waiting = 0;
        for (int s = rank; s < t->stages; s += t->p)
            for (int64_t i = 0; i < t->m; i++) {
                const int64_t end = trains ? d.backward[s][i] : d.forward[s][i];
                flying += d.forward[s][i] <= k && k <= end;
                kept += s > 0 && d.forward[s - 1][i] < k && k <= end;
                waiting += trains && s + 1 < t->stages && d.backward[s + 1][i] < k && k <= end;
            }
        forwards = flying > forwards ? flying : forwards;
        inputs = kept > inputs ? kept : inputs;
        gradients = waiting > gradients ? waiting : gradients;
    }
    for (int s = rank; s < t->stages; s += t->p) {
        sends += t->m * ((s + 1 < t->stages) + (trains && s > 0));
        receives += t->m * ((s > 0) + (trains && s + 1 < t->stages));
    }
    CHECK_EQ_INT(c.ticks, t->ticks);
    CHECK_EQ_INT(c.work, (trains ? 2 : 1) * t->v * t->m);
    CHECK_EQ_INT(c.work + c.idle, t->ticks);
    CHECK_EQ_INT(c.sends, sends);
    CHECK_EQ_INT(c.receives, receives);
    CHECK_EQ_INT(c.forwards, forwards);
    CHECK_EQ_INT(c.inputs, inputs);
    CHECK_EQ_INT(c.gradients, gradients);
}

/* At most so many forwards in flight as is documented; `group` as the default says. */
static int64_t group_of(const table *t) {
    for (int64_t g = t->p; g < t->m; g++)
        if (t->m % g == 0 || t->m % g >= t->p) return g;
    return t->m;
}

static void check_flight(const table *t, int rank) {
    const int64_t behind = t->p - rank - 1, all = t->v * t->m;
    const int64_t bound = t->v == 1 ? behind + 1 : 2 * behind + (t->v - 1) * group_of(t) + 1;
    xd_pipeline_counts c;
    CHECK(xd_pipeline_measure(ctx, &t->schedule, rank, &c) == XD_OK);
    CHECK_EQ_INT(c.forwards, t->schedule.forward_only ? 1 : bound < all ? bound : all);
}

/* ---- simulators ---- */

/* What a rank does in the order of its table, with its messages as records of their own. */
typedef enum act_kind { ACT_WORK, ACT_SEND, ACT_RECEIVE } act_kind;
typedef struct act {
    act_kind kind;
    int peer;
    xd_pipeline_work_kind what; /* of a message: the kind of work it comes from */
    int stage;                  /* that put it out */
    int64_t micro_batch, tick;
} act;

enum { ACTS = 4 * VIRTUAL * MICRO_BATCHES * 2 };
static act acts[RANKS][ACTS];
static int act_count[RANKS];

static void act_add(int rank, act a) {
    CHECK(act_count[rank] < ACTS);
    acts[rank][act_count[rank]++] = a;
}

/* The rank and the stage that a work's output goes to; false: nowhere. */
static bool goes_to(const table *t, int rank, xd_pipeline_work w, int *peer) {
    const int s = stage_of(t, rank, w), to = w.kind == XD_PIPELINE_FORWARD ? s + 1 : s - 1;
    *peer = (to + t->p) % t->p;
    return w.kind != XD_PIPELINE_IDLE && to >= 0 && to < t->stages;
}

/* Messages are received at the end of the tick in which they are sent (`early`), or right before the work that reads them. */
static void make_acts(const table *t, bool early) {
    memset(act_count, 0, sizeof act_count);
    for (int64_t k = 0; k < t->ticks; k++) {
        for (int r = 0; r < t->p; r++) {
            const xd_pipeline_work w = at(t, k, r);
            const int s = stage_of(t, r, w), from = w.kind == XD_PIPELINE_FORWARD ? s - 1 : s + 1;
            if (w.kind == XD_PIPELINE_IDLE) continue;
            if (!early && from >= 0 && from < t->stages)
                act_add(r, (act){ ACT_RECEIVE, from % t->p, w.kind, from, w.micro_batch, k });
            act_add(r, (act){ ACT_WORK, -1, w.kind, s, w.micro_batch, k });
        }
        for (int r = 0; r < t->p; r++) {
            const xd_pipeline_work w = at(t, k, r);
            int peer = 0;
            if (!goes_to(t, r, w, &peer)) continue;
            act_add(r, (act){ ACT_SEND, peer, w.kind, stage_of(t, r, w), w.micro_batch, k });
            if (early) act_add(peer, (act){ ACT_RECEIVE, r, w.kind, stage_of(t, r, w), w.micro_batch, k });
        }
    }
}

/* Messages from a rank to another, in the order of sends; `taken` of them were received. */
typedef struct mailbox {
    act sent[ACTS];
    int count, taken;
} mailbox;
static mailbox boxes[2][RANKS][RANKS];

/* Sends that do not wait, receives that do: whether all ranks come to their ends, and every message is the one expected. With two
 * tags activations and gradients may pass each other, as they must between two ranks when each is received late. */
static bool run_buffered(const table *t, bool tags) {
    int done[RANKS] = { 0 };
    memset(boxes, 0, sizeof boxes);
    for (bool moves = true; moves;) {
        moves = false;
        for (int r = 0; r < t->p; r++)
            while (done[r] < act_count[r]) {
                const act a = acts[r][done[r]];
                const int tag = tags && a.what == XD_PIPELINE_BACKWARD;
                mailbox *in = a.kind == ACT_RECEIVE ? &boxes[tag][a.peer][r] : NULL;
                if (in && in->taken == in->count) break;
                if (in) {
                    const act got = in->sent[in->taken++];
                    CHECK(got.what == a.what && got.stage == a.stage && got.micro_batch == a.micro_batch);
                }
                mailbox *to = a.kind == ACT_SEND ? &boxes[tag][r][a.peer] : NULL;
                if (to) to->sent[to->count++] = a;
                done[r]++;
                moves = true;
            }
    }
    for (int r = 0; r < t->p; r++)
        if (done[r] < act_count[r]) return false;
    return true;
}

/* The messages of a rank at the end of one tick are one exchange, which ends when each has met its other end in an exchange of
 * that rank: nothing is sent that nobody receives. */
static int exchange_end(int r, int from) {
    int to = from;
    while (to < act_count[r] && acts[r][to].kind != ACT_WORK && acts[r][to].tick == acts[r][from].tick) to++;
    return to;
}

/* Whether the exchange that rank `peer` is in has the other end of a message of r, which has not met yet. */
static bool meets(int r, int i, const int *done, bool met[RANKS][ACTS]) {
    const act a = acts[r][i];
    const int peer = a.peer, end = exchange_end(peer, done[peer]);
    for (int j = done[peer]; j < end; j++) {
        const act b = acts[peer][j];
        if (met[peer][j] || b.kind == a.kind || b.kind == ACT_WORK || b.peer != r) continue;
        CHECK(b.what == a.what && b.stage == a.stage && b.micro_batch == a.micro_batch);
        met[peer][j] = met[r][i] = true;
        return true;
    }
    return false;
}

static bool run_paired(const table *t) {
    static bool met[RANKS][ACTS];
    int done[RANKS] = { 0 };
    memset(met, 0, sizeof met);
    for (bool moves = true; moves;) {
        moves = false;
        for (int r = 0; r < t->p; r++) {
            if (done[r] == act_count[r]) continue;
            if (acts[r][done[r]].kind == ACT_WORK) {
                done[r]++;
                moves = true;
                continue;
            }
            const int end = exchange_end(r, done[r]);
            bool all = true;
            for (int i = done[r]; i < end; i++) {
                if (!met[r][i]) moves = meets(r, i, done, met) || moves;
                all = all && met[r][i];
            }
            if (all) done[r] = end, moves = true;
        }
    }
    for (int r = 0; r < t->p; r++)
        if (done[r] < act_count[r]) return false;
    return true;
}

/* ---- all of them ---- */

XD_TEST(every_schedule_of_8_ranks_4_virtual_stages_and_16_micro_batches_keeps_the_rules) {
    table *t = (table *)malloc(sizeof *t);
    int tables = 0;
    for (int p = 1; p <= RANKS; p++)
        for (int v = 1; v <= (p > 1 ? VIRTUAL : 1); v++)
            for (int m = 1; m <= MICRO_BATCHES; m++)
                for (int forward_only = 0; forward_only < 2; forward_only++) {
                    CHECK(table_make(t, p, v, m, forward_only != 0));
                    check_order(t);
                    check_bubble(t);
                    for (int r = 0; r < p; r++) check_counts(t, r);
                    for (int r = 0; r < p; r++) check_flight(t, r);
                    tables++;
                }
    CHECK_EQ_INT(tables, (7 * VIRTUAL + 1) * MICRO_BATCHES * 2);
    free(t);
}

XD_TEST(every_schedule_runs_with_receives_that_wait_and_with_exchanges_in_pairs) {
    table *t = (table *)malloc(sizeof *t);
    for (int p = 2; p <= RANKS; p++)
        for (int v = 1; v <= VIRTUAL; v++)
            for (int m = 1; m <= MICRO_BATCHES; m++)
                for (int forward_only = 0; forward_only < 2; forward_only++) {
                    CHECK(table_make(t, p, v, m, forward_only != 0));
                    make_acts(t, false);
                    CHECK(run_buffered(t, true));
                    make_acts(t, true);
                    CHECK(run_buffered(t, false));
                    CHECK(run_paired(t));
                }
    free(t);
}

/* The simulator itself: two ranks that receive first never meet. */
XD_TEST(the_simulator_of_exchanges_finds_a_dead_lock) {
    table *t = (table *)malloc(sizeof *t);
    CHECK(table_make(t, 2, 1, 2, false));
    make_acts(t, true);
    CHECK(run_paired(t) && run_buffered(t, false));
    for (int i = 0; i < act_count[1]; i++)
        if (acts[1][i].kind == ACT_RECEIVE)
            acts[1][i].tick += 1; /* each one tick too late, apart from its neighbours */
    act_add(0, (act){ ACT_RECEIVE, 1, XD_PIPELINE_FORWARD, 1, 0, 99 });
    CHECK(!run_paired(t) && !run_buffered(t, false));
    free(t);
}

/* Groups of every size that may be. */
XD_TEST(explicit_groups_keep_the_rules_and_others_are_refused) {
    table *t = (table *)malloc(sizeof *t);
    int refused = 0;
    for (int p = 2; p <= 5; p++)
        for (int m = 1; m <= MICRO_BATCHES; m++)
            for (int64_t g = 1; g <= m + 1; g++) {
                int64_t ticks = -7;
                xd_pipeline_schedule d = { .ranks = p, .virtual_stages = 3, .micro_batches = m, .group = g };
                const bool may = g == m || (g >= p && g < m && (m % g == 0 || m % g >= p));
                CHECK_EQ_INT(xd_pipeline_table(ctx, &d, 0, NULL, &ticks), may ? XD_OK : XD_ERROR_ARGUMENT);
                CHECK(may || ticks == -7);
                refused += !may;
                if (!may) continue;
                memset(t, 0, sizeof *t);
                *t = (table){ .schedule = d, .p = p, .v = 3, .stages = 3 * p, .m = m };
                CHECK(xd_pipeline_table(ctx, &d, ROOM, t->work, &t->ticks) == XD_OK);
                check_order(t);
                make_acts(t, true);
                CHECK(run_paired(t));
            }
    CHECK(refused > 100);
    free(t);
}

/* The order of parallel.md's example: 5 micro-batches in groups of 3 through two virtual stages. */
XD_TEST(a_group_goes_through_all_virtual_stages_before_the_next) {
    static const int expected[10][2] = { { 0, 0 }, { 1, 0 }, { 2, 0 }, { 0, 1 }, { 1, 1 },
                                         { 2, 1 }, { 3, 0 }, { 4, 0 }, { 3, 1 }, { 4, 1 } };
    const xd_pipeline_schedule d = { .ranks = 2, .virtual_stages = 2, .micro_batches = 5, .group = 3 };
    xd_pipeline_work work[128];
    int64_t ticks = 0;
    int forwards = 0, backwards = 0;
    CHECK(xd_pipeline_table(ctx, &d, 128, work, &ticks) == XD_OK);
    for (int64_t k = 0; k < ticks; k++) {
        const xd_pipeline_work w = work[k * 2];
        const bool forward = w.kind == XD_PIPELINE_FORWARD;
        if (w.kind == XD_PIPELINE_IDLE) continue;
        const int *e = expected[forward ? forwards++ : backwards++];
        CHECK(w.micro_batch == e[0] && w.virtual_stage == (forward ? e[1] : 1 - e[1]));
    }
    CHECK(forwards == 10 && backwards == 10);
}

/* ---- bad input ---- */

static void refuse(xd_pipeline_schedule d, const char *text) {
    xd_pipeline_counts counts;
    int64_t ticks = -7;
    memset(&counts, 7, sizeof counts);
    const xd_pipeline_counts before = counts;
    CHECK_EQ_INT(xd_pipeline_table(ctx, &d, 0, NULL, &ticks), XD_ERROR_ARGUMENT);
    if (!strstr(xd_last_error(ctx)->message, text)) printf("%s\n", xd_last_error(ctx)->message);
    CHECK(strstr(xd_last_error(ctx)->message, text) && ticks == -7);
    CHECK_EQ_INT(xd_pipeline_measure(ctx, &d, 0, &counts), XD_ERROR_ARGUMENT);
    CHECK(memcmp(&before, &counts, sizeof counts) == 0);
}

XD_TEST(virtual_stages_of_one_rank_are_one_stage_of_its_schedule) {
    xd_ctx *own = NULL;
    xd_pipeline_work tables[2][8];
    CHECK_EQ_INT(xd_ctx_create(NULL, &own), XD_OK);
    memset(tables, 0, sizeof tables);
    for (int i = 0; i < 2; i++) {
        const xd_pipeline_schedule d = { .micro_batches = 4, .virtual_stages = i ? 3 : 0 };
        int64_t ticks = 0;
        CHECK_EQ_INT(xd_pipeline_table(own, &d, 8, tables[i], &ticks), XD_OK);
        CHECK_EQ_INT(ticks, 8);
    }
    CHECK(memcmp(tables[0], tables[1], sizeof tables[0]) == 0);
    xd_ctx_destroy(own);
}

XD_TEST(what_is_no_schedule_is_refused_with_the_numbers) {
    refuse((xd_pipeline_schedule){ .ranks = 2 }, "2 ranks, 0 virtual stages and 0 micro-batches");
    refuse((xd_pipeline_schedule){ .ranks = -1, .micro_batches = 4 }, "-1 ranks");
    refuse((xd_pipeline_schedule){ .ranks = 2, .virtual_stages = -3, .micro_batches = 4 },
           "-3 virtual stages");
    refuse((xd_pipeline_schedule){ .ranks = 2, .micro_batches = 4, .virtual_stages = XD_STAGES_MAX + 1 },
           "2 ranks with 129 virtual stages, at most 4096 with 128");
    refuse((xd_pipeline_schedule){ .ranks = 4097, .micro_batches = 4 }, "4097 ranks");
    refuse((xd_pipeline_schedule){ .ranks = 2, .micro_batches = (1 << 20) + 1 },
           "1048577 micro-batches, at most 1048576");
    refuse((xd_pipeline_schedule){ .ranks = 2, .micro_batches = 4, .group = -1 }, "groups of -1 of 4");
    refuse((xd_pipeline_schedule){ .ranks = 4, .virtual_stages = 2, .micro_batches = 8, .group = 3 },
           "groups of 3 micro-batches: at least the 4 ranks, at most all 8");
    refuse((xd_pipeline_schedule){ .ranks = 4, .virtual_stages = 2, .micro_batches = 8, .group = 9 },
           "groups of 9 micro-batches: at least the 4 ranks, at most all 8");
    refuse((xd_pipeline_schedule){ .ranks = 4, .virtual_stages = 2, .micro_batches = 9, .group = 4 },
           "9 micro-batches in groups of 4 leave 1 for the last group, fewer than the 4 ranks");
}

XD_TEST(a_table_without_room_and_a_rank_that_there_is_not_are_refused) {
    const xd_pipeline_schedule d = { .ranks = 2, .micro_batches = 3 };
    xd_pipeline_work work[16], before[16];
    xd_pipeline_counts counts;
    int64_t ticks = -7;
    CHECK_EQ_INT(xd_pipeline_table(ctx, &d, 15, work, &ticks), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "room for 15 entries of a table that has 16") && ticks == -7);
    CHECK_EQ_INT(xd_pipeline_table(ctx, &d, -1, before, &ticks), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "room for -1 entries of a table that has 16"));
    CHECK(xd_pipeline_table(ctx, &d, 16, work, &ticks) == XD_OK && ticks == 8);
    CHECK_EQ_INT(xd_pipeline_measure(ctx, &d, 2, &counts), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "rank 2 of a pipeline of 2 ranks"));
    CHECK_EQ_INT(xd_pipeline_measure(ctx, &d, -1, &counts), XD_ERROR_ARGUMENT);
}

int main(int argc, char **argv) {
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    const int result = xd_test_main(argc, argv);
    xd_ctx_destroy(ctx);
    return result;
}
