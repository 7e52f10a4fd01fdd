/* The commands of tools/xdistill that look into checkpoints: what they print and how they end. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp */
#endif

#include "checkpoint_files.h"
#include "checkpoint_scene.h"

#include <fcntl.h>

int tool_main(int argc, char **argv);

#define main tool_main
#include "../tools/xdistill/main.c"
#undef main
#include "../tools/xdistill/checkpoints.c"

/* Commands that run models have tests of their own, and are not linked here. */
int command_distil(xd_ctx *ctx, int count, char **words) {
    (void)ctx, (void)count, (void)words;
    return COMMAND_BROKEN;
}

int command_compare(xd_ctx *ctx, int count, char **words) {
    return command_distil(ctx, count, words);
}

int command_eval(xd_ctx *ctx, int count, char **words) {
    return command_distil(ctx, count, words);
}

int command_generate(xd_ctx *ctx, int count, char **words) {
    return command_distil(ctx, count, words);
}

int command_tokenize(xd_ctx *ctx, int count, char **words) {
    return command_distil(ctx, count, words);
}

int command_pair(xd_ctx *ctx, int count, char **words) {
    return command_distil(ctx, count, words);
}

int command_cache(xd_ctx *ctx, int count, char **words) {
    return command_distil(ctx, count, words);
}

int command_bench(xd_ctx *ctx, int count, char **words) {
    return command_distil(ctx, count, words);
}

static char printed[20000]; /* by the last call */

/* Runs the tool and keeps what it prints, errors too. */
static int tool(const char *word, const char *one, const char *other) {
    char file[] = "/tmp/xdistill-tool-XXXXXX", *argv[5];
    const int handle = mkstemp(file), old = dup(1), errors = dup(2);
    argv[0] = (char *)"xdistill";
    argv[1] = (char *)word;
    argv[2] = (char *)one;
    argv[3] = (char *)other;
    argv[4] = NULL;
    fflush(stdout);
    CHECK(handle >= 0 && old >= 0 && errors >= 0 && dup2(handle, 1) == 1 && dup2(handle, 2) == 2);
    const int status = tool_main(other ? 4 : one ? 3 : word ? 2 : 1, argv);
    fflush(stdout);
    CHECK(dup2(old, 1) == 1 && dup2(errors, 2) == 2);
    const ssize_t bytes = pread(handle, printed, sizeof printed - 1, 0);
    printed[bytes > 0 ? bytes : 0] = '\0';
    close(handle);
    close(old);
    close(errors);
    CHECK(remove(file) == 0);
    return status;
}

/* The status of an inspection whose list finds no room on its disk; 2 where the system has no file that is always full. */
static int inspect_into_full(const char *directory) {
    char *argv[] = { (char *)"xdistill", (char *)"inspect", (char *)directory, NULL };
    const int handle = open("/dev/full", O_WRONLY), old = dup(1);
    if (handle < 0) return close(old) == 0 ? 2 : -1;
    fflush(stdout);
    CHECK(old >= 0 && dup2(handle, 1) == 1);
    const int status = tool_main(3, argv);
    clearerr(stdout);
    CHECK(dup2(old, 1) == 1);
    close(handle);
    close(old);
    return status;
}

