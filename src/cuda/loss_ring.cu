/* Losses of rows that stay on the chip, so that a row is read once and its gradient written once. The grid is as large as the
 * GPU, in clusters of blocks that share a row; a block has `slice` columns of it, in a ring of stages (ring.cuh) that also holds
 * what comes next. Per row:
 *
 *   1. every block finds its largest elements, then its sums relative to them;
 *   2. its last warp writes both into the shared memory of all blocks, and the cluster synchronises (JSD: twice);
 *   3. that warp merges the blocks' sums in the order of the columns, and leaves what the gradient needs;
 *   4. the other warps compute the gradient, while the last one asks for the copies of later rows.
 *
 * One such warp of the cluster also merges in double, into a record of the row. A second kernel, with a thread a row, makes of the
 * records what kernel/loss.h promises: the row's scalars and findings, and the gradient of the two columns that may hold nearly
 * all probability. Rows that it cannot take have the path of loss_fused.cu. */

/* A row for the second kernel, in the memory of references and sums. */
struct xdi_cuda_ring_record {
    double ref[XD_LOSS_REFERENCES], total[XD_LOSS_SUMS], mixtures[XD_LOSS_MIXTURES];
    double label_x, label_y; /* logits at the label */
};
static_assert(sizeof(xdi_cuda_ring_record) <= XD_LOSS_REFERENCES * sizeof(double) + XD_LOSS_SUMS * sizeof(xd_fixed),
              "a row's memory, see xdi_loss_layout");

/* What a block tells the others: sums as in kernel/loss.h. */
struct xdi_cuda_ring_entry {
    double sum[XDI_CUDA_LOSS_TERMS], ones; /* ones: of the student's columns that have its largest element */
    float max, teacher_max, beside;        /* beside: the teacher's logit at arg */
    float label_x, label_y;                /* 0 unless the block has the label */
    int arg, columns;                      /* arg: a column of the block */
};

enum { XDI_CUDA_RING_BLOCKS = 16, XDI_CUDA_RING_SCALE = 160 };

/* What the asking thread knows, in memory, as it needs its registers between. */
struct xdi_cuda_ring_feed {
    int64_t row;
    double scale;       /* of the row, asked for when the row before was done */
    const char *at[2];  /* what comes next, of the student and the teacher */
    int left;           /* bytes of it that the row still has */
    xdi_cuda_ring_place place; /* parity: of the wait for "empty", which a new ring passes at once */
};

struct xdi_cuda_ring_memory {
    xdi_cuda_ring_barriers barriers;
    xdi_cuda_ring_feed feed;
    int maxima[2][XDI_CUDA_RING_WARPS]; /* in their order as integers */
    float parts[XDI_CUDA_RING_TOTALS][XDI_CUDA_RING_WARPS + 1];
    int args[XDI_CUDA_RING_WARPS];      /* the lowest column that has the block's largest element; INT32_MAX: none */
    double totals[XDI_CUDA_RING_TOTALS]; /* of all warps */
    xdi_cuda_ring_entry table[2][XDI_CUDA_RING_BLOCKS]; /* of this row and the next */
    double mixtures[XDI_CUDA_RING_BLOCKS][XD_LOSS_MIXTURES];
    alignas(16) unsigned char factors[XDI_CUDA_RING_SCALE]; /* what the row's gradient needs */
    int next;                                               /* the cluster's next row that counts */
};

/* Where a block's columns are, and which rows its cluster has: `cluster`, then every `clusters`-th. */
struct xdi_cuda_ring_block {
    int begin, cluster, clusters, rank, blocks, count, packs, chunks;
    bool last; /* of the row */
};

template <typename X, int TENSORS>
static __device__ inline xdi_cuda_ring_block xdi_cuda_ring_block_of(const xd_loss_args &a, const xdi_cuda_ring_call &call) {
    const int64_t columns = a.vocab.end - a.vocab.begin;
    xdi_cuda_ring_block b;
    b.rank = (int)xdi_cuda_cluster_rank();
    b.blocks = (int)xdi_cuda_cluster_size();
    b.cluster = (int)blockIdx.x / b.blocks;
    b.clusters = (int)gridDim.x / b.blocks;
    const int64_t begin = b.rank * call.slice, left = columns - begin;
    b.begin = (int)(begin < columns ? begin : columns);
    b.count = (int)(left < 0 ? 0 : left < call.slice ? left : call.slice);
    b.packs = b.count / xdi_cuda_pack<X>::COUNT;
    b.chunks = (b.packs + xdi_cuda_ring_form<X, TENSORS>::PACKS - 1) / xdi_cuda_ring_form<X, TENSORS>::PACKS;
    b.last = b.rank + 1 == b.blocks;
    return b;
}

