/* What the fuzzers share. With libFuzzer:
 *     clang -g -O1 -fsanitize=fuzzer,address,undefined -Isrc fuzz/fuzz_json.c -o fuzz_json -lm -lpthread
 *     mkdir -p corpus && ./fuzz_json corpus fuzz/seeds/json
 * With any compiler, -DFUZZ_FILES makes a program that runs the files named on its command line, once each, and then changes
 * them at random (fuzz_mutate.h) for FUZZ_SECONDS of the environment, 0 without it. */
#ifndef FUZZ_H
#define FUZZ_H

#if defined(FUZZ_FILES) && !defined(_DEFAULT_SOURCE)
#    define _DEFAULT_SOURCE /* signals */
#endif
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(FUZZ_FILES)
#    include "fuzz_mutate.h"
#endif

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
    fuzz_mutator *m = (fuzz_mutator *)calloc(1, sizeof *m);
    FUZZ_CHECK(m != NULL);
    fuzz_mutate_open(m, argv[0]);
    for (int i = 1; i < argc; i++) {
        char *data = NULL;
        size_t bytes = 0;
        FUZZ_CHECK(xd_file_load(fuzz_ctx(), argv[i], 0, &data, &bytes) == XD_OK);
        if (fuzz_mutate_add(m, data, bytes)) fuzz_mutate_run(m, data, bytes, LLVMFuzzerTestOneInput);
        xd_release(fuzz_ctx(), data);
    }
    printf("%d files, ", argc - 1);
    printf("%llu inputs made of them\n", (unsigned long long)fuzz_mutate_loop(m, LLVMFuzzerTestOneInput));
    fuzz_mutate_close(m);
    xd_ctx_destroy(fuzz_ctx());
    return 0;
}
#endif

#endif
