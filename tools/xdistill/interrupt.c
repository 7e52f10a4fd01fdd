/* interrupt.c - the handler writes its line and sets a flag, which runs look at. */
#define _POSIX_C_SOURCE 200809L /* sigaction */
#include "interrupt.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

static volatile sig_atomic_t interrupt_seen;

static void interrupt_hear(int signal) {
    static const char words[] = "\nstopping where it can go on; Ctrl-C again ends it at once\n";
    const ssize_t written = write(STDERR_FILENO, words, sizeof words - 1);
    (void)written;
    (void)signal;
    interrupt_seen = 1;
}

void interrupt_listen(void) {
    struct sigaction before, ours;
    memset(&ours, 0, sizeof ours);
    ours.sa_handler = interrupt_hear;
    ours.sa_flags = (int)SA_RESETHAND | SA_RESTART;
    sigemptyset(&ours.sa_mask);
    if (sigaction(SIGINT, NULL, &before) == 0 && before.sa_handler != SIG_IGN)
        (void)sigaction(SIGINT, &ours, NULL);
}

bool interrupt_asked(void) {
    return interrupt_seen != 0;
}
