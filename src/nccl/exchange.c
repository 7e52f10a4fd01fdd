/* The exchange, by whichever way the desc names. */

static xd_result xdi_nccl_check_secret(xd_ctx *ctx, const xd_nccl_desc *d) {
    XD_REQUIRE(ctx, d->secret && strlen(d->secret) >= XDI_NCCL_SECRET, XD_ERROR_ARGUMENT,
               "a secret of %d bytes: at least %d are needed, which nobody can guess",
               d->secret ? (int)strlen(d->secret) : 0, (int)XDI_NCCL_SECRET);
    return XD_OK;
}

/* Gives the id of rank 0 to all ranks; returns on rank 0 when they have it. */
static xd_result xdi_nccl_exchange(xd_ctx *ctx, const xd_nccl_desc *d, void *id, double deadline) {
    XD_TRY(xdi_nccl_check_secret(ctx, d));
    if (d->rank == 0)
        return d->file ? xdi_nccl_publish(ctx, d, id, deadline) : xdi_nccl_serve(ctx, d, id, deadline);
    return d->file ? xdi_nccl_fetch(ctx, d, id, deadline) : xdi_nccl_ask(ctx, d, id, deadline);
}
