/* cuda_poison.h - the calls of the poisoned-numbers table (helpers/poison.h) in memory of a device.
 *
 * A family builds its scene in host memory and calls the public function. Here the names of those functions lead to a
 * GpuCall, which copies the scene's block to the device, gives the function the same arguments with every pointer into the
 * block replaced by the one into the copy, and afterwards brings back the bytes that the device has changed. Structs that a
 * call reads stay on the host, as a caller's would: only the pointers in them change. Where some of what a call takes is host
 * memory (lists, results), a function below says which.
 *
 * Include it after xdistill.h and before the families. */
#ifndef XD_CUDA_POISON_H
#define XD_CUDA_POISON_H

#include "cuda_test.h"
#include "poison.h"

#include <memory>
#include <type_traits>

/* ---- a rank's block on its device ---- */

struct Mirror {
    poison_scene *scene;
    RankGpu gpu;
    Device device;
    std::vector<unsigned char> sent, back;
    std::vector<float> shadow; /* of xd_ema_view */
    /* The list of parameters that an optimizer or an average borrows, and its original. */
    xd_param params[2] = {};
    const xd_param *listed = nullptr;
    int64_t count = 0;

    explicit Mirror(poison_scene *s) : scene(s), gpu(s->world), device(s->block, POISON_BLOCK) {}

    bool holds(const void *at) const {
        const uintptr_t block = (uintptr_t)scene->block, address = (uintptr_t)at;
        return address >= block && address < block + POISON_BLOCK;
    }
    template <typename T> T *there(T *at) const {
        return holds(at) ? (T *)(void *)(device.base + ((uintptr_t)at - (uintptr_t)scene->block)) : at;
    }
    /* Every pointer in a struct. No number has the bits of an address of the block. */
    template <typename T> T moved(T value) const {
        for (size_t i = 0; i + sizeof(void *) <= sizeof value; i += sizeof(void *)) {
            unsigned char *at = (unsigned char *)&value + i;
            void *pointer;
            memcpy(&pointer, at, sizeof pointer);
            pointer = there(pointer);
            memcpy(at, &pointer, sizeof pointer);
        }
        return value;
    }
    /* The list stays on the host; its name may be anywhere. */
    const xd_param *list(const xd_param *from, int64_t n) {
        CHECK(n <= 2);
        listed = from, count = n;
        for (int64_t i = 0; i < n && i < 2; i++) params[i] = moved(from[i]);
        return params;
    }

    void send() {
        sent.assign(scene->block, scene->block + scene->used);
        CHECK(cudaMemcpy(device.base, sent.data(), sent.size(), cudaMemcpyHostToDevice) == cudaSuccess);
        if (listed) list(listed, count); /* gradients may move between steps */
    }
    /* Only what differs from what was sent: the call may have written host memory of the block, too. */
    void fetch() {
        back.resize(sent.size());
        CHECK(cudaStreamSynchronize(gpu.stream) == cudaSuccess);
        CHECK(cudaMemcpy(back.data(), device.base, back.size(), cudaMemcpyDeviceToHost) == cudaSuccess);
        for (size_t i = 0; i < back.size(); i++)
            if (back[i] != sent[i]) scene->block[i] = back[i];
    }
};

static thread_local Mirror *mirror; /* of this rank */

/* ---- a call with everything on the device ---- */

template <typename T, typename = void> struct Complete : std::false_type {};
template <typename T> struct Complete<T, decltype((void)sizeof(T))> : std::true_type {};

/* Whether an argument points to a struct that the call reads on the host; types that are not declared are objects. */
template <typename T> struct IsDesc : std::false_type {};
template <typename T> struct IsDesc<const T *> : std::integral_constant<bool, std::is_class<T>::value && Complete<T>::value> {};

