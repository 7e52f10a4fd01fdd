/* Losses over samples, from samples to one value, and the weights of f-distill: kernel/dmd_loss_scalar.h has the formulas, with the
 * CPU's bits but for exponentials. Each is one block, a thread for every sample of a tile, so that a sample's words are read,
 * and its exponential formed, beside those of the others; only what must have an order is added in it, out of shared memory,
 * by one warp for each sum (in_order.cuh). Sums in fixed point have no order. A rank has tens to thousands of samples: more blocks
 * would wait for each other longer than they compute. */

enum {
    XDI_CUDA_TOTAL_THREADS = 256,
    XDI_CUDA_TOTAL_MOST = 1024, /* where a sample is little work: its words come from memory, which takes longer than to add it */
    XDI_CUDA_TOTAL_LEAST = 64   /* two warps: two sums */
};

struct xdi_cuda_smaller {
    template <typename T> __device__ T operator()(T a, T b) const {
        return a < b ? a : b;
    }
};

/* What the samples of a thread have found, and the first of them over the block. */
struct xdi_cuda_total_findings {
    int64_t count = 0, first = INT64_MAX;
    double value = 0.0; /* of this thread's first */

    __device__ void note(int64_t b, double what) {
        if (count++ > 0) return;
        first = b;
        value = what;
    }
    /* Count, sample and value to three words; every thread calls it. */
    __device__ void write(int64_t *words) {
        const int64_t all = xdi_cuda_block_reduce(count, (int64_t)0, xdi_cuda_add());
        const int64_t least = xdi_cuda_block_reduce(first, (int64_t)INT64_MAX, xdi_cuda_smaller());
        if (threadIdx.x == 0) words[0] = all;
        if (threadIdx.x == 0 && all == 0) words[1] = words[2] = 0;
        if (all == 0 || least != first) return;
        words[1] = first;
        memcpy(words + 2, &value, sizeof value);
    }
};

/* A sum of numbers of the block's threads, tile after tile; all threads call its functions. */
template <bool FIXED> struct xdi_cuda_total_sum {
    unsigned long long *limbs; /* [XD_NORM_LIMBS] shared */
    double sum = 0.0; /* of all lanes of the warp */
    int warp;         /* that adds in order */

    __device__ xdi_cuda_total_sum(unsigned long long *room, int adder) : limbs(room), warp(adder) {
        for (int k = (int)threadIdx.x; k < XD_NORM_LIMBS; k += (int)blockDim.x) limbs[k] = 0;
    }
    /* A thread's own number, in fixed point. */
    __device__ void put(double term) {
        int bit;
        const uint64_t mantissa = FIXED ? xd_sum_mantissa(term, &bit) : 0;
        if (mantissa) xdi_cuda_limbs_add(limbs, mantissa, bit);
    }
    /* n numbers, none negative, and 0 up to the end of their warp. What is not this sum's is 0 there, which changes no bit of it. */
    __device__ void add(const xdi_cuda_number_pair *tile, int n) {
        if (!FIXED && (int)threadIdx.x / XDI_CUDA_WARP == warp) sum = xdi_cuda_add_in_order(sum, tile, n);
    }
    /* All threads' puts lie before a barrier. */
    __device__ void write(int64_t *words) {
        if ((int)threadIdx.x != warp * XDI_CUDA_WARP) return;
        if (FIXED) {
            xd_norm_carry((int64_t *)limbs);
            for (int k = 0; k < XD_NORM_LIMBS; k++) words[k] = (int64_t)limbs[k];
        } else {
            memcpy(words, &sum, sizeof sum);
        }
    }
};

static int xdi_cuda_total_threads(int64_t samples, int64_t bins, int most) {
    const int64_t wanted = samples > bins ? samples : bins;
    int64_t threads = (wanted + XDI_CUDA_WARP - 1) / XDI_CUDA_WARP * XDI_CUDA_WARP;
    if (threads < XDI_CUDA_TOTAL_LEAST) threads = XDI_CUDA_TOTAL_LEAST;
    return (int)(threads < most ? threads : most);
}

/* ---- total, and of a rank that is alone what finish does, too ---- */

/* The finish entry of a rank alone, whose record is in shared memory. */
template <bool FIXED>
static __device__ inline void xdi_cuda_sample_finish_as(const xd_sample_args &a, const int64_t *record, xd_status *status) {
    xd_sample_args known = a;
    known.fixed = FIXED;
    known.ranks = 1;
    known.records = record;
    xd_sample_finish(&known, status);
}

