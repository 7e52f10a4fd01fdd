/* Terms of INVARIANT mode's sums one at a time, for the plain kernels. */

#include "kernel/cpu/exact.h"

XDI_EXACT_VECTORS(xdi_w1, 8, XDI_SIMD_INLINE)
XDI_EXACT_ANY(xdi_w1, XDI_SIMD_INLINE)

#define xdi_w xdi_w1
#define XDI_W(name) xdi_w1_##name
#define XDI_INLINE XDI_SIMD_INLINE
#include "kernel/cpu/exact_math.inc"
#undef xdi_w
#undef XDI_W
#undef XDI_INLINE

XDI_SIMD_128 double xdi_w1_power(double x) {
    return xdi_w1_exp(xdi_w1_set(x))[0];
}

XDI_SIMD_128 void xdi_w1_terms(double s, double t, double beta, double top, double *teacher,
                               double *student) {
    xdi_w1 q, p;
    xdi_w1_mixture(xdi_w1_set(s), xdi_w1_set(t), beta, top, &q, &p);
    *teacher = q[0];
    *student = p[0];
}

XD_PRIVATE double xdi_exact_exp(double x) {
    return xdi_w1_power(x);
}

XD_PRIVATE void xdi_exact_mixture(double s, double t, double beta, double top, double *teacher,
                                  double *student) {
    xdi_w1_terms(s, t, beta, top, teacher, student);
}
