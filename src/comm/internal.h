#ifndef XDI_COMM_INTERNAL_H
#define XDI_COMM_INTERNAL_H

#include "base/internal.h"
#include "comm/leaves.h"
#include "comm/queue.h"
#include "comm/topology_internal.h"
#include "comm/transport.h"

struct xd_comm {
    xd_ctx *ctx;
    xd_transport *transport;
    xd_control *all;     /* [size], the records of the call in progress */
    uint64_t *values;    /* [size], scratch of the comparison */
    int *members;        /* [size], scratch of split */
    int64_t *counts;     /* [size], scratch of gathers of equal blocks */
    xd_leaves *one_each; /* [size], a leaf a rank */
    xd_comm_counters counters;
    uint64_t sequence; /* collectives begun, without send and recv */
    double patience;  /* of the messages that are under way: a part of the time limit that they have longer */
    bool alike;       /* a failure is everybody's own: xdi_comm_agree_alike */
    uint64_t refused; /* the last of them that all ranks have seen fail, and that broke nothing */
    bool is_world;    /* its first collective has the longer deadline */
    int64_t process;  /* that is this rank */
    xd_result broken; /* XD_OK, or what broke the group */
    int culprit;      /* world rank; -1 unknown */
};

/* record.c: the name of a kind; whether it reduces; the nodes of a rank's leaves, 1 without; elements in c->recv on this rank when
 * blocks lie back to back. */
XD_PRIVATE const char *xdi_comm_kind(uint64_t kind);
XD_PRIVATE bool xdi_comm_reduces(xd_collective_kind kind);
XD_PRIVATE int64_t xdi_comm_nodes(const xd_leaves *leaves);
XD_PRIVATE int64_t xdi_comm_recv_elements(const xd_collective *c, int rank, int size);

/* collective.c: as XDI_GIVEN; the other ranks of the group, which may be NULL, are informed in their first exchange of the call.
 * XDI_GIVEN_COMM has the group's context. */
XD_PRIVATE xd_result xdi_comm_given(xd_comm *comm, xd_result mine);
#define XDI_GIVEN_TO_ALL(ctx, comm, ...) \
    XDI_CALL(ctx);                       \
    XD_TRY(xdi_comm_given(comm, XDI_CHECK_GIVEN(ctx, __VA_ARGS__)))
#define XDI_GIVEN_COMM(comm, ...) \
    XDI_LIVE(xd_comm, comm);      \
    XDI_GIVEN_TO_ALL((comm) ? (comm)->ctx : NULL, comm, comm, __VA_ARGS__)
/* Of a call that ranks compare: it tells them itself of an open plan. */
#define XDI_GIVEN_GROUP(comm)              \
    XDI_LIVE(xd_comm, comm);               \
    XDI_CALL((comm) ? (comm)->ctx : NULL); \
    XD_TRY(XDI_CHECK_GIVEN(NULL, comm))
/* As XDI_GIVEN_IN_PLAN. While a plan is open no other rank is informed. */
#define XDI_GIVEN_COMM_IN_PLAN(comm, ...)                                          \
    XDI_LIVE(xd_comm, comm);                                                       \
    XDI_CALL((comm) ? (comm)->ctx : NULL);                                         \
    XD_TRY(xdi_comm_given((comm) && xdi_plan_is_open((comm)->ctx) ? NULL : (comm), \
                          XDI_CHECK_GIVEN_AS((comm) ? (comm)->ctx : NULL, true, comm, __VA_ARGS__)))

/* record.c: what this rank alone can find wrong with a record. */
XD_PRIVATE xd_result xdi_comm_validate(const xd_comm *comm, const xd_collective *c);

/* record.c: when a call that begins now has lasted too long; and a transport's error, which breaks the group for good: returned. */
XD_PRIVATE double xdi_comm_deadline(const xd_comm *comm);
XD_PRIVATE xd_result xdi_comm_break(xd_comm *comm, xd_result result);

/* record.c: what all ranks are told of a record; sends it and fills comm->all, `next` being what is executed if they agree,
 * or NULL; and the error that follows from what they have said. */
XD_PRIVATE xd_control xdi_comm_control(const xd_comm *comm, const xd_collective *c, xd_result status);
XD_PRIVATE xd_result xdi_comm_exchange(xd_comm *comm, const xd_control *mine, const xd_collective *next,
                                       double deadline);
/* record.c: before all that, whether the transport admits the call now. When `mine` is an error already, that one is returned
 * for a call that is not admitted. */
XD_PRIVATE xd_result xdi_comm_admit(const xd_comm *comm, const xd_collective *next, xd_result mine);
XD_PRIVATE xd_result xdi_comm_agreement(xd_comm *comm, const xd_collective *c, xd_result mine,
                                        double deadline);

