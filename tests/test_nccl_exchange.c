/* How ranks get the id of an NCCL world, attacked: silent, repeating and lying strangers, wrong secrets, bytes that come one
 * at a time, two processes of one rank, files of earlier runs. Ranks are threads, and NCCL is not needed. */
#include "nccl_exchange.h"
#include "xd_test.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>

enum { RANKS = 4, STRANGERS = 150 };

static const char secret[] = "a secret of the ranks of this world",
                  other_secret[] = "a secret of another world";

/* ---- ranks ---- */

/* One rank, and how its exchange ended. */
typedef struct member {
    xd_nccl_desc desc;
    xd_ctx_desc settings;
    unsigned char id[ID];
    xd_result result;
    int culprit;
    char message[512];
    pthread_t thread;
} member;

static void *run_member(void *argument) {
    member *m = (member *)argument;
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(&m->settings, &ctx) == XD_OK);
    m->result = exchange(ctx, &m->desc, m->id);
    m->culprit = xd_last_error(ctx)->culprit;
    snprintf(m->message, sizeof m->message, "%s", m->result == XD_OK ? "" : xd_last_error(ctx)->message);
    xd_ctx_destroy(ctx);
    return NULL;
}

/* Rank 0 has an id, the others have something else. */
static member make_member(int rank, int size, const char *port) {
    member m;
    memset(&m, 0, sizeof m);
    m.desc.rank = rank;
    m.desc.size = size;
    m.desc.host = "127.0.0.1";
    m.desc.port = port;
    m.desc.secret = secret;
    for (int i = 0; i < ID; i++) m.id[i] = (unsigned char)(rank == 0 ? 3 * i + 1 : 0xee);
    return m;
}

static void start(member *m) {
    CHECK(pthread_create(&m->thread, NULL, run_member, m) == 0);
}

static void finish(member *m) {
    CHECK(pthread_join(m->thread, NULL) == 0);
}

static bool has_id(const member *m) {
    for (int i = 0; i < ID; i++)
        if (m->id[i] != (unsigned char)(3 * i + 1)) return false;
    return true;
}

static void check_joined(const member *m) {
    CHECK_EQ_STR(m->message, "");
    CHECK(m->result == XD_OK && has_id(m));
}

static void check_refused(const member *m, xd_result result, const char *text) {
    CHECK_EQ_INT(m->result, result);
    CHECK(m->desc.rank == 0 || !has_id(m));
    if (!strstr(m->message, text)) CHECK_EQ_STR(m->message, text);
}

/* A clock of a member's own that goes on each time it is looked at. */
static double tick(void *user) {
    return *(double *)user += 0.05;
}

static void set_deadline(member *m, double *clock, double seconds) {
    *clock = 0.0;
    m->settings.clock.now_seconds = tick;
    m->settings.clock.user = clock;
    m->settings.init_timeout_seconds = seconds;
}

/* ---- sockets ---- */

static struct sockaddr_in address_of(const char *host, const char *port) {
    struct sockaddr_in address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)atoi(port));
    CHECK(inet_pton(AF_INET, host, &address.sin_addr) == 1);
    return address;
}

/* A socket that listens at 127.0.0.1; port "0" is replaced by the one that was free. */
static int open_door(char port[16]) {
    struct sockaddr_in address = address_of("127.0.0.1", port);
    socklen_t length = sizeof address;
    const int door = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    setsockopt(door, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    CHECK(bind(door, (struct sockaddr *)&address, sizeof address) == 0 && listen(door, 100) == 0);
    CHECK(getsockname(door, (struct sockaddr *)&address, &length) == 0);
    snprintf(port, 16, "%d", ntohs(address.sin_port));
    return door;
}

static void free_port(char port[16]) {
    snprintf(port, 16, "0");
    close(open_door(port));
}

/* -1 when nobody listens there. */
static int call_once(const char *host, const char *port) {
    const struct sockaddr_in address = address_of(host, port);
    const int line = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(line, (const struct sockaddr *)&address, sizeof address) == 0) return line;
    close(line);
    return -1;
}

/* A connection to rank 0, as soon as it listens. */
static int call(const char *port) {
    int line;
    while ((line = call_once("127.0.0.1", port)) < 0) sched_yield();
    return line;
}

