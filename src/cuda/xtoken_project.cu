/* Projected losses: the matrix in J, the student's sums of a tile's chunks, deltas. kernel/cpu/xtoken.c is the reference. */

/* ---- probabilities ---- */

/* e^(z / temperature - lse) of a row. */
struct xdi_cuda_xtoken_power {
    float base, factor, rest; /* 2^((z - base) factor - rest) */

    __device__ void set(double lse, double temperature) {
        const double most = 3.4e38, scaled = __dmul_rn(lse, temperature);
        base = (float)(fabs(scaled) > most && isfinite(lse) ? copysign(most, scaled) : scaled);
        factor = xdi_cuda_factor(XDI_CUDA_LOG2E / temperature);
        rest = isfinite(lse) ? (float)__dmul_rn(__dsub_rn(lse, __ddiv_rn((double)base, temperature)), XDI_CUDA_LOG2E) : 0.0f;
    }
    __device__ float operator()(float z) const {
        return xdi_cuda_power(__fsub_rn(__fmul_rn(__fsub_rn(z, base), factor), rest));
    }
};

/* The rows of a place of the call. */
struct xdi_cuda_xtoken_range {
    int64_t begin, end;

    __device__ xdi_cuda_xtoken_range(int64_t first, int64_t last) : begin(first), end(last) {}
    __device__ xdi_cuda_xtoken_range(const xd_xtoken_rows &x, int64_t place)
        : begin(x.begin[place] - x.begin[0]), end(x.begin[place + 1] - x.begin[0]) {}
};

/* ---- prepare: the student ids of this shard that have entries in J, and these entries ---- */

enum { XDI_CUDA_MATRIX_SEGMENT = 1024, XDI_CUDA_MATRIX_EACH = XDI_CUDA_MATRIX_SEGMENT / XDI_CUDA_TEAM_BLOCK };

struct xdi_cuda_matrix_entry {
    int32_t slot; /* in J */
    float weight;
};

/* A student id of this shard that has entries in J. Most have one. A load of 16 bytes. */
struct alignas(16) xdi_cuda_matrix_id {
    xdi_cuda_matrix_entry entry; /* the first */
    int32_t column;              /* of the logits */
    uint32_t others;             /* where the other entries begin, of which the one before has the count as its slot; 0: none */
};

enum { XDI_CUDA_MATRIX_HERE = 2 };

/* A column of J: its entries of this shard, the first of them here. */
struct alignas(16) xdi_cuda_matrix_cell {
    int64_t begin;
    int32_t count, unused;
    int32_t column[XDI_CUDA_MATRIX_HERE]; /* of the logits */
    float weight[XDI_CUDA_MATRIX_HERE];
};

/* What prepared memory holds. A segment is so many columns of the shard. */
struct xdi_cuda_matrix {
    int64_t segments;
    xdi_cuda_matrix_id *ids;     /* ascending */
    xdi_cuda_matrix_cell *cells; /* [k] */
    int64_t *counts;             /* [segments] entries in the upper half, ids in the lower */
    int32_t *first;              /* [segments + 1] the segment's first id */
    int32_t *places;             /* [teacher_size] slots of teacher ids in J, or -1 */
    xdi_cuda_matrix_entry *entries;
    int64_t bytes;

    xdi_cuda_matrix() = default;
    __host__ __device__ explicit xdi_cuda_matrix(const xd_xtoken_matrix &m) {
        const uintptr_t start = reinterpret_cast<uintptr_t>(m.prepared);
        uintptr_t at = start + (16 - start % 16) % 16;
        segments = (m.columns + XDI_CUDA_MATRIX_SEGMENT - 1) / XDI_CUDA_MATRIX_SEGMENT;
        at = take(at, m.columns, &ids);
        at = take(at, m.k, &cells);
        at = take(at, segments, &counts);
        at = take(at, segments + 1, &first);
        at = take(at, m.projection.teacher_size, &places);
        at = take(at + (8 - at % 8) % 8, m.projection.entries, &entries);
        bytes = (int64_t)(at - start) + 16;
    }
    template <typename T> static __host__ __device__ uintptr_t take(uintptr_t at, int64_t count, T **out) {
        *out = reinterpret_cast<T *>(at);
        return at + (uintptr_t)count * sizeof(T);
    }
};

