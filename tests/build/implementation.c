/* The implementation as one object: linked with the tests, and looked at for its symbols. The header is
 * included twice: the second time must add nothing. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xdistill.h"