/* record.c: a number from which the one before cannot be told; what hashes of records are made of. */
XD_PRIVATE uint64_t xdi_comm_mix(uint64_t x);

/* record.c: what is compared of the control records. */
typedef enum xdi_comm_field {
    XDI_COMM_KIND,
    XDI_COMM_DTYPE,
    XDI_COMM_OP,
    XDI_COMM_ROOT,
    XDI_COMM_MODE,
    XDI_COMM_FLOATS,
    XDI_COMM_PRODUCTS,
    XDI_COMM_COUNT,
    XDI_COMM_LAYOUT,
    XDI_COMM_FIELDS
} xdi_comm_field;

/* record.c: two more numbers of every rank, into comm->all; the error that names the first two ranks whose `field` differs. */
XD_PRIVATE xd_result xdi_comm_tell(xd_comm *comm, uint64_t first, uint64_t second, double deadline);
XD_PRIVATE xd_result xdi_comm_compare(const xd_comm *comm, const char *kind, int field, const char *name);

/* record.c: sum of n counts. */
XD_PRIVATE int64_t xdi_comm_total(const int64_t *counts, int n);

/* record.c: offset of block `rank` in elements; displacements NULL -> back to back. */
XD_PRIVATE int64_t xdi_comm_offset(const int64_t *counts, const int64_t *displacements, int rank);

/* record.c: the elements [*begin, *end) of `count` that rank `rank` of the group reduces in an all_reduce: one of
 * `size` nearly equal blocks. */
XD_PRIVATE void xdi_comm_piece(int64_t count, int size, int rank, int64_t *begin, int64_t *end);

/* record.c: number of elements in c->send on this rank when blocks lie back to back. */
XD_PRIVATE int64_t xdi_comm_send_elements(const xd_collective *c, int rank, int size);

/* collective.c: xd_collective_run, no message; of a rank that has failed before (`mine`), whose error the others are told
 * instead. */
XD_PRIVATE xd_result xdi_comm_collective_as(xd_comm *comm, const xd_collective *collective, xd_result mine);

/* collective.c: xd_all_gather of `count` elements from every rank. */
XD_PRIVATE xd_result xdi_comm_all_gather_equal(xd_comm *comm, const void *send, void *recv, int64_t count,
                                               xd_dtype dtype);

/* record.c: the transport of a handle. */
XD_PRIVATE xd_transport *xdi_comm_transport(const xd_comm *comm);

/* record.c: whether the group's transport can move memory of the context's device. */
XD_PRIVATE bool xdi_comm_moves_device(const xd_comm *comm);

/* record.c: whether calls of the group become part of a graph, in which ranks cannot agree on anything. */
XD_PRIVATE bool xdi_comm_is_recording(const xd_comm *comm);

/* record.c: the world rank that broke the group; -1 when it is whole or nobody knows. */
XD_PRIVATE int xdi_comm_culprit(const xd_comm *comm);

/* record.c: whether this process was forked from the one that is a rank of the group, of several ranks; STATE then, with both
 * processes: what it writes into memory of the group would be taken for that rank's. */
XD_PRIVATE bool xdi_comm_is_forked(const xd_comm *comm);
XD_PRIVATE xd_result xdi_comm_own(const xd_comm *comm);

/* record.c: XD_OK, or what broke the group as far as this handle knows. */
XD_PRIVATE xd_result xdi_comm_broken(const xd_comm *comm);

/* collective.c: xd_exchange; of a rank that has failed and refuses: it takes part in none of the messages, and the other ranks of
 * them get PEER. `patience` is what is added to the time limit, as a part of it. Errors where it refuses: those that break
 * the group. */
XD_PRIVATE xd_result xdi_comm_exchange_as(xd_comm *comm, const xd_collective *records, int count,
                                          bool refuses, double patience);

/* collective.c: the number of the last collective, messages not counted, if it failed on all ranks alike without breaking the
 * group; else 0. Numbers ascend. */
XD_PRIVATE uint64_t xdi_comm_refused_last(const xd_comm *comm);

/* collective.c: xd_agree about what all ranks share, as a directory that one of them has read: every rank fails with the
 * result of the lowest one that failed, and its message; a lack of memory is that rank's own, and PEER on the others. */
XD_PRIVATE xd_result xdi_comm_agree_alike(xd_comm *comm, xd_result mine);

/* collective.c: xd_agree, and MISMATCH when ranks pass different numbers: "<call>: rank 1 passed <name> 3, rank 0 passed 4". */
XD_PRIVATE xd_result xdi_comm_agree_number(xd_comm *comm, xd_result mine, const char *call, const char *name,
                                           int64_t number);