static size_t xdi_cuda_xtoken_matrix_bytes(const xd_xtoken_matrix *m) {
    return (size_t)xdi_cuda_matrix(*m).bytes;
}

static int64_t xdi_cuda_xtoken_project_scratch(int64_t, bool) {
    return 0;
}

/* Of a thread's columns, which lie side by side: entries in the upper half, ids in the lower. */
static __device__ inline uint64_t xdi_cuda_matrix_count(const xd_xtoken_matrix &m, const xdi_cuda_matrix &p, int64_t v,
                                                        int *entries) {
    const xd_xtoken_projection &from = m.projection;
    uint64_t count = 0;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_MATRIX_EACH; i++) {
        const int64_t id = m.first + v + i;
        entries[i] = 0;
        if (v + i >= m.columns) continue;
        for (int64_t e = from.row_begin[id]; e < from.row_begin[id + 1]; e++) entries[i] += p.places[from.teacher_id[e]] >= 0;
        count += ((uint64_t)entries[i] << 32) + (entries[i] > 0 ? 1u : 0u);
    }
    return count;
}

static __device__ inline int64_t xdi_cuda_matrix_column() {
    return (int64_t)blockIdx.x * XDI_CUDA_MATRIX_SEGMENT + (int64_t)threadIdx.x * XDI_CUDA_MATRIX_EACH;
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_matrix_count_kernel(const __grid_constant__ xd_xtoken_matrix m) {
    const xdi_cuda_matrix p(m);
    int entries[XDI_CUDA_MATRIX_EACH];
    const uint64_t mine = xdi_cuda_matrix_count(m, p, xdi_cuda_matrix_column(), entries);
    const uint64_t all = xdi_cuda_block_reduce(mine, (uint64_t)0, xdi_cuda_add());
    if (threadIdx.x == 0) p.counts[blockIdx.x] = (int64_t)all;
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_matrix_fill_kernel(const __grid_constant__ xd_xtoken_matrix m) {
    const xdi_cuda_matrix p(m);
    const int64_t v = xdi_cuda_matrix_column(), segment = (int64_t)blockIdx.x;
    int entries[XDI_CUDA_MATRIX_EACH];
    uint64_t before = 0, total;
    for (int64_t s = (int64_t)threadIdx.x; s < segment; s += XDI_CUDA_TEAM_BLOCK) before += (uint64_t)p.counts[s];
    before = xdi_cuda_block_reduce(before, (uint64_t)0, xdi_cuda_add());
    const uint64_t mine = xdi_cuda_matrix_count(m, p, v, entries);
    const uint64_t at = before + xdi_cuda_select_scan<XDI_CUDA_TEAM_BLOCK>(mine, &total);
    int64_t id = (int64_t)(at & 0xffffffffu), to = (int64_t)(at >> 32);
    if (threadIdx.x == 0) p.first[segment] = (int32_t)(before & 0xffffffffu);
    if (threadIdx.x == 0 && segment + 1 == p.segments) p.first[segment + 1] = (int32_t)((before + total) & 0xffffffffu);
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_MATRIX_EACH; i++) {
        const int64_t row = m.first + v + i;
        if (entries[i] == 0) continue;
        const int64_t begin = to;
        for (int64_t e = m.projection.row_begin[row]; e < m.projection.row_begin[row + 1]; e++) {
            const int32_t slot = p.places[m.projection.teacher_id[e]];
            const xdi_cuda_matrix_entry entry = { slot, m.projection.weight[e] };
            if (slot < 0) continue;
            if (to == begin) p.ids[id].entry = entry;
            p.entries[to++] = entry;
        }
        p.entries[begin].slot = entries[i] - 1; /* the entry itself is with its id */
        p.ids[id].column = (int32_t)(v + i);
        p.ids[id++].others = entries[i] > 1 ? (uint32_t)(begin + 1) : 0;
    }
}

/* One thread per column of J. */
static __global__ void XDI_CUDA_KERNEL xdi_cuda_matrix_cells_kernel(const __grid_constant__ xd_xtoken_matrix m) {
    const int64_t j = xdi_cuda_flat_index();
    if (j >= m.k) return;
    const xd_xtoken_projection &from = m.projection;
    const int64_t column = m.ids[j], begin = from.column_begin[column], all = from.column_begin[column + 1] - begin;
    const int64_t first = xdi_cuda_lower_bound(from.student_id + begin, all, m.first);
    const int64_t count = xdi_cuda_lower_bound(from.student_id + begin, all, m.first + m.columns) - first;
    xdi_cuda_matrix_cell cell = {};
    cell.begin = begin + first;
    cell.count = (int32_t)count;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_MATRIX_HERE; i++) {
        if (i >= count) continue;
        cell.column[i] = (int32_t)(from.student_id[cell.begin + i] - m.first);
        cell.weight[i] = from.column_weight[cell.begin + i];
    }
    xdi_cuda_matrix(m).cells[j] = cell;
}

