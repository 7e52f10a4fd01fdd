/* images_mesh.c - see images_mesh.h. */
#include "images_mesh.h"

#include "../common/options.h"

#include <stdio.h>
#include <string.h>

/* ---- the command line ---- */

/* "NAME=": what follows it, of a text that begins so. */
static const char *images_after(const char *text, const char *name) {
    const size_t length = strlen(name);
    return strncmp(text, name, length) == 0 && text[length] == '=' ? text + length + 1 : NULL;
}

static bool images_count(const char *text, int *out) {
    long n = 0;
    if (!options_number(text, 1, IMAGES_MOST_RANKS, &n)) return false;
    *out = (int)n;
    return true;
}

/* "GxN": groups of N ranks. A group's micro-batches are to be a power of two. */
static bool images_parse_groups(char *text, images_mesh *out) {
    char *by = strchr(text, 'x');
    int each = 0;
    if (!by) return false;
    *by = 0;
    if (!images_count(text, &out->groups) || !images_count(by + 1, &each)) return false;
    out->data = out->groups * each;
    return out->groups == 1 || out->groups == 2 || out->groups == 4 || out->groups == 8;
}

static bool images_parse_axis(char *text, images_mesh *out) {
    const char *dp = images_after(text, "dp"), *fsdp = images_after(text, "fsdp"),
               *cp = images_after(text, "cp");
    if (cp) return out->cp == 0 && images_count(cp, &out->cp) && out->cp != 3 && out->cp <= 4;
    if (out->data) return false;
    out->fsdp = !dp;
    if (dp || fsdp) return images_count(dp ? dp : fsdp, &out->data);
    return images_after(text, "hsdp") && images_parse_groups(text + strlen("hsdp="), out);
}

bool images_mesh_parse(const char *text, images_mesh *out) {
    char copy[64], *axis = copy;
    memset(out, 0, sizeof *out);
    if (snprintf(copy, sizeof copy, "%s", text) >= (int)sizeof copy) return false;
    while (axis) {
        char *comma = strchr(axis, ',');
        if (comma) *comma = 0;
        if (!images_parse_axis(axis, out)) return false;
        axis = comma ? comma + 1 : NULL;
    }
    out->data += out->data == 0;
    out->cp += out->cp == 0;
    return out->data * out->cp <= IMAGES_MOST_RANKS;
}

/* ---- groups ---- */

xd_result images_ranks_open(xd_comm *world, const images_mesh *mesh, images_ranks *out) {
    const int me = xd_comm_rank(world), place = me / mesh->cp;
    memset(out, 0, sizeof *out);
    out->world = world;
    out->fsdp = mesh->fsdp;
    XD_TRY(xd_comm_split(world, me % mesh->cp, me, &out->data));
    if (mesh->cp > 1) XD_TRY(xd_comm_split(world, place, me, &out->cp));
    if (mesh->groups < 2) return XD_OK;
    const int each = mesh->data / mesh->groups;
    XD_TRY(xd_comm_split(out->data, place / each, place, &out->group));
    return xd_comm_split(out->data, place % each, place, &out->replicas);
}

void images_ranks_close(images_ranks *ranks) {
    xd_comm_destroy(ranks->replicas);
    xd_comm_destroy(ranks->group);
    xd_comm_destroy(ranks->cp);
    xd_comm_destroy(ranks->data);
    memset(ranks, 0, sizeof *ranks);
}
