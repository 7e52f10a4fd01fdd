/* sharded_checkpoint.c - saving by all ranks together, and loading on any others. */
#include "sharded.h"

#include <string.h>

/* The list that saves and loads have in common: the student, its optimizer, its average. */
static xd_checkpoint_network sharded_network(const sharded_student *s, xd_checkpoint_average *average) {
    xd_checkpoint_network network;
    memset(&network, 0, sizeof network);
    average->name = SHARDED_AVERAGE_NAME;
    average->ema = s->average;
    network.parts = s->parts;
    network.part_count = s->count;
    network.optimizer = s->optimizer;
    network.averages = average;
    network.average_count = 1;
    return network;
}

xd_result sharded_save(const sharded_student *s, const char *directory, int step) {
    xd_checkpoint_average average;
    const xd_checkpoint_network network = sharded_network(s, &average);
    xd_checkpoint_save_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.root = directory;
    desc.step = step;
    desc.networks = &network;
    desc.network_count = 1;
    desc.overwrite = true;
    return xd_checkpoint_save(s->world, &desc);
}

xd_result sharded_load(const sharded_student *s, const char *directory, int *step) {
    xd_checkpoint_average average;
    const xd_checkpoint_network network = sharded_network(s, &average);
    xd_checkpoint_load_desc desc;
    xd_checkpoint_report report;
    memset(&desc, 0, sizeof desc);
    desc.root = directory;
    desc.step = XD_CHECKPOINT_NEWEST;
    desc.networks = &network;
    desc.network_count = 1;
    XD_TRY(xd_checkpoint_load(s->world, &desc, &report, NULL));
    *step = (int)report.step;
    return XD_OK;
}