static xd_result xdi_cuda_xtoken_prepare(const xd_launch *launch, const xd_xtoken_matrix *m) {
    const xdi_cuda_matrix p(*m);
    const xd_xtoken_slots_args a = { m->ids, m->k, m->projection.teacher_size, p.places };
    const xdi_cuda_grid grid = xdi_cuda_grid_of(p.segments, XDI_CUDA_TEAM_BLOCK);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XD_TRY(xdi_cuda_xtoken_slots(launch, &a));
    XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(m->k), xdi_cuda_matrix_cells_kernel, *m));
    if (m->columns == 0) return XD_OK;
    XD_TRY(XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_matrix_count_kernel, *m));
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_matrix_fill_kernel, *m);
}

/* (M dy) of one of the ids that have entries in J. */
static __device__ inline double xdi_cuda_matrix_back(const xdi_cuda_matrix &p, const xdi_cuda_matrix_id &id, double first,
                                                     const double *dy) {
    double sum = __dmul_rn((double)id.entry.weight, first);
    if (id.others == 0) return sum;
    const xdi_cuda_matrix_entry *others = p.entries + id.others;
    const int count = others[-1].slot;
    for (int i = 0; i < count; i++) {
        const xdi_cuda_matrix_entry entry = others[i];
        sum = __dadd_rn(sum, __dmul_rn((double)entry.weight, dy[entry.slot]));
    }
    return sum;
}

/* ---- project: a thread a cell; the warp shares cells whose columns have many entries ---- */

enum { XDI_CUDA_PROJECT_ROWS = 32, XDI_CUDA_PROJECT_LONG = 48, XDI_CUDA_PROJECT_AHEAD = 4 };

/* Cells of a thread at a time: as many as find room in registers. */
template <bool FIXED> struct xdi_cuda_project_each {
    enum { COUNT = FIXED ? 2 : 4, BATCHES = FIXED ? 2 : 4, ALL = COUNT * BATCHES * XDI_CUDA_TEAM_BLOCK };
};

struct xdi_cuda_project_row {
    xdi_cuda_xtoken_power power;
    int64_t row;
};

/* The entries begin, begin + step, ... of a column of the matrix times the probabilities of rows. */
template <bool FIXED>
static __device__ inline void xdi_cuda_project_add(const xd_xtoken_project_args &a, const xdi_cuda_project_row *rows, int count,
                                                   int64_t begin, int64_t end, int64_t step, xdi_cuda_sums<1, FIXED> *sum) {
    const xd_xtoken_projection &m = a.matrix.projection;
    for (int64_t first = begin; first < end; first += XDI_CUDA_PROJECT_AHEAD * step) {
        int32_t id[XDI_CUDA_PROJECT_AHEAD];
        float weight[XDI_CUDA_PROJECT_AHEAD], z[XDI_CUDA_PROJECT_AHEAD];
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_PROJECT_AHEAD; i++) {
            const bool has = first + i * step < end;
            id[i] = has ? m.student_id[first + i * step] : -1;
            weight[i] = has ? m.column_weight[first + i * step] : 0.0f;
        }
        for (int r = 0; r < count; r++) {
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_PROJECT_AHEAD; i++)
                z[i] = id[i] >= 0 ? xdi_cuda_element(a.x.logits, rows[r].row, id[i] - a.x.first) : 0.0f;
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_PROJECT_AHEAD; i++)
                if (id[i] >= 0) sum->add_wide(0, __dmul_rn((double)weight[i], (double)rows[r].power(z[i])));
        }
    }
}

