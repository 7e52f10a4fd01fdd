/* demo_table.c - the table of a run, and what its models write. */
#include "demo.h"

#include <math.h>
#include <stdio.h>

/* Mean, and largest minus smallest, of an arm over the seeds. */
static void demo_over_seeds(const demo_job *job, int arm, double *mean, double *spread) {
    double low = INFINITY, high = -INFINITY, sum = 0.0;
    for (int s = 0; s < job->seeds; s++) {
        const double bits = job->results[s * job->arm_count + arm].bits_per_byte;
        low = fmin(low, bits);
        high = fmax(high, bits);
        sum += bits;
    }
    *mean = sum / job->seeds;
    *spread = high - low;
}

/* The arm without a teacher that `other`, which reads as much of the text, is compared with; -1 when none ran. */
static int demo_plain_arm(const demo_job *job, int other) {
    for (int arm = 0; arm < job->arm_count; arm++)
        if (job->arms[arm].signal == DEMO_TEXT_ALONE && job->arms[arm].share == job->arms[other].share)
            return arm;
    return -1;
}

static void demo_table_row(const demo_job *job, int arm, long long parameters) {
    const int plain = demo_plain_arm(job, arm);
    double mean = 0.0, spread = 0.0, plain_mean = 0.0, seconds = 0.0;
    demo_over_seeds(job, arm, &mean, &spread);
    for (int s = 0; s < job->seeds; s++) seconds += job->results[s * job->arm_count + arm].seconds;
    printf("%-16s %10lld %14.4f ", job->arms[arm].name, parameters, mean);
    if (plain >= 0 && plain != arm) {
        demo_over_seeds(job, plain, &plain_mean, &spread);
        printf("%+8.4f ", plain_mean - mean);
        demo_over_seeds(job, arm, &mean, &spread);
    } else {
        printf("%8s ", "");
    }
    if (job->seeds > 1)
        printf("%9.4f ", spread);
    else
        printf("%9s ", "one seed");
    printf("%8.1f\n", seconds / job->seeds);
}

void demo_print_table(const demo_job *job) {
    nn_model whole;
    const char *problem = nn_model_init(job->config, NULL, NULL, &whole);
    printf("\nBits per byte of a text that no model has read; less is better.");
    printf("\n%-16s %10s %14s %8s %9s %8s\n", "", "parameters", "held-out bits", "lead", "max - min",
           "seconds");
    if (job->teacher_result)
        printf("%-16s %10lld %14.4f %8s %9s %8.1f\n", "teacher", (long long)job->teacher->float_count,
               job->teacher_result->bits_per_byte, "", "", job->teacher_result->seconds / job->seeds);
    for (int arm = 0; arm < job->arm_count; arm++)
        demo_table_row(job, arm, problem ? 0 : (long long)whole.float_count);
    nn_model_free(&whole);
    if (job->teacher_result) sample_print("teacher", job->teacher_result->sample);
    for (int arm = 0; arm < job->arm_count; arm++)
        sample_print(job->arms[arm].name, job->results[arm].sample);
}