/* An argument as the device has it: pointers, and structs by value. */
template <typename T, typename = void> struct Argument {
    T value;
    explicit Argument(T from) : value(mirror->moved(from)) {}
    T get() { return value; }
};
template <typename T> struct Argument<T, typename std::enable_if<IsDesc<T>::value>::type> {
    T from;
    typename std::remove_const<typename std::remove_pointer<T>::type>::type value;
    explicit Argument(T at) : from(at), value() {
        if (at) value = mirror->moved(*at);
    }
    T get() { return from ? &value : nullptr; }
};

template <typename... P> struct GpuCall {
    xd_result (*function)(P...);

    xd_result operator()(P... arguments) const {
        mirror->send();
        const xd_result result = function(Argument<P>(arguments).get()...);
        mirror->fetch();
        return result;
    }
};

template <typename... P> static GpuCall<P...> on_gpu(xd_result (*function)(P...)) {
    return GpuCall<P...>{ function };
}

/* The same around a call whose arguments the caller has moved itself. */
template <typename Call> static xd_result between(Call call) {
    mirror->send();
    const xd_result result = call();
    mirror->fetch();
    return result;
}

/* ---- calls that keep something on the host ---- */

/* Has no gradient of hidden states in INVARIANT mode. */
static inline xd_result gpu_head_loss(xd_ctx *ctx, const xd_head_loss_desc *desc, xd_loss_values *out) {
    xd_head_loss_desc d = *desc;
    if (xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT) memset(&d.hidden_gradient, 0, sizeof d.hidden_gradient);
    return on_gpu(xd_head_loss)(ctx, &d, out);
}

/* The sum is host memory. */
static inline xd_result gpu_kl_estimate(xd_ctx *ctx, const xd_kl_estimate_desc *desc, double *sum) {
    const xd_kl_estimate_desc d = mirror->moved(*desc);
    return between([&] { return xd_kl_estimate(ctx, &d, sum); });
}

/* On a device a refusal is part of the result; the table asks for that of the CPU, which leaves the result alone. */
template <typename T> static xd_result refuse(T *out) {
    memcpy(out, mirror->sent.data() + ((unsigned char *)out - mirror->scene->block), sizeof *out);
    return XD_ERROR_ARGUMENT;
}

static inline xd_result gpu_denominator_count(xd_ctx *ctx, xd_comm *comm, const xd_positions *batches, int64_t count,
                                              xd_denominator *out) {
    CHECK_EQ_INT(count, 1); /* the list is one struct here */
    const xd_result result = on_gpu(xd_denominator_count)(ctx, comm, batches, count, out);
    if (result != XD_OK || out->refused == 0) return result;
    CHECK(out->value == 0.0 && out->inverse == 0.0);
    return refuse(out);
}

static inline xd_result gpu_log_probs(xd_ctx *ctx, const xd_log_probs_desc *desc) {
    const xd_result result = on_gpu(xd_log_probs)(ctx, desc);
    return result == XD_OK && desc->accuracy && isnan(*desc->accuracy) ? refuse(desc->accuracy) : result;
}

/* The gradient is a struct on the host. */
static inline xd_result gpu_log_probs_backward(xd_ctx *ctx, const xd_log_probs_desc *desc,
                                               const xd_log_probs_gradient *gradient) {
    return on_gpu(xd_log_probs_backward)(ctx, desc, gradient);
}

/* Only logits and gradient are device memory, and in every second variant the scale. */
static inline xd_result gpu_xtoken_loss(xd_ctx *ctx, const xd_xtoken_desc *desc, xd_xtoken_values *out) {
    xd_xtoken_desc d = *desc;
    std::vector<xd_xtoken_teacher> teachers(desc->teachers, desc->teachers + desc->teacher_count);
    for (xd_xtoken_teacher &t : teachers) t.logits.data = mirror->there(t.logits.data);
    d.teachers = teachers.data();
    d.student.data = mirror->there(d.student.data);
    d.common.gradient.data = mirror->there(d.common.gradient.data);
    if (mirror->scene->variant % 2) d.common.scale = mirror->there(d.common.scale);
    return between([&] { return xd_xtoken_loss(ctx, &d, out); });
}

