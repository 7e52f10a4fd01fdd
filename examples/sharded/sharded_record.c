/* sharded_record.c - sharded.json: what ran, and what came out. */
#include "sharded.h"

#include "../common/json_fields.h"

#include <stdio.h>

static void sharded_json_rank(xd_json_writer *w, const sharded_news *n) {
    const int steps = n->steps > 0 ? n->steps : 1;
    xd_json_write_object(w);
    json_field_int(w, "planned_bytes", (int64_t)n->planned);
    json_field_int(w, "counted_bytes", (int64_t)n->counted);
    json_field_double(w, "bytes_sent_per_step", (double)n->bytes_sent / steps);
    json_field_double(w, "seconds_per_step", n->seconds / steps);
    json_field_double(w, "wrapper_seconds_per_step", n->wrapper_seconds / steps);
    xd_json_write_end(w);
}

static void sharded_json_leg(xd_json_writer *w, const sharded_leg *leg, const sharded_outcome *outcome) {
    double slowest = 0.0;
    xd_json_write_object(w);
    json_field_string(w, "wrap", sharded_wrap_name(leg->wrap));
    json_field_int(w, "pipeline_ranks", leg->pp);
    json_field_int(w, "virtual_stages", leg->vpp);
    json_field_int(w, "steps", outcome->ranks[0].steps);
    json_field_int(w, "killed_after_step", outcome->killed ? outcome->ranks[0].step : 0);
    json_field_int(w, "lost", outcome->lost);
    json_field_int(w, "started_again", leg->again ? outcome->lost : 0);
    for (int i = 0; i < outcome->lost; i++)
        if (outcome->recoveries[i].seconds > slowest) slowest = outcome->recoveries[i].seconds;
    if (outcome->lost > 0) json_field_double(w, "slowest_recovery_seconds", slowest);
    xd_json_write_key(w, "ranks");
    xd_json_write_array(w);
    for (int r = 0; r < leg->ranks; r++) sharded_json_rank(w, &outcome->ranks[r]);
    xd_json_write_end(w);
    xd_json_write_end(w);
}

xd_result sharded_write_run(xd_ctx *ctx, const sharded_run *run) {
    static const char *const keys[SHARDED_THINGS] = { "same_weights", "same_optimizer", "same_average",
                                                      "same_losses" };
    char path[512];
    xd_json_writer w = xd_json_writer_create(ctx);
    w.indent = 2;
    xd_json_write_object(&w);
    demo_json_build(&w, ctx);
    json_field_int(&w, "steps", run->options->steps);
    json_field_int(&w, "seed", (int64_t)run->options->seed);
    json_field_int(&w, "batch", DEMO_BATCH);
    json_field_int(&w, "row", DEMO_ROW);
    json_field_double(&w, "bits_per_byte", run->outcomes[run->leg_count - 1].ranks[0].bits_per_byte);
    json_field_double(&w, "plain_bits_per_byte", run->outcomes[0].ranks[0].bits_per_byte);
    for (int i = 0; i < SHARDED_THINGS; i++) json_field_bool(&w, keys[i], run->comparison.same_bits[i]);
    xd_json_write_key(&w, "legs");
    xd_json_write_array(&w);
    for (int i = 0; i < run->leg_count; i++) sharded_json_leg(&w, &run->legs[i], &run->outcomes[i]);
    xd_json_write_end(&w);
    xd_json_write_end(&w);
    snprintf(path, sizeof path, "%s/sharded.json", run->options->out);
    return json_save(ctx, &w, path);
}
