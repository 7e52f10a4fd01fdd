/* What this rank has called in a group. Calls that the ranks do not compare leave a hash, which the next barrier or agreement
 * compares; and TIMEOUT names the last ones. */

static const char *xdi_nccl_kind(uint32_t kind) {
    static const char *const kinds[] = { "nothing",        "barrier",    "broadcast",  "all_reduce",
                                         "reduce_scatter", "all_gather", "all_to_all", "gather",
                                         "scatter",        "send",       "recv",       "agree",
                                         "split",          "fork" };
    return kind < sizeof kinds / sizeof *kinds ? kinds[kind] : "(unknown)";
}

/* Records of kind 0 belong to the call before them. */
static void xdi_nccl_note(xdi_nccl *t, const xd_control *call) {
    if (call->kind == 0) return;
    t->before = t->latest;
    t->latest = *call;
}

/* "all_reduce 7 of 200 F32", by what the record has of it. */
static void xdi_nccl_call_text(const xd_control *call, char *text, size_t size) {
    char number[24] = "", count[24] = "";
    const bool has_type = call->dtype != (uint32_t)XD_DTYPE_NONE;
    if (call->sequence) snprintf(number, sizeof number, " %llu", (unsigned long long)call->sequence);
    if (has_type && call->count) snprintf(count, sizeof count, " %llu", (unsigned long long)call->count);
    snprintf(text, size, "%s%s%s%s%s%s", xdi_nccl_kind(call->kind), number, has_type ? " of" : "", count,
             has_type ? " " : "", has_type ? xd_dtype_name((xd_dtype)call->dtype) : "");
}

/* The last two calls of this rank: the earlier one may be what the later one waits for. */
static void xdi_nccl_recall(const xdi_nccl *t, char *text, size_t size) {
    char latest[80], before[80];
    xdi_nccl_call_text(&t->latest, latest, sizeof latest);
    xdi_nccl_call_text(&t->before, before, sizeof before);
    if (t->latest.kind == 0)
        snprintf(text, size, "this rank has made no call in it");
    else
        snprintf(text, size, "this rank's last call in it is %s%s%s", latest,
                 t->before.kind ? ", after " : "", t->before.kind ? before : "");
}

/* A call that is not compared. Every rank passes the same, but for counts of an all_to_all: what their layouts add up to is 0. */
static void xdi_nccl_remember(xdi_nccl *t, const xd_control *call) {
    const bool paired = call->kind == (uint32_t)XD_COLLECTIVE_ALL_TO_ALL;
    xd_control alike = *call;
    t->unseen++;
    alike.sequence = (uint64_t)t->unseen;
    alike.extra = t->displaced;
    alike.leaves = 0;
    if (paired) alike.layout = 0;
    t->hash = xd_hash(t->hash, &alike, sizeof alike);
    if (paired) t->pairs += call->layout * (2 * (uint64_t)t->unseen + 1);
}

static bool xdi_nccl_is_meeting(uint32_t kind) {
    return kind == (uint32_t)XD_COLLECTIVE_BARRIER || kind == (uint32_t)XD_COLLECTIVE_AGREE;
}

/* A barrier's or agreement's record has no use of its own for the last two numbers. */
static void xdi_nccl_show_history(const xdi_nccl *t, xd_control *record) {
    if (!xdi_nccl_is_meeting(record->kind)) return;
    record->extra = t->hash;
    record->leaves = t->pairs;
}

/* The rank whose calls were others than rank 0's; -1: none, and t->base.size: some pair's counts. All ranks find the same. */
static int xdi_nccl_stranger(const xdi_nccl *t) {
    const xd_control *all = t->records;
    uint64_t pairs = 0;
    int other = -1;
    for (int r = t->base.size - 1; r >= 0; r--) {
        if (!xdi_nccl_is_meeting(all[r].kind)) return -1;
        if (all[r].extra != all[0].extra) other = r;
        pairs += all[r].leaves;
    }
    return other < 0 && pairs ? t->base.size : other;
}
