/* Blocks and weights of the models that tests of wrappers describe. */
#ifndef WRAP_WEIGHTS_H
#define WRAP_WEIGHTS_H

#include "xdistill.h"

#include "xd_test.h"

static xd_block *wrap_child(xd_block *parent, const char *name, const char *type) {
    xd_block *block = NULL;
    CHECK(xd_block_add(parent, &(xd_block_desc){ .name = name, .type = type }, &block) == XD_OK);
    return block;
}

static void wrap_weight_of(xd_block *block, const char *name, xd_dtype dtype, int64_t rows, int64_t columns) {
    xd_weight_desc d = { .name = name, .dtype = dtype, .shape = { rows, columns } };
    d.ndim = columns ? 2 : rows ? 1 : 0;
    d.init = (xd_init){ XD_INIT_NORMAL, 0.1f, 0.5f };
    CHECK(xd_weight_add(block, &d, NULL) == XD_OK);
}

static void wrap_weight(xd_block *block, const char *name, int64_t rows, int64_t columns) {
    wrap_weight_of(block, name, XD_DTYPE_F32, rows, columns);
}

#endif
