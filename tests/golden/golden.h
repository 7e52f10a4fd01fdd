/* Golden vectors: every file is one case, produced by the code of another library (the peer). golden.c finds the files and
 * counts, worker.c gives each a process, vector.c reads metadata and tensors and compares, device.c gives memory of a GPU to
 * calls; the kinds (ema_optim.c, classic.c, ...) know which public calls answer a case. A kind is chosen by area, origin and
 * configuration, never by the case's name. It looks at every key of the configuration and compares every result: a case
 * passes only when none is left over. */
#ifndef GOLDEN_H
#define GOLDEN_H

#include "xdistill.h"

/* Private functions have vectors too: the library that this program is linked with shows them. */
#if !defined(XD_PRIVATE)
#    define XD_PRIVATE XD_API
#endif
#include "loss_calls.h"
#include "makers.h"
#include "vocab_calls.h"
#include "xd_private.h"

typedef struct golden_case golden_case;

/* A tensor of the file, widened to double. `bits` is the file's own data. */
typedef struct golden_array {
    double *values; /* [count]; owned by the case */
    const void *bits;
    xd_dtype dtype;
    int ndim;
    int64_t shape[8];
    int64_t count;
} golden_array;

/* A kind claims a case by its metadata; the first kind that claims it runs it. */
typedef struct golden_kind {
    const char *name;
    bool (*claims)(const golden_case *c);
    void (*run)(golden_case *c);
} golden_kind;

/* Lists of the kinds, each ended by a NULL name. */
extern const golden_kind golden_kinds_ema[];
extern const golden_kind golden_kinds_optim[];
extern const golden_kind golden_kinds_shard[];
extern const golden_kind golden_kinds_sequence[]; /* in shard.c */
extern const golden_kind golden_kinds_classic[];
extern const golden_kind golden_kinds_xtoken_parts[];
extern const golden_kind golden_kinds_head[]; /* claimed before golden_kinds_classic */
extern const golden_kind golden_kinds_uld[];  /* the same */
extern const golden_kind golden_kinds_align[];
extern const golden_kind golden_kinds_projection[];
extern const golden_kind golden_kinds_projection_parts[];
extern const golden_kind golden_kinds_xtoken[];
extern const golden_kind golden_kinds_dmd[];
extern const golden_kind golden_kinds_dmd_losses[];
extern const golden_kind golden_kinds_dmd_steps[];
extern const golden_kind golden_kinds_chunks[]; /* in xtoken.c; claimed before golden_kinds_xtoken_parts */

xd_ctx *golden_ctx(const golden_case *c);

/* ---- memory of calls: device.c ---- */

#if defined(GOLDEN_CUDA)
typedef xd_cuda golden_device;
#else
typedef void golden_device;
#endif

/* Makes ctx compute on the GPU when this program is the one for GPUs; elsewhere *out is NULL. */
xd_result golden_device_open(xd_ctx *ctx, golden_device **out);
void golden_device_close(golden_device *device);
bool golden_on_device(const xd_ctx *ctx);

/* Arrays that a call works on, lent to it in memory that its context's kernels can access: on the CPU the host's arrays, on a
 * device copies. For one thread. */
enum { GOLDEN_LOANS = 512 };
typedef struct golden_loans {
    xd_ctx *ctx;
    bool nothing_counted; /* in one of the losses so far: zeros stand for what a peer divides by 0 */
    int count;
    struct {
        void *host, *there;
        size_t bytes;
        bool comes_back;
    } loan[GOLDEN_LOANS];
} golden_loans;

void golden_loans_open(golden_loans *l, xd_ctx *ctx);
golden_loans *golden_case_loans(golden_case *c);

/* The address to give to the call; NULL stays NULL. What is lent by `out` is copied back as the call left it. */
const void *golden_in(golden_loans *l, const void *host, size_t bytes);
void *golden_out(golden_loans *l, void *host, size_t bytes);
xd_rows golden_rows_in(golden_loans *l, xd_rows rows);
xd_rows golden_rows_out(golden_loans *l, xd_rows rows);
/* The host's arrays were rewritten: lends them again, at the same addresses. */
void golden_renew(golden_loans *l);
/* Copies back; the loans go on. */
void golden_home(golden_loans *l);
/* After a call, whose result it returns: copies back and ends every loan. */
xd_result golden_back(golden_loans *l, xd_result result);
/* Memory that the library owns, on the host. */
const void *golden_fetch(golden_case *c, const void *there, size_t bytes);

/* A status for a loss, and after the call its result: findings are an error, but for "nothing counted", which the loans
 * keep. */
xd_status *golden_status(golden_loans *l, xd_status *status);
xd_result golden_found(golden_loans *l, xd_result result, xd_status *status);

