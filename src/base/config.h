#ifndef XDI_BASE_CONFIG_H
#define XDI_BASE_CONFIG_H

/* POSIX macros must come before the first libc header; otherwise file.c stops with the line to add. */
#if defined(XDISTILL_IMPLEMENTATION) && !defined(_POSIX_C_SOURCE) && !defined(_GNU_SOURCE)
#    define _POSIX_C_SOURCE 200809L
#    if !defined(_DEFAULT_SOURCE)
#        define _DEFAULT_SOURCE /* large pages; optional */
#    endif
#endif

#if defined(__FAST_MATH__)
#    error "xdistill promises bits: compile the file that defines XDISTILL_IMPLEMENTATION without -ffast-math"
#endif

#if defined(_WIN32) && defined(XDISTILL_IMPLEMENTATION)
#    error "xdistill needs a POSIX system; on Windows compile it in WSL"
#endif

#if defined(XDISTILL_NO_TEXT) || defined(XDISTILL_NO_XTOKEN) || defined(XDISTILL_NO_TEACHER) || \
    defined(XDISTILL_NO_COMPAT)
#    error "XDISTILL_NO_ACROSS replaces XDISTILL_NO_TEXT, _XTOKEN, _TEACHER and _COMPAT"
#endif
#if defined(XDISTILL_NO_CHECKPOINT)
#    error "XDISTILL_NO_MODELS replaces XDISTILL_NO_CHECKPOINT"
#endif
#if defined(XDISTILL_NO_DMD)
#    error "XDISTILL_NO_DIFFUSION replaces XDISTILL_NO_DMD"
#endif

#if defined(XDISTILL_SECTION)
#    if defined(XDISTILL_STATIC)
#        error "XDISTILL_SECTION makes a library of several objects, XDISTILL_STATIC one that has none"
#    elif XDISTILL_SECTION < 1 || XDISTILL_SECTION > 6
#        error "XDISTILL_SECTION is 1 to 6"
#    endif
#    define XDI_MAKES(sections) ((sections) >> XDISTILL_SECTION & 1) /* bits 1 << 1 to 1 << 6 */
#else
#    define XDI_MAKES(sections) 1
#endif

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define XD_VERSION_MAJOR 0
#define XD_VERSION_MINOR 3
#define XD_VERSION_PATCH 0
#define XD_VERSION (XD_VERSION_MAJOR * 10000 + XD_VERSION_MINOR * 100 + XD_VERSION_PATCH)

/* XDISTILL_STATIC gives all functions internal linkage. */
#if !defined(XD_API)
#    if defined(XDISTILL_STATIC) && defined(__GNUC__)
#        define XD_API static __attribute__((unused))
#    elif defined(XDISTILL_STATIC)
#        define XD_API static
#    elif defined(__cplusplus)
#        define XD_API extern "C"
#    else
#        define XD_API extern
#    endif
#endif

#if defined(__GNUC__)
#    define XD_PRINTF(format_index, first_argument) \
        __attribute__((format(printf, format_index, first_argument)))
#else
#    define XD_PRINTF(format_index, first_argument)
#endif

/* Marks what the next minor version removes; the message names the replacement. It stands after XD_API, `struct`,
 * `enum` or an enumerator. Deprecated macros say it in comments. */
#if !defined(XD_DEPRECATED)
#    if defined(__GNUC__)
#        define XD_DEPRECATED(message) __attribute__((deprecated(message)))
#    elif defined(_MSC_VER)
#        define XD_DEPRECATED(message) __declspec(deprecated(message))
#    elif defined(__cplusplus) && __cplusplus >= 201402L
#        define XD_DEPRECATED(message) [[deprecated(message)]]
#    else
#        define XD_DEPRECATED(message)
#    endif
#endif

/* Functions that GPUs call too. */
#if defined(__CUDACC__)
#    define XDI_ON_DEVICE __host__ __device__
#else
#    define XDI_ON_DEVICE
#endif

/* gcc and clang compile vector kernels for x86-64 by attributes; nvcc's device passes do not. Tests define
 * XDI_NO_X86. */
#if defined(__GNUC__) && defined(__x86_64__) && !defined(__CUDA_ARCH__) && !defined(XDI_NO_X86)
#    define XDI_X86 1
#endif

/* Portable vector kernels: always on other processors, on x86 with XDISTILL_PORTABLE. */
#if defined(XDISTILL_PORTABLE) || !defined(XDI_X86)
#    define XDI_PORTABLE 1
#endif

#if !defined(XD_ASSERT)
#    define XD_ASSERT(condition) ((void)0)
#endif

#endif
