/* sample.h - what a model writes by itself. */
#ifndef SAMPLE_H
#define SAMPLE_H

#include "../nn/nn_model.h"
#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SAMPLE_BYTES = 640 };

/* A repeatable number in [0, 1). */
double sample_random(uint64_t seed, uint64_t stream, uint64_t counter);

/* One rank with whole weights continues a beginning, to 64 tokens: UTF-8 in `sample`. Errors: MEMORY. */
xd_result sample_write(xd_ctx *ctx, const nn_model *whole, const float *weights,
                       const xd_tokenizer *tokenizer, const char *beginning, uint64_t seed,
                       char sample[SAMPLE_BYTES]);

/* Prints it under its name, on one line: what would break the line becomes a slash. */
void sample_print(const char *name, const char *sample);

#ifdef __cplusplus
}
#endif

#endif /* SAMPLE_H */
