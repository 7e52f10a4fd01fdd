/* Which rank a process is, from tables of environments: each launcher's variables, sets of which one is missing, values that are none,
 * and two launchers, one of which started the other, or which contradict each other; and the world of those that were launched. */
#if !defined(_POSIX_C_SOURCE)
#    define _POSIX_C_SOURCE 200809L /* setenv */
#endif
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "xd_test.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define TORCHRUN "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=host7 MASTER_PORT=4321"
#define OPEN_MPI                                                                  \
    "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 " \
    "OMPI_COMM_WORLD_LOCAL_SIZE=4"
#define PMI "PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4"
#define SLURM "SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=1"
#define MVAPICH                                                                \
    "MV2_COMM_WORLD_RANK=5 MV2_COMM_WORLD_SIZE=8 MV2_COMM_WORLD_LOCAL_RANK=1 " \
    "MV2_COMM_WORLD_LOCAL_SIZE=4"
#define FLUX "FLUX_TASK_RANK=5 FLUX_JOB_SIZE=8 FLUX_TASK_LOCAL_ID=1"
#define JSRUN                                                               \
    "JSM_NAMESPACE_RANK=5 JSM_NAMESPACE_SIZE=8 JSM_NAMESPACE_LOCAL_RANK=1 " \
    "JSM_NAMESPACE_LOCAL_SIZE=4"
#define PALS "PMI_RANK=5 PMI_SIZE=8 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=4"

static const char *const known[] = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_JOBID",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_JOB_ID",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPIRUN_HOST",
    "MPIRUN_ID",
    "FLUX_TASK_RANK",
    "FLUX_JOB_SIZE",
    "FLUX_TASK_LOCAL_ID",
    "FLUX_JOB_ID",
    "JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_SIZE",
    "JSM_NAMESPACE_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_SIZE",
    "LSB_JOBID",
    "PMI_LOCAL_RANK",
    "PMI_LOCAL_SIZE",
    "PMIX_RANK",
    "PMI_FD",
    "PMI_PORT",
    "PMI_ID",
    "PMI_SPAWNED",
    "PALS_RANKID",
    "PALS_APID",
    "ALPS_APP_PE",
    "MPIRUN_RANK",
    "MP_CHILD",
    "OMPI_COMM_WORLD_NODE_RANK",
    "OMPI_UNIVERSE_SIZE",
    "HYDI_CONTROL_FD",
    "XDISTILL_JOB",
};

/* The environment becomes "NAME=value NAME=value", of these variables; a later value replaces an earlier one, and "-NAME"
 * takes one away. */
static void surround(const char *words) {
    char text[2048];
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) unsetenv(known[i]);
    CHECK(strlen(words) < sizeof text);
    snprintf(text, sizeof text, "%s", words);
    for (char *rest = text; *rest;) {
        char *word = rest;
        rest += strcspn(rest, " ");
        if (*rest) *rest++ = 0;
        char *value = strchr(word, '=');
        if (value) {
            *value = 0;
            CHECK(setenv(word, value + 1, 1) == 0);
        } else if (word[0] == '-') {
            unsetenv(word + 1);
        }
    }
}

static xd_ctx *plain_ctx(void) {
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    return ctx;
}

/* What the environment says; the place must be found. */
static xd_launch_info found(const char *words) {
    xd_ctx *ctx = plain_ctx();
    xd_launch_info info;
    memset(&info, 0, sizeof info);
    surround(words);
    const xd_result result = xd_launch_discover(ctx, &info);
    CHECK_EQ_INT(result, XD_OK);
    if (result != XD_OK) printf("    %s: %s\n", words, xd_last_error(ctx)->message);
    xd_ctx_destroy(ctx);
    return info;
}

static void places(const char *words, xd_launch_kind kind, int rank, int size, int local_rank,
                   int local_size) {
    const xd_launch_info info = found(words);
    CHECK_EQ_INT(info.kind, kind);
    CHECK_EQ_INT(info.rank, rank);
    CHECK_EQ_INT(info.world_size, size);
    CHECK_EQ_INT(info.local_rank, local_rank);
    CHECK_EQ_INT(info.local_world_size, local_size);
}

