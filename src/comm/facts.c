/* Settings that all ranks must pass alike, by name, so that the error can say which one differs. */
#include "comm/internal.h"
#include "comm/mesh.h"

#include <stdio.h>
#include <string.h>

XD_PRIVATE void xdi_facts_begin(xdi_facts *facts) {
    facts->count = facts->item = 0;
    facts->part = facts->list = NULL;
}

static xdi_fact *xdi_facts_next(xdi_facts *facts, const char *name) {
    XD_ASSERT(facts->count < XDI_FACTS_MAX);
    xdi_fact *f = &facts->at[facts->count++];
    f->part = facts->part;
    f->list = facts->list;
    f->item = facts->item;
    f->name = name;
    return f;
}

XD_PRIVATE void xdi_facts_item(xdi_facts *facts, const char *list, int item) {
    facts->list = list;
    facts->item = item;
}

XD_PRIVATE void xdi_fact_integer(xdi_facts *facts, const char *name, int64_t value) {
    xdi_fact *f = xdi_facts_next(facts, name);
    f->kind = XDI_FACT_INTEGER;
    memcpy(&f->bits, &value, sizeof value);
}

XD_PRIVATE void xdi_fact_dtype(xdi_facts *facts, const char *name, xd_dtype value) {
    xdi_fact_integer(facts, name, (int64_t)value);
    facts->at[facts->count - 1].kind = XDI_FACT_DTYPE;
}

XD_PRIVATE void xdi_fact_number(xdi_facts *facts, const char *name, double value) {
    xdi_fact *f = xdi_facts_next(facts, name);
    f->kind = XDI_FACT_NUMBER;
    memcpy(&f->bits, &value, sizeof value);
}

XD_PRIVATE void xdi_fact_name(xdi_facts *facts, const char *name, const char *value) {
    xdi_fact *f = xdi_facts_next(facts, name);
    const size_t letters = strlen(value);
    f->kind = XDI_FACT_NAME;
    f->bits = 0;
    memcpy(&f->bits, value, letters < sizeof f->bits ? letters : sizeof f->bits);
}

XD_PRIVATE void xdi_fact_hash(xdi_facts *facts, const char *name, uint64_t hash) {
    xdi_fact *f = xdi_facts_next(facts, name);
    f->kind = XDI_FACT_HASH;
    f->bits = hash;
}

XD_PRIVATE void xdi_fact_bytes(xdi_facts *facts, const char *name, const void *data, size_t bytes) {
    xdi_fact *f = xdi_facts_next(facts, name);
    f->kind = XDI_FACT_BYTES;
    f->data = data;
    f->bytes = bytes;
    f->bits = bytes > 0 ? xd_hash(0, data, bytes) : 0;
}

XD_PRIVATE void xdi_facts_topology(xdi_facts *facts, const xd_topology *topology) {
    xdi_fact_integer(facts, "axis_count", topology->axis_count);
    for (int i = 0; i < topology->axis_count; i++) {
        xdi_facts_item(facts, "axes", i);
        xdi_fact_integer(facts, "size", topology->size[i]);
        xdi_fact_name(facts, "name", topology->name[i]);
    }
    xdi_facts_item(facts, NULL, 0);
    xdi_fact_hash(facts, "list of ranks, or of axes' long names", xdi_topology_hash(topology));
}

XD_PRIVATE uint64_t xdi_facts_hash(uint64_t seed, const xdi_facts *facts) {
    uint64_t hash = seed;
    for (int i = 0; i < facts->count; i++) {
        const xdi_fact *f = &facts->at[i];
        if (f->kind != XDI_FACT_BYTES)
            hash = xd_hash(hash, &f->bits, sizeof f->bits);
        else if (f->bytes > 0)
            hash = xd_hash(hash, f->data, f->bytes);
    }
    return hash;
}

/* ---- the error ---- */

/* A value as text: short, or all digits of a number. */
static void xdi_fact_print(const xdi_fact *fact, int64_t bits, bool all_digits, char *text, size_t size) {
    double number;
    char letters[sizeof bits + 1] = { 0 };
    memcpy(&number, &bits, sizeof number);
    memcpy(letters, &bits, sizeof bits);
    if (fact->kind == XDI_FACT_NAME)
        snprintf(text, size, "\"%s\"", letters);
    else if (fact->kind == XDI_FACT_DTYPE)
        snprintf(text, size, "%s", xd_dtype_name((xd_dtype)bits));
    else if (fact->kind == XDI_FACT_INTEGER)
        snprintf(text, size, "%lld", (long long)bits);
    else
        snprintf(text, size, all_digits ? "%.17g" : "%.9g", number);
}

