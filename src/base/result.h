#ifndef XDI_BASE_RESULT_H
#define XDI_BASE_RESULT_H

#include "base/config.h"

/* Kinds of errors; the message has details. If one rank of a collective call finds an error, all ranks of the group
 * return one. */
#define XD_RESULTS(X)                                                                   \
    X(ERROR_ARGUMENT, "an argument is invalid on its own")                              \
    X(ERROR_TOPOLOGY, "sizes, axes or ranks do not fit together")                       \
    X(ERROR_SHAPE, "shapes disagree")                                                   \
    X(ERROR_DTYPE, "element types disagree or are not supported here")                  \
    X(ERROR_STATE, "the call is legal, but not now")                                    \
    X(ERROR_MISMATCH, "ranks passed different things to one collective call")           \
    X(ERROR_PEER, "another rank failed or left")                                        \
    X(ERROR_TIMEOUT, "a rank did not arrive before the deadline")                       \
    X(ERROR_DATA, "a value in the data is out of range or not finite")                  \
    X(ERROR_IO, "the operating system refused a file operation")                        \
    X(ERROR_FORMAT, "a file is malformed")                                              \
    X(ERROR_CORRUPT, "a checksum or coverage check failed")                             \
    X(ERROR_MISSING, "a required name is absent")                                       \
    X(ERROR_UNEXPECTED, "a name is present that was not asked for")                     \
    X(ERROR_UNSUPPORTED, "not available in this build, on this device or in this mode") \
    X(ERROR_MEMORY, "no memory")                                                        \
    X(ERROR_DEVICE, "a device or its driver reported a failure")

typedef enum xd_result {
    XD_OK = 0,
#define XDI_RESULT_ENUM(name, text) XD_##name,
    XD_RESULTS(XDI_RESULT_ENUM)
#undef XDI_RESULT_ENUM
        XD_RESULT_COUNT
} xd_result;

/* A context's last failure. */
typedef struct xd_error {
    xd_result result;
    const char *file; /* of the failed check */
    int line;
    const char *function;
    int rank;          /* world rank of this context */
    int culprit;       /* world rank; -1: unknown or this rank */
    char message[512]; /* actual and expected values */
} xd_error;

/* Returns a constant "ERROR_SHAPE"; "OK" for XD_OK, "ERROR_UNKNOWN" outside the enumeration. */
XD_API const char *xd_result_name(xd_result result);

/* Returns a constant line that explains the kind. */
XD_API const char *xd_result_text(xd_result result);

#endif