/* collective.c: the same ranks for another context, which outlives *out: see `fork` in transport.h. *out NULL on all ranks
 * where the transport does not offer it. Collective. Errors: MEMORY, those of the communicator. */
XD_PRIVATE xd_result xdi_comm_fork(xd_comm *comm, xd_ctx *ctx, xd_comm **out);

/* Messages that a queue exchanges, as xdi_comm_exchange_as. */
typedef struct xdi_queue_messages {
    xd_collective *records; /* [count] the caller's until the wait */
    int count;
    bool refuses;
    double patience;
} xdi_queue_messages;

/* queue.c: as xd_queue_start, for at least one message; what broke the world, as far as the queue or its communicator knows. */
XD_PRIVATE xd_result xdi_queue_exchange(struct xd_queue *queue, const xdi_queue_messages *messages,
                                        xd_ticket *ticket);
XD_PRIVATE xd_result xdi_queue_broken(struct xd_queue *queue);

/* collective.c: whether xdi_comm_fork may give a handle for another thread. */
XD_PRIVATE bool xdi_comm_forks_for_threads(const xd_comm *comm);

/* collective.c: bytes that a handle of xdi_comm_fork takes on this rank, the transport's with it; 0 where there would be none. */
XD_PRIVATE size_t xdi_comm_fork_bytes(const xd_comm *comm);

/* leaves.c: bytes of a stack's nodes; 0 for a range outside [0, total), negative elements, and overflow of size_t. */
XD_PRIVATE size_t xdi_leaf_stack_bytes(const xd_leaf_stack_desc *desc);

/* queue.c: bytes of a queue, with the communicator of its worker. */
XD_PRIVATE xd_memory_bytes xdi_queue_memory(const struct xd_queue *queue);

/* queue.c: the communicator over which a queue was made. */
XD_PRIVATE xd_comm *xdi_queue_comm(const struct xd_queue *queue);

/* queue.c: a context for a thread beside the caller's: his settings, but one thread, since a pool belongs to one context, and
 * the CPU's kernels. Local. Errors: MEMORY. */
XD_PRIVATE xd_result xdi_queue_context(xd_comm *comm, const char *what, xd_ctx **out);

/* threads.c: whether this is a group of threads. The next two functions are for such groups only. */
XD_PRIVATE bool xdi_threads_has(const xd_comm *comm);

/* threads.c: zeroed memory that all ranks of the group share, created once per group; freed with the group's last
 * handle. Collective. Errors: MEMORY. */
XD_PRIVATE xd_result xdi_threads_share(xd_comm *comm, size_t bytes, void **out);

/* threads.c: waits until *counter, which the group's rank `rank` increases with a release store, reaches
 * `target`. Errors: TIMEOUT and PEER, which break the world. */
XD_PRIVATE xd_result xdi_threads_watch(xd_comm *comm, const uint64_t *counter, uint64_t target, int rank);

/* threads.c: the failure that broke the world; XD_OK while it is whole. */
XD_PRIVATE xd_result xdi_threads_check(xd_comm *comm);

/* collective.c: [size], one leaf of each rank, for sums in rank order in every mode: xd_collective.known_leaves. */
XD_PRIVATE const xd_leaves *xdi_comm_one_each(const xd_comm *comm);

/* leaves.c: xd_leaf_stack_next, whose contents are zeros. Leaves that are added to others leave zeros behind then, on the host,
 * so that few places are cleared by themselves. */
XD_PRIVATE xd_result xdi_leaf_stack_next_zeros(xd_leaf_stack *stack, float **place);

/* collective.c: xd_agree, and MISMATCH with both numbers when ranks pass different counts. */
XD_PRIVATE xd_result xdi_comm_agree_count(xd_comm *comm, xd_result mine, int64_t count);
/* collective.c: the same in a call that a graph may have: there `mine`, as ranks cannot tell each other anything. */
XD_PRIVATE xd_result xdi_comm_agree_or_record(xd_comm *comm, xd_result mine, int64_t count);
/* collective.c: *all receives whether `mine` is true on all ranks. Collective. */
XD_PRIVATE xd_result xdi_comm_all_can(xd_comm *comm, bool mine, bool *all);

/* node.c: memory of the host that the processes of a group on one node share. */
typedef struct xdi_node xdi_node;

/* node.c: creates it, zeroed; *out NULL on every rank when some rank cannot have it: it is on another host, its process
 * has another rank too, or the system refuses. Collective. Errors: those of the communicator. */
