/* 29_own_checkpoint.h - saves the three networks and where the distillation is, and goes on from there. */
typedef struct saved {
    xd_tensor_part parts[3][LAYERS];
    xd_checkpoint_average averages[3];
    xd_checkpoint_network networks[3];
} saved;

/* The student is the model itself, and has no name. */
static xd_result list_networks(net *nets, saved *s) {
    static const char *const names[] = { NULL, "fake_score", "teacher" };
    net *const of[] = { &nets[XD_DMD_STUDENT], &nets[XD_DMD_FAKE_SCORE], &nets[XD_DMD_TEACHER] };
    for (int i = 0; i < 3; i++) {
        int64_t count;
        XD_TRY(xd_parallel_parts(of[i]->parallel, LAYERS, s->parts[i], &count));
        s->averages[i] = (xd_checkpoint_average){ .name = "average", .ema = of[i]->average };
        s->networks[i] = (xd_checkpoint_network){ .name = names[i], .parts = s->parts[i], .part_count = count,
                                                  .optimizer = of[i]->optimizer,
                                                  .averages = &s->averages[i], .average_count = 1 };
    }
    return XD_OK;
}

/* After `step` steps, whole turns. */
static xd_result save_run(xd_comm *world, net *nets, xd_dmd *dmd, const char *folder, int step) {
    saved s;
    char *state;
    XD_TRY(list_networks(nets, &s));
    XD_TRY(xd_dmd_state_save(dmd, &state));
    const xd_checkpoint_save_desc save = { .root = folder, .step = step, .state = state, .keep = 2,
                                           .networks = s.networks, .network_count = 3 };
    const xd_result result = xd_checkpoint_save(world, &save);
    xd_release(xd_comm_ctx(world), state);
    return result;
}

/* The newest checkpoint, into networks and a distillation with the same settings. */
static xd_result load_run(xd_comm *world, net *nets, xd_dmd *dmd, const char *folder, int *step) {
    saved s;
    xd_checkpoint_report report;
    char *state;
    XD_TRY(list_networks(nets, &s));
    const xd_checkpoint_load_desc load = { .root = folder, .step = XD_CHECKPOINT_NEWEST,
                                           .networks = s.networks, .network_count = 3 };
    XD_TRY(xd_checkpoint_load(world, &load, &report, &state));
    const xd_result result = xd_dmd_state_load(dmd, state, NULL);
    xd_release(xd_comm_ctx(world), state);
    XD_TRY(result);
    XD_TRY(xd_parallel_publish(nets[XD_DMD_STUDENT].parallel));
    XD_TRY(xd_parallel_publish(nets[XD_DMD_FAKE_SCORE].parallel));
    XD_TRY(xd_parallel_publish(nets[XD_DMD_TEACHER].parallel));
    *step = (int)report.step;
    return XD_OK;
}
