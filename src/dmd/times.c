/* Times from draws. */

#include "dmd/internal.h"
