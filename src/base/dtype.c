/* Element types. */

#include "base/internal.h"

#include <string.h>

typedef struct xdi_dtype_row {
    size_t bytes;
    bool floating;
    const char *name;
} xdi_dtype_row;

static const xdi_dtype_row xdi_dtype_rows[XD_DTYPE_COUNT] = { { 0, false, "NONE" },
#define XDI_DTYPE_ROW(name, bytes, floating, text) { bytes, floating, text },
                                                              XD_DTYPES(XDI_DTYPE_ROW)
#undef XDI_DTYPE_ROW
};

static const xdi_dtype_row *xdi_dtype_find(xd_dtype dtype) {
    const int index = (int)dtype;
    return &xdi_dtype_rows[index > 0 && index < (int)XD_DTYPE_COUNT ? index : 0];
}

XD_API size_t xd_dtype_size(xd_dtype dtype) {
    return xdi_dtype_find(dtype)->bytes;
}

XD_API bool xd_dtype_is_floating(xd_dtype dtype) {
    return xdi_dtype_find(dtype)->floating;
}

XD_API const char *xd_dtype_name(xd_dtype dtype) {
    return xdi_dtype_find(dtype)->name;
}

XD_PRIVATE xd_dtype xdi_dtype_from_name(const char *name) {
    for (int i = 1; i < (int)XD_DTYPE_COUNT; i++)
        if (strcmp(name, xdi_dtype_rows[i].name) == 0) return (xd_dtype)i;
    return XD_DTYPE_NONE;
}
