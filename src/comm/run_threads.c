/* Runs a function on ranks that are threads of this process. */

#include "comm/threads_internal.h"

#include <string.h>

typedef struct xdi_threads_run {
    xd_thread_world *world;
    const xd_ctx_desc *desc;
    xd_rank_function function;
    void *argument;
    int rank;
    pthread_t thread;
    xd_result result;
    xd_error error;
} xdi_threads_run;

static void xdi_threads_set_error(xdi_threads_run *run, const xd_error *error, const char *message) {
    run->error.rank = run->rank;
    run->error.culprit = -1;
    if (error && error->result == run->result)
        run->error = *error;
    else
        strncpy(run->error.message, message, sizeof run->error.message - 1);
    run->error.result = run->result;
}

static void *xdi_threads_main(void *argument) {
    xdi_threads_run *run = (xdi_threads_run *)argument;
    xd_ctx *ctx = NULL;
    xd_comm *comm = NULL;
    run->result = xd_ctx_create(run->desc, &ctx);
    if (run->result != XD_OK) {
        xdi_threads_set_error(run, NULL, "the context of a rank could not be created");
        xdi_threads_break(run->world, XD_ERROR_PEER, run->rank);
        return NULL;
    }
    run->result = xd_thread_world_join(run->world, ctx, run->rank, &comm);
    if (run->result == XD_OK) run->result = run->function(comm, run->argument);
    if (run->result != XD_OK) {
        xdi_threads_set_error(run, xd_last_error(ctx), "the rank function returned an error of its own");
        xdi_threads_break(run->world, XD_ERROR_PEER, run->rank);
    }
    xd_comm_destroy(comm);
    xd_ctx_destroy(ctx);
    return NULL;
}

/* The run whose failure came first: PEER and TIMEOUT are consequences of another rank's failure, if there is one. */
static const xdi_threads_run *xdi_threads_culprit(const xdi_threads_run *runs, int ranks) {
    const xdi_threads_run *found = NULL;
    int best = 0;
    for (int r = 0; r < ranks; r++) {
        const xd_result result = runs[r].result;
        const int weight = result == XD_OK              ? 0
                           : result == XD_ERROR_PEER    ? 1
                           : result == XD_ERROR_TIMEOUT ? 2
                                                        : 3;
        if (weight <= best) continue;
        best = weight;
        found = &runs[r];
    }
    return found;
}

static xd_result xdi_threads_run_all(xd_ctx *ctx, xdi_threads_run *runs, int ranks, xd_error *error) {
    const int64_t process = xdi_process();
    int started = 1;
    while (started < ranks &&
           pthread_create(&runs[started].thread, NULL, xdi_threads_main, &runs[started]) == 0)
        started++;
    if (started < ranks) xdi_threads_break(runs[0].world, XD_ERROR_PEER, started);
    xdi_threads_main(&runs[0]);
    if (xdi_is_forked(process)) {
        const xd_result result = XD_FAIL(
            ctx, XD_ERROR_STATE, "rank 0 returned in process %lld, which was forked from process %lld",
            (long long)xdi_process(), (long long)process);
        if (error) *error = *xd_last_error(ctx);
        return result;
    }
    for (int r = 1; r < started; r++) pthread_join(runs[r].thread, NULL);
    if (started < ranks) {
        const xd_result result =
            XD_FAIL(ctx, XD_ERROR_MEMORY, "the system has no thread for rank %d", started);
        if (error) *error = *xd_last_error(ctx);
        return result;
    }
    const xdi_threads_run *culprit = xdi_threads_culprit(runs, ranks);
    if (!culprit) return XD_OK;
    if (error) *error = culprit->error;
    return culprit->result;
}

XD_API xd_result xd_run_threads(int ranks, const xd_ctx_desc *desc, xd_rank_function function, void *argument,
                                xd_error *error) {
    XDI_GIVEN(NULL, function);
    xd_ctx *ctx = NULL;
    xd_thread_world *world = NULL;
    const xd_thread_world_desc size = { ranks };
    xdi_threads_run *runs = NULL;
    xd_result result = xd_ctx_create(desc, &ctx);
    if (result != XD_OK) return result;
    result = xd_thread_world_create(ctx, &size, &world);
    if (result == XD_OK) {
        runs = (xdi_threads_run *)xd_allocate(ctx, (size_t)ranks * sizeof *runs);
        if (!runs) result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %d ranks", ranks);
    }
    if (result != XD_OK && error) *error = *xd_last_error(ctx);
    for (int r = 0; runs && r < ranks; r++) {
        runs[r].world = world;
        runs[r].desc = desc;
        runs[r].function = function;
        runs[r].argument = argument;
        runs[r].rank = r;
    }
    if (runs) result = xdi_threads_run_all(ctx, runs, ranks, error);
    xd_release(ctx, runs);
    xd_thread_world_destroy(world);
    xd_ctx_destroy(ctx);
    return result;
}
