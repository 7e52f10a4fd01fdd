/* The context switch: assembly where it exists (a few ns, no system call), ucontext elsewhere or with
 * EMU_UCONTEXT. */
#include "fiber.h"
#include "sanitizer.h"

#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#ifdef EMU_ASAN
#    include <sanitizer/common_interface_defs.h>
#endif
#ifdef EMU_TSAN
#    include <sanitizer/tsan_interface.h>
#endif

#if defined(EMU_ASSEMBLY) && defined(__aarch64__)
/* Saves what the callee must preserve, exchanges stacks, restores, returns into the other context. */
__asm__(".text\n"
        ".globl emu_switch_stacks\n"
        ".hidden emu_switch_stacks\n"
        ".type emu_switch_stacks,%function\n"
        "emu_switch_stacks:\n"
        "    sub sp, sp, #160\n"
        "    stp x19, x20, [sp]\n    stp x21, x22, [sp, #16]\n    stp x23, x24, [sp, #32]\n"
        "    stp x25, x26, [sp, #48]\n    stp x27, x28, [sp, #64]\n    stp x29, x30, [sp, #80]\n"
        "    stp d8, d9, [sp, #96]\n    stp d10, d11, [sp, #112]\n    stp d12, d13, [sp, #128]\n"
        "    stp d14, d15, [sp, #144]\n"
        "    mov x9, sp\n    str x9, [x0]\n    mov sp, x1\n"
        "    ldp x19, x20, [sp]\n    ldp x21, x22, [sp, #16]\n    ldp x23, x24, [sp, #32]\n"
        "    ldp x25, x26, [sp, #48]\n    ldp x27, x28, [sp, #64]\n    ldp x29, x30, [sp, #80]\n"
        "    ldp d8, d9, [sp, #96]\n    ldp d10, d11, [sp, #112]\n    ldp d12, d13, [sp, #128]\n"
        "    ldp d14, d15, [sp, #144]\n"
        "    add sp, sp, #160\n"
        "    ret\n"
        ".size emu_switch_stacks,.-emu_switch_stacks\n");
#endif

namespace emu {

#ifdef EMU_ASAN
static const size_t kStackBytes = 256 << 10; /* red zones and unoptimised frames */
#else
static const size_t kStackBytes = 64 << 10;
#endif
static const size_t kGuardBytes = 4096;

void fiber_map(Fiber *fibers, size_t count) {
    const size_t pitch = kStackBytes + kGuardBytes;
    void *mapping = mmap(nullptr, pitch * count, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (size_t i = 0; i < count; i++) {
        char *low = static_cast<char *>(mapping) + i * pitch;
        mprotect(low, kGuardBytes, PROT_NONE);
        memset(&fibers[i], 0, sizeof fibers[i]);
        fibers[i].bottom = low + kGuardBytes;
        fibers[i].bytes = kStackBytes;
    }
}

void fiber_adopt(Fiber *self) {
    memset(self, 0, sizeof *self);
#ifndef EMU_ASSEMBLY
    static ucontext_t context; /* one executor runs at a time */
    self->stack_pointer = &context;
#endif
#ifdef EMU_TSAN
    self->sanitizer = __tsan_get_current_fiber();
#endif
}

void fiber_prepare(Fiber *fiber, void (*entry)()) {
    EMU_UNPOISON(fiber->bottom, fiber->bytes);
#ifdef EMU_ASAN
    fiber->sanitizer = nullptr;
#endif
#ifdef EMU_TSAN
    if (!fiber->sanitizer) fiber->sanitizer = __tsan_create_fiber(0);
#endif
    /* Stack tops at the same distance from a page share a cache set: stagger them. */
    const size_t stagger = ((uintptr_t)fiber->bottom >> 12) % 16 * 192;
    char *top = fiber->bottom + fiber->bytes - 64 - stagger;
    top -= (uintptr_t)top % 16;
#if defined(EMU_ASSEMBLY) && defined(__x86_64__)
    void **frame =
        reinterpret_cast<void **>(top) - 5; /* where to go on, a frame pointer, a null return address */
    memset(frame, 0, 5 * sizeof *frame);
    frame[0] = reinterpret_cast<void *>(entry); /* entered with rsp % 16 == 8, as after a call */
    fiber->stack_pointer = frame;
#elif defined(EMU_ASSEMBLY)
    void **frame = reinterpret_cast<void **>(top) - 20;
    memset(frame, 0, 20 * sizeof *frame);
    frame[11] = reinterpret_cast<void *>(entry); /* x30 */
    fiber->stack_pointer = frame;
#else
    if (!fiber->stack_pointer) fiber->stack_pointer = new ucontext_t;
    ucontext_t *context = static_cast<ucontext_t *>(fiber->stack_pointer);
    getcontext(context);
    context->uc_stack.ss_sp = fiber->bottom;
    context->uc_stack.ss_size = (size_t)(top - fiber->bottom);
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
#endif
}

#ifdef EMU_ASAN
static Fiber *asan_left; /* the fiber just left: to learn the bounds of the adopted one */
#endif

static void finish_switch(Fiber *self) {
#ifdef EMU_ASAN
    const void *bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(self ? self->sanitizer : nullptr, &bottom, &bytes);
    asan_left->bottom = static_cast<char *>(const_cast<void *>(bottom));
    asan_left->bytes = bytes;
#else
    (void)self;
#endif
}

void fiber_entered() {
    finish_switch(nullptr);
}

#if !defined(EMU_ASSEMBLY) || defined(EMU_ASAN) || defined(EMU_TSAN)
void fiber_switch(Fiber *from, Fiber *to) {
#    ifdef EMU_ASAN
    asan_left = from;
    __sanitizer_start_switch_fiber(&from->sanitizer, to->bottom, to->bytes);
#    endif
#    ifdef EMU_TSAN
    __tsan_switch_to_fiber(to->sanitizer, 0);
#    endif
#    ifdef EMU_ASSEMBLY
    emu_switch_stacks(&from->stack_pointer, to->stack_pointer);
#    else
    swapcontext(static_cast<ucontext_t *>(from->stack_pointer), static_cast<ucontext_t *>(to->stack_pointer));
#    endif
    finish_switch(from);
}
#endif

} // namespace emu
