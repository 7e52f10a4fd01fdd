/* test_images_png.c - examples/images: PNG files, read by an inflate of the tests, and grids of pictures. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test_numbers.h"

#include "images_scene.h"

#include "../examples/images/grid.c"
#include "../examples/images/letters.c"
#include "../examples/images/png.c"

/* Reads bits as RFC 1951 numbers them; past the end there are zeros, and `bad` is set. */
typedef struct bit_reader {
    const uint8_t *data;
    size_t bytes, at; /* at: bits */
    bool bad;
} bit_reader;

static unsigned take_bit(bit_reader *in) {
    if (in->at >= 8 * in->bytes) {
        in->bad = true;
        return 0;
    }
    const unsigned bit = in->data[in->at / 8] >> in->at % 8 & 1;
    in->at++;
    return bit;
}

static unsigned take_bits(bit_reader *in, unsigned count) {
    unsigned value = 0;
    for (unsigned i = 0; i < count; i++) value |= take_bit(in) << i;
    return value;
}

/* A symbol of the fixed codes, by the ranges of the table in the standard. */
static unsigned take_symbol(bit_reader *in) {
    unsigned code = 0;
    for (int i = 0; i < 7; i++) code = code << 1 | take_bit(in);
    if (code <= 0x17) return 256 + code;
    code = code << 1 | take_bit(in);
    if (code >= 0x30 && code <= 0xbf) return code - 0x30;
    if (code >= 0xc0 && code <= 0xc7) return 280 + code - 0xc0;
    return 144 + (code << 1 | take_bit(in)) - 0x190;
}

static const unsigned length_base[29] = { 3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                          31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258 };
static const unsigned length_extra[29] = { 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                           2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0 };

/* One block of fixed codes with runs of one byte; returns the bytes that it makes. */
static size_t inflate_fixed(bit_reader *in, uint8_t *out, size_t room) {
    size_t made = 0;
    CHECK_EQ_INT(take_bits(in, 3), 3);
    while (!in->bad) {
        const unsigned symbol = take_symbol(in);
        if (symbol == 256) return made;
        if (symbol < 256) {
            CHECK(made < room);
            if (made < room) out[made++] = (uint8_t)symbol;
            continue;
        }
        CHECK(symbol <= 285 && made > 0);
        if (symbol > 285 || made == 0) return 0;
        unsigned length = length_base[symbol - 257] + take_bits(in, length_extra[symbol - 257]);
        CHECK_EQ_INT(take_bits(in, 5), 0);
        for (CHECK(made + length <= room); length && made < room; length--, made++) out[made] = out[made - 1];
    }
    return made;
}

