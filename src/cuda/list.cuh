/* Lists of arrays as launch parameters. A model has a thousand arrays: they go to the device in the
 * parameters of a few launches, so nothing is copied there and a captured graph keeps its own list. Every
 * array is cut into chunks, a block takes one; chunks begin at multiples of 16 bytes when the array does. */

enum { XDI_CUDA_CHUNK = 16384, XDI_CUDA_THREADS = 256, XDI_CUDA_LIST_BYTES = 3840 };

template <typename Item> struct xdi_cuda_list {
    enum { ROOM = (XDI_CUDA_LIST_BYTES - 16) / (int)(sizeof(Item) + sizeof(int64_t)) };
    Item at[ROOM];
    int64_t first_chunk[ROOM];
    int64_t chunks; /* of all arrays */
    int count;

    /* Appends an array of `elements`; there is room. Empty ones are left out. */
    void add(const Item &item, int64_t elements) {
        if (elements <= 0) return;
        at[count] = item;
        first_chunk[count] = chunks;
        chunks += (elements + XDI_CUDA_CHUNK - 1) / XDI_CUDA_CHUNK;
        count++;
    }

    __device__ int index_of(int64_t chunk) const {
        int low = 0, high = count - 1; /* the last array whose first chunk is not above `chunk` */
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (first_chunk[middle] <= chunk)
                low = middle;
            else
                high = middle - 1;
        }
        return low;
    }
};

/* Calls item(k, &value) -> elements for each of `count` arrays and launch_list(list) for each list that fills
 * up. */
template <typename Item, typename MakeItem, typename LaunchList>
static xd_result xdi_cuda_each_list(int64_t count, MakeItem make_item, LaunchList launch_list) {
    xdi_cuda_list<Item> list;
    list.count = 0;
    list.chunks = 0;
    for (int64_t k = 0; k < count; k++) {
        Item item;
        const int64_t elements = make_item(k, &item);
        list.add(item, elements);
        const bool full = list.count == xdi_cuda_list<Item>::ROOM || (k + 1 == count && list.count > 0);
        if (!full) continue;
        XDI_TRY(launch_list(list));
        list.count = 0;
        list.chunks = 0;
    }
    return XD_OK;
}

/* The elements of one chunk. */
struct xdi_cuda_span {
    int64_t begin, end;
};

static __device__ inline xdi_cuda_span xdi_cuda_span_of(int64_t chunk_of_array, int64_t elements) {
    xdi_cuda_span span;
    span.begin = chunk_of_array * XDI_CUDA_CHUNK;
    span.end = elements - span.begin < XDI_CUDA_CHUNK ? elements : span.begin + XDI_CUDA_CHUNK;
    return span;
}

/* The threads of a block share the elements of a span: eight(i) for eight that start at i while `wide`,
 * one(i) for the rest. What becomes of an element must not depend on which of the two has it. */
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
