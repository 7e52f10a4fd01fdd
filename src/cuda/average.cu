/* Averages, and what else moves arrays element by element: casts, copies at a rate, exchanges. The formulas are in
 * kernel/optimizer_scalar.h, and the bits are the same as on a CPU. All of them move bytes and compute little: 16-byte accesses,
 * each array read and written once. An f32 average of bf16 parameters takes 10 bytes an element; beside others in a step 8, and
 * 2 once for all of them. Grid: blocks of 256 threads, each block a chunk at a time. Averages retain their list on the device. */

static bool xdi_cuda_is_narrow_float(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F16;
}

static bool xdi_cuda_is_float(xd_dtype dtype) {
    return xdi_cuda_is_narrow_float(dtype) || dtype == XD_DTYPE_F64;
}

/* ---- one element ---- */

struct xdi_cuda_lerp_options {
    const xd_average_turn *turn; /* nullptr: what follows is known */
    double keep_f64;
    float weight, keep;
    bool weighted_sum, copies;
};

/* The value as a narrow dtype would hold it, widened again. */
static __device__ inline float xdi_cuda_as_stored(float value, int dtype) {
    if (dtype == XD_DTYPE_BF16) {
        xdi_cuda_bf16 narrow;
        xdi_cuda_narrow(value, &narrow);
        return xdi_cuda_widen(narrow);
    }
    if (dtype == XD_DTYPE_F16) {
        xdi_cuda_f16 narrow;
        xdi_cuda_narrow(value, &narrow);
        return xdi_cuda_widen(narrow);
    }
    return value;
}

/* Rounds an element at random, to a value that the narrow dtype holds. */
static __device__ inline float xdi_cuda_round(const xd_philox &random, int64_t element, float p) {
    uint32_t words[4];
    xd_philox_words(&random, element / XD_ROUNDED_PER_BLOCK, words);
    return xd_bits_from_bf16(xd_round_to_bf16(p, xd_round_bits(words, element)));
}

static __host__ __device__ inline void xdi_cuda_lerp_set(xdi_cuda_lerp_options *o, double keep) {
    o->keep_f64 = keep;
    o->weight = (float)xd_sub(1.0, keep);
    o->keep = (float)keep;
}

/* What the device has counted, of an average that it counts; false when this update does nothing. A copy is the sum of all of the
 * source and nothing of the target, which is then taken for a negative zero: that changes no sum, not the sign of a zero either. */
static __device__ inline bool xdi_cuda_lerp_take(xdi_cuda_lerp_options *o) {
    if (o->turn == nullptr) return true;
    if (xd_status_refuses(&o->turn->rests)) return false;
    o->copies = o->turn->copies != 0;
    o->weighted_sum = o->weighted_sum || o->copies;
    xdi_cuda_lerp_set(o, o->copies ? 0.0 : o->turn->keep);
    return true;
}

static __device__ inline void xdi_cuda_lerp_element(const xdi_cuda_lerp_options &o, void *target, int dtype,
                                                    int64_t i, double source) {
    if (dtype == XD_DTYPE_F64) {
        double *at = static_cast<double *>(target) + i;
        *at = xd_lerp_f64(o.keep_f64, o.weighted_sum, o.copies ? -0.0 : *at, source);
    } else {
        const float rounded = xdi_cuda_as_stored((float)source, dtype);
        const float before = o.copies ? -0.0f : xdi_cuda_read_float(target, dtype, i);
        xdi_cuda_write_float(target, dtype, i,
                             xd_lerp_f32(o.weight, o.keep, o.weighted_sum, before, rounded));
    }
}

/* Eight at an aligned address; neither side is F64. */
static __device__ inline void xdi_cuda_lerp8(const xdi_cuda_lerp_options &o, void *target, int dtype,
                                             int64_t i, const float (&source)[8]) {
    float values[8];
    xdi_cuda_read8(target, dtype, i, values);
    XD_UNROLL
    for (int j = 0; j < 8; j++)
        values[j] = xd_lerp_f32(o.weight, o.keep, o.weighted_sum, o.copies ? -0.0f : values[j],
                                xdi_cuda_as_stored(source[j], dtype));
    xdi_cuda_write8(target, dtype, i, values);
}

