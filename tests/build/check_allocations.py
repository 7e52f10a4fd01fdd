#!/usr/bin/env python3
"""Each function of the users' part that returns a result is called by a test that fails each allocation in turn, or is named here
with the reason why it has none to fail: the names in the tables of tests/test_allocations*.c, and what tests/test_memory.c calls
besides. A new one fails until it is in one of them."""
import glob
import re
import sys

EXCUSED = {
    "xd_build": "in test_build_errors.c, each in turn",
    "xd_built_params": "makes structs of a list",
    "xd_built_parts": "makes structs of a list",
    "xd_checkpoint_save_start": "in test_checkpoint_async.c, each in turn",
    "xd_checkpoint_save_wait": "in test_checkpoint_async.c, each in turn",
    "xd_checkpoint_saver_create": "in test_checkpoint_async.c, each in turn",
    "xd_comm_launched": "xd_launch_discover and xd_comm_node",
    "xd_comm_node": "in test_node_join.c, each in turn",
    "xd_comm_shrink": "in test_node_shrink.c, each in turn",
    "xd_collective_run": "what the collectives of the table call",
    "xd_cuda_create": "needs a device: tests/cuda",
    "xd_denoise_term_at": "computes numbers",
    "xd_fake_score_create": "in test_fake_score_errors.c, each in turn",
    "xd_fake_score_create_meta": "in test_fake_score_errors.c, each in turn",
    "xd_fake_score_describe": "part of xd_fake_score_create, in test_fake_score_errors.c",
    "xd_fail": "writes into the context",
    "xd_fail_culprit": "writes into the context",
    "xd_grid_create": "in test_build_errors.c, each in turn",
    "xd_crossing_backward": "allocates nothing, counted in test_crossing.c",
    "xd_crossing_forward": "allocates nothing, counted in test_crossing.c",
    "xd_halo_exchange": "allocates nothing, counted in test_halo.c",
    "xd_halo_exchange_backward": "allocates nothing, counted in test_halo.c",
    "xd_inputs_create": "in test_recompute.c, each in turn",
    "xd_inputs_keep": "allocates nothing, counted in test_recompute.c",
    "xd_latent_pack": "moves elements",
    "xd_latent_unpack": "moves elements",
    "xd_launch_discover": "allocates nothing",
    "xd_mesh_coordinate": "reads a number",
    "xd_optimizer_set_learning_rate": "writes a number",
    "xd_pipeline_create": "in test_pipeline_errors.c, each in turn",
    "xd_pipeline_finish": "allocates nothing",
    "xd_pipeline_measure": "in test_pipeline_errors.c",
    "xd_pipeline_run": "allocates nothing, counted in test_pipeline.c",
    "xd_pipeline_table": "in test_pipeline_errors.c",
    "xd_recompute": "allocates nothing, counted in test_recompute.c",
    "xd_route_post": "part of xd_route_send",
    "xd_route_slot": "part of xd_route_send",
    "xd_optimizer_thaw": "allocates nothing, counted in test_thaw.c",
    "xd_dmd_discriminator": "allocates nothing, counted in test_dmd.c",
    "xd_dmd_fake_score": "allocates nothing, counted in test_dmd.c",
    "xd_dmd_findings": "copies a struct",
    "xd_dmd_resume": "writes numbers",
    "xd_dmd_step": "allocates nothing, counted in test_dmd.c",
    "xd_dmd_student": "allocates nothing, counted in test_dmd.c",
    "xd_dmd_warm_up_step": "allocates nothing, counted in test_dmd.c",
    "xd_sampler_run": "allocates nothing, counted in test_sampler.c",
    "xd_edm_scales_at": "computes numbers",
    "xd_noise_mix": "computes numbers",
    "xd_noise_steps": "computes numbers",
    "xd_prediction_mix": "computes numbers",
    "xd_times_draw": "computes numbers",
    "xd_draw_rows": "allocates nothing, counted in test_draw.c",
    "xd_mix_rows": "allocates nothing, counted in test_convert.c",
    "xd_policy_find": "writes settings",
    "xd_stage_cast": "casts, into room of the caller's",
    "xd_weight_set_frozen": "writes a flag",
}


def functions(text):
    return set(re.findall(r"^function xd_result (xd_\w+)\(", text, re.M))


def main():
    declared = open("docs/api.txt").read()
    wanted, held = functions(declared), set()
    for path in sorted(glob.glob("tests/test_allocations*.c")):
        for row in re.findall(r'\{((?:\s*"[^"]*")+),\s*run_', open(path).read()):
            held |= set(re.findall(r"\bxd_\w+", row))
    gone = held - set(re.findall(r"^function .*?\b(xd_\w+)\(", declared, re.M))
    held |= set(re.findall(r"\b(xd_\w+)\(", open("tests/test_memory.c").read()))
    known = held | set(EXCUSED)
    bad = ["%s: no test fails its allocations; add it to tests/test_allocations*.c" % n for n in sorted(wanted - known)]
    bad += ["%s does not exist, or a test fails its allocations" % n for n in sorted(set(EXCUSED) - (wanted - held))]
    bad += ["%s is in the table of a test, and does not exist" % n for n in sorted(gone)]
    print("\n".join(bad) if bad else "%d functions, %d of them excused" % (len(wanted), len(EXCUSED)))
    return bool(bad) or len(wanted) < 100


if __name__ == "__main__":
    sys.exit(main())
