/* images_teacher.h - trains the network that the students learn from: rectified flow on labelled images. */
#ifndef IMAGES_TEACHER_H
#define IMAGES_TEACHER_H

#include "images_role.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { IMAGES_TEACHER_MICRO_BATCHES = 8, IMAGES_TEACHER_BATCH = 256 };

/* What it learns, and how long. */
typedef struct images_lesson {
    const dataset *set;
    int steps;
    uint64_t seed;
} images_lesson;

/* Steps of one run; the role was opened with IMAGES_TEACHER_MICRO_BATCHES, and has its average as weights afterwards.
 * `shown`, of rank 0, is called after each step with the mean of the squared error; NULL -> nobody is told. Collective. */
typedef void (*images_told)(void *user, int step, double loss);
xd_result images_teacher_train(images_role *role, const images_lesson *lesson, images_told shown, void *user);

#ifdef __cplusplus
}
#endif

#endif /* IMAGES_TEACHER_H */
