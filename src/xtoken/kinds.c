/* The kinds of teachers: a new kind is a file and a line here. */

#include "xtoken/internal.h"

/* In the order of xd_xtoken_kind. */
XD_PRIVATE const xdi_xtoken_kind *xdi_xtoken_kind_of(xd_xtoken_kind kind) {
    static const xdi_xtoken_kind *(*const kinds[])(void) = { xdi_projected_kind, xdi_gold_kind, xdi_same_kind,
                                                             xdi_xcached_kind, xdi_likelihood_kind };
    const int count = (int)(sizeof kinds / sizeof *kinds);
    return (int)kind >= 0 && (int)kind < count ? kinds[(int)kind]() : NULL;
}
