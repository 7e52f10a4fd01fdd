/* Losses of rows that stay on the chip, so that a row is read once and its gradient written once. The grid is as large as the
 * GPU, in clusters of blocks that share a row; a block has `slice` columns of it, in a ring of stages (ring.cuh) that also holds
 * what comes next. Per row:
 *
 *   1. every block finds its largest elements, then its sums relative to them;
 *   2. its last warp stores both into the shared memory of all blocks, whose barriers count them (JSD: twice);
 *   3. that warp merges the blocks' sums in the order of the columns, and leaves what the gradient needs;
 *   4. the other warps compute the gradient, while the last one asks for the copies of later rows.
 *
 * One such warp of the cluster also merges in double, into a record of the row. A second kernel, with a thread a row, makes of the
 * records what kernel/loss.h promises: the row's scalars and findings, and the gradient of the two columns that may hold nearly
 * all probability. Rows that it cannot take have the path of loss_fused.cu. */

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
    bool sound; /* no copy of this block was lost */

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
            each([&](const unsigned char *at, int left, int) { mine->template take<false>(at, left, b.packs); });
            if (!__any_sync(0xffffffffu, mine->repeats())) return;
            mine->clear();
            mine->guarded = true;
        }
        each([&](const unsigned char *at, int left, int) { mine->template take<true>(at, left, b.packs); });
    }
    /* Leaves the warp's sums in memory. What is apart, few threads have. */
    __device__ void keep_warp(const sums &mine) {
        const bool any = __any_sync(0xffffffffu, mine.has_any()) != 0;
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
    /* Tells every block what the first lane has left at `own`; it counts at their barrier `which`. */
    template <typename T> __device__ void tell_all(T *at, const T *own, int which) {
        enum { PARTS = (int)(sizeof(T) / 16) };
        uint64_t *const counter = &m->barriers.told[which];
        static_assert(sizeof(T) % 16 == 0, "whole stores");
        __syncwarp();
        if (lane() == 0) xdi_cuda_barrier_expect(counter, (unsigned)(b.blocks * (int)sizeof *own));
        XD_UNROLL_N(1)
        for (int i = lane(); i < b.blocks * PARTS; i += XDI_CUDA_WARP) {
            const int part = i % PARTS * 16;
            xdi_cuda_cluster_put16(reinterpret_cast<char *>(at) + part, reinterpret_cast<const char *>(own) + part, counter,
                                   (unsigned)(i / PARTS));
        }
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
        if (lane() == 0) m->own = e;
        tell_all(&m->table[parity][b.rank], &m->own, parity);
    }
    /* Waits for what all blocks have told; where that takes too long, *own, this block's part of it, becomes no number. */
    __device__ void hear(int which, double *own) {
        bool heard = m->heard != 0;
        xdi_cuda_ring_hear(&m->barriers.told[which], m->phases[which], &heard);
        heard = __all_sync(0xffffffffu, heard) != 0;
        __syncwarp(); /* all lanes have read the phase */
        if (lane() == 0) m->phases[which] ^= 1u;
        if (lane() == 0 && !heard) m->heard = 0, *own = (double)NAN;
        __syncwarp();
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
        left().weigh(&of); /* read again, for want of registers */
        const float total = xdi_cuda_ring_add_four<2>(of.student, of.teacher, 0.0f, 0.0f);
        if (lane() < 2) m->parts[lane()][warp()] = total;
    }
    /* JSD: tells every block this one's sums over the mixture. */
    __device__ void tell_mixtures() {
        total_up();
        if (lane() == 0) m->own_mixed.sum[XD_LOSS_STUDENT_MIXTURE] = -m->totals[0];
        if (lane() == 0) m->own_mixed.sum[XD_LOSS_TEACHER_MIXTURE] = m->totals[1];
        tell_all(&m->mixtures[b.rank], &m->own_mixed, 2);
    }
    /* JSD: the row's mean. */
    __device__ void merge_mixtures(int r, const factors &f, float rest, xdi_cuda_ring_row *row) {
        const int block = lane() % XDI_CUDA_RING_BLOCKS;
        double sum[XD_LOSS_MIXTURES];
        for (int i = 0; i < XD_LOSS_MIXTURES; i++)
            sum[i] = xdi_cuda_ring_add_lanes<XDI_CUDA_RING_BLOCKS>(block < b.blocks ? m->mixtures[block].sum[i] : 0.0);
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
        sound = m->sound != 0; /* which is not kept in a register from row to row */
        look(&peak);
        meet();
        mine.begin(peak, call, largest(0), is::SOFT ? largest(1) : 0.0f);
        add_up(&mine);
        keep_warp(mine);
        meet_sound();
        meet();
        factors f = left();
        if (is::JSD) {
            const bool wide = f.guarded || !f.is_narrow(call.beta, mine.lowest);
            mix(mine, f, __any_sync(0xffffffffu, wide) != 0);
            meet();
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
    __device__ void lead(int r, double scale, int parity) {
        const xdi_cuda_ring_weights weights = { (float)(scale * call.hard_weight), (float)(scale * call.soft_weight) };
        float rest = 0.0f;
        factors f;
        meet();
        const float max = largest(0), teacher_max = is::SOFT ? largest(1) : 0.0f;
        sums mine; /* for the exponents, which all threads have */
        mine.begin(xdi_cuda_ring_peak<X, KIND>(), call, max, teacher_max);
        const xdi_cuda_ring_corrections by = xdi_cuda_ring_corrections_of(mine);
        count(r + b.clusters); /* while the others add up, who have read m->next */
        sound = meet_sound(); /* asks no more for a ring that has lost one */
        if (lane() == 0) m->sound = sound;
        tell(r, parity, by, max, teacher_max);
        hear(parity, &m->table[parity][b.rank].sum[is::SOFT ? XD_LOSS_SOFT : XD_LOSS_HARD]);
        xdi_cuda_ring_row row = xdi_cuda_ring_merge<KIND>(b, call, m->table[parity], &rest);
        f.settle(call, weights, row);
        if (is::JSD)
            f.top = f.top_of(call.beta, row);
        else
            f.lean(call, weights, row);
        leave(f);
        meet();
        if (is::JSD) {
            meet();
            tell_mixtures();
            hear(2, &m->mixtures[b.rank].sum[XD_LOSS_STUDENT_MIXTURE]);
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
    __device__ void count(int r) {
        double scale = 0.0;
        const int next = counting(r, &scale);
        if (lane() == 0) m->next = next, m->next_scale = scale;
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
        for (int r = m->next; r < (int)a.student.rows; r = m->next, parity ^= 1) {
            lead(r, m->next_scale, parity);
            __syncwarp();
            ask(b.chunks);
            start = start.after(b.chunks, call.stages);
        }
    }
};

/* Blocks that share a multiprocessor; fewer where 72 registers do not suffice. */
template <typename X, int KIND> struct xdi_cuda_ring_least {
    typedef xdi_cuda_ring_is<KIND> is;
    enum { FEW = is::JSD || (sizeof(X) == 2 && is::FORWARD && !is::SHARED), BLOCKS = XDI_CUDA_RING_NARROW && FEW ? 1 : 2 };
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
        memory.next_scale = 0.0;
        xdi_cuda_ring_init(&memory.barriers, call.stages);
        memory.next = worker.counting(b.cluster, &memory.next_scale);
        memory.sound = memory.heard = 1;
        for (int i = 0; i < XDI_CUDA_RING_TOLD; i++) memory.phases[i] = 0;
    }
    xdi_cuda_cluster_sync(); /* every block runs, and has its barriers */
    if (worker.leads())
        worker.run_last();
    else
        worker.run();
    xdi_cuda_cluster_sync(); /* no block ends while others write into its memory */
#endif
}