/* Where a field is: part.list[item].name. */
static void xdi_fact_place(const xdi_fact *f, char *text, size_t size) {
    char item[48] = "";
    if (f->list) snprintf(item, sizeof item, "%s[%d]%s", f->list, f->item, f->name[0] ? "." : "");
    snprintf(text, size, "%s%s%s%s", f->part ? f->part : "", f->part ? "." : "", item, f->name);
}

static xd_result xdi_facts_fail(xd_comm *comm, const xdi_fact *fact, int rank, const int64_t values[2],
                                const char *what) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    const int first = xd_comm_world_rank(comm, 0), other = xd_comm_world_rank(comm, rank);
    char field[160], text[2][32];
    xdi_fact_place(fact, field, sizeof field);
    if (fact->kind == XDI_FACT_BYTES || fact->kind == XDI_FACT_HASH)
        return XD_FAIL_CULPRIT(ctx, XD_ERROR_MISMATCH, other, "%s: rank %d passed another %s than rank %d",
                               what, other, field, first);
    for (int all_digits = 0; all_digits < 2; all_digits++) {
        for (int i = 0; i < 2; i++) xdi_fact_print(fact, values[i], all_digits > 0, text[i], sizeof text[i]);
        if (strcmp(text[0], text[1]) != 0) break;
    }
    return XD_FAIL_CULPRIT(ctx, XD_ERROR_MISMATCH, other, "%s: rank %d passed %s = %s, rank %d passed %s",
                           what, other, field, text[1], first, text[0]);
}

/* Names the first setting that some rank has otherwise than rank 0, and the first such rank; all [size, XDI_FACTS_MAX]. */
static xd_result xdi_facts_compare(xd_comm *comm, const xdi_facts *facts, const int64_t *all,
                                   const char *what) {
    for (int i = 0; i < facts->count; i++)
        for (int rank = 1; rank < xd_comm_size(comm); rank++) {
            const int64_t values[2] = { all[i], all[(int64_t)rank * XDI_FACTS_MAX + i] };
            if (values[0] != values[1]) return xdi_facts_fail(comm, &facts->at[i], rank, values, what);
        }
    return XD_FAIL(xd_comm_ctx(comm), XD_ERROR_MISMATCH, "%s: ranks passed different things", what);
}

/* Collective, after hashes differed. Ranks whose settings differ may have lists of different lengths: all send the most. */
static xd_result xdi_facts_report(xd_comm *comm, const xdi_facts *facts, const char *what) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    const int64_t size = xd_comm_size(comm), most = XDI_FACTS_MAX;
    int64_t *counts = (int64_t *)xd_allocate(ctx, (size_t)(size + most + size * most) * sizeof *counts);
    xd_result result = xd_agree(
        comm, counts ? XD_OK
                     : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld settings", (long long)(size * most)));
    if (result == XD_OK) {
        int64_t *mine = counts + size, *all = mine + most;
        for (int64_t i = 0; i < size; i++) counts[i] = most;
        for (int i = 0; i < facts->count; i++) memcpy(&mine[i], &facts->at[i].bits, sizeof mine[i]);
        result = xd_all_gather(comm, mine, all, counts, XD_DTYPE_I64);
        if (result == XD_OK) result = xdi_facts_compare(comm, facts, all, what);
    }
    xd_release(ctx, counts);
    return result;
}

/* Word by word, which takes a tenth of xdi_facts_hash; no two lists that differ in one fact have the same. */
static uint64_t xdi_facts_mix(const xdi_facts *facts) {
    uint64_t mix = (uint64_t)facts->count + 1;
    for (int i = 0; i < facts->count; i++) {
        mix = (mix ^ facts->at[i].bits) * UINT64_C(0x9e3779b97f4a7c15);
        mix ^= mix >> 32;
    }
    return mix;
}

XD_PRIVATE xd_result xdi_agree_facts(xd_comm *comm, const xdi_facts *facts, const char *what) {
    const uint64_t hash = xdi_facts_mix(facts);
    int64_t mine[2], most[2];
    memcpy(&mine[0], &hash, sizeof hash);
    mine[1] = ~mine[0]; /* its maximum tells the minimum of the hashes */
    XD_TRY(xd_all_reduce(comm, mine, most, 2, XD_DTYPE_I64, XD_MAX));
    return most[0] == ~most[1] ? XD_OK : xdi_facts_report(comm, facts, what);
}

XD_PRIVATE xd_result xdi_agree_list(xd_comm *comm, int64_t count, uint64_t hash, const char *what) {
    xdi_facts facts;
    xdi_facts_begin(&facts);
    xdi_fact_integer(&facts, "number of entries", count);
    xdi_fact_hash(&facts, "list", hash);
    return xdi_agree_facts(comm, &facts, what);
}
