/* A user's program, built against the installed header. */
#define XDISTILL_IMPLEMENTATION
#include <xdistill.h>

#include <string.h>

int main(void) {
    return strcmp(xd_result_name(XD_OK), "OK") == 0 ? 0 : 1;
}
