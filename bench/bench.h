/* The bench harness: machine ceilings, interleaved timing, one table, one JSON line a row (schema xdistill-bench/1).
 *
 * Every row times our operation and a naive reference in the same process, A/B/B/A, and prints the median of each and
 * the median of the per-round ratios; "A/A" is how far the ratio of our own two times of a round strays (10th to 90th
 * percentile): a speedup below it is noise. The floor of a row is its minimal bytes over the rate this machine showed a
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

#if !defined(BENCH_ROUNDS)
#    define BENCH_ROUNDS 9 /* programs whose operations take long define fewer before they include this */
#endif
#if !defined(BENCH_WARMUP)
#    define BENCH_WARMUP 3
#endif

typedef void (*bench_function)(void *state);

/* One arm of a row. An operation of several ranks times itself: `measure` then stands instead of `run`. */
typedef struct bench_arm {
    const char *name;
    void *state;
    bench_function run;
    double (*measure)(void *state); /* seconds of one operation; NULL -> the time of run */
} bench_arm;

typedef struct bench_row {
    const char *op, *variant, *shape; /* shape: a JSON object's inside, "\"N\":256,\"V\":32000" */
    const char *dtype;
    double bytes;   /* minimal bytes of the operation; 0 -> the row has no floor */
    double ceiling; /* bytes a second of the matching access pattern, bench_machine */
    const char *ceiling_name;
    double error; /* relative error against the reference, checked before timing */
    double error_limit;
    double target;      /* score to reach: with the floor, what the model predicts; 0 -> no prediction */
    double extra_bytes; /* memory that the operation takes beyond its arrays, at its peak */
} bench_row;

/* Rates of this machine, bytes a second, one thread, buffers far larger than the caches where memory allows. */
typedef struct bench_machine {
    double read, copy, in_place;
    char cpu[96];
    char commit[48];
    long cache_bytes, cores;
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
    if (arm->measure) return arm->measure(arm->state);
    const double begin = bench_now();
    arm->run(arm->state);
    return bench_now() - begin;
}

/* ---- ceilings ---- */

/* The first line that a command prints, or "unknown". */
static void bench_first_line(const char *command, char *line, int size) {
    FILE *pipe = popen(command, "r");
    if (!pipe || !fgets(line, size, pipe)) snprintf(line, (size_t)size, "unknown");
    if (pipe) pclose(pipe);
    line[strcspn(line, "\n")] = '\0';
}

static void bench_describe(bench_machine *m) {
    bench_first_line("sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null", m->cpu,
                     (int)sizeof m->cpu);
    bench_first_line("echo ${XDISTILL_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}",
                     m->commit, (int)sizeof m->commit);
    m->cores = sysconf(_SC_NPROCESSORS_ONLN);
#if defined(_SC_LEVEL3_CACHE_SIZE)
    m->cache_bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
}

#if !defined(__CUDACC__) /* benches of a GPU measure its own */
#    include "ceilings.h"

/* Bytes a second of one window. */
static double bench_rate_read(const void *data, int64_t lines, bench_way way) {
    const double begin = bench_now();
    volatile uint64_t keep = bench_read((const bench_words *)data, lines, way);
    (void)keep;
    return 64.0 * (double)bench_lines(lines, way) / (bench_now() - begin);
}

static double bench_rate_in_place(void *data, int64_t lines, bench_way way) {
    const double begin = bench_now();
    bench_in_place((bench_floats *)data, lines, way);
    return 128.0 * (double)bench_lines(lines, way) / (bench_now() - begin);
}

static double bench_rate_copy(void *to, const void *from, size_t bytes) {
    const double begin = bench_now();
    memcpy(to, from, bytes);
    return 2.0 * (double)bytes / (bench_now() - begin);
}

