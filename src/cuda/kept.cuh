/* Lists of arrays in device memory, so that a kernel takes all of them in one launch. The list of a caller that passes the same
 * arrays again and again is kept, and only changes are copied; another one is staged, which means copied by every call. */

enum {
    XDI_CUDA_LIST_WORDS = 12,   /* of the longest item and its first chunk */
    XDI_CUDA_LIST_SCRATCH = 4,  /* words of an array that one kernel leaves for the next */
    XDI_CUDA_LIST_TABLE = 2048, /* chunks that a list has room for, beside one of each array */
    XDI_CUDA_LIST_STAGED = 512, /* arrays of the longest items that are staged together */
    XDI_CUDA_PATCH_WORDS = 496
};

/* A plane for each word of the items and one for the first chunks, so that what changes between calls, like the gradients'
 * addresses, is contiguous; then the arrays of the chunks. Includes empty arrays. */
template <typename Item> struct xdi_cuda_kept {
    enum { WORDS = (int)(sizeof(Item) / sizeof(uint64_t)) };
    static_assert(sizeof(Item) % sizeof(uint64_t) == 0, "whole words");
    static_assert((int)WORDS < (int)XDI_CUDA_LIST_WORDS, "a list has room for the item");
    const uint64_t *words;  /* [WORDS + 1, count] */
    const uint32_t *arrays; /* the array of each chunk, or of the first of 2^shift chunks */
    uint64_t *scratch;      /* [count, XDI_CUDA_LIST_SCRATCH] for the longest items */
    int64_t chunks, chunk;
    int count, shift;

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
    /* The last array whose first chunk is not above `at`. */
    __device__ int find(int64_t at) const {
        int k = (int)arrays[at >> shift];
        if (shift)
            while (k + 1 < count && first(k + 1) <= at) k++;
        return k;
    }
};

/* Calls work(k, array k, span) for each chunk of the list that is this block's. */
template <typename Item, typename Work>
static __device__ inline void xdi_cuda_each_kept(const xdi_cuda_kept<Item> &list, Work work) {
    int next = blockIdx.x < list.chunks ? list.find(blockIdx.x) : 0;
    for (int64_t chunk = blockIdx.x; chunk < list.chunks; chunk += gridDim.x) {
        const int k = next;
        if (chunk + gridDim.x < list.chunks) next = list.find(chunk + gridDim.x); /* on its way during the work */
        const Item item = list.item(k);
        work(k, item, xdi_cuda_span_of(chunk - list.first(k), (int64_t)item.count, list.chunk));
    }
}

/* ---- the memory of a list ---- */

struct xd_array_list {
    xd_cuda *cuda;
    uint64_t *device;        /* [room] the list of the last call, then the scratch of its arrays */
    uint64_t *there;         /* [room] a copy of it on the host */
    uint64_t *next;          /* [room] of the current call */
    int64_t *elements;       /* [room / 3] of the arrays in `there` */
    int64_t room, count;     /* count: arrays in `there`; -1: it is not on the device */
    int64_t chunks, chunk;   /* as in xdi_cuda_kept */
    int item_words, shift;
    bool captured; /* a graph reads it, so it must not change */
    bool current;  /* the arrays of the last call are in it */
    bool rounded;  /* of a step: some of its arrays are rounded at random */
};

/* Words of a list of arrays, without scratch. */
static int64_t xdi_cuda_list_words(int64_t arrays, int item_words) {
    return arrays * (item_words + 1) + (arrays + XDI_CUDA_LIST_TABLE + 1) / 2;
}

/* An even number, so that the scratch begins at a multiple of 16 bytes. */
static int64_t xdi_cuda_list_room(int64_t arrays) {
    return (xdi_cuda_list_words(arrays, XDI_CUDA_LIST_WORDS - 1) + 3) / 2 * 2;
}

/* The most arrays that find room. */
static int64_t xdi_cuda_list_most(const xd_array_list *list, int item_words) {
    return (2 * list->room - XDI_CUDA_LIST_TABLE - 1) / (2 * item_words + 3);
}

static xd_memory_bytes xdi_cuda_kept_bytes(int64_t arrays) {
    const int64_t room = xdi_cuda_list_room(arrays);
    xd_memory_bytes bytes;
    bytes.device = (size_t)(room + arrays * XDI_CUDA_LIST_SCRATCH) * sizeof(uint64_t);
    bytes.host = sizeof(xd_array_list) + (size_t)(2 * room + room / 3) * sizeof(uint64_t);
    return bytes;
}

