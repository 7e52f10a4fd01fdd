/* The kernel table of a CPU level, that of a context, which is created with it, and the functions that call it. */

#include "kernel/simd/internal.h"
#include "kernel/wings.h"

#include <string.h>

static xd_result xdi_cpu_copy(const xd_launch *launch, void *to, const void *from, size_t bytes,
                              xd_copy_kind kind) {
    (void)launch, (void)kind;
    xdi_copy_bytes(to, from, bytes);
    return XD_OK;
}

static xd_result xdi_cpu_fill(const xd_launch *launch, void *to, uint8_t value, size_t bytes) {
    (void)launch;
    xdi_fill_bytes(to, value, bytes);
    return XD_OK;
}

static xd_result xdi_cpu_synchronize(const xd_launch *launch) {
    (void)launch;
    return XD_OK;
}

static xd_result xdi_cpu_copies(const xd_launch *launch, const xd_copy *copies, int64_t count,
                                const void *src, void *dst, size_t size) {
    (void)launch;
    for (int64_t i = 0; i < count; i++) xdi_copy_run(&copies[i], src, dst, size);
    return XD_OK;
}

static bool xdi_cpu_owns(xd_ctx *ctx, const void *memory) {
    (void)ctx, (void)memory;
    return true;
}

static void *xdi_cpu_event_create(xd_ctx *ctx) {
    (void)ctx;
    return NULL;
}

static void xdi_cpu_event_destroy(void *event) {
    (void)event;
}

static xd_result xdi_cpu_event_pass(const xd_launch *launch, void *event) {
    (void)launch, (void)event;
    return XD_OK;
}

static xd_result xdi_cpu_call(const xd_launch *launch, void (*function)(void *user), void *user) {
    (void)launch;
    function(user);
    return XD_OK;
}

static void *xdi_cpu_share_create(xd_ctx *ctx, size_t bytes, xd_device_handle *handle) {
    (void)ctx, (void)bytes, (void)handle;
    return NULL;
}

static void *xdi_cpu_share_open(xd_ctx *ctx, const xd_device_handle *handle) {
    (void)ctx, (void)handle;
    return NULL;
}

static void xdi_cpu_share_end(xd_ctx *ctx, void *memory) {
    (void)ctx, (void)memory;
}

static void *xdi_cpu_stream_create(xd_ctx *ctx) {
    (void)ctx;
    return NULL;
}

/* The table of a level, the plain one where the machine or the build lacks it. A level overrides some entries and has the others
 * from the level below. */
