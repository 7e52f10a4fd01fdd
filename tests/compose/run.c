/* run.c - trains the toy: what the ranks do in a step, and the way from one layout to the next. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "rank.h"
#include "../helpers/vocab_calls.h"
#include "../helpers/wrap_calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- set-up ---- */

static xd_result make_share(rank *r) {
    const toy_sizes *z = &r->job->config->size;
    const share_sizes sizes = { z->rows,   z->hidden, TOY_HIDDEN,
                                z->inner,  z->vocab,  z->vocab + r->job->layout->padded,
                                z->experts };
    XD_TRY(xd_comm_self(r->ctx, &r->self));
    const share_ranks ranks = { r->world, r->tp ? r->tp : r->self, r->cp ? r->cp : r->self,
                                r->members ? r->members : r->self };
    XD_TRY(share_create(&ranks, &sizes, &r->share));
    r->toy.share = r->share;
    r->rows_here = r->share->rows.end - r->share->rows.begin;
    r->columns = r->share->vocab.end - r->share->vocab.begin;
    return XD_OK;
}

static xd_result make_home(rank *r) {
    xd_ctx_desc d;
    memset(&d, 0, sizeof d);
    d.reduction = XD_REDUCTION_INVARIANT;
    d.timeout_seconds = 60;
    r->home = r->ctx;
    r->over = r->world;
    if (!r->job->layout->offload) return XD_OK;
    XD_TRY(xd_ctx_create(&d, &r->home));
    return xd_comm_fork(r->world, r->home, &r->over);
}

static xd_result make_queues(rank *r) {
    const xd_queue_desc d = { .form = r->job->layout->queues == 2 ? XD_QUEUE_WORKER : XD_QUEUE_INLINE,
                              .capacity = 64 };
    if (!r->job->layout->queues) return XD_OK;
    if (is_staged(r)) XD_TRY(xd_queue_create(r->groups.pp, &d, &r->sends));
    if (r->experts.data) XD_TRY(xd_queue_create(r->experts.data, &d, &r->experts.gathers));
    if (r->experts.data) XD_TRY(xd_queue_create(r->experts.data, &d, &r->experts.reductions));
    XD_TRY(xd_queue_create(r->data, &d, &r->gathers));
    return xd_queue_create(r->data, &d, &r->reductions);
}

bool is_fsdp(const compose_layout *layout) {
    return layout->wrap > WRAP_SHARDED;
}

wrap_settings settings_of(const rank *r) {
    static const char *const types[] = { "layer", "experts", "mlp" };
    static const xd_gradient_divisors divisors[] = { { false, 0.0, 0.0 },
                                                     { true, 0.0, 0.0 },
                                                     { false, 4.0, 0.3 } };
    static const xd_dtype sent[] = { XD_DTYPE_NONE, XD_DTYPE_BF16, XD_DTYPE_F16 };
    const bool thaws = r->job->config->thaw > 0;
    const compose_layout *l = r->job->layout;
    const int64_t leaves = r->job->config->leaves;
    const xd_ddp_desc ddp = { .micro_batches = leaves,
                              .sharded_optimizer = l->wrap == WRAP_SHARDED,
                              .view_dtype = XD_DTYPE_F32,
                              .gathers = r->gathers,
                              .reductions = r->reductions,
                              .bucket_size = 40,
                              .divide = divisors[r->job->config->divide],
                              .reserve_frozen = thaws,
                              .replicas = r->replicas,
                              .experts = r->experts };
    const xd_fsdp_desc fsdp = { .micro_batches = leaves,
                                .unit_types = types,
                                .unit_type_count = l->nested ? 3 : 2,
                                .replicas = r->replicas,
                                .accumulate_whole = l->wrap == WRAP_FSDP_WHOLE,
                                .sent_dtype = sent[r->job->config->sent],
                                .view_dtype = XD_DTYPE_F32,
                                .reshard_ranks = l->reshard,
                                .gathers = r->gathers,
                                .reductions = r->reductions,
                                .prefetch = l->queues,
                                .divide = divisors[r->job->config->divide],
                                .reserve_frozen = thaws,
                                .host = l->offload ? r->home : NULL,
                                .experts = r->experts };
    const wrap_settings s = { ddp, fsdp };
    return s;
}

