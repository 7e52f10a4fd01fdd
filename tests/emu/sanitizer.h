/* Which sanitizer the layer itself is built with, and ASan's poison as macros that vanish elsewhere. */
#ifndef EMU_SANITIZER_H
#define EMU_SANITIZER_H

#if defined(__has_feature)
#    if __has_feature(address_sanitizer)
#        define EMU_ASAN 1
#    endif
#    if __has_feature(thread_sanitizer)
#        define EMU_TSAN 1
#    endif
#endif
#if defined(__SANITIZE_ADDRESS__) && !defined(EMU_ASAN)
#    define EMU_ASAN 1
#endif
#if defined(__SANITIZE_THREAD__) && !defined(EMU_TSAN)
#    define EMU_TSAN 1
#endif

#ifdef EMU_ASAN
#    include <sanitizer/asan_interface.h>
#    define EMU_POISON(address, bytes) __asan_poison_memory_region(address, bytes)
#    define EMU_UNPOISON(address, bytes) __asan_unpoison_memory_region(address, bytes)
#else
#    define EMU_POISON(address, bytes) (void)0
#    define EMU_UNPOISON(address, bytes) (void)0
#endif

#endif
