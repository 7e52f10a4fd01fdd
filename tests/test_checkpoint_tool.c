/* tools/xdistill.c: what it prints and how it ends. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp */
#endif

#include "checkpoint_files.h"
#include "checkpoint_scene.h"

#include <fcntl.h>

int tool_main(int argc, char **argv);

#define main tool_main
#include "../tools/xdistill.c"
#undef main

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
    CHECK(strncmp(printed, "usage: xdistill inspect DIR", 27) == 0);
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

XD_TEST_MAIN()