/* Four of a target, from those before. */
static __device__ inline xdi_cuda_four xdi_cuda_lerp4(const xdi_cuda_lerp_options &o, const xdi_cuda_four &target, int dtype,
                                                      const float (&source)[4]) {
    float values[4], rounded[4];
    xdi_cuda_widen4(target, dtype, values);
    memcpy(rounded, source, sizeof rounded);
    if (dtype != XD_DTYPE_F32) xdi_cuda_widen4(xdi_cuda_narrow4(source, dtype), dtype, rounded);
    XD_UNROLL
    for (int j = 0; j < 4; j++)
        values[j] = xd_lerp_f32(o.weight, o.keep, o.weighted_sum, o.copies ? -0.0f : values[j], rounded[j]);
    return xdi_cuda_narrow4(values, dtype);
}

static xdi_cuda_lerp_options xdi_cuda_lerp_options_of(double keep, bool weighted_sum, const xd_average_turn *turn) {
    xdi_cuda_lerp_options options = {};
    options.turn = turn;
    xdi_cuda_lerp_set(&options, keep);
    options.weighted_sum = weighted_sum;
    return options;
}

/* ---- counters of averages ---- */

/* One block. */
static __global__ void xdi_cuda_turn_kernel(const xd_turn_args args, const xd_status *status) {
    xd_average_turn *turn = args.turn;
    if (args.begins) {
        for (int k = (int)threadIdx.x; k < (int)XD_AVERAGE_KEEPS; k += (int)blockDim.x) turn->known[k] = -1;
        __syncthreads();
    }
    if (threadIdx.x != 0) return;
    if (args.begins) {
        turn->rests = xd_status();
        turn->copies = 0;
        turn->keep = 0.0;
        turn->iteration = args.last;
        turn->initialized = args.initialized ? 1 : 0;
    }
    xd_average_take_turn(&args, status);
}

static xd_result xdi_cuda_turn(const xd_launch *launch, const xd_turn_args *args) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_THREADS), xdi_cuda_turn_kernel, *args,
                           (const xd_status *)launch->status);
}

/* ---- lerp and cast ---- */

struct xdi_cuda_pair {
    void *target;
    const void *source;
    int64_t count;
    uint8_t target_dtype, source_dtype, wide, unused[5];
};

static __global__ void __launch_bounds__(XDI_CUDA_THREADS, 4)
    xdi_cuda_lerp_kernel(const __grid_constant__ xdi_cuda_kept<xdi_cuda_pair> list,
                         const __grid_constant__ xdi_cuda_lerp_options options, const xd_status *status) {
    if (xd_status_refuses(status)) return;
    xdi_cuda_lerp_options now = options;
    if (!xdi_cuda_lerp_take(&now)) return;
    xdi_cuda_each_kept(list, [&](int, const xdi_cuda_pair &a, xdi_cuda_span span) {
        xdi_cuda_walk4(
            span, a.wide != 0,
            [&](const int64_t (&at)[XDI_CUDA_FOURS]) {
                xdi_cuda_four source[XDI_CUDA_FOURS], target[XDI_CUDA_FOURS];
                XD_UNROLL
                for (int q = 0; q < XDI_CUDA_FOURS; q++) source[q] = xdi_cuda_ask4(a.source, a.source_dtype, at[q]);
                XD_UNROLL
                for (int q = 0; q < XDI_CUDA_FOURS; q++) target[q] = xdi_cuda_ask4(a.target, a.target_dtype, at[q]);
                XD_UNROLL
                for (int q = 0; q < XDI_CUDA_FOURS; q++) {
                    float values[4];
                    xdi_cuda_widen4(source[q], a.source_dtype, values);
                    xdi_cuda_put4(a.target, a.target_dtype, at[q],
                                  xdi_cuda_lerp4(now, target[q], a.target_dtype, values));
                }
            },
            [&](int64_t i) {
                xdi_cuda_lerp_element(now, a.target, a.target_dtype, i,
                                      xd_element_load(a.source, (xd_dtype)a.source_dtype, i));
            });
    });
}

static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_cast_kernel(const __grid_constant__ xdi_cuda_list<xdi_cuda_pair> list, const xd_status *status) {
    if (xd_status_refuses(status)) return;
    xdi_cuda_each_chunk(list, [&](const xdi_cuda_pair &a, xdi_cuda_span span) {
        xdi_cuda_walk(
            span, a.wide != 0,
            [&](int64_t i) {
                float values[8];
                xdi_cuda_read8(a.source, a.source_dtype, i, values);
                xdi_cuda_write8(a.target, a.target_dtype, i, values);
            },
            [&](int64_t i) {
                xd_element_store(a.target, (xd_dtype)a.target_dtype, i,
                                   xd_element_load(a.source, (xd_dtype)a.source_dtype, i));
            });
    });
}