static inline xd_result gpu_uld_loss(xd_ctx *ctx, const xd_uld_desc *desc, xd_uld_values *out) {
    xd_uld_desc d = *desc;
    d.student.logits.data = mirror->there(d.student.logits.data);
    d.teacher.logits.data = mirror->there(d.teacher.logits.data);
    d.gradient.data = mirror->there(d.gradient.data);
    return between([&] { return xd_uld_loss(ctx, &d, out); });
}

/* Projections may be on the host or on the device: every second variant uploads it. */
template <typename Call> static xd_result with_projection(xd_ctx *ctx, const xdi_project_desc *desc, Call call) {
    xdi_project_desc d = *desc;
    xd_projection there = {};
    const bool upload = mirror->scene->variant % 2 != 0;
    if (upload) CHECK_EQ_INT(xd_projection_upload(ctx, desc->projection, &there), XD_OK);
    if (upload) d.projection = &there;
    const xd_result result = call(&d);
    if (upload) xd_projection_unload(ctx, &there);
    return result;
}

static inline xd_result gpu_project(xd_ctx *ctx, const xdi_project_desc *desc, xd_rows probs, double *out) {
    return with_projection(ctx, desc,
                           [&](const xdi_project_desc *d) { return on_gpu(xdi_project)(ctx, d, probs, out); });
}

static inline xd_result gpu_project_backward(xd_ctx *ctx, const xdi_project_desc *desc, const double *weight,
                                             xd_rows gradient) {
    return with_projection(ctx, desc, [&](const xdi_project_desc *d) {
        return on_gpu(xdi_project_backward)(ctx, d, weight, gradient);
    });
}

/* Ids and sizes of chunks are host memory. */
static inline xd_result gpu_chunk_sums(xd_ctx *ctx, const xdi_chunk_map *map, xd_rows values, double *sums,
                                       int64_t *sizes) {
    values.data = mirror->there(values.data);
    return between([&] { return xdi_chunk_sums(ctx, map, values, mirror->there(sums), sizes); });
}

static inline xd_result gpu_chunk_averages(xd_ctx *ctx, const double *sums, const int64_t *sizes, int64_t chunks,
                                           int64_t columns, double *averages) {
    return between([&] {
        return xdi_chunk_averages(ctx, mirror->there(sums), sizes, chunks, columns, mirror->there(averages));
    });
}

static inline xd_result gpu_chunk_averages_backward(xd_ctx *ctx, const xdi_chunk_map *map, const int64_t *sizes,
                                                    const double *weight, xd_rows gradient) {
    gradient.data = mirror->there(gradient.data);
    return between([&] {
        return xdi_chunk_averages_backward(ctx, map, sizes, mirror->there(weight), gradient);
    });
}

/* With values the ids are host memory. */
static inline xd_result gpu_vocab_topk_columns(xd_ctx *ctx, const xd_vocab_topk_desc *desc, int64_t *ids) {
    if (!desc->values.data) return on_gpu(xd_vocab_topk_columns)(ctx, desc, ids);
    const xd_vocab_topk_desc d = mirror->moved(*desc);
    return between([&] { return xd_vocab_topk_columns(ctx, &d, ids); });
}

/* The loss is host memory. */
static inline xd_result gpu_compat_jsd_of_probabilities(xd_ctx *ctx, xd_rows student, xd_rows teacher, double beta,
                                                        double denominator, xd_rows gradient, double *loss) {
    student.data = mirror->there(student.data);
    teacher.data = mirror->there(teacher.data);
    gradient.data = mirror->there(gradient.data);
    return between([&] {
        return xdi_compat_jsd_of_probabilities(ctx, student, teacher, beta, denominator, gradient, loss);
    });
}

