/* Tests of the emulation itself: every correct kernel is clean in every order, every injected bug is found by the builds that
 * promise to find it. The same source is built plain, with the checker, and with ASan. */
#include "test.h"
#include "test_kernels.h"
#include "sanitizer.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int passed, failed, skipped;
static bool test_failed;
static const char *filter;

Outcome run_apart(const std::function<int()> &body) {
    int ends[2];
    Outcome outcome = { false, -1, "" };
    fflush(nullptr);
    if (pipe(ends)) return outcome;
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        close(ends[0]);
        const int wrong = body();
        const int alive = emu_live_handles(nullptr, 0);
        if (alive && !emu_report_count()) fprintf(stderr, "test: %d handles are alive\n", alive);
        _exit(emu_report_count() ? 2 : wrong ? 1 : alive ? 3 : 0);
    }
    close(ends[1]);
    char piece[4096];
    for (ssize_t n; (n = read(ends[0], piece, sizeof piece)) > 0;) outcome.text.append(piece, (size_t)n);
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    outcome.clean = outcome.status == 0;
    return outcome;
}

void check(bool condition, const char *text, const char *file, int line, const std::string &detail) {
    if (condition) return;
    test_failed = true;
    printf("%s:%d: %s\n", file, line, text);
    if (!detail.empty()) printf("    %s\n", detail.c_str());
}

void test(const char *name, const std::function<void()> &body) {
    if (filter && !strstr(name, filter)) return;
    test_failed = false;
    body();
    if (test_failed) printf("FAILED %s\n", name);
    test_failed ? failed++ : passed++;
}

void skip(const char *name, const char *why) {
    if (filter && !strstr(name, filter)) return;
    printf("skipped %s: %s\n", name, why);
    skipped++;
}

/* ---- the injected bugs ---- */

struct Mode {
    const char *name;
    unsigned seen;
    emu_order order;
    emu_streams streams;
};

#if defined(EMU_CHECK)
static const Mode modes[] = { { "checker", SEEN_CHECKER, EMU_ASCENDING, EMU_EAGER } };
#elif defined(EMU_ASAN)
static const Mode modes[] = { { "ASan", SEEN_ASAN, EMU_ASCENDING, EMU_EAGER } };
#else
static const Mode modes[] = { { "ascending", SEEN_ASCENDING, EMU_ASCENDING, EMU_EAGER },
                              { "descending", SEEN_DESCENDING, EMU_DESCENDING, EMU_EAGER },
                              { "random", 0, EMU_RANDOM, EMU_EAGER },
                              { "comparison", SEEN_COMPARE, EMU_COMPARE, EMU_EAGER },
                              { "lazy", SEEN_LAZY, EMU_ASCENDING, EMU_LAZY },
                              { "lazy, reversed", 0, EMU_DESCENDING, EMU_LAZY_REVERSE } };
#endif

static Outcome run_case(const Case &c, int bug, const Mode &mode) {
    return run_apart([&] {
        emu_set_order(mode.order, 7);
        emu_set_streams(mode.streams);
        return c.run(bug);
    });
}

/* What a report must contain in this mode; NULL when any sign of the bug will do. */
static const char *expected_phrase(const Case &c, const Mode &mode) {
    if (mode.seen == SEEN_CHECKER) return c.checker;
    if (mode.seen == SEEN_COMPARE) return c.plain;
    return nullptr;
}

static void test_case(const Case &c) {
    for (const Mode &mode : modes) {
        const Outcome right = run_case(c, 0, mode);
        CHECK_WITH(right.clean, std::string(mode.name) + ", without the bug: " + right.text);
        if (!(c.seen & mode.seen)) continue;
        const Outcome wrong = run_case(c, 1, mode);
        const char *phrase = expected_phrase(c, mode);
        CHECK_WITH(!wrong.clean, std::string(mode.name) + ": the bug was not seen");
        if (phrase)
            CHECK_WITH(wrong.text.find(phrase) != std::string::npos,
                       std::string(mode.name) + ": " + wrong.text);
    }
}

/* How a bug showed: "report", "result" (only the result was wrong), "fault" (a signal), "-" (not at all). */
const char *sign_of(const Outcome &outcome) {
    const bool sanitized = outcome.text.find("runtime error") != std::string::npos ||
                           outcome.text.find("AddressSanitizer") != std::string::npos;
    if (outcome.status == 0) return "-";
    if (outcome.status >= 1000) return "fault";
    return outcome.status == 1 && !sanitized ? "result" : "report";
}

/* test_emu --table: one row per bug with its sign in each mode of this build; README.md has these rows. */
static int print_table() {
    printf("%-42s", "");
    for (const Mode &mode : modes) printf(" %-14s", mode.name);
    printf("\n");
    for (int i = 0; i < kernel_case_count; i++) {
        printf("%-42s", kernel_cases[i].name);
        for (const Mode &mode : modes) printf(" %-14s", sign_of(run_case(kernel_cases[i], 1, mode)));
        printf("\n");
    }
    nccl_table();
    return 0;
}

int main(int count, char **arguments) {
    if (count > 1 && !strcmp(arguments[1], "--table")) return print_table();
    filter = count > 1 ? arguments[1] : nullptr;
    for (int i = 0; i < kernel_case_count; i++)
        test(kernel_cases[i].name, [i] { test_case(kernel_cases[i]); });
    stream_tests();
    nccl_tests();
    ptx_tests();
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}
