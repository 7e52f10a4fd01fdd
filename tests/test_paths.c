/* What lies under a path and is no regular file: every opener and writer says so at once, names it and leaves it there. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp, kill, symlink */
#endif

#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "base/publish_internal.h"
#endif
#include "makers.h"
#include "xd_private.h"
#include "tokenizer_make.h"
#include "weights_calls.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* ---- the calls ---- */

/* One call on a scene's file; the objects that it makes are freed again. */
typedef struct scene {
    xd_ctx *ctx;
    xd_tokenizer *tokenizer; /* for calls that need one */
    char directory[40];
    char path[240];
} scene;

static xd_result load_file(const scene *s) {
    char *data = NULL;
    size_t bytes = 0;
    const xd_result result = xd_file_load(s->ctx, s->path, 0, &data, &bytes);
    xd_release(s->ctx, data);
    return result;
}

static xd_result load_json(const scene *s) {
    xd_json *root = NULL;
    const xd_result result = xd_json_load(s->ctx, NULL, s->path, &root);
    xd_json_destroy(s->ctx, root);
    return result;
}

static xd_result load_tokenizer(const scene *s) {
    xd_tokenizer *tokenizer = NULL;
    const xd_result result = tokenizer_load(s->ctx, s->path, NULL, &tokenizer);
    xd_tokenizer_destroy(tokenizer);
    return result;
}

static xd_result load_projection(const scene *s) {
    xd_projection projection;
    memset(&projection, 0, sizeof projection);
    const xd_result result = projection_load(s->ctx, s->path, NULL, &projection);
    if (result == XD_OK) xd_projection_destroy(s->ctx, &projection);
    return result;
}

static xd_result open_cache(const scene *s) {
    xd_teacher_cache *cache = NULL;
    const xd_result result = cache_open(s->ctx, s->path, NULL, &cache);
    xd_teacher_cache_close(cache);
    return result;
}

static xd_result open_tensors_by(const scene *s, xd_weights_mode mode) {
    xd_weights *opened = NULL;
    xd_weights_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.mode = mode;
    const xd_result result = weights_open_file(s->ctx, s->path, &desc, &opened);
    xd_weights_close(opened);
    return result;
}

static xd_result open_tensors(const scene *s) {
    return open_tensors_by(s, XD_WEIGHTS_MAP);
}

static xd_result stream_tensors(const scene *s) {
    return open_tensors_by(s, XD_WEIGHTS_STREAM);
}

static xd_result open_weights(const scene *s) {
    xd_weights *model = NULL;
    const xd_result result = weights_open_directory(s->ctx, s->directory, NULL, &model);
    xd_weights_close(model);
    return result;
}

static xd_result read_weights(const scene *s) {
    xd_weights *model = NULL;
    const xd_result result = weights_open_directory(s->ctx, s->directory, NULL, &model);
    xd_weights_close(model);
    return result;
}

static xd_result open_checkpoint(const scene *s) {
    xd_checkpoint *checkpoint = NULL;
    const xd_result result =
        xd_checkpoint_open(s->ctx, &(xd_checkpoint_desc){ .directory = s->directory }, &checkpoint);
    xd_checkpoint_close(checkpoint);
    return result;
}

static xd_result verify_checkpoint(const scene *s) {
    return xd_checkpoint_verify(s->ctx, s->directory);
}

static xd_result cache_projection(const scene *s) {
    const xd_projection_desc desc = { s->tokenizer, s->tokenizer, NULL, NULL };
    xd_projection projection;
    memset(&projection, 0, sizeof projection);
    const xd_result result = projection_cached(s->ctx, s->directory, &desc, &projection, NULL);
    if (result == XD_OK) xd_projection_destroy(s->ctx, &projection);
    return result;
}

static xd_result save_file(const scene *s) {
    return xd_file_save(s->ctx, s->path, "text", 4);
}

static xd_result publish(const scene *s) {
    xdi_publish *started = NULL;
    const xd_result result = xdi_publish_create(s->ctx, s->path, &started);
    return result == XD_OK ? xdi_publish_commit(started) : result;
}

static xd_result save_tensors(const scene *s) {
    xd_weights_writer *w = NULL;
    xd_weights_writer_desc desc;
    memset(&desc, 0, sizeof desc);
    const xd_result result = weights_write_file(s->ctx, s->path, &desc, &w);
    return result == XD_OK ? xd_weights_writer_commit(w) : result;
}

static xd_result save_weights(const scene *s) {
    xd_weights_writer *w = NULL;
    xd_weights_writer_desc desc;
    memset(&desc, 0, sizeof desc);
    const xd_result result = weights_write_directory(s->ctx, s->directory, &desc, &w);
    return result == XD_OK ? xd_weights_writer_commit(w) : result;
}

static xd_result gather_weights(const scene *s) {
    xd_comm *self = NULL;
    xd_weights_gather_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.directory = s->directory;
    CHECK_EQ_INT(xd_comm_self(s->ctx, &self), XD_OK);
    const xd_result result = xd_weights_gather(self, &desc);
    xd_comm_destroy(self);
    return result;
}

