/* The place of a process in its job, from the environment. */

#include "comm/internal.h"
#include "comm/launch.h"
#include "comm/topology.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The numbers that a set of variables tells. */
enum { XDI_LAUNCH_RANK, XDI_LAUNCH_SIZE, XDI_LAUNCH_LOCAL_RANK, XDI_LAUNCH_LOCAL_SIZE, XDI_LAUNCH_NUMBERS };
enum { XDI_LAUNCH_KINDS = XD_LAUNCH_JSRUN + 1, XDI_LAUNCH_NAME = 28, XDI_LAUNCH_TRAITS = 4 };

typedef struct xdi_launch_set {
    xd_launch_kind kind;
    bool there;
    int number[XDI_LAUNCH_NUMBERS]; /* 0 where the set does not say */
} xdi_launch_set;

/* What messages and job names call the kinds. */
static const char xdi_launch_kinds[XDI_LAUNCH_KINDS][12] = { "alone", "torchrun", "openmpi", "pmi",
                                                             "slurm", "mvapich",  "flux",    "jsrun" };

/* Names of the numbers; "" -> the launcher does not tell it. */
static const char xdi_launch_names[XDI_LAUNCH_KINDS][XDI_LAUNCH_NUMBERS][XDI_LAUNCH_NAME] = {
    { "", "", "", "" },
    { "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE" },
    { "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
      "OMPI_COMM_WORLD_LOCAL_SIZE" },
    { "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS" },
    { "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "" },
    { "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
      "MV2_COMM_WORLD_LOCAL_SIZE" },
    { "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "" },
    { "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE" },
};

/* In which order the sets count: Slurm starts other launchers. */
static const unsigned char xdi_launch_order[] = { XD_LAUNCH_TORCHRUN, XD_LAUNCH_OPEN_MPI, XD_LAUNCH_PMI,
                                                  XD_LAUNCH_MVAPICH,  XD_LAUNCH_FLUX,     XD_LAUNCH_JSRUN,
                                                  XD_LAUNCH_SLURM };
enum { XDI_LAUNCH_SETS = (int)sizeof xdi_launch_order };

/* PALS has these beside PMI_RANK and PMI_SIZE. */
static const char xdi_launch_pals[2][XDI_LAUNCH_NAME] = { "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE" };

/* Variables that only processes of a launcher have, and that do not tell which rank of how many: when no set is there. */
static const char xdi_launch_traces[][XDI_LAUNCH_NAME] = {
    "PMIX_RANK",          "PMIX_NAMESPACE",  "PMI_FD",
    "PMI_PORT",           "PMI_ID",          "PMI_SPAWNED",
    "PALS_RANKID",        "PALS_APID",       "ALPS_APP_PE",
    "MPIRUN_RANK",        "MP_CHILD",        "OMPI_COMM_WORLD_NODE_RANK",
    "OMPI_UNIVERSE_SIZE", "HYDI_CONTROL_FD",
};
enum { XDI_LAUNCH_TRACES = (int)(sizeof xdi_launch_traces / sizeof xdi_launch_traces[0]) };

/* Variables that together tell the jobs of a launcher apart. */
static const char xdi_launch_traits[XDI_LAUNCH_KINDS][XDI_LAUNCH_TRAITS][XDI_LAUNCH_NAME] = {
    { "", "", "", "" },
    { "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT" },
    { "PMIX_NAMESPACE", "", "", "" },
    { "PMI_JOBID", "PALS_APID", "", "" },
    { "SLURM_JOB_ID", "SLURM_STEP_ID", "", "" },
    { "MPIRUN_HOST", "MPIRUN_ID", "", "" },
    { "FLUX_JOB_ID", "", "", "" },
    { "LSB_JOBID", "PMIX_NAMESPACE", "", "" },
};

/* ---- one set ---- */

/* Whether a launcher's own variable tells the local rank. A batch script of Slurm, which is no rank, has no step. */
static bool xdi_launch_has_local(xd_launch_kind kind) {
    return getenv(xdi_launch_names[kind][XDI_LAUNCH_LOCAL_RANK]) &&
           (kind != XD_LAUNCH_SLURM || getenv("SLURM_STEP_ID"));
}

/* Whose variables stand beside PMI_RANK and PMI_SIZE: the PMI of srun, Flux and others tells nothing local. */
static xd_launch_kind xdi_launch_beside_pmi(void) {
    const bool own = getenv("MPI_LOCALRANKID") || getenv("MPI_LOCALNRANKS") || getenv(xdi_launch_pals[0]) ||
                     getenv(xdi_launch_pals[1]);
    if (own || !(getenv("PMI_RANK") || getenv("PMI_SIZE"))) return XD_LAUNCH_PMI;
    for (int i = 0; i < XDI_LAUNCH_SETS; i++) {
        const xd_launch_kind kind = (xd_launch_kind)xdi_launch_order[i];
        if (kind > XD_LAUNCH_PMI && xdi_launch_has_local(kind)) return kind;
    }
    return getenv("SLURM_STEP_ID") ? XD_LAUNCH_SLURM : XD_LAUNCH_PMI;
}

static const char *xdi_launch_name(xd_launch_kind kind, int number) {
    if (kind != XD_LAUNCH_PMI || number < XDI_LAUNCH_LOCAL_RANK) return xdi_launch_names[kind][number];
    const bool mpich = getenv("MPI_LOCALRANKID") || getenv("MPI_LOCALNRANKS");
    if (!mpich && (getenv(xdi_launch_pals[0]) || getenv(xdi_launch_pals[1])))
        return xdi_launch_pals[number - XDI_LAUNCH_LOCAL_RANK];
    return xdi_launch_names[xdi_launch_beside_pmi()][number];
}

/* Decimal digits alone, as launchers write them. */
static xd_result xdi_launch_parse(xd_ctx *ctx, const char *name, int least, int most, int *out) {
    const char *text = getenv(name);
    int64_t number = 0;
    size_t i = 0;
    for (; text[i] >= '0' && text[i] <= '9' && number <= most; i++) number = 10 * number + (text[i] - '0');
    XD_REQUIRE(ctx, i > 0 && !text[i] && number >= least && number <= most, XD_ERROR_ARGUMENT,
               "%s is \"%.40s\", must be a number from %d to %d", name, text, least, most);
    *out = (int)number;
    return XD_OK;
}

static xd_result xdi_launch_check(xd_ctx *ctx, const xdi_launch_set *set) {
    const int *n = set->number;
    XD_REQUIRE(ctx, n[XDI_LAUNCH_RANK] < n[XDI_LAUNCH_SIZE], XD_ERROR_TOPOLOGY, "%s is %d, but %s is %d",
               xdi_launch_name(set->kind, XDI_LAUNCH_RANK), n[XDI_LAUNCH_RANK],
               xdi_launch_name(set->kind, XDI_LAUNCH_SIZE), n[XDI_LAUNCH_SIZE]);
    const bool said = n[XDI_LAUNCH_LOCAL_SIZE] > 0;
    const int local = said ? XDI_LAUNCH_LOCAL_SIZE : XDI_LAUNCH_SIZE;
    XD_REQUIRE(ctx, n[XDI_LAUNCH_LOCAL_RANK] < n[local], XD_ERROR_TOPOLOGY, "%s is %d, but %s is %d",
               xdi_launch_name(set->kind, XDI_LAUNCH_LOCAL_RANK), n[XDI_LAUNCH_LOCAL_RANK],
               xdi_launch_name(set->kind, local), n[local]);
    XD_REQUIRE(ctx, n[XDI_LAUNCH_LOCAL_SIZE] <= n[XDI_LAUNCH_SIZE], XD_ERROR_TOPOLOGY,
               "%s is %d, but %s is %d", xdi_launch_name(set->kind, XDI_LAUNCH_LOCAL_SIZE),
               n[XDI_LAUNCH_LOCAL_SIZE], xdi_launch_name(set->kind, XDI_LAUNCH_SIZE), n[XDI_LAUNCH_SIZE]);
    return XD_OK;
}

/* A set is there when one of its variables is; then all of them must be. */
static xd_result xdi_launch_read(xd_ctx *ctx, xd_launch_kind kind, xdi_launch_set *set) {
    const char *given = NULL, *missing = NULL;
    memset(set, 0, sizeof *set);
    set->kind = kind;
    if (kind == XD_LAUNCH_SLURM && !getenv("SLURM_STEP_ID")) return XD_OK; /* a batch script is no rank */
    if (kind == XD_LAUNCH_SLURM) given = "SLURM_STEP_ID";
    for (int i = 0; i < XDI_LAUNCH_NUMBERS; i++) {
        const char *name = xdi_launch_name(kind, i);
        if (!*name) continue;
        if (getenv(name) && !given) given = name;
        if (!getenv(name) && !missing) missing = name;
    }
    if (!given) return XD_OK;
    XD_REQUIRE(ctx, !missing, XD_ERROR_MISSING, "%s is set to \"%.40s\", but %s is not set", given,
               getenv(given), missing);
    for (int i = 0; i < XDI_LAUNCH_NUMBERS; i++) {
        const bool size = i == XDI_LAUNCH_SIZE || i == XDI_LAUNCH_LOCAL_SIZE;
        const char *name = xdi_launch_name(kind, i);
        if (*name) XD_TRY(xdi_launch_parse(ctx, name, size, INT32_MAX, &set->number[i]));
    }
    set->there = true;
    return xdi_launch_check(ctx, set);
}

/* ---- two sets ---- */

/* One that counts other launchers, a process on each machine, says nothing of the ranks that these started. */
static xd_result xdi_launch_compare(xd_ctx *ctx, const xdi_launch_set *first, const xdi_launch_set *other) {
    static const unsigned char order[XDI_LAUNCH_NUMBERS] = { XDI_LAUNCH_SIZE, XDI_LAUNCH_RANK,
                                                             XDI_LAUNCH_LOCAL_SIZE, XDI_LAUNCH_LOCAL_RANK };
    if (other->number[XDI_LAUNCH_SIZE] < first->number[XDI_LAUNCH_SIZE] &&
        other->number[XDI_LAUNCH_LOCAL_RANK] == 0)
        return XD_OK;
    for (int i = 0; i < XDI_LAUNCH_NUMBERS; i++) {
        const int k = order[i], a = first->number[k], b = other->number[k];
        const char *one = xdi_launch_name(first->kind, k), *two = xdi_launch_name(other->kind, k);
        XD_REQUIRE(ctx, a == b || !*one || !*two, XD_ERROR_TOPOLOGY,
                   "%s is %d, but %s is %d: unset the variables of one of the two launchers", one, a, two, b);
    }
    return XD_OK;
}

/* No set is there: nothing else of a launcher may be. */
static xd_result xdi_launch_check_traces(xd_ctx *ctx) {
    for (int i = 0; i < XDI_LAUNCH_TRACES; i++) {
        const char *name = xdi_launch_traces[i], *value = getenv(name);
        XD_REQUIRE(
            ctx, !value, XD_ERROR_MISSING,
            "%s is set to \"%.40s\", but nothing tells the rank and the number of ranks: set RANK, "
            "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset it for one "
            "rank alone",
            name, value);
    }
    return XD_OK;
}

/* The first set that is there, `there` false for none. */
static xd_result xdi_launch_choose(xd_ctx *ctx, xdi_launch_set *first) {
    memset(first, 0, sizeof *first);
    for (int i = 0; i < XDI_LAUNCH_SETS; i++) {
        xdi_launch_set set;
        XD_TRY(xdi_launch_read(ctx, (xd_launch_kind)xdi_launch_order[i], &set));
        if (set.there && first->there) XD_TRY(xdi_launch_compare(ctx, first, &set));
        if (set.there && !first->there) *first = set;
    }
    return first->there ? XD_OK : xdi_launch_check_traces(ctx);
}

/* ---- what stands beside the numbers ---- */

static xd_result xdi_launch_read_master(xd_ctx *ctx, xd_launch_info *info) {
    const char *address = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
    const bool needed = info->kind == XD_LAUNCH_TORCHRUN;
    XD_REQUIRE(ctx, address || !(port || needed), XD_ERROR_MISSING, "%s is set, but MASTER_ADDR is not",
               port ? "MASTER_PORT" : "RANK");
    XD_REQUIRE(ctx, port || !address, XD_ERROR_MISSING, "MASTER_ADDR is set, but MASTER_PORT is not");
    if (!address) return XD_OK;
    const size_t length = strlen(address);
    XD_REQUIRE(ctx, length > 0 && length < XD_LAUNCH_ADDRESS_MAX, XD_ERROR_ARGUMENT,
               "MASTER_ADDR has %zu bytes, must have 1 to %d", length, XD_LAUNCH_ADDRESS_MAX - 1);
    XD_TRY(xdi_launch_parse(ctx, "MASTER_PORT", 1, 65535, &info->master_port));
    memcpy(info->master_address, address, length + 1);
    return XD_OK;
}

static xd_result xdi_launch_read_job(xd_ctx *ctx, xd_launch_info *info) {
    const char *job = getenv("XDISTILL_JOB");
    size_t length = 0;
    if (!job) return XD_OK;
    for (; job[length]; length++) {
        const char c = job[length];
        const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (!letter && !(c >= '0' && c <= '9') && c != '-' && c != '_') break;
    }
    XD_REQUIRE(ctx, length > 0 && !job[length] && length < XD_LAUNCH_JOB_MAX, XD_ERROR_ARGUMENT,
               "XDISTILL_JOB is \"%.80s\", must be 1 to %d letters, digits, '-' and '_'", job,
               XD_LAUNCH_JOB_MAX - 1);
    memcpy(info->job, job, length + 1);
    return XD_OK;
}

/* Where nobody gave the job a name, of the traits of one kind. */
static void xdi_launch_name_job(xd_launch_info *info, xd_launch_kind kind) {
    uint64_t hash = 0;
    bool said = false;
    for (int i = 0; i < XDI_LAUNCH_TRAITS; i++) {
        const char *name = xdi_launch_traits[kind][i], *value = *name ? getenv(name) : NULL;
        said = said || value;
        if (!value) value = "";
        hash = xd_hash(hash, value, strlen(value) + 1);
    }
    if (said)
        snprintf(info->job, sizeof info->job, "%s-%016llx", xdi_launch_kinds[kind], (unsigned long long)hash);
}

XD_API xd_result xd_launch_discover(xd_ctx *ctx, xd_launch_info *out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, out);
    xdi_launch_set set;
    xd_launch_info info;
    XD_TRY(xdi_launch_choose(ctx, &set));
    memset(&info, 0, sizeof info);
    info.kind = set.kind;
    info.rank = set.number[XDI_LAUNCH_RANK];
    info.world_size = set.there ? set.number[XDI_LAUNCH_SIZE] : 1;
    info.local_rank = set.number[XDI_LAUNCH_LOCAL_RANK];
    info.local_world_size = set.there ? set.number[XDI_LAUNCH_LOCAL_SIZE] : 1;
    XD_TRY(xdi_launch_read_master(ctx, &info));
    XD_TRY(xdi_launch_read_job(ctx, &info));
    if (!info.job[0]) xdi_launch_name_job(&info, info.kind);
    if (!info.job[0] && info.kind == XD_LAUNCH_PMI) xdi_launch_name_job(&info, xdi_launch_beside_pmi());
    xd_log(ctx, XD_LOG_INFO, "launch: %s, rank %d of %d, %d of %d on this machine, job \"%s\"",
           xdi_launch_kinds[info.kind], info.rank, info.world_size, info.local_rank, info.local_world_size,
           info.job);
    *out = info;
    return XD_OK;
}
