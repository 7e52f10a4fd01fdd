/* A user's program, linked with the installed library. */
#include <xdistill.h>

#include <string.h>

int main(void) {
    return strcmp(xd_result_name(XD_OK), "OK") == 0 ? 0 : 1;
}
