/* A ring of stages in a block's shared memory that the copy engine fills while the block works on what is there, and clusters of
 * blocks that share a row. Every stage has a barrier for "full", where the copy engine counts bytes, and one for "empty", where
 * each warp arrives when it has read the stage for the last time. Needs compute capability 9.0; elsewhere the functions exist and
 * nothing launches what calls them. */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

static __device__ inline unsigned xdi_cuda_cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

static __device__ inline unsigned xdi_cuda_cluster_size() {
    unsigned size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

/* The two halves of the cluster's barrier; all threads of all blocks arrive, and wait before they arrive again. */
static __device__ inline void xdi_cuda_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

static __device__ inline void xdi_cuda_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* The address in block `rank` of what lies at `shared` in this block. Volatile, so that only lanes ask whose block there is. */
template <typename T> static __device__ inline T *xdi_cuda_cluster_map(T *shared, unsigned rank) {
    uint64_t address;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(reinterpret_cast<uint64_t>(shared)), "r"(rank));
    return reinterpret_cast<T *>(address);
}

static __device__ inline void xdi_cuda_barrier_init(uint64_t *barrier, unsigned arrivals) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

/* Before the copy engine uses barriers that this thread has made. */
static __device__ inline void xdi_cuda_barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* An arrival that announces the bytes of copies. */
static __device__ inline void xdi_cuda_barrier_expect(uint64_t *barrier, unsigned bytes) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

static __device__ inline void xdi_cuda_barrier_arrive(uint64_t *barrier) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

/* Whether the phase of this parity has ended; the thread may sleep for some microseconds before it says no. */
static __device__ inline bool xdi_cuda_barrier_passed(uint64_t *barrier, unsigned parity) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(barrier);
    unsigned done;
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done)
                 : "r"(at), "r"(parity)
                 : "memory");
    return done != 0;
}

/* The same where other blocks of the cluster have stored what the phase waits for. */
static __device__ inline bool xdi_cuda_barrier_passed_cluster(uint64_t *barrier, unsigned parity) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(barrier);
    unsigned done;
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done)
                 : "r"(at), "r"(parity)
                 : "memory");
    return done != 0;
}

/* Stores 16 bytes at the same place of block `rank` as `shared` in this one, whose barrier counts them. Nothing else of this thread
 * is ordered by that, so that no round trip to L2 is waited for. */
static __device__ inline void xdi_cuda_cluster_put16(void *shared, const void *from, uint64_t *barrier, unsigned rank) {
    const unsigned own = (unsigned)__cvta_generic_to_shared(shared), counter = (unsigned)__cvta_generic_to_shared(barrier);
    uint64_t words[2];
    memcpy(words, static_cast<const xdi_cuda_bits16 *>(from), sizeof words);
    asm volatile("{\n\t.reg .b32 to, at;\n\tmapa.shared::cluster.u32 to, %0, %4;\n\tmapa.shared::cluster.u32 at, %3, %4;\n\t"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [to], {%1, %2}, [at];\n\t}" ::"r"(own),
                 "l"(words[0]), "l"(words[1]), "r"(counter), "r"(rank)
                 : "memory");
}

static __device__ inline void xdi_cuda_bulk_load(void *shared, const void *global, unsigned bytes,
                                                 uint64_t *barrier) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(shared),
                   at = (unsigned)__cvta_generic_to_shared(barrier);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(at)
        : "memory");
}

/* Orders this thread's stores to shared memory before copies of the engine to the same place. */
static __device__ inline void xdi_cuda_bulk_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#elif defined(XD_EMU)

static inline unsigned xdi_cuda_cluster_rank() {
    return emu_cluster_rank();
}

static inline unsigned xdi_cuda_cluster_size() {
    return emu_cluster_size();
}

static inline void xdi_cuda_cluster_arrive() {
    emu_cluster_arrive();
}

static inline void xdi_cuda_cluster_wait() {
    emu_cluster_wait();
}

template <typename T> static inline T *xdi_cuda_cluster_map(T *shared, unsigned rank) {
    return emu_map_shared(shared, rank);
}

static inline void xdi_cuda_barrier_init(uint64_t *barrier, unsigned arrivals) {
    emu_mbarrier_init(barrier, arrivals);
}

static inline void xdi_cuda_barriers_ready() {}

static inline void xdi_cuda_barrier_expect(uint64_t *barrier, unsigned bytes) {
    emu_mbarrier_expect(barrier, bytes);
}

static inline void xdi_cuda_barrier_arrive(uint64_t *barrier) {
    emu_mbarrier_arrive(barrier);
}

static inline bool xdi_cuda_barrier_passed(uint64_t *barrier, unsigned parity) {
    return emu_mbarrier_try(barrier, parity) != 0;
}

static inline bool xdi_cuda_barrier_passed_cluster(uint64_t *barrier, unsigned parity) {
    return emu_mbarrier_try(barrier, parity) != 0;
}

static inline void xdi_cuda_cluster_put16(void *shared, const void *from, uint64_t *barrier, unsigned rank) {
    uint64_t words[2];
    memcpy(words, from, sizeof words);
    emu_store_async(emu_map_shared(static_cast<char *>(shared), rank), words[0], words[1], emu_map_shared(barrier, rank));
}

