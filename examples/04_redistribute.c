/* Logits move from the mesh of the teacher to the mesh of the student, within one world.
 *
 * The teacher splits the vocabulary over ranks 0 to 3. The student runs on ranks 2 to 5 and splits
 * both positions and vocabulary. Its positions have the load-balanced order of causal attention.
 * Every rank sends directly to the ranks that need its data, and copies the rest locally.
 *
 *     cc -std=c99 -O2 examples/04_redistribute.c -o redistribute -lm -lpthread
 */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <stdio.h>

enum { RANKS = 6, POSITIONS = 16, VOCABULARY = 21 };

/* Counts of the student's logits. Each rank writes its own entry. */
typedef struct outcome {
    int64_t elements[RANKS];
    int64_t wrong[RANKS];
    uint64_t sent[RANKS]; /* bytes */
} outcome;

/* The value of every element identifies its position. */
static float element(int64_t position, int64_t id) { return (float)(position * VOCABULARY + id); }

/* Visits the elements of `tensor` in storage order. Writes their values, or counts wrong ones. */
static int64_t walk(const xd_tensor *tensor, int rank, bool write) {
    xd_region region;
    float *x = tensor->data;
    int64_t wrong = 0;
    if (!xd_layout_region(tensor->layout, rank, &region)) return 0;
    for (int a = 0; a < region.count[0]; a++) {
        const xd_interval rows = region.interval[0][a];
        for (int64_t t = rows.begin; t < rows.end; t++)
            for (int b = 0; b < region.count[1]; b++) {
                const xd_interval columns = region.interval[1][b];
                for (int64_t v = columns.begin; v < columns.end; v++) {
                    if (write) *x = element(t, v);
                    wrong += *x != element(t, v);
                    x++;
                }
            }
    }
    return wrong;
}

static xd_result create_meshes(xd_comm *world, xd_mesh **teacher, xd_mesh **student) {
    static const int teacher_ranks[] = { 0, 1, 2, 3 };
    static const int student_ranks[] = { 2, 3, 4, 5 };
    const xd_mesh_desc teacher_desc = {
        .axes = { { "tp", 4 } },
        .ranks = teacher_ranks,
        .rank_count = 4,
    };
    XD_TRY(xd_mesh_create(world, &teacher_desc, teacher));
    const xd_mesh_desc student_desc = {
        .axes = { { "cp", 2 }, { "tp", 2 } },
        .ranks = student_ranks,
        .rank_count = 4,
        .share = *teacher,
    };
    return xd_mesh_create(world, &student_desc, student);
}

static xd_result create_layouts(xd_ctx *ctx, const xd_mesh *teacher, const xd_mesh *student,
                                xd_layout **from, xd_layout **to) {
    const xd_layout_desc from_desc = {
        .ndim = 2,
        .shape = { POSITIONS, VOCABULARY },
        .topology = xd_mesh_topology(teacher),
        .placement = { { XD_SHARD, .dim = 1 } },
    };
    XD_TRY(xd_layout_create(ctx, &from_desc, from));
    const xd_layout_desc to_desc = {
        .ndim = 2,
        .shape = { POSITIONS, VOCABULARY },
        .topology = xd_mesh_topology(student),
        .placement = { { XD_SHARD, .dim = 0, .balanced = true }, { XD_SHARD, .dim = 1 } },
    };
    return xd_layout_create(ctx, &to_desc, to);
}

static xd_result run_rank(xd_comm *world, void *argument) {
    outcome *out = argument;
    const int rank = xd_comm_rank(world);
    float from_data[POSITIONS * VOCABULARY], to_data[POSITIONS * VOCABULARY];
    xd_mesh *teacher, *student;
    xd_layout *from, *to;
    XD_TRY(create_meshes(world, &teacher, &student));
    XD_TRY(create_layouts(xd_comm_ctx(world), teacher, student, &from, &to));

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
        printf("rank %d: has %3d elements of the student's logits, %d wrong; sent %4d bytes\n", r,
               (int)out.elements[r], (int)out.wrong[r], (int)out.sent[r]);
        elements += out.elements[r];
        wrong += out.wrong[r];
    }
    return elements == POSITIONS * VOCABULARY && wrong == 0 ? 0 : 1;
}