static void xdi_kernels_cpu(xd_cpu_level level, xd_kernels *kernels) {
    if (level == XD_CPU_BEST) level = xd_cpu_best();
    if (!xd_cpu_supports(level)) level = XD_CPU_PLAIN;
    memset(kernels, 0, sizeof *kernels);
    kernels->name = xd_cpu_level_name(level);
    kernels->device = XD_DEVICE_CPU;
    kernels->memory.allocate = xd_allocate;
    kernels->memory.release = xd_release;
    kernels->memory.copy = xdi_cpu_copy;
    kernels->memory.fill = xdi_cpu_fill;
    kernels->memory.synchronize = xdi_cpu_synchronize;
    kernels->memory.owns = xdi_cpu_owns;
    kernels->memory.event_create = xdi_cpu_event_create;
    kernels->memory.event_destroy = xdi_cpu_event_destroy;
    kernels->memory.event_record = xdi_cpu_event_pass;
    kernels->memory.event_wait = xdi_cpu_event_pass;
    kernels->memory.call = xdi_cpu_call;
    kernels->memory.share_create = xdi_cpu_share_create;
    kernels->memory.share_destroy = xdi_cpu_share_end;
    kernels->memory.share_open = xdi_cpu_share_open;
    kernels->memory.share_close = xdi_cpu_share_end;
    kernels->memory.stream_create = xdi_cpu_stream_create;
    kernels->memory.stream_destroy = xdi_cpu_share_end;
    kernels->memory.host_allocate = xd_allocate;
    kernels->memory.host_release = xd_release;
    kernels->rows = *xdi_row_kernels_cpu();
    kernels->softmax = *xdi_softmax_kernels_cpu();
    kernels->loss = *xdi_loss_kernels_cpu_plain();
    kernels->topk = *xdi_topk_kernels_cpu();
    kernels->mft = *xdi_mft_kernels_cpu();
    kernels->reduce = *xdi_reduce_kernels_cpu();
    if (level != XD_CPU_PLAIN) {
        xdi_simd_loss_fill(&kernels->loss);
        xdi_simd_topk_fill(&kernels->topk);
        xdi_simd_mft_fill(&kernels->mft);
        xdi_simd_rows_fill(&kernels->rows, &kernels->softmax);
        xdi_simd_reduce_fill(&kernels->reduce);
    } else {
        xdi_simd_loss_fill_plain(&kernels->loss);
    }
    kernels->optimizer = *xdi_optimizer_kernels_level(level);
    kernels->clip = xdi_clip_cpu;
    kernels->copies = xdi_cpu_copies;
    kernels->matmul = xdi_matmul_cpu;
    kernels->fill = xdi_fill_cpu;
    kernels->estimate = xdi_cpu_estimate;
#ifndef XDISTILL_NO_ACROSS
    xdi_kernels_across(level, kernels);
#endif
#ifndef XDISTILL_NO_DIFFUSION
    xdi_kernels_diffusion(level, kernels);
#endif
}

XD_API xd_result xd_ctx_create_versioned(int version, const xd_ctx_desc *desc, xd_ctx **out) {
    XDI_GIVEN(NULL, out);
    XD_TRY(xdi_ctx_check_version(version, desc));
    XD_TRY(xdi_ctx_make(desc, sizeof(xd_kernels), out));
    xdi_kernels_cpu(xd_ctx_settings(*out)->cpu, (xd_kernels *)xdi_ctx_room(*out));
    return XD_OK;
}

XD_API void xd_ctx_set_cpu(xd_ctx *ctx, xd_cpu_level level) {
    xdi_ctx_set_level(ctx, level);
    xdi_kernels_cpu(level, (xd_kernels *)xdi_ctx_room(ctx));
}

XD_API const xd_kernels *xd_ctx_host_kernels(const xd_ctx *ctx) {
    return (const xd_kernels *)xdi_ctx_room(ctx);
}

XD_API const xd_kernels *xd_ctx_kernels(const xd_ctx *ctx) {
    const xd_kernels *kernels = xd_ctx_settings(ctx)->kernels;
    return kernels ? kernels : xd_ctx_host_kernels(ctx);
}

XD_API uint32_t xd_ctx_products(const xd_ctx *ctx) {
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    if (kernels->device == XD_DEVICE_CPU) return 0;
    if (xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT) return 1;
    return kernels->products.library ? kernels->products.library : 1;
}

XD_API void xd_ctx_meet_products(xd_ctx *ctx, int rank, uint32_t theirs) {
    const uint32_t mine = xd_ctx_products(ctx);
    if (theirs == 0 || mine <= 1 || theirs == mine) return;
    if (theirs == 1)
        xd_log(ctx, XD_LOG_WARN,
               "rank %d has its own matrix products, this rank those of a library (version %lu): all take "
               "their own",
               rank, (unsigned long)mine);
    else
        xd_log(
            ctx, XD_LOG_WARN,
            "rank %d has version %lu of the library for matrix products, this rank %lu: all take their own",
            rank, (unsigned long)theirs, (unsigned long)mine);
    xd_ctx_kernels(ctx)->products.own(ctx);
}