/* All bytes, `piece` at a time; false when the other side is gone. */
static bool put(int line, const unsigned char *data, size_t bytes, size_t piece) {
    for (size_t at = 0; at < bytes; at += piece) {
        const size_t left = bytes - at < piece ? bytes - at : piece;
        if (send(line, data + at, left, MSG_NOSIGNAL) != (ssize_t)left) return false;
        if (piece == 1) sched_yield();
    }
    return true;
}

static bool get(int line, unsigned char *data, size_t bytes, size_t piece) {
    for (size_t at = 0; at < bytes;) {
        const ssize_t got = recv(line, data + at, bytes - at < piece ? bytes - at : piece, 0);
        if (got <= 0) return false;
        at += (size_t)got;
    }
    return true;
}

/* ---- a rank, step by step ---- */

typedef struct talk {
    int line;
    size_t piece;                                              /* bytes of each send and receive */
    unsigned char said[HELLO + NONCE], tag[TAG], reply[REPLY]; /* said: hello, challenge */
} talk;

static void write_hello(unsigned char *hello, int rank, int size, int nonce) {
    memcpy(hello, "xdn2", 4);
    put_number(hello + 4, (uint32_t)rank);
    put_number(hello + 8, (uint32_t)size);
    memset(hello + 12, nonce, NONCE);
}

static void sign(const char *key, char direction, const talk *t, size_t message, unsigned char *tag) {
    unsigned char bytes[1 + HELLO + NONCE + REPLY];
    bytes[0] = (unsigned char)direction;
    memcpy(bytes + 1, t->said, sizeof t->said);
    memcpy(bytes + 1 + sizeof t->said, t->reply, message);
    keyed_hash(key, bytes, 1 + sizeof t->said + message, tag);
}

/* Until the tag is to be sent. */
static bool ask(talk *t, const char *port, int rank, int size, int nonce) {
    t->line = call(port);
    if (!t->piece) t->piece = 1000;
    write_hello(t->said, rank, size, nonce);
    if (!put(t->line, t->said, HELLO, t->piece) || !get(t->line, t->said + HELLO, NONCE, t->piece))
        return false;
    sign(secret, 'r', t, 0, t->tag);
    return true;
}

/* The rest: the verdict, or -1 when there is none. */
static int hear(talk *t) {
    unsigned char tag[TAG];
    const bool told = put(t->line, t->tag, TAG, t->piece) && get(t->line, t->reply, REPLY, t->piece);
    if (told) {
        sign(secret, '0', t, REPLY - TAG, tag);
        CHECK(memcmp(tag, t->reply + REPLY - TAG, TAG) == 0);
        send(t->line, "", 1, MSG_NOSIGNAL);
    }
    close(t->line);
    return told ? (int)number_at(t->reply) : -1;
}

static int join_by_hand(const char *port, int rank, int size, int nonce, size_t piece) {
    talk t = { .piece = piece };
    if (ask(&t, port, rank, size, nonce)) return hear(&t);
    close(t.line);
    return -1;
}

/* ---- the hash ---- */

XD_TEST(the_keyed_hash_is_hmac_sha256) {
    static const struct {
        int key, bytes;
        const char *expected;
    } cases[] = {
        { 16, 0, "496dc93fa2d26eae500ec0bc37a122706b88f8963cebf0899d0245fae313e241" },
        { 64, 55, "0ed0c3c8bee7722612af330de5e081d37990ca19f30d793cc125f16330629e24" },
        { 65, 56, "e0d08c1ddab61922bdc387338dce92d8576c623b934ec9cfbaf407dce3ab4334" },
        { 100, 64, "8350e107cb9eeaede93ba0b0c397c9b00df1a2b1257d9862bfc64a3d0e6e22d2" },
        { 16, 200, "6697e3f132bef06e7963d52fefb7d2c5ac3122b3aca5275768c03be881fe593c" },
    };
    unsigned char message[256], tag[TAG];
    for (int i = 0; i < 256; i++) message[i] = (unsigned char)(7 * i);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        char key[128] = "0123456789abcdef", text[2 * TAG + 1];
        if (cases[c].key > 16) memset(key, 'k', (size_t)cases[c].key);
        keyed_hash(key, message, (size_t)cases[c].bytes, tag);
        for (int i = 0; i < TAG; i++) snprintf(text + 2 * i, 3, "%02x", tag[i]);
        CHECK_EQ_STR(text, cases[c].expected);
    }
}

