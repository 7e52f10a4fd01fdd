/* What the fuzzers share. With libFuzzer:
 *     clang -g -O1 -fsanitize=fuzzer,address,undefined -Isrc fuzz/fuzz_json.c -o fuzz_json -lm -lpthread
 *     mkdir -p corpus && ./fuzz_json corpus fuzz/seeds/json
 * With any compiler, -DFUZZ_FILES makes a program that runs the files named on its command line, once each. */
#ifndef FUZZ_H
#define FUZZ_H

#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* A broken promise ends the program, so that the fuzzer keeps the input. */
#define FUZZ_CHECK(condition)                                               \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                        \
        }                                                                   \
    } while (0)

static inline xd_ctx *fuzz_ctx(void) {
    static xd_ctx *ctx;
    if (!ctx) FUZZ_CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    return ctx;
}

#if defined(FUZZ_FILES)
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        char *data = NULL;
        size_t bytes = 0;
        FUZZ_CHECK(xd_file_load(fuzz_ctx(), argv[i], 0, &data, &bytes) == XD_OK);
        LLVMFuzzerTestOneInput((const uint8_t *)data, bytes);
        xd_release(fuzz_ctx(), data);
    }
    printf("%d files\n", argc - 1);
    xd_ctx_destroy(fuzz_ctx());
    return 0;
}
#endif

#endif