/* ---- the thread that asks for copies, the first of the last warp ---- */

/* Goes to a row that counts, `row` or one after it. */
template <typename X, int TENSORS>
static __device__ inline void xdi_cuda_ring_go(const xd_loss_args &a, const xdi_cuda_ring_block &b, xdi_cuda_ring_feed *f) {
    while (f->row < a.student.rows && f->scale == 0.0) {
        f->row += b.clusters;
        f->scale = f->row < a.student.rows ? a.row_scale[f->row] : 0.0;
    }
    if (f->row >= a.student.rows) return;
    f->at[0] = reinterpret_cast<const char *>(xdi_cuda_row<X>(a.student, f->row) + b.begin);
    if (TENSORS == 2) f->at[1] = reinterpret_cast<const char *>(xdi_cuda_row<X>(a.teacher, f->row) + b.begin);
    f->left = 16 * b.packs;
}

/* Asks for the next stage, if there is one. */
template <typename X, int TENSORS>
static __device__ inline void xdi_cuda_ring_ask(const xd_loss_args &a, const xdi_cuda_ring_block &b, int stages,
                                                unsigned char *room, xdi_cuda_ring_barriers *barriers, xdi_cuda_ring_feed *f, bool *sound) {
    enum { BYTES = xdi_cuda_ring_form<X, TENSORS>::BYTES };
    if (f->left <= 0) xdi_cuda_ring_go<X, TENSORS>(a, b, f);
    if (f->left <= 0) return;
    xdi_cuda_ring_wait(&barriers->empty[f->place.stage], f->place.parity, sound);
    if (!*sound) return;
    const unsigned bytes = (unsigned)(f->left < BYTES ? f->left : (int)BYTES);
    uint64_t *const full = &barriers->full[f->place.stage];
    unsigned char *const to = room + f->place.stage * XDI_CUDA_RING_STAGE;
    xdi_cuda_barrier_expect(full, bytes * TENSORS);
    XD_UNROLL
    for (int i = 0; i < TENSORS; i++) {
        xdi_cuda_bulk_load(to + i * BYTES, f->at[i], bytes, full);
        f->at[i] += BYTES;
    }
    f->place.next(stages);
    f->left -= BYTES;
    if (f->left > 0) return;
    f->row += b.clusters;
    f->scale = f->row < a.student.rows ? a.row_scale[f->row] : 0.0;
}

static __device__ inline xdi_cuda_ring_feed xdi_cuda_ring_feed_of(const xd_loss_args &a, const xdi_cuda_ring_block &b) {
    return { b.cluster, b.cluster < a.student.rows ? a.row_scale[b.cluster] : 0.0, { NULL, NULL }, 0, { 0, 1u } };
}

/* ---- a row ---- */

/* The element of this block's columns, which are all on the chip; `start` is the first one's place. */
template <typename X, int TENSORS>
static __device__ inline float xdi_cuda_ring_element(const unsigned char *room, const xdi_cuda_ring_place &start, int stages,
                                                     int column, int tensor) {
    typedef xdi_cuda_ring_form<X, TENSORS> form;
    enum { COLUMNS = form::COLUMNS };
    int stage = start.stage + column / COLUMNS;
    if (stage >= stages) stage -= stages;
    const unsigned char *at = room + stage * XDI_CUDA_RING_STAGE + tensor * form::BYTES;
    return xdi_cuda_widen(reinterpret_cast<const X *>(at)[column % COLUMNS]);
}

