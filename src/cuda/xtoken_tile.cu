/* Tiles of chunks over common and uncommon ids. Means are formed from the logits where they are used. In INVARIANT mode terms have the
 * bits of xtoken_gold.cu, which works on the chunks that several ranks share. */

enum {
    XDI_CUDA_PAIR_EIGHTS = 4, /* of a thread */
    XDI_CUDA_PAIR_COLUMNS = XDI_CUDA_PAIR_EIGHTS * XDI_CUDA_EIGHT * XDI_CUDA_TEAM_BLOCK
};

enum { XDI_CUDA_GOLD_KL, XDI_CUDA_GOLD_SLOPES, XDI_CUDA_GOLD_SUMS };

/* The result of a block of pairs. */
template <bool FIXED> struct xdi_cuda_gold_part {
    typename xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, FIXED>::totals sums;
    xdi_cuda_top mean, other;
};

/* The scratch of a tile. */
struct xdi_cuda_gold_room {
    int64_t parts, width; /* blocks of a chunk; keys of a chunk's two lists */
    double *lse;          /* of the teacher's rows */
    char *sums;           /* [count, parts] */
    float *keys;          /* [count, width] */
    int64_t bytes;

    __host__ __device__ explicit xdi_cuda_gold_room(const xd_xtoken_gold_args &a) {
        const uintptr_t start = reinterpret_cast<uintptr_t>(a.scratch);
        const int64_t part = (int64_t)(a.fixed ? sizeof(xdi_cuda_gold_part<true>) : sizeof(xdi_cuda_gold_part<false>));
        uintptr_t at = start;
        parts = (a.student.columns + XDI_CUDA_PAIR_COLUMNS - 1) / XDI_CUDA_PAIR_COLUMNS;
        width = rounded(a.map.rest_count) + rounded(a.map.other_rest_count);
        keys = reinterpret_cast<float *>(at);
        at += (uintptr_t)(a.count * width) * sizeof(float);
        lse = reinterpret_cast<double *>(at);
        at += (uintptr_t)a.teacher.count * sizeof(double);
        sums = reinterpret_cast<char *>(at);
        at += (uintptr_t)(a.count * parts * part);
        bytes = (int64_t)(at - start);
    }
    static __host__ __device__ int64_t rounded(int64_t count) {
        return (count + 3) / 4 * 4; /* so that lists begin on 16 bytes */
    }
    __device__ float *list(const xd_xtoken_gold_args &a, int64_t chunk, bool others) const {
        return keys + chunk * width + (others ? rounded(a.map.rest_count) : 0);
    }
};

static size_t xdi_cuda_gold_bytes(const xd_xtoken_gold_args *a) {
    return (size_t)xdi_cuda_gold_room(*a).bytes;
}

/* ---- cells ---- */

struct xdi_cuda_either {
    __device__ uint32_t operator()(uint32_t a, uint32_t b) const {
        return a | b;
    }
};

typedef xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, false>::totals xdi_cuda_gold_doubles;
typedef xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, true>::totals xdi_cuda_gold_integers;

static __device__ inline bool xdi_cuda_gold_fits(const xdi_cuda_gold_integers &sums) {
    return sums.misfits.large + sums.misfits.infinite == 0;
}

/* Cell i becomes one of the sums. */
static __device__ inline void xdi_cuda_gold_set(double *cells, int64_t i, const xdi_cuda_gold_doubles &sums, int which) {
    cells[i] = sums.sum[which];
}

static __device__ inline void xdi_cuda_gold_set(double *cells, int64_t i, const xdi_cuda_gold_integers &sums, int which) {
    xd_fixed sum = sums.sum[which];
    if (!xdi_cuda_gold_fits(sums)) sum.high = XD_CELL_NAN;
    xdi_cuda_fixed_put(reinterpret_cast<xd_fixed *>(cells) + i, sum);
}

/* Adds one of the sums to cell i. */
static __device__ inline void xdi_cuda_gold_add(double *cells, int64_t i, const xdi_cuda_gold_doubles &sums, int which) {
    cells[i] = __dadd_rn(cells[i], sums.sum[which]);
}

static __device__ inline void xdi_cuda_gold_add(double *cells, int64_t i, const xdi_cuda_gold_integers &sums, int which) {
    xd_fixed *cell = reinterpret_cast<xd_fixed *>(cells) + i;
    xd_fixed_join(cell, sums.sum[which]);
    if (!xdi_cuda_gold_fits(sums)) cell->high = XD_CELL_NAN;
}