/* ---- over TCP ---- */

static void join_all(member *members, int first, int size) {
    for (int r = first; r < size; r++) start(&members[r]);
    for (int r = 0; r < size; r++) finish(&members[r]);
    for (int r = 0; r < size; r++) check_joined(&members[r]);
}

XD_TEST(every_rank_gets_the_id_in_any_order) {
    for (int last = 0; last < 2; last++) { /* rank 0 comes first, or when the others have called in vain */
        char port[16];
        member members[RANKS];
        free_port(port);
        for (int r = 0; r < RANKS; r++) members[r] = make_member(r, RANKS, port);
        if (!last) start(&members[0]);
        for (int r = 1; r < RANKS; r++) start(&members[r]);
        if (last) start(&members[0]);
        for (int r = 0; r < RANKS; r++) finish(&members[r]);
        for (int r = 0; r < RANKS; r++) check_joined(&members[r]);
    }
}

XD_TEST(strangers_who_say_nothing_or_half_a_sentence_cost_nobody_anything) {
    char port[16];
    member members[RANKS];
    int lines[STRANGERS];
    unsigned char hello[HELLO];
    free_port(port);
    for (int r = 0; r < RANKS; r++) members[r] = make_member(r, RANKS, port);
    start(&members[0]);
    for (int i = 0; i < STRANGERS; i++) { /* more than rank 0 has room for */
        lines[i] = call(port);
        write_hello(hello, 1 + i % 3, RANKS, i);
        put(lines[i], hello, (size_t)(i % 2 ? 0 : i % 3 ? HELLO - 1 : HELLO), HELLO);
    }
    join_all(members, 1, RANKS);
    for (int i = 0; i < STRANGERS; i++) close(lines[i]);
}

/* A stranger that calls again and again, with noise or with a hello, until it is told to stop. */
typedef struct pest {
    const char *port;
    bool polite;
    uint32_t stop, calls;
    pthread_t thread;
} pest;