/* The sums of the lanes' columns that have many entries, one after the other by the whole warp. */
template <bool FIXED>
static __device__ inline void xdi_cuda_project_long(const xd_xtoken_project_args &a, const xdi_cuda_project_row *rows, int count,
                                                    const xdi_cuda_matrix_cell &cell, xdi_cuda_sums<1, FIXED> *mine) {
    typedef xdi_cuda_sums<1, FIXED> sums;
    const int lane = (int)(threadIdx.x % XDI_CUDA_WARP);
    unsigned left = __ballot_sync(0xffffffffu, cell.count > XDI_CUDA_PROJECT_LONG);
    for (; left != 0; left &= left - 1) {
        const int owner = __ffs((int)left) - 1;
        const int64_t from = __shfl_sync(0xffffffffu, cell.begin, owner), to = from + __shfl_sync(0xffffffffu, cell.count, owner);
        sums part;
        xdi_cuda_project_add<FIXED>(a, rows, count, from + lane, to, XDI_CUDA_WARP, &part);
        const typename sums::totals totals = xdi_cuda_team_totals<XDI_CUDA_WARP>(part);
        if (lane == owner) mine->whole = typename sums::join()(mine->whole, totals);
    }
}

/* What a thread's columns have of some rows. The entries that cells hold are under way for all before the first is used. */
template <bool FIXED, int EACH>
static __device__ inline void xdi_cuda_project_rows(const xd_xtoken_project_args &a, const xdi_cuda_project_row *rows, int count,
                                                    const xdi_cuda_matrix_cell (&cells)[EACH], xdi_cuda_sums<1, FIXED> (&mine)[EACH]) {
    enum { HERE = XDI_CUDA_MATRIX_HERE };
    const bool wide = a.x.logits.dtype == XD_DTYPE_F32;
    XD_UNROLL_N(1)
    for (int r = 0; r < count; r++) {
        const xdi_cuda_xtoken_power power = rows[r].power;
        const void *row = xdi_cuda_row_of(a.x.logits, rows[r].row);
        uint32_t asked[EACH][HERE];
        XD_UNROLL
        for (int i = 0; i < EACH * HERE; i++) {
            const xdi_cuda_matrix_cell &cell = cells[i / HERE];
            asked[i / HERE][i % HERE] = 0;
            if (i % HERE < cell.count && cell.count <= XDI_CUDA_PROJECT_LONG)
                asked[i / HERE][i % HERE] = xdi_cuda_ask(row, wide, cell.column[i % HERE]);
        }
        XD_UNROLL
        for (int i = 0; i < EACH * HERE; i++) {
            const xdi_cuda_matrix_cell &cell = cells[i / HERE];
            const float p = power(xdi_cuda_asked(asked[i / HERE][i % HERE], wide));
            if (i % HERE < cell.count && cell.count <= XDI_CUDA_PROJECT_LONG)
                mine[i / HERE].add_wide(0, __dmul_rn((double)cell.weight[i % HERE], (double)p));
        }
    }
    int most = 0;
    XD_UNROLL
    for (int i = 0; i < EACH; i++) most = cells[i].count > most ? cells[i].count : most;
    if (!__any_sync(0xffffffffu, most > HERE)) return;
    XD_UNROLL_N(1)
    for (int i = 0; i < EACH; i++) {
        xdi_cuda_matrix_cell cell = {};
        xdi_cuda_sums<1, FIXED> sum;
        XD_UNROLL
        for (int j = 0; j < EACH; j++)
            if (i == j) cell = cells[j];
        if (cell.count <= XDI_CUDA_PROJECT_LONG)
            xdi_cuda_project_add<FIXED>(a, rows, count, cell.begin + HERE, cell.begin + cell.count, 1, &sum);
        xdi_cuda_project_long<FIXED>(a, rows, count, cell, &sum);
        XD_UNROLL
        for (int j = 0; j < EACH; j++)
            if (i == j) mine[j].whole = typename xdi_cuda_sums<1, FIXED>::join()(mine[j].whole, sum.whole);
    }
}

