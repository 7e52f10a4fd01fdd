/* A save is one transaction: killed at every file call, killed at random while others read, and with every call failing in
 * turn, a directory holds the older model or the new one, and the next save leaves nothing but its own files.
 *
 * XD_TEST_KILLS is the number of kills at random; without it a sample. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp, kill, symlink */
#endif

#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "base/publish_internal.h"
#endif
#include "press_files.h"
#include "weights_calls.h"

#include <dirent.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- models: every byte of every tensor is the version ---- */

enum { TENSORS = 4, TENSOR_BYTES = 600, SINGLE = 0, TWO = 2 * TENSOR_BYTES, FOUR = TENSOR_BYTES };

static const int64_t shape[] = { TENSOR_BYTES };
static const xd_weights_entry entries[TENSORS] = { { "a", XD_DTYPE_U8, 1, shape },
                                                   { "b", XD_DTYPE_U8, 1, shape },
                                                   { "c", XD_DTYPE_U8, 1, shape },
                                                   { "d", XD_DTYPE_U8, 1, shape } };

static int files_of(int kind) {
    return kind == SINGLE ? 1 : 1 + TENSORS * TENSOR_BYTES / kind;
}

static xd_result save(xd_ctx *ctx, const char *directory, int kind, int version) {
    unsigned char bytes[TENSOR_BYTES];
    xd_weights_writer *w = NULL;
    xd_weights_writer_desc desc;
    memset(bytes, version, sizeof bytes);
    memset(&desc, 0, sizeof desc);
    desc.entries = entries;
    desc.entry_count = TENSORS;
    desc.max_shard_bytes = (uint64_t)kind;
    xd_result result = weights_write_directory(ctx, directory, &desc, &w);
    if (result != XD_OK) return result;
    for (int i = 0; i < TENSORS && result == XD_OK; i++)
        result = xd_weights_writer_write(w, i, 0, sizeof bytes, bytes);
    if (result == XD_OK) return xd_weights_writer_commit(w);
    xd_weights_writer_abort(w);
    return result;
}

/* The version that a reader finds: -1 when there is none, -2 when it is a mixture. */
static int version_of(xd_ctx *ctx, const char *directory) {
    xd_weights *model = NULL;
    if (weights_open_directory(ctx, directory, NULL, &model) != XD_OK) return -1;
    int version = -1;
    for (int i = 0; i < TENSORS; i++) {
        const int64_t index = xd_weights_find(model, entries[i].name);
        if (index < 0) {
            version = -2;
            break;
        }
        const unsigned char *data = (const unsigned char *)xd_weights_data(model, index);
        if (i == 0) version = data[0];
        for (int k = 0; k < TENSOR_BYTES; k++)
            if (data[k] != version) version = -2;
    }
    xd_weights_close(model);
    return version;
}

/* Number of names in the directory, which is empty afterwards when `remove_them`. */
static int names_in(const char *directory, bool remove_them) {
    DIR *names = opendir(directory);
    int count = 0;
    for (const struct dirent *entry; names && (entry = readdir(names)) != NULL;) {
        char path[400];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        count++;
        snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
        if (remove_them) remove(path);
    }
    if (names) closedir(names);
    return count;
}

static const char *new_directory(void) {
    static char directory[40];
    strcpy(directory, "/tmp/xdistill-test-XXXXXX");
    CHECK(mkdtemp(directory) != NULL);
    return directory;
}

static void end_directory(const char *directory) {
    names_in(directory, true);
    CHECK(rmdir(directory) == 0);
}

/* ---- each call in turn ---- */

static const int transitions[][2] = { { FOUR, FOUR },   { FOUR, TWO },   { TWO, FOUR },     { SINGLE, FOUR },
                                      { FOUR, SINGLE }, { SINGLE, TWO }, { SINGLE, SINGLE } };

enum { TRANSITIONS = sizeof transitions / sizeof transitions[0] };

