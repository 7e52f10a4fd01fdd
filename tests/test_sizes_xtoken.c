/* Matrices of calls across tokenizers, of routes and caches of teachers and of projections that belong together disagree:
 * helpers/sizes.h says what is asked. tests/build/check_sizes.py holds the list of matrices against docs/api.txt. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_private.h"
#include "xd_test.h"
#include "sizes_xtoken.h"

#define AT(field) offsetof(xsizes, field)
static const sizes_matrix matrices[] = {
    { "xd_xtoken_desc.student", AT(xtoken[0].student), xcall_projected, true, true, XV / 2 - 1, false,
      false },
    { "xd_xtoken_desc.student", AT(xtoken[1].student), xcall_gold, true, true, XV / 2 - 1, false, false },
    { "xd_xtoken_desc.student", AT(xtoken[2].student), xcall_same, true, true, XV / 2 - 1, false, false },
    { "xd_xtoken_desc.student", AT(xtoken[3].student), xcall_cached, true, true, XV / 2 - 1, false, false },
    { "xd_xtoken_desc.student", AT(xtoken[4].student), xcall_likelihood, true, true, XV / 2 - 1, false,
      false },
    { "xd_xtoken_desc.common.gradient", AT(xtoken[0].common.gradient), xcall_projected, true, true,
      XV / 2 - 1, true, false },
    { "xd_xtoken_teacher.logits", AT(teacher[0].logits), xcall_projected, true, true, XU - 1, false, false },
    { "xd_xtoken_teacher.logits", AT(teacher[1].logits), xcall_gold, true, true, XU - 1, false, false },
    { "xd_xtoken_teacher.logits", AT(teacher[2].logits), xcall_same, true, true, XV - 1, false, false },
    { "xd_xtoken_teacher.logits", AT(teacher[4].logits), xcall_likelihood, true, true, XU - 1, false, false },
    { "xd_uld_side.logits", AT(uld.student.logits), xcall_uld, true, true, 0, false, true },
    { "xd_uld_side.logits", AT(uld.teacher.logits), xcall_uld, false, true, 0, false, true },
    { "xd_uld_desc.gradient", AT(uld.gradient), xcall_uld, true, true, 0, true, true },
    { "xdi_chunk_sums(values)", AT(one), xcall_chunk_sums, true, false, 0, false, false },
    { "xdi_chunk_averages_backward(gradient)", AT(three), xcall_chunk_backward, true, false, 0, false, true },
    { "xdi_compat_jsd_of_probabilities(student)", AT(one), xcall_jsd, true, true, 0, false, true },
    { "xdi_compat_jsd_of_probabilities(teacher)", AT(two), xcall_jsd, true, true, 0, false, true },
    { "xdi_compat_jsd_of_probabilities(gradient)", AT(three), xcall_jsd, true, true, 0, true, true },
    { "xdi_project(probs)", AT(one), xcall_project, false, true, XV / 2 - 1, false, false },
    { "xdi_project_backward(gradient)", AT(three), xcall_project_backward, false, true, XV / 2 - 1, false,
      false },
    { "xdi_projection_rows_from_embeddings(student)", AT(one), xcall_embeddings, false, true, 0, false,
      true },
    { "xdi_projection_rows_from_embeddings(teacher)", AT(two), xcall_embeddings, false, true, 0, false,
      true },
    { "xdi_projection_rows_from_similarities(similarities)", AT(similarities), xcall_similarities, false,
      false, 0, false, true },
    { "xd_teacher_cache_block.logits", AT(block.logits), xcall_append, false, true, XU - 1, false, true },
    { "xd_teacher_cache_block.logits", AT(shards.logits), xcall_append_shards, false, true, XV / 2 - 1, false,
      false },
    { "xd_route_send(rows)", AT(route_rows), xcall_send, true, true, 0, false, true },
    { "xdi_teacher_piece_copy(shard)", AT(shard_rows), xcall_piece, false, true, 0, false, true },
    { "xdi_teacher_piece_copy(window)", AT(window_rows), xcall_piece, false, true, 0, false, true },
};

static const sizes_table table = {
    sizeof(xsizes), xsizes_open, xsizes_set, xsizes_close, matrices, sizeof matrices / sizeof *matrices,
    NULL,           0,
};

XD_TEST(matrices_across_tokenizers_that_disagree_are_refused_and_nothing_is_written) {
    for (int ranks = 1; ranks <= SIZES_RANKS; ranks++) CHECK(sizes_run_table(&table, ranks) > 50);
}

XD_TEST_MAIN()
