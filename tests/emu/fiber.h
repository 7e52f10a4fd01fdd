/* Stacks that one OS thread switches between. */
#ifndef EMU_FIBER_H
#define EMU_FIBER_H

#include <stddef.h>

#include "sanitizer.h"

#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(EMU_UCONTEXT)
#    define EMU_ASSEMBLY 1
#endif

namespace emu {

struct Fiber {
    void *stack_pointer; /* or the ucontext_t of this fiber where there is no assembly */
    char *bottom;        /* lowest usable byte; a guard page lies below */
    size_t bytes;
    void *sanitizer; /* the fake stack of ASan or the fiber of TSan */
};

/* Makes the running context a fiber, to return to. */
void fiber_adopt(Fiber *self);

/* A fiber that will call entry() when it is switched to first; entry never returns. Its stack may have
 * been used before, by a fiber that is never switched to again. */
void fiber_prepare(Fiber *fiber, void (*entry)());

/* Maps the stacks of `count` fibers. They live as long as the process. */
void fiber_map(Fiber *fibers, size_t count);

#if defined(EMU_ASSEMBLY) && defined(__x86_64__)
#    ifdef __AVX512F__
#        define EMU_WIDE_REGISTERS                                                                        \
            , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25",   \
                "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", \
                "k7"
#    else
#        define EMU_WIDE_REGISTERS
#    endif
/* Saves the frame pointer and the address to resume at on one stack and loads them from the other. Inline, with every other
 * register declared as changed: the compiler saves only the live ones, once, where a separate function would save all again.
 * The 128 bytes below the stack pointer belong to the caller. */
inline __attribute__((always_inline)) void emu_switch_stacks(void **save, void *load) {
    __asm__ volatile("leaq 1f(%%rip), %%rax\n\t"
                     "leaq -128(%%rsp), %%rsp\n\t"
                     "pushq %%rbp\n\t"
                     "pushq %%rax\n\t"
                     "movq %%rsp, (%0)\n\t"
                     "movq %1, %%rsp\n\t"
                     "popq %%rax\n\t"
                     "popq %%rbp\n\t"
                     "jmp *%%rax\n"
                     "1:\n\t"
                     "leaq 128(%%rsp), %%rsp"
                     : "+D"(save), "+S"(load)
                     :
                     : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
                       "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
                       "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15" EMU_WIDE_REGISTERS);
}
#elif defined(EMU_ASSEMBLY)
extern "C" void emu_switch_stacks(void **save, void *load);
#endif

#if defined(EMU_ASSEMBLY) && !defined(EMU_ASAN) && !defined(EMU_TSAN)
inline void fiber_switch(Fiber *from, Fiber *to) {
    emu_switch_stacks(&from->stack_pointer, to->stack_pointer);
}
#else
void fiber_switch(Fiber *from, Fiber *to);
#endif

/* The first thing that entry() calls. */
void fiber_entered();

} // namespace emu

#endif
