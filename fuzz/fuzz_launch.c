/* The input is an environment, a line NAME=VALUE for each variable: it names a rank of a job, or is refused in words. */
#if !defined(_DEFAULT_SOURCE)
#    define _DEFAULT_SOURCE /* setenv */
#endif
#include "fuzz.h"

enum { VARIABLES = 32, NAME = 64, VALUE = 512 };

static void use(const xd_launch_info *info) {
    FUZZ_CHECK(info->world_size >= 1 && info->rank >= 0 && info->rank < info->world_size);
    FUZZ_CHECK(info->local_world_size >= 0 && info->local_world_size <= info->world_size);
    FUZZ_CHECK(info->local_rank >= 0);
    FUZZ_CHECK(info->local_world_size == 0 || info->local_rank < info->local_world_size);
    FUZZ_CHECK(memchr(info->job, 0, sizeof info->job) != NULL);
    FUZZ_CHECK(memchr(info->master_address, 0, sizeof info->master_address) != NULL);
    FUZZ_CHECK(info->master_port >= 0 && info->master_port <= 65535);
    FUZZ_CHECK(strspn(info->job, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") ==
               strlen(info->job));
}

/* Sets the variable of a line; false for a line that is none. */
static bool set_line(const uint8_t *line, size_t length, char name[NAME]) {
    char value[VALUE];
    const uint8_t *equals = length ? (const uint8_t *)memchr(line, '=', length) : NULL;
    const size_t named = equals ? (size_t)(equals - line) : 0, rest = equals ? length - named - 1 : 0;
    if (named == 0 || named >= (size_t)NAME || rest >= (size_t)VALUE || memchr(line, 0, length)) return false;
    memcpy(name, line, named);
    name[named] = '\0';
    if (rest) memcpy(value, equals + 1, rest);
    value[rest] = '\0';
    /* Launchers' alone: others mean something to sanitizers and to the C library. */
    static const char *const ours[] = { "RANK",  "WORLD_SIZE", "LOCAL_",  "OMPI_", "PMI",
                                        "MPI_",  "SLURM_",     "MASTER_", "XDIST", "TORCHEL",
                                        "PALS_", "MV2_COMM_",  "FLUX_",   "ALPS_", "JSM_" };
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
        if (strncmp(name, ours[i], strlen(ours[i])) == 0) return setenv(name, value, 1) == 0;
    return false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static char names[VARIABLES][NAME];
    xd_launch_info info;
    int count = 0;
    for (size_t at = 0; at < bytes && count < VARIABLES;) {
        const uint8_t *end = (const uint8_t *)memchr(data + at, '\n', bytes - at);
        const size_t length = end ? (size_t)(end - data) - at : bytes - at;
        if (set_line(data + at, length, names[count])) count++;
        at += length + 1;
    }
    memset(&info, 0x5a, sizeof info);
    const xd_launch_info before = info;
    if (xd_launch_discover(fuzz_ctx(), &info) == XD_OK)
        use(&info);
    else
        FUZZ_CHECK(xd_last_error(fuzz_ctx())->message[0] && memcmp(&info, &before, sizeof info) == 0);
    for (int i = 0; i < count; i++) unsetenv(names[i]);
    return 0;
}
