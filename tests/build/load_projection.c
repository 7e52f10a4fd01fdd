/* Loads a projection and prints its sizes and every entry, weights as their bits: for test_projection_pt.py. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include <stdio.h>
#include <string.h>

int main(int argc, char **argv) {
    xd_ctx *ctx = NULL;
    xd_projection p;
    if (argc != 2 || xd_ctx_create(NULL, &ctx) != XD_OK) return 2;
    if (xd_projection_load(ctx, &(xd_projection_load_desc){ .path = argv[1] }, &p) != XD_OK) {
        fprintf(stderr, "%s\n", xd_last_error(ctx)->message);
        return 1;
    }
    printf("%lld %lld %016llx %016llx\n", (long long)p.student_size, (long long)p.teacher_size,
           (unsigned long long)p.origin.student_hash, (unsigned long long)p.origin.teacher_hash);
    for (int64_t s = 0; s < p.student_size; s++)
        for (int64_t i = p.row_begin[s]; i < p.row_begin[s + 1]; i++) {
            uint32_t bits;
            memcpy(&bits, &p.weight[i], sizeof bits);
            printf("%lld %d %08x\n", (long long)s, (int)p.teacher_id[i], (unsigned)bits);
        }
    xd_projection_destroy(ctx, &p);
    xd_ctx_destroy(ctx);
    return 0;
}
