/* Lists of arrays. A model has a thousand of them and a launch for each would cost more than the work, so a kernel
 * takes a list, in one of two forms, and splits every array into chunks that are aligned to 16 bytes when the array
 * is.
 *   xdi_cuda_list   in the parameters of a few launches: nothing is copied, and a captured graph has its own copy
 *   xdi_cuda_kept   stored in device memory, for a caller that passes the same arrays repeatedly: one launch */

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
    __device__ const Item &item(int k) const {
        return at[k];
    }
    __device__ int64_t first(int k) const {
        return first_chunk[k];
    }
};

/* Stored in the device memory of an xd_array_list, a plane for each word of the items and one for the first chunks, so
 * that what changes between calls, like the gradients' addresses, is contiguous. Includes empty arrays. */
template <typename Item> struct xdi_cuda_kept {
    enum { WORDS = (int)(sizeof(Item) / sizeof(uint64_t)) };
    static_assert(sizeof(Item) % sizeof(uint64_t) == 0, "whole words");
    const uint64_t *words; /* [WORDS + 1, count]; NULL: the list is not stored */
    int64_t chunks, chunk;
    int count;

    __device__ Item item(int k) const {
        uint64_t all[WORDS];
        Item item;
        XD_UNROLL
        for (int w = 0; w < WORDS; w++) all[w] = words[(int64_t)w * count + k];
        memcpy(&item, all, sizeof item);
        return item;
    }
    __device__ int64_t first(int k) const {
        return (int64_t)words[(int64_t)WORDS * count + k];
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

/* ---- lists stored on the device ---- */

struct xd_array_list {
    xd_ctx *ctx;
    uint64_t *device; /* [room] the list of the last call */
    uint64_t *there;  /* [room] a copy of it on the host */
    uint64_t *next;   /* [room] of the current call */
    int64_t room, words;
    bool captured; /* a graph reads it, so it must not change */
};

enum {
    XDI_CUDA_LIST_WORDS = 12,
    XDI_CUDA_PATCH_WORDS = 496
}; /* words of the longest item and its first chunk */

/* Words to write into a stored list, as kernel parameters: so no host memory must stay valid until the copy. */
struct xdi_cuda_patch {
    uint64_t *to;
    int64_t count;
    uint64_t words[XDI_CUDA_PATCH_WORDS];
};

static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_patch_kernel(const __grid_constant__ xdi_cuda_patch patch) {
    for (int64_t i = threadIdx.x; i < patch.count; i += blockDim.x) patch.to[i] = patch.words[i];
}

static void xdi_cuda_list_destroy(xd_array_list *list) {
    if (!list) return;
    xdi_cuda_release(list->ctx, list->device);
    xd_release(list->ctx, list);
}

static xd_memory_bytes xdi_cuda_kept_bytes(int64_t arrays) {
    xd_memory_bytes bytes;
    bytes.device = (size_t)(arrays * XDI_CUDA_LIST_WORDS) * sizeof(uint64_t);
    bytes.host = sizeof(xd_array_list) + 2 * bytes.device;
    return bytes;
}

static xd_result xdi_cuda_list_create(xd_ctx *ctx, int64_t arrays, xd_array_list **out) {
    const int64_t room = arrays * XDI_CUDA_LIST_WORDS;
    const size_t bytes = xdi_cuda_kept_bytes(arrays).device;
    xd_array_list *list = (xd_array_list *)xd_allocate(ctx, xdi_cuda_kept_bytes(arrays).host);
    XD_REQUIRE(ctx, list, XD_ERROR_MEMORY, "no room for a list of %lld arrays", (long long)arrays);
    list->ctx = ctx;
    list->room = room;
    list->words = 0;
    list->captured = false;
    list->there = (uint64_t *)(void *)(list + 1);
    list->next = list->there + room;
    list->device = (uint64_t *)xdi_cuda_allocate(ctx, bytes);
    if (!list->device) {
        xd_release(ctx, list);
        return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a list of %lld arrays: %zu bytes of the device",
                        (long long)arrays, bytes);
    }
    *out = list;
    return XD_OK;
}

/* Copies the words of list->next that have changed to the device. */
static xd_result xdi_cuda_list_send(const xd_launch *launch, xd_array_list *list, int64_t words) {
    const bool all = list->words != words;
    list->words = 0; /* until all copies have been launched */
    for (int64_t at = 0; at < words; at += XDI_CUDA_PATCH_WORDS) {
        xdi_cuda_patch patch;
        patch.to = list->device + at;
        patch.count = words - at < XDI_CUDA_PATCH_WORDS ? words - at : (int64_t)XDI_CUDA_PATCH_WORDS;
        const size_t bytes = (size_t)patch.count * sizeof(uint64_t);
        if (!all && memcmp(list->there + at, list->next + at, bytes) == 0) continue;
        memcpy(patch.words, list->next + at, bytes);
        XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_THREADS), xdi_cuda_patch_kernel, patch));
        memcpy(list->there + at, list->next + at, bytes);
    }
    list->words = words;
    return XD_OK;
}