/* The block's entry, from its sums. By all lanes of a warp. */
template <typename X, int KIND>
static __device__ inline xdi_cuda_ring_entry
xdi_cuda_ring_entry_of(const xd_loss_args &a, int64_t r, const xdi_cuda_ring_block &b, int stages, const unsigned char *room,
                       const xdi_cuda_ring_place &start, const double *sum, int arg) {
    typedef xdi_cuda_ring_is<KIND> is;
    xdi_cuda_ring_entry e;
    memset(&e, 0, sizeof e);
    e.arg = arg;
    e.columns = b.count;
    e.ones = sum[XDI_CUDA_RING_ONES];
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_LOSS_TERMS; i++)
        if (xdi_cuda_ring_sums_up<KIND>(i)) e.sum[i] = sum[i];
    if (is::SOFT && arg < b.count) e.beside = xdi_cuda_ring_element<X, is::TENSORS>(room, start, stages, arg, 1);
    e.sum[XD_LOSS_SOFT] += is::SOFT ? e.ones : 0.0;
    e.sum[XD_LOSS_TEACHER] += is::SOFT ? sum[XDI_CUDA_RING_TEACHER_ONES] : 0.0;
    e.sum[XD_LOSS_HARD] += is::HARD && !is::SHARED ? e.ones : 0.0;
    if (is::SHARED) e.sum[XD_LOSS_HARD] = e.sum[XD_LOSS_SOFT];
    const int64_t label = is::HARD ? xd_id_at(a.labels, r) - b.begin : -1;
    if (label >= 0 && label < b.count) {
        e.label_x = xdi_cuda_ring_element<X, is::TENSORS>(room, start, stages, (int)label, 0);
        if (is::SOFT) e.label_y = xdi_cuda_ring_element<X, is::TENSORS>(room, start, stages, (int)label, 1);
    }
    return e;
}

/* A block's sum, where a factor of 0 leaves nothing but NaN, which is a finding. */
static __device__ inline double xdi_cuda_ring_scaled(double factor, double sum) {
    return factor > 0.0 ? factor * sum : isnan(sum) ? sum : 0.0;
}

/* Reverse: a block's sum relative to the row. */
static __device__ inline double xdi_cuda_ring_cross(const xdi_cuda_ring_entry &e, const xdi_cuda_ring_row &row,
                                                    const xdi_cuda_ring_call &call, float shift, double factor) {
    const double step = ((double)shift - ((double)e.beside - (double)row.beside)) * (double)call.per_tau;
    return factor * (e.sum[XD_LOSS_CROSS] + e.sum[XD_LOSS_SOFT] * step);
}

/* The whole row from the blocks' entries, by a warp of each. *rest: the student's sum without its largest elements, of 1. */
template <int KIND>
static __device__ inline xdi_cuda_ring_row xdi_cuda_ring_merge(const xdi_cuda_ring_block &b, const xdi_cuda_ring_call &call,
                                                               const xdi_cuda_ring_entry *table, float *rest) {
    typedef xdi_cuda_ring_is<KIND> is;
    enum { LANES = XDI_CUDA_RING_BLOCKS }; /* two lanes have the same entry */
    const int lane = (int)threadIdx.x % LANES;
    const bool has = lane < b.blocks;
    const xdi_cuda_ring_entry &e = table[has ? lane : 0];
    const float max = has ? e.max : -INFINITY, teacher_max = has && is::SOFT ? e.teacher_max : -INFINITY;
    xdi_cuda_ring_row row = {};
    row.max = xdi_cuda_ring_max_lanes<LANES>(max);
    if (is::SOFT) row.teacher_max = xdi_cuda_ring_max_lanes<LANES>(teacher_max);
    const unsigned first = __ballot_sync(0xffffffffu, max == row.max);
    const int from = first ? __ffs((int)first) - 1 : 0;
    if (is::SOFT) row.beside = table[from].beside;
    row.arg = (int)(table[from].arg + (int64_t)from * call.slice - b.begin);
    const float shift = max == -INFINITY ? -INFINITY : __fsub_rn(max, row.max);
    const float factor = xdi_cuda_exp_of(shift, is::ALONE ? call.hard_factor : call.soft_factor);
    if (is::HARD && !is::SHARED) {
        const float hard = is::ALONE ? factor : xdi_cuda_exp_of(shift, call.hard_factor);
        row.hard = xdi_cuda_ring_add_lanes<LANES>(hard > 0.0f ? __fmul_rn(hard, (float)e.sum[XD_LOSS_HARD]) : 0.0f);
    }
    if (!is::SOFT) return row;
    const float teacher_shift = teacher_max == -INFINITY ? -INFINITY : __fsub_rn(teacher_max, row.teacher_max);
    const float teacher_factor = xdi_cuda_exp_of(teacher_shift, call.soft_factor);
    row.soft = xdi_cuda_ring_add_lanes<LANES>(factor > 0.0f ? __fmul_rn(factor, (float)e.sum[XD_LOSS_SOFT]) : 0.0f);
    row.teacher =
        xdi_cuda_ring_add_lanes<LANES>(teacher_factor > 0.0f ? __fmul_rn(teacher_factor, (float)e.sum[XD_LOSS_TEACHER]) : 0.0f);
    if (is::SHARED) row.hard = row.soft;
    if (is::REVERSE) {
        const double cross = factor > 0.0f ? xdi_cuda_ring_cross(e, row, call, shift, (double)factor) : 0.0;
        row.mean = __fdiv_rn((float)xdi_cuda_ring_add_lanes<LANES>(cross), row.soft);
    }
    if (is::JSD) {
        const double part = factor > 0.0f ? (double)factor * (e.sum[XD_LOSS_SOFT] - (max == row.max ? e.ones : 0.0)) : 0.0;
        *rest = __fdiv_rn(xdi_cuda_ring_add_lanes<LANES>((float)part), row.soft);
    }
    return row;
}

