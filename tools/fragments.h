/* The names that fragments of C in docs/ use and do not declare. check_docs.py compiles the fragments of docs/NAME.md after this file,
 * with PAGE_NAME defined. Nothing is linked. */
#include "xdistill.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern xd_ctx *ctx;
extern xd_comm *world, *tp;
extern int rank, ranks;
extern int64_t count, rows, columns;
extern xd_vocab *vocab;
extern xd_block *block;
extern xd_block_view view;
extern xd_parallel *parallel;
extern xd_optimizer *optimizer;
extern xd_param params[];

#if defined(PAGE_checkpoints)
extern bool saving;
extern int64_t step, steps;
extern xd_checkpoint_network network;
extern xd_checkpoint_saver *saver;
extern xd_checkpoint_save_desc save;
extern xd_checkpoint_load_desc load;
extern xd_checkpoint_report report;
extern xd_comm *broken;
extern xd_state_inherit_desc inherit;
extern xd_state_tensor tensors[];
extern xd_tensor embedding, head;
extern xd_weights_entry entries[];
extern xd_weights_layout *layout;
extern const void *const data[];
void train(int64_t step);
void make_again(xd_comm *world, xd_state_inherit_desc *inherit);
void put(const void *bytes, uint64_t size, uint64_t place);

#elif defined(PAGE_diffusion)
typedef struct run {
    xd_comm *data;
    int64_t micro_batches;
    const xd_dmd_batch *batches;
} run;
extern float noise[];
extern int64_t samples, elements, height, width;
extern const xd_network_call *call;
extern xd_mix before[], after[];
extern double labels[];
extern void *net;
extern xd_rows tokens, velocity;
xd_result transformer(void *net, xd_rows tokens, const double *times, xd_rows velocity);
xd_result your_optimizer(run *r, int role);

#elif defined(PAGE_fake_score)
extern const xd_model *teacher;
extern xd_comm *data;

#elif defined(PAGE_gpu)
extern void *student_on_gpu, *teacher_on_gpu;
void forward(int64_t step);
void backward(int64_t step);

#elif defined(PAGE_questions)
typedef struct mlp {
    xd_crossing *enter, *leave;
    float *x, *term, *d_term, *d_x;
} mlp;
typedef struct conv {
    xd_halo *halo;
    float *wide;
} conv;
extern xd_model *model;
extern xd_policy policy;
extern xd_build_desc build;
extern xd_built *built;
extern xd_stage_values input, output;
extern float y[];
extern float float_logits[], row[];
extern const void *half_logits;
extern xd_loss_desc loss;
extern xd_tensor logits;
extern int64_t positions, vocabulary, part_count, average_count, kept_count;
extern xd_tensor_part part, parts[];
extern xd_gradient_norm norm;
extern xd_weight *embedding;
extern xd_ema *average;
extern xd_ema_record record;
extern xd_param mine[];
extern xd_post_hoc_profile kept[];
extern xd_checkpoint_average averages[];
extern xd_checkpoint_report report;
extern const char *const units[];
extern const char *text;
extern size_t bytes;
extern double error;
xd_result mlp_allocate(mlp *m, int64_t outside, int64_t inside, int64_t width);
void mlp_columns(mlp *m), mlp_rows(mlp *m), mlp_rows_backward(mlp *m), mlp_columns_backward(mlp *m);
xd_result conv_allocate(conv *c, const int64_t *wide);
void conv_compute(conv *c);
void forward(const xd_stage *stage, const void *x, void *y);
void print_likeliest(const float *row, int64_t vocabulary);
void my_step(void *value, const void *gradient, int64_t count);
double evaluate(xd_model *model);
void write_mine(xd_param shadow);
void write_record(xd_ema_record record);
xd_result train(xd_comm *world, xd_vocab *vocab);
xd_result read_snapshot(void *user, int64_t snapshot, int64_t tensor, void *to);
void print_line(void *user, const char *line);

#elif defined(PAGE_queues)
enum { LAYERS = 4 };
typedef struct model {
    float *gradient[LAYERS];
    int64_t count;
} model;
void layer_backward(model *m, int layer);
void layer_step(model *m, int layer);
void log_line(const char *line);

#elif defined(PAGE_wrappers)
extern xd_comm *data;
extern xd_model *model;
extern xd_weight *weight;
extern xd_block *experts;
extern xd_inputs *inputs;
extern xd_gradient_norm found;
extern size_t hidden;
extern int64_t room, k;
extern float x[], y[], d_x[], d_y[];
extern void *mine;
void forward(const xd_block_view *view, const float *x, float *y);
void backward(const xd_block_view *view, const float *d_y, float *d_x);
xd_result forward_again(void *user, const xd_block_view *view, const void *input);
int64_t tokens_of(int64_t number);
void backward_of_experts(int64_t number, const xd_block_view *view);

#elif defined(PAGE_xtoken)
float *teacher_forward(const int32_t *ids, int64_t tokens, int64_t vocabulary);
float *student_forward(const int32_t *ids, int64_t tokens, int64_t vocabulary);
void student_backward(void *gradient);
#endif
