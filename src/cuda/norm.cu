/* Norms of a list of gradients, and the factor that follows from one: the entries of kernel/cpu/norm.c and clip.c. Reads
 * every gradient once. Two stages: at most 512 blocks go through the chunks and write a partial sum each, one block merges the
 * partial sums in order. Their number does not depend on the GPU, so plain sums have the same bits on every GPU; exact ones are
 * sums of integers and do not depend on any order. The lists of the last norms stay on the device. */

enum { XDI_CUDA_NORM_BLOCKS = 512, XDI_CUDA_NORM_LIST = XDI_CUDA_LIST_STAGED };

struct xdi_cuda_norm_item {
    const void *data;
    uint64_t count : 48, dtype : 8, replica : 4, wide : 4;
};

/* The same number of chunks for every block: of one array exactly, of a list nearly, as arrays end where they end. A chunk is a
 * multiple of four times 16 bytes a thread, of which all are asked for before one is used. */
template <> struct xdi_cuda_chunks<xdi_cuda_norm_item> {
    static int64_t elements(int64_t arrays, int64_t all) {
        const int64_t most = 65536, step = 4 * 8 * (int)XDI_CUDA_THREADS, blocks = XDI_CUDA_NORM_BLOCKS;
        int64_t rounds = (all + blocks * most - 1) / (blocks * most);
        if (arrays > 1 && rounds < 8) rounds = 8;
        const int64_t each = (all + blocks * rounds - 1) / (blocks * rounds);
        return each < step ? step : (each + step - 1) / step * step;
    }
};

/* The partial sums of one block. */
struct xdi_cuda_norm_part {
    double sum, largest;
    int64_t not_finite, nan;
};

struct xdi_cuda_norm_plus {
    __device__ double operator()(double a, double b) const {
        return xd_add(a, b);
    }
};

struct xdi_cuda_norm_join {
    __device__ xdi_cuda_norm_part operator()(xdi_cuda_norm_part a, const xdi_cuda_norm_part &b) const {
        a.sum = xd_add(a.sum, b.sum);
        a.largest = a.largest > b.largest ? a.largest : b.largest;
        a.not_finite += b.not_finite;
        a.nan += b.nan;
        return a;
    }
};

/* Adds 32 bits to limb k; these are integers, so the order of the threads does not matter. */
static __device__ inline void xdi_cuda_limb_add(unsigned long long *limbs, int k, uint64_t bits) {
    if (bits) atomicAdd(limbs + k, (unsigned long long)bits);
}

/* mantissa * 2^(bit - 320), as xdi_norm_add. */
static __device__ inline void xdi_cuda_limbs_add(unsigned long long *limbs, uint64_t mantissa, int bit) {
    const int limb = bit / 32, shift = bit % 32;
    const uint64_t low = (mantissa & 0xffffffffu) << shift, high = (mantissa >> 32) << shift;
    xdi_cuda_limb_add(limbs, limb, low & 0xffffffffu);
    xdi_cuda_limb_add(limbs, limb + 1, (low >> 32) + (high & 0xffffffffu));
    xdi_cuda_limb_add(limbs, limb + 2, high >> 32);
}

/* A thread's exact sum: 128 bits over a window of exponents. Gradients of one array have similar magnitudes, so nearly all
 * terms fall into the window of the first; the others go to shared memory at once. */
struct xdi_cuda_window {
    uint64_t low, high;
    int bit; /* of the window's first bit; -1: no window yet */
    int terms;

    __device__ void flush(unsigned long long *limbs) {
        if (terms == 0) return;
        xdi_cuda_limbs_add(limbs, low & 0xffffffffu, bit);
        xdi_cuda_limbs_add(limbs, low >> 32, bit + 32);
        xdi_cuda_limbs_add(limbs, high & 0xffffffffu, bit + 64);
        xdi_cuda_limbs_add(limbs, high >> 32, bit + 96);
        low = high = 0;
        terms = 0;
    }

