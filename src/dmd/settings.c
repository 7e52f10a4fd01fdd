/* What all ranks of a distillation must share, and what a saved state has a hash of, which is why the order stays. */

#include "dmd/state.h"

#include <string.h>

XD_PRIVATE bool xdi_dmd_adversarial(const xd_dmd_desc *desc) {
    return desc->networks[XD_DMD_DISCRIMINATOR].forward != NULL;
}

XD_PRIVATE bool xdi_dmd_penalised(const xd_dmd_desc *desc, xd_dmd_penalty penalty) {
    return xdi_dmd_adversarial(desc) && desc->gan.r1_weight > 0.0 && desc->gan.penalty == penalty;
}

XD_PRIVATE int64_t xdi_dmd_whole(const xd_dmd_sizes *sizes) {
    return sizes->whole_elements ? sizes->whole_elements : sizes->elements;
}

static const char *const xdi_dmd_role_names[XD_DMD_ROLES] = { "student", "fake score", "discriminator",
                                                              "teacher" };

XD_PRIVATE const char *xdi_dmd_role_name(xd_dmd_role role) {
    return xdi_dmd_role_names[role];
}

static void xdi_dmd_list_numbers(xdi_facts *f, const char *name, const double *numbers, int64_t count) {
    xdi_fact_bytes(f, name, numbers, count > 0 ? (size_t)count * sizeof *numbers : 0);
}

static void xdi_dmd_list_times(xdi_facts *f, const char *part, const xd_time_sampler *s) {
    f->part = part;
    xdi_fact_number(f, "kind", (double)s->kind);
    xdi_fact_number(f, "min_t", s->min_t);
    xdi_fact_number(f, "max_t", s->max_t);
    xdi_fact_number(f, "shift", s->shift);
    xdi_fact_number(f, "mean", s->mean);
    xdi_fact_number(f, "deviation", s->deviation);
    xdi_fact_number(f, "freedom", s->freedom);
    xdi_fact_number(f, "list_count", (double)s->list_count);
    xdi_fact_number(f, "first", (double)s->first);
    xdi_fact_number(f, "last", (double)s->last);
    xdi_fact_number(f, "count", (double)s->count);
    xdi_fact_number(f, "grid", (double)s->grid);
    xdi_fact_number(f, "dtype", (double)s->dtype);
    xdi_fact_number(f, "list_to_end", (double)s->list_to_end);
    xdi_dmd_list_numbers(f, "list", s->list, s->kind == XD_TIME_LIST ? s->list_count : 0);
}

static void xdi_dmd_list_schedule(xdi_facts *f, const xd_noise_schedule *s) {
    f->part = "schedule";
    xdi_fact_number(f, "kind", (double)s->kind);
    xdi_fact_number(f, "min_t", s->min_t);
    xdi_fact_number(f, "max_t", s->max_t);
    xdi_fact_number(f, "clamp_min", s->clamp_min);
    xdi_fact_number(f, "table_count", (double)s->table_count);
    xdi_dmd_list_numbers(f, "table", s->table, s->kind == XD_NOISE_VP ? s->table_count : 0);
}

static void xdi_dmd_list_network(xdi_facts *f, const xd_network *network) {
    xdi_fact_number(f, "predicts", (double)network->predicts);
    xdi_fact_number(f, "heads", (double)network->heads);
    xdi_fact_number(f, "feature_count", (double)network->feature_count);
}

static void xdi_dmd_list_guidance(xdi_facts *f, const xd_guidance *guidance) {
    xdi_fact_number(f, "guidance.on", (double)guidance->on);
    xdi_fact_number(f, "guidance.scale", guidance->scale);
    xdi_fact_number(f, "guidance.rescale", guidance->rescale);
}

static void xdi_dmd_list_networks(xdi_facts *f, const xd_dmd_desc *desc) {
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        f->part = xdi_dmd_role_name((xd_dmd_role)role);
        xdi_dmd_list_network(f, &desc->networks[role]);
        xdi_fact_number(f, "max_norm", desc->trainers[role].max_norm);
        xdi_fact_number(f, "average_count", (double)desc->trainers[role].average_count);
        xdi_dmd_list_guidance(f, &desc->networks[role].guidance);
    }
}

static void xdi_dmd_list_losses(xdi_facts *f, const xd_dmd_desc *desc) {
    const xd_denoise_form *form = &desc->fake_loss;
    f->part = NULL;
    xdi_fact_number(f, "normaliser", (double)desc->normaliser);
    f->part = "fake_loss";
    xdi_fact_number(f, "space", (double)form->space);
    xdi_fact_number(f, "weight", (double)form->weight);
    xdi_fact_number(f, "sigma_data", form->sigma_data);
    xdi_fact_number(f, "gamma", form->gamma);
    xdi_fact_number(f, "user", form->user);
    xdi_fact_number(f, "v_of_any_schedule", (double)form->v_of_any_schedule);
}