XD_TEST(the_tool_inspects_verifies_and_compares_checkpoints) {
    const xd_ctx_desc plain = scene_ctx_desc();
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    scene *s = (scene *)malloc(sizeof *s);
    xd_checkpoint_save_desc desc;
    const char *root = new_root();
    const char *one = path_in(root, "step-1"), *two = path_in(root, "step-2"),
               *three = path_in(root, "step-3");
    CHECK_EQ_INT(xd_ctx_create(&plain, &ctx), XD_OK);
    CHECK_EQ_INT(xd_comm_self(ctx, &self), XD_OK);
    scene_create(s, ctx, 0, 1, 0);
    memset(&desc, 0, sizeof desc);
    desc.root = root;
    desc.networks = &s->network;
    desc.network_count = 1;
    for (desc.step = 1; desc.step <= 3; desc.step++) {
        if (desc.step == 3) ((float *)s->value[2])[4] = 17.0f;
        if (desc.step == 3) s->network.average_count = 1;
        CHECK_EQ_INT(xd_checkpoint_save(self, &desc), XD_OK);
    }
    CHECK_EQ_INT(tool("verify", one, NULL), 0);
    CHECK_EQ_STR(printed, "");
    CHECK_EQ_INT(tool("inspect", one, NULL), 0);
    CHECK(strstr(printed, "step 1, 5 files, 47 tensors\n") != NULL);
    CHECK(strstr(printed, " optim.safetensors\n") != NULL);
    CHECK(strstr(printed, "  model    embed.weight F32 [13,8] ") != NULL);
    CHECK(strstr(printed, "  optim    optim.step.scale I64 [] ") != NULL);
    CHECK_EQ_INT(inspect_into_full(one), 2);
    CHECK_EQ_INT(tool("diff", one, two), 0); /* of another step, with the same tensors */
    CHECK_EQ_STR(printed, "");
    CHECK_EQ_INT(tool("diff", one, three), 1);
    CHECK(strstr(printed, "  model    layer.0.bias F32 [7] ") != NULL);
    CHECK(strstr(printed, "only the first has:\n  ema-fast_2 ") != NULL);
    CHECK(strstr(printed, "10 tensors differ\n") != NULL);
    CHECK_EQ_INT(tool("diff", three, one), 1);
    CHECK(strstr(printed, "only the second has:\n  ema-fast_2 ") != NULL);
    CHECK_EQ_INT(truncate(path_in(one, "optim.safetensors"), 5000), 0);
    CHECK_EQ_INT(tool("verify", one, NULL), 2);
    CHECK_EQ_INT(tool("inspect", root, NULL), 2);
    CHECK(strstr(printed, "/manifest.json: open: No such file or directory\n") != NULL);
    CHECK(strstr(printed, " is the root of checkpoints: name one, such as /") != NULL);
    CHECK(strstr(printed, "/step-3\n") != NULL);
    CHECK_EQ_INT(tool("diff", two, root), 2);
    CHECK(strstr(printed, " is the root of checkpoints") != NULL);
    CHECK_EQ_INT(tool("compare", one, two), 2);
    CHECK_EQ_INT(tool(NULL, NULL, NULL), 2);
    CHECK_EQ_INT(tool("--help", NULL, NULL), 0);
    CHECK(strncmp(printed, "usage: xdistill COMMAND", 23) == 0);
    CHECK_EQ_INT(tool("verify", "--help", NULL), 0);
    CHECK(strncmp(printed, "usage: xdistill verify DIR", 26) == 0);
    CHECK_EQ_INT(tool("diff", one, NULL), 2);
    CHECK(strncmp(printed, "usage: xdistill diff DIR DIR", 28) == 0);
    remove_all(root);
    scene_destroy(s);
    free(s);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_tool_converts_and_says_what_it_cannot) {
    const char *root = new_root();
    CHECK_EQ_INT(tool("convert", root, path_in(root, "new")), 2);
    CHECK_EQ_INT(tool("convert", root, NULL), 2);
    CHECK_EQ_INT(tool("convert", "--tensors-only", root), 2);
    CHECK(access(path_in(root, "new"), F_OK) != 0);
    remove_all(root);
}

