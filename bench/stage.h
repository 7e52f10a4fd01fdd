/* A benchmark of two ranks (team.h) whose arms are opened, stepped and closed by orders: of the program's own rows or, told `serve`,
 * of another program's from standard input, "open ARM", "step ARM", "close ARM", each answered with a line. The names of all arms are
 * printed first then. */
#ifndef XDISTILL_BENCH_STAGE_H
#define XDISTILL_BENCH_STAGE_H

#include "bench.h"
#include "team.h"

typedef struct stage stage;

/* What a benchmark consists of; `which` is an arm. */
typedef struct stage_program {
    const char *(*name)(int which);
    int count;
    void (*open)(stage *st, int which);
    void (*step)(stage *st, int which);
    void (*close)(stage *st, int which);
    void (*answer)(const stage *st, int which); /* prints two numbers of the last step */
    int (*rows)(stage *st, FILE *json);         /* returns how many were wrong */
    size_t scene_bytes;                         /* of what an arm has on a rank, zeros at first */
} stage_program;

/* A rank's. */
struct stage {
    team_rank *me;
    const stage_program *program;
    FILE *json;
    bool serve;
    void *scenes; /* [count] of scene_bytes */
};

enum { STAGE_OPEN, STAGE_STEP, STAGE_CLOSE };

static void *stage_scene(const stage *st, int which) {
    return (char *)st->scenes + (size_t)which * st->program->scene_bytes;
}

static void stage_carry_out(stage *st, team_order order) {
    const stage_program *p = st->program;
    (order.what == STAGE_OPEN ? p->open : order.what == STAGE_STEP ? p->step : p->close)(st, order.which);
}

/* Rank 0: both ranks do it. */
static void *stage_lead(stage *st, int what, int which) {
    const team_order order = { what, which };
    team_tell(st->me, order);
    stage_carry_out(st, order);
    return stage_scene(st, which);
}

static int stage_find(const stage *st, const char *name) {
    for (int i = 0; i < st->program->count; i++)
        if (!strcmp(st->program->name(i), name)) return i;
    fprintf(stderr, "there is no arm \"%s\"\n", name);
    exit(2);
}

/* Orders from standard input, until it ends. */
static void stage_serve(stage *st) {
    char line[64], word[16], name[32];
    const int count = st->program->count;
    for (int i = 0; i < count; i++) printf("%s%s", st->program->name(i), i + 1 < count ? " " : "\n");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "%15s %31s", word, name) != 2) exit(2);
        const int which = stage_find(st, name);
        const int what = !strcmp(word, "open")   ? STAGE_OPEN
                         : !strcmp(word, "step") ? STAGE_STEP
                                                 : STAGE_CLOSE;
        (void)stage_lead(st, what, which);
        st->program->answer(st, which);
        fflush(stdout);
    }
}

static void stage_work(void *rank, void *argument) {
    stage st = *(const stage *)argument;
    st.me = (team_rank *)rank;
    st.scenes = calloc((size_t)st.program->count, st.program->scene_bytes);
    if (!st.scenes) exit(2);
    if (st.me->rank > 0) {
        for (team_order order = team_listen(st.me); order.what != TEAM_LEAVE; order = team_listen(st.me))
            stage_carry_out(&st, order);
        free(st.scenes);
        return;
    }
    int wrong = 0;
    if (st.serve)
        stage_serve(&st);
    else
        printf("# wrong results: %d\n", wrong = st.program->rows(&st, st.json));
    if (wrong) exit(1);
    const team_order leave = { TEAM_LEAVE, 0 };
    team_tell(st.me, leave);
    free(st.scenes);
}

static int stage_main(const stage_program *program, int argc, char **argv) {
    stage st;
    memset(&st, 0, sizeof st);
    st.program = program;
    st.serve = argc == 2 && !strcmp(argv[1], "serve");
    st.json = st.serve ? NULL : bench_open_json(argc, argv);
    team_run(stage_work, &st);
    if (st.json) fclose(st.json);
    return 0;
}

/* ---- rows ---- */

/* An arm of a row. */
typedef struct stage_arm {
    stage *stage;
    int which;
} stage_arm;

/* Opens both arms of a row, and closes them. */
static void stage_open_both(const stage_arm *a, const stage_arm *b) {
    (void)stage_lead(a->stage, STAGE_OPEN, a->which);
    (void)stage_lead(b->stage, STAGE_OPEN, b->which);
}

static void stage_close_both(const stage_arm *a, const stage_arm *b) {
    (void)stage_lead(a->stage, STAGE_CLOSE, a->which);
    (void)stage_lead(b->stage, STAGE_CLOSE, b->which);
}

#endif