/* The best windows of a few sweeps over two arrays; copies are whole, as the C library decides by their size. */
static bench_machine bench_measure_machine(size_t bytes) {
    enum { WINDOWS = 8, SWEEPS = 3 };
    const size_t window = bytes / WINDOWS / 4096 * 4096;
    bench_machine m;
    memset(&m, 0, sizeof m);
    void *memory = malloc(bytes + 64), *other = malloc(bytes + 64);
    if (!memory || !other) exit(2);
    char *a = (char *)memory + (64 - (uintptr_t)memory % 64),
         *b = (char *)other + (64 - (uintptr_t)other % 64);
    for (size_t i = 0; i < bytes / sizeof(float); i++)
        ((float *)(void *)a)[i] = ((float *)(void *)b)[i] = 1.0f;
    for (int i = 0; i < BENCH_WAYS * SWEEPS; i++) {
        const bench_way way = bench_ways[i % BENCH_WAYS];
        for (size_t at = 0; at + window <= bytes; at += window)
            m.read = fmax(m.read, bench_rate_read(a + at, (int64_t)window / 64, way));
        for (size_t at = 0; at + window <= bytes; at += window)
            m.in_place = fmax(m.in_place, bench_rate_in_place(b + at, (int64_t)window / 64, way));
    }
    for (int i = 0; i < SWEEPS; i++) m.copy = fmax(m.copy, bench_rate_copy(b, a, bytes));
    free(memory);
    free(other);
    bench_describe(&m);
    return m;
}
#endif

/* ---- rows ---- */

typedef struct bench_times {
    bench_timing ours, reference, ratio; /* ratio: reference over ours, per round */
    double aa_spread;
} bench_times;

static bench_times bench_interleave(const bench_arm *ours, const bench_arm *reference) {
    double a[BENCH_ROUNDS * 2], b[BENCH_ROUNDS * 2], ratio[BENCH_ROUNDS], own[BENCH_ROUNDS];
    bench_times t;
    for (int i = 0; i < BENCH_WARMUP; i++) {
        bench_time_once(ours);
        bench_time_once(reference);
    }
    for (int round = 0; round < BENCH_ROUNDS; round++) { /* A B B A */
        a[2 * round] = bench_time_once(ours);
        b[2 * round] = bench_time_once(reference);
        b[2 * round + 1] = bench_time_once(reference);
        a[2 * round + 1] = bench_time_once(ours);
        ratio[round] = (b[2 * round] + b[2 * round + 1]) / (a[2 * round] + a[2 * round + 1]);
        own[round] = a[2 * round + 1] / a[2 * round];
    }
    t.ours = bench_summary(a, 2 * BENCH_ROUNDS);
    t.reference = bench_summary(b, 2 * BENCH_ROUNDS);
    t.ratio = bench_summary(ratio, BENCH_ROUNDS);
    const bench_timing noise = bench_summary(own, BENCH_ROUNDS);
    t.aa_spread = noise.high - noise.low;
    return t;
}

/* Programs that print rows of their own define BENCH_TIMES_ONLY. */
#if !defined(BENCH_TIMES_ONLY)

/* The file named by -J, to append to; NULL without one. */
static FILE *bench_open_json(int argc, char **argv) {
    if (argc == 1) return NULL;
    FILE *json = argc == 3 && !strcmp(argv[1], "-J") ? fopen(argv[2], "a") : NULL;
    if (!json) {
        fprintf(stderr, "usage: %s [-J FILE]    append the rows to FILE as JSON lines\n", argv[0]);
        exit(2);
    }
    return json;
}

static void bench_header(const bench_machine *m, const char *title) {
    printf("# xdistill-bench  %s  git=%s\n", title, m->commit);
    printf("# cpu %s, %ld cores, last-level cache %ld MiB; read %.1f, copy %.1f, in place %.1f GB/s (one "
           "thread)\n",
           m->cpu, m->cores, m->cache_bytes >> 20, m->read * 1e-9, m->copy * 1e-9, m->in_place * 1e-9);
    printf("# %-22s %-26s %-5s %12s %12s %12s %7s %6s %6s %9s %12s %8s %6s %8s\n", "op", "variant", "type",
           "time(us)", "p90(us)", "model(us)", "GB/s", "score", "asked", "extra(KB)", "ref(us)", "speedup",
           "A/A", "error");
}

