/* The implementation as one object: linked with the tests, and looked at for its symbols. The header is
 * included twice: the second time must add nothing. XD_TEST_UNIT: tests that use private functions find them too. */
#if defined(XD_TEST_UNIT)
#    define XD_PRIVATE extern __attribute__((visibility("hidden")))
#endif
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xdistill.h"
