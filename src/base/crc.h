#ifndef XDI_BASE_CRC_H
#define XDI_BASE_CRC_H

#include "base/config.h"

/* CRC-32C (Castagnoli, as in RFC 3720), the checksum of this library's files. Pass 0 to begin and the last
 * result to continue: crc(crc(0, a), b) is that of a followed by b. Pure; the same on every machine. */
XD_API uint32_t xd_crc32c(uint32_t crc, const void *data, size_t bytes);

#endif