static xd_result make_wrapper(rank *r) {
    const wrap_settings s = settings_of(r);
    if (is_staged(r)) return stages_make(r);
    return is_fsdp(r->job->layout) ? wrap_over_fsdp(r->toy.model, r->data, &s.fsdp, &r->parallel)
                                   : wrap_over_ddp(r->toy.model, r->data, &s.ddp, &r->parallel);
}

static float *floats(int64_t count) {
    return (float *)calloc((size_t)count + 1, sizeof(float));
}

/* Of the caller's storage: all weights, with what is stored beyond them. */
static int64_t room_of(const rank *r) {
    return toy_count(&r->job->config->size) +
           2 * (int64_t)r->job->layout->padded * r->job->config->size.hidden;
}

static xd_result make_model(rank *r) {
    const toy_sizes *z = &r->job->config->size;
    const int64_t count = room_of(r);
    const toy_storage library = { NULL, NULL, XD_DTYPE_NONE };
    xd_model *source = NULL;
    if (!r->job->layout->own) {
        XD_TRY(toy_describe(r->ctx, z, library, &r->toy));
        return is_staged(r) ? XD_OK : fill_model(r, r->toy.model);
    }
    r->storage = floats(count);
    r->gradients = floats(count);
    const toy_storage own = { r->storage, r->gradients, XD_DTYPE_NONE };
    XD_TRY(toy_describe(r->ctx, z, own, &r->toy));
    r->toy.plain = r->job->layout->own == 2;
    /* The caller's values are his; here they are those that the library would form. */
    toy plain;
    plain.share = r->share;
    XD_TRY(toy_describe(r->ctx, z, library, &plain));
    source = plain.model;
    XD_TRY(xd_model_allocate(source));
    XD_TRY(xd_model_init_weights(source));
    for (int64_t i = 0; i < xd_model_describe(source).weight_count; i++) {
        const xd_weight_info from = xd_weight_describe(xd_model_weight_at(source, i)),
                             to = xd_weight_describe(xd_model_weight_at(r->toy.model, i));
        if (from.count > 0) memcpy(to.value, from.value, (size_t)from.count * sizeof(float));
    }
    toy_destroy(&plain);
    return fill_model(r, r->toy.model);
}

static const xd_parallel *lead_of(const rank *r) {
    return is_staged(r) ? stages_lead(r) : r->parallel;
}

static xd_result make_buffers(rank *r) {
    const toy_sizes *z = &r->job->config->size;
    const xd_parallel_micro_batch_count leaves = xd_parallel_micro_batches(lead_of(r));
    r->own = leaves.own;
    r->opened = leaves.opened;
    r->most = z->experts ? leaves.max : leaves.opened;
    const int64_t slots = is_staged(r) ? r->slots : r->most;
    r->kept = (toy_kept *)calloc((size_t)slots, sizeof *r->kept);
    r->logits = floats(slots * r->rows_here * r->columns);
    r->teacher = floats(r->most * r->rows_here * r->columns);
    if (is_staged(r)) {
        XD_TRY(stages_list(r));
        return vocab_of(r->ctx, r->tp, r->share->vocab, z->vocab, &r->vocab);
    }
    XD_TRY(xd_parallel_params(r->parallel, PARTS, r->params, &r->count));
    XD_TRY(xd_parallel_parts(r->parallel, PARTS, r->parts, &r->count));
    XD_TRY(fill_parts(r));
    return vocab_of(r->ctx, r->tp, r->share->vocab, z->vocab, &r->vocab);
}

static xd_result make_state(rank *r) {
    const compose_config *c = r->job->config;
    xd_optimizer_desc d = xd_adamw_defaults(r->params, r->count);
    if (c->optimizer == 1) d = xd_adam_defaults(r->params, r->count);
    if (c->optimizer == 2) {
        const xd_optimizer_desc sgd = { .params = r->params, .param_count = r->count, .kind = XD_OPTIMIZER_SGD };
        d = sgd;
    }
    d.learning_rate = 0.02;
    d.reserve_frozen = c->thaw > 0;
    if (c->optimizer == 2) d.momentum = 0.9;
    XD_TRY(xd_optimizer_create(r->home, &d, &r->optimizer));
    for (int i = 0; i < c->averages; i++) {
        xd_ema_desc e = xd_ema_defaults(i ? XD_EMA_POWER : XD_EMA_CONSTANT);
        e.decay = 0.75;
        e.init_from_current = i == 0;
        e.params = r->params;
        e.param_count = r->count;
        XD_TRY(xd_ema_create(r->home, &e, &r->averages[i]));
    }
    return XD_OK;
}

