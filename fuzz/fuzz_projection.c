/* Any bytes are a projection's file or refused; of an accepted one every id is in range and both forms agree.
 * Each input is tried as it is, and again with the checksum put right, which mutations would never find. */
#include "fuzz.h"

enum { CHECKED = 16 };

static void use(const xd_projection *p) {
    xd_projection_rows rows;
    FUZZ_CHECK(p->row_begin[0] == 0 && p->row_begin[p->student_size] == p->entries);
    FUZZ_CHECK(p->column_begin[0] == 0 && p->column_begin[p->teacher_size] == p->entries);
    for (int64_t i = 0; i < p->entries; i++) {
        FUZZ_CHECK(p->teacher_id[i] >= 0 && p->teacher_id[i] < p->teacher_size);
        FUZZ_CHECK(p->student_id[i] >= 0 && p->student_id[i] < p->student_size);
        FUZZ_CHECK(p->weight[i] >= 0.0f && p->weight[i] <= 3e38f);
    }
    FUZZ_CHECK(xd_projection_to_rows(fuzz_ctx(), p, 3, &rows) == XD_OK);
    for (int64_t i = 0; i + 1 < rows.k * rows.rows; i++)
        FUZZ_CHECK((i + 1) % rows.k == 0 || rows.weights[i] >= rows.weights[i + 1]);
    xd_projection_rows_destroy(fuzz_ctx(), &rows);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    xd_projection p;
    uint8_t *copy = (uint8_t *)malloc(bytes + 1);
    FUZZ_CHECK(copy != NULL);
    if (bytes) memcpy(copy, data, bytes);
    for (int round = 0; round < 2; round++) {
        const xd_projection_load_desc file = { .data = copy, .data_bytes = bytes };
        if (xd_projection_load(fuzz_ctx(), &file, &p) == XD_OK) {
            use(&p);
            xd_projection_destroy(fuzz_ctx(), &p);
        }
        if (bytes < CHECKED) break;
        const uint32_t crc = xd_crc32c(0, copy + CHECKED, bytes - CHECKED);
        for (int i = 0; i < 4; i++) copy[12 + i] = (uint8_t)(crc >> 8 * i);
    }
    free(copy);
    return 0;
}