XD_PRIVATE xd_memory_bytes xdi_memory_of(const xd_ctx *ctx, size_t host, size_t device) {
    xd_memory_bytes bytes = { host, device };
    if (xd_ctx_kernels(ctx)->device != XD_DEVICE_CPU) return bytes;
    bytes.host = device > SIZE_MAX - host ? SIZE_MAX : host + device;
    bytes.device = 0;
    return bytes;
}

XD_PRIVATE xd_result xdi_plan_take(xd_ctx *ctx, size_t host, size_t device) {
    return xdi_plan_add(ctx, xdi_memory_of(ctx, host, device));
}

XD_API xd_launch xd_ctx_launch(xd_ctx *ctx) {
    xd_launch launch;
    memset(&launch, 0, sizeof launch);
    launch.ctx = ctx;
    launch.stream = xd_ctx_settings(ctx)->stream;
    return launch;
}

XD_API xd_result xd_read(xd_ctx *ctx, void *to, const void *from, size_t bytes) {
    XDI_GIVEN(ctx, ctx);
    XDI_GIVEN_LIST(ctx, to, bytes);
    XDI_GIVEN_LIST(ctx, from, bytes);
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    const xd_launch launch = xd_ctx_launch(ctx);
    /* This wait has a deadline. A copy to ordinary memory waits inside of CUDA, where there is none. */
    XD_TRY(memory->synchronize(&launch));
    XD_TRY(memory->copy(&launch, to, from, bytes, XD_COPY_TO_HOST));
    return memory->synchronize(&launch);
}

XD_API xd_rows xd_rows_of(const void *data, xd_dtype dtype, int64_t rows, int64_t columns) {
    const xd_rows out = { (void *)(uintptr_t)data, dtype, rows, columns, columns };
    return out;
}

XD_API xd_ids xd_ids_of(const void *data, xd_dtype dtype) {
    const xd_ids out = { data, dtype };
    return out;
}

/* Whether a cast preserves values: floats to integers are refused, since there is no single right rounding. */
static bool xdi_cast_keeps(xd_dtype to, xd_dtype from) {
    return xd_dtype_is_floating(to) ||
           (!xd_dtype_is_floating(from) && xd_dtype_size(to) >= xd_dtype_size(from));
}

XD_API xd_result xd_cast(xd_ctx *ctx, void *to, xd_dtype to_dtype, const void *from, xd_dtype from_dtype,
                         int64_t count) {
    XDI_GIVEN(ctx, ctx);
    XDI_GIVEN_LIST(ctx, to, count);
    XDI_GIVEN_LIST(ctx, from, count);
    const xd_launch launch = xd_ctx_launch(ctx);
    const xd_cast_array array = { to, from, count, to_dtype, from_dtype };
    XD_REQUIRE(ctx, count >= 0, XD_ERROR_ARGUMENT, "%lld elements to convert", (long long)count);
    XD_REQUIRE(ctx, xdi_cast_keeps(to_dtype, from_dtype), XD_ERROR_DTYPE,
               "cannot convert %s to %s without loss", xd_dtype_name(from_dtype), xd_dtype_name(to_dtype));
    return xd_ctx_kernels(ctx)->optimizer.cast(&launch, &array, 1);
}

XD_API xd_result xd_reduce_pieces(xd_ctx *ctx, void *out, const void *const *pieces, int ranks, int64_t count,
                                  xd_dtype dtype, xd_reduce_op op) {
    const xd_launch launch = xd_ctx_launch(ctx);
    XD_REQUIRE(ctx, xd_reduce_supports(dtype, op), XD_ERROR_DTYPE, "%s has no %s", xd_dtype_name(dtype),
               op == XD_AVG ? "average" : "arithmetic");
    return xd_ctx_kernels(ctx)->reduce.pieces(&launch, out, pieces, ranks, count, dtype, op);
}