static void check_next_save(xd_ctx *ctx, const char *directory, int kind) {
    CHECK_EQ_INT(save(ctx, directory, kind, 3), XD_OK);
    CHECK_EQ_INT(version_of(ctx, directory), 3);
    CHECK_EQ_INT(names_in(directory, false), files_of(kind));
}

/* A save in a process of its own, killed at its call n; whether it was. */
static bool killed_at(press *p, const char *directory, int kind, long n) {
    int status = 0;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        p->calls = 0;
        p->kills = true;
        p->at = n;
        _exit(save(p->ctx, directory, kind, 2) == XD_OK ? 0 : 1);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    return WIFSIGNALED(status);
}

XD_TEST(a_save_that_is_killed_at_any_call_leaves_the_older_model_or_the_new_one) {
    press p;
    press_start(&p);
    const char *directory = new_directory();
    for (int t = 0; t < TRANSITIONS; t++) {
        int seen[4] = { 0, 0, 0, 0 };
        long n = 0;
        for (bool killed = true; killed && n < 1000; n++) {
            CHECK_EQ_INT(save(p.ctx, directory, transitions[t][0], 1), XD_OK);
            killed = killed_at(&p, directory, transitions[t][1], n);
            const int version = version_of(p.ctx, directory);
            CHECK(version == 1 || version == 2);
            CHECK(killed || version == 2);
            if (version > 0) seen[version]++;
            check_next_save(p.ctx, directory, n % 2 ? transitions[t][0] : transitions[t][1]);
        }
        CHECK(n > 25 && seen[1] > 20 && seen[2] > 2);
    }
    end_directory(directory);
    xd_ctx_destroy(p.ctx);
}

XD_TEST(a_save_of_which_any_call_fails_leaves_the_older_model_or_the_new_one) {
    press p;
    press_start(&p);
    const char *directory = new_directory();
    for (int t = 0; t < TRANSITIONS; t++) {
        long n = 0, failed = 0;
        for (bool met = true; met && n < 1000; n++) {
            CHECK_EQ_INT(save(p.ctx, directory, transitions[t][0], 1), XD_OK);
            p.calls = 0;
            p.at = n;
            const xd_result result = save(p.ctx, directory, transitions[t][1], 2);
            met = p.calls > n;
            p.at = -1;
            const int version = version_of(p.ctx, directory);
            CHECK(version == (result == XD_OK ? 2 : 1) ||
                  (version == 2 && (p.failed == CALL_REMOVE || p.failed == CALL_SYNC_DIRECTORY)));
            if (result != XD_OK) failed++;
            if (p.failed == CALL_SYNC || p.failed == CALL_RENAME) CHECK_EQ_INT(version, met ? 1 : 2);
            if (result != XD_OK && version == 1 && p.failed != CALL_REMOVE) /* it has cleared up itself */
                CHECK_EQ_INT(names_in(directory, false), files_of(transitions[t][0]));
            p.failed = CALL_NONE;
            check_next_save(p.ctx, directory, n % 2 ? transitions[t][0] : transitions[t][1]);
        }
        CHECK(failed > 15);
    }
    end_directory(directory);
    xd_ctx_destroy(p.ctx);
}

XD_TEST(a_file_that_could_not_be_removed_is_named) {
    press p;
    press_start(&p);
    const char *directory = new_directory();
    bool named = false;
    for (long n = 0; n < 200 && !named; n++) {
        CHECK_EQ_INT(save(p.ctx, directory, TWO, 1), XD_OK);
        p.calls = 0;
        p.at = n;
        const xd_result result = save(p.ctx, directory, FOUR, 2);
        p.at = -1;
        named = result == XD_ERROR_IO && strstr(xd_last_error(p.ctx)->message, "of the older one stays") &&
                strstr(xd_last_error(p.ctx)->message, "model-00001-of-00002-save-");
        if (named) CHECK_EQ_INT(version_of(p.ctx, directory), 2);
    }
    CHECK(named);
    end_directory(directory);
    xd_ctx_destroy(p.ctx);
}

