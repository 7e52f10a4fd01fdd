/* Numbers added one after the other, by a warp: the bits of one thread that does so, in half its time.
 *
 * While a sum stays between a power of 2 and the next one, its last place stays what it is, and a number adds to it what it rounds to
 * in that place, whatever the sum is; unless it lies in the middle between two such values: then the sum's last bit decides. What they
 * round to adds up without an error, in any order. So each lane adds up some numbers that follow each other, and a scan over the lanes
 * finds the first one that reaches the next power or has such a middle. Its numbers are added in turn, and those of the lanes after it
 * are looked at again. */

enum { XDI_CUDA_IN_ORDER_LANE = 8, XDI_CUDA_IN_ORDER = XDI_CUDA_IN_ORDER_LANE * XDI_CUDA_WARP };

/* Numbers, two in a load. */
struct alignas(16) xdi_cuda_number_pair {
    double at[2];
};

static __device__ inline uint64_t xdi_cuda_double_bits(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static __device__ inline double xdi_cuda_bits_double(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* What a lane's numbers round to, one after the other, in the last place of a sum from `low` up to 2 low. From two sums, an even and an
 * odd one: a middle leaves them equal, or two places from each other, and so they stay. *alike: it left them one place from each other.
 * Of 2 low or more it is some number that is not less. */
static __device__ inline double xdi_cuda_rounded_sum(const double (&x)[XDI_CUDA_IN_ORDER_LANE], double low, bool *alike) {
    const double odd_low = xdi_cuda_bits_double(xdi_cuda_double_bits(low) + 1);
    double even = low, odd = odd_low;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_IN_ORDER_LANE; i++) {
        even = xd_add(even, x[i]);
        odd = xd_add(odd, x[i]);
    }
    const double sum = xd_sub(even, low);
    *alike = xd_sub(odd, odd_low) == sum;
    return sum;
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

/* Adds 256 numbers of which lane k has those of 8 k and after, which also lie in memory; `some`: any of a lane's is not 0. */
static __device__ inline double xdi_cuda_add_in_order_256(double sum, const double (&x)[XDI_CUDA_IN_ORDER_LANE], bool some,
                                                          const xdi_cuda_number_pair *tile) {
    const int lane = (int)threadIdx.x % XDI_CUDA_WARP;
    for (int begin = 0;;) {
        const bool left = some && lane >= begin;
        bool alike;
        const double low = xdi_cuda_bits_double(xdi_cuda_double_bits(sum) & 0x7ff0000000000000u);
        const double rounded = xdi_cuda_rounded_sum(x, low, &alike);
        const double to = xd_add(sum, xdi_cuda_scan_lanes(left ? rounded : 0.0));
        const bool fine = !left || (alike && to < xd_add(low, low));
        const unsigned stops = ~__ballot_sync(0xffffffffu, fine);
        const int stop = stops ? __ffs((int)stops) - 1 : XDI_CUDA_WARP;
        const double before = __shfl_sync(0xffffffffu, to, stop > 0 ? stop - 1 : 0);
        if (stop > 0) sum = before;
        if (stop == XDI_CUDA_WARP) return sum;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_IN_ORDER_LANE / 2; i++) {
            const xdi_cuda_number_pair pair = tile[stop * (XDI_CUDA_IN_ORDER_LANE / 2) + i];
            sum = xd_add(xd_add(sum, pair.at[0]), pair.at[1]);
        }
        begin = stop + 1;
        if (begin == XDI_CUDA_WARP) return sum;
    }
}

/* Adds n numbers, none negative; what follows them in the tile up to a multiple of 8 is 0. All lanes of a warp have the sum. */
static __device__ inline double xdi_cuda_add_in_order(double sum, const xdi_cuda_number_pair *tile, int n) {
    enum { PAIRS = XDI_CUDA_IN_ORDER_LANE / 2 };
    const int lane = (int)threadIdx.x % XDI_CUDA_WARP;
    for (int begin = 0; begin < n; begin += XDI_CUDA_IN_ORDER, tile += XDI_CUDA_IN_ORDER / 2) {
        double x[XDI_CUDA_IN_ORDER_LANE] = {};
        uint64_t any = 0;
        XD_UNROLL
        for (int i = 0; i < PAIRS && begin + lane * XDI_CUDA_IN_ORDER_LANE < n; i++) {
            const xdi_cuda_number_pair pair = tile[lane * PAIRS + i];
            x[2 * i] = pair.at[0];
            x[2 * i + 1] = pair.at[1];
            any |= xdi_cuda_double_bits(pair.at[0]) | xdi_cuda_double_bits(pair.at[1]);
        }
        if (__any_sync(0xffffffffu, any != 0)) sum = xdi_cuda_add_in_order_256(sum, x, any != 0, tile);
    }
    return sum;
}
