/* Whether a process was forked from the one that made an object: then the threads, locks and files of the object are not its own. */

#include "base/internal.h"

#include <sys/mman.h>
#include <unistd.h>

XD_PRIVATE int64_t xdi_process(void) {
    return (int64_t)getpid();
}

XD_PRIVATE bool xdi_is_forked(int64_t process) {
    return process != xdi_process();
}

/* A page that the system clears in a process forked from this one: to read it costs nothing, to ask for the number of the process is
 * a system call. */
#if defined(MADV_WIPEONFORK) && defined(MAP_ANONYMOUS)
enum { XDI_ORIGIN_BYTES = 1 };

XD_PRIVATE unsigned char *xdi_origin_create(void) {
    void *page = mmap(NULL, XDI_ORIGIN_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return NULL;
    if (madvise(page, XDI_ORIGIN_BYTES, MADV_WIPEONFORK) != 0) {
        munmap(page, XDI_ORIGIN_BYTES);
        return NULL;
    }
    *(unsigned char *)page = 1;
    return (unsigned char *)page;
}

XD_PRIVATE void xdi_origin_destroy(unsigned char *origin) {
    if (origin) munmap(origin, XDI_ORIGIN_BYTES);
}
#else
XD_PRIVATE unsigned char *xdi_origin_create(void) {
    return NULL;
}

XD_PRIVATE void xdi_origin_destroy(unsigned char *origin) {
    (void)origin;
}
#endif

XD_PRIVATE bool xdi_origin_is_elsewhere(const unsigned char *origin, int64_t process) {
    if (origin && *(const volatile unsigned char *)origin) return false;
    return xdi_is_forked(process);
}