/* Whether kernels can read list->next on the device. A graph reads the contents at the time it runs, so a list that a
 * graph reads is not changed any more, and nothing is copied while a graph is being captured. */
static xd_result xdi_cuda_list_bring(const xd_launch *launch, xd_array_list *list, int64_t words,
                                     bool *there) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    XDI_CUDA_TRY(launch->ctx, cudaStreamIsCapturing((cudaStream_t)launch->stream, &capture));
    const bool capturing = capture != cudaStreamCaptureStatusNone;
    *there = words == list->words && memcmp(list->there, list->next, (size_t)words * sizeof(uint64_t)) == 0;
    if (*there && capturing) list->captured = true;
    if (*there || capturing || list->captured) return XD_OK;
    *there = true;
    return xdi_cuda_list_send(launch, list, words);
}

/* Long lists have long chunks, short ones enough of them for all processors. */
static int64_t xdi_cuda_chunk_of(int64_t elements) {
    int64_t chunk = 65536;
    while (chunk > 4096 && elements < 1024 * chunk) chunk /= 2;
    return chunk;
}

/* Fills *out with the arrays that make_item(k, &value) -> elements gives; out->words stays NULL when the list
 * cannot be stored. `list` may be NULL. */
template <typename Item, typename MakeItem>
static xd_result xdi_cuda_keep(const xd_launch *launch, xd_array_list *list, int64_t count,
                               MakeItem make_item, xdi_cuda_kept<Item> *out) {
    enum { WORDS = xdi_cuda_kept<Item>::WORDS };
    static_assert((int)WORDS < (int)XDI_CUDA_LIST_WORDS, "a kept list has room for the item");
    bool there = false;
    int64_t elements = 0;
    memset(out, 0, sizeof *out);
    if (!list || count == 0 || count * XDI_CUDA_LIST_WORDS > list->room) return XD_OK;
    for (int64_t k = 0; k < count; k++) {
        Item item;
        uint64_t all[WORDS];
        const int64_t n = make_item(k, &item);
        memcpy(all, &item, sizeof all);
        for (int w = 0; w < WORDS; w++) list->next[w * count + k] = all[w];
        list->next[WORDS * count + k] = (uint64_t)n;
        elements += n;
    }
    out->count = (int)count;
    out->chunk = xdi_cuda_chunk_of(elements);
    for (int64_t k = 0; k < count; k++) {
        uint64_t *first = &list->next[WORDS * count + k];
        const int64_t chunks = ((int64_t)*first + out->chunk - 1) / out->chunk;
        *first = (uint64_t)out->chunks;
        out->chunks += chunks;
    }
    XD_TRY(xdi_cuda_list_bring(launch, list, (WORDS + 1) * count, &there));
    if (there) out->words = list->device;
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
        const auto item = list.item(k);
        work(item, xdi_cuda_span_of(chunk - list.first(k), item.count, list.chunk));
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