static __device__ inline double xdi_cuda_gold_value(const xdi_cuda_gold_doubles &sums, int which) {
    return sums.sum[which];
}

static __device__ inline double xdi_cuda_gold_value(const xdi_cuda_gold_integers &sums, int which) {
    return xdi_cuda_gold_fits(sums) ? xd_fixed_read(sums.sum[which]) : (double)NAN;
}

/* ---- partners: one thread per pair ---- */

static __host__ __device__ inline int64_t xdi_cuda_gold_width(const xd_xtoken_gold_args &a) {
    return (a.student.columns + XDI_CUDA_EIGHT - 1) / XDI_CUDA_EIGHT * XDI_CUDA_EIGHT;
}

/* Behind the partners: where this shard's ids begin and end in the list without partners, and all in the teacher's. */
static __device__ inline int32_t *xdi_cuda_gold_bounds(const xd_xtoken_gold_args &a, bool others) {
    return a.partner + xdi_cuda_gold_width(a) + (others ? 2 : 0);
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_gold_partners_kernel(const __grid_constant__ xd_xtoken_gold_args a) {
    const int64_t i = xdi_cuda_flat_index();
    if (i < 2) {
        const int64_t first = a.student.first, id = i == 0 ? first : first + a.student.columns;
        xdi_cuda_gold_bounds(a, false)[i] = (int32_t)xdi_cuda_lower_bound(a.map.rest, a.map.rest_count, id);
        xdi_cuda_gold_bounds(a, true)[i] =
            (int32_t)xdi_cuda_lower_bound(a.map.other_rest, a.map.other_rest_count, i == 0 ? 0 : a.teacher.columns);
    }
    if (i >= a.map.pairs) return;
    const int64_t v = a.map.pair[i] - a.student.first;
    if (v >= 0 && v < a.student.columns) a.partner[v] = a.map.other[i];
}

static xd_result xdi_cuda_gold_partners(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    const int64_t width = xdi_cuda_gold_width(*a);
    if (width > 0) XD_TRY(xdi_cuda_fill(launch, a->partner, 0xff, (size_t)width * sizeof *a->partner));
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->map.pairs), xdi_cuda_gold_partners_kernel, *a);
}

/* ---- means of a chunk ---- */

/* The mean log-probability of a column over the chunk's rows, from their logits. `sum` is what an order of columns goes by. */
template <bool FIXED> struct xdi_cuda_gold_means;

template <> struct xdi_cuda_gold_means<false> {
    typedef float value;
    const xd_xtoken_rows &x;
    xdi_cuda_xtoken_range rows;
    int64_t row;              /* the first, and where it begins */
    const void *start;
    float base, factor, rest; /* (sum - base) factor - rest */

    /* lse: of the rows of the call; NULL: x.lse. */
    __device__ xdi_cuda_gold_means(const xd_xtoken_rows &side, int64_t place, const double *lse, double positions)
        : x(side), rows(side, place) {
        const double scale = 1.0 / (positions * x.temperature);
        double all = 0.0;
        for (int64_t i = rows.begin; i < rows.end; i++) all += lse ? lse[i] : x.lse[x.rows[i]];
        all *= x.temperature;
        row = x.rows[rows.begin];
        start = static_cast<const char *>(x.logits.data) + row * xdi_cuda_stride(x.logits) * (half() ? 2 : 4);
        base = (float)all;
        factor = xdi_cuda_factor(scale);
        rest = (float)((all - (double)base) * scale);
    }
    __device__ bool half() const {
        return x.logits.dtype == XD_DTYPE_BF16;
    }
    /* A logit of the first row as it lies in memory, so that nothing waits for it, and then the sum over all rows. */
    __device__ uint32_t ask(int64_t v) const {
        return half() ? (uint32_t)static_cast<const uint16_t *>(start)[v] : static_cast<const uint32_t *>(start)[v];
    }
    __device__ float sum(uint32_t asked, int64_t v) const {
        float all = xd_float_of_bits(half() ? asked << 16 : asked);
        for (int64_t i = rows.begin + 1; i < rows.end; i++) all = __fadd_rn(all, xdi_cuda_element(x.logits, x.rows[i], v));
        return all;
    }
    __device__ float of_sum(float all) const {
        return __fsub_rn(__fmul_rn(__fsub_rn(all, base), factor), rest);
    }
    /* Of the ids that are not negative. */
    __device__ void gather(const int32_t (&ids)[XDI_CUDA_EIGHT], float (&means)[XDI_CUDA_EIGHT]) const {
        uint32_t asked[XDI_CUDA_EIGHT];
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) asked[j] = ids[j] < 0 ? 0 : ask(ids[j]);
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) means[j] = ids[j] < 0 ? 0.0f : of_sum(sum(asked[j], ids[j]));
    }
    /* Eight columns; what lies beyond them is of no use. */
    __device__ void eight(int64_t c, float (&means)[XDI_CUDA_EIGHT]) const {
        xdi_cuda_eight all = xdi_cuda_read_any(x.logits, row, c, x.columns);
        for (int64_t i = rows.begin + 1; i < rows.end; i++) {
            const xdi_cuda_eight more = xdi_cuda_read_any(x.logits, x.rows[i], c, x.columns);
            XD_UNROLL
            for (int j = 0; j < XDI_CUDA_EIGHT; j++) all.at[j] = __fadd_rn(all.at[j], more.at[j]);
        }
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) means[j] = of_sum(all.at[j]);
    }
    __device__ float key(uint32_t asked, int64_t v) const {
        return sum(asked, v);
    }
    __device__ double probability(int64_t, float key) const {
        return (double)xdi_cuda_power(__fmul_rn(of_sum(key), (float)XDI_CUDA_LOG2E));
    }
};

