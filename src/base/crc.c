/* CRC-32C. */

#include "base/crc.h"

/* The polynomial 0x1EDC6F41 with its bits reversed. */
#define XDI_CRC_POLYNOMIAL 0x82f63b78u

enum { XDI_CRC_LONG = 4096 }; /* bytes that are worth building the tables for */

/* Eight steps of the division: the effect of the low byte of crc on the other bytes. */
static uint32_t xdi_crc_byte(uint32_t crc) {
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? XDI_CRC_POLYNOMIAL : 0);
    return crc;
}

/* Four bytes per step: table k has the effect of a byte at a distance of k bytes. The tables are on the stack, so
 * that threads share no initialisation. Returns the number of bytes processed. */
static size_t xdi_crc_words(uint32_t *crc, const unsigned char *p, size_t bytes) {
    uint32_t table[4][256], c = *crc;
    for (uint32_t i = 0; i < 256; i++) table[0][i] = xdi_crc_byte(i);
    for (int k = 1; k < 4; k++)
        for (int i = 0; i < 256; i++) table[k][i] = table[k - 1][i] >> 8 ^ table[0][table[k - 1][i] & 255];
    const size_t whole = bytes - bytes % 4;
    for (size_t i = 0; i < whole; i += 4) {
        c ^= (uint32_t)p[i] | (uint32_t)p[i + 1] << 8 | (uint32_t)p[i + 2] << 16 | (uint32_t)p[i + 3] << 24;
        c = table[3][c & 255] ^ table[2][c >> 8 & 255] ^ table[1][c >> 16 & 255] ^ table[0][c >> 24];
    }
    *crc = c;
    return whole;
}

XD_API uint32_t xd_crc32c(uint32_t crc, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    uint32_t c = ~crc;
    size_t at = bytes >= XDI_CRC_LONG ? xdi_crc_words(&c, p, bytes) : 0;
    for (; at < bytes; at++) c = c >> 8 ^ xdi_crc_byte((c ^ p[at]) & 255);
    return ~c;
}
