/* A reader with a planted error, which the changes of fuzz/fuzz_mutate.h must find: of {"size": N, "data": "..."} it copies N bytes
 * of the data into an array of 64. */
#include "../../fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    char text[256] = { 0 }, copy[64];
    if (bytes >= sizeof text) return 0;
    memcpy(text, data, bytes);
    const char *size = strstr(text, "\"size\": "), *content = strstr(text, "\"data\": \"");
    if (!size || !content || content < size) return 0;
    const long count = strtol(size + 8, NULL, 10);
    if (count < 0 || count > (long)sizeof text)
        return 0; /* the array's size is what it should be held against */
    FUZZ_CHECK(count <= (long)sizeof copy);
    memcpy(copy, content + 9, (size_t)count);
    return copy[0] == 1;
}
