/* Inputs made of seeds without libFuzzer: bits, bytes and numbers are changed, pieces cut out, doubled and taken from another seed,
 * as often as time allows. The input that ends the program is in the file PROGRAM.crash.
 *     FUZZ_SECONDS=10 FUZZ_SEED=7 ./fuzz_json fuzz/seeds/json/...
 * FUZZ_SEED makes the same inputs again; without it each run makes others, and prints what to give. */
#ifndef FUZZ_MUTATE_H
#define FUZZ_MUTATE_H

#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { FUZZ_SEEDS = 256, FUZZ_BYTES = 1 << 16, FUZZ_HANG = 20 /* seconds for an input */ };

typedef struct fuzz_mutator {
    uint8_t *seeds[FUZZ_SEEDS];
    size_t sizes[FUZZ_SEEDS];
    int count;
    uint64_t state; /* of xorshift */
    uint8_t input[FUZZ_BYTES + 64];
    size_t bytes;
} fuzz_mutator;

/* What ends the program reads these. */
static const uint8_t *fuzz_current;
static size_t fuzz_current_bytes;
static char fuzz_crash_path[512];

/* The sanitizers' own way to say that the program ends; not there without them. */
void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static void fuzz_keep(void) {
    const int file = open(fuzz_crash_path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (file < 0 || !fuzz_current) return;
    for (size_t at = 0; at < fuzz_current_bytes;) {
        const ssize_t wrote = write(file, fuzz_current + at, fuzz_current_bytes - at);
        if (wrote <= 0) break;
        at += (size_t)wrote;
    }
    close(file);
    static const char says[] = "the input is in ";
    if (write(2, says, sizeof says - 1) > 0 && write(2, fuzz_crash_path, strlen(fuzz_crash_path)) > 0)
        (void)!write(2, "\n", 1);
}

static void fuzz_died(int number) {
    signal(number, SIG_DFL);
    fuzz_keep();
    raise(number);
}

static inline void fuzz_mutate_open(fuzz_mutator *m, const char *program) {
    const char *seed = getenv("FUZZ_SEED");
    const bool sanitized = __sanitizer_set_death_callback != NULL;
    m->state = (seed ? strtoull(seed, NULL, 10) : (uint64_t)time(NULL)) * UINT64_C(0x9e3779b97f4a7c15) | 1;
    if (!seed) printf("FUZZ_SEED=%llu\n", (unsigned long long)time(NULL));
    fflush(stdout);
    snprintf(fuzz_crash_path, sizeof fuzz_crash_path, "%s.crash", program);
    if (sanitized) __sanitizer_set_death_callback(fuzz_keep);
    signal(SIGABRT, fuzz_died);
    signal(SIGALRM, fuzz_died);
    for (int i = 0; i < 4 && !sanitized; i++) { /* sanitizers tell of these themselves */
        static const int numbers[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL };
        signal(numbers[i], fuzz_died);
    }
}

/* False when there is no room; the file is then left out. */
static inline bool fuzz_mutate_add(fuzz_mutator *m, const void *data, size_t bytes) {
    uint8_t *copy = m->count < FUZZ_SEEDS ? (uint8_t *)malloc(bytes + 1) : NULL;
    if (!copy) return false;
    if (bytes) memcpy(copy, data, bytes);
    m->seeds[m->count] = copy;
    m->sizes[m->count++] = bytes;
    return true;
}

static inline void fuzz_mutate_close(fuzz_mutator *m) {
    for (int i = 0; i < m->count; i++) free(m->seeds[i]);
    free(m);
}

/* A copy of its own, so that a read behind the last byte is found. */
static inline void fuzz_mutate_run(fuzz_mutator *m, const void *data, size_t bytes,
                                   int (*one)(const uint8_t *, size_t)) {
    uint8_t *copy = (uint8_t *)malloc(bytes ? bytes : 1);
    (void)m;
    if (!copy) return;
    if (bytes) memcpy(copy, data, bytes);
    fuzz_current = copy;
    fuzz_current_bytes = bytes;
    alarm(FUZZ_HANG);
    one(copy, bytes);
    alarm(0);
    fuzz_current = NULL;
    free(copy);
}

/* ---- changes ---- */

static inline uint64_t fuzz_random(fuzz_mutator *m, uint64_t below) {
    m->state ^= m->state << 13;
    m->state ^= m->state >> 7;
    m->state ^= m->state << 17;
    return below ? (m->state >> 11) % below : 0;
}

/* Numbers at which programs err. */
static inline uint64_t fuzz_number(fuzz_mutator *m) {
    static const uint64_t ends[] = { 0,      1,         0x7f,       0x80,      0xff,      0x7fff,
                                     0xffff, INT32_MAX, UINT32_MAX, INT64_MAX, UINT64_MAX };
    const uint64_t end = ends[fuzz_random(m, sizeof ends / sizeof *ends)];
    const uint64_t near = fuzz_random(m, 3);
    return fuzz_random(m, 4) == 0 ? fuzz_random(m, 1 << 20) : end + near - 1;
}

/* The bytes [at, at + out) become the `in` bytes of `with`. */
static inline void fuzz_replace(fuzz_mutator *m, size_t at, size_t out, const void *with, size_t in) {
    if (m->bytes - out + in > (size_t)FUZZ_BYTES) return;
    memmove(m->input + at + in, m->input + at + out, m->bytes - at - out);
    if (in) memcpy(m->input + at, with, in);
    m->bytes += in - out;
}

static inline bool fuzz_is_digit(uint8_t c) {
    return c >= '0' && c <= '9';
}

/* A number in text, the first from a random place on. */
static inline void fuzz_change_text_number(fuzz_mutator *m) {
    size_t begin = fuzz_random(m, m->bytes), end;
    char text[32];
    while (begin < m->bytes && !fuzz_is_digit(m->input[begin])) begin++;
    for (end = begin; end < m->bytes && fuzz_is_digit(m->input[end]);) end++;
    if (begin == end) return;
    const int length = snprintf(text, sizeof text, "%s%llu", fuzz_random(m, 4) ? "" : "-",
                                (unsigned long long)fuzz_number(m));
    fuzz_replace(m, begin, end - begin, text, (size_t)length);
}

/* A number in 1, 2, 4 or 8 bytes, often where such numbers begin. */
static inline void fuzz_change_number(fuzz_mutator *m) {
    const size_t width = (size_t)1 << fuzz_random(m, 4);
    const uint64_t number = fuzz_number(m);
    uint8_t bytes[8];
    if (m->bytes < width) return;
    size_t at = fuzz_random(m, m->bytes - width + 1);
    if (fuzz_random(m, 2)) at -= at % width;
    for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)(number >> 8 * i);
    memcpy(m->input + at, bytes, width);
}

