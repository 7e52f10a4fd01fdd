/* A checkpoint compared with its manifest, to the last byte. */

#include "base/crc.h"
#include "checkpoint/internal.h"

#include <inttypes.h>
#include <string.h>

typedef struct xdi_verify {
    xd_ctx *ctx;
    const xd_checkpoint *c;
    const char *directory;
    xdi_reader reader;
    unsigned char *piece;
    int64_t place; /* of the tensor that the next byte belongs to */
    uint64_t sum;  /* fingerprint of the elements of it that have been seen */
    int64_t wrong; /* the file's first tensor that has another fingerprint, -1: none; and that */
    uint64_t wrong_sum;
} xdi_verify;

static void xdi_verify_end_tensor(xdi_verify *v) {
    if (v->wrong < 0 && v->sum != v->c->by_place[v->place]->fingerprint) {
        v->wrong = v->place;
        v->wrong_sum = v->sum;
    }
    v->place++;
    v->sum = 0;
}

/* Adds the elements of a piece to the fingerprints of their tensors, and its bytes to a checksum. Before the first tensor is the
 * header; between tensors, and behind the last, is nothing. */
static uint32_t xdi_verify_add(xdi_verify *v, int64_t file, uint64_t offset, size_t bytes, uint32_t crc) {
    const uint64_t end = offset + bytes;
    uint64_t seen = offset;
    while (v->place < v->c->first_tensor[file + 1]) {
        const xd_checkpoint_tensor_info *t = v->c->by_place[v->place];
        const uint64_t size = xd_dtype_size(t->dtype);
        const uint64_t from = t->begin > offset ? t->begin : offset, to = t->end < end ? t->end : end;
        if (from < to) {
            const xdi_checked_data data = { v->piece + (from - offset), (size_t)size,
                                            (int64_t)((from - t->begin) / size),
                                            (int64_t)((to - from) / size) };
            crc = xd_crc32c(crc, v->piece + (seen - offset), (size_t)(from - seen));
            v->sum += xdi_checked(&data, &crc);
            seen = to;
        }
        if (t->end > end) break;
        xdi_verify_end_tensor(v);
    }
    return xd_crc32c(crc, v->piece + (seen - offset), (size_t)(end - seen));
}

static xd_result xdi_verify_block(xdi_verify *v, int64_t file, int64_t block) {
    uint64_t offset;
    uint32_t crc = 0;
    size_t left = xdi_manifest_block(v->c, file, block, &offset);
    for (size_t n; left > 0; left -= n, offset += n) {
        n = left < (size_t)XDI_PIECE ? left : (size_t)XDI_PIECE;
        XD_TRY(xdi_reader_read(&v->reader, file, offset, n, v->piece));
        crc = xdi_verify_add(v, file, offset, n, crc);
    }
    return crc == v->c->blocks[v->c->first_block[file] + block]
               ? XD_OK
               : xdi_manifest_damage(v->c, v->directory, file, block, crc);
}

/* What is said first are the blocks, whose checksums tell best where the damage is; then the tensors. */
static xd_result xdi_verify_file(xdi_verify *v, int64_t file) {
    const xd_checkpoint_file_info *f = &v->c->files[file];
    const int64_t blocks = v->c->first_block[file + 1] - v->c->first_block[file];
    uint32_t whole = 0;
    v->place = v->c->first_tensor[file];
    v->sum = 0;
    v->wrong = -1;
    for (int64_t i = 0; i < blocks; i++) {
        uint64_t offset;
        XD_TRY(xdi_verify_block(v, file, i));
        whole = xdi_crc32c_combine(whole, v->c->blocks[v->c->first_block[file] + i],
                                   xdi_manifest_block(v->c, file, i, &offset));
    }
    XD_REQUIRE(v->ctx, whole == f->crc32c, XD_ERROR_CORRUPT,
               "%s/%s has checksum %08" PRIx32 ", not %08" PRIx32, v->directory, f->name, whole, f->crc32c);
    if (v->wrong < 0) return XD_OK;
    const xd_checkpoint_tensor_info *t = v->c->by_place[v->wrong];
    return XD_FAIL(v->ctx, XD_ERROR_CORRUPT,
                   "%s: tensor \"%.80s\" of %s has fingerprint %016" PRIx64 ", not %016" PRIx64, v->directory,
                   t->name, t->group, v->wrong_sum, t->fingerprint);
}

/* A file's own header puts the tensors where the manifest does. Both cover the file up to its end. */
static xd_result xdi_verify_header(xdi_verify *v, int64_t file, const xdi_safetensors *open) {
    const xd_checkpoint *c = v->c;
    const int64_t first = c->first_tensor[file], count = c->first_tensor[file + 1] - first;
    XD_REQUIRE(v->ctx, xdi_safetensors_count(open) == count, XD_ERROR_CORRUPT,
               "%s/%s has %lld tensors, the manifest %lld", v->directory, c->files[file].name,
               (long long)xdi_safetensors_count(open), (long long)count);
    for (int64_t i = 0; i < count; i++) {
        const xd_checkpoint_tensor_info *t = c->by_place[first + i];
        const xdi_safetensors_info *info = xdi_safetensors_at(open, xdi_safetensors_find(open, t->name));
        XD_REQUIRE(v->ctx,
                   info && info->dtype == t->dtype && info->ndim == t->ndim &&
                       memcmp(info->shape, t->shape, (size_t)t->ndim * sizeof *t->shape) == 0 &&
                       info->begin == t->begin - c->by_place[first]->begin,
                   XD_ERROR_CORRUPT, "%s/%s: the manifest and the header differ about tensor \"%.80s\"",
                   v->directory, c->files[file].name, t->name);
    }
    return XD_OK;
}

static xd_result xdi_verify_headers(xdi_verify *v) {
    xdi_safetensors_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.mode = XD_WEIGHTS_STREAM;
    for (int64_t i = 0; i < v->c->info.file_count; i++) {
        xdi_safetensors *open = NULL;
        if (!v->c->files[i].group) continue;
        char *path = xdi_weights_path(v->ctx, v->directory, v->c->files[i].name);
        XD_REQUIRE(v->ctx, path, XD_ERROR_MEMORY, "%s: no room for a path", v->directory);
        xd_result result = xdi_safetensors_open(v->ctx, path, &desc, &open);
        if (result == XD_OK) result = xdi_verify_header(v, i, open);
        xdi_safetensors_close(open);
        xd_release(v->ctx, path);
        XD_TRY(result);
    }
    return XD_OK;
}

XD_API xd_result xd_checkpoint_verify(xd_ctx *ctx, const char *directory) {
    XDI_GIVEN(ctx, ctx, directory);
    xd_checkpoint *c = NULL;
    xdi_verify v;
    XD_TRY(xdi_checkpoint_open_whole(ctx, directory, &c));
    memset(&v, 0, sizeof v);
    v.ctx = ctx;
    v.c = c;
    v.directory = directory;
    v.piece = (unsigned char *)xd_allocate(ctx, xdi_manifest_room(c, XDI_PIECE));
    xd_result result =
        v.piece ? XD_OK : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %d bytes", (int)XDI_PIECE);
    if (result == XD_OK) result = xdi_reader_create(&v.reader, c, directory);
    for (int64_t i = 0; i < c->info.file_count && result == XD_OK; i++) result = xdi_verify_file(&v, i);
    if (result == XD_OK) result = xdi_verify_headers(&v);
    xdi_reader_close(&v.reader);
    xd_release(ctx, v.piece);
    xd_checkpoint_close(c);
    return result;
}