/* Adds sums to cells, all of which have been asked for before the first is written. */
template <int EACH>
static __device__ inline void xdi_cuda_project_join(double *cells, int64_t count, const xdi_cuda_sums<1, false> (&mine)[EACH]) {
    double before[EACH];
    XD_UNROLL
    for (int i = 0; i < EACH; i++) before[i] = i * XDI_CUDA_TEAM_BLOCK < count ? cells[i * XDI_CUDA_TEAM_BLOCK] : 0.0;
    XD_UNROLL
    for (int i = 0; i < EACH; i++)
        if (i * XDI_CUDA_TEAM_BLOCK < count) cells[i * XDI_CUDA_TEAM_BLOCK] = __dadd_rn(before[i], mine[i].whole.sum[0]);
}

template <int EACH>
static __device__ inline void xdi_cuda_project_join(double *cells, int64_t count, const xdi_cuda_sums<1, true> (&mine)[EACH]) {
    XD_UNROLL
    for (int i = 0; i < EACH; i++)
        if (i * XDI_CUDA_TEAM_BLOCK < count) xdi_cuda_cell_join(cells, i * XDI_CUDA_TEAM_BLOCK, mine[i].whole);
}

/* A block has a part of a chunk's cells, whose rows it takes up once. */
template <bool FIXED>
static __global__ void __launch_bounds__(XDI_CUDA_TEAM_BLOCK, FIXED ? 1 : XDI_CUDA_BLOCKS(3))
    xdi_cuda_xtoken_project_kernel(const __grid_constant__ xd_xtoken_project_args a, int64_t parts) {
    typedef xdi_cuda_project_each<FIXED> each;
    enum { COUNT = each::COUNT, STEP = COUNT * XDI_CUDA_TEAM_BLOCK, WORDS = FIXED ? 2 : 1 };
    XD_SHARED(xdi_cuda_project_row, rows, [XDI_CUDA_PROJECT_ROWS]);
    const xdi_cuda_matrix m(a.matrix);
    const int64_t place = (int64_t)blockIdx.x / parts, k = a.matrix.k, begin = ((int64_t)blockIdx.x - place * parts) * each::ALL;
    const xdi_cuda_xtoken_range range(a.x, place);
    for (int64_t first = range.begin; first < range.end; first += XDI_CUDA_PROJECT_ROWS) {
        const int64_t left = range.end - first;
        const int count = left < XDI_CUDA_PROJECT_ROWS ? (int)left : (int)XDI_CUDA_PROJECT_ROWS;
        __syncthreads(); /* the rows before are no longer read */
        if ((int)threadIdx.x < count) {
            xdi_cuda_project_row &row = rows[threadIdx.x];
            row.row = a.x.rows[first + (int64_t)threadIdx.x];
            row.power.set(a.x.lse[row.row], a.x.temperature);
        }
        __syncthreads();
        XD_UNROLL_N(1)
        for (int64_t j = begin + (int64_t)threadIdx.x; j - (int64_t)threadIdx.x < k && j < begin + each::ALL; j += STEP) {
            xdi_cuda_matrix_cell cells[COUNT];
            xdi_cuda_sums<1, FIXED> mine[COUNT];
            XD_UNROLL
            for (int i = 0; i < COUNT; i++) {
                cells[i] = {};
                if (j + i * XDI_CUDA_TEAM_BLOCK < k) cells[i] = xdi_cuda_load_whole(m.cells + j + i * XDI_CUDA_TEAM_BLOCK);
            }
            xdi_cuda_project_rows<FIXED, COUNT>(a, rows, count, cells, mine);
            xdi_cuda_project_join<COUNT>(a.cells + (place * k + j) * WORDS, k - j, mine);
        }
    }
}

