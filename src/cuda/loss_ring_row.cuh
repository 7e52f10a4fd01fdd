/* What loss_ring.cu keeps of a row and in a block's memory, the thread that asks for copies, and a row's sums: a block's entry, all
 * blocks' entries to what the gradient needs, and to the record of the second kernel. */

/* A row for the second kernel, in the memory of references and sums. */
struct xdi_cuda_ring_record {
    double ref[XD_LOSS_REFERENCES], total[XD_LOSS_SUMS], mixtures[XD_LOSS_MIXTURES];
    double label_x, label_y; /* logits at the label */
};
static_assert(sizeof(xdi_cuda_ring_record) <= XD_LOSS_REFERENCES * sizeof(double) + XD_LOSS_SUMS * sizeof(xd_fixed),
              "a row's memory, see xdi_loss_layout");

/* What a block tells the others: sums as in kernel/loss.h. */
struct alignas(16) xdi_cuda_ring_entry {
    double sum[XDI_CUDA_LOSS_TERMS], ones; /* ones: of the student's columns that have its largest element */
    float max, teacher_max, beside;        /* beside: the teacher's logit at arg */
    float label_x, label_y;                /* 0 unless the block has the label */
    int arg, columns;                      /* arg: a column of the block */
};

/* JSD: a block's sums over the mixture. */
struct alignas(16) xdi_cuda_ring_mixed {
    double sum[XD_LOSS_MIXTURES];
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
    xdi_cuda_ring_mixed mixtures[XDI_CUDA_RING_BLOCKS];
    xdi_cuda_ring_entry own; /* on their way to the others */
    xdi_cuda_ring_mixed own_mixed;
    alignas(16) unsigned char factors[XDI_CUDA_RING_SCALE]; /* what the row's gradient needs */
    int next;                                               /* the cluster's next row that counts, */
    double next_scale;                                      /* and its scale */
    int sound, heard;                                       /* all copies so far, and all that blocks have told this one */
    unsigned phases[XDI_CUDA_RING_TOLD];                    /* parities of the next waits for that */
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