/* This error with this text; nothing is written. */
static void refused(const char *words, xd_result wanted, const char *text) {
    xd_ctx *ctx = plain_ctx();
    xd_launch_info info, before;
    memset(&info, 0x5a, sizeof info);
    before = info;
    surround(words);
    const xd_result result = xd_launch_discover(ctx, &info);
    CHECK_EQ_INT(result, wanted);
    CHECK(strstr(xd_last_error(ctx)->message, text) != NULL);
    if (result != wanted || !strstr(xd_last_error(ctx)->message, text))
        printf("    %s:\n    \"%s\"\n    not \"%s\"\n", words, xd_last_error(ctx)->message, text);
    CHECK(memcmp(&info, &before, sizeof info) == 0);
    xd_ctx_destroy(ctx);
}

XD_TEST(nothing_in_the_environment_is_one_rank) {
    const xd_launch_info info = found("");
    places("", XD_LAUNCH_ALONE, 0, 1, 0, 1);
    CHECK_EQ_STR(info.job, "");
    CHECK_EQ_STR(info.master_address, "");
    CHECK_EQ_INT(info.master_port, 0);
}

XD_TEST(each_launcher_tells_the_rank) {
    places(TORCHRUN, XD_LAUNCH_TORCHRUN, 5, 8, 1, 4);
    places(OPEN_MPI, XD_LAUNCH_OPEN_MPI, 5, 8, 1, 4);
    places(PMI, XD_LAUNCH_PMI, 5, 8, 1, 4);
    places(SLURM, XD_LAUNCH_SLURM, 5, 8, 1, 0);
    places(MVAPICH, XD_LAUNCH_MVAPICH, 5, 8, 1, 4);
    places(FLUX, XD_LAUNCH_FLUX, 5, 8, 1, 0);
    places(JSRUN, XD_LAUNCH_JSRUN, 5, 8, 1, 4);
    places(PALS, XD_LAUNCH_PMI, 5, 8, 1, 4);
    places(PALS " PALS_RANKID=5 PALS_APID=x PMI_FD=3", XD_LAUNCH_PMI, 5, 8, 1, 4);
    places(JSRUN " PMIX_RANK=5 PMIX_NAMESPACE=a", XD_LAUNCH_JSRUN, 5, 8, 1, 4);
}

XD_TEST(pmi_of_other_launchers_has_their_local_rank) {
    static const struct {
        const char *words;
        int local_size;
    } beside[] = { { MVAPICH, 4 }, { FLUX, 0 }, { JSRUN, 4 }, { SLURM, 0 } };
    for (size_t i = 0; i < sizeof beside / sizeof beside[0]; i++) {
        char words[512];
        snprintf(words, sizeof words, "PMI_RANK=5 PMI_SIZE=8 PMI_FD=7 %s", beside[i].words);
        places(words, XD_LAUNCH_PMI, 5, 8, 1, beside[i].local_size);
    }
    places("PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4 PMI_LOCAL_RANK=9", XD_LAUNCH_PMI, 5, 8,
           1, 4);
}

XD_TEST(slurm_that_started_the_brokers_of_flux_is_left_alone) {
    places("SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 " FLUX, XD_LAUNCH_FLUX, 5,
           8, 1, 0);
    places(
        "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 PMI_RANK=5 PMI_SIZE=8 " FLUX,
        XD_LAUNCH_PMI, 5, 8, 1, 0);
}

/* What shows that a launcher is at work, without the rank; each is one rank alone when it is not there. */
XD_TEST(a_process_of_a_launcher_that_tells_no_rank_is_not_alone) {
    static const char *const traces[] = { "PMIX_RANK",          "PMIX_NAMESPACE", "PMI_FD",
                                          "PMI_PORT",           "PMI_ID",         "PMI_SPAWNED",
                                          "PALS_RANKID",        "PALS_APID",      "ALPS_APP_PE",
                                          "MPIRUN_RANK",        "MP_CHILD",       "OMPI_COMM_WORLD_NODE_RANK",
                                          "OMPI_UNIVERSE_SIZE", "HYDI_CONTROL_FD" };
    for (size_t i = 0; i < sizeof traces / sizeof traces[0]; i++) {
        char words[512], text[128];
        snprintf(words, sizeof words, "%s=0", traces[i]);
        snprintf(text, sizeof text, "%s is set to \"0\", but nothing tells the rank", traces[i]);
        refused(words, XD_ERROR_MISSING, text);
        snprintf(words, sizeof words, "%s=0 %s", traces[i], TORCHRUN);
        places(words, XD_LAUNCH_TORCHRUN, 5, 8, 1, 4);
    }
    places("", XD_LAUNCH_ALONE, 0, 1, 0, 1);
}

