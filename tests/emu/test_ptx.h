/* What the tests of the PTX interpreter share: a text is run, every thread gives a value. */
#ifndef EMU_TEST_PTX_H
#define EMU_TEST_PTX_H

#include <stdint.h>
#include <string>
#include <vector>

typedef std::vector<uint64_t> Values;

struct Shape {
    unsigned blocks, threads, cluster;
    size_t dynamic_bytes;
};

/* A kernel `row` with these statements. The result letter says which register holds the result: %h0, %r0, %x0, %f0, %d0 or
 * %p0. Inputs are in the registers with numbers 1 to 3, as bits; %t0 is the thread's number in the grid, %a0 and %a1 point to
 * the inputs and the outputs. */
std::string text_of(const char *before, const char *body, char result);
/* The output of every thread; empty after a failure. */
Values run_text(const std::string &text, const Values &inputs, const Shape &shape);
/* What the emulation has reported since the last call. */
std::string reports();
std::string hexadecimal(uint64_t value);

void ptx_values(); /* test_ptx_values.cpp */
void ptx_flight(); /* test_ptx_flight.cpp */

#endif