    /* A mantissa of at most 48 bits, shifted by less than 64: 2^16 of them fit. */
    __device__ void add(unsigned long long *limbs, uint64_t mantissa, int at) {
        if (mantissa == 0) return;
        if (bit < 0) bit = at > 32 ? at - 32 : 0;
        if (at < bit || at >= bit + 64 || bit + 128 > 32 * (XD_NORM_LIMBS - 2)) {
            xdi_cuda_limbs_add(limbs, mantissa, at);
            return;
        }
        const int shift = at - bit;
        const uint64_t lower = mantissa << shift;
        low += lower;
        high += (shift ? mantissa >> (64 - shift) : 0) + (low < lower ? 1 : 0);
        terms++;
    }
};

/* Counts an element that is not finite. */
static __device__ inline void xdi_cuda_norm_count(xdi_cuda_norm_part *part, uint32_t bits) {
    part->not_finite++;
    part->nan += (bits & 0x7fffffu) != 0 ? 1 : 0;
}

static __device__ inline uint32_t xdi_cuda_norm_bits(float x) {
    return __float_as_uint(x) & 0x7fffffffu;
}

/* Adds a finite element, given by its magnitude; of L2 its sign does not matter. */
static __device__ inline void xdi_cuda_norm_add(xdi_cuda_norm_part *part, xd_norm_type type, double magnitude) {
    if (type == XD_NORM_L2)
        part->sum = xd_fma(magnitude, magnitude, part->sum); /* the product is exact */
    else if (type == XD_NORM_MAX)
        part->largest = magnitude > part->largest ? magnitude : part->largest;
    else
        part->sum = xd_add(part->sum, magnitude);
}

/* Adds an element, or of a replica only counts. */
static __device__ inline void xdi_cuda_norm_one(xdi_cuda_norm_part *part, xd_norm_type type, float x, bool replica) {
    const uint32_t bits = xdi_cuda_norm_bits(x);
    if (bits >= 0x7f800000u)
        xdi_cuda_norm_count(part, bits);
    else if (!replica)
        xdi_cuda_norm_add(part, type, (double)xd_float_of_bits(bits));
}

/* ---- plain norms ---- */

/* What an element j of 16 bytes is: its value in double, and the bits of its magnitude as an f32. */
template <typename T> struct xdi_cuda_norm_words;

template <> struct xdi_cuda_norm_words<float> {
    static __device__ double value(const uint32_t (&words)[4], int j) {
        return (double)xd_float_of_bits(words[j]);
    }
    static __device__ uint32_t bits(const uint32_t (&words)[4], int j) {
        return words[j] & 0x7fffffffu;
    }
};

/* Every other one by its bits, as a conversion to double takes as long as eight other instructions: shifted into place they are
 * x 2^-896, denormals too. An infinity is 2^128 then, and a NaN more. */
template <> struct xdi_cuda_norm_words<xdi_cuda_bf16> {
    static __device__ double value(const uint32_t (&words)[4], int j) {
        const uint32_t word = words[j / 2];
        if (j % 2 == 0) return (double)xd_float_of_bits(word << 16);
        return xd_mul(__hiloint2double((int)((uint32_t)((int32_t)word >> 3) & 0x8fffe000u), 0), 0x1p896);
    }
    static __device__ uint32_t bits(const uint32_t (&words)[4], int j) {
        return (j % 2 ? words[j / 2] : words[j / 2] << 16) & 0x7fff0000u;
    }
};

template <> struct xdi_cuda_norm_words<xdi_cuda_f16> {
    static __device__ double value(const uint32_t (&words)[4], int j) {
        return (double)xdi_cuda_f16_value((uint16_t)(words[j / 2] >> (j % 2 * 16) & 0xffffu));
    }
    static __device__ uint32_t bits(const uint32_t (&words)[4], int j) {
        return xd_bits_of_float(xdi_cuda_f16_value((uint16_t)(words[j / 2] >> (j % 2 * 16) & 0x7fffu)));
    }
};

/* So that the compiler asks for all before it uses one. */
template <int COUNT> static __device__ inline void xdi_cuda_norm_asked(uint32_t (&words)[COUNT][4]) {
#if defined(__CUDA_ARCH__)
    XD_UNROLL
    for (int k = COUNT - 1; k >= 0; k--)
        asm volatile("" : "+r"(words[k][0]), "+r"(words[k][1]), "+r"(words[k][2]), "+r"(words[k][3])::"memory");
#else
    (void)words;
#endif
}

/* COUNT times 16 bytes of a thread, a step of the block apart. Whether all are finite is asked once, of their sum or their
 * largest: below `limit` they are, and above it they are read again one by one. */
