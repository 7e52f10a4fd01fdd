/* A file that uses the library without implementing it: with implementation.c it is the two-unit program. */
#include "xdistill.h"
#include "xdistill.h"
#include <string.h>

int main(void) {
    return strcmp(xd_result_name(XD_OK), "OK") == 0 ? 0 : 1;
}