static xdi_cuda_pair xdi_cuda_pair_of(void *target, xd_dtype target_dtype, const void *source,
                                      xd_dtype source_dtype, int64_t count) {
    xdi_cuda_pair pair;
    memset(&pair, 0, sizeof pair);
    pair.target = target;
    pair.source = source;
    pair.count = count;
    pair.target_dtype = (uint8_t)target_dtype;
    pair.source_dtype = (uint8_t)source_dtype;
    pair.wide = xdi_cuda_is_narrow_float(target_dtype) && xdi_cuda_is_narrow_float(source_dtype) &&
                xdi_cuda_is_aligned16(target) && xdi_cuda_is_aligned16(source);
    return pair;
}

static xd_result xdi_cuda_lerp(const xd_launch *launch, const xd_lerp_args *args) {
    const bool current = xdi_cuda_list_is_current(args->list, args->same, args->array_count);
    for (int64_t k = 0; k < args->array_count && !current; k++) {
        const xd_lerp_array *a = &args->arrays[k];
        XD_REQUIRE(launch->ctx, xdi_cuda_is_float(a->target_dtype) && xdi_cuda_is_float(a->source_dtype),
                    XD_ERROR_DTYPE, "array %lld: cannot average %s into %s", (long long)k,
                    xd_dtype_name(a->source_dtype), xd_dtype_name(a->target_dtype));
    }
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const xdi_cuda_lerp_options options = xdi_cuda_lerp_options_of(args->keep, args->weighted_sum, args->turn);
    const auto make_item = [&](int64_t k, xdi_cuda_pair *item) {
        const xd_lerp_array *a = &args->arrays[k];
        *item = xdi_cuda_pair_of(a->target, a->target_dtype, a->source, a->source_dtype, a->count);
        return a->count;
    };
    return xdi_cuda_listed<xdi_cuda_pair>(
        launch, args->list, args->same, args->array_count, make_item, [&](const xdi_cuda_kept<xdi_cuda_pair> &list) {
            xdi_cuda_grid grid;
            if (list.chunks == 0) return (xd_result)XD_OK;
            XD_TRY(xdi_cuda_chunk_grid(launch, list.chunks, xdi_cuda_lerp_kernel, &grid));
            return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_lerp_kernel, list, options, (const xd_status *)launch->status);
        });
}

static bool xdi_cuda_cast_takes(xd_dtype dtype) {
    return xdi_cuda_is_float(dtype) || dtype == XD_DTYPE_I32 || dtype == XD_DTYPE_I64 ||
           dtype == XD_DTYPE_U8 || dtype == XD_DTYPE_BOOL;
}

static xd_result xdi_cuda_cast(const xd_launch *launch, const xd_cast_array *arrays, int64_t array_count) {
    for (int64_t k = 0; k < array_count; k++) {
        const xd_cast_array *a = &arrays[k];
        XD_REQUIRE(launch->ctx,
                    a->target_dtype == a->source_dtype ||
                        (xdi_cuda_cast_takes(a->target_dtype) && xdi_cuda_cast_takes(a->source_dtype)),
                    XD_ERROR_DTYPE, "array %lld: cannot convert %s to %s", (long long)k,
                    xd_dtype_name(a->source_dtype), xd_dtype_name(a->target_dtype));
    }
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XD_TRY(xdi_cuda_each_list<xdi_cuda_pair>(
        array_count,
        [&](int64_t k, xdi_cuda_pair *item) {
            const xd_cast_array *a = &arrays[k];
            *item = xdi_cuda_pair_of(a->target, a->target_dtype, a->source, a->source_dtype, a->count);
            return a->target_dtype == a->source_dtype ? (int64_t)0 : a->count;
        },
        [&](const xdi_cuda_list<xdi_cuda_pair> &list) {
            return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(list.chunks, XDI_CUDA_THREADS),
                                   xdi_cuda_cast_kernel, list, (const xd_status *)launch->status);
        }));
    return xdi_cuda_move_run(launch, array_count, [&](int64_t k, xdi_cuda_move *item) {
        const xd_cast_array *a = &arrays[k];
        const bool same = a->target_dtype == a->source_dtype;
        return same ? xdi_cuda_move_bytes(a->target, a->source,
                                          a->count * (int64_t)xd_dtype_size(a->target_dtype), item)
                    : (int64_t)0;
    });
}