static xd_result save_projection(const scene *s) {
    const xdi_vote cell = { 0, 1, 1.0 };
    const xdi_projection_cells list = { &cell, 1, 2, 3 };
    xd_projection projection;
    CHECK_EQ_INT(xdi_projection_from_cells(s->ctx, &list, &projection), XD_OK);
    projection.origin.options = xd_projection_defaults();
    const xd_result result = xd_projection_save(s->ctx, s->path, &projection);
    xd_projection_destroy(s->ctx, &projection);
    return result;
}

static xd_result save_cache(const scene *s) {
    xd_teacher_cache_writer *w = NULL;
    xd_teacher_cache_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.vocabulary = 8;
    desc.temperature = 1.0;
    desc.k = 2;
    const xd_result result = cache_writer_create(s->ctx, s->path, &desc, &w);
    xd_teacher_cache_writer_abort(w);
    return result;
}

static xd_result publish_directory(const scene *s) {
    xd_publish_directory *made = NULL;
    const xd_result result =
        xd_publish_directory_create(s->ctx, &(xd_publish_directory_desc){ s->path }, &made);
    return result == XD_OK ? xd_publish_directory_commit(made) : result;
}

typedef struct path_call {
    const char *function;
    xd_result (*run)(const scene *s);
    const char *name; /* of the file in the directory: one of its own for calls that take the directory */
    bool reads, writes;
} path_call;

static const path_call calls[] = {
    { "xd_file_load", load_file, "file", true, false },
    { "xd_json_load", load_json, "file.json", true, false },
    { "xd_tokenizer_load", load_tokenizer, "tokenizer.json", true, false },
    { "xd_projection_load", load_projection, "file", true, false },
    { "xd_teacher_cache_open", open_cache, "file", true, false },
    { "xd_weights_open", open_tensors, "file", true, false },
    { "xd_weights_open", stream_tensors, "file", true, false },
    { "xd_weights_open", open_weights, "model.safetensors", true, false },
    { "xd_weights_open", read_weights, "model.safetensors", true, false },
    { "xd_weights_open", open_weights, "model.safetensors.index.json", true, false },
    { "xd_checkpoint_open", open_checkpoint, "manifest.json", true, false },
    { "xd_checkpoint_verify", verify_checkpoint, "manifest.json", true, false },
    { "xd_projection_build", cache_projection, NULL, false, true },
    { "xd_file_save", save_file, "file", false, true },
    { "xdi_publish_create", publish, "file", false, true },
    { "xd_weights_writer_create", save_tensors, "file", false, true },
    { "xd_weights_writer_create", save_weights, "model.safetensors", false, true },
    { "xd_weights_writer_create", save_weights, "model.safetensors.index.json", false, true },
    { "xd_weights_gather", gather_weights, "model.safetensors", false, true },
    { "xd_projection_save", save_projection, "file", false, true },
    { "xd_teacher_cache_writer_create", save_cache, "file", false, true },
};

enum { CALLS = sizeof calls / sizeof calls[0] };

/* The one that may take the place of a directory. */
static const path_call directory_call = { "xd_publish_directory_create", publish_directory, "directory",
                                          false, true };

/* ---- what lies there ---- */

typedef enum thing { A_FIFO, A_DIRECTORY, A_DEVICE, A_SOCKET, A_LINK, GARBAGE, THINGS } thing;

static const char *const thing_names[THINGS] = { "FIFO", "directory", "device", "socket", "link", "garbage" };

/* A device is reached by a link, since making one takes rights; openers follow it. */
static void put_thing(const scene *s, thing what) {
    struct sockaddr_un address;
    switch (what) {
    case A_FIFO: CHECK(mkfifo(s->path, 0600) == 0); return;
    case A_DIRECTORY: CHECK(mkdir(s->path, 0700) == 0); return;
    case A_DEVICE: CHECK(symlink("/dev/zero", s->path) == 0); return;
    case A_LINK: CHECK(symlink("target", s->path) == 0); return;
    default: break;
    }
    if (what == A_SOCKET) {
        const int bound = socket(AF_UNIX, SOCK_STREAM, 0);
        memset(&address, 0, sizeof address);
        address.sun_family = AF_UNIX;
        snprintf(address.sun_path, sizeof address.sun_path, "%.100s", s->path);
        CHECK(bound >= 0 && bind(bound, (struct sockaddr *)&address, sizeof address) == 0);
        close(bound);
    } else {
        FILE *garbage = fopen(s->path, "wb");
        CHECK(garbage &&
              fputs("{ \"weight_map\": [ this is neither JSON nor anything else ....................."
                    "....................................................................... ",
                    garbage) >= 0);
        if (garbage) fclose(garbage);
    }
}

/* The whole path of the call's file. */
static void name_file(scene *s, const path_call *call) {
    char name[XD_PROJECTION_NAME_BYTES] = "file";
    xd_projection_origin origin;
    const xd_projection_desc desc = { s->tokenizer, s->tokenizer, NULL, NULL };
    xd_projection projection;
    if (call->name) {
        snprintf(s->path, sizeof s->path, "%s/%s", s->directory, call->name);
        return;
    }
    CHECK_EQ_INT(xd_projection_build(s->ctx, &desc, &projection, NULL), XD_OK);
    origin = projection.origin;
    xd_projection_cache_name(&origin, name);
    xd_projection_destroy(s->ctx, &projection);
    snprintf(s->path, sizeof s->path, "%s/%s", s->directory, name);
}