/* The device is the current one, here and in the next. */
static xd_result xdi_cuda_list_make(xd_cuda *cuda, int64_t arrays, xd_array_list **out) {
    const xd_memory_bytes bytes = xdi_cuda_kept_bytes(arrays);
    xd_array_list *list = (xd_array_list *)xd_allocate(cuda->ctx, bytes.host);
    XD_REQUIRE(cuda->ctx, list, XD_ERROR_MEMORY, "no room for a list of %lld arrays", (long long)arrays);
    list->cuda = cuda;
    list->room = xdi_cuda_list_room(arrays);
    list->count = -1;
    list->captured = list->current = false;
    list->there = (uint64_t *)(void *)(list + 1);
    list->next = list->there + list->room;
    list->elements = (int64_t *)(void *)(list->next + list->room);
    list->device = (uint64_t *)cuda->allocator.allocate(cuda->allocator.user, bytes.device);
    if (!list->device) {
        xd_release(cuda->ctx, list);
        return XD_FAIL(cuda->ctx, XD_ERROR_MEMORY, "no room for a list of %lld arrays: %zu bytes of the device",
                       (long long)arrays, bytes.device);
    }
    *out = list;
    return XD_OK;
}

static void xdi_cuda_list_free(xd_array_list *list) {
    if (!list) return;
    list->cuda->allocator.release(list->cuda->allocator.user, list->device);
    xd_release(list->cuda->ctx, list);
}

static xd_result xdi_cuda_list_create(xd_ctx *ctx, int64_t arrays, xd_array_list **out) {
    xdi_cuda_scope scope(ctx, xdi_cuda_of(ctx)->device);
    XD_TRY(scope.result);
    return xdi_cuda_list_make(xdi_cuda_of(ctx), arrays, out);
}

static void xdi_cuda_list_destroy(xd_array_list *list) {
    if (!list) return;
    xdi_cuda_scope scope(list->cuda->ctx, list->cuda->device);
    xdi_cuda_list_free(list);
}

/* ---- what it holds ---- */

/* Long lists have long chunks, short ones enough of them for all processors. */
template <typename Item> struct xdi_cuda_chunks {
    static int64_t elements(int64_t, int64_t all) {
        int64_t chunk = 65536;
        while (chunk > 4096 && all < 4096 * chunk) chunk /= 2;
        return chunk;
    }
};

/* Whether a call that says its arrays are those of the last one finds them there. `list` may be NULL. */
static bool xdi_cuda_list_is_current(const xd_array_list *list, bool same, int64_t count) {
    return list && same && list->current && list->count == count;
}

/* Whether the list holds these arrays. */
template <typename Item, typename MakeItem>
static bool xdi_cuda_list_holds(const xd_array_list *list, int64_t count, MakeItem make_item) {
    enum { WORDS = xdi_cuda_kept<Item>::WORDS };
    if (list->count != count || list->item_words != (int)WORDS) return false;
    for (int64_t k = 0; k < count; k++) {
        Item item;
        uint64_t all[WORDS], differs = (uint64_t)(make_item(k, &item) ^ list->elements[k]);
        memcpy(all, &item, sizeof all);
        for (int w = 0; w < WORDS; w++) differs |= all[w] ^ list->there[w * count + k];
        if (differs) return false;
    }
    return true;
}

/* The first chunks of the arrays, from their elements and those of a chunk, and the arrays of the chunks. */
static void xdi_cuda_list_split(xd_array_list *list, int64_t count, uint64_t *first, int64_t chunk) {
    uint32_t *arrays = (uint32_t *)(void *)(first + count);
    list->chunk = chunk;
    list->chunks = 0;
    list->shift = 0;
    for (int64_t k = 0; k < count; k++) {
        first[k] = (uint64_t)list->chunks;
        list->chunks += (list->elements[k] + list->chunk - 1) / list->chunk;
    }
    while (list->chunks >> list->shift >= count + XDI_CUDA_LIST_TABLE) list->shift++;
    for (int64_t k = 0, at = 0; k < count; k++) {
        const int64_t end = k + 1 < count ? (int64_t)first[k + 1] : list->chunks;
        for (; at << list->shift < end; at++) arrays[at] = (uint32_t)k;
    }
}

