/* The exchange by file.
 *
 * Rank r writes its hello into FILE.r. Rank 0 answers all of them at once in FILE, with the nonces of the hellos in it:
 * a rank believes a FILE that has its own nonce, so no file of an earlier run is ever taken for one of this run. Then it
 * removes FILE.r, by which rank 0 knows. A FILE.r that an earlier run has left is answered too, in vain, and again
 * when the rank of this run has replaced it. The files belong to their user alone (mode 600). */

/* Reads a file of exactly `bytes`; returns an errno value, ENOENT when there is none. No kind of file makes it wait. */
static int xdi_nccl_read_file(const char *path, unsigned char *out, size_t bytes) {
    struct stat status;
    const int file = open(path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    if (file < 0) return errno;
    int code = fstat(file, &status) != 0 ? errno : S_ISREG(status.st_mode) ? 0 : EINVAL;
    if (code == 0 && status.st_size != (off_t)bytes) code = EINVAL;
    if (code == 0 && pread(file, out, bytes, 0) != (ssize_t)bytes) code = EIO;
    close(file);
    return code;
}

/* The file appears complete. */
static xd_result xdi_nccl_write_file(xd_ctx *ctx, const char *path, const unsigned char *data, size_t bytes) {
    char *draft = (char *)xd_allocate(ctx, strlen(path) + 5);
    XD_REQUIRE(ctx, draft, XD_ERROR_MEMORY, "no room for the name %s", path);
    memcpy(draft, path, strlen(path));
    memcpy(draft + strlen(path), ".new", 5);
    unlink(draft); /* of a rank that was killed while it wrote */
    const int file = open(draft, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int code = file < 0 ? errno : 0;
    if (file >= 0 && write(file, data, bytes) != (ssize_t)bytes) code = EIO;
    if (file >= 0 && close(file) != 0 && code == 0) code = errno;
    if (code == 0 && rename(draft, path) != 0) code = errno;
    if (code != 0 && file >= 0) unlink(draft);
    xd_release(ctx, draft);
    XD_REQUIRE(ctx, code == 0, XD_ERROR_IO, "cannot write %s: %s", path, strerror(code));
    return XD_OK;
}

/* Removes a file that still is what this rank has written. */
static void xdi_nccl_remove_own(const char *path, const unsigned char *data, unsigned char *scratch,
                                size_t bytes) {
    if (xdi_nccl_read_file(path, scratch, bytes) == 0 && memcmp(scratch, data, bytes) == 0) unlink(path);
}

/* The tag of all bytes before it; whether it is right. */
static bool xdi_nccl_sign_file(const char *secret, unsigned char *data, size_t bytes) {
    unsigned char tag[XDI_NCCL_TAG];
    xdi_nccl_mac mac;
    xdi_nccl_mac_begin(&mac, secret);
    xdi_nccl_hash_add(&mac.inner, "f", 1);
    xdi_nccl_hash_add(&mac.inner, data, bytes - sizeof tag);
    xdi_nccl_mac_end(&mac, tag);
    const bool right = xdi_nccl_equal(tag, data + bytes - sizeof tag, sizeof tag);
    memcpy(data + bytes - sizeof tag, tag, sizeof tag);
    return right;
}

enum { XDI_NCCL_QUESTION = XDI_NCCL_HELLO + XDI_NCCL_TAG };

/* Bytes of FILE: a hello of rank 0, the id, the nonces of the other ranks, the tag. */
static size_t xdi_nccl_page_bytes(int size) {
    return XDI_NCCL_HELLO + XDI_NCCL_ID + (size_t)(size - 1) * XDI_NCCL_NONCE + XDI_NCCL_TAG;
}

static unsigned char *xdi_nccl_page_nonce(unsigned char *page, int rank) {
    return page + XDI_NCCL_HELLO + XDI_NCCL_ID + (size_t)(rank - 1) * XDI_NCCL_NONCE;
}

typedef struct xdi_nccl_desk {
    xd_ctx *ctx;
    const xd_nccl_desc *desc;
    unsigned char *page, *seen; /* FILE as it should be and as it is */
    char *name;                 /* of a FILE.r */
    bool *asked, *served;       /* [size] */
    bool published;             /* page is in FILE */
} xdi_nccl_desk;

static void xdi_nccl_name(const xdi_nccl_desk *k, int rank) {
    snprintf(k->name, strlen(k->desc->file) + 16, "%s.%d", k->desc->file, rank);
}

/* Looks for new questions, and for those that are gone because the rank has read its answer. */
static void xdi_nccl_collect(xdi_nccl_desk *k, int *left) {
    *left = 0;
    for (int r = 1; r < k->desc->size; r++) {
        unsigned char question[XDI_NCCL_QUESTION], *nonce = xdi_nccl_page_nonce(k->page, r);
        if (k->served[r]) continue;
        xdi_nccl_name(k, r);
        const int code = xdi_nccl_read_file(k->name, question, sizeof question);
        k->served[r] = code == ENOENT && k->asked[r] && k->published;
        *left += !k->served[r];
        if (code != 0 || !xdi_nccl_sign_file(k->desc->secret, question, sizeof question)) continue;
        if (memcmp(question, "xdn2", 4) != 0 || xdi_nccl_load(question + 4) != (uint32_t)r ||
            xdi_nccl_load(question + 8) != (uint32_t)k->desc->size)
            continue;
        k->published = k->published && k->asked[r] && memcmp(nonce, question + 12, XDI_NCCL_NONCE) == 0;
        k->asked[r] = true;
        memcpy(nonce, question + 12, XDI_NCCL_NONCE);
    }
}

static xd_result xdi_nccl_publish_all(xdi_nccl_desk *k, const void *id, double deadline) {
    const xd_nccl_desc *d = k->desc;
    const size_t bytes = xdi_nccl_page_bytes(d->size);
    char missing[128];
    XD_REQUIRE(k->ctx, k->page && k->seen && k->name && k->asked && k->served, XD_ERROR_MEMORY,
               "no room for a list of %d ranks", d->size);
    XD_TRY(xdi_nccl_introduce(k->ctx, d, k->page));
    memcpy(k->page + XDI_NCCL_HELLO, id, XDI_NCCL_ID);
    for (int left = d->size - 1, first = 1;; first = 0) {
        xdi_nccl_collect(k, &left);
        if (left == 0) return XD_OK;
        if (!first && (xdi_nccl_read_file(d->file, k->seen, bytes) != 0 ||
                       memcmp(k->seen, k->page + 0, XDI_NCCL_HELLO) != 0))
            return XD_FAIL(k->ctx, XD_ERROR_IO, "%s was replaced or removed: is another world using it?",
                           d->file);
        if (!k->published) {
            (void)xdi_nccl_sign_file(d->secret, k->page, bytes);
            XD_TRY(xdi_nccl_write_file(k->ctx, d->file, k->page, bytes));
            k->published = true;
        }
        xdi_nccl_nap(XDI_NCCL_TURN);
        if (xd_now(k->ctx) < deadline) continue;
        const int culprit = xdi_nccl_missing(k->served, d->size, missing, sizeof missing);
        return XD_FAIL_CULPRIT(k->ctx, XD_ERROR_TIMEOUT, culprit,
                               "ranks %s did not ask for the id in %s before the deadline", missing, d->file);
    }
}

static xd_result xdi_nccl_publish(xd_ctx *ctx, const xd_nccl_desc *d, const void *id, double deadline) {
    const size_t n = (size_t)d->size, bytes = xdi_nccl_page_bytes(d->size);
    xdi_nccl_desk k;
    memset(&k, 0, sizeof k);
    k.ctx = ctx;
    k.desc = d;
    k.page = (unsigned char *)xd_allocate(ctx, bytes);
    k.seen = (unsigned char *)xd_allocate(ctx, bytes);
    k.name = (char *)xd_allocate(ctx, strlen(d->file) + 16);
    k.asked = (bool *)xd_allocate(ctx, n * sizeof *k.asked);
    k.served = (bool *)xd_allocate(ctx, n * sizeof *k.served);
    const xd_result result = xdi_nccl_publish_all(&k, id, deadline);
    if (k.published) xdi_nccl_remove_own(d->file, k.page, k.seen, bytes);
    xd_release(ctx, k.served);
    xd_release(ctx, k.asked);
    xd_release(ctx, k.name);
    xd_release(ctx, k.seen);
    xd_release(ctx, k.page);
    return result;
}

/* Waits for a FILE with this rank's nonce. */
static xd_result xdi_nccl_await_page(xd_ctx *ctx, const xd_nccl_desc *d, const unsigned char *hello,
                                     unsigned char *page, double deadline) {
    const size_t bytes = xdi_nccl_page_bytes(d->size);
    for (;;) {
        const int code = xdi_nccl_read_file(d->file, page, bytes);
        const bool right = code == 0 && xdi_nccl_sign_file(d->secret, page, bytes);
        if (right && memcmp(xdi_nccl_page_nonce(page, d->rank), hello + 12, XDI_NCCL_NONCE) == 0)
            return XD_OK;
        XD_REQUIRE(ctx, xd_now(ctx) < deadline, XD_ERROR_TIMEOUT, "no id in %s before the deadline: %s",
                   d->file,
                   right            ? "it is of another run"
                   : code == 0      ? "it was made with another secret"
                   : code == EINVAL ? "it is not a file of a world of this size"
                                    : strerror(code));
        xdi_nccl_nap(XDI_NCCL_TURN);
    }
}

static xd_result xdi_nccl_fetch(xd_ctx *ctx, const xd_nccl_desc *d, void *id, double deadline) {
    unsigned char question[XDI_NCCL_QUESTION], seen[XDI_NCCL_QUESTION];
    const size_t bytes = xdi_nccl_page_bytes(d->size), room = strlen(d->file) + 16;
    unsigned char *page = (unsigned char *)xd_allocate(ctx, bytes);
    char *name = (char *)xd_allocate(ctx, room);
    xd_result result = XD_OK;
    if (!page || !name)
        result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld bytes", (long long)(bytes + room));
    if (result == XD_OK) result = xdi_nccl_introduce(ctx, d, question);
    if (result == XD_OK) {
        snprintf(name, room, "%s.%d", d->file, d->rank);
        (void)xdi_nccl_sign_file(d->secret, question, sizeof question);
        result = xdi_nccl_write_file(ctx, name, question, sizeof question);
        if (result == XD_OK) result = xdi_nccl_await_page(ctx, d, question, page, deadline);
        if (result == XD_OK) memcpy(id, page + XDI_NCCL_HELLO, XDI_NCCL_ID);
        xdi_nccl_remove_own(name, question, seen, sizeof question);
    }
    xd_release(ctx, name);
    xd_release(ctx, page);
    return result;
}