/* A checkpoint of step 1 in root, which is made. */
static void save_one(const char *root) {
    const xd_ctx_desc plain = scene_ctx_desc();
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    scene *s = (scene *)malloc(sizeof *s);
    xd_checkpoint_save_desc desc;
    CHECK_EQ_INT(xd_ctx_create(&plain, &ctx), XD_OK);
    CHECK_EQ_INT(xd_comm_self(ctx, &self), XD_OK);
    scene_create(s, ctx, 0, 1, 0);
    memset(&desc, 0, sizeof desc);
    desc.root = root;
    desc.step = 1;
    desc.networks = &s->network;
    desc.network_count = 1;
    CHECK_EQ_INT(xd_checkpoint_save(self, &desc), XD_OK);
    scene_destroy(s);
    free(s);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

/* A safetensors file of this header and these bytes. */
static void write_tensors(const char *path, const char *header, const char *data, size_t bytes) {
    char file[1000] = { 0 };
    const size_t length = strlen(header);
    CHECK(8 + length + bytes < sizeof file);
    file[0] = (char)(length & 255);
    file[1] = (char)(length >> 8);
    memcpy(file + 8, header, length);
    memcpy(file + 8 + length, data, bytes);
    write_file(path, file, 8 + length + bytes);
}

#define PLAIN "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}"
#define HOSTILE "\"b\\u001b[2J\":{\"dtype\":\"F8_E8M0\",\"shape\":[3],\"data_offsets\":"

/* A Hugging Face directory of one file. */
static void write_single(const char *directory, const char *data) {
    CHECK_EQ_INT(mkdir(directory, 0777), 0);
    write_tensors(path_in(directory, "model.safetensors"), "{" PLAIN "," HOSTILE "[8,11]}}", data, 11);
}

/* The same tensors in two shards, one of which has a name that a terminal would obey. */
static void write_shards(const char *directory, const char *data) {
    static const char index[] =
        "{\"metadata\":{},\"weight_map\":{\"a\":\"x\\u001b.safetensors\",\"b\\u001b[2J\":\"y.safetensors\"}}";
    CHECK_EQ_INT(mkdir(directory, 0777), 0);
    write_tensors(path_in(directory, "x\033.safetensors"), "{" PLAIN "}", data, 8);
    write_tensors(path_in(directory, "y.safetensors"), "{" HOSTILE "[0,3]}}", data + 8, 3);
    write_file(path_in(directory, "model.safetensors.index.json"), index, strlen(index));
}

/* Before, both calls wanted a manifest.json: "open: No such file or directory". */
XD_TEST(the_tool_inspects_and_compares_hugging_face_directories) {
    char root[64], single[100], shards[100], third[100];
    strcpy(root, new_root());
    strcpy(single, path_in(root, "single"));
    strcpy(shards, path_in(root, "shards"));
    strcpy(third, path_in(root, "third"));
    write_single(single, "abcdefghijk");
    write_shards(shards, "abcdefghijk");
    write_shards(third, "abcdefghijX");
    CHECK_EQ_INT(tool("inspect", single, NULL), 0);
    CHECK(strncmp(printed, "a Hugging Face directory, 1 files, 2 tensors\n", 45) == 0);
    CHECK(strstr(printed, " -        model.safetensors\n") != NULL);
    CHECK(strstr(printed, "\n  model    a F32 [2] -\n  model    b\\x1b[2J F8_E8M0 [3] -\n") != NULL);
    CHECK(strchr(printed, 27) == NULL);
    CHECK_EQ_INT(tool("inspect", shards, NULL), 0);
    CHECK(strncmp(printed, "a Hugging Face directory, 2 files, 2 tensors\n", 45) == 0);
    CHECK(strstr(printed, " -        x\\x1b.safetensors\n") != NULL && strchr(printed, 27) == NULL);
    CHECK_EQ_INT(tool("diff", single, shards), 0);
    CHECK_EQ_STR(printed, "");
    CHECK_EQ_INT(tool("diff", single, third), 1); /* in a tensor that nothing here computes with */
    CHECK_EQ_STR(printed, "  model    b\\x1b[2J F8_E8M0 [3] -\n  model    b\\x1b[2J F8_E8M0 [3] -\n"
                          "    first difference: byte 2 of the tensor\n1 tensors differ\n");
    CHECK_EQ_INT(remove(path_in(third, "y.safetensors")), 0);
    CHECK_EQ_INT(tool("diff", single, third), 2);
    CHECK(strstr(printed, "y.safetensors: open: No such file or directory\n") != NULL);
    write_tensors(path_in(third, "model.safetensors"), "{" PLAIN "}", "abcdefgh", 8);
    CHECK_EQ_INT(tool("diff", single, third), 1); /* the file goes before the index */
    CHECK(strncmp(printed, "only the first has:\n  model    b", 32) == 0);
    CHECK_EQ_INT(tool("diff", third, single), 1);
    CHECK(strncmp(printed, "only the second has:\n  model    b", 33) == 0);
    remove_all(root);
}

XD_TEST(the_tool_compares_a_checkpoint_with_a_hugging_face_directory) {
    char root[64], one[100], copy[100], file[150];
    xd_ctx *ctx = NULL;
    char *bytes = NULL;
    size_t count = 0;
    strcpy(root, new_root());
    strcpy(one, path_in(root, "step-1"));
    strcpy(copy, path_in(root, "copy"));
    save_one(root);
    CHECK_EQ_INT(mkdir(copy, 0777), 0);
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_file_load(ctx, path_in(one, "model.safetensors"), 0, &bytes, &count), XD_OK);
    snprintf(file, sizeof file, "%s/model.safetensors", copy);
    write_file(file, bytes, count);
    CHECK_EQ_INT(tool("diff", one, copy), 0); /* the optimizer and the averages are left out */
    CHECK_EQ_STR(printed, "");
    CHECK_EQ_INT(tool("diff", copy, one), 0);
    bytes[count - 1] = (char)(bytes[count - 1] ^ 1);
    write_file(file, bytes, count);
    CHECK_EQ_INT(tool("diff", copy, one), 1);
    CHECK(strstr(printed, "    first difference: byte ") != NULL &&
          strstr(printed, "\n1 tensors differ\n") != NULL);
    xd_release(ctx, bytes);
    xd_ctx_destroy(ctx);
    remove_all(root);
}