/* Fills list->next with the arrays that make_item(k, &value) -> elements gives. Returns its words. */
template <typename Item, typename MakeItem>
static int64_t xdi_cuda_list_fill(xd_array_list *list, int64_t count, MakeItem make_item) {
    enum { WORDS = xdi_cuda_kept<Item>::WORDS };
    const int64_t words = xdi_cuda_list_words(count, WORDS);
    int64_t elements = 0;
    memset(list->next + (WORDS + 1) * count, 0, (size_t)(words - (WORDS + 1) * count) * sizeof(uint64_t));
    for (int64_t k = 0; k < count; k++) {
        Item item;
        uint64_t all[WORDS];
        list->elements[k] = make_item(k, &item);
        memcpy(all, &item, sizeof all);
        for (int w = 0; w < WORDS; w++) list->next[w * count + k] = all[w];
        elements += list->elements[k];
    }
    list->item_words = (int)WORDS;
    xdi_cuda_list_split(list, count, list->next + WORDS * count, xdi_cuda_chunks<Item>::elements(count, elements));
    const int64_t used = list->chunks > 0 ? ((list->chunks - 1) >> list->shift) + 1 : 0;
    return (WORDS + 1) * count + (used + 1) / 2;
}

/* Words to write into a list, as kernel parameters: so no host memory must stay valid until the copy. */
struct xdi_cuda_patch {
    uint64_t *to;
    int64_t count;
    uint64_t words[XDI_CUDA_PATCH_WORDS];
};

static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_patch_kernel(const __grid_constant__ xdi_cuda_patch patch) {
    for (int64_t i = threadIdx.x; i < patch.count; i += blockDim.x) patch.to[i] = patch.words[i];
}

/* Copies the words of list->next to the device, all of them or those that have changed. */
static xd_result xdi_cuda_list_send(const xd_launch *launch, xd_array_list *list, int64_t words, bool all) {
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
    return XD_OK;
}

/* Whether kernels can read these arrays from a kept list. A graph reads the contents at the time it runs, so a list that a graph
 * reads is not changed any more, and nothing is copied to a kept list while a graph is being captured. */
template <typename Item, typename MakeItem>
static xd_result xdi_cuda_list_bring(const xd_launch *launch, xd_array_list *list, bool same, int64_t count,
                                     MakeItem make_item, bool *there) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    *there = false;
    if (count > xdi_cuda_list_most(list, xdi_cuda_kept<Item>::WORDS)) return XD_OK;
    XDI_CUDA_TRY(launch->ctx, cudaStreamIsCapturing((cudaStream_t)launch->stream, &capture));
    const bool capturing = capture != cudaStreamCaptureStatusNone;
    *there = same || xdi_cuda_list_holds<Item>(list, count, make_item);
    if (*there && capturing) list->captured = true;
    if (*there || capturing || list->captured) return XD_OK;
    const bool all = list->count != count || list->item_words != (int)xdi_cuda_kept<Item>::WORDS;
    list->count = -1; /* until all copies have been launched */
    XD_TRY(xdi_cuda_list_send(launch, list, xdi_cuda_list_fill<Item>(list, count, make_item), all));
    list->count = count;
    *there = true;
    return XD_OK;
}

template <typename Item> static xdi_cuda_kept<Item> xdi_cuda_kept_of(const xd_array_list *list, int64_t count) {
    xdi_cuda_kept<Item> kept;
    kept.words = list->device;
    kept.arrays = (const uint32_t *)(const void *)(list->device + (xdi_cuda_kept<Item>::WORDS + 1) * count);
    kept.scratch = list->device + list->room;
    kept.chunks = list->chunks;
    kept.chunk = list->chunk;
    kept.count = (int)count;
    kept.shift = list->shift;
    return kept;
}

/* Calls run(list) for the arrays that make_item(k, &value) -> elements gives: once when `list`, which may be NULL, can keep them,
 * else for each piece that is staged. `same`: they are those of the last call with the list. */
template <typename Item, typename MakeItem, typename Run>
static xd_result xdi_cuda_listed(const xd_launch *launch, xd_array_list *list, bool same, int64_t count, MakeItem make_item,
                                 Run run) {
    const bool current = xdi_cuda_list_is_current(list, same, count);
    bool there = false;
    if (count == 0) return XD_OK;
    if (list) {
        list->current = false;
        XD_TRY(xdi_cuda_list_bring<Item>(launch, list, current, count, make_item, &there));
        list->current = there;
    }
    if (there) return run(xdi_cuda_kept_of<Item>(list, count));
    xd_array_list *stage = xdi_cuda_of(launch->ctx)->stage;
    const int64_t most = xdi_cuda_list_most(stage, xdi_cuda_kept<Item>::WORDS);
    for (int64_t begin = 0; begin < count; begin += most) {
        const int64_t n = count - begin < most ? count - begin : most;
        const auto make_piece = [&](int64_t k, Item *item) { return make_item(begin + k, item); };
        XD_TRY(xdi_cuda_list_send(launch, stage, xdi_cuda_list_fill<Item>(stage, n, make_piece), true));
        XD_TRY(run(xdi_cuda_kept_of<Item>(stage, n)));
    }
    return XD_OK;
}
