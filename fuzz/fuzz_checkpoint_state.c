/* Any bytes are the state.json of a checkpoint, whose manifest knows them: the load takes it, or refuses it in words and changes
 * nothing. One checkpoint of a weight with an optimizer and an average is written first, in a folder of this process. */
#if !defined(_DEFAULT_SOURCE)
#    define _DEFAULT_SOURCE /* mkdtemp */
#endif
#include "fuzz.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WEIGHTS = 4, TEXT = 1 << 14, STEP = 3 };

/* A network of one weight, and the checkpoint. */
typedef struct scene {
    xd_comm *comm;
    float values[WEIGHTS], gradient[WEIGHTS];
    xd_param param;
    xd_tensor_part part;
    xd_optimizer *optimizer;
    xd_ema *ema;
    xd_checkpoint_average average;
    xd_checkpoint_network network;
    char root[128], folder[192], path[256];
    char manifest[TEXT], changed[2 * TEXT];
} scene;

static void write_file(scene *s, const char *name, const void *data, size_t bytes) {
    snprintf(s->path, sizeof s->path, "%s/%s", s->folder, name);
    FILE *file = fopen(s->path, "wb");
    FUZZ_CHECK(file && fwrite(data, 1, bytes, file) == bytes);
    FUZZ_CHECK(fclose(file) == 0);
}

static void make_network(scene *s) {
    for (int i = 0; i < WEIGHTS; i++) s->values[i] = s->gradient[i] = (float)(i + 1);
    s->param.name = s->part.name = "w";
    s->param.dtype = s->part.dtype = XD_DTYPE_F32;
    s->param.value = s->part.data = s->values;
    s->param.gradient = s->gradient;
    s->param.count = s->part.shape[0] = s->part.range.end = WEIGHTS;
    s->part.ndim = 1;
    const xd_optimizer_desc adamw = xd_adamw_defaults(&s->param, 1);
    FUZZ_CHECK(xd_optimizer_create(fuzz_ctx(), &adamw, &s->optimizer) == XD_OK);
    const xd_ema_desc average = { .params = &s->param, .param_count = 1 };
    FUZZ_CHECK(xd_ema_create(fuzz_ctx(), &average, &s->ema) == XD_OK);
    FUZZ_CHECK(xd_optimizer_step(s->optimizer, NULL, NULL) == XD_OK);
    FUZZ_CHECK(xd_ema_update(s->ema, 1, NULL) == XD_OK);
    s->average.name = "slow";
    s->average.ema = s->ema;
    s->network.parts = &s->part;
    s->network.part_count = 1;
    s->network.optimizer = s->optimizer;
    s->network.averages = &s->average;
    s->network.average_count = 1;
}

static scene *the_scene(void) {
    static scene s;
    return &s;
}

static void remove_folder(void) {
    static const char *const names[] = { "step-3/ema-slow.safetensors",
                                         "step-3/manifest.json",
                                         "step-3/model.safetensors",
                                         "step-3/optim.safetensors",
                                         "step-3/state.json",
                                         "step-3",
                                         "latest" };
    scene *s = the_scene();
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(s->path, sizeof s->path, "%s/%s", s->root, names[i]);
        if (unlink(s->path) != 0) (void)rmdir(s->path);
    }
    (void)rmdir(s->root);
}

static scene *open_scene(void) {
    scene *const opened = the_scene();
    xd_checkpoint_save_desc save;
    char *text = NULL;
    size_t bytes = 0;
    if (opened->comm) return opened;
    atexit(remove_folder);
    const char *folder = getenv("TMPDIR");
    snprintf(opened->root, sizeof opened->root, "%s/fuzz_state.XXXXXX", folder ? folder : "/tmp");
    FUZZ_CHECK(mkdtemp(opened->root) && xd_comm_self(fuzz_ctx(), &opened->comm) == XD_OK);
    make_network(opened);
    memset(&save, 0, sizeof save);
    save.root = opened->root;
    save.step = STEP;
    save.networks = &opened->network;
    save.network_count = 1;
    save.state = "{\"mine\":[1,2]}";
    FUZZ_CHECK(xd_checkpoint_save(opened->comm, &save) == XD_OK);
    snprintf(opened->folder, sizeof opened->folder, "%s/step-%d", opened->root, (int)STEP);
    snprintf(opened->path, sizeof opened->path, "%s/manifest.json", opened->folder);
    FUZZ_CHECK(xd_file_load(fuzz_ctx(), opened->path, TEXT, &text, &bytes) == XD_OK && bytes < (size_t)TEXT);
    memcpy(opened->manifest, text, bytes);
    xd_release(fuzz_ctx(), text);
    return opened;
}

/* The manifest with the length and the checksum of these bytes, and with its own. */
static void write_manifest(scene *s, const uint8_t *data, size_t bytes) {
    const unsigned sum = (unsigned)xd_crc32c(0, data, bytes);
    char blocks[16] = "", digits[9];
    const char *entry = strstr(s->manifest, "{\"name\":\"state.json\"");
    const char *rest = entry ? strchr(entry, '}') : NULL;
    FUZZ_CHECK(entry && rest);
    if (bytes) snprintf(blocks, sizeof blocks, "%u", sum);
    int length =
        snprintf(s->changed, sizeof s->changed,
                 "%.*s{\"name\":\"state.json\",\"bytes\":%llu,\"crc32c\":%u,\"blocks\":[%s]%s",
                 (int)(entry - s->manifest), s->manifest, (unsigned long long)bytes, sum, blocks, rest);
    FUZZ_CHECK(length > 11 && (size_t)length < sizeof s->changed);
    memcpy(s->changed + length - 11, "00000000", 8);
    snprintf(digits, sizeof digits, "%08x", (unsigned)xd_crc32c(0, s->changed, (size_t)length));
    memcpy(s->changed + length - 11, digits, 8);
    write_file(s, "manifest.json", s->changed, (size_t)length);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    scene *s = open_scene();
    xd_checkpoint_load_desc load;
    float before[WEIGHTS];
    if (bytes > (size_t)TEXT) return 0;
    write_file(s, "state.json", data, bytes);
    write_manifest(s, data, bytes);
    memset(&load, 0, sizeof load);
    load.root = s->root;
    load.step = STEP;
    load.networks = &s->network;
    load.network_count = 1;
    memcpy(before, s->values, sizeof before);
    for (int lenient = 0; lenient < 2; lenient++) {
        char *text = NULL;
        xd_json *root = NULL;
        load.lenient = lenient != 0;
        const xd_result result = xd_checkpoint_load(s->comm, &load, NULL, &text);
        FUZZ_CHECK(memcmp(before, s->values, sizeof before) == 0); /* the same values, or none */
        if (result != XD_OK) FUZZ_CHECK(!text && xd_last_error(fuzz_ctx())->message[0]);
        if (text) FUZZ_CHECK(xd_json_load_memory(fuzz_ctx(), NULL, text, strlen(text), &root) == XD_OK);
        xd_json_destroy(fuzz_ctx(), root);
        xd_release(fuzz_ctx(), text);
    }
    return 0;
}
