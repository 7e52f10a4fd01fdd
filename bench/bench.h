/* The bench harness: machine ceilings, interleaved timing, one table, one JSON line a row (schema xdistill-bench/1).
 *
 * Every row times our operation and a naive reference in the same process, A/B/B/A, and prints the median of each and
 * the median of the per-round ratios. The floor of a row is its minimal bytes over the rate this machine showed a
 * moment ago for the same access pattern; score = floor / measured. */
#ifndef XDISTILL_BENCH_H
#define XDISTILL_BENCH_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BENCH_ROUNDS = 9, BENCH_WARMUP = 3 };

typedef void (*bench_function)(void *state);

/* One arm of a row: `prepare` restores inputs outside the timed region and may be NULL. */
typedef struct bench_arm {
    const char *name;
    bench_function run, prepare;
    void *state;
} bench_arm;

typedef struct bench_row {
    const char *op, *variant, *shape; /* shape: a JSON object's inside, "\"N\":256,\"V\":32000" */
    const char *dtype;
    double bytes;        /* minimal bytes of the operation */
    double ceiling;      /* bytes a second of the matching access pattern, bench_machine */
    const char *ceiling_name;
    double error;        /* largest relative error against the reference, checked before timing */
    double error_limit;
} bench_row;

/* Rates of this machine, bytes a second, one thread, buffers far larger than the caches where memory allows. */
typedef struct bench_machine {
    double read, copy, in_place;
    char cpu[96];
    long cache_bytes;
} bench_machine;

typedef struct bench_timing {
    double median, low, high; /* seconds: median, 10th and 90th percentile */
} bench_timing;

static double bench_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int bench_ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static bench_timing bench_summary(const double *samples, int count) {
    double sorted[BENCH_ROUNDS * 2];
    bench_timing t;
    memcpy(sorted, samples, (size_t)count * sizeof *sorted);
    qsort(sorted, (size_t)count, sizeof *sorted, bench_ascending);
    t.median = sorted[count / 2];
    t.low = sorted[count / 10];
    t.high = sorted[count - 1 - count / 10];
    return t;
}

static double bench_time_once(const bench_arm *arm) {
    if (arm->prepare) arm->prepare(arm->state);
    const double begin = bench_now();
    arm->run(arm->state);
    return bench_now() - begin;
}

/* ---- ceilings ---- */

static double bench_rate_read(const uint64_t *data, size_t words) {
    const double begin = bench_now();
    uint64_t sum[8] = { 0 };
    for (size_t i = 0; i + 8 <= words; i += 8)
        for (size_t k = 0; k < 8; k++) sum[k] += data[i + k];
    const double seconds = bench_now() - begin;
    volatile uint64_t keep = sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
    (void)keep;
    return (double)(words * sizeof *data) / seconds;
}

static double bench_rate_in_place(float *data, size_t count) {
    const double begin = bench_now();
    for (size_t i = 0; i < count; i++) data[i] = data[i] * 0.999f + 1e-3f;
    return 2.0 * (double)(count * sizeof *data) / (bench_now() - begin);
}

static bench_machine bench_measure_machine(size_t bytes) {
    bench_machine m;
    memset(&m, 0, sizeof m);
    float *a = (float *)malloc(bytes), *b = (float *)malloc(bytes);
    if (!a || !b) exit(2);
    for (size_t i = 0; i < bytes / sizeof *a; i++) a[i] = b[i] = 1.0f;
    for (int round = 0; round < 5; round++) {
        m.read = fmax(m.read, bench_rate_read((const uint64_t *)(const void *)a, bytes / 8));
        m.in_place = fmax(m.in_place, bench_rate_in_place(a, bytes / sizeof *a));
        const double begin = bench_now();
        memcpy(b, a, bytes);
        m.copy = fmax(m.copy, 2.0 * (double)bytes / (bench_now() - begin));
    }
    free(a);
    free(b);
    FILE *info = fopen("/proc/cpuinfo", "r");
    char line[256];
    while (info && fgets(line, sizeof line, info))
        if (sscanf(line, "model name : %95[^\n]", m.cpu) == 1) break;
    if (info) fclose(info);
    m.cache_bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return m;
}

