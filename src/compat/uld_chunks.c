/* The groups of tokens that TRL compares. */

#include "base/internal.h"
#include "compat/uld_chunks.h"

#include <string.h>

/* Tokens [first, first + count) of one side. */
typedef struct xdi_uld_span {
    int64_t first, count;
} xdi_uld_span;

static xdi_uld_span xdi_uld_span_of(const xdi_uld_trl_side *side) {
    xdi_uld_span span = { 0, 0 };
    for (int64_t i = side->count; i-- > 0;)
        if (side->labels[i] != -100) {
            span.first = i;
            span.count++;
        }
    if (side->skip_eos) span.count--;
    return span;
}

static void xdi_uld_push(xd_alignment *a, int64_t s0, int64_t s1, int64_t t0, int64_t t1) {
    if (s0 == s1 || t0 == t1) return;
    xd_aligned_chunk *c = &a->chunks[a->count++];
    c->student_begin = (int32_t)s0;
    c->student_end = (int32_t)s1;
    c->teacher_begin = (int32_t)t0;
    c->teacher_end = (int32_t)t1;
    c->flags = (uint32_t)XD_CHUNK_EXACT;
}

/* A pair of groups ends where both sides have a token that ends; what is left over is the last pair. */
static void xdi_uld_extended(const xdi_uld_trl_desc *d, xdi_uld_span s, xdi_uld_span t, xd_alignment *out) {
    const int64_t s_end = s.first + s.count, t_end = t.first + t.count;
    int64_t i = s.first, j = t.first, s0 = i, t0 = j;
    while (i < s_end && j < t_end) {
        const int64_t a = d->student.spans[i].end, b = d->teacher.spans[j].end;
        if (a <= b) i++;
        if (b <= a) j++;
        if (a != b) continue;
        xdi_uld_push(out, s0, i, t0, j);
        s0 = i;
        t0 = j;
    }
    xdi_uld_push(out, s0, s_end, t0, t_end);
}

XD_PRIVATE xd_result xdi_compat_uld_chunks(xd_ctx *ctx, const xdi_uld_trl_desc *desc, xd_alignment *out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    XDI_GIVEN_LIST(ctx, desc->student.labels, desc->student.count);
    XDI_GIVEN_LIST(ctx, desc->teacher.labels, desc->teacher.count);
    if (desc->extended) XDI_GIVEN_LIST(ctx, desc->student.spans, desc->student.count);
    if (desc->extended) XDI_GIVEN_LIST(ctx, desc->teacher.spans, desc->teacher.count);
    XD_REQUIRE(ctx, desc->student.count >= 0 && desc->teacher.count >= 0, XD_ERROR_ARGUMENT,
               "sequences of %lld and %lld tokens", (long long)desc->student.count,
               (long long)desc->teacher.count);
    const xdi_uld_span s = xdi_uld_span_of(&desc->student), t = xdi_uld_span_of(&desc->teacher);
    const int64_t most = s.count < t.count ? s.count : t.count;
    xd_alignment made = { NULL, 0 };
    made.chunks = (xd_aligned_chunk *)xd_allocate(ctx, (size_t)(most > 0 ? most : 0) * sizeof *made.chunks);
    XD_REQUIRE(ctx, made.chunks, XD_ERROR_MEMORY, "no room for %lld groups", (long long)most);
    if (desc->extended && most > 0)
        xdi_uld_extended(desc, s, t, &made);
    else
        for (int64_t i = 0; i < most; i++)
            xdi_uld_push(&made, s.first + i, s.first + i + 1, t.first + i, t.first + i + 1);
    /* the first token of a sequence has no row before it */
    if (desc->merge == XD_ULD_BAYESIAN && made.count > 0 && (s.first == 0 || t.first == 0))
        memmove(made.chunks, made.chunks + 1, (size_t)--made.count * sizeof *made.chunks);
    *out = made;
    return XD_OK;
}