/* ---- averages in other formats, counted ones, and exchanges ---- */

struct xdi_cuda_average_options {
    xdi_cuda_lerp_options lerp;
    uint64_t seed;
    int64_t iteration;
    int64_t *unmoved;
    float factor;
    int kind;
};

/* As xdi_cuda_lerp_take; a copy is a kind of its own. */
static __device__ inline bool xdi_cuda_average_take(xdi_cuda_average_options *o) {
    if (o->lerp.turn == nullptr) return true;
    if (!xdi_cuda_lerp_take(&o->lerp)) return false;
    o->iteration = o->lerp.turn->iteration;
    if (o->lerp.copies) o->kind = XD_AVERAGE_COPY;
    return true;
}

/* Moves one element by the format of its array. */
static __device__ inline void xdi_cuda_average_move(const xdi_cuda_average_options &o, const xd_average_array &a,
                                                    int64_t i, double source) {
    if (a.random) {
        const xd_philox random = xd_average_random(o.seed, a.key, o.iteration);
        const float before = xdi_cuda_read_float(a.target, XD_DTYPE_BF16, i);
        const float after = xd_lerp_f32(o.lerp.weight, o.lerp.keep, false, before, (float)source);
        xdi_cuda_write_float(a.target, XD_DTYPE_BF16, i, xdi_cuda_round(random, a.origin + i, after));
    } else if (a.compensation) {
        xd_lerp_compensated(o.lerp.weight, (float)source, static_cast<float *>(a.target) + i, a.compensation + i);
    } else {
        xdi_cuda_lerp_element(o.lerp, a.target, (int)a.target_dtype, i, source);
    }
}

/* The bits of an element. */
static __device__ inline uint64_t xdi_cuda_average_bits(const xd_average_array &a, int64_t i) {
    switch (a.target_dtype) {
    case XD_DTYPE_F64: return static_cast<const uint64_t *>(a.target)[i];
    case XD_DTYPE_F32: return static_cast<const uint32_t *>(a.target)[i];
    default: return static_cast<const uint16_t *>(a.target)[i];
    }
}

/* One element by the kind of the call; whether it has not moved, where that is counted. */
static __device__ inline bool xdi_cuda_average_element(const xdi_cuda_average_options &o, const xd_average_array &a,
                                                       int64_t i) {
    const double source = xd_element_load(a.source, a.source_dtype, i);
    if (o.kind == XD_AVERAGE_ADD) {
        float *target = static_cast<float *>(a.target) + i;
        *target = xd_fmaf(o.factor, (float)source, *target);
        return false;
    }
    if (o.kind == XD_AVERAGE_COPY) {
        xd_element_store(a.target, a.target_dtype, i, source);
        if (a.compensation) a.compensation[i] = 0;
        return false;
    }
    const uint64_t before = xdi_cuda_average_bits(a, i);
    const uint16_t lacked = a.compensation ? a.compensation[i] : (uint16_t)0;
    const double was = xd_element_load(a.target, a.target_dtype, i);
    xdi_cuda_average_move(o, a, i, source);
    if (!o.unmoved || !xd_average_differs(source, was, lacked)) return false;
    const bool same = before == xdi_cuda_average_bits(a, i) && (!a.compensation || a.compensation[i] == lacked);
    return xd_average_stays(same, was, xd_element_load(a.target, a.target_dtype, i));
}

static __global__ void __launch_bounds__(XDI_CUDA_THREADS, 1)
    xdi_cuda_average_kernel(const __grid_constant__ xdi_cuda_list<xd_average_array> list,
                            const xdi_cuda_average_options options, const xd_status *status) {
    if (xd_status_refuses(status)) return;
    xdi_cuda_average_options now = options;
    if (!xdi_cuda_average_take(&now)) return;
    unsigned long long unmoved = 0;
    xdi_cuda_each_chunk(list, [&](const xd_average_array &a, xdi_cuda_span span) {
        xdi_cuda_walk(span, false, [](int64_t) {},
                      [&](int64_t i) { unmoved += xdi_cuda_average_element(now, a, i) ? 1u : 0u; });
    });
    if (unmoved) atomicAdd(reinterpret_cast<unsigned long long *>(options.unmoved), unmoved);
}