/* Before, `verify` said nothing of any of these files. */
XD_TEST(the_tool_names_files_that_the_manifest_does_not_know) {
    char root[64], one[100];
    strcpy(root, new_root());
    strcpy(one, path_in(root, "step-1"));
    save_one(root);
    CHECK_EQ_INT(tool("verify", one, NULL), 0);
    CHECK_EQ_STR(printed, "");
    write_file(path_in(one, "notes.txt"), "x", 1);
    write_file(path_in(one, "e\033c.tmp-"), "x", 1); /* no number: a name like others */
    CHECK_EQ_INT(tool("verify", one, NULL), 0);
    CHECK_EQ_STR(printed, "e\\x1bc.tmp-: not in the manifest\nnotes.txt: not in the manifest\n");
    write_file(path_in(one, "model.safetensors.tmp-0"), "x", 1);
    CHECK_EQ_INT(tool("verify", one, NULL), 2);
    CHECK(strstr(printed, "model.safetensors.tmp-0: half-written, left by a save that was cut off\n") !=
          NULL);
    CHECK(strstr(printed, "notes.txt: not in the manifest\n") != NULL);
    CHECK_EQ_INT(remove(path_in(one, "model.safetensors.tmp-0")), 0);
    CHECK_EQ_INT(tool("verify", one, NULL), 0);
    remove_all(root);
}

/* Before, the hint wrote the path as it is, and names of pickles lost what is not ASCII. */
XD_TEST(the_tool_shows_paths_and_names_as_escapes) {
    char root[64], hostile[100];
    strcpy(root, new_root());
    strcpy(hostile, path_in(root, "r\033[2J"));
    save_one(hostile);
    CHECK_EQ_INT(tool("inspect", hostile, NULL), 2);
    CHECK(strstr(printed, "/r\\x1b[2J is the root of checkpoints: name one, such as /") != NULL);
    CHECK(strstr(printed, "/r\\x1b[2J/step-1\n") != NULL && strchr(printed, 27) == NULL);
    CHECK_EQ_INT(tool("inspect", path_in(hostile, "step-1"), NULL), 0);
    CHECK_EQ_STR(pickle_show("caf\xc3\xa9\033\0x", 8), "caf\xc3\xa9\\x1b?x");
    remove_all(root);
}

XD_TEST(the_help_of_the_tool_fits_a_terminal) {
    CHECK_EQ_INT(tool("--help", NULL, NULL), 0);
    for (const char *line = printed; *line; line += strcspn(line, "\n") + 1) CHECK(strcspn(line, "\n") <= 80);
    CHECK(strstr(printed, "a Hugging Face directory") && strstr(printed, "half-written (NAME.tmp-N)"));
}

XD_TEST_MAIN()
