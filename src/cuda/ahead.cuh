/* Columns on their way: a thread asks for the next steps of its row before it works on this one, so that a multiprocessor has
 * the bytes in flight that its memory's latency needs. The copies go into shared memory and hold no register. Each thread reads
 * only what it has asked for, so nothing waits at a barrier. */

/* Copies 16 bytes to shared memory. They are there at once where there is no such instruction: in the emulation. */
static __device__ inline void xdi_cuda_copy16(void *shared, const void *from) {
    XDI_CUDA_ALIGNED16(from);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(shared)),
                 "l"(__cvta_generic_to_global(from))
                 : "memory");
#else
    *static_cast<xdi_cuda_bits16 *>(shared) = *static_cast<const xdi_cuda_bits16 *>(from);
#endif
}

/* Makes a group of the copies since the last call. */
static __device__ inline void xdi_cuda_copies_group() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Waits until at most LEFT of this thread's groups are on their way, the latest. */
template <int LEFT> static __device__ inline void xdi_cuda_copies_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

/* The room of one tensor in a block: STAGES times eight columns a thread. */
template <typename T, int STAGES> struct xdi_cuda_waiting {
    alignas(16) T at[STAGES][XDI_CUDA_TEAM_BLOCK][XDI_CUDA_EIGHT];

    __device__ void ask(int stage, const xdi_cuda_line<T> &from) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i += xdi_cuda_pack<T>::COUNT)
            xdi_cuda_copy16(&at[stage][threadIdx.x][i], from.at + i);
    }
    __device__ xdi_cuda_eight take(int stage, const xdi_cuda_line<T> &) const {
        return xdi_cuda_read_whole(&at[stage][threadIdx.x][0]);
    }
};

template <int STAGES> struct xdi_cuda_waiting<xdi_cuda_none, STAGES> {
    __device__ void ask(int, const xdi_cuda_line<xdi_cuda_none> &) {}
    __device__ xdi_cuda_eight take(int, const xdi_cuda_line<xdi_cuda_none> &) const {
        return {};
    }
};

template <int STAGES> struct xdi_cuda_waiting<xdi_cuda_any, STAGES> {
    alignas(16) float at[STAGES][XDI_CUDA_TEAM_BLOCK][XDI_CUDA_EIGHT];

    __device__ void ask(int stage, const xdi_cuda_line<xdi_cuda_any> &from) {
        float *to = &at[stage][threadIdx.x][0];
        xdi_cuda_copy16(to, from.at);
        if (from.wide) xdi_cuda_copy16(to + 4, from.floats() + 4);
    }
    __device__ xdi_cuda_eight take(int stage, const xdi_cuda_line<xdi_cuda_any> &of) const {
        const float *from = &at[stage][threadIdx.x][0];
        return of.wide ? xdi_cuda_read_whole(from) : xdi_cuda_read_whole(reinterpret_cast<const xdi_cuda_bf16 *>(from));
    }
};

/* Of both tensors: at most 32 KiB, so that four blocks find room; 16 bytes more, as a tensor of no type has a size too. */
enum { XDI_CUDA_AHEAD_BYTES = (32 << 10) + 16 };

/* The walks of a kernel share the memory, whatever their types. */
static __device__ inline xdi_cuda_bits16 *xdi_cuda_ahead_bytes() {
    XD_SHARED(xdi_cuda_bits16, bytes, [XDI_CUDA_AHEAD_BYTES / 16]);
    return bytes;
}

template <typename X, typename Y> struct xdi_cuda_ahead {
    enum {
        BYTES = XDI_CUDA_EIGHT * (int)(sizeof(X) + (xdi_cuda_is<Y>::GIVEN ? sizeof(Y) : 0)),
        STAGES = BYTES <= 32 ? 4 : 2
    };
    xdi_cuda_waiting<X, STAGES> x;
    xdi_cuda_waiting<Y, STAGES> y;
};

template <typename X, typename Y> static __device__ inline xdi_cuda_ahead<X, Y> &xdi_cuda_ahead_room() {
    static_assert((int)sizeof(xdi_cuda_ahead<X, Y>) <= (int)XDI_CUDA_AHEAD_BYTES, "the room");
    return *reinterpret_cast<xdi_cuda_ahead<X, Y> *>(xdi_cuda_ahead_bytes());
}

/* Where a row lies. walk() calls use(k, eight of x, eight of y) for `count` steps of this thread's columns: step k has the eight
 * from number first + k * step on, at a multiple of 16 bytes in the first `whole` steps; the others are what rest(k, &x, &y) reads.
 * One loop has both kinds, so that a kernel has the work of a step once. The threads of a block need not have the same counts. */
struct xdi_cuda_in_memory {
    template <typename X, typename Y, typename Rest, typename Use>
    static __device__ inline void walk(const xdi_cuda_line<X> &x, const xdi_cuda_line<Y> &y, int64_t first, int64_t step, int whole,
                                       int count, Rest rest, Use use) {
        enum { STAGES = xdi_cuda_ahead<X, Y>::STAGES };
        xdi_cuda_ahead<X, Y> &room = xdi_cuda_ahead_room<X, Y>();
        XD_UNROLL
        for (int k = 0; k < STAGES; k++) {
            if (k < whole) room.x.ask(k, x.from(first + k * step)), room.y.ask(k, y.from(first + k * step));
            xdi_cuda_copies_group();
        }
        XD_UNROLL_N(1)
        for (int k = 0; k < count; k++) {
            const int stage = k % STAGES;
            xdi_cuda_eight values, beside;
            if (k < whole) {
                xdi_cuda_copies_wait<STAGES - 1>();
                values = room.x.take(stage, x);
                beside = room.y.take(stage, y);
                if (k + STAGES < whole) {
                    const int64_t next = first + (k + STAGES) * step;
                    room.x.ask(stage, x.from(next));
                    room.y.ask(stage, y.from(next));
                }
                xdi_cuda_copies_group();
            } else {
                rest(k, &values, &beside);
            }
            use(k, values, beside);
        }
    }
};

/* Steps of columns [first, columns) by `step`. */
static __device__ inline int xdi_cuda_steps_of(int64_t first, int64_t columns, int64_t step) {
    return first < columns ? (int)((columns - first + step - 1) / step) : 0;
}