/* Sums in fixed point take more registers of a thread. */
template <bool FIXED>
static __global__ void __launch_bounds__(FIXED ? XDI_CUDA_TOTAL_MOST / 2 : XDI_CUDA_TOTAL_MOST)
    xdi_cuda_sample_total_kernel(const __grid_constant__ xd_sample_args a, bool alone, xd_status *status) {
    XD_SHARED(xdi_cuda_number_pair, positives, [XDI_CUDA_TOTAL_MOST / 2]);
    XD_SHARED(xdi_cuda_number_pair, negatives, [XDI_CUDA_TOTAL_MOST / 2]); /* their magnitudes */
    XD_SHARED(unsigned long long, limbs, [2 * XD_NORM_LIMBS]);
    XD_SHARED(int64_t, record, [XD_SAMPLE_RECORD_SUMS + 2 * XD_NORM_LIMBS]);
    const int t = (int)threadIdx.x;
    xd_sample next;
    if (t < a.samples) next = a.sample[t];
    xdi_cuda_total_sum<FIXED> positive(limbs, 0), negative(limbs + XD_NORM_LIMBS, 1);
    xdi_cuda_total_findings findings;
    int64_t counted = 0;
    __syncthreads();
    for (int64_t begin = 0; begin < a.samples; begin += blockDim.x) {
        const int64_t b = begin + t, left = a.samples - begin;
        positives[t / 2].at[t % 2] = negatives[t / 2].at[t % 2] = 0.0;
        if (b < a.samples) {
            const xd_sample s = next;
            if (b + blockDim.x < a.samples) next = a.sample[b + blockDim.x]; /* on its way while this tile is added */
            if (a.sample_loss) a.sample_loss[b] = s.loss;
            counted += s.counted;
            if (s.finding != (int64_t)XD_SAMPLE_FINE) findings.note(b, s.value);
            (s.loss < 0.0 ? negatives : positives)[t / 2].at[t % 2] = fabs(s.loss);
            if (s.loss < 0.0)
                negative.put(-s.loss);
            else
                positive.put(s.loss);
        }
        __syncthreads();
        positive.add(positives, (int)(left < blockDim.x ? left : blockDim.x));
        negative.add(negatives, (int)(left < blockDim.x ? left : blockDim.x));
        __syncthreads();
    }
    counted = xdi_cuda_block_reduce(counted, (int64_t)0, xdi_cuda_add());
    if (t == 0) record[XD_SAMPLE_RECORD_COUNTED] = counted;
    findings.write(record + XD_SAMPLE_RECORD_FINDINGS);
    positive.write(record + XD_SAMPLE_RECORD_SUMS);
    negative.write(record + XD_SAMPLE_RECORD_SUMS + xd_sum_words(FIXED));
    __syncthreads();
    if (t == 0 && alone) xdi_cuda_sample_finish_as<FIXED>(a, record, status);
    for (int k = t; k < xd_sample_record_words(FIXED) && !alone; k += (int)blockDim.x) a.record[k] = record[k];
}

static xd_result xdi_cuda_sample_total_launch(const xd_launch *launch, const xd_sample_args *a, bool alone) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const int most = a->fixed ? XDI_CUDA_TOTAL_MOST / 2 : XDI_CUDA_TOTAL_MOST;
    const xdi_cuda_grid grid = xdi_cuda_grid_of(1, xdi_cuda_total_threads(a->samples, 0, most));
    if (a->fixed) return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_sample_total_kernel<true>, *a, alone, launch->status);
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_sample_total_kernel<false>, *a, alone, launch->status);
}

static xd_result xdi_cuda_sample_total(const xd_launch *launch, const xd_sample_args *a) {
    return xdi_cuda_sample_total_launch(launch, a, false);
}

static xd_result xdi_cuda_sample_finish_alone(const xd_launch *launch, const xd_sample_args *a) {
    return xdi_cuda_sample_total_launch(launch, a, true);
}

/* ---- finish: one thread, in the order of the ranks ---- */

static __global__ void xdi_cuda_sample_finish_kernel(const __grid_constant__ xd_sample_args a, xd_status *status) {
    if (threadIdx.x == 0) xd_sample_finish(&a, status);
}

static xd_result xdi_cuda_sample_finish(const xd_launch *launch, const xd_sample_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_WARP), xdi_cuda_sample_finish_kernel, *a, launch->status);
}

/* ---- f-distill: ratios. A thread has every bin whose number is its own modulo the block, and adds to it in the order of the
 * samples. ---- */

