/* The library itself, in the program that a mutant is looked for with. */
#undef XDISTILL_IMPLEMENTED
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