static void bench_write_json(FILE *json, const bench_machine *m, const bench_row *row, const bench_times *t,
                             const char *reference, double floor_seconds) {
    const time_t now = time(NULL);
    char utc[32];
    strftime(utc, sizeof utc, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
    fprintf(json,
            "{\"schema\":\"xdistill-bench/"
            "1\",\"op\":\"%s\",\"variant\":\"%s\",\"shape\":{%s},\"dtype_in\":\"%s\",",
            row->op, row->variant, row->shape, row->dtype);
    fprintf(json, "\"arm\":\"xdistill\",\"mode\":\"%s\",",
            row->bytes < (double)m->cache_bytes ? "hot" : "kernel");
    fprintf(json, "\"ms\":{\"median\":%.6g,\"p10\":%.6g,\"p90\":%.6g,\"samples\":%d,\"rounds\":%d},",
            t->ours.median * 1e3, t->ours.low * 1e3, t->ours.high * 1e3, 2 * BENCH_ROUNDS, BENCH_ROUNDS);
    fprintf(json, "\"ratio\":{\"vs\":\"%s\",\"median\":%.4g,\"p10\":%.4g,\"p90\":%.4g,\"aa_spread\":%.4g},",
            reference, t->ratio.median, t->ratio.low, t->ratio.high, t->aa_spread);
    if (row->bytes > 0.0)
        fprintf(json,
                "\"roof\":{\"min_bytes\":%.6g,\"bound\":\"bytes\",\"floor_ms\":%.6g,\"ceiling_name\":\"%s\","
                "\"ceiling_value\":%.4g,\"score\":%.4g},\"achieved\":{\"GBps_min\":%.4g},",
                row->bytes, floor_seconds * 1e3, row->ceiling_name, row->ceiling,
                floor_seconds / t->ours.median, row->bytes / t->ours.median * 1e-9);
    if (row->target > 0.0) fprintf(json, "\"target_ms\":%.6g,", floor_seconds / row->target * 1e3);
    fprintf(json, "\"mem\":{\"peak_extra_bytes\":%.0f},", row->extra_bytes);
    fprintf(json, "\"check\":{\"error\":%.3g,\"limit\":%.3g,\"pass\":true},", row->error, row->error_limit);
    fprintf(json,
            "\"device\":{\"cpu\":\"%s\",\"cores\":%ld,\"llc_bytes\":%ld,\"commit\":\"%s\",\"utc\":\"%s\"}}\n",
            m->cpu, m->cores, m->cache_bytes, m->commit, utc);
    fflush(json); /* a row that was measured is kept, whatever becomes of the next */
}

/* Times the row and prints it; appends the JSON line to `json` when it is not NULL. Returns false when the error is
 * above the limit: a wrong result is not timed. */
static bool bench_run(FILE *json, const bench_machine *m, const bench_row *row, const bench_arm *ours,
                      const bench_arm *reference) {
    if (!(row->error <= row->error_limit)) {
        printf("  %-22s %-26s wrong: error %.3g above %.3g\n", row->op, row->variant, row->error,
               row->error_limit);
        return false;
    }
    const bench_times t = bench_interleave(ours, reference);
    const double floor_seconds = row->bytes > 0.0 ? row->bytes / row->ceiling : 0.0;
    printf("  %-22s %-26s %-5s %12.2f %12.2f %12.2f %7.2f %6.2f %6.2f %9.1f %12.2f %8.2f %6.2f %8.1e\n",
           row->op, row->variant, row->dtype, t.ours.median * 1e6, t.ours.high * 1e6,
           row->target > 0.0 ? floor_seconds / row->target * 1e6 : 0.0, row->bytes / t.ours.median * 1e-9,
           floor_seconds / t.ours.median, row->target, row->extra_bytes / 1024.0, t.reference.median * 1e6,
           t.ratio.median, t.aa_spread, row->error);
    fflush(stdout);
    if (json) bench_write_json(json, m, row, &t, reference->name, floor_seconds);
    return true;
}

#endif /* BENCH_TIMES_ONLY */

#endif
