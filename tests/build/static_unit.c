/* Compiled twice into one program, the second time with XD_UNIT_SECOND: each unit has its own library. */
#define XDISTILL_STATIC
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include <string.h>

int xd_unit_second(void);

#ifdef XD_UNIT_SECOND
int xd_unit_second(void) {
    return strcmp(xd_result_name(XD_OK), "OK");
}
#else
int main(void) {
    return strcmp(xd_result_name(XD_OK), "OK") == 0 && xd_unit_second() == 0 ? 0 : 1;
}
#endif