static xd_result xdi_cuda_xtoken_project(const xd_launch *launch, const xd_xtoken_project_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->x.count == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        const int64_t each = xdi_cuda_project_each<FIXED>::ALL, parts = (a->matrix.k + each - 1) / each;
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->place_count * parts, XDI_CUDA_TEAM_BLOCK),
                               xdi_cuda_xtoken_project_kernel<FIXED>, *a, parts);
    })
}

/* ---- delta: one block per row; reads the row where the matrix has entries in J ---- */

/* An id with what it is multiplied by. */
struct xdi_cuda_delta_id {
    xdi_cuda_matrix_id id;
    double dy; /* of its first entry */
    uint32_t z; /* as it lies in memory */
};

template <bool FIXED>
static __global__ void __launch_bounds__(XDI_CUDA_TEAM_BLOCK, FIXED ? 1 : XDI_CUDA_BLOCKS(3))
    xdi_cuda_xtoken_delta_kernel(const __grid_constant__ xd_xtoken_delta_args a) {
    const xdi_cuda_matrix p(a.matrix);
    const int64_t i = (int64_t)blockIdx.x, row = a.x.rows[i], place = a.x.places[i];
    const double largest = a.chunks[place].largest, *dy = a.dy + place * a.matrix.k;
    if (largest == 0.0 || a.chunks[place].alone || p.segments == 0) return;
    const int64_t ids = p.first[p.segments];
    const bool wide = a.x.logits.dtype == XD_DTYPE_F32;
    const void *from = xdi_cuda_row_of(a.x.logits, row);
    xdi_cuda_xtoken_power power;
    xdi_cuda_sums<1, FIXED> mine;
    power.set(a.x.lse[row], a.x.temperature);
    xdi_cuda_each_ahead<XDI_CUDA_TEAM_BLOCK, 4>(
        ids, [&](int64_t i) { return xdi_cuda_load_whole(p.ids + i); },
        [&](const xdi_cuda_matrix_id &id) -> xdi_cuda_delta_id {
            return { id, dy[id.entry.slot], xdi_cuda_ask(from, wide, id.column) };
        },
        [&](int64_t, const xdi_cuda_delta_id &x) {
            const double h = xdi_cuda_matrix_back(p, x.id, x.dy, dy);
            mine.add_wide(0, __dmul_rn(__ddiv_rn(h, largest), (double)power(xdi_cuda_asked(x.z, wide))));
        });
    const typename xdi_cuda_sums<1, FIXED>::totals totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    if (threadIdx.x == 0) xdi_cuda_cell_join(a.cells, i, totals);
}

static xd_result xdi_cuda_xtoken_delta(const xd_launch *launch, const xd_xtoken_delta_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->x.count == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->x.count, XDI_CUDA_TEAM_BLOCK),
                               xdi_cuda_xtoken_delta_kernel<FIXED>, *a);
    })
}

static xd_result xdi_cuda_project_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_matrix_cells_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_matrix_count_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_matrix_fill_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_project_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_project_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_delta_kernel<true>));
    return xdi_cuda_load(ctx, xdi_cuda_xtoken_delta_kernel<false>);
}

static void xdi_cuda_project_fill(xd_xtoken_kernels *kernels) {
    kernels->matrix_bytes = xdi_cuda_xtoken_matrix_bytes;
    kernels->project_scratch = xdi_cuda_xtoken_project_scratch;
    kernels->prepare = xdi_cuda_xtoken_prepare;
    kernels->project = xdi_cuda_xtoken_project;
    kernels->delta = xdi_cuda_xtoken_delta;
}
