/* Two meshes over one world: the teacher's logits go from the ranks that made them to the ranks that need them.
 *
 *     cc -std=c99 -O2 examples/04_redistribute.c -o redistribute -lm -lpthread
 *
 * The teacher runs on ranks 0 to 3 and splits the vocabulary. The student runs on ranks 2 to 5 and splits positions (in
 * the load-balanced order of causal attention) and vocabulary. Every rank sends directly to the others what they need;
 * what a rank has already is copied locally. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <stdio.h>

enum { RANKS = 6, POSITIONS = 16, VOCABULARY = 21 };

typedef struct outcome {
    int64_t elements[RANKS], wrong[RANKS]; /* of the student's logits */
    uint64_t sent[RANKS];                  /* bytes */
} outcome;

/* The value of every element identifies its position. */
static float element(int64_t position, int64_t id) { return (float)(position * VOCABULARY + id); }

/* Writes the elements of `tensor` in storage order, or counts those that have a wrong value. */
static int64_t walk(const xd_tensor *tensor, int rank, bool write) {
    xd_region region;
    int64_t i = 0, wrong = 0;
    if (!xd_layout_region(tensor->layout, rank, &region)) return 0;
    for (int a = 0; a < region.count[0]; a++)
        for (int64_t t = region.interval[0][a].begin; t < region.interval[0][a].end; t++)
            for (int b = 0; b < region.count[1]; b++)
                for (int64_t v = region.interval[1][b].begin; v < region.interval[1][b].end; v++, i++) {
                    float *x = (float *)tensor->data + i;
                    if (write) *x = element(t, v);
                    wrong += *x != element(t, v);
                }
    return wrong;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    outcome *out = argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    const int rank = xd_comm_rank(world);
    const int teacher_ranks[] = { 0, 1, 2, 3 }, student_ranks[] = { 2, 3, 4, 5 };
    float from_data[POSITIONS * VOCABULARY], to_data[POSITIONS * VOCABULARY];
    xd_mesh *teacher, *student;
    xd_layout *from, *to;

    XD_TRY(xd_mesh_create(world, &(xd_mesh_desc){ .axes = { { "tp", 4 } }, .ranks = teacher_ranks, .rank_count = 4 },
                       &teacher));
    XD_TRY(xd_mesh_create(world, &(xd_mesh_desc){ .axes = { { "cp", 2 }, { "tp", 2 } }, .ranks = student_ranks,
                                               .rank_count = 4, .share = teacher }, &student));
    XD_TRY(xd_layout_create(ctx, &(xd_layout_desc){
        .ndim = 2, .shape = { POSITIONS, VOCABULARY }, .topology = xd_mesh_topology(teacher),
        .placement = { { XD_SHARD, .dim = 1 } },
    }, &from));
    XD_TRY(xd_layout_create(ctx, &(xd_layout_desc){
        .ndim = 2, .shape = { POSITIONS, VOCABULARY }, .topology = xd_mesh_topology(student),
        .placement = { { XD_SHARD, .dim = 0, .balanced = true }, { XD_SHARD, .dim = 1 } },
    }, &to));

    const xd_tensor source = xd_tensor_view(from, rank, from_data, XD_DTYPE_F32);
    const xd_tensor target = xd_tensor_view(to, rank, to_data, XD_DTYPE_F32);
    walk(&source, rank, true);
    const uint64_t before = xd_comm_traffic(world).bytes_sent;
    XD_TRY(xd_redistribute(world, &source, &target));
    out->sent[rank] = xd_comm_traffic(world).bytes_sent - before;
    out->elements[rank] = xd_tensor_numel(&target);
    out->wrong[rank] = walk(&target, rank, false);

    xd_layout_destroy(to);
    xd_layout_destroy(from);
    xd_mesh_destroy(student);
    xd_mesh_destroy(teacher);
    return XD_OK;
}

int main(void) {
    outcome out;
    xd_error error;
    int64_t elements = 0, wrong = 0;
    if (xd_run_threads(RANKS, NULL, run_rank, &out, &error) != XD_OK) {
        fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
        return 1;
    }
    for (int r = 0; r < RANKS; r++) {
        printf("rank %d: has %3d elements of the student's logits, %d wrong; sent %4d bytes\n", r, (int)out.elements[r],
               (int)out.wrong[r], (int)out.sent[r]);
        elements += out.elements[r];
        wrong += out.wrong[r];
    }
    return elements == POSITIONS * VOCABULARY && wrong == 0 ? 0 : 1;
}