static __global__ void __launch_bounds__(XDI_CUDA_TOTAL_THREADS)
    xdi_cuda_fdistill_ratios_kernel(const __grid_constant__ xd_fdistill_args a) {
    XD_SHARED(double, tile, [XDI_CUDA_TOTAL_THREADS]);
    XD_SHARED(int, places, [XDI_CUDA_TOTAL_THREADS]);
    const int t = (int)threadIdx.x;
    xdi_cuda_total_findings findings;
    for (int64_t k = t; k <= a.bins; k += blockDim.x)
        for (int i = 0; i < (int)XD_FDISTILL_BIN_WORDS; i++) a.record[k * (int)XD_FDISTILL_BIN_WORDS + i] = 0;
    for (int64_t begin = 0; begin < a.logits.rows; begin += blockDim.x) {
        const int64_t b = begin + t, left = a.logits.rows - begin, n = left < blockDim.x ? left : blockDim.x;
        if (b < a.logits.rows) {
            double value;
            places[t] = (int)xd_fdistill_place(&a, b, &value);
            tile[t] = a.weights[b];
            if (isnan(tile[t])) findings.note(b, value);
        }
        __syncthreads();
        for (int64_t k = t; k < a.bins; k += blockDim.x)
            for (int64_t i = 0; i < n; i++) {
                int64_t *bin = a.record + k * (int)XD_FDISTILL_BIN_WORDS;
                if (places[i] != k) continue;
                bin[0]++;
                xd_sum_put(bin + 1, a.fixed, tile[i]);
            }
        __syncthreads();
    }
    findings.write(a.record + a.bins * (int)XD_FDISTILL_BIN_WORDS);
}

static xd_result xdi_cuda_fdistill_ratios(const xd_launch *launch, const xd_fdistill_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const xdi_cuda_grid grid = xdi_cuda_grid_of(1, xdi_cuda_total_threads(a->logits.rows, a->bins, XDI_CUDA_TOTAL_THREADS));
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_fdistill_ratios_kernel, *a);
}

/* ---- f-distill: bins ---- */

template <bool FIXED>
static __global__ void __launch_bounds__(XDI_CUDA_TOTAL_THREADS)
    xdi_cuda_fdistill_bins_kernel(const __grid_constant__ xd_fdistill_args a, xd_status *status) {
    XD_SHARED(xdi_cuda_number_pair, tile, [XDI_CUDA_TOTAL_THREADS / 2]);
    XD_SHARED(unsigned long long, limbs, [XD_NORM_LIMBS]);
    XD_SHARED(int, clean, [1]);
    const int t = (int)threadIdx.x;
    xdi_cuda_total_sum<FIXED> sum(limbs, 0);
    int64_t counted = 0;
    if (t == 0) *clean = xd_fdistill_report(&a, status) ? 1 : 0;
    __syncthreads();
    for (int64_t k = t; k < a.bins; k += blockDim.x) {
        a.next[k] = xd_fdistill_next(&a, k);
        if (*clean) a.bin_values[k] = a.next[k];
    }
    __syncthreads();
    for (int64_t begin = 0; begin < a.logits.rows; begin += blockDim.x) {
        const int64_t b = begin + t, left = a.logits.rows - begin;
        tile[t / 2].at[t % 2] = 0.0;
        if (b < a.logits.rows) {
            const bool counts = xd_fdistill_weigh(&a, b); /* else it has a finding */
            const double weight = counts ? fabs(a.weights[b]) : 0.0;
            tile[t / 2].at[t % 2] = weight;
            counted += counts;
            if (counts) sum.put(weight);
        }
        __syncthreads();
        sum.add(tile, (int)(left < blockDim.x ? left : blockDim.x));
        __syncthreads();
    }
    counted = xdi_cuda_block_reduce(counted, (int64_t)0, xdi_cuda_add());
    if (t == 0) {
        for (int i = 1; i < (int)XD_FDISTILL_BIN_WORDS; i++) a.mass[i] = 0;
        a.mass[0] = counted;
    }
    sum.write(a.mass + 1);
}

static xd_result xdi_cuda_fdistill_bins(const xd_launch *launch, const xd_fdistill_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const xdi_cuda_grid grid = xdi_cuda_grid_of(1, xdi_cuda_total_threads(a->logits.rows, a->bins, XDI_CUDA_TOTAL_THREADS));
    if (a->fixed) return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_fdistill_bins_kernel<true>, *a, launch->status);
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_fdistill_bins_kernel<false>, *a, launch->status);
}

/* ---- f-distill: weights ---- */

static __global__ void __launch_bounds__(XDI_CUDA_TOTAL_THREADS)
    xdi_cuda_fdistill_weights_kernel(const __grid_constant__ xd_fdistill_args a) {
    XD_SHARED(double, mean, [1]);
    if (threadIdx.x == 0) *mean = xd_fdistill_mean(&a);
    __syncthreads();
    for (int64_t b = (int64_t)threadIdx.x; b < a.logits.rows; b += blockDim.x) xd_fdistill_share(&a, b, *mean);
}

static xd_result xdi_cuda_fdistill_weights(const xd_launch *launch, const xd_fdistill_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const xdi_cuda_grid grid = xdi_cuda_grid_of(1, xdi_cuda_total_threads(a->logits.rows, 0, XDI_CUDA_TOTAL_THREADS));
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_fdistill_weights_kernel, *a);
}

static xd_result xdi_cuda_dmd_total_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_total_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_total_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_finish_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_fdistill_ratios_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_fdistill_bins_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_fdistill_bins_kernel<true>));
    return xdi_cuda_load(ctx, xdi_cuda_fdistill_weights_kernel);
}