/* A piece of a seed, in place of one of this. */
static inline void fuzz_splice(fuzz_mutator *m) {
    static uint8_t piece[FUZZ_BYTES];
    const int other = (int)fuzz_random(m, (uint64_t)m->count);
    const size_t size = m->sizes[other], begin = fuzz_random(m, size + 1);
    size_t length = fuzz_random(m, fuzz_random(m, 2) ? size - begin + 1 : 64);
    if (length > size - begin) length = size - begin;
    if (length > sizeof piece) length = sizeof piece;
    if (length) memcpy(piece, m->seeds[other] + begin, length);
    const size_t at = fuzz_random(m, m->bytes + 1),
                 out = fuzz_random(m, 2) ? fuzz_random(m, m->bytes - at + 1) : 0;
    fuzz_replace(m, at, out, piece, length);
}

static inline void fuzz_change(fuzz_mutator *m) {
    static uint8_t piece[FUZZ_BYTES];
    const size_t at = fuzz_random(m, m->bytes ? m->bytes : 1), rest = m->bytes - (m->bytes ? at : 0);
    const uint64_t kind = fuzz_random(m, 9);
    size_t length = fuzz_random(m, fuzz_random(m, 3) ? 16 : rest + 1);
    if (length > rest) length = rest;
    if (kind == 7) {
        fuzz_splice(m);
        return;
    }
    if (m->bytes == 0) return;
    switch (kind) {
    case 0: m->input[at] ^= (uint8_t)(1u << fuzz_random(m, 8)); break;
    case 1: m->input[at] = (uint8_t)fuzz_random(m, 256); break;
    case 2: fuzz_change_number(m); break;
    case 3:
    case 4: fuzz_change_text_number(m); break;
    case 5: fuzz_replace(m, at, length, NULL, 0); break; /* cut out */
    case 6:                                              /* doubled */
        memcpy(piece, m->input + at, length);
        fuzz_replace(m, at, 0, piece, length);
        break;
    default:
        if (fuzz_random(m, 4) == 0) m->bytes = at; /* cut off */
        break;
    }
}

/* Returns how many inputs there were. */
static inline uint64_t fuzz_mutate_loop(fuzz_mutator *m, int (*one)(const uint8_t *, size_t)) {
    const char *asked = getenv("FUZZ_SECONDS");
    const time_t end = time(NULL) + (asked ? (time_t)atoi(asked) : 0);
    uint64_t made = 0;
    while (m->count > 0 && time(NULL) < end) {
        const int seed = (int)fuzz_random(m, (uint64_t)m->count);
        m->bytes = m->sizes[seed] < (size_t)FUZZ_BYTES ? m->sizes[seed] : (size_t)FUZZ_BYTES;
        memcpy(m->input, m->seeds[seed], m->bytes);
        for (uint64_t n = 1 + fuzz_random(m, fuzz_random(m, 2) ? 3 : 12); n > 0; n--) fuzz_change(m);
        fuzz_mutate_run(m, m->input, m->bytes, one);
        made++;
    }
    return made;
}

#endif
