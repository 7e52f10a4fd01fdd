/* Lists of arrays. A model has a thousand of them and a launch for each would cost more than the work, so a kernel
 * takes a list, in one of two forms, and splits every array into chunks that are aligned to 16 bytes when the array
 * is.
 *   xdi_cuda_list   in the parameters of a few launches: nothing is copied, and a captured graph has its own copy
 *   xdi_cuda_kept   in device memory, all arrays in one launch: kept.cuh */

enum { XDI_CUDA_CHUNK = 16384, XDI_CUDA_THREADS = 256, XDI_CUDA_LIST_BYTES = 3328 };

template <typename Item> struct xdi_cuda_list {
    enum { ROOM = (XDI_CUDA_LIST_BYTES - 24) / (int)(sizeof(Item) + sizeof(uint32_t)) };
    Item at[ROOM];
    uint32_t first_chunk[ROOM];
    int64_t chunks; /* of all arrays */
    int64_t chunk;  /* elements of one */
    int count;

    /* Appends an array of `elements`; there is room. Empty ones are left out. */
    void add(const Item &item, int64_t elements) {
        if (elements <= 0) return;
        at[count] = item;
        first_chunk[count] = (uint32_t)chunks;
        chunks += (elements + chunk - 1) / chunk;
        count++;
    }
    __device__ int64_t first(int k) const {
        return first_chunk[k];
    }
};

/* The last array whose first chunk is not above `chunk`. */
template <typename List> static __device__ inline int xdi_cuda_list_find(const List &list, int64_t chunk) {
    int low = 0, high = list.count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (list.first(middle) <= chunk)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Calls item(k, &value) -> elements for each of `count` arrays and launch_list(list) for each list that fills
 * up. */
template <typename Item, typename MakeItem, typename LaunchList>
static xd_result xdi_cuda_each_list(int64_t count, MakeItem make_item, LaunchList launch_list) {
    xdi_cuda_list<Item> list;
    list.count = 0;
    list.chunks = 0;
    list.chunk = XDI_CUDA_CHUNK;
    for (int64_t k = 0; k < count; k++) {
        Item item;
        const int64_t elements = make_item(k, &item);
        list.add(item, elements);
        const bool full = list.count == xdi_cuda_list<Item>::ROOM || (k + 1 == count && list.count > 0);
        if (!full) continue;
        XD_TRY(launch_list(list));
        list.count = 0;
        list.chunks = 0;
    }
    return XD_OK;
}

/* As many blocks as can run at once, or one per chunk when there are fewer chunks. */
template <typename... Parameters>
static xd_result xdi_cuda_chunk_grid(const xd_launch *launch, int64_t chunks, void (*kernel)(Parameters...),
                                     xdi_cuda_grid *grid) {
    int blocks = 0;
    XDI_CUDA_TRY(launch->ctx,
                 cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, XDI_CUDA_THREADS, 0));
    const int64_t most = (int64_t)blocks * xdi_cuda_of(launch->ctx)->processors;
    *grid = xdi_cuda_grid_of(chunks < most ? chunks : most, XDI_CUDA_THREADS);
    return XD_OK;
}

/* ---- the elements of an array ---- */

/* The elements of one chunk. */
struct xdi_cuda_span {
    int64_t begin, end;
};

static __device__ inline xdi_cuda_span xdi_cuda_span_of(int64_t chunk_of_array, int64_t elements,
                                                        int64_t chunk = XDI_CUDA_CHUNK) {
    xdi_cuda_span span;
    span.begin = chunk_of_array * chunk;
    span.end = elements - span.begin < chunk ? elements : span.begin + chunk;
    return span;
}

/* Calls work(item, span) for each chunk of the list that is this block's. */
template <typename List, typename Work>
static __device__ inline void xdi_cuda_each_chunk(const List &list, Work work) {
    for (int64_t chunk = blockIdx.x; chunk < list.chunks; chunk += gridDim.x) {
        const int k = xdi_cuda_list_find(list, chunk);
        work(list.at[k], xdi_cuda_span_of(chunk - list.first(k), list.at[k].count, list.chunk));
    }
}

