/* Tiles of chunks over common and uncommon ids. Means are formed from the logits where they are used. In INVARIANT mode terms have the
 * bits of xtoken_gold.cu, which works on the chunks that several ranks share. */

enum {
    XDI_CUDA_PAIR_EIGHTS = 8, /* of a thread */
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
        at += (uintptr_t)((a.teacher.count + 1) / 2 * 2) * sizeof(double); /* so that parts begin on 16 bytes */
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
    __device__ float of_sum(float all) const {
        return __fmaf_rn(__fsub_rn(all, base), factor, -rest);
    }
    /* Of the ids that are not negative; the others get any number. */
    __device__ void gather(const int32_t (&ids)[XDI_CUDA_EIGHT], float (&means)[XDI_CUDA_EIGHT]) const {
        const bool wide = !half();
        uint32_t asked[XDI_CUDA_EIGHT];
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) asked[j] = xdi_cuda_ask(start, wide, ids[j] < 0 ? 0 : ids[j]);
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) means[j] = xdi_cuda_asked(asked[j], wide);
        XD_UNROLL_N(1)
        for (int64_t i = rows.begin + 1; i < rows.end; i++) {
            const void *more = xdi_cuda_row_of(x.logits, x.rows[i]);
            XD_UNROLL
            for (int j = 0; j < XDI_CUDA_EIGHT; j++) asked[j] = xdi_cuda_ask(more, wide, ids[j] < 0 ? 0 : ids[j]);
            XD_UNROLL
            for (int j = 0; j < XDI_CUDA_EIGHT; j++) means[j] = __fadd_rn(means[j], xdi_cuda_asked(asked[j], wide));
        }
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) means[j] = of_sum(means[j]);
    }
    /* Of eight columns, whose logits of the first row are given; what lies beyond the columns is of no use. */
    __device__ void finish(int64_t c, xdi_cuda_eight all, float (&means)[XDI_CUDA_EIGHT]) const {
        for (int64_t i = rows.begin + 1; i < rows.end; i++) {
            const xdi_cuda_eight more = xdi_cuda_read_any(x.logits, x.rows[i], c, x.columns);
            XD_UNROLL
            for (int j = 0; j < XDI_CUDA_EIGHT; j++) all.at[j] = __fadd_rn(all.at[j], more.at[j]);
        }
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) means[j] = of_sum(all.at[j]);
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

/* The partners of eight columns. */
static __device__ inline void xdi_cuda_gold_ask(const int32_t *from, int32_t (&partner)[XDI_CUDA_EIGHT]) {
    const xdi_cuda_pack<int32_t> low = xdi_cuda_load16(from), high = xdi_cuda_load16(from + 4);
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) partner[i] = i < 4 ? low.at[i % 4] : high.at[i % 4];
}

/* The first column of eight number e of this thread. */
static __device__ inline int64_t xdi_cuda_pair_column(int64_t part, int e) {
    return part * XDI_CUDA_PAIR_COLUMNS + (e * XDI_CUDA_TEAM_BLOCK + (int64_t)threadIdx.x) * XDI_CUDA_EIGHT;
}

static __device__ inline xdi_cuda_top xdi_cuda_gold_top(double value, int64_t at) {
    const xdi_cuda_top none = { -(double)INFINITY, INT64_MAX }, one = { value, at };
    return at < 0 ? none : one;
}

static __device__ inline xdi_cuda_top xdi_cuda_gold_best_of(const xdi_cuda_top &mine) {
    return xdi_cuda_block_reduce(mine, xdi_cuda_gold_top(0.0, -1), xdi_cuda_top_join());
}

/* The work of a block. T: the type of the student's logits. */
template <bool FIXED, typename T> struct xdi_cuda_gold_pairs;

/* The most probable column that a thread has seen; the lowest among equals. */
struct xdi_cuda_gold_best {
    double value;
    int64_t column;

    __device__ void see(double x, int64_t v) {
        if (column >= 0 && !(x > value)) return;
        value = x;
        column = v;
    }
};