static void *run_pest(void *argument) {
    pest *p = (pest *)argument;
    unsigned char noise[HELLO + TAG] = "GET / HTTP/1.1";
    while (!__atomic_load_n(&p->stop, __ATOMIC_ACQUIRE)) {
        const int line = call_once("127.0.0.1", p->port);
        if (line < 0) continue;
        if (p->polite) write_hello(noise, 1, RANKS, 9);
        put(line, noise, sizeof noise, sizeof noise);
        close(line);
        __atomic_add_fetch(&p->calls, 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

static void set_pests(pest pests[2], const char *port) {
    for (int i = 0; i < 2; i++) {
        pests[i].port = port;
        pests[i].polite = i == 1;
        pests[i].stop = pests[i].calls = 0;
        CHECK(pthread_create(&pests[i].thread, NULL, run_pest, &pests[i]) == 0);
    }
}

static void stop_pests(pest pests[2]) {
    for (int i = 0; i < 2; i++) {
        __atomic_store_n(&pests[i].stop, 1, __ATOMIC_RELEASE);
        CHECK(pthread_join(pests[i].thread, NULL) == 0);
        CHECK(pests[i].calls > 0);
    }
}

/* A clock that stands until both have called, which on a busy machine takes them a while. */
typedef struct pest_clock {
    double seconds;
    const pest *pests;
} pest_clock;

static double tick_once_called(void *user) {
    pest_clock *c = (pest_clock *)user;
    for (int i = 0; i < 2; i++)
        if (!__atomic_load_n(&c->pests[i].calls, __ATOMIC_ACQUIRE)) return c->seconds;
    return tick(&c->seconds);
}

XD_TEST(strangers_who_call_again_and_again_do_not_hold_rank_0_beyond_its_deadline) {
    char port[16];
    pest pests[2];
    pest_clock clock = { 0.0, pests };
    free_port(port);
    member first = make_member(0, RANKS, port);
    memset(pests, 0, sizeof pests);
    set_deadline(&first, &clock.seconds, 20.0);
    first.settings.clock.now_seconds = tick_once_called;
    first.settings.clock.user = &clock;
    start(&first);
    CHECK(join_by_hand(port, 2, RANKS, 1, 1000) == 0);
    set_pests(pests, port);
    finish(&first);
    stop_pests(pests);
    check_refused(&first, XD_ERROR_TIMEOUT, "ranks 1,3 did not ask for the id at 127.0.0.1 port ");
    CHECK_EQ_INT(first.culprit, 1);
}

XD_TEST(ranks_join_among_strangers_who_call_again_and_again) {
    char port[16];
    pest pests[2];
    member members[RANKS];
    free_port(port);
    for (int r = 0; r < RANKS; r++) members[r] = make_member(r, RANKS, port);
    start(&members[0]);
    set_pests(pests, port);
    while (!__atomic_load_n(&pests[1].calls, __ATOMIC_ACQUIRE)) sched_yield();
    join_all(members, 1, RANKS);
    stop_pests(pests);
}

XD_TEST(strangers_who_take_every_descriptor_do_not_lock_ranks_out) {
    char port[16];
    int lines[STRANGERS], status = -1;
    free_port(port);
    member second = make_member(1, 2, port), first = make_member(0, 2, port);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        const struct rlimit few = { 24, 24 };
        setrlimit(RLIMIT_NOFILE, &few);
        run_member(&first);
        _exit(first.result == XD_OK ? 0 : 1);
    }
    for (int i = 0; i < STRANGERS / 3; i++) lines[i] = call(port);
    run_member(&second);
    check_joined(&second);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    for (int i = 0; i < STRANGERS / 3; i++) close(lines[i]);
}

XD_TEST(without_the_secret_the_id_is_neither_given_nor_taken) {
    char port[16];
    double clocks[2];
    free_port(port);
    member first = make_member(0, 2, port), second = make_member(1, 2, port);
    second.desc.secret = other_secret;
    set_deadline(&first, &clocks[0], 5.0);
    set_deadline(&second, &clocks[1], 0.6);
    start(&first);
    while (call_once("127.0.0.1", port) < 0) sched_yield();
    start(&second);
    finish(&second);
    finish(&first);
    check_refused(&first, XD_ERROR_TIMEOUT, "with another secret)");
    check_refused(&second, XD_ERROR_TIMEOUT, "who answered there has another secret");
    CHECK(strstr(first.message, "ranks 1 did not ask") && !strstr(first.message, " 0 with another secret"));
}

XD_TEST(tags_that_are_wrong_in_one_bit_or_were_another_connection_s_are_refused) {
    char port[16];
    free_port(port);
    member first = make_member(0, 2, port);
    start(&first);
    talk old, t;
    memset(&old, 0, sizeof old);
    CHECK(ask(&old, port, 1, 2, 5)); /* an honest tag, kept for later */
    for (int i = 0; i < TAG; i++) {
        memset(&t, 0, sizeof t);
        CHECK(ask(&t, port, 1, 2, 5));
        t.tag[i] ^= (unsigned char)(1 << i % 8);
        CHECK_EQ_INT(hear(&t), -1);
    }
    memset(&t, 0, sizeof t);
    CHECK(ask(&t, port, 1, 2, 5));
    CHECK(memcmp(t.said + HELLO, old.said + HELLO, NONCE) != 0);
    memcpy(t.tag, old.tag, TAG);
    CHECK_EQ_INT(hear(&t), -1);
    CHECK_EQ_INT(hear(&old), 0);
    finish(&first);
    check_joined(&first);
}

XD_TEST(bytes_may_come_and_go_one_at_a_time_and_others_do_not_wait) {
    char port[16];
    free_port(port);
    member first = make_member(0, 3, port), third = make_member(2, 3, port);
    start(&first);
    talk slow = { .piece = 1 };
    CHECK(ask(&slow, port, 1, 3, 7));
    CHECK(put(slow.line, slow.tag, TAG / 2, 1)); /* rank 2 joins in the middle of rank 1's tag */
    run_member(&third);
    check_joined(&third);
    memmove(slow.tag, slow.tag + TAG / 2, TAG / 2);
    CHECK(put(slow.line, slow.tag, TAG / 2, 1) && get(slow.line, slow.reply, REPLY, 1));
    CHECK_EQ_INT(number_at(slow.reply), 0);
    CHECK(memcmp(slow.reply + 4, first.id, ID) == 0);
    CHECK(put(slow.line, slow.tag, 1, 1));
    finish(&first);
    close(slow.line);
    check_joined(&first);
}

XD_TEST(a_place_is_taken_once_by_one_process) {
    char port[16];
    free_port(port);
    member first = make_member(0, 3, port), again = make_member(1, 3, port), third = make_member(2, 3, port);
    start(&first);
    CHECK_EQ_INT(join_by_hand(port, 1, 3, 7, 1000), 0);
    run_member(&again);
    check_refused(&again, XD_ERROR_MISMATCH, "another process has joined as rank 1");
    CHECK_EQ_INT(join_by_hand(port, 1, 3, 8, 1000), 1);
    CHECK_EQ_INT(join_by_hand(port, 1, 3, 7, 1000), 0); /* the same process, whose connection broke */
    CHECK_EQ_INT(join_by_hand(port, 0, 3, 7, 1000), 1); /* that is rank 0 itself */
    CHECK_EQ_INT(join_by_hand(port, 3, 3, 7, 1000), 1);
    run_member(&third);
    finish(&first);
    check_joined(&third);
    check_joined(&first);
}

XD_TEST(a_rank_of_another_size_is_told_both_numbers) {
    char port[16];
    free_port(port);
    member first = make_member(0, 2, port), second = make_member(1, 2, port), odd = make_member(1, 5, port);
    start(&first);
    run_member(&odd);
    check_refused(&odd, XD_ERROR_MISMATCH, "has 2 ranks, rank 1 was told 5");
    run_member(&second);
    finish(&first);
    check_joined(&second);
}

/* A stranger where the rank expects rank 0. */
typedef enum lie { SILENT, HANGS_UP, NOISE, ECHO, REPLAY, LIES } lie;

typedef struct impostor {
    int door;
    lie kind;
    talk record; /* of an honest conversation */
    uint32_t callers;
    pthread_t thread;
} impostor;

static void lie_to(impostor *p, int line) {
    unsigned char hello[HELLO], tag[TAG], reply[REPLY] = { 0 };
    if (p->kind == SILENT || p->kind == HANGS_UP || !get(line, hello, HELLO, HELLO)) return;
    if (!put(line, p->kind == ECHO ? hello : p->record.said + HELLO, NONCE, NONCE) ||
        !get(line, tag, TAG, TAG))
        return;
    memcpy(reply + REPLY - TAG, tag, TAG); /* ECHO: the rank's own tag */
    put(line, p->kind == REPLAY ? p->record.reply : reply, REPLY, REPLY);
}

static void *run_impostor(void *argument) {
    impostor *p = (impostor *)argument;
    int silent[64], count = 0;
    for (;;) {
        const int line = accept(p->door, NULL, NULL);
        if (line < 0) break; /* the door was shut */
        __atomic_add_fetch(&p->callers, 1, __ATOMIC_RELEASE);
        lie_to(p, line);
        if (p->kind == SILENT && count < 64)
            silent[count++] = line;
        else
            close(line);
    }
    while (count > 0) close(silent[--count]);
    return NULL;
}

XD_TEST(nobody_but_rank_0_can_give_an_id) {
    char port[16];
    impostor p;
    memset(&p, 0, sizeof p);
    free_port(port);
    member honest = make_member(0, 2, port);
    start(&honest);
    CHECK(ask(&p.record, port, 1, 2, 7) && hear(&p.record) == 0);
    finish(&honest);
    for (int kind = 0; kind < LIES; kind++) {
        double clock;
        snprintf(port, sizeof port, "0");
        p.door = open_door(port);
        p.kind = (lie)kind;
        p.callers = 0;
        member second = make_member(1, 2, port);
        set_deadline(&second, &clock,
                     kind == SILENT ? 12.0 : 0.5); /* silence is given up after ten seconds */
        CHECK(pthread_create(&p.thread, NULL, run_impostor, &p) == 0);
        run_member(&second);
        shutdown(p.door, SHUT_RDWR);
        CHECK(pthread_join(p.thread, NULL) == 0);
        close(p.door);
        check_refused(&second, XD_ERROR_TIMEOUT, "rank 0 did not answer at 127.0.0.1 port ");
        CHECK((strstr(second.message, "another secret") != NULL) == (kind >= NOISE));
        CHECK(p.callers > 0);
    }
}

XD_TEST(rank_0_listens_at_its_host_only) {
    char port[16];
    free_port(port);
    member first = make_member(0, 2, port), second = make_member(1, 2, port);
    start(&first);
    close(call(port));
    CHECK(call_once("127.0.0.2", port) < 0); /* on this machine too, but another interface's */
    run_member(&second);
    finish(&first);
    check_joined(&first);
    for (int rank = 0; rank < 2; rank++)
        for (int v6 = 0; v6 < 2; v6++) {
            member m = make_member(rank, 2, port);
            m.desc.host = v6 ? "::" : "0.0.0.0";
            run_member(&m);
            check_refused(&m, XD_ERROR_ARGUMENT, "stands for every interface");
        }
}

XD_TEST(a_port_that_is_in_use_and_a_short_secret_are_refused_at_once) {
    char port[16] = "0";
    const int door = open_door(port);
    member m = make_member(0, 2, port);
    run_member(&m);
    check_refused(&m, XD_ERROR_IO, "cannot listen at 127.0.0.1 port ");
    close(door);
    for (int i = 0; i < 4; i++) {
        m = make_member(i % 2, 2, port);
        m.desc.secret = i < 2 ? NULL : "fifteen letters";
        run_member(&m);
        check_refused(&m, XD_ERROR_ARGUMENT,
                      i < 2 ? "a secret of 0 bytes: at least 16" : "a secret of 15 bytes");
    }
}

/* ---- by file ---- */

enum { PAGE = HELLO + ID + NONCE + TAG, QUESTION = HELLO + TAG };

/* A folder of our own, and the names of the files of two ranks in it. */
typedef struct folder {
    char path[64], file[80], question[96];
} folder;

static folder make_folder(void) {
    folder f = { "/tmp/xdistill-id-XXXXXX", "", "" };
    CHECK(mkdtemp(f.path) != NULL);
    snprintf(f.file, sizeof f.file, "%s/id", f.path);
    snprintf(f.question, sizeof f.question, "%s.1", f.file);
    return f;
}

static void remove_folder(const folder *f) { /* which is empty */
    CHECK(access(f->file, F_OK) != 0 && access(f->question, F_OK) != 0);
    CHECK(rmdir(f->path) == 0);
}

static member make_file_member(int rank, int size, const folder *f) {
    member m = make_member(rank, size, NULL);
    m.desc.host = NULL;
    m.desc.file = f->file;
    return m;
}

static bool read_all(const char *path, unsigned char *data, size_t bytes) {
    FILE *file = fopen(path, "rb");
    const bool read = file && fread(data, 1, bytes, file) == bytes;
    if (file) fclose(file);
    return read;
}

static void write_all(const char *path, const unsigned char *data, size_t bytes) {
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite(data, 1, bytes, file) == bytes && fclose(file) == 0);
}

/* An exchange of two ranks whose files are kept, as a run leaves them that is killed. */
static void record_run(const folder *f, unsigned char question[QUESTION], unsigned char page[PAGE]) {
    unsigned char signed_bytes[1 + HELLO] = "f";
    member first = make_file_member(0, 2, f);
    write_hello(question, 1, 2, 7);
    memcpy(signed_bytes + 1, question, HELLO);
    keyed_hash(secret, signed_bytes, sizeof signed_bytes, question + HELLO);
    write_all(f->question, question, QUESTION);
    start(&first);
    do {
        sched_yield();
    } while (!read_all(f->file, page, PAGE) || memcmp(page + HELLO + ID, question + 12, NONCE) != 0);
    struct stat status;
    CHECK(stat(f->file, &status) == 0 && (status.st_mode & 0777) == 0600);
    CHECK(unlink(f->question) == 0);
    finish(&first);
    check_joined(&first);
    CHECK(memcmp(page + HELLO, first.id, ID) == 0);
}

XD_TEST(the_id_goes_by_files_which_are_gone_afterwards) {
    for (int last = 0; last < 2; last++) {
        folder f = make_folder();
        member members[RANKS];
        for (int r = 0; r < RANKS; r++) members[r] = make_file_member(r, RANKS, &f);
        if (!last) start(&members[0]);
        for (int r = 1; r < RANKS; r++) start(&members[r]);
        if (last) start(&members[0]);
        for (int r = 0; r < RANKS; r++) finish(&members[r]);
        for (int r = 0; r < RANKS; r++) check_joined(&members[r]);
        remove_folder(&f);
    }
}

XD_TEST(files_of_an_earlier_run_are_neither_taken_nor_in_the_way) {
    folder f = make_folder();
    unsigned char question[QUESTION], page[PAGE];
    double clock;
    record_run(&f, question, page);
    write_all(f.file, page, PAGE);
    member early = make_file_member(1, 2, &f);
    set_deadline(&early, &clock, 1.0);
    run_member(&early);
    check_refused(&early, XD_ERROR_TIMEOUT, "it is of another run");
    for (int last = 0; last < 2; last++) {
        member first = make_file_member(0, 2, &f), second = make_file_member(1, 2, &f);
        write_all(f.file, page, PAGE);
        write_all(f.question, question, QUESTION);
        start(last ? &second : &first);
        while (!last && (!read_all(f.file, page, PAGE) || memcmp(page + 12, "\7\7", 2) == 0)) sched_yield();
        start(last ? &first : &second);
        finish(&first);
        finish(&second);
        check_joined(&first);
        check_joined(&second);
    }
    remove_folder(&f);
}

XD_TEST(a_file_that_somebody_else_has_put_there_is_not_believed) {
    static const char *const reasons[] = { "it was made with another secret",
                                           "it is not a file of a world of this size",
                                           "it is not a file of a world of this size" };
    folder f = make_folder();
    unsigned char question[QUESTION], page[PAGE + 1] = { 0 };
    record_run(&f, question, page);
    for (int kind = 0; kind < 3; kind++) {
        double clock;
        member second = make_file_member(1, 2, &f);
        page[HELLO] ^= 1; /* the id, with the other's tag */
        if (kind < 2) write_all(f.file, page, kind ? PAGE + 1 : PAGE);
        if (kind == 2) CHECK(mkfifo(f.file, 0600) == 0); /* opening it would wait for ever */
        set_deadline(&second, &clock, 1.0);
        run_member(&second);
        check_refused(&second, XD_ERROR_TIMEOUT, reasons[kind]);
        CHECK(unlink(f.file) == 0);
    }
    remove_folder(&f);
}

XD_TEST(rank_0_names_who_did_not_come_and_leaves_no_file) {
    folder f = make_folder();
    double clocks[2];
    member first = make_file_member(0, 3, &f), second = make_file_member(1, 3, &f);
    second.desc.secret = other_secret;
    set_deadline(&first, &clocks[0], 3.0);
    set_deadline(&second, &clocks[1], 1.0);
    start(&second);
    run_member(&first);
    finish(&second);
    check_refused(&first, XD_ERROR_TIMEOUT, "ranks 1,2 did not ask for the id in ");
    check_refused(&second, XD_ERROR_TIMEOUT, "no id in ");
    CHECK_EQ_INT(first.culprit, 1);
    remove_folder(&f);
}

XD_TEST(two_worlds_with_one_file_do_not_mix) {
    folder f = make_folder();
    member first = make_file_member(0, 2, &f), newer = make_file_member(0, 2, &f),
           second = make_file_member(1, 2, &f);
    start(&first);
    while (access(f.file, F_OK) != 0) sched_yield();
    start(&newer);
    finish(&first);
    check_refused(&first, XD_ERROR_IO, "is another world using it?");
    run_member(&second);
    finish(&newer);
    check_joined(&newer);
    check_joined(&second);
    remove_folder(&f);
}

XD_TEST_MAIN()
