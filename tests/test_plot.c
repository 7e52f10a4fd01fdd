/* test_plot.c - what the demonstrations show: the figure of examples/common and the line of progress. */
#include "xd_test.h"

#include <stdlib.h>
#include <unistd.h>

#include "../examples/common/plot.c"
#include "../examples/common/progress.c"

/* ---- a figure ---- */

enum { STEPS = 40, POINTS = 8, ROOM = 1 << 20 };

typedef struct study {
    float losses[3][STEPS];
    double heldout[3][POINTS];
    int at[POINTS];
    plot_series series[2];
    plot_figure figure;
} study;

/* Two students: "late" of two seeds, which is better at the end, and "early". Losses with a far outlier. */
static study make_study(void) {
    study s;
    memset(&s, 0, sizeof s);
    for (int i = 0; i < POINTS; i++) s.at[i] = (i + 1) * STEPS / POINTS;
    for (int run = 0; run < 3; run++) {
        for (int i = 0; i < STEPS; i++) s.losses[run][i] = 6.0f - 0.1f * (float)i + 0.2f * (float)(i % 3);
        for (int i = 0; i < POINTS; i++)
            s.heldout[run][i] = 3.0 - 0.1 * i - (run < 2 ? 0.25 : 0.0) + 0.01 * run;
    }
    s.losses[0][17] = 90.0f;
    return s;
}

static plot_run run_of(const study *s, int run) {
    plot_run out;
    out.losses = s->losses[run];
    out.steps = STEPS;
    out.heldout = s->heldout[run];
    out.heldout_at = s->at;
    out.points = POINTS;
    out.end = s->heldout[run][POINTS - 1] - 0.5; /* of another text */
    return out;
}

/* The figure as text; the caller frees it. */
static char *draw(study *s) {
    char path[64];
    snprintf(path, sizeof path, "/tmp/xdistill-test-plot-%ld", (long)getpid());
    xd_ctx *ctx = NULL;
    char *text = (char *)calloc(ROOM, 1);
    s->series[0].name = "early & <all>";
    s->series[0].runs[0] = run_of(s, 2);
    s->series[0].run_count = 1;
    s->series[1].name = "late";
    s->series[1].runs[0] = run_of(s, 0);
    s->series[1].runs[1] = run_of(s, 1);
    s->series[1].run_count = 2;
    s->figure.title = "A study";
    s->figure.series = s->series;
    s->figure.series_count = 2;
    s->figure.teacher = 1.25;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(plot_save(ctx, &s->figure, path) == XD_OK);
    CHECK(plot_save(ctx, &s->figure, "build/no such folder/x.svg") == XD_ERROR_IO);
    FILE *file = fopen(path, "rb");
    CHECK(file && fread(text, 1, ROOM - 1, file) > 0);
    if (file) fclose(file);
    remove(path);
    xd_ctx_destroy(ctx);
    return text;
}

static int count_of(const char *text, const char *words) {
    int count = 0;
    for (const char *c = strstr(text, words); c; c = strstr(c + 1, words)) count++;
    return count;
}

/* True when a place is inside of one of the panels. */
static bool inside(double x, double y) {
    const bool left = x >= LEFT_PANEL && x <= LEFT_PANEL + PANEL_WIDTH;
    const bool right = x >= RIGHT_PANEL && x <= RIGHT_PANEL + PANEL_WIDTH;
    return (left || right) && y >= PANEL_TOP && y <= PANEL_TOP + PANEL_HEIGHT;
}

XD_TEST(every_value_is_drawn_inside_of_its_panel_however_far_out_it_is) {
    study s = make_study();
    char *text = draw(&s);
    int points = 0;
    for (const char *line = strstr(text, "points=\""); line; line = strstr(line + 1, "points=\"")) {
        char *at = (char *)line + strlen("points=\"");
        while (*at != '"') {
            const double x = strtod(at, &at), y = strtod(at + 1, &at);
            CHECK(inside(x, y));
            points++;
            while (*at == ' ') at++;
        }
    }
    /* Raw losses of three runs, the bold lines and the means of two students. */
    CHECK_EQ_INT(points, 3 * STEPS + 2 * STEPS + 2 * POINTS);
    CHECK_EQ_INT(count_of(text, "<circle cx="), 3 * POINTS + 2);
    free(text);
}