/* Calls of the library with the host's arrays in their descs, with such a status. */
xd_result golden_loss(golden_loans *l, const xd_loss_desc *desc, xd_loss_values *out);
xd_result golden_cosine_loss(golden_loans *l, const xd_loss_desc *desc, xd_loss_values *out);
xd_result golden_mft_loss(golden_loans *l, const mft_desc *desc, xd_loss_values *out);
xd_result golden_head_loss(golden_loans *l, const xd_head_loss_desc *desc, xd_loss_values *out);
xd_result golden_topk_loss(golden_loans *l, const xd_topk_desc *desc, xd_loss_values *out);
xd_result golden_denominator(golden_loans *l, const xd_positions *positions, xd_denominator *out);
xd_result golden_accuracy(golden_loans *l, const xd_vocab *vocab, xd_rows logits,
                          const xd_positions *positions, double *out);

/* ---- reading ---- */

/* Metadata; keys are written whole ("cfg.beta", "origin", "area"). golden_text gives NULL when the key is absent. The
 * others take null for absent, and a value that is not what they read fails the case with the key's name. */
const char *golden_text(const golden_case *c, const char *key);
bool golden_is(const golden_case *c, const char *key, const char *value);
const char *golden_key(const golden_case *c, int index); /* NULL behind the last */
bool golden_origin_has(const golden_case *c, const char *part);
double golden_number(golden_case *c, const char *key, double absent);
int golden_integer(golden_case *c, const char *key, int absent, int least, int most);
bool golden_flag(golden_case *c, const char *key, bool absent);
/* The value's index in a list that ends with NULL. */
int golden_choice(golden_case *c, const char *key, const char *const *choices, int absent);
/* What can be computed with one number or flag (0, 1) alone. */
void golden_only(golden_case *c, const char *key, double value);
/* A setting of which the library has this value alone: a case with another is skipped, by key and value. */
void golden_lacks(golden_case *c, const char *key, const char *only);
/* A JSON list of numbers, at most `room`; returns how many, -1 when absent. */
int golden_numbers(golden_case *c, const char *key, double *values, int room);
/* Keys or tensors that change nothing here, such as how the peer cut its work; a last '*' stands for any end. The caller
 * says why. */
void golden_inert(golden_case *c, const char *pattern);

/* Tensors. golden_has tests for a name; golden_tensor fails the case when the name is absent, and returns an empty array. */
bool golden_has(const golden_case *c, const char *name);
golden_array golden_tensor(golden_case *c, const char *name);
int golden_tensor_count(const golden_case *c);
const char *golden_tensor_name(const golden_case *c, int index);
/* The array's values as floats, int64s, bytes; memory of the case, freed after it. */
float *golden_f32(golden_case *c, const golden_array *a);
int64_t *golden_i64(golden_case *c, const golden_array *a);
uint8_t *golden_u8(golden_case *c, const golden_array *a);
/* Zeroed, freed after the case; the program stops when there is no memory. */
void *golden_memory(golden_case *c, size_t bytes);

/* Comparisons against result `name`, where the file has it: the tensor out.X, else the number expect.X of the metadata, else
 * out32.X or expect32.X; grad.X, else grad32.X. What a file lacks is not compared, but a file without any result fails.
 * A failure prints name, index, got, expected and bound. M = max |expected|.
 *   golden_close     |got - expected| <= max(1e-5, 8 * check.f32_err) * M + 1e-6  (float32 arithmetic)
 *   golden_gradient  the same with 2e-5
 *   golden_double    |got - expected| <= 1e-9 * M + 1e-9                          (double arithmetic)
 *   golden_exact     equal, NaN equals NaN
 * (Where nothing was counted, a 0 also equals NaN.)
 *   golden_within    |got - expected| <= bound
 *   golden_ulps      F32 or BF16 data, at most `ulps` apart
 * golden_wants tells whether the file has the result in any form, golden_result_count how many elements, -1 without one.
 * golden_compared counts a comparison that a kind makes by itself. */
bool golden_wants(const golden_case *c, const char *name);
int64_t golden_result_count(const golden_case *c, const char *name);
void golden_compared(golden_case *c);
void golden_close(golden_case *c, const char *name, const double *got, int64_t count);
void golden_gradient(golden_case *c, const char *name, const double *got, int64_t count);
void golden_double(golden_case *c, const char *name, const double *got, int64_t count);
void golden_exact(golden_case *c, const char *name, const double *got, int64_t count);
void golden_within(golden_case *c, const char *name, const double *got, int64_t count, double bound);
void golden_ulps(golden_case *c, const char *name, const void *got, xd_dtype dtype, int64_t count, int ulps);
double *golden_widen(golden_case *c, const void *data, xd_dtype dtype, int64_t count);

/* xd_exact_map_create; skips the case where a strict map would be refused for ids that the peer passes over. */
bool golden_exact_map(golden_case *c, const xd_projection_rows *rows, int64_t size, bool relaxed,
                      xd_exact_map *out);

/* A library call that must succeed; else the case fails with the library's message. Returns whether it did. */
bool golden_ok(golden_case *c, xd_result result);
/* Fails the case with a line of text. */
void golden_fail(golden_case *c, const char *format, ...) XD_PRINTF(2, 3);
/* Counts the case as skipped: "not built: <what>". */
void golden_skip(golden_case *c, const char *reason);

#endif