/* The same in double, into the row's record. By one warp. */
template <int KIND>
static __device__ inline void xdi_cuda_ring_keep(const xdi_cuda_ring_block &b, const xdi_cuda_ring_call &call,
                                                 const xdi_cuda_ring_entry *table, const xdi_cuda_ring_row &row,
                                                 xdi_cuda_ring_record *record) {
    typedef xdi_cuda_ring_is<KIND> is;
    enum { LANES = XDI_CUDA_RING_BLOCKS };
    const int lane = (int)threadIdx.x % LANES;
    const bool has = lane < b.blocks, first = threadIdx.x % XDI_CUDA_WARP == 0;
    const xdi_cuda_ring_entry &e = table[has ? lane : 0];
    const float shift = has && e.max > -INFINITY ? __fsub_rn(e.max, row.max) : -INFINITY;
    const float teacher_shift = has && is::SOFT && e.teacher_max > -INFINITY ? __fsub_rn(e.teacher_max, row.teacher_max) : -INFINITY;
    const double factor = (double)xdi_cuda_exp_of(shift, is::ALONE ? call.hard_factor : call.soft_factor);
    const double teacher_factor = (double)xdi_cuda_exp_of(teacher_shift, call.soft_factor);
    const double hard_factor = is::ALONE || is::SHARED ? factor : (double)xdi_cuda_exp_of(shift, call.hard_factor);
    double total[XDI_CUDA_LOSS_TERMS] = {};
    if (is::SOFT) total[XD_LOSS_SOFT] = xdi_cuda_ring_scaled(factor, e.sum[XD_LOSS_SOFT]);
    if (is::HARD) total[XD_LOSS_HARD] = xdi_cuda_ring_scaled(hard_factor, e.sum[XD_LOSS_HARD]);
    if (is::SOFT) total[XD_LOSS_TEACHER] = xdi_cuda_ring_scaled(teacher_factor, e.sum[XD_LOSS_TEACHER]);
    if (factor > 0.0 && is::REVERSE) total[XD_LOSS_CROSS] = xdi_cuda_ring_cross(e, row, call, shift, factor);
    if (teacher_factor > 0.0 && is::FORWARD) {
        const double step = ((double)teacher_shift - (double)shift) * (double)call.per_tau;
        total[XD_LOSS_CROSS] = teacher_factor * (e.sum[XD_LOSS_CROSS] + e.sum[XD_LOSS_TEACHER] * step);
    }
    if (has && is::SMOOTH) total[XD_LOSS_LINEAR] = e.sum[XD_LOSS_LINEAR] - (double)e.columns * (double)row.max;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_LOSS_TERMS; i++) {
        if (!xdi_cuda_ring_sums_up<KIND>(i) && !(is::SHARED && i == XD_LOSS_HARD)) continue;
        const double sum = xdi_cuda_ring_add_lanes<LANES>(total[i]);
        if (first) record->total[i] = sum;
    }
    if (is::HARD) {
        const float x = xdi_cuda_ring_add_lanes<LANES>(has ? e.label_x : 0.0f), y = xdi_cuda_ring_add_lanes<LANES>(has ? e.label_y : 0.0f);
        if (first) record->label_x = (double)x, record->label_y = (double)y;
    }
    if (!first) return;
    record->ref[XD_LOSS_MAX] = (double)row.max;
    record->ref[XD_LOSS_ARG] = (double)row.arg + (double)b.begin;
    record->ref[XD_LOSS_TEACHER_AT_ARG] = (double)row.beside;
    record->ref[XD_LOSS_TEACHER_MAX] = (double)row.teacher_max;
}

/* ---- the kernel ---- */

