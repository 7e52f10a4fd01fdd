/* Numbers added one after the other, by a warp: the bits of one thread that does so, in less than half its time.
 *
 * While a sum stays between a power of 2 and the next one, its last place stays what it is, and a number adds to it what it rounds to
 * in that place, whatever the sum is; unless it lies in the middle between two such values, where the sum decides. Those roundings add
 * up without an error, in any order. So each lane adds up some numbers that follow each other, and a scan over the lanes finds the first
 * of them that reaches the next power or has such a middle. What it has is added in turn, and those after it are looked at again. */

enum { XDI_CUDA_IN_ORDER_LANE = 8, XDI_CUDA_IN_ORDER = XDI_CUDA_IN_ORDER_LANE * XDI_CUDA_WARP };

/* Numbers, two in a load. */
struct alignas(16) xdi_cuda_number_pair {
    double at[2];
};

/* What a lane's numbers round to in the last place of a sum from `low` up to, not including, 2 low. */
struct xdi_cuda_roundings {
    double sum;
    bool plain; /* each has one nearest value, whatever the sum is */
};

static __device__ inline xdi_cuda_roundings xdi_cuda_roundings_of(const double (&x)[XDI_CUDA_IN_ORDER_LANE], double low) {
    const double half = xd_mul(low, 1.1102230246251565e-16 /* 2^-53 */); /* a low one has none: then exact numbers are not plain either */
    xdi_cuda_roundings all = { 0.0, true };
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_IN_ORDER_LANE; i++) {
        const double rounded = xd_sub(xd_add(x[i], low), low);
        all.plain = all.plain && x[i] < low && fabs(xd_sub(x[i], rounded)) != half;
        all.sum = xd_add(all.sum, rounded);
    }
    return all;
}

/* The inclusive sums over the lanes. */
static __device__ inline double xdi_cuda_scan_lanes(double value) {
    XD_UNROLL
    for (int below = 1; below < XDI_CUDA_WARP; below *= 2) {
        const double other = __shfl_up_sync(0xffffffffu, value, (unsigned)below);
        if ((int)threadIdx.x % XDI_CUDA_WARP >= below) value = xd_add(value, other);
    }
    return value;
}

/* The power of 2 that a number has, without its digits; 0 for less than all that have one. */
static __device__ inline double xdi_cuda_power_below(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits &= 0x7ff0000000000000u;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Adds n numbers to a sum, all of a sign: none is negative, and what follows them up to a multiple of XDI_CUDA_IN_ORDER_LANE is 0. All
 * lanes of a warp call it, and all have the sum. */
static __device__ inline double xdi_cuda_add_in_order(double sum, const xdi_cuda_number_pair *tile, int n) {
    enum { LANE = XDI_CUDA_IN_ORDER_LANE };
    const int lane = (int)threadIdx.x % XDI_CUDA_WARP;
    for (int begin = 0; begin < n; begin += XDI_CUDA_IN_ORDER, tile += XDI_CUDA_IN_ORDER / 2) {
        double x[LANE];
        bool some = false;
        XD_UNROLL
        for (int i = 0; i < LANE; i++) {
            x[i] = begin + lane * LANE < n ? tile[(lane * LANE + i) / 2].at[i % 2] : 0.0;
            some = some || x[i] != 0.0;
        }
        for (unsigned left = __ballot_sync(0xffffffffu, some); left;) {
            const double low = xdi_cuda_power_below(sum);
            const bool mine = (left >> lane & 1u) != 0;
            xdi_cuda_roundings own = xdi_cuda_roundings_of(x, low);
            if (!mine) own = { 0.0, true };
            const double to = xd_add(sum, xdi_cuda_scan_lanes(own.sum));
            const unsigned stops = __ballot_sync(0xffffffffu, mine && !(own.plain && to < xd_mul(2.0, low)));
            const int stop = stops ? __ffs((int)stops) - 1 : XDI_CUDA_WARP;
            const double before = __shfl_sync(0xffffffffu, to, stop > 0 ? stop - 1 : 0);
            if (stop > 0) sum = before;
            if (!stops) break;
            XD_UNROLL
            for (int i = 0; i < LANE; i++) sum = xd_add(sum, tile[(stop * LANE + i) / 2].at[i % 2]);
            left &= ~(0xffffffffu >> (31 - stop));
        }
    }
    return sum;
}
