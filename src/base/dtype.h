#ifndef XDI_BASE_DTYPE_H
#define XDI_BASE_DTYPE_H

#include "base/config.h"

/* Name, bytes, floating, safetensors name; by safetensors' ascending alignment rank. F32, F64, BF16, F16, I32, I64 and
 * U8 have arithmetic; BOOL is also filled and cast. Others are only stored, moved, loaded and saved. */
#define XD_DTYPES(X)               \
    X(BOOL, 1, false, "BOOL")      \
    X(U8, 1, false, "U8")          \
    X(I8, 1, false, "I8")          \
    X(F8_E5M2, 1, true, "F8_E5M2") \
    X(F8_E4M3, 1, true, "F8_E4M3") \
    X(I16, 2, false, "I16")        \
    X(U16, 2, false, "U16")        \
    X(F16, 2, true, "F16")         \
    X(BF16, 2, true, "BF16")       \
    X(I32, 4, false, "I32")        \
    X(U32, 4, false, "U32")        \
    X(F32, 4, true, "F32")         \
    X(F64, 8, true, "F64")         \
    X(I64, 8, false, "I64")        \
    X(U64, 8, false, "U64")

/* Element type. */
typedef enum xd_dtype {
    XD_DTYPE_NONE = 0, /* may mean a default */
#define XDI_DTYPE_ENUM(name, bytes, floating, text) XD_DTYPE_##name,
    XD_DTYPES(XDI_DTYPE_ENUM)
#undef XDI_DTYPE_ENUM
        XD_DTYPE_COUNT
} xd_dtype;

/* Returns bytes; 0 for NONE and unknown values. */
XD_API size_t xd_dtype_size(xd_dtype dtype);

/* Returns true for F16 BF16 F32 F64 and 8-bit floats. */
XD_API bool xd_dtype_is_floating(xd_dtype dtype);

/* Returns the constant "BF16"; "NONE" for NONE and unknown values. */
XD_API const char *xd_dtype_name(xd_dtype dtype);

#endif