template <typename X, int KIND> struct xdi_cuda_ring_worker {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_form<X, is::TENSORS> form;
    typedef xdi_cuda_ring_sums<X, KIND> sums;
    typedef xdi_cuda_ring_factors<X, KIND> factors;
    enum {
        PACK = (int)xdi_cuda_pack<X>::COUNT,
        LAST = (int)XDI_CUDA_LOSS_TERMS - 1,
        COUNT = xdi_cuda_ring_total_of<KIND>(LAST) + (xdi_cuda_ring_sums_up<KIND>(LAST) ? 1 : 0)
    };
    static_assert((int)sizeof(factors) <= (int)XDI_CUDA_RING_SCALE, "the room");
    const xd_loss_args &a;
    const xdi_cuda_ring_call &call;
    const xdi_cuda_ring_block b;
    unsigned char *room;
    xdi_cuda_ring_memory *m;
    xdi_cuda_ring_place start; /* of this row */
    bool sound;

    static __device__ int lane() {
        return (int)threadIdx.x % XDI_CUDA_WARP;
    }
    static __device__ int warp() {
        return (int)threadIdx.x / XDI_CUDA_WARP;
    }
    /* Whether this is the last warp. */
    static __device__ bool leads() {
        return threadIdx.x >= XDI_CUDA_RING_LANES;
    }
    /* Calls use(this thread's part of a stage, packs from there on, its first column) for each stage where it has one. */
    template <typename Use> __device__ void each(Use use) {
        unsigned char *at = room + 16 * (int)threadIdx.x + start.stage * XDI_CUDA_RING_STAGE;
        const unsigned char *const end = room + call.stages * XDI_CUDA_RING_STAGE;
        for (int left = b.packs - (int)threadIdx.x; left > 0; left -= form::PACKS) {
            use(at, left, (b.packs - left) * PACK);
            at += XDI_CUDA_RING_STAGE;
            if (at >= end) at -= call.stages * XDI_CUDA_RING_STAGE;
        }
    }
    __device__ void ask(int count) {
        if (lane() != 0 || !sound) return;
        xdi_cuda_ring_feed feed = m->feed;
        for (int i = 0; i < count; i++) xdi_cuda_ring_ask<X, is::TENSORS>(a, b, call.stages, room, &m->barriers, &feed, &sound);
        m->feed = feed;
    }
    __device__ bool records(int r) const {
        return r / b.clusters % b.blocks == b.rank;
    }
    __device__ xdi_cuda_ring_record *record(int r) const {
        return reinterpret_cast<xdi_cuda_ring_record *>(a.references) + r;
    }

    /* Waits for each stage of the row and finds the warp's largest elements. */
    __device__ void look(xdi_cuda_ring_peak<X, KIND> *peak) {
        const unsigned char *const mine = room + 16 * (int)threadIdx.x;
        xdi_cuda_ring_place at = start;
        for (int left = b.packs - (int)threadIdx.x; left > 0; left -= form::PACKS, at.next(call.stages)) {
            xdi_cuda_ring_wait(&m->barriers.full[at.stage], at.parity, &sound);
            peak->look(mine + at.stage * XDI_CUDA_RING_STAGE, left);
        }
        const int max = __reduce_max_sync(0xffffffffu, xdi_cuda_ring_order(peak->largest()));
        const int teacher_max = is::SOFT ? __reduce_max_sync(0xffffffffu, xdi_cuda_ring_order(peak->teacher_largest())) : 0;
        if (lane() != 0) return;
        m->maxima[0][warp()] = max;
        if (is::SOFT) m->maxima[1][warp()] = teacher_max;
    }
    /* The block's largest element, of the student or of the teacher. */
    __device__ float largest(int tensor) const {
        const int of_warp = m->maxima[tensor][lane() < XDI_CUDA_RING_WARPS ? lane() : 0];
        return xdi_cuda_ring_ordered(__reduce_max_sync(0xffffffffu, of_warp));
    }
    __device__ void add_up(sums *mine) {
        if (!form::FINE && !mine->guarded) {
            each([&](const unsigned char *at, int left, int column) { mine->template take<false>(at, left, column); });
            if (!__any_sync(0xffffffffu, mine->repeats())) return;
            mine->clear();
            mine->guarded = true;
        }
        each([&](const unsigned char *at, int left, int column) { mine->template take<true>(at, left, column); });
    }
    /* Leaves the warp's sums in memory. What is apart, few threads have. */
    __device__ void keep_warp(const sums &mine) {
        const bool any = __any_sync(0xffffffffu, mine.least < INFINITY) != 0;
        float own[XDI_CUDA_RING_FOUR] = {};
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_LOSS_TERMS; i++)
            if (xdi_cuda_ring_sums_up<KIND>(i)) own[xdi_cuda_ring_total_of<KIND>(i)] = mine.sum[i];
        float total = xdi_cuda_ring_add_four<COUNT>(own[0], own[1], own[2], own[3]), other = 0.0f;
        int arg = INT32_MAX;
        if (any) {
            other = xdi_cuda_ring_add_four<XDI_CUDA_RING_FOUR>(
                mine.sum[XDI_CUDA_RING_ONES], mine.sum[XDI_CUDA_RING_TEACHER_ONES], mine.sum[XDI_CUDA_RING_APART], 0.0f);
            arg = (int)__reduce_min_sync(0xffffffffu, mine.arg);
        }
        if (lane() >= XDI_CUDA_RING_FOUR) total = other; /* the sums repeat every four lanes */
        if (lane() < XDI_CUDA_RING_TOTALS) m->parts[lane()][warp()] = total;
        if (lane() == 0) m->args[warp()] = arg;
    }
    /* Adds up the warps' sums into m->totals, by four lanes each. By the last warp, as what follows. */
    __device__ void total_up() {
        const float *const part = m->parts[lane() / 4];
        double sum = 0.0;
        XD_UNROLL
        for (int w = 0; w < XDI_CUDA_RING_WARPS; w += 4)
            if (w + lane() % 4 < XDI_CUDA_RING_WARPS) sum = xd_add(sum, (double)part[w + lane() % 4]);
        sum = xdi_cuda_ring_add_lanes<4>(sum);
        if (lane() % 4 == 0) m->totals[lane() / 4] = sum;
        __syncwarp();
    }
    /* Tells every block this one's sums. */
    __device__ void tell(int r, int parity, const xdi_cuda_ring_corrections &by, float max, float teacher_max) {
        double sum[XDI_CUDA_RING_SUMS] = {};
        total_up();
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_RING_SUMS; i++)
            if (xdi_cuda_ring_sums_up<KIND>(i)) sum[i] = m->totals[xdi_cuda_ring_total_of<KIND>(i)];
        const int arg = (int)__reduce_min_sync(0xffffffffu, m->args[lane() < XDI_CUDA_RING_WARPS ? lane() : 0]);
        const double apart = sum[XDI_CUDA_RING_APART];
        xdi_cuda_ring_correct<KIND>(by, sum);
        xdi_cuda_ring_entry e = xdi_cuda_ring_entry_of<X, KIND>(a, r, b, call.stages, room, start, sum, arg);
        e.max = max;
        e.teacher_max = teacher_max;
        if (is::FORWARD) e.sum[XD_LOSS_CROSS] -= XDI_CUDA_LN2 * apart;
        if (is::REVERSE) {
            const double s = (double)call.soft_factor * XDI_CUDA_LN2, y = (double)e.beside; /* as the exponents have it */
            e.sum[XD_LOSS_CROSS] += s * (y * sum[XD_LOSS_SOFT] + (e.ones * y - apart));
        }
        if (!sound) e.sum[is::SOFT ? XD_LOSS_SOFT : XD_LOSS_HARD] = (double)NAN; /* a finding */
        if (lane() < b.blocks) *xdi_cuda_cluster_map(&m->table[parity][b.rank], (unsigned)lane()) = e;
    }
    /* Leaves what the gradient needs. */
    __device__ void leave(const factors &f) {
        __syncwarp(); /* after left() */
        if (lane() == 0) *reinterpret_cast<factors *>(m->factors) = f;
    }
    __device__ factors left() const {
        return *reinterpret_cast<const factors *>(m->factors);
    }
    /* JSD: a warp's sums over the mixture, of the whole row. */
    __device__ void mix(const sums &mine, const factors &f, bool guarded) {
        xdi_cuda_ring_mixtures of = { 0.0f, 0.0f, mine.largest, mine.largest == f.max };
        if (form::FINE || guarded)
            each([&](unsigned char *at, int left, int column) { f.template mix<true>(at, left, column, call.beta, &of); });
        else
            each([&](unsigned char *at, int left, int column) { f.template mix<false>(at, left, column, call.beta, &of); });
        const float total = xdi_cuda_ring_add_four<2>(of.student, of.teacher, 0.0f, 0.0f);
        if (lane() < 2) m->parts[lane()][warp()] = total;
    }
    /* JSD: tells every block this one's sums over the mixture. */
    __device__ void tell_mixtures() {
        total_up();
        if (lane() >= b.blocks) return;
        double *const to = xdi_cuda_cluster_map(m->mixtures[b.rank], (unsigned)lane());
        to[XD_LOSS_STUDENT_MIXTURE] = -m->totals[0];
        to[XD_LOSS_TEACHER_MIXTURE] = m->totals[1];
    }
    /* JSD: the row's mean. */
    __device__ void merge_mixtures(int r, const factors &f, float rest, xdi_cuda_ring_row *row) {
        const int block = lane() % XDI_CUDA_RING_BLOCKS;
        double sum[XD_LOSS_MIXTURES];
        for (int i = 0; i < XD_LOSS_MIXTURES; i++)
            sum[i] = xdi_cuda_ring_add_lanes<XDI_CUDA_RING_BLOCKS>(block < b.blocks ? m->mixtures[block][i] : 0.0);
        const double unit = (double)factors::nats(1.0f);
        const double student = unit * (sum[XD_LOSS_STUDENT_MIXTURE] - (double)f.top * (double)rest);
        row->top = factors::nats(f.top);
        row->mean = (float)student;
        if (!records(r) || lane() != 0) return;
        record(r)->mixtures[XD_LOSS_TEACHER_MIXTURE] = unit * sum[XD_LOSS_TEACHER_MIXTURE];
        record(r)->mixtures[XD_LOSS_STUDENT_MIXTURE] = student;
    }
    /* Writes the gradient, if there is one, and gives each stage back. */
    template <bool GUARDED> __device__ void grade(int r, const factors f) {
        X *to = a.gradient.data ? xdi_cuda_row<X>(a.gradient, r) + b.begin + (int)threadIdx.x * PACK : NULL;
        int left = to ? b.packs - (int)threadIdx.x : 0, stage = start.stage;
        for (int k = 0; k < b.chunks; k++, left -= form::PACKS) {
            if (left > 0) {
                f.template grade<GUARDED>(room + 16 * (int)threadIdx.x + stage * XDI_CUDA_RING_STAGE, left, to);
                to += form::COLUMNS;
            }
            if (is::JSD) xdi_cuda_bulk_fence(); /* mix() has written to the stage */
            __syncwarp();
            if (lane() == 0) xdi_cuda_barrier_arrive(&m->barriers.empty[stage]);
            stage = stage + 1 < call.stages ? stage + 1 : 0;
        }
        if (a.gradient.data) zero(r, false);
    }
    /* Zeroes this block's part of a row's gradient, or the padding alone, which the last block has. */
    __device__ void zero(int r, bool all) const {
        X *const to = xdi_cuda_row<X>(a.gradient, r);
        const xdi_cuda_pack<X> zeros = {};
        for (int p = (int)threadIdx.x; p < b.packs && all; p += XDI_CUDA_RING_LANES)
            xdi_cuda_store16(to + b.begin + p * PACK, zeros);
        if (!b.last) return;
        for (int64_t c = a.vocab.end - a.vocab.begin + (int64_t)threadIdx.x; c < a.gradient.cols; c += XDI_CUDA_RING_LANES)
            xdi_cuda_narrow(0.0f, &to[c]);
    }
    /* The block's barrier. All warps come here from two functions, in the same order. */
    static __device__ void meet() {
        __syncthreads();
    }
    /* The same, and whether a copy of this block was lost. */
    __device__ bool meet_sound() const {
        return __syncthreads_or(!sound) == 0;
    }
    /* A row, by a warp that works on columns. */
    __device__ void work(int r) {
        xdi_cuda_ring_peak<X, KIND> peak;
        sums mine;
        look(&peak);
        meet();
        mine.begin(peak, call, largest(0), is::SOFT ? largest(1) : 0.0f);
        add_up(&mine);
        keep_warp(mine);
        sound = meet_sound();
        xdi_cuda_cluster_sync();
        meet();
        factors f = left();
        if (is::JSD) {
            const bool wide = f.guarded || !f.is_narrow(call.beta, mine.lowest);
            mix(mine, f, __any_sync(0xffffffffu, wide) != 0);
            meet();
            xdi_cuda_cluster_sync();
            meet();
            f = left();
        }
        if (form::FINE || mine.guarded || f.guarded)
            grade<true>(r, f);
        else
            grade<false>(r, f);
        start = start.after(b.chunks, call.stages);
    }
    /* The same row, by the last warp. */
    __device__ void lead(int r, double scale, int parity, int *next, double *next_scale) {
        const xdi_cuda_ring_weights weights = { (float)(scale * call.hard_weight), (float)(scale * call.soft_weight) };
        float rest = 0.0f;
        factors f;
        meet();
        const float max = largest(0), teacher_max = is::SOFT ? largest(1) : 0.0f;
        sums mine; /* for the exponents, which all threads have */
        mine.begin(xdi_cuda_ring_peak<X, KIND>(), call, max, teacher_max);
        const xdi_cuda_ring_corrections by = xdi_cuda_ring_corrections_of(mine);
        *next = counting(r + b.clusters, next_scale); /* while the others add up */
        sound = meet_sound(); /* asks no more for a ring that has lost one */
        tell(r, parity, by, max, teacher_max);
        xdi_cuda_cluster_sync();
        xdi_cuda_ring_row row = xdi_cuda_ring_merge<KIND>(b, call, m->table[parity], &rest);
        f.settle(call, weights, row);
        if (is::JSD)
            f.top = f.top_of(call.beta, row);
        else
            f.lean(call, weights, row);
        leave(f);
        if (lane() == 0) m->next = *next;
        meet();
        if (is::JSD) {
            meet();
            tell_mixtures();
            xdi_cuda_cluster_sync();
            f = left();
            merge_mixtures(r, f, rest, &row);
            f.lean(call, weights, row);
            leave(f);
            meet();
        }
        if (records(r)) xdi_cuda_ring_keep<KIND>(b, call, m->table[parity], row, record(r));
    }
    /* The first row from r on that counts, of those of the cluster, and its scale. */
    __device__ int counting(int r, double *scale) const {
        for (; r < (int)a.student.rows; r += b.clusters) {
            *scale = a.row_scale[r];
            if (*scale != 0.0) return r;
        }
        return r;
    }
    __device__ void run() {
        int r = b.cluster, next = m->next;
        for (;;) {
            for (; r < next && r < (int)a.student.rows; r += b.clusters)
                if (a.gradient.data) zero(r, true);
            if (r >= (int)a.student.rows) return;
            work(r);
            r += b.clusters;
            next = m->next;
        }
    }
    __device__ void run_last() {
        int parity = 0;
        if (lane() == 0) m->feed = xdi_cuda_ring_feed_of(a, b);
        ask(call.stages);
        double scale = 0.0, next_scale = 0.0;
        int next;
        for (int r = counting(b.cluster, &scale); r < (int)a.student.rows; r = next, scale = next_scale, parity ^= 1) {
            lead(r, scale, parity, &next, &next_scale);
            ask(b.chunks);
            start = start.after(b.chunks, call.stages);
        }
    }
};

