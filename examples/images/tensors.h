/* tensors.h - floats in safetensors files, whose tensors are known beforehand. */
#ifndef TENSORS_H
#define TENSORS_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Elements of a tensor. */
int64_t tensors_count(const xd_weights_entry *entry);

/* Writes a file of F32 and BF16 tensors: values[i] are the floats of entry i. Local. Errors: DTYPE for others, IO, MEMORY. */
xd_result tensors_save(xd_ctx *ctx, const xd_weights_writer_desc *desc, const float *const *values);

/* Reads the floats of one tensor, which has to have just this name, dtype (F32 or BF16) and shape. `path` is for messages.
 * Local. Errors: MISSING, DTYPE, SHAPE. */
xd_result tensors_read(xd_ctx *ctx, const char *path, const xd_weights *file, const xd_weights_entry *entry,
                       float *values);

#ifdef __cplusplus
}
#endif

#endif /* TENSORS_H */
