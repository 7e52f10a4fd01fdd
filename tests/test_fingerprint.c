/* Fingerprints of tensors: every level has the bits of the plain loop, and those of parts add up; with the checksum of the same bytes
 * in one pass; and a save on a system that has no thread to form them beside writing. 0.2 s at -O2. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp */
#endif

#include <errno.h>
#include <pthread.h>

#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "checkpoint/internal.h"
#endif
#include "checkpoint_files.h"

enum { MOST = 83, ROOM = MOST * 8 + 8, TURN = 3 * (8 << 10), LONG = 5 * TURN / 2 };

/* The linker has the library call this (--wrap). */
static int threads_refused = -1; /* -1: none is */
int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __wrap_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *argument) {
    if (threads_refused < 0) return __real_pthread_create(thread, attributes, run, argument);
    threads_refused++;
    return EAGAIN;
}

static const xd_cpu_level levels[] = { XD_CPU_BEST, XD_CPU_PORTABLE, XD_CPU_AVX2, XD_CPU_AVX512,
                                       XD_CPU_AVX512_BF16 };

/* Also where numbers wrap around. */
static const int64_t firsts[] = { 0, 1, 5, INT64_C(1) << 32, INT64_C(1) << 40, INT64_MAX - MOST };

static void fill(unsigned char *data, int size) {
    uint64_t state = 3;
    for (int i = 0; i < size; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        data[i] = state >> 63 ? 0xff : (unsigned char)(state >> 40); /* carries run through whole elements */
    }
}

XD_TEST(every_level_has_the_bits_of_the_plain_loop) {
    unsigned char data[ROOM];
    fill(data, ROOM);
    for (size_t l = 0; l < sizeof levels / sizeof *levels; l++)
        for (size_t size = 1; size <= 8; size *= 2)
            for (size_t f = 0; f < sizeof firsts / sizeof *firsts; f++)
                for (int64_t count = 0; count <= MOST; count++) {
                    const unsigned char *at = data + count % 8; /* not aligned */
                    CHECK(xdi_fingerprint_level(levels[l], at, size, firsts[f], count) ==
                          xdi_fingerprint_level(XD_CPU_PLAIN, at, size, firsts[f], count));
                }
}

XD_TEST(parts_add_up_to_the_whole) {
    unsigned char data[ROOM];
    fill(data, ROOM);
    for (size_t size = 1; size <= 8; size *= 2) {
        const uint64_t whole = xdi_fingerprint(data, size, 0, MOST);
        for (int64_t cut = 0; cut <= MOST; cut++) {
            const uint64_t head = xdi_fingerprint(data, size, 0, cut);
            CHECK(head + xdi_fingerprint(data + (size_t)cut * size, size, cut, MOST - cut) == whole);
        }
    }
}

/* Shorter than a turn of the fast code, exactly one, with a rest; the checksum goes on from another one. */
XD_TEST(one_pass_has_the_fingerprint_and_the_checksum_of_two) {
    static const int bytes[] = { 0, 8, TURN - 8, TURN, TURN + 8, 2 * TURN, LONG };
    unsigned char *data = (unsigned char *)malloc(LONG + 8);
    fill(data, LONG + 8);
    for (size_t l = 0; l < sizeof levels / sizeof *levels; l++)
        for (size_t size = 1; size <= 8; size *= 2)
            for (size_t f = 0; f < sizeof firsts / sizeof *firsts; f++)
                for (size_t b = 0; b < sizeof bytes / sizeof *bytes; b++) {
                    const int64_t count = bytes[b] / (int64_t)size, last = INT64_MAX - count;
                    const int64_t first = firsts[f] < last ? firsts[f] : last;
                    const xdi_checked_data d = { data + b % 8, size, first, count };
                    uint32_t crc = 0x12345678u;
                    CHECK(xdi_checked_level(levels[l], &d, &crc) ==
                          xdi_fingerprint_level(XD_CPU_AVX2, d.data, size, first, count));
                    CHECK_EQ_INT(crc,
                                 xd_crc32c_level(XD_CPU_PORTABLE, 0x12345678u, d.data, (size_t)count * size));
                }
    free(data);
}

/* Each bit of an element and its place count. */
XD_TEST(a_bit_or_a_place_changes_it) {
    unsigned char data[ROOM];
    fill(data, ROOM);
    for (size_t size = 1; size <= 8; size *= 2) {
        const uint64_t before = xdi_fingerprint(data, size, 0, MOST);
        for (size_t bit = 0; bit < 8 * size * MOST; bit++) {
            data[bit / 8] ^= (unsigned char)(1 << bit % 8);
            CHECK(xdi_fingerprint(data, size, 0, MOST) != before);
            data[bit / 8] ^= (unsigned char)(1 << bit % 8);
        }
        CHECK(xdi_fingerprint(data, size, 1, MOST) != before);
    }
}

/* ---- a save without a second thread ---- */

enum { ELEMENTS = 700001 };

static int write_direct(void *user, intptr_t file, const void *buffer, size_t bytes, uint64_t offset,
                        int *reason) {
    (void)user;
    *reason = 0;
    return pwrite((int)file, buffer, bytes, (off_t)offset) == (ssize_t)bytes ? 0 : EIO;
}

static void save_large(xd_ctx *ctx, const char *root) {
    static float data[ELEMENTS];
    xd_comm *comm = NULL;
    xd_tensor_part part;
    xd_checkpoint_network network;
    xd_checkpoint_save_desc d;
    memset(&part, 0, sizeof part);
    memset(&network, 0, sizeof network);
    memset(&d, 0, sizeof d);
    for (int i = 0; i < ELEMENTS; i++) data[i] = (float)(i % 8191);
    part.name = "large";
    part.dtype = XD_DTYPE_F32;
    part.ndim = 1;
    part.shape[0] = part.range.end = ELEMENTS;
    part.data = data;
    network.parts = &part;
    network.part_count = 1;
    d.root = root;
    d.networks = &network;
    d.network_count = 1;
    CHECK_EQ_INT(xd_comm_self(ctx, &comm), XD_OK);
    CHECK_EQ_INT(xd_checkpoint_save(comm, &d), XD_OK);
    xd_comm_destroy(comm);
}

XD_TEST(a_save_without_a_second_thread_has_the_same_manifest) {
    char *text[2] = { NULL, NULL };
    size_t bytes[2] = { 0, 0 };
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    memset(&desc, 0, sizeof desc);
    desc.files.write_direct = write_direct;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    for (int i = 0; i < 2; i++) {
        char root[64];
        strcpy(root, new_root());
        threads_refused = i - 1;
        save_large(ctx, root);
        CHECK_EQ_INT(xd_checkpoint_verify(ctx, path_in(root, "step-0")), XD_OK);
        CHECK_EQ_INT(xd_file_load(ctx, path_in(root, "step-0/manifest.json"), 0, &text[i], &bytes[i]), XD_OK);
        remove_all(root);
    }
    CHECK_EQ_INT(threads_refused, 1); /* asked once */
    threads_refused = -1;
    CHECK(text[0] && text[1] && bytes[0] == bytes[1] && memcmp(text[0], text[1], bytes[0]) == 0);
    xd_release(ctx, text[0]);
    xd_release(ctx, text[1]);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