/* ---- lists of parameters ---- */

static inline xd_result gpu_optimizer_create(xd_ctx *ctx, const xd_optimizer_desc *desc, xd_optimizer **out) {
    xd_optimizer_desc d = *desc;
    d.params = mirror->list(desc->params, desc->param_count);
    return between([&] { return xd_optimizer_create(ctx, &d, out); });
}

static inline xd_result gpu_ema_create(xd_ctx *ctx, const xd_ema_desc *desc, xd_ema **out) {
    xd_ema_desc d = *desc;
    d.params = mirror->list(desc->params, desc->param_count);
    return between([&] { return xd_ema_create(ctx, &d, out); });
}

static inline xd_result gpu_gradient_norm_compute(xd_ctx *ctx, xd_comm *comm, const xd_gradient_norm_desc *desc,
                                                  xd_gradient_norm *out) {
    xd_gradient_norm_desc d = mirror->moved(*desc);
    d.params = mirror->list(desc->params, desc->param_count);
    return between([&] { return xd_gradient_norm_compute(ctx, comm, &d, mirror->there(out)); });
}

static inline xd_result gpu_clip_gradients(xd_ctx *ctx, const xd_param *params, int64_t count, float coefficient) {
    const xd_param *list = mirror->list(params, count);
    return between([&] { return xd_clip_gradients(ctx, list, count, coefficient); });
}

/* These lists are not borrowed. */
static inline xd_result gpu_ema_load(xd_ema *ema, const xd_ema_load_desc *desc, xd_ema_match *match) {
    CHECK_EQ_INT(desc->source_count, 1);
    const xd_param source = mirror->moved(*desc->sources);
    xd_ema_load_desc d = *desc;
    d.sources = &source;
    return between([&] { return xd_ema_load(ema, &d, match); });
}

static inline xd_result gpu_ema_copy_to(const xd_ema *ema, const xd_param *targets, int64_t count, bool lenient,
                                        xd_ema_match *match) {
    CHECK_EQ_INT(count, 1);
    const xd_param target = mirror->moved(*targets);
    return between([&] { return xd_ema_copy_to(ema, &target, count, lenient, match); });
}

/* With the shadow on the host, until the next view. */
static inline xd_ema_entry gpu_ema_view(const xd_ema *ema, int64_t index) {
    xd_ema_entry view = xd_ema_view(ema, index);
    const size_t count = (size_t)view.shadow.count;
    mirror->shadow.resize(count);
    CHECK(cudaStreamSynchronize(mirror->gpu.stream) == cudaSuccess);
    CHECK(cudaMemcpy(mirror->shadow.data(), view.shadow.value, count * sizeof(float), cudaMemcpyDeviceToHost) ==
          cudaSuccess);
    view.shadow.value = mirror->shadow.data();
    return view;
}

/* ---- the names: helpers that are included after this call these too ---- */

#define xd_log_probs gpu_log_probs
#define xd_log_probs_backward gpu_log_probs_backward
#define xdi_chunk_averages gpu_chunk_averages
#define xdi_chunk_averages_backward gpu_chunk_averages_backward
#define xdi_chunk_sums gpu_chunk_sums
#define xd_clip_gradients gpu_clip_gradients
#define xdi_compat_jsd_of_probabilities gpu_compat_jsd_of_probabilities
#define xd_denominator_count gpu_denominator_count
#define xd_ema_copy_to gpu_ema_copy_to
#define xd_ema_create gpu_ema_create
#define xd_ema_load gpu_ema_load
#define xd_ema_update on_gpu(xd_ema_update)
#define xd_ema_view gpu_ema_view
#define xd_gradient_norm_compute gpu_gradient_norm_compute
#define xd_head_loss gpu_head_loss
#define xd_kl_estimate gpu_kl_estimate
#define xd_loss on_gpu(xd_loss)
#define xd_optimizer_create gpu_optimizer_create
#define xd_optimizer_step on_gpu(xd_optimizer_step)
#define xdi_project gpu_project
#define xdi_project_backward gpu_project_backward
#define xd_topk_kl_loss on_gpu(xd_topk_kl_loss)
#define xd_uld_loss gpu_uld_loss
#define xd_vocab_topk on_gpu(xd_vocab_topk)
#define xd_vocab_topk_columns gpu_vocab_topk_columns
#define xd_xtoken_loss gpu_xtoken_loss