XD_PRIVATE xd_result xdi_node_create(xd_comm *comm, size_t bytes, xdi_node **out);
/* node.c: local; call it before comm is destroyed. From then on this rank counts as dead. NULL is fine. */
XD_PRIVATE void xdi_node_destroy(xdi_node *node);
XD_PRIVATE void *xdi_node_memory(const xdi_node *node);

/* node.c: waits until *counter, which the group's rank `rank` increases with a release store, reaches `target`; it may
 * be this rank, when another thread of it increases the counter. Errors: TIMEOUT and PEER; then all ranks that wait on
 * this memory, now or later, get one of them. */
XD_PRIVATE xd_result xdi_node_watch(const xdi_node *node, const uint64_t *counter, uint64_t target, int rank);
/* node.c: the failure that ended somebody's wait for this memory, as `rank`'s waiter reports it; XD_OK without one. */
XD_PRIVATE xd_result xdi_node_check(const xdi_node *node, int rank);
/* node.c: what broke the group, or its world, is what breaks this memory: before a rank leaves because of it. */
XD_PRIVATE void xdi_node_hand_on(const xdi_node *node);
/* node.c: whether another rank's process has ended or has destroyed its handle. */
XD_PRIVATE bool xdi_node_has_died(const xdi_node *node, int rank);

/* node.c: writes zeros into a file. Writing, unlike setting a length, allocates memory at once: a lack of it is an error here, not
 * a signal later. */
XD_PRIVATE bool xdi_node_fill(int file, uint64_t begin, size_t bytes);
/* node.c: takes a lock on one byte of a file; false when another process has it. The system takes it back when this process
 * ends, or closes any descriptor of the file. xdi_node_is_held: whether another process has it. */
XD_PRIVATE bool xdi_node_hold(int file, int byte);
XD_PRIVATE void xdi_node_let_go(int file, int byte);
XD_PRIVATE bool xdi_node_is_held(int file, int byte);

/* facts.c: settings that all ranks must pass alike, by the names that their desc gives them. */
#define XDI_FACTS_MAX 128
typedef enum xdi_fact_kind {
    XDI_FACT_INTEGER,
    XDI_FACT_DTYPE,
    XDI_FACT_NUMBER,
    XDI_FACT_NAME, /* its first eight letters */
    XDI_FACT_HASH,
    XDI_FACT_BYTES
} xdi_fact_kind;
typedef struct xdi_fact {
    const char *part; /* the struct within the desc that has the field; NULL -> the desc itself */
    const char *list; /* the array in there, with the number of the entry; NULL -> the field is in none */
    int item;
    const char *name; /* "" -> the entry itself */
    xdi_fact_kind kind;
    uint64_t bits; /* of the value; the hash of bytes */
    const void *data;
    size_t bytes;
} xdi_fact;
typedef struct xdi_facts {
    int count;
    const char *part; /* of those that are added next, as is */
    const char *list;
    int item;
    xdi_fact at[XDI_FACTS_MAX];
} xdi_facts;
/* facts.c: a list without any. */
XD_PRIVATE void xdi_facts_begin(xdi_facts *facts);
/* facts.c: add one; names and data are borrowed. */
XD_PRIVATE void xdi_fact_integer(xdi_facts *facts, const char *name, int64_t value);
XD_PRIVATE void xdi_fact_dtype(xdi_facts *facts, const char *name, xd_dtype value);
XD_PRIVATE void xdi_fact_number(xdi_facts *facts, const char *name, double value);
XD_PRIVATE void xdi_fact_name(xdi_facts *facts, const char *name, const char *value);
XD_PRIVATE void xdi_fact_hash(xdi_facts *facts, const char *name, uint64_t hash);
XD_PRIVATE void xdi_fact_bytes(xdi_facts *facts, const char *name, const void *data, size_t bytes);
/* facts.c: those that are added next are of an entry of an array; or, with `list` NULL, of none. */
XD_PRIVATE void xdi_facts_item(xdi_facts *facts, const char *list, int item);
/* facts.c: over a list, of which only the number of its entries can be told. Collective. */
XD_PRIVATE xd_result xdi_agree_list(xd_comm *comm, int64_t count, uint64_t hash, const char *what);
/* facts.c: all of a topology: 2, and 2 for each axis. */
XD_PRIVATE void xdi_facts_topology(xdi_facts *facts, const xd_topology *topology);
/* facts.c: xd_hash over all values, bytes themselves instead of their hash. */
XD_PRIVATE uint64_t xdi_facts_hash(uint64_t seed, const xdi_facts *facts);
/* facts.c: xd_agree_same over a list of the same names on every rank, in the same exchange. The error names the first setting that
 * differs, with both values. */
XD_PRIVATE xd_result xdi_agree_facts(xd_comm *comm, const xdi_facts *facts, const char *what);

#endif