/* ---- thawing ---- */

static bool is_thawed(const char *name) {
    return strncmp(name, "layers.", 7) != 0 || !strstr(name, ".shift") || strncmp(name, "layers.0.", 9) == 0;
}

static xd_result thaw(rank *r) {
    for (int64_t i = 0; i < r->count; i++) {
        if (!r->params[i].frozen || !is_thawed(r->params[i].name)) continue;
        XD_TRY(is_staged(r)
                   ? stages_thaw(r, r->params[i].name)
                   : xd_parallel_thaw(r->parallel, xd_model_find_weight(r->toy.model, r->params[i].name)));
        r->params[i].frozen = false;
        XD_TRY(xd_optimizer_thaw(r->optimizer, i));
    }
    return XD_OK;
}

/* ---- a step ---- */

static void read_batch(rank *r, int step) {
    const compose_config *c = r->job->config;
    const toy_sizes *z = &c->size;
    const sharing *s = r->share;
    for (int64_t k = 0; k < r->own; k++)
        for (int64_t row = s->rows.begin; row < s->rows.end; row++) {
            const int64_t leaf = xd_parallel_micro_batch(lead_of(r), k), at = k * r->rows_here + row - s->rows.begin;
            const bool ignored = c->ignored && (leaf + row + step) % 3 == 0;
            r->labels[at] = ignored ? XD_IGNORE_INDEX : toy_label(z, step, leaf, (int)row);
            for (int64_t v = 0; v < r->columns; v++)
                r->teacher[at * r->columns + v] =
                    6.0f * toy_number(step * 97 + leaf, row, s->vocab.begin + v);
        }
}

xd_result take_loss(rank *r, int64_t k, int64_t n, float *logits, bool all) {
    const compose_config *c = r->job->config;
    const int64_t row = k * r->rows_here, rows = n * r->rows_here;
    xd_loss_values values;
    xd_loss_desc d;
    memset(&d, 0, sizeof d);
    d.student = xd_rows_of(logits, XD_DTYPE_F32, rows, r->columns);
    d.vocab = r->vocab;
    d.common.labels = xd_ids_of(r->labels + row, XD_DTYPE_I64);
    d.common.gradient = d.student;
    d.common.comm = all ? r->rows : r->cp;
    d.common.denominator_value = (double)(c->leaves * c->size.rows);
    d.hard_weight = c->soft == 1 ? 0.0 : 1.0;
    d.soft_weight = c->soft ? 0.5 : 0.0;
    d.label_smoothing = c->smoothing && c->soft != 1 ? 0.1 : 0.0;
    d.divergence = (xd_divergence)c->divergence;
    if (c->divergence) d.temperature = 2.0;
    if (c->divergence == XD_JSD) d.beta = 0.3;
    if (c->soft) d.teacher = xd_rows_of(r->teacher + row * r->columns, XD_DTYPE_F32, rows, r->columns);
    XD_TRY(xd_loss(r->ctx, &d, &values));
    r->loss = values.loss;
    if (!all && (!r->tp || xd_comm_rank(r->tp) == 0) && (!r->cp || xd_comm_rank(r->cp) == 0))
        r->job->out->leaf_losses[r->step][xd_parallel_micro_batch(lead_of(r), k)] = r->loss;
    return XD_OK;
}

static float *logits_of(rank *r, int64_t k) {
    return r->logits + k * r->rows_here * r->columns;
}

static toy_pass pass_of(rank *r, xd_pass_kind kind, int64_t k) {
    const toy_pass p = { .kind = kind,
                         .step = r->step,
                         .leaf = xd_parallel_micro_batch(r->parallel, k),
                         .k = k,
                         .beyond = k >= r->opened,
                         .recompute = r->job->config->recompute != 0,
                         .kept = &r->kept[k],
                         .input = logits_of(r, k),
                         .output = logits_of(r, k) };
    return p;
}