/* ---- at random ---- */

static uint32_t random_state = 12345;

static uint32_t random_below(uint32_t n) {
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % n;
}

/* Saves until it is killed; a version is at most 99. */
static void save_for_ever(press *p, const char *directory) {
    static const int kinds[] = { SINGLE, TWO, FOUR };
    for (int version = 1;; version = version % 99 + 1)
        if (save(p->ctx, directory, kinds[random_below(3)], version) != XD_OK) _exit(1);
}

/* What a reader has seen. */
typedef struct sight {
    int mixed, lost, changes, last;
} sight;

static void look(xd_ctx *ctx, const char *directory, sight *s) {
    const int version = version_of(ctx, directory);
    s->mixed += version == -2;
    s->lost += version == -1;
    s->changes += version != s->last;
    s->last = version;
}

/* Whether it runs: one that has ended stays to be waited for. */
static bool runs(pid_t child) {
    siginfo_t info;
    info.si_pid = 0;
    return waitid(P_PID, (id_t)child, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0;
}

static void end_child(pid_t child) {
    int status;
    kill(child, SIGKILL);
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
}

XD_TEST(readers_see_one_version_while_saves_are_killed_at_random) {
    const char *kills = getenv("XD_TEST_KILLS");
    const int count = kills ? atoi(kills) : 40;
    press p;
    press_start(&p);
    const char *directory = new_directory();
    sight seen = { 0, 0, 0, 100 };
    int left = 0;
    CHECK_EQ_INT(save(p.ctx, directory, FOUR, 100), XD_OK);
    for (int i = 0; i < count; i++) {
        const uint32_t reads = 1 + random_below(400);
        fflush(stdout);
        random_below(2);
        const pid_t child = fork();
        if (child == 0) save_for_ever(&p, directory);
        for (uint32_t r = 0; r < reads; r++) look(p.ctx, directory, &seen);
        /* A busy machine may not have begun the first save: every other child has time for it. */
        while (i % 2 && seen.last == 100 && runs(child)) look(p.ctx, directory, &seen);
        end_child(child);
        look(p.ctx, directory, &seen);
        const int kind = i % 3 == 0 ? SINGLE : i % 3 == 1 ? TWO : FOUR;
        CHECK_EQ_INT(save(p.ctx, directory, kind, 100), XD_OK);
        CHECK_EQ_INT(version_of(p.ctx, directory), 100);
        seen.last = 100;
        left += names_in(directory, false) != files_of(kind);
    }
    printf("%d kills, %d saves seen: %d mixed, %d lost, %d with leftovers\n", count, seen.changes, seen.mixed,
           seen.lost, left);
    CHECK(seen.changes >= count / 2);
    CHECK_EQ_INT(seen.mixed, 0);
    CHECK_EQ_INT(seen.lost, 0);
    CHECK_EQ_INT(left, 0);
    end_directory(directory);
    xd_ctx_destroy(p.ctx);
}

/* ---- directories ---- */

/* A directory of a model and one more file, as one. */
static xd_result save_student(xd_ctx *ctx, const char *path, int version) {
    xd_publish_directory *d = NULL;
    char name[400];
    const char byte = (char)version;
    xd_result result = xd_publish_directory_create(ctx, &(xd_publish_directory_desc){ path }, &d);
    if (result != XD_OK) return result;
    snprintf(name, sizeof name, "%s/config", xd_publish_directory_path(d));
    result = xd_file_save(ctx, name, &byte, 1);
    if (result == XD_OK) result = save(ctx, xd_publish_directory_path(d), TWO, version);
    if (result == XD_OK) return xd_publish_directory_commit(d);
    xd_publish_directory_abort(d);
    return result;
}

/* The version of all files of the directory, as version_of. */
static int student_of(xd_ctx *ctx, const char *path) {
    char name[400], *text = NULL;
    size_t bytes = 0;
    snprintf(name, sizeof name, "%s/config", path);
    if (xd_file_load(ctx, name, 0, &text, &bytes) != XD_OK) return -1;
    const int config = bytes == 1 ? text[0] : -1;
    xd_release(ctx, text);
    const int version = version_of(ctx, path);
    return version == config ? version : -2;
}

static void clear_student(press *p, const char *directory, const char *path) {
    p->at = -1;
    names_in(path, true);
    CHECK(rmdir(path) == 0);
    CHECK_EQ_INT(names_in(directory, false), 0);
}

/* As a process that is killed at its call n, or as one of which this call fails. */
static bool press_student(press *p, const char *path, long n, bool kills) {
    int status = 0;
    p->calls = 0;
    p->kills = kills;
    p->at = n;
    p->result = XD_OK;
    fflush(stdout);
    const pid_t child = kills ? fork() : -1;
    if (child == 0) _exit(save_student(p->ctx, path, 2) == XD_OK ? 0 : 1);
    if (kills) {
        CHECK(waitpid(child, &status, 0) == child && (WIFSIGNALED(status) || status == 0));
    } else {
        p->result = save_student(p->ctx, path, 2);
    }
    p->at = -1;
    return kills ? WIFSIGNALED(status) : p->calls > n;
}

XD_TEST(a_directory_is_the_older_one_or_the_new_one_whatever_call_is_the_last_or_fails) {
    press p;
    press_start(&p);
    char directory[40], path[60];
    strcpy(directory, new_directory());
    snprintf(path, sizeof path, "%s/student", directory);
    for (int way = 0; way < 4; way++) { /* killed or failing, with an exchange of names or without */
        int seen[4] = { 0, 0, 0, 0 };
        long n = 0;
        p.no_exchange = way >= 2;
        for (bool met = true; met && n < 1000; n++) {
            CHECK_EQ_INT(save_student(p.ctx, path, 1), XD_OK);
            met = press_student(&p, path, n, way % 2 == 0);
            const bool told = strstr(xd_last_error(p.ctx)->message, "the new directory is complete") != NULL;
            const int version = student_of(p.ctx, path);
            CHECK(version == 1 || version == 2);
            CHECK(met || version == 2);
            CHECK(p.result == XD_OK || told == (version == 2));
            if (version > 0) seen[version]++;
            CHECK_EQ_INT(save_student(p.ctx, path, 3), XD_OK);
            CHECK_EQ_INT(student_of(p.ctx, path), 3);
            CHECK_EQ_INT(names_in(path, false), 1 + files_of(TWO));
            clear_student(&p, directory, path);
        }
        CHECK(n > 60 && seen[1] > 40 && seen[2] > 3);
    }
    end_directory(directory);
    xd_ctx_destroy(p.ctx);
}

XD_TEST(one_writer_of_a_directory_at_a_time_and_nothing_else_is_replaced) {
    press p;
    press_start(&p);
    char directory[40], path[60], again[64];
    xd_publish_directory *d = NULL, *other = NULL;
    strcpy(directory, new_directory());
    snprintf(path, sizeof path, "%s/student", directory);
    snprintf(again, sizeof again, "%s/", path);
    CHECK_EQ_INT(xd_publish_directory_create(p.ctx, &(xd_publish_directory_desc){ path }, &d), XD_OK);
    CHECK_EQ_INT(xd_publish_directory_create(p.ctx, &(xd_publish_directory_desc){ again }, &other),
                 XD_ERROR_STATE);
    xd_publish_directory_abort(d);
    CHECK_EQ_INT(names_in(directory, false), 0);
    CHECK_EQ_INT(xd_file_save(p.ctx, path, "file", 4), XD_OK);
    CHECK_EQ_INT(xd_publish_directory_create(p.ctx, &(xd_publish_directory_desc){ path }, &d), XD_ERROR_IO);
    CHECK(strstr(xd_last_error(p.ctx)->message, path) != NULL);
    CHECK(remove(path) == 0 && symlink(directory, path) == 0);
    CHECK_EQ_INT(xd_publish_directory_create(p.ctx, &(xd_publish_directory_desc){ path }, &d), XD_ERROR_IO);
    CHECK_EQ_INT(names_in(directory, false), 1);
    CHECK_EQ_INT(xd_publish_directory_create(p.ctx, &(xd_publish_directory_desc){ "/" }, &d),
                 XD_ERROR_ARGUMENT);
    end_directory(directory);
    xd_ctx_destroy(p.ctx);
}

static void save_students_for_ever(press *p, const char *path) {
    for (int version = 1;; version = version % 99 + 1)
        if (save_student(p->ctx, path, version) != XD_OK) _exit(1);
}

XD_TEST(readers_see_one_model_while_directories_take_its_place) {
    press p;
    press_start(&p);
    char directory[40], path[60];
    sight seen = { 0, 0, 0, 1 };
    strcpy(directory, new_directory());
    snprintf(path, sizeof path, "%s/student", directory);
    CHECK_EQ_INT(save_student(p.ctx, path, 1), XD_OK);
    for (int i = 0; i < 10; i++) {
        fflush(stdout);
        p.no_exchange = i % 2 != 0;
        const pid_t child = fork();
        if (child == 0) save_students_for_ever(&p, path);
        for (int r = 0; r < 400; r++) look(p.ctx, path, &seen);
        end_child(child);
    }
    printf("%d directories seen: %d mixed, %d lost\n", seen.changes, seen.mixed, seen.lost);
    CHECK_EQ_INT(seen.mixed, 0);
    CHECK_EQ_INT(seen.lost, 0);
    CHECK_EQ_INT(save_student(p.ctx, path, 2), XD_OK);
    clear_student(&p, directory, path);
    end_directory(directory);
    xd_ctx_destroy(p.ctx);
}

/* ---- names and locks ---- */

static bool exists(const char *directory, const char *name) {
    char path[400];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return access(path, F_OK) == 0;
}

XD_TEST(each_save_of_shards_has_names_of_its_own_and_the_same_history_the_same_bytes) {
    press p;
    press_start(&p);
    char one[40];
    strcpy(one, new_directory());
    CHECK_EQ_INT(save(p.ctx, one, FOUR, 1), XD_OK);
    CHECK(exists(one, "model-00004-of-00004-save-1.safetensors"));
    CHECK_EQ_INT(save(p.ctx, one, FOUR, 1), XD_OK);
    CHECK(exists(one, "model-00004-of-00004-save-2.safetensors"));
    CHECK_EQ_INT(save(p.ctx, one, SINGLE, 1), XD_OK);
    CHECK_EQ_INT(save(p.ctx, one, SINGLE, 2), XD_OK);
    CHECK_EQ_INT(save(p.ctx, one, TWO, 3), XD_OK); /* a single file in between does not bring a name back */
    CHECK(exists(one, "model-00002-of-00002-save-3.safetensors"));
    const char *two = new_directory();
    static const int kinds[] = { TWO, FOUR, SINGLE, SINGLE };
    for (int i = 0; i < 4; i++) {
        CHECK_EQ_INT(save(p.ctx, two, kinds[i], i), XD_OK);
        if (i < 3) continue;
        char path[400], *first = NULL, *again = NULL;
        size_t bytes[2] = { 0, 0 };
        snprintf(path, sizeof path, "%s/model.safetensors", two);
        CHECK_EQ_INT(xd_file_load(p.ctx, path, 0, &first, &bytes[0]), XD_OK);
        CHECK_EQ_INT(save(p.ctx, two, SINGLE, i), XD_OK);
        CHECK_EQ_INT(xd_file_load(p.ctx, path, 0, &again, &bytes[1]), XD_OK);
        CHECK(bytes[0] == bytes[1] && memcmp(first, again, bytes[0]) == 0);
        xd_release(p.ctx, first);
        xd_release(p.ctx, again);
    }
    end_directory(one);
    end_directory(two);
    xd_ctx_destroy(p.ctx);
}

XD_TEST(one_save_at_a_time_and_a_living_writers_file_is_not_taken_for_a_dead_ones) {
    press p;
    press_start(&p);
    const char *directory = new_directory();
    xd_weights_writer *w = NULL;
    xd_weights_writer_desc desc;
    memset(&desc, 0, sizeof desc);
    CHECK_EQ_INT(weights_write_directory(p.ctx, directory, &desc, &w), XD_OK);
    CHECK_EQ_INT(save(p.ctx, directory, FOUR, 1), XD_ERROR_STATE);
    CHECK(strstr(xd_last_error(p.ctx)->message, "another writer") != NULL);
    fflush(stdout);
    const pid_t other = fork();
    if (other == 0) _exit(save(p.ctx, directory, SINGLE, 1) == XD_ERROR_STATE ? 0 : 1);
    int status = 1;
    CHECK(waitpid(other, &status, 0) == other && status == 0);
    xd_weights_writer_abort(w);
    CHECK_EQ_INT(save(p.ctx, directory, FOUR, 1), XD_OK);

    char path[400];
    xdi_publish *living = NULL;
    snprintf(path, sizeof path, "%s/file", directory);
    CHECK_EQ_INT(xdi_publish_create(p.ctx, path, &living), XD_OK);
    CHECK_EQ_INT(xdi_publish_write(living, "living", 6, 0), XD_OK);
    for (int i = 0; i < 3; i++) { /* of which two die */
        fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
            xdi_publish *dead = NULL;
            _exit(xdi_publish_create(p.ctx, path, &dead) == XD_OK ? 0 : 1);
        }
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    CHECK_EQ_INT(names_in(directory, false), files_of(FOUR) + 2);
    CHECK_EQ_INT(xd_file_save(p.ctx, path, "other", 5), XD_OK);
    CHECK_EQ_INT(names_in(directory, false), files_of(FOUR) + 2); /* the file and the living one's */
    CHECK_EQ_INT(xdi_publish_commit(living), XD_OK);
    char *text = NULL;
    size_t bytes = 0;
    CHECK_EQ_INT(xd_file_load(p.ctx, path, 0, &text, &bytes), XD_OK);
    CHECK(bytes == 6 && memcmp(text, "living", 6) == 0);
    xd_release(p.ctx, text);
    CHECK_EQ_INT(names_in(directory, false), files_of(FOUR) + 1);
    end_directory(directory);
    xd_ctx_destroy(p.ctx);
}

XD_TEST(where_there_are_no_locks_temporaries_stay_with_one_warning) {
    press p;
    press_start(&p);
    const char *directory = new_directory();
    char path[400];
    p.no_locks = true;
    snprintf(path, sizeof path, "%s/file.tmp-0", directory);
    CHECK_EQ_INT(xd_file_save(p.ctx, path, "dead", 4), XD_OK);
    CHECK_EQ_INT(p.warnings, 0);
    snprintf(path, sizeof path, "%s/file", directory);
    for (int i = 0; i < 3; i++) CHECK_EQ_INT(xd_file_save(p.ctx, path, "living", 6), XD_OK);
    CHECK_EQ_INT(p.warnings, 1);
    CHECK(strstr(p.last_warning, "file.tmp-0: no locks here") != NULL);
    CHECK_EQ_INT(names_in(directory, false), 2);
    end_directory(directory);
    xd_ctx_destroy(p.ctx);
}

XD_TEST_MAIN()