template <typename T> struct xdi_cuda_gold_pairs<true, T> {
    static __device__ inline void run(const xd_xtoken_gold_args &a, int64_t chunk, int64_t part, xdi_cuda_gold_part<true> *out) {
        const int64_t columns = a.student.columns;
        const xdi_cuda_gold_means<true> student = xdi_cuda_gold_student<true>(a, chunk), teacher = xdi_cuda_gold_teacher<true>(a, chunk);
        xdi_cuda_gold_best mean = { 0.0, -1 }, other = { 0.0, -1 };
        xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, true> mine;
        for (int e = 0; e < XDI_CUDA_PAIR_EIGHTS; e++) {
            const int64_t c = xdi_cuda_pair_column(part, e);
            int32_t partner[XDI_CUDA_EIGHT];
            xdi_cuda_eight slopes = {};
            if (c >= columns) break;
            xdi_cuda_gold_ask(a.partner + c, partner);
            for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
                double term = 0.0;
                if (partner[i] < 0) continue;
                const double alpha = student(c + i), beta = teacher(partner[i]);
                mean.see(alpha, a.student.first + c + i);
                other.see(beta, a.student.first + c + i);
                if (!xd_xtoken_pair_term(alpha, beta, a.reverse, &term, &slopes.at[i])) continue;
                mine.add_wide(XDI_CUDA_GOLD_KL, term);
                mine.add_wide(XDI_CUDA_GOLD_SLOPES, (double)slopes.at[i]);
            }
            xdi_cuda_write(a.u + chunk * columns, c, columns, slopes);
        }
        const auto sums = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
        const xdi_cuda_top best = xdi_cuda_gold_best_of(xdi_cuda_gold_top(mean.value, mean.column));
        const xdi_cuda_top best_other = xdi_cuda_gold_best_of(xdi_cuda_gold_top(other.value, other.column));
        if (threadIdx.x != 0) return;
        out->sums = sums;
        out->mean = best;
        out->other = best_other;
    }
};

/* Eight columns that are on their way. */
template <typename T> struct xdi_cuda_gold_coming {
    int32_t partner[XDI_CUDA_EIGHT];
    xdi_cuda_raw<T> logits; /* of the first row, if `whole` */
    bool whole;

    __device__ void ask(const xd_xtoken_gold_args &a, const T *row, int64_t c) {
        whole = xdi_cuda_is_aligned16(row) && c + XDI_CUDA_EIGHT <= a.student.columns;
        if (c < a.student.columns) xdi_cuda_gold_ask(a.partner + c, partner);
        if (whole) logits.load(row + c);
    }
};

/* The largest mean that a thread has seen, and its eight columns; which of them has it is found at the end. */
struct xdi_cuda_gold_largest {
    float value;
    int eight;

    /* x: -infinity without a partner; some: there is one. */
    __device__ void see(const float (&x)[XDI_CUDA_EIGHT], bool some, int e) {
        float most = -INFINITY;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) most = fmaxf(most, x[i]);
        const bool is_new = most > value || (some && eight < 0);
        value = is_new ? most : value;
        eight = is_new ? e : eight;
    }
};