static void check_call(scene *s, const path_call *call, thing what) {
    struct stat before, after;
    char message[400];
    strcpy(s->directory, "/tmp/xdistill-test-XXXXXX");
    CHECK(mkdtemp(s->directory) != NULL);
    name_file(s, call);
    put_thing(s, what);
    CHECK(lstat(s->path, &before) == 0);
    const xd_result result = call->run(s);
    snprintf(message, sizeof message, "%.120s on a %s: %.240s", call->function, thing_names[what],
             xd_last_error(s->ctx)->message);
    if (what == GARBAGE ? result == XD_OK : result != XD_ERROR_IO) CHECK_EQ_STR(message, "an error");
    if (!strstr(xd_last_error(s->ctx)->message, s->path)) CHECK_EQ_STR(message, s->path);
    CHECK(lstat(s->path, &after) == 0 && after.st_ino == before.st_ino && after.st_mode == before.st_mode);
    CHECK(remove(s->path) == 0);
    CHECK(rmdir(s->directory) == 0); /* nothing else was left there */
}

XD_TEST(no_call_opens_or_replaces_what_is_no_regular_file) {
    scene s;
    memset(&s, 0, sizeof s);
    fixture f = load(byte_level("null", ""));
    alarm(60); /* a call that waits for the other end of a FIFO waits for ever */
    s.ctx = f.ctx;
    s.tokenizer = f.tokenizer;
    for (int i = 0; i < CALLS; i++)
        for (int what = 0; what < GARBAGE; what++)
            if (what != A_LINK || calls[i].writes) check_call(&s, &calls[i], (thing)what);
    alarm(0);
    unload(&f);
}

XD_TEST(messages_name_the_file_whose_bytes_are_wrong) {
    scene s;
    memset(&s, 0, sizeof s);
    fixture f = load(byte_level("null", ""));
    s.ctx = f.ctx;
    s.tokenizer = f.tokenizer;
    for (int i = 0; i < CALLS; i++)
        if (calls[i].reads && calls[i].run != load_file) check_call(&s, &calls[i], GARBAGE);
    unload(&f);
}

XD_TEST(a_directory_that_is_none_is_an_error_at_once) {
    scene s;
    memset(&s, 0, sizeof s);
    s.ctx = new_ctx();
    alarm(60);
    for (int i = 0; i < CALLS; i++) {
        if (calls[i].run != open_weights && calls[i].run != read_weights && calls[i].run != save_weights &&
            calls[i].run != gather_weights)
            continue;
        strcpy(s.directory, "/tmp/xdistill-test-XXXXXX");
        CHECK(mkdtemp(s.directory) != NULL && rmdir(s.directory) == 0 && mkfifo(s.directory, 0600) == 0);
        CHECK_EQ_INT(calls[i].run(&s), XD_ERROR_IO);
        CHECK(strstr(xd_last_error(s.ctx)->message, s.directory) != NULL);
        CHECK(remove(s.directory) == 0);
        CHECK_EQ_INT(calls[i].run(&s), XD_ERROR_IO); /* and one that is missing */
        if (!strstr(xd_last_error(s.ctx)->message, "No such file or directory"))
            CHECK_EQ_STR(xd_last_error(s.ctx)->message, "No such file or directory");
    }
    alarm(0);
    xd_ctx_destroy(s.ctx);
}

XD_TEST(a_directory_takes_the_place_of_a_directory_only) {
    scene s;
    memset(&s, 0, sizeof s);
    s.ctx = new_ctx();
    alarm(60);
    for (int what = 0; what < GARBAGE; what++)
        if (what != A_DIRECTORY) check_call(&s, &directory_call, (thing)what);
    alarm(0);
    xd_ctx_destroy(s.ctx);
}

/* A call of the interface that takes a path and has no row above. */
XD_TEST(the_table_has_every_call_that_takes_a_path) {
    char line[1000], name[80];
    FILE *api = fopen("docs/api.txt", "r");
    if (!api) SKIP("docs/api.txt is not there");
    while (fgets(line, sizeof line, api)) {
        if (strncmp(line, "function ", 9) != 0) continue;
        if (!strstr(line, "const char *path,") && !strstr(line, "const char *directory,")) continue;
        const char *open = strchr(line, '('), *begin = open;
        while (begin && begin > line && begin[-1] != ' ' && begin[-1] != '*') begin--;
        snprintf(name, sizeof name, "%.*s", (int)(open - begin), begin);
        bool found = strcmp(directory_call.function, name) == 0;
        for (int i = 0; i < CALLS; i++) found = found || strcmp(calls[i].function, name) == 0;
        if (!found) CHECK_EQ_STR(name, "a row of the table");
    }
    fclose(api);
}

XD_TEST_MAIN()