static xd_result forward(rank *r, int64_t k) {
    const toy_pass p = pass_of(r, XD_PASS_FORWARD, k);
    return toy_forward(&r->toy, &p);
}

static xd_result backward(rank *r, int64_t k) {
    const toy_pass p = pass_of(r, XD_PASS_BACKWARD, k);
    return toy_backward(&r->toy, &p);
}

static xd_result infer(rank *r, int step) {
    toy_pass p = pass_of(r, XD_PASS_INFERENCE, 0);
    p.step = step;
    p.leaf = 0;
    return toy_forward(&r->toy, &p);
}

/* By brackets, or with the caller's own gradients. */
static xd_result leaf_backward(rank *r, int64_t k) {
    if (!r->toy.plain) return backward(r, k);
    memset(r->gradients, 0, (size_t)room_of(r) * sizeof *r->gradients);
    XD_TRY(backward(r, k));
    return xd_parallel_push_micro_batch(r->parallel);
}

static xd_result train_leaves(rank *r) {
    const bool together = r->job->config->together != 0;
    for (int64_t k = 0; k < r->most; k++) {
        XD_TRY(forward(r, k));
        if (together) continue;
        if (k < r->own) XD_TRY(take_loss(r, k, 1, logits_of(r, k), false));
        XD_TRY(leaf_backward(r, k));
    }
    if (!together) return XD_OK;
    XD_TRY(take_loss(r, 0, r->own, r->logits, true));
    for (int64_t k = 0; k < r->most; k++) XD_TRY(leaf_backward(r, k));
    return XD_OK;
}

static xd_result update(rank *r, int step) {
    xd_gradient_norm norm;
    xd_gradient_norm_desc clip;
    xd_optimizer_step_desc d;
    memset(&clip, 0, sizeof clip);
    memset(&d, 0, sizeof d);
    clip.params = r->params;
    clip.param_count = r->count;
    clip.max_norm = r->job->config->clip ? 0.05 : 0.0;
    XD_TRY(xd_gradient_norm_compute(r->home, r->over, &clip, &norm));
    d.gradient_scale = &norm.coefficient;
    d.averages = r->averages;
    d.average_count = r->job->config->averages;
    XD_TRY(xd_optimizer_step(r->optimizer, &d, NULL));
    if (xd_comm_rank(r->world) > 0) return XD_OK;
    r->job->out->norms[step] = norm.norm;
    r->job->out->losses[step] = r->job->config->together ? r->loss : 0.0;
    return XD_OK;
}

static xd_result train_step(rank *r, int step) {
    if (step + 1 == r->job->config->thaw) XD_TRY(thaw(r));
    r->step = step;
    read_batch(r, step);
    if (is_staged(r)) {
        XD_TRY(stages_step(r, step));
        XD_TRY(update(r, step));
        XD_TRY(stages_publish(r));
        return r->job->config->inference ? stages_infer(r, step) : XD_OK;
    }
    XD_TRY(train_leaves(r));
    XD_TRY(xd_parallel_reduce(r->parallel));
    XD_TRY(update(r, step));
    XD_TRY(xd_parallel_publish(r->parallel));
    return r->job->config->inference ? infer(r, step + 50) : XD_OK;
}

/* ---- the way on ---- */

static xd_checkpoint_network network(const rank *r, xd_checkpoint_average *averages) {
    static const char *const names[] = { "slow", "power" };
    xd_checkpoint_network n;
    memset(&n, 0, sizeof n);
    n.parts = r->parts;
    n.part_count = r->count;
    n.optimizer = r->optimizer;
    n.averages = averages;
    n.average_count = r->job->config->averages;
    for (int i = 0; i < n.average_count; i++) {
        averages[i].name = names[i];
        averages[i].ema = r->averages[i];
    }
    return n;
}

static xd_result save(const rank *r) {
    xd_checkpoint_average averages[COMPOSE_AVERAGES];
    const xd_checkpoint_network n = network(r, averages);
    xd_checkpoint_save_desc d;
    memset(&d, 0, sizeof d);
    d.root = r->job->directory;
    d.step = r->job->end;
    d.networks = &n;
    d.network_count = 1;
    d.overwrite = true;
    XD_TRY(xd_checkpoint_save(r->over, &d));
    return r->job->config->imports ? travel_out(r) : XD_OK;
}