XD_API xd_result xd_reduce_leaves(xd_ctx *ctx, void *out, const void *const *forests, const xd_leaves *leaves,
                                  int ranks, int64_t stride, int64_t count, xd_dtype dtype, xd_reduce_op op) {
    const xd_launch launch = xd_ctx_launch(ctx);
    XD_REQUIRE(
        ctx, dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_F64, XD_ERROR_DTYPE,
        "a sum over leaves is F32 or F64, not %s: rounding a node would make its bits depend on the ranks",
        xd_dtype_name(dtype));
    XD_REQUIRE(ctx, op == XD_SUM || op == XD_AVG, XD_ERROR_ARGUMENT,
               "leaves go with SUM and AVG, not operation %d", (int)op);
    return xd_ctx_kernels(ctx)->reduce.leaves(&launch, out, forests, leaves, ranks, stride, count, dtype, op);
}

XD_PRIVATE xd_result xdi_rows_elect(const xd_launch *launch, const xd_rows *logits, const uint8_t *mask,
                                    int64_t columns, uint8_t *voters, float *maxima) {
    const xd_row_kernels *rows = &xd_ctx_kernels(launch->ctx)->rows;
    bool finite = false;
    if (rows->finite_maxima) XD_TRY(rows->finite_maxima(launch, logits, mask, columns, maxima, &finite));
    for (int64_t r = 0; finite && r < logits->rows; r++) voters[r] = (uint8_t)(!mask || mask[r]);
    if (finite) return XD_OK;
    XD_TRY(rows->voters(launch, logits, mask, columns, voters));
    return rows->column_maxima(launch, logits, voters, columns, maxima);
}

XD_PRIVATE void *xdi_locked_take(xd_ctx *ctx, size_t bytes) {
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    if (kernels->device == XD_DEVICE_CPU || !kernels->memory.host_allocate) return NULL;
    void *memory = kernels->memory.host_allocate(ctx, bytes);
    if (!memory)
        xd_log(ctx, XD_LOG_WARN, "no %llu bytes of page-locked memory: copies take pageable memory instead",
               (unsigned long long)bytes);
    return memory;
}

XD_PRIVATE void xdi_locked_give(xd_ctx *ctx, void *memory) {
    if (memory) xd_ctx_kernels(ctx)->memory.host_release(ctx, memory);
}

XD_PRIVATE void *xdi_device_allocate(xd_ctx *ctx, size_t bytes) {
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    return memory->allocate == xd_allocate ? xdi_allocate_unwritten(ctx, bytes)
                                           : memory->allocate(ctx, bytes);
}

XD_PRIVATE xd_result xdi_copy_fresh(xd_ctx *ctx, void *to, const void *from, size_t bytes) {
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    const xd_launch launch = xd_ctx_launch(ctx);
    const size_t most = kernels->device == XD_DEVICE_CPU ? (size_t)2 << 20 : bytes;
    for (size_t at = 0; at < bytes; at += most)
        XD_TRY(kernels->memory.copy(&launch, (unsigned char *)to + at, (const unsigned char *)from + at,
                                    bytes - at < most ? bytes - at : most, XD_COPY_ON_DEVICE));
    return XD_OK;
}

/* What is given back last first, or together with what was taken after it. */
enum { XDI_ROOM_ALIGN = 256 };

static void *xdi_call_room_take(xdi_call_room *room, size_t bytes) {
    const size_t at = (room->used + XDI_ROOM_ALIGN - 1) / XDI_ROOM_ALIGN * XDI_ROOM_ALIGN;
    if (at > room->bytes || room->bytes - at < bytes) return NULL;
    room->used = at + bytes;
    return room->base + at;
}

static void xdi_call_room_give(xdi_call_room *room, const void *memory) {
    const size_t at = memory ? (size_t)((const unsigned char *)memory - room->base) : room->used;
    if (at < room->used) room->used = at;
}

XD_PRIVATE void xdi_call_room_open(xd_ctx *ctx, void *workspace, size_t bytes) {
    const xdi_call_room room = { (unsigned char *)workspace, bytes, 0 };
    *xdi_ctx_call_room(ctx) = room;
}

