/* compose.c - draws configurations of a training run, trains each, and compares it with one rank alone, bit for bit.
 *
 *     build/compose --seed 1 --count 200    draws so many, with an eye to pairs that came seldom; a failure is shrunk, and its
 *                                           command line printed
 *     build/compose ranks=4 wrap=3 leaves=6 ...    one configuration; what is not named has its least value
 *     --table                               how often each pair of features was drawn together
 *     --draw                                draws, counts pairs, and trains nothing
 *     --quick                               ends at the first failure, as it was drawn
 */
#include "draw.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- one configuration ---- */

static char directory[64];

/* NULL, or what is wrong. */
static const char *judge(const int *f) {
    static compose_result one, many;
    compose_config c = config_of(f), alone = c;
    memset(&alone.layout, 0, sizeof alone.layout);
    alone.layout.ranks = alone.layout.groups = alone.layout.pp = alone.layout.stages = alone.layout.ep = 1;
    alone.layout.tp = alone.layout.cp = 1;
    alone.layout.late = 1;
    if (c.sent) alone.layout.wrap = WRAP_FSDP; /* which rounds on one rank too */
    alone.stop = 0;
    if (!compose_run(&alone, directory, &one)) return one.message;
    if (!compose_run(&c, directory, &many)) return many.message;
    return compose_compare(&c, &one, &many);
}

/* Each feature as small as the failure allows. */
static void shrink(int *f) {
    for (int again = 1; again;) {
        again = 0;
        for (int i = 0; i < FEATURES; i++)
            for (int value = features[i].least; value < f[i]; value++) {
                int smaller[FEATURES];
                memcpy(smaller, f, sizeof smaller);
                smaller[i] = value;
                settle(smaller);
                if (smaller[i] != value || !judge(smaller)) continue;
                memcpy(f, smaller, sizeof smaller);
                again = 1;
                break;
            }
    }
}

/* ---- the program ---- */

typedef struct options {
    bool table, quick, draw;
} options;

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* What so many configurations must have of each pair: 1 in 200, DRAW_GOAL in 10,000. */
static long goal_of(long count) {
    return count < 200 ? 0 : count < 10000 ? 1 : DRAW_GOAL;
}

static int run_many(uint64_t seed, long count, const options *o) {
    double *seconds = (double *)calloc((size_t)count + 1, sizeof *seconds);
    long failed = 0;
    for (long n = 0; n < count && failed < (o->quick ? 1 : 3); n++) {
        int f[FEATURES];
        draw(seed + (uint64_t)n, f);
        count_pairs(f);
        const double begin = seconds_now();
        const char *problem = o->draw ? NULL : judge(f);
        seconds[n] = seconds_now() - begin;
        if (!problem) continue;
        failed++;
        printf("seed %llu: %s\n", (unsigned long long)seed + (unsigned long long)n, problem);
        if (!o->quick) {
            shrink(f);
            printf("the smallest that still fails (%s):\n", judge(f));
        }
        print_config(f);
    }
    qsort(seconds, (size_t)count, sizeof *seconds, by_value);
    const bool ended = failed == (o->quick ? 1 : 3),
               together = print_pairs(o->table, ended ? 0 : goal_of(count));
    if (!together) printf("FAILED: pairs of features\n");
    if (count > 0) printf("median %.3f s, longest %.3f s\n", seconds[count / 2], seconds[count - 1]);
    printf("%ld passed, %ld failed\n", count - failed, failed);
    free(seconds);
    return failed > 0 || !together;
}

static bool set_feature(const char *word, int *f) {
    for (int i = 0; i < FEATURES; i++) {
        const size_t length = strlen(features[i].name);
        if (strncmp(word, features[i].name, length) || word[length] != '=') continue;
        f[i] = atoi(word + length + 1);
        if (f[i] >= features[i].least && f[i] <= features[i].most) return true;
        fprintf(stderr, "%s: %s goes from %d to %d\n", word, features[i].name, features[i].least,
                features[i].most);
        return false;
    }
    fprintf(stderr, "unknown: %s\n", word);
    return false;
}

static int run_one(int *f) {
    settle(f);
    const char *problem = judge(f);
    print_config(f);
    printf("%s\n%d passed, %d failed\n", problem ? problem : "the bits of one rank", !problem,
           problem != NULL);
    return problem != NULL;
}

int main(int argc, char **argv) {
    uint64_t seed = 1;
    long count = 0;
    options o = { false, false, false };
    int f[FEATURES], status = 2;
    char command[128];
    for (int i = 0; i < FEATURES; i++) f[i] = features[i].least;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0)
            o.quick = true;
        else if (strcmp(argv[i], "--table") == 0)
            o.table = true;
        else if (strcmp(argv[i], "--draw") == 0)
            o.draw = true;
        else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc)
            seed = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--count") == 0 && i + 1 < argc)
            count = atol(argv[++i]);
        else if (!set_feature(argv[i], f))
            return 2;
    }
    snprintf(directory, sizeof directory, "/tmp/xdistill-compose-%ld", (long)getpid());
    status = count > 0 ? run_many(seed, count, &o) : run_one(f);
    snprintf(command, sizeof command, "rm -rf '%s'", directory);
    return system(command) ? 2 : status;
}