static xd_result xdi_cuda_average_check(const xd_launch *launch, const xd_average_args *args, int64_t k) {
    const xd_average_array *a = &args->arrays[k];
    const bool wide = a->target_dtype == XD_DTYPE_F32;
    XD_REQUIRE(launch->ctx, xdi_cuda_is_float(a->target_dtype) && xdi_cuda_is_float(a->source_dtype),
               XD_ERROR_DTYPE, "array %lld: cannot average %s into %s", (long long)k,
               xd_dtype_name(a->source_dtype), xd_dtype_name(a->target_dtype));
    XD_REQUIRE(launch->ctx, !a->random || (a->target_dtype == XD_DTYPE_BF16 && !a->compensation),
               XD_ERROR_DTYPE, "array %lld: BF16 is rounded at random, not %s", (long long)k,
               xd_dtype_name(a->target_dtype));
    XD_REQUIRE(launch->ctx, (!a->compensation && args->kind != XD_AVERAGE_ADD) || wide, XD_ERROR_DTYPE,
               "array %lld: F32 has a compensation and is added to, not %s", (long long)k,
               xd_dtype_name(a->target_dtype));
    return XD_OK;
}

static xdi_cuda_average_options xdi_cuda_average_options_of(const xd_average_args *args) {
    xdi_cuda_average_options options = {};
    options.lerp = xdi_cuda_lerp_options_of(args->keep, args->weighted_sum, args->turn);
    options.seed = args->seed;
    options.iteration = args->iteration;
    options.unmoved = args->unmoved;
    options.factor = args->factor;
    options.kind = (int)args->kind;
    return options;
}

static xd_result xdi_cuda_average(const xd_launch *launch, const xd_average_args *args) {
    for (int64_t k = 0; k < args->array_count; k++) XD_TRY(xdi_cuda_average_check(launch, args, k));
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const xdi_cuda_average_options options = xdi_cuda_average_options_of(args);
    return xdi_cuda_each_list<xd_average_array>(
        args->array_count,
        [&](int64_t k, xd_average_array *item) {
            *item = args->arrays[k];
            return item->count;
        },
        [&](const xdi_cuda_list<xd_average_array> &list) {
            static_assert(sizeof list + sizeof options + sizeof(void *) <= 4096, "the parameters of a launch");
            xdi_cuda_grid grid;
            XD_TRY(xdi_cuda_chunk_grid(launch, list.chunks, xdi_cuda_average_kernel, &grid));
            return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_average_kernel, list, options,
                                   (const xd_status *)launch->status);
        });
}

/* ---- averages of a step ----
 *
 * After a step its parameters are read once more, for up to MOST averages of any format; the one of the arrays needs no read. */

enum { XDI_CUDA_BESIDE = 8 };

struct xdi_cuda_beside_target {
    void *target; /* nullptr: this average has none */
    uint16_t *compensation;
    int64_t origin;
    uint64_t key;
    uint8_t dtype, random, wide, unused[5];
};

template <int MOST> struct xdi_cuda_beside {
    const void *source;
    int64_t count;
    uint8_t source_dtype, wide, unused[6];
    xdi_cuda_beside_target at[MOST];
};

struct xdi_cuda_beside_options {
    xdi_cuda_average_options each[XDI_CUDA_BESIDE];
    int count;
};

XDI_CUDA_APART __device__ void xdi_cuda_beside_element(const xdi_cuda_average_options &o,
                                                       const xdi_cuda_beside_target &t, int64_t i, double source) {
    xd_average_array a = {};
    a.target = t.target;
    a.compensation = t.compensation;
    a.origin = t.origin;
    a.key = t.key;
    a.target_dtype = (xd_dtype)t.dtype;
    a.random = t.random != 0;
    xdi_cuda_average_move(o, a, i, source);
}

/* The averages of a list that copy. */
template <int MOST>
static __device__ inline void xdi_cuda_beside_copy(const xdi_cuda_list<xdi_cuda_beside<MOST>> &list, int count,
                                                   const bool *copies) {
    xdi_cuda_each_chunk(list, [&](const xdi_cuda_beside<MOST> &a, xdi_cuda_span span) {
        xdi_cuda_walk(span, false, [](int64_t) {}, [&](int64_t i) {
            const double source = xd_element_load(a.source, (xd_dtype)a.source_dtype, i);
            for (int k = 0; k < count; k++) {
                const xdi_cuda_beside_target &t = a.at[k];
                if (!t.target || !copies[k]) continue;
                xd_element_store(t.target, (xd_dtype)t.dtype, i, source);
                if (t.compensation) t.compensation[i] = 0;
            }
        });
    });
}