/* *step: the one that the run goes on with, as the file says. */
static xd_result load(rank *r, int *step) {
    xd_checkpoint_report report;
    xd_checkpoint_average averages[COMPOSE_AVERAGES];
    const xd_checkpoint_network n = network(r, averages);
    xd_checkpoint_load_desc d;
    memset(&d, 0, sizeof d);
    d.root = r->job->directory;
    d.step = r->job->begin;
    d.networks = &n;
    d.network_count = 1;
    XD_TRY(xd_checkpoint_load(r->over, &d, &report, NULL));
    *step = (int)report.step;
    if (r->job->config->imports) XD_TRY(travel_in(r));
    return is_staged(r) ? stages_publish(r) : xd_parallel_publish(r->parallel);
}

/* Element `at` of what this rank has of part i, at its place in the whole. */
static xd_result keep_element(const rank *r, int64_t i, int64_t at, int64_t to) {
    compose_result *out = r->job->out;
    const xd_tensor_part *p = &r->parts[i];
    const xd_optimizer_state state = xd_optimizer_state_at(r->optimizer, i);
    const unsigned char *value = (const unsigned char *)p->data + (size_t)at * xd_dtype_size(p->dtype);
    if (state.exp_avg) out->first[to] = state.exp_avg[at];
    if (state.exp_avg_sq) out->second[to] = state.exp_avg_sq[at];
    for (int a = 0; a < r->job->config->averages; a++)
        out->averages[a][to] = ((const float *)xd_ema_view(r->averages[a], i).shadow.value)[at];
    if (!state.master) return xd_cast(r->home, out->values + to, XD_DTYPE_F32, value, p->dtype, 1);
    out->values[to] = state.master[at];
    return XD_OK;
}

/* What this rank counts. */
static xd_result keep(const rank *r) {
    int64_t begin = 0;
    for (int64_t i = 0; i < r->count; i++) {
        const xd_tensor_part *p = &r->parts[i];
        int64_t numel = 1;
        for (int d = 0; d < p->ndim; d++) numel *= p->shape[d];
        for (int64_t at = p->range.begin; at < p->range.end && !p->replica; at++)
            XD_TRY(keep_element(r, i, at - p->range.begin, begin + share_whole_place(p, at)));
        begin += numel;
    }
    if (xd_comm_rank(r->world) == 0) r->job->out->count = begin;
    return XD_OK;
}

static xd_result run_rank_steps(rank *r) {
    const job *j = r->job;
    XD_TRY(make_home(r));
    XD_TRY(groups_make(r));
    XD_TRY(make_share(r));
    XD_TRY(make_model(r));
    XD_TRY(make_queues(r));
    XD_TRY(make_wrapper(r));
    XD_TRY(make_buffers(r));
    XD_TRY(make_state(r));
    if (j->config->thaw > 0 && j->config->thaw <= j->begin)
        XD_TRY(thaw(r)); /* what is loaded has states of it */
    int step = j->begin;
    if (j->begin > 0) XD_TRY(load(r, &step));
    for (; step < j->end; step++) XD_TRY(train_step(r, step));
    return j->last ? keep(r) : save(r);
}

static xd_result run_rank(xd_comm *world, void *argument) {
    rank *r = (rank *)calloc(1, sizeof *r);
    r->job = (const job *)argument;
    r->world = world;
    r->ctx = xd_comm_ctx(world);
    const xd_result result = run_rank_steps(r);
    for (int i = 0; i < COMPOSE_AVERAGES; i++) xd_ema_destroy(r->averages[i]);
    xd_optimizer_destroy(r->optimizer);
    xd_parallel_destroy(r->parallel);
    stages_close(r);
    xd_queue_destroy(r->sends);
    xd_queue_destroy(r->experts.gathers);
    xd_queue_destroy(r->experts.reductions);
    xd_queue_destroy(r->gathers);
    xd_queue_destroy(r->reductions);
    toy_destroy(&r->toy);
    xd_vocab_destroy(r->vocab);
    share_destroy(r->share);
    if (r->self) xd_comm_destroy(r->self);
    groups_close(r);
    if (r->over != world) xd_comm_destroy(r->over);
    if (r->home != r->ctx) xd_ctx_destroy(r->home);
    free(r->storage);
    free(r->gradients);
    free(r->kept);
    free(r->logits);
    free(r->teacher);
    free(r);
    return result;
}

