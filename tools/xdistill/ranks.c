/* ranks.c - memory, disk, ranks and progress. */
#define _POSIX_C_SOURCE 200809L /* statvfs */
#include "ranks.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

void *ranks_room(xd_ctx *ctx, int64_t count, size_t size, bool *failed) {
    void *memory = xd_allocate(ctx, ((size_t)count + 1) * size);
    if (!memory) *failed = true;
    return memory;
}

xd_result ranks_run(xd_ctx *ctx, int ranks, xd_rank_function function, void *argument) {
    xd_error error;
    xd_ctx_desc desc;
    memset(&error, 0, sizeof error);
    memset(&desc, 0, sizeof desc);
    desc.timeout_seconds = 600.0; /* a rank waits for another's context, on a slow machine too */
    const xd_result result = xd_run_threads(ranks, &desc, function, argument, &error);
    return result == XD_OK ? XD_OK : XD_FAIL(ctx, result, "rank %d: %s", error.rank, error.message);
}

static int ranks_sum(void *user, float *x, int64_t count) {
    return (int)xd_all_reduce((xd_comm *)user, x, x, count, XD_DTYPE_F32, XD_SUM);
}

static int ranks_gather(void *user, const float *send, float *received, const int64_t *counts) {
    return (int)xd_all_gather((xd_comm *)user, send, received, counts, XD_DTYPE_F32);
}

nn_group ranks_group(xd_comm *comm) {
    nn_group group;
    memset(&group, 0, sizeof group);
    group.size = xd_comm_size(comm);
    group.rank = xd_comm_rank(comm);
    group.user = comm;
    group.all_reduce_sum = ranks_sum;
    group.all_gather_v = ranks_gather;
    return group;
}

double ranks_peak_mib(void) {
    struct rusage usage;
    memset(&usage, 0, sizeof usage);
    (void)getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_maxrss / 1024.0;
}

int64_t ranks_memory_left(void) {
    FILE *file = fopen("/proc/meminfo", "r");
    char line[128];
    long long kib = 0;
    if (!file) return 0;
    while (kib == 0 && fgets(line, sizeof line, file)) (void)sscanf(line, "MemAvailable: %lld", &kib);
    fclose(file);
    return (int64_t)kib * 1024;
}

int64_t ranks_disk_left(const char *directory) {
    struct statvfs info;
    return statvfs(directory, &info) == 0 ? (int64_t)((double)info.f_bavail * (double)info.f_frsize) : 0;
}

const char *ranks_base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

meter meter_begin(xd_ctx *ctx, const char *what, const char *unit, int64_t before, int64_t total) {
    const meter m = { progress_begin(), what, unit, total, xd_now(ctx), before };
    return m;
}

void meter_show(xd_ctx *ctx, meter *m, int64_t done, const char *extra) {
    const double seconds = xd_now(ctx) - m->start;
    const double rate = seconds > 0.0 ? (double)(done - m->before) / seconds : 0.0;
    char stand[96], speed[48], left[48], time[32];
    const char *parts[4];
    int count = 0;
    snprintf(stand, sizeof stand, "%s: %lld/%lld %s", m->what, (long long)done, (long long)m->total, m->unit);
    snprintf(speed, sizeof speed, "%.3g %s/s", rate, m->unit);
    snprintf(left, sizeof left, "%s left",
             progress_time(time, rate > 0.0 ? (double)(m->total - done) / rate : 0.0));
    parts[count++] = stand;
    if (extra) parts[count++] = extra;
    parts[count++] = speed;
    parts[count++] = left;
    progress_show(&m->line, seconds, parts, count, done == m->total);
}
