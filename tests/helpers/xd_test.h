/* xd_test.h - the test runner: one suite per program, one sentence per test.
 *
 *     XD_TEST(mesh_names_both_numbers_when_the_sizes_do_not_fit) {
 *         CHECK(xd_mesh_create(ctx, &desc, &mesh) == XD_ERROR_ARGUMENT);
 *         CHECK_EQ_STR(xd_last_error(ctx)->message, "axis sizes multiply to 6 but the world has 8 ranks");
 *     }
 *     XD_TEST_MAIN()
 *
 * Ranks are threads here, and a thread that left in the middle of a collective would leave its peers waiting. So a failed check
 * is printed and counted, and the code goes on. Checks may run on any thread.
 *
 * The program runs all tests, or those whose name contains its first argument; it ends with the line
 * `N passed, N failed, N skipped` and exits with 1 when a test failed.
 * */
#ifndef XD_TEST_H
#define XD_TEST_H

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Failed checks printed per test: a loop over a tensor can fail a million times. */
enum { XD_TEST_SHOWN = 10 };

/* 1 under a sanitizer of memory or threads: there a loop of pure arithmetic takes ten times as long, and memory is not the program's
 * own. */
#if defined(__has_feature)
#    if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
enum { XD_TEST_SANITIZED = 1 };
#    else
enum { XD_TEST_SANITIZED = 0 };
#    endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { XD_TEST_SANITIZED = 1 };
#else
enum { XD_TEST_SANITIZED = 0 };
#endif

typedef struct xd_test_case {
    const char *name;
    void (*run)(void);
    struct xd_test_case *next;
} xd_test_case;

static xd_test_case *xd_test_first, **xd_test_end = &xd_test_first;
static long xd_test_failures;   /* failed checks of the running test; written by many threads */
static const char *xd_test_why; /* reason given by SKIP in the running test, or NULL */

/* Define a test. The constructor puts it at the end of the list, so tests run in the order of the file. */
#define XD_TEST(test)                                                           \
    static void xd_test_run_##test(void);                                       \
    static xd_test_case xd_test_case_##test = { #test, xd_test_run_##test, 0 }; \
    __attribute__((constructor)) static void xd_test_add_##test(void) {         \
        *xd_test_end = &xd_test_case_##test;                                    \
        xd_test_end = &xd_test_case_##test.next;                                \
    }                                                                           \
    static void xd_test_run_##test(void)

/* Count one failed check; true while it should still be printed. */
static inline int xd_test_fail(void) {
    return __atomic_fetch_add(&xd_test_failures, 1, __ATOMIC_RELAXED) < XD_TEST_SHOWN;
}

static inline void xd_test_check(int ok, const char *file, int line, const char *text) {
    if (!ok && xd_test_fail()) printf("%s:%d: CHECK(%s)\n", file, line, text);
}

static inline void xd_test_equal_int(long long a, long long b, const char *file, int line, const char *text) {
    if (a != b && xd_test_fail()) printf("%s:%d: %s: %lld and %lld\n", file, line, text, a, b);
}

static inline void xd_test_equal_str(const char *a, const char *b, const char *file, int line,
                                     const char *text) {
    const int same = a && b ? strcmp(a, b) == 0 : a == b;
    if (same || !xd_test_fail()) return;
    printf("%s:%d: %s: \"%s\" and \"%s\"\n", file, line, text, a ? a : "(null)", b ? b : "(null)");
}

/* Equal infinities are near each other; a NaN is near nothing. */
static inline void xd_test_near(double a, double b, double tolerance, const char *file, int line,
                                const char *text) {
    const double distance = fabs(a - b);
    if (a == b || distance <= tolerance || !xd_test_fail()) return;
    printf("%s:%d: %s: %.17g and %.17g differ by %.3g, allowed %.3g\n", file, line, text, a, b, distance,
           tolerance);
}

#define CHECK(condition) xd_test_check((condition) ? 1 : 0, __FILE__, __LINE__, #condition)
#define CHECK_EQ_INT(a, b) xd_test_equal_int((long long)(a), (long long)(b), __FILE__, __LINE__, #a " == " #b)
#define CHECK_EQ_STR(a, b) xd_test_equal_str((a), (b), __FILE__, __LINE__, #a " == " #b)
#define CHECK_NEAR(a, b, tolerance) \
    xd_test_near((double)(a), (double)(b), (double)(tolerance), __FILE__, __LINE__, #a " ~ " #b)

/* Leave the test and count it as skipped. Only in the body of XD_TEST itself, where no rank is waiting. */
#define SKIP(reason)            \
    do {                        \
        xd_test_why = (reason); \
        return;                 \
    } while (0)

/* Run one test: 0 passed, 1 failed, 2 skipped. */
static inline int xd_test_run_one(const xd_test_case *test) {
    xd_test_failures = 0;
    xd_test_why = NULL;
    test->run();
    const long failures = __atomic_load_n(&xd_test_failures, __ATOMIC_RELAXED);
    if (failures > 0) {
        printf("FAILED  %s (%ld failed check%s)\n", test->name, failures, failures == 1 ? "" : "s");
        return 1;
    }
    if (xd_test_why) printf("skipped %s: %s\n", test->name, xd_test_why);
    return xd_test_why ? 2 : 0;
}

static inline int xd_test_main(int argc, char **argv) {
    int count[3] = { 0, 0, 0 };
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ); /* a crash must not swallow the lines before it */
    for (const xd_test_case *test = xd_test_first; test; test = test->next)
        if (argc < 2 || strstr(test->name, argv[1])) count[xd_test_run_one(test)]++;
    printf("%d passed, %d failed, %d skipped\n", count[0], count[1], count[2]);
    return count[1] > 0;
}

#define XD_TEST_MAIN()                   \
    int main(int argc, char **argv) {    \
        return xd_test_main(argc, argv); \
    }

#endif
