/* What a plan says of a queue, and what a queue then takes of an allocator that counts: for worlds whose contexts have that of
 * live_bytes.h. */
#ifndef QUEUE_BYTES_H
#define QUEUE_BYTES_H

#include "live_bytes.h"
#include "planned.h"
#include "xd_test.h"
#include "xdistill.h"

static void queue_bytes_compare(xd_comm *world, const xd_queue_desc *d) {
    xd_queue *queue = NULL;
    xd_memory_bytes bytes = { 0, 0 };
    CHECK_EQ_INT(PLANNED_MEMORY(xd_comm_ctx(world), xd_queue_create(world, d, &queue), &bytes), XD_OK);
    CHECK(queue == NULL);
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    const long long before = live_most = live_bytes;
    CHECK_EQ_INT(xd_queue_create(world, d, &queue), XD_OK);
    CHECK_EQ_INT(live_bytes - before, bytes.host);
    const bool gave_up = d->form == XD_QUEUE_WORKER && xd_queue_describe(queue).form != XD_QUEUE_WORKER;
    if (!gave_up) CHECK_EQ_INT(live_most - before, bytes.host);
    CHECK_EQ_INT(bytes.device, 0);
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    xd_queue_destroy(queue);
}

/* As a function that ranks run. */
static xd_result queue_bytes_rank(xd_comm *world, void *unused) {
    (void)unused;
    for (int form = XD_QUEUE_AUTO; form <= XD_QUEUE_STREAM; form++)
        for (int capacity = 0; capacity <= 40; capacity += 20) {
            const xd_queue_desc d = { (xd_queue_form)form, capacity };
            queue_bytes_compare(world, &d);
        }
    const xd_queue_desc bad = { XD_QUEUE_INLINE, -1 };
    xd_memory_bytes bytes = { 7, 9 };
    xd_queue *none = NULL;
    CHECK_EQ_INT(PLANNED_MEMORY(xd_comm_ctx(world), xd_queue_create(world, &bad, &none), &bytes),
                 XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "capacity -1 is outside [1, 4096]") != NULL);
    CHECK(bytes.host == 7 && bytes.device == 9);
    return XD_OK;
}

#endif
