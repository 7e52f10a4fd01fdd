/* Rows of f32 without padding, for the tests of losses across tokenizers. */
#ifndef XTOKEN_ROWS_H
#define XTOKEN_ROWS_H

#include "xdistill.h"

#include <string.h>

static inline xd_rows rows_of(void *data, int64_t rows, int64_t cols) {
    xd_rows r;
    memset(&r, 0, sizeof r);
    r.data = data;
    r.dtype = XD_DTYPE_F32;
    r.rows = rows;
    r.cols = cols;
    return r;
}

#endif