/* Blocks that share a multiprocessor; fewer where 80 registers do not suffice. */
template <typename X, int KIND> struct xdi_cuda_ring_least {
    typedef xdi_cuda_ring_is<KIND> is;
    enum { BLOCKS = XDI_CUDA_RING_NARROW && sizeof(X) == 2 && is::FORWARD && !is::SHARED ? 1 : 2 };
};

template <typename X, int KIND>
static __global__ void __launch_bounds__(XDI_CUDA_RING_THREADS, xdi_cuda_ring_least<X, KIND>::BLOCKS)
    xdi_cuda_loss_ring_kernel(const __grid_constant__ xd_loss_args a, const __grid_constant__ xdi_cuda_ring_call call) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    XD_DYN_SHARED(unsigned char, room);
    XD_SHARED(xdi_cuda_ring_memory, memory, );
    const xdi_cuda_ring_block b = xdi_cuda_ring_block_of<X, xdi_cuda_ring_is<KIND>::TENSORS>(a, call);
    xdi_cuda_ring_worker<X, KIND> worker = { a, call, b, room, &memory, { 0, 0u }, true };
    if (threadIdx.x == 0) {
        double scale;
        xdi_cuda_ring_init(&memory.barriers, call.stages);
        memory.next = worker.counting(b.cluster, &scale);
    }
    xdi_cuda_cluster_sync(); /* every block runs, and has its barriers */
    if (worker.leads())
        worker.run_last();
    else
        worker.run();
    xdi_cuda_cluster_sync(); /* no block ends while others write into its memory */
#endif
}
