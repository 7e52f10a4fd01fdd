/* Any bytes are a teacher's cache or refused; of an accepted one every id is in range, probabilities sum to 1,
 * and documents and spans go forward. Each input is tried as it is, and again with the checksum put right. */
#include "fuzz.h"

#include <math.h>

enum { HEADER = 160, CHECKED = 16, MOST_K = XD_CACHE_MAX_K };

static void use_position(const xd_teacher_cache *cache, int64_t at, const xd_cached_document *d) {
    static int32_t ids[MOST_K];
    static double probabilities[MOST_K];
    const xd_teacher_cache_info info = xd_teacher_cache_describe(cache);
    xd_cached_position p;
    const xd_teacher_cache_read_desc read = { at, 1, &p, ids, probabilities };
    FUZZ_CHECK(xd_teacher_cache_read(fuzz_ctx(), cache, &read) == XD_OK);
    FUZZ_CHECK(p.id >= 0 && p.id < info.desc.vocabulary && p.next >= -1 && p.next < info.desc.vocabulary);
    FUZZ_CHECK((p.next == -1) == (at == d->first + d->count - 1));
    FUZZ_CHECK(p.next_log_prob <= 0.0 && p.tail >= 0.0);
    FUZZ_CHECK(p.span.begin >= 0 && p.span.begin <= p.span.end && p.span.end <= d->text_bytes);
    double sum = info.desc.draws ? 0.0 : p.tail;
    for (int64_t j = 0; j < info.desc.k + info.desc.draws; j++) {
        FUZZ_CHECK(ids[j] >= 0 && ids[j] < info.desc.vocabulary);
        FUZZ_CHECK(probabilities[j] >= 0.0);
        FUZZ_CHECK(j == 0 || j >= info.desc.k || probabilities[j] <= probabilities[j - 1]);
        sum += probabilities[j];
    }
    FUZZ_CHECK(fabs(sum - 1.0) < 1e-9);
}

static void use(const xd_teacher_cache *cache) {
    const xd_teacher_cache_info info = xd_teacher_cache_describe(cache);
    int64_t next = 0;
    FUZZ_CHECK(strlen(info.desc.name) < XD_CACHE_NAME_BYTES);
    for (int64_t i = 0; i < info.documents; i++) {
        xd_cached_document d;
        FUZZ_CHECK(xd_teacher_cache_find_document(fuzz_ctx(), cache, i, &d) == XD_OK);
        FUZZ_CHECK(d.first == next && d.count > 0);
        for (int64_t at = d.first; at < d.first + d.count; at++) use_position(cache, at, &d);
        next = d.first + d.count;
    }
    FUZZ_CHECK(next == info.positions);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    uint8_t *copy = (uint8_t *)malloc(bytes + 1);
    FUZZ_CHECK(copy != NULL);
    if (bytes) memcpy(copy, data, bytes);
    for (int round = 0; round < 2; round++) {
        xd_teacher_cache *cache = NULL;
        const xd_teacher_cache_open_desc file = { .data = copy, .data_bytes = bytes };
        if (xd_teacher_cache_open(fuzz_ctx(), &file, &cache) == XD_OK) use(cache);
        xd_teacher_cache_close(cache);
        if (bytes < HEADER) break;
        uint32_t crc = xd_crc32c(0, copy + HEADER, bytes - HEADER);
        crc = xd_crc32c(crc, copy + CHECKED, HEADER - CHECKED);
        for (int i = 0; i < 4; i++) copy[12 + i] = (uint8_t)(crc >> 8 * i);
    }
    free(copy);
    return 0;
}