static inline void xdi_cuda_bulk_load(void *shared, const void *global, unsigned bytes, uint64_t *barrier) {
    emu_bulk_load(shared, global, bytes, barrier);
}

static inline void xdi_cuda_bulk_fence() {}

#else

static __device__ inline unsigned xdi_cuda_cluster_rank() {
    __trap();
    return 0;
}

static __device__ inline unsigned xdi_cuda_cluster_size() {
    return 1;
}

static __device__ inline void xdi_cuda_cluster_arrive() {}

static __device__ inline void xdi_cuda_cluster_wait() {}

template <typename T> static __device__ inline T *xdi_cuda_cluster_map(T *shared, unsigned) {
    return shared;
}

static __device__ inline void xdi_cuda_barrier_init(uint64_t *, unsigned) {}

static __device__ inline void xdi_cuda_barriers_ready() {}

static __device__ inline void xdi_cuda_barrier_expect(uint64_t *, unsigned) {}

static __device__ inline void xdi_cuda_barrier_arrive(uint64_t *) {}

static __device__ inline bool xdi_cuda_barrier_passed(uint64_t *, unsigned) {
    return true;
}

static __device__ inline bool xdi_cuda_barrier_passed_cluster(uint64_t *, unsigned) {
    return true;
}

static __device__ inline void xdi_cuda_cluster_put16(void *, const void *, uint64_t *, unsigned) {}

static __device__ inline void xdi_cuda_bulk_load(void *, const void *, unsigned, uint64_t *) {}

static __device__ inline void xdi_cuda_bulk_fence() {}

#endif

static __device__ inline void xdi_cuda_cluster_sync() {
    xdi_cuda_cluster_arrive();
    xdi_cuda_cluster_wait();
}

/* ---- the ring ---- */

/* A block's last warp asks for the copies; the others work on what is there. Fourteen warps, two blocks on a multiprocessor: more
 * of them hide more of what each waits for, but leave a thread less than 72 registers. */
enum {
    XDI_CUDA_RING_WARPS = 13, /* that work */
    XDI_CUDA_RING_LANES = XDI_CUDA_RING_WARPS * XDI_CUDA_WARP,
    XDI_CUDA_RING_THREADS = XDI_CUDA_RING_LANES + XDI_CUDA_WARP,
    XDI_CUDA_RING_PART = 16 * XDI_CUDA_RING_LANES,  /* bytes: a pack a thread */
    XDI_CUDA_RING_STAGE = 4 * XDI_CUDA_RING_PART,   /* of all tensors */
    XDI_CUDA_RING_STAGES = 10,                      /* at most: those of one block on a multiprocessor */
    XDI_CUDA_RING_TOLD = 3,                         /* sums of rows by turns, and the second sums of a row */
#if defined(XD_EMU)
    XDI_CUDA_RING_TRIES = 4 /* there a wait ends at once when the copy is lost */
#else
    XDI_CUDA_RING_TRIES = 1 << 20 /* of a wait, some seconds; then the copy counts as lost */
#endif
};

struct xdi_cuda_ring_barriers {
    uint64_t full[XDI_CUDA_RING_STAGES], empty[XDI_CUDA_RING_STAGES];
    uint64_t told[XDI_CUDA_RING_TOLD]; /* where blocks of the cluster count what they tell each other */
};

/* A place in the ring, and the parity of its barrier's phase. */
struct xdi_cuda_ring_place {
    int stage;
    unsigned parity;

    __device__ void next(int stages) {
        if (++stage < stages) return;
        stage = 0;
        parity ^= 1u;
    }
    /* At most a ring further. */
    __device__ xdi_cuda_ring_place after(int count, int stages) const {
        const int at = stage + count;
        return { at < stages ? at : at - stages, at < stages ? parity : parity ^ 1u };
    }
};

/* Waits for a phase. *sound becomes false when that takes too long: then the thread waits no more, and what it computes is lost. */
static __device__ inline void xdi_cuda_ring_wait(uint64_t *barrier, unsigned parity, bool *sound) {
    if (xdi_cuda_barrier_passed(barrier, parity)) return;
    for (int i = 0; i < XDI_CUDA_RING_TRIES && *sound; i++)
        if (xdi_cuda_barrier_passed(barrier, parity)) return;
    *sound = false;
}

/* The same for what other blocks store. */
static __device__ inline void xdi_cuda_ring_hear(uint64_t *barrier, unsigned parity, bool *heard) {
    if (xdi_cuda_barrier_passed_cluster(barrier, parity)) return;
    for (int i = 0; i < XDI_CUDA_RING_TRIES && *heard; i++)
        if (xdi_cuda_barrier_passed_cluster(barrier, parity)) return;
    *heard = false;
}

/* One thread makes the barriers; the block synchronises before it uses them. */
static __device__ inline void xdi_cuda_ring_init(xdi_cuda_ring_barriers *barriers, int stages) {
    for (int i = 0; i < stages; i++) {
        xdi_cuda_barrier_init(&barriers->full[i], 1);
        xdi_cuda_barrier_init(&barriers->empty[i], (unsigned)XDI_CUDA_RING_WARPS);
    }
    for (int i = 0; i < XDI_CUDA_RING_TOLD; i++) xdi_cuda_barrier_init(&barriers->told[i], 1);
    xdi_cuda_barriers_ready();
}
