/* sample_refused.h - a loss over samples that was refused: its code, its message, and values that it has not touched. */
#ifndef SAMPLE_REFUSED_H
#define SAMPLE_REFUSED_H

#include "xdistill.h"

#include "xd_test.h"

static const xd_sample_values untouched_values = { 5.0, 5.0, 5 };

static inline void sample_refused(xd_ctx *ctx, xd_result result, const xd_sample_values *values,
                                  xd_result expected, const char *says) {
    const bool said = strstr(xd_last_error(ctx)->message, says) != NULL;
    CHECK_EQ_INT(result, expected);
    CHECK(values->loss == untouched_values.loss && values->denominator == untouched_values.denominator &&
          values->counted == untouched_values.counted);
    CHECK(said);
    if (!said) printf("\"%s\" is not in: %s\n", says, xd_last_error(ctx)->message);
}

#endif
