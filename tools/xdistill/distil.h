/* distil.h - a run of `xdistill distil`: its settings, what it reads, what it leaves. */
#ifndef DISTIL_H
#define DISTIL_H

#include "../../examples/common/folder_lock.h"
#include "../../examples/common/sample.h"
#include "lesson.h"
#include "student.h"

/* The command line; 0 means that the run chooses, and so does a weight or a number of draws below 0. */
typedef struct distil_options {
    const char *teacher, *text, *report_text, *out, *from, *tokenizer;
    int teacher_layers, layers, hidden, heads, vocabulary;
    int steps, batch, row, ranks, likeliest, draws;
    uint64_t seed;
    double kd_weight, ce_weight, temperature, lr, held_out;
    bool alone, no_alone, whole, overwrite, live;
} distil_options;

/* Two arms: with the teacher, and the same student on the text alone. */
typedef enum distil_arm_kind { DISTIL_TAUGHT, DISTIL_ALONE, DISTIL_ARMS } distil_arm_kind;

typedef struct distil_arm {
    lesson lesson;
    double best, last; /* bits per byte of the report's part */
    char sample[SAMPLE_BYTES];
    bool done;
} distil_arm;

/* A tokenizer of the student's own. */
typedef struct distil_own {
    xd_tokenizer *tokenizer; /* NULL -> it has the teacher's */
    char *json;              /* [json_bytes] its tokenizer.json */
    size_t json_bytes;
    int32_t end_of_text; /* -1 -> none is known */
    char end_token[64];
} distil_own;

typedef struct distil_run {
    xd_ctx *ctx;
    distil_options *o;
    folder_lock *lock;
    lm teacher;
    text_split split;
    distil_own own;
    tokens text[TEXT_PARTS];         /* in the student's tokens */
    tokens teacher_text[TEXT_PARTS]; /* in the teacher's, where they are others */
    pairing pair;                    /* of the part to learn from, then */
    student_desc student;
    nn_config config;
    cache_plan plan;
    cached cache;
    char cache_folder[512];
    char facts[1024];
    int steps;
    double gflops; /* of a rank, measured */
    bool wants_alone;
    float *start; /* the student's first weights */
    double teacher_bits;
    double cache_seconds;
    distil_arm arms[DISTIL_ARMS];
} distil_run;

/* distil_tokens.c: the tokenizer of the student, before its sizes are known; then texts, and how they line up. */
xd_result distil_choose_tokenizer(distil_run *r);
void distil_tokenizer_free(distil_run *r);
xd_result distil_encode(distil_run *r);
xd_result distil_pair(distil_run *r);
const xd_tokenizer *distil_tokenizer(const distil_run *r);
const tokens *distil_teacher_text(const distil_run *r, text_part part);

/* distil_folder.c: takes the folder, for a new run or for one that goes on. Errors: STATE (another run has it, a finished run or other
 * files are in it, or a run with other settings), IO. Then what only an interrupted run needs. */
xd_result distil_open_folder(distil_run *r);
void distil_forget_states(const char *out);

/* distil_plan.c: what it will take, before weights are read. Prints it. Errors: MEMORY (with both numbers). */
xd_result distil_plan(distil_run *r);

/* distil_report.c: the table and what it means; files in the folder. */
void distil_print(const distil_run *r);
xd_result distil_write(distil_run *r);

/* A name of an arm, and of the student; the file that an interrupted arm leaves. */
const char *distil_arm_name(distil_arm_kind arm);
void distil_state_path(const distil_run *r, distil_arm_kind arm, char path[512]);
void distil_student_name(const distil_run *r, char out[96]);

#endif /* DISTIL_H */