static void xdi_dmd_list_gan(xdi_facts *f, const xd_dmd_desc *desc) {
    const xd_dmd_gan *gan = &desc->gan;
    f->part = "gan";
    xdi_fact_number(f, "discriminator", (double)xdi_dmd_adversarial(desc));
    xdi_fact_number(f, "kind", (double)gan->kind);
    xdi_fact_number(f, "weight", gan->weight);
    xdi_fact_number(f, "same_noise", (double)gan->same_noise);
    xdi_fact_number(f, "r1_weight", gan->r1_weight);
    xdi_fact_number(f, "r1_alpha", gan->r1_alpha);
    xdi_fact_number(f, "r1_on_clean", (double)gan->r1_on_clean);
    f->part = "gan.fdistill";
    xdi_fact_number(f, "on", (double)gan->fdistill.on);
    xdi_fact_number(f, "divergence", (double)gan->fdistill.divergence);
    xdi_fact_number(f, "lower", gan->fdistill.lower);
    xdi_fact_number(f, "upper", gan->fdistill.upper);
    xdi_fact_number(f, "bins", (double)gan->fdistill.bins);
    xdi_fact_number(f, "rate", gan->fdistill.rate);
    xdi_fact_number(f, "min_t", gan->fdistill.min_t);
    xdi_fact_number(f, "max_t", gan->fdistill.max_t);
    f->part = "gan";
    xdi_fact_number(f, "penalty", (double)gan->penalty);
}

static void xdi_dmd_list_settings(xdi_facts *f, const xd_dmd_desc *desc) {
    xdi_facts_begin(f);
    xdi_fact_number(f, "sizes.step_samples", (double)desc->sizes.step_samples);
    xdi_fact_number(f, "sizes.whole_elements", (double)xdi_dmd_whole(&desc->sizes));
    xdi_fact_number(f, "sizes.dtype", (double)desc->sizes.dtype);
    xdi_fact_number(f, "v_is_flow", (double)desc->v_is_flow);
    xdi_fact_number(f, "network_scale", desc->network_scale);
    xdi_fact_number(f, "network_dtype", (double)desc->network_dtype);
    xdi_fact_number(f, "rungs.steps", (double)desc->rungs.steps);
    xdi_fact_number(f, "rungs.roll_out", (double)desc->rungs.roll_out);
    xdi_fact_number(f, "rungs.deal", (double)desc->rungs.deal);
    xdi_fact_number(f, "rungs.fresh_noise", (double)desc->rungs.fresh_noise);
    xdi_fact_number(f, "regression.substeps", (double)desc->regression.substeps);
    xdi_fact_number(f, "regression.step_samples", (double)desc->regression.step_samples);
    xdi_fact_number(f, "guided", (double)desc->guided);
    xdi_fact_number(f, "guidance_scale", desc->guidance_scale);
    xdi_fact_number(f, "alternation", (double)desc->alternation);
    xdi_fact_number(f, "frequency", (double)desc->frequency);
    xdi_fact_number(f, "lead", (double)desc->lead);
    xdi_fact_number(f, "own_samples", (double)desc->own_samples);
    xdi_dmd_list_numbers(f, "rungs.list", desc->rungs.list, (int64_t)desc->rungs.steps + 1);
    xdi_dmd_list_schedule(f, &desc->schedule);
    xdi_dmd_list_times(f, "student_times", &desc->student_times);
    xdi_dmd_list_times(f, "fake_times", &desc->fake_times);
    xdi_dmd_list_networks(f, desc);
    xdi_dmd_list_losses(f, desc);
    xdi_dmd_list_gan(f, desc);
    f->part = NULL;
}

XD_PRIVATE uint64_t xdi_dmd_settings_hash(const xd_dmd_desc *desc) {
    xdi_facts facts;
    xdi_dmd_list_settings(&facts, desc);
    if (desc->rungs.hold > 0) xdi_fact_number(&facts, "rungs.hold", (double)desc->rungs.hold);
    return xdi_facts_hash(desc->seed, &facts);
}

static void xdi_dmd_list_seed(xdi_facts *f, uint64_t seed) {
    int64_t number;
    memcpy(&number, &seed, sizeof seed);
    xdi_fact_integer(f, "seed", number);
}

XD_PRIVATE xd_result xdi_dmd_agree_settings(const xd_dmd_desc *desc, xd_comm *comm) {
    xdi_facts facts;
    xdi_dmd_list_settings(&facts, desc);
    xdi_fact_number(&facts, "rungs.hold", (double)desc->rungs.hold);
    xdi_dmd_list_seed(&facts, desc->seed);
    return xdi_agree_facts(comm, &facts, "settings of a distillation");
}

XD_PRIVATE xd_result xdi_sampler_agree_settings(const xd_sampler_desc *desc, xd_comm *comm) {
    xdi_facts facts;
    xdi_facts_begin(&facts);
    xdi_fact_integer(&facts, "kind", (int64_t)desc->kind);
    xdi_fact_integer(&facts, "steps", desc->steps);
    xdi_dmd_list_numbers(&facts, "list", desc->list, (int64_t)desc->steps + 1);
    xdi_fact_dtype(&facts, "list_dtype", desc->list_dtype);
    xdi_fact_integer(&facts, "v_is_flow", desc->v_is_flow);
    xdi_fact_number(&facts, "network_scale", desc->network_scale);
    xdi_fact_dtype(&facts, "network_dtype", desc->network_dtype);
    xdi_fact_integer(&facts, "guided", desc->guided);
    xdi_fact_number(&facts, "guidance_scale", desc->guidance_scale);
    xdi_fact_integer(&facts, "samples", desc->samples);
    xdi_fact_integer(&facts, "whole_elements", desc->whole_elements ? desc->whole_elements : desc->elements);
    xdi_fact_dtype(&facts, "dtype", desc->dtype);
    xdi_dmd_list_seed(&facts, desc->seed);
    xdi_fact_integer(&facts, "step", desc->step);
    xdi_dmd_list_schedule(&facts, &desc->schedule);
    facts.part = "network";
    xdi_dmd_list_network(&facts, &desc->network);
    xdi_dmd_list_guidance(&facts, &desc->network.guidance);
    return xdi_agree_facts(comm, &facts, "settings of a sampler");
}