/* The threads of a block share the elements of a span: eight(i) for eight that start at i while `wide`,
 * one(i) for the others. The result for an element must not depend on which of the two is called. */
template <typename Eight, typename One>
static __device__ inline void xdi_cuda_walk(xdi_cuda_span span, bool wide, Eight eight, One one) {
    const int64_t eights = wide ? (span.end - span.begin) / 8 : 0;
    for (int64_t k = threadIdx.x; k < eights; k += blockDim.x) eight(span.begin + 8 * k);
    for (int64_t i = span.begin + 8 * eights + threadIdx.x; i < span.end; i += blockDim.x) one(i);
}

/* One element, and eight at an address aligned to 16, of an F32, BF16 or F16 array, as f32. */
static __device__ inline float xdi_cuda_read_float(const void *data, int dtype, int64_t i) {
    if (dtype == XD_DTYPE_F32) return static_cast<const float *>(data)[i];
    if (dtype == XD_DTYPE_BF16) return xdi_cuda_widen(static_cast<const xdi_cuda_bf16 *>(data)[i]);
    return xdi_cuda_widen(static_cast<const xdi_cuda_f16 *>(data)[i]);
}

static __device__ inline void xdi_cuda_write_float(void *data, int dtype, int64_t i, float value) {
    if (dtype == XD_DTYPE_F32)
        static_cast<float *>(data)[i] = value;
    else if (dtype == XD_DTYPE_BF16)
        xdi_cuda_narrow(value, static_cast<xdi_cuda_bf16 *>(data) + i);
    else
        xdi_cuda_narrow(value, static_cast<xdi_cuda_f16 *>(data) + i);
}

template <typename T> static __device__ inline void xdi_cuda_read8_as(const T *from, float (&values)[8]) {
    XD_UNROLL
    for (int at = 0; at < 8; at += xdi_cuda_pack<T>::COUNT) {
        const xdi_cuda_pack<T> pack = xdi_cuda_load16(from + at);
        XD_UNROLL
        for (int j = 0; j < xdi_cuda_pack<T>::COUNT; j++) values[at + j] = xdi_cuda_widen(pack.at[j]);
    }
}

template <typename T> static __device__ inline void xdi_cuda_write8_as(T *to, const float (&values)[8]) {
    XD_UNROLL
    for (int at = 0; at < 8; at += xdi_cuda_pack<T>::COUNT) {
        xdi_cuda_pack<T> pack;
        XD_UNROLL
        for (int j = 0; j < xdi_cuda_pack<T>::COUNT; j++) xdi_cuda_narrow(values[at + j], &pack.at[j]);
        xdi_cuda_store16(to + at, pack);
    }
}

static __device__ inline void xdi_cuda_read8(const void *data, int dtype, int64_t i, float (&values)[8]) {
    if (dtype == XD_DTYPE_F32)
        xdi_cuda_read8_as(static_cast<const float *>(data) + i, values);
    else if (dtype == XD_DTYPE_BF16)
        xdi_cuda_read8_as(static_cast<const xdi_cuda_bf16 *>(data) + i, values);
    else
        xdi_cuda_read8_as(static_cast<const xdi_cuda_f16 *>(data) + i, values);
}

static __device__ inline void xdi_cuda_write8(void *data, int dtype, int64_t i, const float (&values)[8]) {
    if (dtype == XD_DTYPE_F32)
        xdi_cuda_write8_as(static_cast<float *>(data) + i, values);
    else if (dtype == XD_DTYPE_BF16)
        xdi_cuda_write8_as(static_cast<xdi_cuda_bf16 *>(data) + i, values);
    else
        xdi_cuda_write8_as(static_cast<xdi_cuda_f16 *>(data) + i, values);
}
