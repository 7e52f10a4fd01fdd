/* Emulation: the host side of the CUDA runtime, for C units that need no device code. */
#ifndef EMU_CUDA_RUNTIME_API_H
#define EMU_CUDA_RUNTIME_API_H
#include "emu_api.h"
#endif