template <> struct xdi_cuda_gold_means<true> {
    typedef double value;
    const xd_xtoken_rows &x;
    xdi_cuda_xtoken_range rows;
    const double *lse;
    double scale;

    __device__ xdi_cuda_gold_means(const xd_xtoken_rows &side, int64_t place, const double *lses, double positions)
        : x(side), rows(side, place), lse(lses), scale(1.0 / positions) {}
    __device__ double operator()(int64_t v) const {
        xd_fixed cell = {};
        for (int64_t i = rows.begin; i < rows.end; i++) {
            const int64_t row = x.rows[i];
            const double z = (double)xdi_cuda_element(x.logits, row, v), log_sum = lse ? lse[i] : x.lse[row];
            xd_cell_put(&cell, xd_xtoken_log_prob(z, x.temperature, log_sum, scale));
        }
        return xd_cell_read(cell);
    }
    __device__ void eight(int64_t c, double (&means)[XDI_CUDA_EIGHT]) const {
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) means[j] = c + j < x.columns ? (*this)(c + j) : 0.0;
    }
    __device__ uint32_t ask(int64_t) const {
        return 0;
    }
    __device__ float key(uint32_t, int64_t v) const {
        return (float)(*this)(v);
    }
    __device__ void gather(const int32_t (&ids)[XDI_CUDA_EIGHT], double (&means)[XDI_CUDA_EIGHT]) const {
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) means[j] = ids[j] < 0 ? 0.0 : (*this)(ids[j]);
    }
    __device__ double probability(int64_t v, float) const {
        return exp((*this)(v));
    }
};

template <bool FIXED>
static __device__ inline xdi_cuda_gold_means<FIXED> xdi_cuda_gold_student(const xd_xtoken_gold_args &a, int64_t chunk) {
    return xdi_cuda_gold_means<FIXED>(a.student, chunk, NULL, a.chunks[chunk].student);
}

template <bool FIXED>
static __device__ inline xdi_cuda_gold_means<FIXED> xdi_cuda_gold_teacher(const xd_xtoken_gold_args &a, int64_t chunk) {
    return xdi_cuda_gold_means<FIXED>(a.teacher, chunk, xdi_cuda_gold_room(a).lse, a.chunks[chunk].teacher);
}

/* ---- pairs: a block has a part of the columns of a chunk ---- */

/* The most probable column that a thread has seen; the lowest among equals. */
template <typename Value> struct xdi_cuda_gold_best {
    Value value;
    int column;

    __device__ void see(Value x, int64_t v) {
        if (column >= 0 && !(x > value)) return;
        value = x;
        column = (int)v;
    }
    __device__ xdi_cuda_top top(int64_t first) const {
        const xdi_cuda_top none = { -(double)INFINITY, INT64_MAX }, one = { (double)value, first + column };
        return column < 0 ? none : one;
    }
};