XD_PRIVATE void *xdi_call_memory(xd_ctx *ctx, size_t bytes) {
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    if (xdi_ctx_call_room(ctx)->base) return xdi_call_room_take(xdi_ctx_call_room(ctx), bytes);
    if (kernels->device == XD_DEVICE_CPU) return xdi_scratch_take(ctx, bytes);
    return kernels->memory.allocate(ctx, bytes);
}

XD_PRIVATE void *xdi_call_array(xd_ctx *ctx, int64_t rows, int64_t columns, size_t size) {
    size_t bytes = 0;
    if (rows < 0 || columns < 0 || !xdi_size_multiply((size_t)rows, (size_t)columns, &bytes)) return NULL;
    if (!xdi_size_multiply(bytes, size, &bytes) || bytes > SIZE_MAX / 2 - size) return NULL;
    return xdi_call_memory(ctx, bytes + size);
}

XD_PRIVATE void xdi_call_memory_done(xd_ctx *ctx, void *memory) {
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    if (xdi_ctx_call_room(ctx)->base)
        xdi_call_room_give(xdi_ctx_call_room(ctx), memory);
    else if (kernels->device == XD_DEVICE_CPU)
        xdi_scratch_give(ctx, memory);
    else
        kernels->memory.release(ctx, memory);
}

static bool xdi_matmul_takes(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_BF16;
}

static xd_result xdi_matmul_validate(xd_ctx *ctx, const xd_matmul_args *p) {
    XD_REQUIRE(ctx, p->a.cols == p->b.rows, XD_ERROR_ARGUMENT,
               "a matrix of %lld columns times one of %lld rows", (long long)p->a.cols, (long long)p->b.rows);
    XD_REQUIRE(ctx, p->a.rows >= 0 && p->a.cols >= 0 && p->b.cols >= 0, XD_ERROR_ARGUMENT,
               "a product of %lld x %lld x %lld elements", (long long)p->a.rows, (long long)p->a.cols,
               (long long)p->b.cols);
    XD_REQUIRE(ctx, p->out_stride >= p->b.cols, XD_ERROR_ARGUMENT,
               "rows of the product are %lld elements apart and %lld long", (long long)p->out_stride,
               (long long)p->b.cols);
    XD_REQUIRE(ctx, xdi_matmul_takes(p->a.dtype) && xdi_matmul_takes(p->b.dtype), XD_ERROR_DTYPE,
               "a product of %s and %s: F32 or BF16 is needed", xd_dtype_name(p->a.dtype),
               xd_dtype_name(p->b.dtype));
    const bool narrow =
        p->out_dtype == XD_DTYPE_BF16 && !p->accumulate && xd_ctx_kernels(ctx)->products.narrow;
    XD_REQUIRE(ctx, !p->out_dtype || p->out_dtype == XD_DTYPE_F32 || narrow, XD_ERROR_DTYPE,
               "a product into %s: F32 is needed, or BF16 on a GPU without accumulate",
               xd_dtype_name(p->out_dtype));
    return XD_OK;
}

XD_API xd_result xd_matmul(xd_ctx *ctx, const xd_matmul_args *args, void *workspace) {
    void *owned = NULL;
    xd_launch launch;
    XD_TRY(xdi_matmul_validate(ctx, args));
    if (!workspace) workspace = owned = xd_allocate(ctx, XD_MATMUL_WORKSPACE_BYTES);
    XD_REQUIRE(ctx, workspace, XD_ERROR_MEMORY, "no room for a workspace of %zu bytes",
               XD_MATMUL_WORKSPACE_BYTES);
    memset(&launch, 0, sizeof launch);
    launch.ctx = ctx;
    launch.stream = xd_ctx_settings(ctx)->stream;
    launch.workspace = workspace;
    launch.workspace_bytes = XD_MATMUL_WORKSPACE_BYTES;
    const xd_result result = xd_ctx_kernels(ctx)->matmul(&launch, args);
    xd_release(ctx, owned);
    return result;
}