template <typename T> struct xdi_cuda_gold_pairs<false, T> {
    typedef xdi_cuda_gold_means<false> means_type;
    const xd_xtoken_gold_args &a;
    means_type student, teacher;
    int64_t part;
    float *u;
    xdi_cuda_gold_largest mean, other;
    xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, false> mine;

    __device__ xdi_cuda_gold_pairs(const xd_xtoken_gold_args &args, int64_t chunk, int64_t block)
        : a(args), student(xdi_cuda_gold_student<false>(args, chunk)), teacher(xdi_cuda_gold_teacher<false>(args, chunk)), part(block),
          u(args.u + chunk * args.student.columns) {
        mean = other = { -INFINITY, -1 };
    }
    __device__ void values(const xdi_cuda_gold_coming<T> &now, int64_t c, float (&alpha)[XDI_CUDA_EIGHT],
                           float (&beta)[XDI_CUDA_EIGHT]) const {
        teacher.gather(now.partner, beta);
        student.finish(c, now.whole ? now.logits.widened() : xdi_cuda_read_any(a.student.logits, student.row, c, a.student.columns), alpha);
    }
    __device__ void eight(const xdi_cuda_gold_coming<T> &now, int64_t c, int e) {
        float alpha[XDI_CUDA_EIGHT], beta[XDI_CUDA_EIGHT];
        xdi_cuda_eight slopes;
        int32_t none = -1;
        values(now, c, alpha, beta);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const bool has = now.partner[i] >= 0;
            const float d = __fsub_rn(alpha[i], beta[i]);
            none &= now.partner[i];
            alpha[i] = has ? alpha[i] : -INFINITY;
            beta[i] = has ? beta[i] : -INFINITY;
            const float p = xdi_cuda_power(__fmul_rn(a.reverse ? alpha[i] : beta[i], (float)XDI_CUDA_LOG2E));
            mine.add(XDI_CUDA_GOLD_KL, p == 0.0f ? 0.0f : __fmul_rn(p, a.reverse ? d : -d));
            slopes.at[i] = p == 0.0f ? 0.0f : __fmul_rn(p, a.reverse ? __fadd_rn(d, 1.0f) : -1.0f);
            mine.add(XDI_CUDA_GOLD_SLOPES, slopes.at[i]);
        }
        mean.see(alpha, none >= 0, e);
        other.see(beta, none >= 0, e);
        mine.end_eight();
        xdi_cuda_write(u, c, a.student.columns, slopes);
    }
    /* The best of the block, by the thread that has seen it. */
    __device__ void tell(const xdi_cuda_gold_largest &largest, bool others, xdi_cuda_top *out) const {
        const int64_t c = largest.eight < 0 ? -1 : xdi_cuda_pair_column(part, largest.eight);
        const xdi_cuda_top best = xdi_cuda_gold_best_of(xdi_cuda_gold_top((double)largest.value, c));
        if (best.at == INT64_MAX && threadIdx.x == 0) *out = best;
        if (c != best.at) return;
        xdi_cuda_gold_coming<T> again;
        float alpha[XDI_CUDA_EIGHT], beta[XDI_CUDA_EIGHT];
        int at = 0;
        again.ask(a, xdi_cuda_row<T>(a.student.logits, student.row), c);
        values(again, c, alpha, beta);
        XD_UNROLL
        for (int i = XDI_CUDA_EIGHT - 1; i >= 0; i--)
            if (again.partner[i] >= 0 && (others ? beta[i] : alpha[i]) == largest.value) at = i;
        out->value = best.value;
        out->at = a.student.first + c + at;
    }
    static __device__ inline void run(const xd_xtoken_gold_args &args, int64_t chunk, int64_t block, xdi_cuda_gold_part<false> *out) {
        xdi_cuda_gold_pairs work(args, chunk, block);
        const T *row = xdi_cuda_row<T>(args.student.logits, work.student.row);
        xdi_cuda_gold_coming<T> next;
        next.ask(args, row, xdi_cuda_pair_column(block, 0));
        XD_UNROLL_N(1)
        for (int e = 0; e < XDI_CUDA_PAIR_EIGHTS; e++) {
            const int64_t c = xdi_cuda_pair_column(block, e);
            const xdi_cuda_gold_coming<T> now = next;
            if (c >= args.student.columns) break;
            if (e + 1 < XDI_CUDA_PAIR_EIGHTS) next.ask(args, row, xdi_cuda_pair_column(block, e + 1));
            work.eight(now, c, e);
        }
        const auto sums = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(work.mine);
        if (threadIdx.x == 0) out->sums = sums;
        work.tell(work.mean, false, &out->mean);
        work.tell(work.other, true, &out->other);
    }
};

template <bool FIXED, typename T>
static __global__ void __launch_bounds__(XDI_CUDA_TEAM_BLOCK, FIXED ? 1 : sizeof(T) == 2 ? 3 : 2)
    xdi_cuda_gold_pairs_kernel(const __grid_constant__ xd_xtoken_gold_args a) {
    const xdi_cuda_gold_room room(a);
    const int64_t chunk = (int64_t)blockIdx.x / room.parts, part = (int64_t)blockIdx.x - chunk * room.parts;
    xdi_cuda_gold_pairs<FIXED, T>::run(a, chunk, part, reinterpret_cast<xdi_cuda_gold_part<FIXED> *>(room.sums) + blockIdx.x);
}

template <bool FIXED, typename T> static xd_result xdi_cuda_gold_pairs_of(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    const xdi_cuda_gold_room room(*a);
    const auto kernel = xdi_cuda_gold_pairs_kernel<FIXED, T>; /* its comma is none of the macro's */
    if (room.parts == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count * room.parts, XDI_CUDA_TEAM_BLOCK), kernel, *a);
}

/* Sums in fixed point take logits of any type. */
static xd_result xdi_cuda_gold_pairs_all(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    if (a->fixed) return xdi_cuda_gold_pairs_of<true, float>(launch, a);
    XDI_CUDA_LOGITS(a->student.logits.dtype, T, { return (xdi_cuda_gold_pairs_of<false, T>(launch, a)); })
}