XD_TEST(students_are_said_to_read_texts_of_their_own_where_they_do) {
    study s = make_study();
    char *text = draw(&s);
    CHECK(strstr(text, ">Training loss<"));
    free(text);
    s.figure.texts_differ = true;
    text = draw(&s);
    CHECK(strstr(text, ">Training loss, each student on its own text<"));
    free(text);
}

XD_TEST(the_legend_has_the_values_at_the_end_the_best_first) {
    study s = make_study();
    char *text = draw(&s);
    const char *legend = strstr(text, "At the end");
    CHECK(legend && strstr(legend, ">late<") && strstr(legend, ">early &amp; &lt;all><"));
    if (legend) CHECK(strstr(legend, ">late<") < strstr(legend, ">early"));
    CHECK(legend && strstr(legend, ">1.555<") && strstr(legend, ">1.820<") && strstr(legend, ">1.250<"));
    CHECK_EQ_INT(count_of(text, "stroke-dasharray"), 2); /* the teacher: its line, and in the legend */
    CHECK(strstr(text, "bits per byte") && strstr(text, "nats per token") &&
          strstr(text, "<title>A study</title>"));
    free(text);
}

XD_TEST(what_is_no_number_is_left_out_of_the_figure) {
    study s = make_study();
    s.losses[1][3] = NAN;
    s.losses[2][4] = INFINITY;
    s.heldout[0][2] = NAN;
    char *text = draw(&s);
    CHECK(!strstr(text, "nan") && !strstr(text, "inf"));
    CHECK_EQ_INT(count_of(text, "<circle cx="), 3 * POINTS + 2 - 1);
    free(text);
}

XD_TEST(marks_of_an_axis_are_round_and_few) {
    const double ranges[] = { 1e-4, 0.37, 1.0, 7.3, 240.0, 5e5 };
    for (int i = 0; i < 6; i++) {
        const plot_axis axis = plot_axis_of(0.1, 0.1 + ranges[i], 0.05);
        const double marks = (axis.high - axis.low) / axis.tick;
        CHECK(marks >= 2.0 && marks <= 7.0);
        CHECK(axis.low < 0.1 && axis.high > 0.1 + ranges[i]);
    }
    CHECK(plot_axis_of(2.0, 2.0, 0.05).high > 2.0); /* one value only */
}

/* ---- progress ---- */

static const char *const parts[] = { "step 120/240", "50%", "best pkl 1.907 bits/byte", "12.3k tokens/s",
                                     "2:05 left" };

XD_TEST(a_line_of_progress_fits_every_terminal) {
    char line[256];
    for (int columns = 1; columns < 120; columns++) {
        const int length = progress_fit(line, sizeof line, columns, parts, 5);
        CHECK(length <= columns && (int)strlen(line) == length);
        if (columns >= 9) CHECK(strstr(line, "2:05 left") != NULL);
    }
    (void)progress_fit(line, sizeof line, 40, parts, 5);
    CHECK(strcmp(line, "step 120/240 | 50% | 2:05 left") == 0);
    (void)progress_fit(line, sizeof line, 0, parts, 5);
    CHECK(strcmp(line, "step 120/240 | 50% | best pkl 1.907 bits/byte | 12.3k tokens/s | 2:05 left") == 0);
    CHECK(progress_fit(line, 20, 0, parts, 5) < 20);
}

XD_TEST(without_a_terminal_a_line_comes_every_thirty_seconds) {
    progress p;
    memset(&p, 0, sizeof p);
    double lines[3], *next = lines;
    for (int second = 5; second <= 70 && next < lines + 3; second++) {
        const double before = p.written;
        progress_show(&p, second, parts, 1, false);
        if (p.written != before && second > 5) *next++ = second;
    }
    CHECK(next == lines + 2 && lines[0] == 35.0 && lines[1] == 65.0);
    progress_show(&p, 71.0, parts, 1, true);
    CHECK(p.written == 71.0); /* the last one always */
}

XD_TEST(times_are_told_in_minutes_and_hours) {
    char text[32];
    CHECK(strcmp(progress_time(text, 59.6), "1:00") == 0);
    CHECK(strcmp(progress_time(text, 3723.0), "1:02:03") == 0);
    CHECK(strcmp(progress_time(text, -5.0), "0:00") == 0);
}

XD_TEST_MAIN()
