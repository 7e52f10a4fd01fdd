/* demo_keep.c - what is kept of a trained student: a model directory, and what it writes by itself. */
#include "demo_rank.h"

#include "../common/model_directory.h"

void demo_round_to_bf16(float *weights, int64_t count) {
    for (int64_t i = 0; i < count; i++) weights[i] = xd_f32_from_bf16(xd_bf16_from_f32(weights[i]));
}

/* A finished model of another run is not replaced unless that was asked for; this run's own, which an interruption
 * came after, has the same bits. */
static xd_result demo_save_whole(demo_rank *r, const nn_model *whole, float *weights) {
    const demo_job *job = r->job;
    const int32_t end = xd_tokenizer_find_special(job->tokenizer, "<|endoftext|>");
    const model_extras extras = { job->tokenizer_path, end < 0 ? NULL : "<|endoftext|>", end, DEMO_ROW };
    if (!job->overwrite && model_directory_is_finished(job->save_directory)) {
        if (model_directory_holds(r->ctx, job->save_directory, whole, weights)) return XD_OK;
        return XD_FAIL(r->ctx, XD_ERROR_STATE,
                       "%s holds a finished model that this run did not make: "
                       "--overwrite replaces it",
                       job->save_directory);
    }
    return model_directory_save(r->ctx, job->save_directory, whole, weights, &extras);
}

xd_result demo_keep_student(demo_rank *r, const float *own, bool save, char sample[SAMPLE_BYTES]) {
    const demo_job *job = r->job;
    nn_model whole;
    bool failed = false;
    const char *problem = nn_model_init(job->config, NULL, NULL, &whole);
    float *weights = problem ? NULL : (float *)demo_room(r, whole.float_count, sizeof(float), &failed);
    xd_result status =
        problem || failed ? XD_FAIL(r->ctx, XD_ERROR_MEMORY, "no room for the whole model") : XD_OK;
    status = xd_agree(r->world, status);
    if (status == XD_OK) status = demo_gather_shares(r->ctx, r->tp, &r->model, own, &whole, weights);
    if (status == XD_OK && xd_comm_rank(r->world) == 0) {
        if (save) status = demo_save_whole(r, &whole, weights);
        if (status == XD_OK)
            status = sample_write(r->ctx, &whole, weights, job->tokenizer, DEMO_BEGINNING, job->seed, sample);
    }
    xd_release(r->ctx, weights);
    nn_model_free(&whole);
    return xd_agree(r->world, status);
}
