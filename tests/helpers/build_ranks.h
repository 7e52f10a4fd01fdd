/* build_ranks.h - ranks of a test of xd_build and of what it is made of. */
#ifndef BUILD_RANKS_H
#define BUILD_RANKS_H

#include "xdistill.h"

#include "xd_test.h"

static void build_ranks(int ranks, xd_rank_function function) {
    const xd_ctx_desc desc = { .timeout_seconds = 60 };
    xd_error error;
    const xd_result result = xd_run_threads(ranks, &desc, function, NULL, &error);
    if (result != XD_OK) printf("%s\n", error.message);
    CHECK(result == XD_OK);
}

#endif
