/* Collectives as messages between pairs of ranks (comm/transport.h): what one puts the other gets, and what has arrived then is
 * what the collective means; the blocks of sums; leaves; records that nobody compares. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"

enum { RANKS = 6, ROOM = 160, LONGEST = 5 };

typedef struct message_end {
    const char *out;
    char *in;
    size_t out_bytes, in_bytes;
} message_end;

/* One rank: its memory, its record and its ends of the messages. */
typedef struct member {
    int32_t send[ROOM], recv[ROOM];
    int64_t send_counts[RANKS], send_begins[RANKS], recv_counts[RANKS], recv_begins[RANKS];
    xd_collective record;
    message_end ends[RANKS];
} member;

typedef struct scene {
    uint64_t state;
    int n;
    xd_collective_kind kind;
    bool spread; /* blocks have displacements, and gaps between them */
    member ranks[RANKS];
} scene;

static int64_t draw(scene *s, int64_t below) {
    s->state = s->state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)(s->state >> 33) % below;
}

static void put(void *user, int peer, const void *data, size_t bytes) {
    member *m = (member *)user;
    CHECK(m->ends[peer].out == NULL && bytes > 0);
    m->ends[peer].out = (const char *)data;
    m->ends[peer].out_bytes = bytes;
}

static void get(void *user, int peer, void *data, size_t bytes) {
    member *m = (member *)user;
    CHECK(m->ends[peer].in == NULL && bytes > 0);
    m->ends[peer].in = (char *)data;
    m->ends[peer].in_bytes = bytes;
}

/* Places blocks behind one another, with gaps where they are spread; the first ones last then. */
static void place(scene *s, const int64_t *counts, int64_t *begins) {
    int64_t at = 0;
    for (int i = 0; i < s->n; i++) {
        const int r = s->spread ? s->n - 1 - i : i;
        if (s->spread) at += draw(s, 3);
        begins[r] = at;
        at += counts[r];
    }
}

/* counts[from][to]; those of a kind that sends every rank the same depend on `from` alone. */
static void draw_scene(scene *s, uint64_t seed) {
    static const xd_collective_kind kinds[] = { XD_COLLECTIVE_BROADCAST, XD_COLLECTIVE_ALL_GATHER,
                                                XD_COLLECTIVE_GATHER, XD_COLLECTIVE_SCATTER,
                                                XD_COLLECTIVE_ALL_TO_ALL };
    int64_t counts[RANKS][RANKS];
    memset(s, 0, sizeof *s);
    s->state = seed * 2654435761u + 1;
    s->n = 1 + (int)draw(s, RANKS);
    s->kind = kinds[draw(s, 5)];
    s->spread = draw(s, 2) == 1;
    const int root = (int)draw(s, s->n);
    for (int from = 0; from < s->n; from++)
        for (int to = 0; to < s->n; to++) counts[from][to] = draw(s, LONGEST);
    for (int r = 0; r < s->n; r++) {
        member *m = &s->ranks[r];
        for (int i = 0; i < ROOM; i++) m->send[i] = 1000 * (r + 1) + i, m->recv[i] = -1;
        for (int q = 0; q < s->n; q++) {
            const bool scatter = s->kind == XD_COLLECTIVE_SCATTER,
                       to_all = s->kind == XD_COLLECTIVE_ALL_TO_ALL;
            m->send_counts[q] = counts[scatter ? root : r][q];
            m->recv_counts[q] = counts[q][to_all ? r : 0];
        }
        place(s, m->send_counts, m->send_begins);
        place(s, m->recv_counts, m->recv_begins);
        m->record.kind = s->kind;
        m->record.send = m->send;
        m->record.recv = m->recv;
        m->record.count = counts[0][0];
        m->record.dtype = XD_DTYPE_I32;
        m->record.root = root;
        m->record.send_counts = m->send_counts;
        m->record.recv_counts = m->recv_counts;
        if (s->spread)
            m->record.send_displacements = m->send_begins, m->record.recv_displacements = m->recv_begins;
    }
}

/* Element i of what `to` receives of `from`, or -1: the meaning of each kind. */
static int32_t meant(const scene *s, int from, int to, int64_t i) {
    const member *f = &s->ranks[from], *t = &s->ranks[to];
    const int root = f->record.root;
    switch (s->kind) {
    case XD_COLLECTIVE_BROADCAST: return from == root && to != root && i < f->record.count ? f->send[i] : -1;
    case XD_COLLECTIVE_ALL_GATHER: return i < t->recv_counts[from] ? f->send[i] : -1;
    case XD_COLLECTIVE_GATHER: return to == root && i < t->recv_counts[from] ? f->send[i] : -1;
    case XD_COLLECTIVE_SCATTER:
        return from == root && i < f->send_counts[to] ? f->send[f->send_begins[to] + i] : -1;
    default: return i < f->send_counts[to] ? f->send[f->send_begins[to] + i] : -1;
    }
}

