/* demo_data.h - which files of a folder of data a run reads. */
#ifndef DEMO_DATA_H
#define DEMO_DATA_H

#include "demo.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef char demo_path[512];

/* The layout that data/README.md tells. What may be missing is taken from the folder `data` of the repository, whose
 * names for the texts are known here, too. */
typedef struct demo_data {
    demo_path text;      /* text.txt: what students read */
    demo_path heldout;   /* heldout.txt: what all are measured on */
    demo_path tokenizer; /* student/: the folder of their tokenizer.json; may be missing */
    demo_path teacher;   /* teacher/: a model directory; may be missing */
    demo_path cache;     /* teacher.xdcache: what a teacher said about text.txt; may be missing, "" then */
} demo_data;

/* trains -> text.txt is needed, too. Errors: MISSING for a text, with both names that it may have. */
xd_result demo_data_find(xd_ctx *ctx, const char *directory, bool trains, demo_data *out);

#ifdef __cplusplus
}
#endif

#endif /* DEMO_DATA_H */
