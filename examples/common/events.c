/* events.c - TensorBoard's records: u64 length, its masked CRC-32C, the event, its masked CRC-32C; little-endian. An event is a
 * protocol buffer: 1 wall time, 2 step, 3 the version of the file or 5 a summary of one value: 1 tag, 2 number. */
#include "events.h"

#include <string.h>

enum { EVENTS_MOST = 256 }; /* bytes of an event: tags are short */

/* A message that is being written. */
typedef struct event_message {
    unsigned char data[EVENTS_MOST];
    size_t bytes;
} event_message;

enum { EVENT_VARINT = 0, EVENT_EIGHT = 1, EVENT_BYTES = 2, EVENT_FOUR = 5 };

static void event_byte(event_message *m, unsigned value) {
    if (m->bytes < EVENTS_MOST) m->data[m->bytes++] = (unsigned char)value;
}

static void event_varint(event_message *m, uint64_t value) {
    for (; value > 127; value >>= 7) event_byte(m, (unsigned)(value & 127) | 128);
    event_byte(m, (unsigned)value);
}

static void event_fixed(event_message *m, int field, int kind, uint64_t bits, int bytes) {
    event_byte(m, (unsigned)(field << 3 | kind));
    for (int i = 0; i < bytes; i++) event_byte(m, (unsigned)(bits >> 8 * i & 255));
}

static void event_bytes(event_message *m, int field, const void *data, size_t bytes) {
    event_byte(m, (unsigned)(field << 3 | EVENT_BYTES));
    event_varint(m, bytes);
    for (size_t i = 0; i < bytes; i++) event_byte(m, ((const unsigned char *)data)[i]);
}

static void event_number(event_message *m, int field, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    event_fixed(m, field, EVENT_FOUR, bits, 4);
}

/* ---- records ---- */

static uint32_t events_mask(const unsigned char *data, size_t bytes) {
    const uint32_t crc = xd_crc32c(0, data, bytes);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static bool events_grow(events *e, size_t more) {
    if (e->failed || e->bytes + more <= e->room) return !e->failed;
    const size_t room = 2 * e->room + more + 4096;
    unsigned char *data = (unsigned char *)xd_allocate(e->ctx, room);
    if (!data) {
        e->failed = true;
        return false;
    }
    if (e->bytes) memcpy(data, e->data, e->bytes);
    xd_release(e->ctx, e->data);
    e->data = data;
    e->room = room;
    return true;
}

static void events_little(events *e, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) e->data[e->bytes++] = (unsigned char)(value >> 8 * i & 255);
}

static void events_record(events *e, const event_message *m) {
    if (!events_grow(e, 8 + 4 + m->bytes + 4)) return;
    const unsigned char *length = e->data + e->bytes;
    events_little(e, m->bytes, 8);
    events_little(e, events_mask(length, 8), 4);
    memcpy(e->data + e->bytes, m->data, m->bytes);
    e->bytes += m->bytes;
    events_little(e, events_mask(m->data, m->bytes), 4);
}

static event_message events_message(const events *e) {
    event_message m;
    uint64_t wall;
    m.bytes = 0;
    memcpy(&wall, &e->wall, sizeof wall);
    event_fixed(&m, 1, EVENT_EIGHT, wall, 8);
    return m;
}

events events_begin(xd_ctx *ctx, double wall) {
    static const char version[] = "brain.Event:2";
    events e;
    memset(&e, 0, sizeof e);
    e.ctx = ctx;
    e.wall = wall;
    event_message m = events_message(&e);
    event_bytes(&m, 3, version, sizeof version - 1);
    events_record(&e, &m);
    return e;
}

void events_add(events *e, const char *tag, int64_t step, float value) {
    event_message m = events_message(e), one, summary;
    one.bytes = summary.bytes = 0;
    event_bytes(&one, 1, tag, strlen(tag));
    event_number(&one, 2, value);
    event_bytes(&summary, 1, one.data, one.bytes);
    event_byte(&m, 2 << 3 | EVENT_VARINT);
    event_varint(&m, (uint64_t)step);
    event_bytes(&m, 5, summary.data, summary.bytes);
    events_record(e, &m);
}

xd_result events_save(events *e, const char *path) {
    const xd_result result = e->failed ? XD_FAIL(e->ctx, XD_ERROR_MEMORY, "no room for %s", path)
                                       : xd_file_save(e->ctx, path, e->data, e->bytes);
    xd_release(e->ctx, e->data);
    memset(e, 0, sizeof *e);
    return result;
}