template <xd_norm_type TYPE, typename T, int COUNT>
static __device__ inline void xdi_cuda_norm_packs(const T *data, bool replica, xdi_cuda_norm_part *part) {
    enum { EACH = xdi_cuda_pack<T>::COUNT, STEP = XDI_CUDA_THREADS * EACH };
    const uint32_t limit = TYPE == XD_NORM_MAX ? 0x7f800000u : (uint32_t)(1023 + (TYPE == XD_NORM_L2 ? 250 : 125)) << 20;
    uint32_t words[COUNT][4], top = 0;
    XD_UNROLL
    for (int k = 0; k < COUNT; k++) {
        const xdi_cuda_pack<T> pack = xdi_cuda_load16(data + k * STEP);
        memcpy(words[k], &pack, sizeof pack);
    }
    xdi_cuda_norm_asked(words);
    xdi_cuda_norm_part sum = *part;
    XD_UNROLL
    for (int k = 0; k < COUNT; k++) {
        XD_UNROLL
        for (int j = 0; j < EACH; j++) {
            if (TYPE != XD_NORM_MAX) {
                const double x = xdi_cuda_norm_words<T>::value(words[k], j);
                xdi_cuda_norm_add(&sum, TYPE, TYPE == XD_NORM_L2 ? x : fabs(x));
                continue;
            }
            const uint32_t bits = xdi_cuda_norm_words<T>::bits(words[k], j);
            top = bits > top ? bits : top;
        }
    }
    if (TYPE != XD_NORM_MAX) top = (uint32_t)__double2hiint(sum.sum);
    if (top < limit) {
        if (TYPE == XD_NORM_MAX) xdi_cuda_norm_add(&sum, TYPE, (double)xd_float_of_bits(top));
        if (!replica) *part = sum;
        return;
    }
    XD_UNROLL_N(1)
    for (int k = 0; k < COUNT; k++) {
        XD_UNROLL_N(1)
        for (int j = 0; j < EACH; j++)
            xdi_cuda_norm_one(part, TYPE, xdi_cuda_widen(data[k * STEP + j]), replica);
    }
}

/* A chunk of an array. A thread adds its elements in the order of the array. */
template <xd_norm_type TYPE, typename T>
static __device__ inline void xdi_cuda_norm_span(const xdi_cuda_norm_item &a, xdi_cuda_span span, xdi_cuda_norm_part *part) {
    enum { EACH = xdi_cuda_pack<T>::COUNT, STEP = XDI_CUDA_THREADS * EACH };
    const T *data = static_cast<const T *>(a.data) + span.begin;
    const bool replica = a.replica != 0;
    const int count = (int)(span.end - span.begin), whole = a.wide ? count / EACH * EACH : 0;
    int i = (int)threadIdx.x * EACH;
    for (; i + 3 * STEP < whole; i += 4 * STEP) xdi_cuda_norm_packs<TYPE, T, 4>(data + i, replica, part);
    for (; i + STEP < whole; i += 2 * STEP) xdi_cuda_norm_packs<TYPE, T, 2>(data + i, replica, part);
    if (i < whole) xdi_cuda_norm_packs<TYPE, T, 1>(data + i, replica, part);
    for (i = whole + (int)threadIdx.x; i < count; i += XDI_CUDA_THREADS)
        xdi_cuda_norm_one(part, TYPE, xdi_cuda_widen(data[i]), replica);
}

template <typename T>
static __device__ inline void xdi_cuda_norm_plain(const xdi_cuda_norm_item &a, xd_norm_type type, xdi_cuda_span span,
                                                  xdi_cuda_norm_part *part) {
    if (type == XD_NORM_L2)
        xdi_cuda_norm_span<XD_NORM_L2, T>(a, span, part);
    else if (type == XD_NORM_MAX)
        xdi_cuda_norm_span<XD_NORM_MAX, T>(a, span, part);
    else
        xdi_cuda_norm_span<XD_NORM_L1, T>(a, span, part);
}

/* ---- exact ones ---- */