template <int MOST>
static __global__ void __launch_bounds__(XDI_CUDA_THREADS, 1)
    xdi_cuda_beside_kernel(const __grid_constant__ xdi_cuda_list<xdi_cuda_beside<MOST>> list,
                           const __grid_constant__ xdi_cuda_beside_options options, const xd_status *status) {
    XD_SHARED(xdi_cuda_average_options, each, [MOST]);
    XD_SHARED(bool, moves, [MOST]);
    XD_SHARED(bool, copies, [MOST]);
    bool any = false;
    if (xd_status_refuses(status)) return;
    const int mine = (int)threadIdx.x;
    if (mine < MOST && mine < options.count) {
        each[mine] = options.each[mine];
        const bool acts = xdi_cuda_average_take(&each[mine]);
        copies[mine] = acts && each[mine].lerp.copies;
        moves[mine] = acts && !copies[mine];
    }
    __syncthreads();
    for (int k = 0; k < options.count; k++) any = any || copies[k];
    if (any) xdi_cuda_beside_copy(list, options.count, copies);
    xdi_cuda_each_chunk(list, [&](const xdi_cuda_beside<MOST> &a, xdi_cuda_span span) {
        xdi_cuda_walk(
            span, a.wide != 0,
            [&](int64_t i) {
                float source[8];
                xdi_cuda_read8(a.source, a.source_dtype, i, source);
                for (int k = 0; k < options.count; k++) {
                    const xdi_cuda_beside_target &t = a.at[k];
                    if (!moves[k]) continue;
                    if (t.wide) {
                        xdi_cuda_lerp8(each[k].lerp, t.target, t.dtype, i, source);
                    } else if (t.target) {
                        XD_UNROLL
                        for (int j = 0; j < 8; j++)
                            xdi_cuda_beside_element(each[k], t, i + j, (double)source[j]);
                    }
                }
            },
            [&](int64_t i) {
                const double source = xd_element_load(a.source, (xd_dtype)a.source_dtype, i);
                for (int k = 0; k < options.count; k++)
                    if (a.at[k].target && moves[k]) xdi_cuda_beside_element(each[k], a.at[k], i, source);
            });
    });
}

template <int MOST>
static int64_t xdi_cuda_beside_of(const xd_average_args *averages, int count, int64_t k,
                                  xdi_cuda_beside<MOST> *out) {
    memset(out, 0, sizeof *out);
    for (int i = 0; i < count; i++) {
        const xd_average_array *a = &averages[i].arrays[k];
        xdi_cuda_beside_target *t = &out->at[i];
        if (!a->target) continue;
        out->source = a->source;
        out->count = a->count;
        out->source_dtype = (uint8_t)a->source_dtype;
        t->target = a->target;
        t->compensation = a->compensation;
        t->origin = a->origin;
        t->key = a->key;
        t->dtype = (uint8_t)a->target_dtype;
        t->random = a->random;
        t->wide = !a->random && !a->compensation && a->target_dtype != XD_DTYPE_F64 &&
                  xdi_cuda_is_aligned16(a->target);
    }
    out->wide = out->source_dtype != XD_DTYPE_F64 && xdi_cuda_is_aligned16(out->source);
    return out->count;
}

static xd_result xdi_cuda_beside_check(const xd_launch *launch, const xd_update_args *args) {
    for (int i = 0; i < args->average_count; i++)
        for (int64_t k = 0; k < args->array_count; k++)
            if (args->averages[i].arrays[k].target) XD_TRY(xdi_cuda_average_check(launch, &args->averages[i], k));
    return XD_OK;
}