static void deliver(scene *s) {
    static const xd_message_sink sink = { put, get };
    for (int r = 0; r < s->n; r++) xd_collective_messages(&s->ranks[r].record, r, s->n, &sink, &s->ranks[r]);
    for (int from = 0; from < s->n; from++)
        for (int to = 0; to < s->n; to++) {
            const message_end *out = &s->ranks[from].ends[to], *in = &s->ranks[to].ends[from];
            CHECK_EQ_INT(out->out_bytes, in->in_bytes);
            if (out->out_bytes == in->in_bytes && in->in) memcpy(in->in, out->out, in->in_bytes);
        }
}

static void check_arrived(const scene *s) {
    for (int to = 0; to < s->n; to++) {
        int32_t expected[ROOM];
        const member *t = &s->ranks[to];
        const bool blocks = s->kind != XD_COLLECTIVE_BROADCAST && s->kind != XD_COLLECTIVE_SCATTER;
        for (int i = 0; i < ROOM; i++) expected[i] = -1;
        for (int from = 0; from < s->n; from++)
            for (int64_t i = 0; i < LONGEST; i++)
                if (meant(s, from, to, i) >= 0)
                    expected[(blocks ? t->recv_begins[from] : 0) + i] = meant(s, from, to, i);
        CHECK_EQ_INT(memcmp(expected, t->recv, sizeof expected), 0);
    }
}

XD_TEST(messages_carry_what_collectives_mean) {
    static scene s;
    for (uint64_t seed = 0; seed < 3000; seed++) {
        draw_scene(&s, seed);
        deliver(&s);
        check_arrived(&s);
    }
}

XD_TEST(blocks_of_sums_cover_what_is_summed) {
    for (int n = 1; n <= RANKS; n++)
        for (int64_t count = 0; count < 20; count++) {
            int64_t begins[RANKS], counts[RANKS], end = 0, given[RANKS], shuffled[RANKS];
            xd_collective c;
            memset(&c, 0, sizeof c);
            c.kind = XD_COLLECTIVE_ALL_REDUCE;
            c.count = count;
            CHECK_EQ_INT(xd_collective_blocks(&c, n, false, begins, counts), count);
            for (int r = 0; r < n; end += counts[r++]) {
                CHECK_EQ_INT(begins[r], end);
                CHECK(counts[r] == count / n || counts[r] == count / n + 1);
            }
            CHECK_EQ_INT(end, count);
            CHECK_EQ_INT(xd_collective_blocks(&c, n, true, begins, counts), count);
            for (int r = 0; r < n; r++) CHECK(begins[r] == 0 && counts[r] == count);
            for (int r = 0; r < n; r++) given[r] = (count * (r + 3)) % 7, shuffled[r] = 50 - r;
            c.kind = XD_COLLECTIVE_REDUCE_SCATTER;
            c.send_counts = given;
            const int64_t whole = xd_collective_blocks(&c, n, false, begins, counts);
            for (int r = 0, at = 0; r < n; at += (int)given[r++])
                CHECK(begins[r] == at && counts[r] == given[r]);
            CHECK_EQ_INT(whole, begins[n - 1] + counts[n - 1]);
            c.send_displacements = shuffled;
            CHECK_EQ_INT(xd_collective_blocks(&c, n, false, begins, counts), whole);
            for (int r = 0; r < n; r++) CHECK(begins[r] == shuffled[r] && counts[r] == given[r]);
        }
}

XD_TEST(leaves_come_from_the_plan_or_from_the_records) {
    const xd_leaves known[3] = { { 0, 3, 8 }, { 3, 0, 8 }, { 3, 5, 8 } };
    xd_control mine, all[3];
    xd_collective c;
    xd_leaves out[3];
    memset(&c, 0, sizeof c);
    memset(&mine, 0, sizeof mine);
    mine.layout = 77;
    mine.count = 9;
    xd_control_assume(&mine, &c, 3, all);
    for (int r = 0; r < 3; r++) CHECK(all[r].count == 9 && all[r].layout == 0 && all[r].leaves == 0);
    CHECK_EQ_INT(xd_control_leaves(all, &c, 3, out), 3); /* no leaves: one piece of each rank */
    c.leaves = known[2];
    c.known_leaves = known;
    xd_control_assume(&mine, &c, 3, all);
    for (int r = 0; r < 3; r++)
        CHECK(all[r].extra == (uint64_t)known[r].first && all[r].leaves == (uint64_t)known[r].count);
    for (int pass = 0; pass < 2; pass++) {
        memset(out, 0xA5, sizeof out);
        CHECK_EQ_INT(xd_control_leaves(all, &c, 3, out), 2 + 0 + 2); /* 2 + 1; nothing; 1 + 4 */
        for (int r = 0; r < 3; r++) CHECK(out[r].first == known[r].first && out[r].count == known[r].count);
        c.known_leaves = NULL; /* the second time they come from the records */
    }
}

XD_TEST_MAIN()