/* Adds an element to the exact sum. */
static __device__ inline void xdi_cuda_norm_exact(xdi_cuda_norm_part *part, xdi_cuda_window *window, unsigned long long *limbs,
                                                  const xdi_cuda_norm_item &a, xd_norm_type type, float x) {
    const uint32_t bits = xdi_cuda_norm_bits(x);
    if (bits >= 0x7f800000u) {
        xdi_cuda_norm_count(part, bits);
        return;
    }
    if (a.replica) return;
    int exponent;
    const uint64_t mantissa = xd_norm_mantissa(x, &exponent);
    if (type == XD_NORM_L2)
        window->add(limbs, mantissa * mantissa, 2 * exponent + 320);
    else
        window->add(limbs, mantissa, exponent + 320);
}

/* Merges a block's parts. What is not finite is rare, and a norm has a sum or a largest element. */
static __device__ inline void xdi_cuda_norm_reduce(xd_norm_type type, xdi_cuda_norm_part *part) {
    if (__syncthreads_or(part->not_finite != 0)) {
        const xdi_cuda_norm_part none = { 0.0, 0.0, 0, 0 };
        *part = xdi_cuda_block_reduce(*part, none, xdi_cuda_norm_join());
    } else if (type == XD_NORM_MAX) {
        part->largest = xdi_cuda_block_reduce(part->largest, 0.0, xdi_cuda_larger());
    } else {
        part->sum = xdi_cuda_block_reduce(part->sum, 0.0, xdi_cuda_norm_plus());
    }
}

/* Four blocks fit on a multiprocessor: so an H100 runs all 512 at once. */
template <bool EXACT>
static __global__ void __launch_bounds__(XDI_CUDA_THREADS, 4)
    xdi_cuda_norm_kernel(const __grid_constant__ xdi_cuda_kept<xdi_cuda_norm_item> list, xd_norm_type type,
                         xd_norm_sum *parts) {
    XD_SHARED(unsigned long long, limbs, [XD_NORM_LIMBS]);
    xdi_cuda_norm_part part = { 0.0, 0.0, 0, 0 };
    xdi_cuda_window window = { 0, 0, -1, 0 };
    if (EXACT) {
        if (threadIdx.x < XD_NORM_LIMBS) limbs[threadIdx.x] = 0;
        __syncthreads();
    }
    xdi_cuda_each_kept(list, [&](int, const xdi_cuda_norm_item &a, xdi_cuda_span span) {
        if (!EXACT) {
            XDI_CUDA_FLOATS(a.dtype, T, { xdi_cuda_norm_plain<T>(a, type, span, &part); })
            return;
        }
        if (window.terms > 65536 - 512) window.flush(limbs); /* before this chunk could overflow it */
        xdi_cuda_walk(
            span, a.wide != 0,
            [&](int64_t i) {
                float values[8];
                xdi_cuda_read8(a.data, a.dtype, i, values);
                XD_UNROLL
                for (int j = 0; j < 8; j++) xdi_cuda_norm_exact(&part, &window, limbs, a, type, values[j]);
            },
            [&](int64_t i) {
                xdi_cuda_norm_exact(&part, &window, limbs, a, type, xdi_cuda_read_float(a.data, a.dtype, i));
            });
    });
    if (EXACT) window.flush(limbs);
    xdi_cuda_norm_reduce(type, &part); /* also the barrier after the limbs */
    xd_norm_sum *out = parts + blockIdx.x;
    if (threadIdx.x == 0) {
        out->sum = part.sum;
        out->largest = part.largest;
        out->not_finite = part.not_finite;
        out->nan = part.nan;
    }
    if (EXACT && threadIdx.x < XD_NORM_LIMBS)
        out->limbs[threadIdx.x] = (int64_t)limbs[threadIdx.x];
}

