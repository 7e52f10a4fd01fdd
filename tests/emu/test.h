/* The test runner of this folder: named tests, checks that go on after a failure, counts at the end. */
#ifndef EMU_TEST_H
#define EMU_TEST_H

#include <functional>
#include <string>

struct Outcome {
    bool clean;       /* ended by itself, right result, no report, nothing alive */
    int status;       /* of the process: its exit status, or 1000 + signal */
    std::string text; /* what it wrote to stderr */
};

/* Runs body in a child process, so that it may crash; body's value becomes the exit status. */
Outcome run_apart(const std::function<int()> &body);

/* Counts, and prints the failure. */
void check(bool condition, const char *text, const char *file, int line, const std::string &detail);
#define CHECK(condition) check((condition), #condition, __FILE__, __LINE__, "")
#define CHECK_WITH(condition, detail) check((condition), #condition, __FILE__, __LINE__, (detail))

/* Runs a test if its name contains the program's argument, or if there is no argument. */
void test(const char *name, const std::function<void()> &body);
void skip(const char *name, const char *why);

const char *sign_of(const Outcome &outcome);

void nccl_tests();   /* test_nccl.cpp */
void nccl_table();   /* the misuse of NCCL and how it shows */
void stream_tests(); /* test_streams.cpp */
void ptx_tests();    /* test_ptx.cpp */

#endif