/* ---- rows ---- */

static void bench_header(const bench_machine *m, const char *title, const char *commit) {
    printf("# xdistill-bench  %s  git=%s\n", title, commit);
    printf("# cpu %s, last-level cache %ld MiB; read %.1f, copy %.1f, in-place %.1f GB/s (one thread)\n", m->cpu,
           m->cache_bytes >> 20, m->read * 1e-9, m->copy * 1e-9, m->in_place * 1e-9);
    printf("# %-22s %-12s %-5s %12s %9s %7s %7s %12s %8s %9s\n", "op", "variant", "type", "time(us)", "p90(us)", "GB/s",
           "score", "ref(us)", "speedup", "maxerr");
}

/* Times the row and prints it; appends the JSON line to `json` when it is not NULL. Returns false when the error is
 * above the limit: a wrong result is not timed. */
static bool bench_run(FILE *json, const bench_machine *m, const bench_row *row, const bench_arm *ours,
                      const bench_arm *reference) {
    double a[BENCH_ROUNDS * 2], b[BENCH_ROUNDS * 2], ratio[BENCH_ROUNDS];
    if (!(row->error <= row->error_limit)) {
        printf("  %-22s %-12s wrong: error %.3g above %.3g\n", row->op, row->variant, row->error, row->error_limit);
        return false;
    }
    for (int i = 0; i < BENCH_WARMUP; i++) {
        bench_time_once(ours);
        if (i == 0) bench_time_once(reference);
    }
    for (int round = 0; round < BENCH_ROUNDS; round++) { /* A B B A */
        a[2 * round] = bench_time_once(ours);
        b[2 * round] = bench_time_once(reference);
        b[2 * round + 1] = bench_time_once(reference);
        a[2 * round + 1] = bench_time_once(ours);
        ratio[round] = (b[2 * round] + b[2 * round + 1]) / (a[2 * round] + a[2 * round + 1]);
    }
    const bench_timing ta = bench_summary(a, 2 * BENCH_ROUNDS), tb = bench_summary(b, 2 * BENCH_ROUNDS);
    const bench_timing tr = bench_summary(ratio, BENCH_ROUNDS);
    const double floor_seconds = row->ceiling > 0.0 ? row->bytes / row->ceiling : 0.0;
    const double score = floor_seconds / ta.median;
    printf("  %-22s %-12s %-5s %12.2f %9.2f %7.2f %7.2f %12.2f %8.2f %9.1e\n", row->op, row->variant, row->dtype,
           ta.median * 1e6, ta.high * 1e6, row->bytes / ta.median * 1e-9, score, tb.median * 1e6, tr.median, row->error);
    fflush(stdout);
    if (json)
        fprintf(json,
                "{\"schema\":\"xdistill-bench/1\",\"op\":\"%s\",\"variant\":\"%s\",\"shape\":{%s},\"dtype_in\":\"%s\","
                "\"arm\":\"xdistill\",\"mode\":\"kernel\",\"ms\":{\"median\":%.6g,\"p10\":%.6g,\"p90\":%.6g,"
                "\"samples\":%d,\"rounds\":%d},\"ratio\":{\"vs\":\"%s\",\"median\":%.4g},\"roof\":{\"min_bytes\":%.6g,"
                "\"bound\":\"bytes\",\"floor_ms\":%.6g,\"ceiling_name\":\"%s\",\"ceiling_value\":%.4g,\"score\":%.4g},"
                "\"achieved\":{\"GBps_min\":%.4g},\"check\":{\"error\":%.3g,\"pass\":true},\"device\":{\"cpu\":\"%s\","
                "\"llc_bytes\":%ld}}\n",
                row->op, row->variant, row->shape, row->dtype, ta.median * 1e3, ta.low * 1e3, ta.high * 1e3,
                2 * BENCH_ROUNDS, BENCH_ROUNDS, reference->name, tr.median, row->bytes, floor_seconds * 1e3,
                row->ceiling_name, row->ceiling, score, row->bytes / ta.median * 1e-9, row->error, m->cpu,
                m->cache_bytes);
    return true;
}

#endif