/* Adds the partial sums to the sum: one block; a thread per partial sum, then a thread per limb. */
template <bool EXACT>
static __global__ void __launch_bounds__(XDI_CUDA_NORM_BLOCKS)
    xdi_cuda_norm_join_kernel(const xd_norm_sum *parts, int count, xd_norm_sum *sum) {
    XD_SHARED(int64_t, limbs, [XD_NORM_LIMBS]);
    const int t = (int)threadIdx.x;
    xdi_cuda_norm_part part = { 0.0, 0.0, 0, 0 };
    const xdi_cuda_norm_part none = part;
    if (t < count) {
        part.sum = parts[t].sum;
        part.largest = parts[t].largest;
        part.not_finite = parts[t].not_finite;
        part.nan = parts[t].nan;
    }
    part = xdi_cuda_block_reduce(part, none, xdi_cuda_norm_join());
    if (EXACT) {
        if (t < XD_NORM_LIMBS) {
            limbs[t] = sum->limbs[t];
            for (int k = 0; k < count; k++) limbs[t] += parts[k].limbs[t];
        }
        __syncthreads();
    }
    if (t != 0) return;
    sum->sum = xd_add(sum->sum, part.sum);
    sum->largest = sum->largest > part.largest ? sum->largest : part.largest;
    sum->not_finite += part.not_finite;
    sum->nan += part.nan;
    if (!EXACT) return;
    xd_norm_carry(limbs);
    for (int k = 0; k < XD_NORM_LIMBS; k++) sum->limbs[k] = limbs[k];
}

/* Adds the norm of a list to the sum: two launches. */
template <bool EXACT>
static xd_result xdi_cuda_norm_of(const xd_launch *launch, const xdi_cuda_kept<xdi_cuda_norm_item> &list, xd_norm_type type,
                                  xd_norm_sum *sum) {
    xd_norm_sum *parts = (xd_norm_sum *)xdi_cuda_of(launch->ctx)->workspace;
    const int blocks = list.chunks < XDI_CUDA_NORM_BLOCKS ? (int)list.chunks : (int)XDI_CUDA_NORM_BLOCKS;
    XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(blocks, XDI_CUDA_THREADS), xdi_cuda_norm_kernel<EXACT>, list, type, parts));
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_NORM_BLOCKS), xdi_cuda_norm_join_kernel<EXACT>, parts, blocks,
                           sum);
}

/* The list of a former norm that has these arrays, or the one whose turn it is to change. */
template <typename MakeItem>
static xd_array_list *xdi_cuda_norm_list(xd_cuda *cuda, int64_t count, MakeItem make_item) {
    for (xd_array_list *list : cuda->norms)
        if (xdi_cuda_list_holds<xdi_cuda_norm_item>(list, count, make_item)) return list;
    cuda->norm = (cuda->norm + 1) % XDI_CUDA_NORMS;
    return cuda->norms[cuda->norm];
}

static xd_result xdi_cuda_norm(const xd_launch *launch, const xd_norm_args *args, xd_norm_sum *sum) {
    const bool exact = args->exact && args->type != XD_NORM_MAX;
    for (int64_t k = 0; k < args->array_count; k++)
        XD_REQUIRE(launch->ctx, xdi_cuda_is_narrow_float(args->arrays[k].dtype), XD_ERROR_DTYPE,
                    "array %lld: norms take F32, BF16 or F16, not %s", (long long)k,
                    xd_dtype_name(args->arrays[k].dtype));
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    xd_cuda *cuda = xdi_cuda_of(launch->ctx);
    const auto make_item = [&](int64_t k, xdi_cuda_norm_item *item) {
        const xd_norm_array *a = &args->arrays[k];
        item->data = a->data;
        item->count = (uint64_t)a->count & 0xffffffffffffu;
        item->dtype = (uint8_t)a->dtype;
        item->replica = a->replica;
        item->wide = xdi_cuda_is_aligned16(a->data);
        return a->count;
    };
    return xdi_cuda_listed<xdi_cuda_norm_item>(
        launch, xdi_cuda_norm_list(cuda, args->array_count, make_item), false, args->array_count, make_item,
        [&](const xdi_cuda_kept<xdi_cuda_norm_item> &list) {
            return list.chunks == 0 ? (xd_result)XD_OK
                   : exact          ? xdi_cuda_norm_of<true>(launch, list, args->type, sum)
                                    : xdi_cuda_norm_of<false>(launch, list, args->type, sum);
        });
}

/* ---- clip ---- */

static __global__ void xdi_cuda_clip_kernel(const __grid_constant__ xd_clip_args args) {
    if (threadIdx.x == 0) xd_clip_write(&args);
}

static xd_result xdi_cuda_clip(const xd_launch *launch, const xd_clip_args *args) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_WARP), xdi_cuda_clip_kernel, *args);
}

static xd_result xdi_cuda_norm_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_norm_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_norm_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_norm_join_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_norm_join_kernel<true>));
    return xdi_cuda_load(ctx, xdi_cuda_clip_kernel);
}