/* `count` of the averages, at most MOST. */
template <int MOST>
static xd_result xdi_cuda_beside_some(const xd_launch *launch, const xd_average_args *averages, int count) {
    xdi_cuda_beside_options options = {};
    options.count = count;
    for (int i = 0; i < count; i++) options.each[i] = xdi_cuda_average_options_of(&averages[i]);
    return xdi_cuda_each_list<xdi_cuda_beside<MOST>>(
        averages->array_count,
        [&](int64_t k, xdi_cuda_beside<MOST> *item) { return xdi_cuda_beside_of(averages, count, k, item); },
        [&](const xdi_cuda_list<xdi_cuda_beside<MOST>> &list) {
            static_assert(sizeof list + sizeof options + sizeof(void *) <= 4096, "the parameters of a launch");
            xdi_cuda_grid grid;
            XD_TRY(xdi_cuda_chunk_grid(launch, list.chunks, xdi_cuda_beside_kernel<MOST>, &grid));
            return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_beside_kernel<MOST>, list, options,
                                   (const xd_status *)launch->status);
        });
}

/* The averages beside those of the arrays, of what a step has just written. */
static xd_result xdi_cuda_beside_run(const xd_launch *launch, const xd_update_args *args) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    for (int at = 0; at < args->average_count; at += XDI_CUDA_BESIDE) {
        const int left = args->average_count - at;
        const xd_average_args *averages = args->averages + at;
        if (left <= 2)
            XD_TRY(xdi_cuda_beside_some<2>(launch, averages, left));
        else if (left <= 4)
            XD_TRY(xdi_cuda_beside_some<4>(launch, averages, left));
        else
            XD_TRY(xdi_cuda_beside_some<XDI_CUDA_BESIDE>(
                launch, averages, left < (int)XDI_CUDA_BESIDE ? left : (int)XDI_CUDA_BESIDE));
    }
    return XD_OK;
}

/* Units of 16, 8, 4, 2 or 1 bytes, as in copies. */
struct xdi_cuda_swap_item {
    char *a, *b;
    int64_t units;
    int unit;
};

template <typename T> static __device__ inline void xdi_cuda_swap_unit(char *a, char *b) {
    const T kept = *reinterpret_cast<const T *>(a);
    *reinterpret_cast<T *>(a) = *reinterpret_cast<const T *>(b);
    *reinterpret_cast<T *>(b) = kept;
}

static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_swap_kernel(const __grid_constant__ xdi_cuda_list<xdi_cuda_swap_item> list) {
    const int k = xdi_cuda_list_find(list, blockIdx.x);
    const xdi_cuda_swap_item &s = list.at[k];
    xdi_cuda_walk(
        xdi_cuda_span_of(blockIdx.x - list.first(k), s.units), false, [](int64_t) {},
        [&](int64_t i) {
            char *a = s.a + i * s.unit, *b = s.b + i * s.unit;
            if (s.unit == 16) {
                const auto kept = xdi_cuda_load16(a);
                xdi_cuda_store16(a, xdi_cuda_load16(b));
                xdi_cuda_store16(b, kept);
            } else if (s.unit == 8) {
                xdi_cuda_swap_unit<uint64_t>(a, b);
            } else if (s.unit == 4) {
                xdi_cuda_swap_unit<uint32_t>(a, b);
            } else if (s.unit == 2) {
                xdi_cuda_swap_unit<uint16_t>(a, b);
            } else {
                xdi_cuda_swap_unit<char>(a, b);
            }
        });
}

static xd_result xdi_cuda_swap(const xd_launch *launch, const xd_swap_array *arrays, int64_t array_count) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return xdi_cuda_each_list<xdi_cuda_swap_item>(
        array_count,
        [&](int64_t k, xdi_cuda_swap_item *item) {
            const xd_swap_array *s = &arrays[k];
            const uint64_t bits =
                (uint64_t)(uintptr_t)s->a | (uint64_t)(uintptr_t)s->b | (uint64_t)s->bytes;
            item->a = static_cast<char *>(s->a);
            item->b = static_cast<char *>(s->b);
            item->unit = xdi_cuda_move_unit_of(bits, 16);
            item->units = s->bytes / item->unit;
            return item->units;
        },
        [&](const xdi_cuda_list<xdi_cuda_swap_item> &list) {
            return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(list.chunks, XDI_CUDA_THREADS), xdi_cuda_swap_kernel,
                                   list);
        });
}

static xd_result xdi_cuda_average_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_lerp_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_cast_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_turn_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_average_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_beside_kernel<2>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_beside_kernel<4>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_beside_kernel<XDI_CUDA_BESIDE>));
    return xdi_cuda_load(ctx, xdi_cuda_swap_kernel);
}