static __device__ inline bool xdi_cuda_gold_term(double alpha, double beta, bool reverse, double *term, float *slope) {
    return xd_xtoken_pair_term(alpha, beta, reverse, term, slope);
}

static __device__ inline bool xdi_cuda_gold_term(float alpha, float beta, bool reverse, float *term, float *slope) {
    const float p = xdi_cuda_power(__fmul_rn(reverse ? alpha : beta, (float)XDI_CUDA_LOG2E)), d = __fsub_rn(alpha, beta);
    if (p == 0.0f) return false;
    *term = __fmul_rn(p, reverse ? d : -d);
    *slope = reverse ? __fmul_rn(p, __fadd_rn(d, 1.0f)) : -p;
    return true;
}

/* The partners of eight columns. */
static __device__ inline void xdi_cuda_gold_ask(const int32_t *from, int32_t (&partner)[XDI_CUDA_EIGHT]) {
    const xdi_cuda_pack<int32_t> low = xdi_cuda_load16(from), high = xdi_cuda_load16(from + 4);
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) partner[i] = i < 4 ? low.at[i % 4] : high.at[i % 4];
}

static __device__ inline void xdi_cuda_gold_take(xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, true> *sums, double term, float slope) {
    sums->add_wide(XDI_CUDA_GOLD_KL, term);
    sums->add_wide(XDI_CUDA_GOLD_SLOPES, (double)slope);
}

static __device__ inline void xdi_cuda_gold_take(xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, false> *sums, float term, float slope) {
    sums->add(XDI_CUDA_GOLD_KL, term);
    sums->add(XDI_CUDA_GOLD_SLOPES, slope);
}

template <bool FIXED>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_gold_pairs_kernel(const __grid_constant__ xd_xtoken_gold_args a) {
    typedef typename xdi_cuda_gold_means<FIXED>::value value;
    const xdi_cuda_gold_room room(a);
    const int64_t chunk = (int64_t)blockIdx.x / room.parts, part = (int64_t)blockIdx.x - chunk * room.parts;
    const int64_t columns = a.student.columns;
    const xdi_cuda_gold_means<FIXED> student = xdi_cuda_gold_student<FIXED>(a, chunk);
    const xdi_cuda_gold_means<FIXED> teacher = xdi_cuda_gold_teacher<FIXED>(a, chunk);
    xdi_cuda_gold_best<value> mean = { 0, -1 }, other = { 0, -1 };
    xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, FIXED> mine;
    for (int e = 0; e < XDI_CUDA_PAIR_EIGHTS; e++) {
        const int64_t c = part * XDI_CUDA_PAIR_COLUMNS + (e * XDI_CUDA_TEAM_BLOCK + (int64_t)threadIdx.x) * XDI_CUDA_EIGHT;
        if (c >= columns) break;
        value alpha[XDI_CUDA_EIGHT], beta[XDI_CUDA_EIGHT];
        int32_t partner[XDI_CUDA_EIGHT];
        xdi_cuda_eight slopes = {};
        xdi_cuda_gold_ask(a.partner + c, partner);
        student.eight(c, alpha);
        teacher.gather(partner, beta);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            value term = 0;
            if (partner[i] < 0) continue;
            mean.see(alpha[i], c + i);
            other.see(beta[i], c + i);
            if (xdi_cuda_gold_term(alpha[i], beta[i], a.reverse, &term, &slopes.at[i]))
                xdi_cuda_gold_take(&mine, term, slopes.at[i]);
        }
        mine.end_eight();
        xdi_cuda_write(a.u + chunk * columns, c, columns, slopes);
    }
    const xdi_cuda_top none = { -(double)INFINITY, INT64_MAX };
    xdi_cuda_gold_part<FIXED> out;
    out.sums = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    out.mean = xdi_cuda_block_reduce(mean.top(a.student.first), none, xdi_cuda_top_join());
    out.other = xdi_cuda_block_reduce(other.top(a.student.first), none, xdi_cuda_top_join());
    if (threadIdx.x == 0) reinterpret_cast<xdi_cuda_gold_part<FIXED> *>(room.sums)[blockIdx.x] = out;
}
