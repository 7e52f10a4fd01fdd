/* demo_record_run.c - run.json: what ran, and what came out. */
#define _POSIX_C_SOURCE 200112L /* sysconf */
#include "demo.h"

#include "../common/json_fields.h"

#include <stdio.h>
#include <unistd.h>

void demo_json_build(xd_json_writer *w, xd_ctx *ctx) {
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", XD_VERSION_MAJOR, XD_VERSION_MINOR, XD_VERSION_PATCH);
    json_field_string(w, "version", version);
#if defined(__clang__)
    json_field_string(w, "compiler", __VERSION__);
#elif defined(__GNUC__)
    json_field_string(w, "compiler", "gcc " __VERSION__);
#else
    json_field_string(w, "compiler", "unknown");
#endif
    json_field_string(w, "cpu", xd_cpu_level_name(xd_ctx_settings(ctx)->cpu));
    json_field_int(w, "processors", sysconf(_SC_NPROCESSORS_ONLN));
}

/* Seed by seed the values on the way, of a sample of the held-out text. */
static void demo_run_heldout(xd_json_writer *w, const demo_job *job, int arm) {
    xd_json_write_key(w, "heldout_on_the_way");
    xd_json_write_array(w);
    for (int s = 0; s < job->seeds; s++) {
        xd_json_write_array(w);
        for (int i = 0; i < demo_point_count(job->steps); i++)
            xd_json_write_double(w, job->results[s * job->arm_count + arm].heldout[i]);
        xd_json_write_end(w);
    }
    xd_json_write_end(w);
}

static void demo_run_points(xd_json_writer *w, const demo_job *job) {
    xd_json_write_key(w, "heldout_steps");
    xd_json_write_array(w);
    for (int i = 0; i < demo_point_count(job->steps); i++)
        xd_json_write_int64(w, demo_point_step(i, job->steps));
    xd_json_write_end(w);
}

static void demo_run_arm_json(xd_json_writer *w, const demo_job *job, int arm) {
    xd_json_write_object(w);
    xd_json_write_key(w, "name");
    xd_json_write_string(w, job->arms[arm].name);
    json_field_double(w, "kd_weight", job->arms[arm].kd_weight);
    json_field_double(w, "ce_weight", job->arms[arm].ce_weight);
    json_field_double(w, "temperature", job->arms[arm].temperature);
    json_field_double(w, "learning_rate", job->arms[arm].learning_rate);
    json_field_double(w, "share", job->arms[arm].share);
    xd_json_write_key(w, "heldout_bits_per_byte");
    xd_json_write_array(w);
    for (int s = 0; s < job->seeds; s++)
        xd_json_write_double(w, job->results[s * job->arm_count + arm].bits_per_byte);
    xd_json_write_end(w);
    demo_run_heldout(w, job, arm);
    json_field_double(w, "seconds", job->results[arm].seconds);
    xd_json_write_end(w);
}

xd_result demo_write_run(xd_ctx *ctx, const demo_job *job, const char *directory) {
    char path[512];
    xd_json_writer w = xd_json_writer_create(ctx);
    w.indent = 2;
    xd_json_write_object(&w);
    demo_json_build(&w, ctx);
    json_field_string(&w, "ranks_are", job->ranks_are);
    json_field_int(&w, "ranks", (int64_t)job->dp * job->cp * job->tp);
    xd_json_write_key(&w, "mesh");
    xd_json_write_object(&w);
    json_field_int(&w, "dp", job->dp);
    json_field_int(&w, "cp", job->cp);
    json_field_int(&w, "tp", job->tp);
    xd_json_write_end(&w);
    json_field_string(&w, "reduction", demo_reduction_name(job->reduction));
    json_field_int(&w, "steps", job->steps);
    json_field_int(&w, "batch", DEMO_BATCH);
    json_field_int(&w, "row", DEMO_ROW);
    json_field_int(&w, "seed", (int64_t)job->seed);
    json_field_int(&w, "seeds", job->seeds);
    json_field_int(&w, "layers", job->config->layers);
    json_field_int(&w, "hidden", job->config->hidden);
    if (job->teacher_result)
        json_field_double(&w, "teacher_bits_per_byte", job->teacher_result->bits_per_byte);
    demo_run_points(&w, job);
    xd_json_write_key(&w, "arms");
    xd_json_write_array(&w);
    for (int arm = 0; arm < job->arm_count; arm++) demo_run_arm_json(&w, job, arm);
    xd_json_write_end(&w);
    xd_json_write_end(&w);
    snprintf(path, sizeof path, "%s/run.json", directory);
    return json_save(ctx, &w, path);
}
