/* png.c - the PNG format: chunks with a CRC, the rows in them compressed as zlib does, with the fixed codes of deflate. */
#include "png.h"

#include <string.h>

enum { PNG_MOST_SIDE = 16384, PNG_LONGEST_RUN = 258, PNG_ADLER = 65521, PNG_CHUNK = 12, PNG_ZLIB = 16 };

/* ---- checksums ---- */

/* CRC-32 with the polynomial of Ethernet; the library's own is another one. */
static uint32_t png_crc(const uint8_t *data, size_t bytes) {
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
}

static uint32_t png_adler(const uint8_t *data, size_t bytes) {
    uint32_t low = 1, high = 0;
    for (size_t i = 0; i < bytes; i++) {
        low = (low + data[i]) % PNG_ADLER;
        high = (high + low) % PNG_ADLER;
    }
    return high << 16 | low;
}

static uint8_t *png_number(uint8_t *at, uint32_t value) {
    for (int i = 0; i < 4; i++) at[i] = (uint8_t)(value >> (24 - 8 * i));
    return at + 4;
}

/* ---- deflate ---- */

/* Bits on their way to memory, the lowest first. */
typedef struct png_bits {
    uint8_t *at;
    uint32_t held;
    int count; /* fewer than 8 between calls */
} png_bits;

static void png_put(png_bits *out, uint32_t value, int count) {
    out->held |= value << out->count;
    for (out->count += count; out->count >= 8; out->count -= 8) {
        *out->at++ = (uint8_t)out->held;
        out->held >>= 8;
    }
}

/* The fixed code of a byte (0 to 255), the end (256) or a length (257 and more). Codes go out from their highest bit on. */
static void png_put_symbol(png_bits *out, uint32_t symbol) {
    uint32_t code = 0xc0 + symbol - 280, reversed = 0;
    int count = 8;
    if (symbol < 144) {
        code = 0x30 + symbol;
    } else if (symbol < 256) {
        code = 0x190 + symbol - 144;
        count = 9;
    } else if (symbol < 280) {
        code = symbol - 256;
        count = 7;
    }
    for (int i = 0; i < count; i++) reversed |= (code >> i & 1) << (count - 1 - i);
    png_put(out, reversed, count);
}

/* The byte before, `length` times more: 3 to 258. Four lengths share a symbol's extra bits, then four times two, and so on. */
static void png_put_run(png_bits *out, uint32_t length) {
    const uint32_t rest = length - 3;
    int extra = 0;
    while (rest >> extra >= 8) extra++;
    if (length == PNG_LONGEST_RUN) {
        png_put_symbol(out, 285);
    } else {
        png_put_symbol(out, 257 + 4 * (uint32_t)extra + (rest >> extra));
        png_put(out, rest & ((1u << extra) - 1), extra);
    }
    png_put(out, 0, 5); /* a distance of one byte */
}

/* One block with the fixed codes; returns where it ends. At most 9 bits a byte and two bytes more. */
static uint8_t *png_deflate(const uint8_t *data, size_t bytes, uint8_t *to) {
    png_bits out = { to, 0, 0 };
    png_put(&out, 3, 3); /* the last block, fixed codes */
    for (size_t i = 0; i < bytes;) {
        size_t run = 0;
        while (i > 0 && run < PNG_LONGEST_RUN && i + run < bytes && data[i + run] == data[i - 1]) run++;
        if (run < 3) {
            png_put_symbol(&out, data[i++]);
        } else {
            png_put_run(&out, (uint32_t)run);
            i += run;
        }
    }
    png_put_symbol(&out, 256);
    png_put(&out, 0, 7); /* fills the last byte */
    return out.at;
}

/* ---- the file ---- */

/* Around the `bytes` that lie at at + 8 already: length, name and CRC. Returns where the next chunk begins. */
static uint8_t *png_chunk(uint8_t *at, const char *name, size_t bytes) {
    png_number(at, (uint32_t)bytes);
    memcpy(at + 4, name, 4);
    return png_number(at + 8 + bytes, png_crc(at + 4, bytes + 4));
}

/* Every row begins with 2, its filter: what follows are differences to the row above, which is zero above the first. */
static void png_filter(const uint8_t *pixels, int width, int height, uint8_t *rows) {
    for (int y = 0; y < height; y++) {
        *rows++ = 2;
        for (int x = 0; x < width; x++, pixels++) *rows++ = (uint8_t)(*pixels - (y ? pixels[-width] : 0));
    }
}

xd_result png_encode(xd_ctx *ctx, const uint8_t *pixels, int width, int height, uint8_t **data,
                     size_t *bytes) {
    static const uint8_t signature[8] = { 0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n' };
    XD_REQUIRE(ctx, width >= 1 && height >= 1 && width <= PNG_MOST_SIDE && height <= PNG_MOST_SIDE,
               XD_ERROR_ARGUMENT, "a picture of %d x %d pixels; the sides are 1 to %d", width, height,
               PNG_MOST_SIDE);
    const size_t filtered = (size_t)height * ((size_t)width + 1);
    uint8_t *rows = (uint8_t *)xd_allocate(ctx, filtered);
    uint8_t *file = (uint8_t *)xd_allocate(ctx, sizeof signature + 3 * PNG_CHUNK + 13 + PNG_ZLIB + filtered +
                                                    filtered / 8);
    if (!rows || !file) {
        xd_release(ctx, rows);
        xd_release(ctx, file);
        return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a picture of %d x %d pixels", width, height);
    }
    memcpy(file, signature, sizeof signature);
    uint8_t *chunk = file + sizeof signature;
    png_number(chunk + 8, (uint32_t)width);
    png_number(chunk + 12, (uint32_t)height);
    chunk[16] = 8; /* bits; grey, deflate, filters for each row and no interlacing are zeros */
    chunk = png_chunk(chunk, "IHDR", 13);
    png_filter(pixels, width, height, rows);
    chunk[8] = 0x78; /* zlib: deflate with a window of 32 KB; */
    chunk[9] = 0x01; /* makes the two bytes a multiple of 31 */
    uint8_t *end = png_deflate(rows, filtered, chunk + 10);
    end = png_number(end, png_adler(rows, filtered));
    chunk = png_chunk(chunk, "IDAT", (size_t)(end - chunk) - 8);
    chunk = png_chunk(chunk, "IEND", 0);
    xd_release(ctx, rows);
    *data = file;
    *bytes = (size_t)(chunk - file);
    return XD_OK;
}

xd_result png_save(xd_ctx *ctx, const char *path, const uint8_t *pixels, int width, int height) {
    uint8_t *data = NULL;
    size_t bytes = 0;
    XD_TRY(png_encode(ctx, pixels, width, height, &data, &bytes));
    const xd_result result = xd_file_save(ctx, path, data, bytes);
    xd_release(ctx, data);
    return result;
}
