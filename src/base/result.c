/* Names and texts of results. */

#include "base/result.h"

static const char *const xdi_result_names[XD_RESULT_COUNT] = { "OK",
#define XDI_RESULT_NAME(name, text) #name,
                                                               XD_RESULTS(XDI_RESULT_NAME)
#undef XDI_RESULT_NAME
};

static const char *const xdi_result_texts[XD_RESULT_COUNT] = { "no error",
#define XDI_RESULT_TEXT(name, text) text,
                                                               XD_RESULTS(XDI_RESULT_TEXT)
#undef XDI_RESULT_TEXT
};

XD_API const char *xd_result_name(xd_result result) {
    const int index = (int)result;
    return index >= 0 && index < (int)XD_RESULT_COUNT ? xdi_result_names[index] : "ERROR_UNKNOWN";
}

XD_API const char *xd_result_text(xd_result result) {
    const int index = (int)result;
    return index >= 0 && index < (int)XD_RESULT_COUNT ? xdi_result_texts[index]
                                                      : "not a result of this library";
}
