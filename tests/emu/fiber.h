/* Stacks that one OS thread switches between. */
#ifndef EMU_FIBER_H
#define EMU_FIBER_H

#include <stddef.h>

namespace emu {

struct Fiber {
    void *stack_pointer; /* or the ucontext_t of this fiber where there is no assembly */
    char *bottom;        /* lowest usable byte; a guard page lies below */
    size_t bytes;
    void *sanitizer; /* the fake stack of ASan or the fiber of TSan */
};

/* Makes the running context a fiber, to come back to. */
void fiber_adopt(Fiber *self);

/* A fiber that will call entry() when it is switched to first; entry never returns. Its stack may have
 * been used before, by a fiber that is never switched to again. */
void fiber_prepare(Fiber *fiber, void (*entry)());

/* Maps the stacks of `count` fibers. They live as long as the process. */
void fiber_map(Fiber *fibers, size_t count);

void fiber_switch(Fiber *from, Fiber *to);

/* The first thing that entry() calls. */
void fiber_entered();

} // namespace emu

#endif
