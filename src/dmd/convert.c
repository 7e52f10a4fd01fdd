/* Conversions between predictions, as factors of two tensors. */

#include "dmd/internal.h"