/* The families that run here; and those that do not, with the reason. */
static const char *const gpu_families[] = {
    "xd_log_probs of accuracy",
    "xdi_chunk_averages",
    "xdi_chunk_averages_backward",
    "xdi_chunk_sums",
    "xd_clip_gradients",
    "xdi_compat_jsd_of_probabilities",
    "xd_loss of cosine",
    "xd_denominator_count",
    "xd_ema_copy_to",
    "xd_ema_load",
    "xd_ema_update",
    "xd_log_probs of logits",
    "xd_gradient_norm_compute",
    "xd_head_loss",
    "xd_kl_estimate",
    "xd_log_probs of all",
    "xd_log_probs_backward of all",
    "xd_loss",
    "xd_loss of MFT",
    "xd_optimizer_set_learning_rate",
    "xd_optimizer_step",
    "xdi_project",
    "xdi_project_backward",
    "xd_log_probs",
    "xd_log_probs at ids",
    "xd_log_probs_backward",
    "xd_topk_kl_loss",
    "xd_uld_loss",
    "xd_vocab_topk",
    "xd_vocab_topk_columns",
    "xd_vocab_topk_columns of values",
    "xd_xtoken_loss",
};

static const char *const gpu_excused[][2] = {
    { "xd_votes_add", "votes are counted on the host" },
    { "xdi_projection_from_cells", "makes a projection in host memory" },
    { "xd_projection_from_rows", "makes a projection in host memory" },
    { "xdi_projection_rows_cut", "makes rows in host memory" },
    { "xd_exact_map_create", "makes a map in host memory" },
    { "xdi_projection_rows_from_similarities", "reads and makes host memory" },
    { "xdi_projection_rows_from_embeddings", "reads and makes host memory" },
    { "xdi_special_pairs", "compares texts on the host" },
    { "xd_projection_to_rows", "reads and makes host memory" },
    { "xd_projection_save", "writes host memory to a file" },
    { "xd_projection_load", "reads a file into host memory" },
    { "xd_teacher_cache_writer_create", "a context of a GPU is refused" },
    { "xd_teacher_cache_writer_append", "a context of a GPU is refused" },
    { "xd_teacher_cache_open", "reads a file in host memory" },
};

/* ---- the back end ---- */

static inline bool gpu_serves(const poison_family *family) {
    for (const char *name : gpu_families)
        if (!strcmp(name, family->name)) return true;
    return false;
}

static inline bool gpu_excuses(const poison_family *family) {
    for (const auto &excused : gpu_excused)
        if (!strcmp(excused[0], family->name)) return true;
    return false;
}

static inline void gpu_begin(poison_scene *s) {
    mirror = new Mirror(s);
}

static inline void gpu_end(poison_scene *) {
    delete mirror;
    mirror = nullptr;
}

/* A loss whose findings only the device knows has to have a status for them. */
static inline poison_verdict gpu_expect(const poison_scene *s, bool reported, poison_verdict verdict) {
    static const char *const silent[] = { "xd_loss", "xd_loss of MFT", "xd_loss of cosine", "xd_head_loss",
                                          "xd_topk_kl_loss" };
    for (const char *name : silent)
        if (!strcmp(name, s->family->name) && !reported) return POISON_REFUSED;
    return verdict;
}

static const poison_backend gpu_backend = { "a GPU", gpu_serves, gpu_begin, gpu_end, gpu_expect };

#endif
