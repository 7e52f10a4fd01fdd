#ifndef XDI_BASE_CRC_H
#define XDI_BASE_CRC_H

#include "base/cpu.h"

/* CRC-32C (Castagnoli, as in RFC 3720), the checksum of this library's files. Pass 0 to begin and the last
 * result to continue: crc(crc(0, a), b) is that of a followed by b. Uses the processor's instruction for it, where there
 * is one. Pure; the same on every machine. */
XD_API uint32_t xd_crc32c(uint32_t crc, const void *data, size_t bytes);

/* xd_crc32c by the code of one CPU level, for tests and benchmarks: bits are equal on all. PLAIN is the polynomial division,
 * PORTABLE eight bytes a step by tables or, where the compiler's target has it, the instruction of ARM; from AVX2 on it is the
 * instruction of x86. BEST is xd_crc32c; a level that the machine lacks is computed as PORTABLE. Pure. */
XD_API uint32_t xd_crc32c_level(xd_cpu_level level, uint32_t crc, const void *data, size_t bytes);

#endif
