/* student.h - the first weights of a student. */
#ifndef STUDENT_H
#define STUDENT_H

#include "lm.h"

typedef enum student_kind {
    STUDENT_LAYERS, /* the first layers of the teacher and its last, its embedding frozen */
    STUDENT_RANDOM, /* random weights */
    STUDENT_FROM    /* a directory */
} student_kind;

typedef struct student_desc {
    student_kind kind;
    int layers;        /* LAYERS, RANDOM */
    int hidden, heads; /* RANDOM */
    int vocabulary;    /* RANDOM: of a tokenizer of its own; 0 -> the teacher's */
    bool own;          /* FROM: the directory's tokenizer is not the teacher's */
    const char *from;  /* FROM */
    uint64_t seed;     /* RANDOM */
} student_desc;

/* Its sizes. Errors: ARGUMENT with both numbers; those of lm_open (FROM); DATA (a directory with the same tokenizer and other columns). */
xd_result student_config(xd_ctx *ctx, const student_desc *desc, const lm *teacher, nn_config *out);

/* *weights, freed with xd_release; the teacher has its weights. */
xd_result student_weights(xd_ctx *ctx, const student_desc *desc, const lm *teacher, const nn_config *config,
                          float **weights);

#endif /* STUDENT_H */