XD_TEST(the_first_of_several_sets_counts) {
    places(TORCHRUN " " OPEN_MPI " " PMI " " SLURM, XD_LAUNCH_TORCHRUN, 5, 8, 1, 4);
    places(OPEN_MPI " " PMI " " SLURM, XD_LAUNCH_OPEN_MPI, 5, 8, 1, 4);
    places(PMI " " SLURM, XD_LAUNCH_PMI, 5, 8, 1, 4);
}

XD_TEST(a_batch_script_of_slurm_is_no_rank) {
    places("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_JOB_ID=9", XD_LAUNCH_ALONE, 0, 1, 0, 1);
}

XD_TEST(pmi_of_srun_has_the_local_rank_of_slurm) {
    places("PMI_RANK=5 PMI_SIZE=8 " SLURM, XD_LAUNCH_PMI, 5, 8, 1, 0);
    refused("PMI_RANK=5 PMI_SIZE=8", XD_ERROR_MISSING,
            "PMI_RANK is set to \"5\", but MPI_LOCALRANKID is not set");
    refused("PMI_RANK=4 PMI_SIZE=8 " SLURM, XD_ERROR_TOPOLOGY, "PMI_RANK is 4, but SLURM_PROCID is 5");
}

XD_TEST(a_set_of_which_one_is_missing_names_it) {
    static const struct {
        const char *words, *names[6];
    } sets[] = {
        { TORCHRUN,
          { "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT" } },
        { OPEN_MPI,
          { "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE", NULL, NULL } },
        { PMI, { "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", NULL, NULL } },
        { SLURM, { "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL, NULL, NULL } },
        { MVAPICH,
          { "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
            "MV2_COMM_WORLD_LOCAL_SIZE", NULL, NULL } },
        { FLUX, { "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", NULL, NULL, NULL } },
        { JSRUN,
          { "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
            "JSM_NAMESPACE_LOCAL_SIZE", NULL, NULL } },
        { PALS, { "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", NULL, NULL } },
    };
    for (size_t i = 0; i < sizeof sets / sizeof sets[0]; i++)
        for (int k = 0; k < 6 && sets[i].names[k]; k++) {
            char words[512], text[128];
            snprintf(words, sizeof words, "%s -%s", sets[i].words, sets[i].names[k]);
            snprintf(text, sizeof text, ", but %s is not", sets[i].names[k]);
            refused(words, XD_ERROR_MISSING, text);
        }
    refused("WORLD_SIZE=4", XD_ERROR_MISSING, "WORLD_SIZE is set to \"4\", but RANK is not set");
    refused(TORCHRUN " PMI_SIZE=8", XD_ERROR_MISSING, "PMI_SIZE is set to \"8\", but PMI_RANK is not set");
    refused(TORCHRUN " -MASTER_ADDR -MASTER_PORT", XD_ERROR_MISSING, "RANK is set, but MASTER_ADDR is not");
    refused("MASTER_PORT=99", XD_ERROR_MISSING, "MASTER_PORT is set, but MASTER_ADDR is not");
}

XD_TEST(a_value_that_is_no_number_is_named) {
    static const char *const bad[] = { "",    "x",          "-1",
                                       "+1",  "1x",         "0x1",
                                       "1.0", "2147483648", "18446744073709551621" };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char words[512], text[128];
        snprintf(words, sizeof words, "%s RANK=%s", TORCHRUN, bad[i]);
        snprintf(text, sizeof text, "RANK is \"%s\", must be a number from 0 to 2147483647", bad[i]);
        refused(words, XD_ERROR_ARGUMENT, text);
    }
    refused(OPEN_MPI " OMPI_COMM_WORLD_SIZE=0", XD_ERROR_ARGUMENT,
            "OMPI_COMM_WORLD_SIZE is \"0\", must be a number from 1 to 2147483647");
    refused(TORCHRUN " MASTER_PORT=65536", XD_ERROR_ARGUMENT, "MASTER_PORT is \"65536\"");
    refused(TORCHRUN " MASTER_PORT=0", XD_ERROR_ARGUMENT, "MASTER_PORT is \"0\"");
    refused(TORCHRUN " MASTER_ADDR=", XD_ERROR_ARGUMENT, "MASTER_ADDR has 0 bytes, must have 1 to 255");
}

XD_TEST(numbers_of_one_set_must_fit_together) {
    refused(TORCHRUN " RANK=8", XD_ERROR_TOPOLOGY, "RANK is 8, but WORLD_SIZE is 8");
    refused(PMI " MPI_LOCALRANKID=4", XD_ERROR_TOPOLOGY, "MPI_LOCALRANKID is 4, but MPI_LOCALNRANKS is 4");
    refused(TORCHRUN " LOCAL_WORLD_SIZE=9", XD_ERROR_TOPOLOGY, "LOCAL_WORLD_SIZE is 9, but WORLD_SIZE is 8");
    refused(SLURM " SLURM_LOCALID=8", XD_ERROR_TOPOLOGY, "SLURM_LOCALID is 8, but SLURM_STEP_NUM_TASKS is 8");
    places(TORCHRUN " RANK=2147483646 WORLD_SIZE=2147483647", XD_LAUNCH_TORCHRUN, 2147483646, 2147483647, 1,
           4);
}

XD_TEST(sets_that_contradict_each_other_are_refused_with_both_values) {
    refused(TORCHRUN " " OPEN_MPI " OMPI_COMM_WORLD_RANK=6", XD_ERROR_TOPOLOGY,
            "RANK is 5, but OMPI_COMM_WORLD_RANK is 6");
    refused(TORCHRUN " " OPEN_MPI " OMPI_COMM_WORLD_SIZE=16", XD_ERROR_TOPOLOGY,
            "WORLD_SIZE is 8, but OMPI_COMM_WORLD_SIZE is 16");
    refused(OPEN_MPI " " PMI " MPI_LOCALNRANKS=2", XD_ERROR_TOPOLOGY,
            "OMPI_COMM_WORLD_LOCAL_SIZE is 4, but MPI_LOCALNRANKS is 2");
    refused(OPEN_MPI " " SLURM " SLURM_LOCALID=2", XD_ERROR_TOPOLOGY,
            "OMPI_COMM_WORLD_LOCAL_RANK is 1, but SLURM_LOCALID is 2");
    refused(TORCHRUN " " SLURM " SLURM_STEP_NUM_TASKS=6 SLURM_PROCID=5", XD_ERROR_TOPOLOGY,
            "WORLD_SIZE is 8, but SLURM_STEP_NUM_TASKS is 6");
}

/* srun starts torchrun once on each of two machines; an interactive step, in which mpirun runs. */
XD_TEST(a_launcher_that_another_one_started_counts) {
    places(TORCHRUN " SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0",
           XD_LAUNCH_TORCHRUN, 5, 8, 1, 4);
    places(OPEN_MPI " SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_LOCALID=0",
           XD_LAUNCH_OPEN_MPI, 5, 8, 1, 4);
}

XD_TEST(where_ranks_meet_is_told_for_every_kind) {
    static const char *const sets[] = { TORCHRUN, OPEN_MPI " MASTER_ADDR=host7 MASTER_PORT=4321",
                                        SLURM " MASTER_ADDR=host7 MASTER_PORT=4321",
                                        "MASTER_ADDR=host7 MASTER_PORT=4321" };
    for (size_t i = 0; i < sizeof sets / sizeof sets[0]; i++) {
        const xd_launch_info info = found(sets[i]);
        CHECK_EQ_STR(info.master_address, "host7");
        CHECK_EQ_INT(info.master_port, 4321);
    }
}

XD_TEST(an_address_has_at_most_255_bytes) {
    char words[1024], address[XD_LAUNCH_ADDRESS_MAX + 1];
    memset(address, 'a', sizeof address);
    address[XD_LAUNCH_ADDRESS_MAX - 1] = 0;
    snprintf(words, sizeof words, "%s MASTER_ADDR=%s", TORCHRUN, address);
    CHECK_EQ_STR(found(words).master_address, address);
    snprintf(words, sizeof words, "%s MASTER_ADDR=%sa", TORCHRUN, address);
    refused(words, XD_ERROR_ARGUMENT, "MASTER_ADDR has 256 bytes");
}

/* ---- names of jobs ---- */

XD_TEST(a_job_has_the_name_that_it_was_given) {
    CHECK_EQ_STR(found("XDISTILL_JOB=Mine-1_a").job, "Mine-1_a");
    CHECK_EQ_STR(found(TORCHRUN " XDISTILL_JOB=Mine-1_a").job, "Mine-1_a");
    refused("XDISTILL_JOB=", XD_ERROR_ARGUMENT, "XDISTILL_JOB is \"\", must be 1 to 63 letters");
    refused("XDISTILL_JOB=../up", XD_ERROR_ARGUMENT, "XDISTILL_JOB is \"../up\"");
    refused("XDISTILL_JOB=0123456789012345678901234567890123456789012345678901234567890123",
            XD_ERROR_ARGUMENT, "1 to 63 letters");
}

/* The names of these two jobs; empty ones are equal. */
static bool same_job(const char *one, const char *other) {
    const xd_launch_info a = found(one), b = found(other);
    return strcmp(a.job, b.job) == 0;
}

XD_TEST(ranks_of_a_job_agree_on_its_name_and_other_jobs_have_others) {
    static const char *const jobs[][3] = {
        { TORCHRUN, "MASTER_PORT=4322", "RANK=4" },
        { TORCHRUN, "TORCHELASTIC_RUN_ID=7", "RANK=4" },
        { TORCHRUN " TORCHELASTIC_RESTART_COUNT=0", "TORCHELASTIC_RESTART_COUNT=1", "RANK=4" },
        { OPEN_MPI " PMIX_NAMESPACE=1", "PMIX_NAMESPACE=2", "OMPI_COMM_WORLD_RANK=4" },
        { SLURM " SLURM_JOB_ID=12", "SLURM_JOB_ID=13", "SLURM_PROCID=4" },
        { SLURM " SLURM_JOB_ID=12", "SLURM_STEP_ID=1", "SLURM_PROCID=4" },
        { "PMI_RANK=5 PMI_SIZE=8 " SLURM " SLURM_JOB_ID=12", "SLURM_STEP_ID=1", "PMI_RANK=4 SLURM_PROCID=4" },
        { MVAPICH " MPIRUN_HOST=a MPIRUN_ID=1", "MPIRUN_ID=2", "MV2_COMM_WORLD_RANK=4" },
        { FLUX " FLUX_JOB_ID=f1", "FLUX_JOB_ID=f2", "FLUX_TASK_RANK=4" },
        { "PMI_RANK=5 PMI_SIZE=8 " FLUX " FLUX_JOB_ID=f1", "FLUX_JOB_ID=f2", "PMI_RANK=4 FLUX_TASK_RANK=4" },
        { JSRUN " LSB_JOBID=3", "LSB_JOBID=4", "JSM_NAMESPACE_RANK=4" },
        { JSRUN " PMIX_NAMESPACE=3", "PMIX_NAMESPACE=4", "JSM_NAMESPACE_RANK=4" },
        { PALS " PALS_APID=3", "PALS_APID=4", "PMI_RANK=4" },
    };
    for (size_t i = 0; i < sizeof jobs / sizeof jobs[0]; i++) {
        char changed[512], beside[512];
        snprintf(changed, sizeof changed, "%s %s", jobs[i][0], jobs[i][1]);
        snprintf(beside, sizeof beside, "%s %s", jobs[i][0], jobs[i][2]);
        CHECK(found(jobs[i][0]).job[0]);
        CHECK(!same_job(jobs[i][0], changed));
        CHECK(same_job(jobs[i][0], beside));
    }
    CHECK_EQ_STR(found(OPEN_MPI).job, "");
    CHECK(strncmp(found(TORCHRUN).job, "torchrun-", 9) == 0);
}

/* ---- the log ---- */

static void keep_line(void *user, xd_log_level level, const char *line) {
    if (level == XD_LOG_INFO) snprintf((char *)user, 256, "%s", line);
}

XD_TEST(the_launcher_that_was_chosen_is_logged) {
    char line[256] = "";
    const xd_ctx_desc desc = { .logger = { keep_line, line }, .log_level = XD_LOG_INFO };
    xd_ctx *ctx = NULL;
    xd_launch_info info;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    surround(PMI);
    CHECK(xd_launch_discover(ctx, &info) == XD_OK);
    CHECK(strstr(line, "pmi, rank 5 of 8, 1 of 4 on this machine") != NULL);
    xd_ctx_destroy(ctx);
}

/* ---- the world of those that were launched ---- */

static void launched_refuses(const char *words, xd_result wanted, const char *text) {
    xd_ctx *ctx = plain_ctx();
    xd_comm *world = NULL;
    surround(words);
    CHECK_EQ_INT(xd_comm_launched(ctx, &world), wanted);
    CHECK_EQ_STR(xd_last_error(ctx)->message, text);
    CHECK(world == NULL);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_process_alone_is_a_world_of_one_rank) {
    static const char *const words[] = {
        "", "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1"
    };
    for (int i = 0; i < 2; i++) {
        xd_ctx *ctx = plain_ctx();
        xd_comm *world = NULL;
        surround(words[i]);
        CHECK_EQ_INT(xd_comm_launched(ctx, &world), XD_OK);
        CHECK(world && xd_comm_size(world) == 1 && xd_comm_rank(world) == 0);
        xd_comm_destroy(world);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(ranks_of_other_machines_and_jobs_without_a_name_are_refused) {
    launched_refuses(
        TORCHRUN, XD_ERROR_UNSUPPORTED,
        "4 of 8 ranks are on this machine: for several machines there are xd_comm_mpi and xd_comm_nccl");
    launched_refuses("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
                     "OMPI_COMM_WORLD_LOCAL_SIZE=2",
                     XD_ERROR_MISSING,
                     "nothing names this job of 2 ranks: set XDISTILL_JOB to a name that no other has");
    launched_refuses(TORCHRUN " RANK=8", XD_ERROR_TOPOLOGY, "RANK is 8, but WORLD_SIZE is 8");
}

/* The status of a process that joins the job and adds up ranks: 0 when all is as it must be. */
static int join_and_add(int rank, long job) {
    char words[256];
    int64_t sum = 10 + rank;
    xd_ctx *ctx = plain_ctx();
    xd_comm *world = NULL;
    snprintf(words, sizeof words,
             "RANK=%d WORLD_SIZE=3 LOCAL_RANK=%d LOCAL_WORLD_SIZE=3 MASTER_ADDR=a MASTER_PORT=1 "
             "XDISTILL_JOB=launched-%ld",
             rank, rank, job);
    surround(words);
    if (xd_comm_launched(ctx, &world) != XD_OK) return 1;
    if (xd_comm_size(world) != 3 || xd_comm_rank(world) != rank) return 2;
    if (xd_all_reduce(world, &sum, &sum, 1, XD_DTYPE_I64, XD_SUM) != XD_OK || sum != 33) return 3;
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
    return 0;
}

XD_TEST(processes_of_one_machine_meet) {
    pid_t child[3];
    for (int r = 0; r < 3; r++)
        if ((child[r] = fork()) == 0) _exit(join_and_add(r, (long)getppid()));
    for (int r = 0; r < 3; r++) {
        int status = -1;
        CHECK(waitpid(child[r], &status, 0) == child[r]);
        CHECK_EQ_INT(status, 0);
    }
}

XD_TEST_MAIN()