static uint32_t big_endian(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

/* CRC-32 by long division, bit by bit from the highest: not the way of png.c. */
static uint32_t slow_crc(const uint8_t *data, size_t bytes) {
    uint32_t rest = 0xffffffffu, reversed = 0;
    for (size_t i = 0; i < 8 * bytes; i++) {
        const uint32_t bit = data[i / 8] >> i % 8 & 1;
        rest = (rest >> 31 ^ bit) ? rest << 1 ^ 0x04c11db7u : rest << 1;
    }
    for (int i = 0; i < 32; i++) reversed |= (rest >> i & 1) << (31 - i);
    return ~reversed;
}

/* A chunk of this name, whose CRC is right; returns where the next begins. */
static size_t check_chunk(const uint8_t *png, size_t at, const char *name) {
    const size_t length = big_endian(png + at);
    CHECK(memcmp(png + at + 4, name, 4) == 0);
    CHECK_EQ_INT(big_endian(png + at + 8 + length), slow_crc(png + at + 4, length + 4));
    return at + 12 + length;
}

/* Encodes, decodes, and compares every pixel; returns the bytes of the file. */
static size_t check_png(xd_ctx *ctx, const uint8_t *pixels, int width, int height) {
    static const uint8_t header[5] = { 8, 0, 0, 0, 0 };
    const size_t filtered = (size_t)height * (size_t)(width + 1);
    uint8_t *png = NULL, *rows = (uint8_t *)calloc(filtered + 1, 1);
    size_t bytes = 0;
    unsigned low = 1, high = 0, wrong = 0;
    CHECK_EQ_INT(png_encode(ctx, pixels, width, height, &png, &bytes), XD_OK);
    CHECK(memcmp(png, "\x89PNG\r\n\x1a\n", 8) == 0);
    CHECK_EQ_INT(big_endian(png + 16), width);
    CHECK_EQ_INT(big_endian(png + 20), height);
    CHECK(memcmp(png + 24, header, 5) == 0);
    const size_t data = check_chunk(png, 8, "IHDR"), end = check_chunk(png, data, "IDAT");
    CHECK_EQ_INT(check_chunk(png, end, "IEND"), bytes);
    CHECK_EQ_INT(big_endian(png + data + 8) >> 16, 0x7801);
    bit_reader in = { png + data + 10, end - data - 18, 0, false };
    CHECK_EQ_INT(inflate_fixed(&in, rows, filtered), filtered);
    CHECK(!in.bad);
    CHECK_EQ_INT((in.at + 7) / 8, in.bytes);
    for (size_t i = 0; i < filtered; i++) {
        low = (low + rows[i]) % 65521;
        high = (high + low) % 65521;
    }
    CHECK_EQ_INT(big_endian(png + end - 8), high << 16 | low);
    for (int y = 0; y < height; y++) {
        uint8_t *row = rows + (size_t)y * (size_t)(width + 1);
        wrong += row[0] != 2;
        for (int x = 1; x <= width; x++) {
            row[x] = (uint8_t)(row[x] + (y ? row[x - width - 1] : 0));
            wrong += row[x] != pixels[y * width + x - 1];
        }
    }
    CHECK_EQ_INT(wrong, 0);
    free(rows);
    xd_release(ctx, png);
    return bytes;
}

XD_TEST(png_files_decode_to_their_pixels) {
    static const int sides[][2] = { { 1, 1 }, { 1, 300 }, { 300, 1 }, { 7, 5 }, { 257, 3 }, { 258, 259 } };
    static uint8_t pixels[258 * 300];
    xd_ctx *ctx = new_ctx();
    for (size_t s = 0; s < sizeof sides / sizeof *sides; s++)
        for (int kind = 0; kind < 4; kind++) {
            const int count = sides[s][0] * sides[s][1];
            xd_philox random = { 9, XD_STREAM_USER, (uint16_t)kind, (uint32_t)s, 0 };
            for (int i = 0; i < count; i++) {
                const uint32_t word = word_of(&random, i);
                pixels[i] = (uint8_t)word;                                   /* noise: every literal */
                if (kind == 1) pixels[i] = (uint8_t)(word % 9 ? 200 : word); /* short runs */
                if (kind == 2) pixels[i] = 255;                              /* the longest runs */
                if (kind == 3) pixels[i] = i && word % 60 ? pixels[i - 1] : (uint8_t)(word >> 8);
            }
            CHECK(check_png(ctx, pixels, sides[s][0], sides[s][1]) <= 65 + (size_t)(count + 300) * 9 / 8);
        }
    xd_ctx_destroy(ctx);
}

/* A row of one value after another one: a run of every length that a symbol can say, and beyond. */
XD_TEST(runs_of_every_length_decode) {
    uint8_t pixels[600];
    xd_ctx *ctx = new_ctx();
    for (int length = 1; length < 540; length++) {
        memset(pixels, 9, sizeof pixels);
        pixels[0] = 77;
        pixels[length + 1] = 130;
        check_png(ctx, pixels, length + 2, 1);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(png_files_without_pixels_are_refused_and_checksums_are_known_ones) {
    static const int sides[][2] = { { 0, 1 }, { 1, 0 }, { -3, 5 }, { 16385, 1 }, { 1, 16385 } };
    const uint8_t pixel = 0;
    uint8_t *data = NULL;
    size_t bytes = 0;
    xd_ctx *ctx = new_ctx();
    for (size_t s = 0; s < sizeof sides / sizeof *sides; s++)
        CHECK_EQ_INT(png_encode(ctx, &pixel, sides[s][0], sides[s][1], &data, &bytes), XD_ERROR_ARGUMENT);
    CHECK(says(ctx, "a picture of 1 x 16385 pixels; the sides are 1 to 16384"));
    CHECK(data == NULL && bytes == 0);
    CHECK_EQ_INT(png_crc((const uint8_t *)"123456789", 9), 0xcbf43926u);
    CHECK_EQ_INT(png_adler((const uint8_t *)"Wikipedia", 9), 0x11e60398u);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_grid_has_every_picture_in_its_place) {
    enum { ROWS = 2, COLUMNS = 3, WIDTH = 4 + 3 * 52, HEIGHT = 4 + 2 * 52 };
    static float images[ROWS][COLUMNS * IMAGE_PIXELS];
    static uint8_t pixels[WIDTH * HEIGHT];
    static const float values[6] = { -1.0f, 1.0f, 0.0f, -7.0f, 7.0f, -0.5f };
    static const int greys[6] = { 0, 255, 128, 0, 255, 64 };
    const float *const rows[ROWS] = { images[0], images[1] };
    const char *path = scratch("grid.png");
    xd_ctx *ctx = new_ctx();
    char *file = NULL;
    uint8_t *expected = NULL;
    size_t bytes = 0, expected_bytes = 0;
    memset(pixels, 255, sizeof pixels);
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < COLUMNS * IMAGE_PIXELS; i++) {
            const int at = (i + i / 7) % 6, in = i % 256;
            images[r][i] = values[at];
            for (int k = 0; k < 9; k++)
                pixels[(4 + 52 * r + 3 * (in / 16) + k / 3) * WIDTH + 4 + 52 * (i / 256) + 3 * (in % 16) +
                       k % 3] = (uint8_t)greys[at];
        }
    CHECK_EQ_INT(grid_save(ctx, path, rows, NULL, ROWS, COLUMNS), XD_OK);
    CHECK_EQ_INT(xd_file_load(ctx, path, 0, &file, &bytes), XD_OK);
    CHECK_EQ_INT(png_encode(ctx, pixels, WIDTH, HEIGHT, &expected, &expected_bytes), XD_OK);
    CHECK_EQ_INT(bytes, expected_bytes);
    CHECK(bytes == expected_bytes && memcmp(file, expected, bytes) == 0);
    CHECK(remove(path) == 0);
    CHECK_EQ_INT(grid_save(ctx, path, rows, NULL, 0, 1), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(grid_save(ctx, path, rows, NULL, 1, 257), XD_ERROR_ARGUMENT);
    CHECK(says(ctx, "1 rows of 257 pictures; both are 1 to 256"));
    CHECK_EQ_INT(grid_grey(NAN), 255);
    xd_release(ctx, file);
    xd_release(ctx, expected);
    xd_ctx_destroy(ctx);
}

/* "l" as dots, by eye. */
static const char *const letter_l[LETTERS_ROWS] = { ".##..", "..#..", "..#..", "..#..", "..#..",
                                                    "..#..", ".###.", ".....", "....." };

XD_TEST(labels_stand_before_their_rows_and_move_the_pictures_alone) {
    enum { ROWS = 2, PLAIN = 4 + 52, MARGIN = 2 * 2 * 6 + 4, WIDTH = MARGIN + PLAIN, HEIGHT = 4 + 2 * 52 };
    static float images[ROWS][IMAGE_PIXELS];
    static uint8_t pixels[WIDTH * HEIGHT];
    static const char *const labels[ROWS] = { "~l", "" };
    const float *const rows[ROWS] = { images[0], images[1] };
    const char *path = scratch("labels.png");
    xd_ctx *ctx = new_ctx();
    char *file = NULL;
    uint8_t *expected = NULL;
    size_t bytes = 0, expected_bytes = 0;
    memset(pixels, 255, sizeof pixels);
    for (int y = 0; y < HEIGHT; y++)
        for (int x = 0; x < WIDTH; x++) {
            const bool in = (y - 4 + 52) % 52 < 48 && y >= 4 && x >= MARGIN + 4 && x < MARGIN + 52;
            const int row = (y - 4 - 15) / 2,
                      column = (x - 4 - 12) / 2; /* what is not in the font is blank */
            const bool dot =
                y >= 19 && row < LETTERS_ROWS && x >= 16 && column < 5 && letter_l[row][column] == '#';
            if (in || dot) pixels[y * WIDTH + x] = in ? 128 : 0;
        }
    CHECK_EQ_INT(grid_margin(labels, ROWS), MARGIN);
    CHECK_EQ_INT(grid_margin(NULL, ROWS), 0);
    CHECK_EQ_INT(grid_save(ctx, path, rows, labels, ROWS, 1), XD_OK);
    CHECK_EQ_INT(xd_file_load(ctx, path, 0, &file, &bytes), XD_OK);
    CHECK_EQ_INT(png_encode(ctx, pixels, WIDTH, HEIGHT, &expected, &expected_bytes), XD_OK);
    CHECK(bytes == expected_bytes && memcmp(file, expected, bytes) == 0);
    CHECK(remove(path) == 0);
    xd_release(ctx, file);
    xd_release(ctx, expected);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