int compose_ranks(const compose_layout *l) {
    return l->ranks * l->pp * l->tp * l->cp;
}

/* ---- ranks that are processes ---- */

/* What rank `rank` of the world `name` does; whether all was well. Of several messages one that blames nobody else is kept. */
static bool run_process(const job *j, const xd_ctx_desc *settings, const xd_node_desc *node) {
    xd_ctx *ctx;
    xd_comm *world;
    if (xd_ctx_create(settings, &ctx) != XD_OK) return false;
    xd_result result = xd_comm_node(ctx, node, &world);
    if (result == XD_OK) result = run_rank(world, (void *)j);
    if (result == XD_OK) {
        xd_comm_destroy(world);
        xd_ctx_destroy(ctx);
        return true;
    }
    if (result != XD_ERROR_PEER || !j->out->message[0])
        snprintf(j->out->message, sizeof j->out->message, "%s", xd_last_error(ctx)->message);
    return false;
}

static bool run_processes(const job *j, const xd_ctx_desc *settings) {
    static int worlds;
    char name[64];
    pid_t processes[8];
    int status, ranks = compose_ranks(j->layout);
    bool well = true;
    snprintf(name, sizeof name, "compose-%ld-%d", (long)getpid(), worlds++);
    fflush(stdout);
    for (int r = 0; r < ranks; r++) {
        const xd_node_desc node = { .name = name, .rank = r, .size = ranks };
        processes[r] = fork();
        if (processes[r] == 0) _exit(!run_process(j, settings, &node));
    }
    for (int r = 0; r < ranks; r++)
        well = processes[r] > 0 && waitpid(processes[r], &status, 0) > 0 && status == 0 && well;
    if (!well && !j->out->message[0]) strcpy(j->out->message, "a process ended without a message");
    return well;
}

/* ---- parts and the whole ---- */

static bool run_part(const job *j) {
    xd_ctx_desc d;
    xd_error error;
    memset(&d, 0, sizeof d);
    d.reduction = XD_REDUCTION_INVARIANT;
    d.timeout_seconds = 60;
    if (j->layout->node) return run_processes(j, &d);
    if (xd_run_threads(compose_ranks(j->layout), &d, run_rank, (void *)j, &error) == XD_OK) return true;
    snprintf(j->out->message, sizeof j->out->message, "%s", error.message);
    return false;
}

/* Memory that processes share. */
static compose_result *shared_result(void) {
    static compose_result *memory;
    if (!memory)
        memory = (compose_result *)mmap(NULL, sizeof *memory, PROT_READ | PROT_WRITE,
                                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) abort();
    memset(memory, 0, sizeof *memory);
    return memory;
}

bool compose_run(const compose_config *config, const char *directory, compose_result *out) {
    const bool stops = config->stop > 0 && config->stop < config->steps;
    compose_result *shared = shared_result();
    const job first = { config, &config->layout, shared, directory, 0, stops ? config->stop : config->steps,
                        !stops };
    const job second = { config, &config->then, shared, directory, config->stop, config->steps, true };
    const bool well = run_part(&first) && (!stops || run_part(&second));
    *out = *shared;
    return well;
}

/* ---- comparison ---- */

const char *compose_compare(const compose_config *config, const compose_result *a, const compose_result *b) {
    if (a->count != b->count) return "the number of weights";
    if (memcmp(a->losses, b->losses, sizeof a->losses)) return "losses";
    if (memcmp(a->leaf_losses, b->leaf_losses, sizeof a->leaf_losses)) return "losses of leaves";
    if (memcmp(a->norms, b->norms, sizeof a->norms)) return "norms of gradients";
    if (memcmp(a->values, b->values, sizeof a->values)) return "weights";
    if (memcmp(a->first, b->first, sizeof a->first)) return "first moments";
    if (memcmp(a->second, b->second, sizeof a->second)) return "second moments";
    for (int i = 0; i < config->averages; i++)
        if (memcmp(a->averages[i], b->averages[i], sizeof a->averages[i])) return "averages";
    return NULL;
}
