/* projection.c - builds the projection from a student's vocabulary to a teacher's, and prints its coverage.
 *
 *   cc -std=c99 -O2 tools/projection.c -o projection -lm -lpthread
 *   ./projection STUDENT/tokenizer.json TEACHER/tokenizer.json -o FILE
 *
 *   ./projection --show FILE
 *
 *   --show FILE              what a file holds, and whether it is whole
 *   -o FILE                  where to write; without it, the cache name in the current directory
 *   --pieces N --keep N      first pieces of a token that get votes (4); teacher ids retained per student id (4)
 *   --reverse                the teacher's tokens vote too
 *   --special                special tokens that look alike vote
 *   --no-exact               tokens that both have are split into pieces like any other
 *   --student-preset NAME    rules of a rank file: gpt2, cl100k, o200k, llama3, llama4, qwen
 *   --teacher-preset NAME
 *
 * Ends with 0, or with 1 and a line that says why. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct arguments {
    const char *path[2]; /* student, teacher */
    xd_tokenizer_desc desc[2];
    const char *out, *shown;
    xd_projection_options options;
} arguments;

static const char *const side_names[] = { "student", "teacher" };

static bool usage(void) {
    fprintf(stderr, "usage: projection STUDENT/tokenizer.json TEACHER/tokenizer.json [-o FILE] [--pieces N] "
                    "[--keep N]\n       [--reverse] [--special] [--no-exact] [--student-preset NAME] "
                    "[--teacher-preset NAME]\n       projection --show FILE\n");
    return false;
}

static bool read_preset(const char *name, xd_tokenizer_preset *preset) {
    static const char *const names[] = { "", "gpt2", "cl100k", "o200k", "llama3", "llama4", "qwen" };
    for (int i = 1; name && i < 7; i++)
        if (strcmp(name, names[i]) == 0) {
            *preset = (xd_tokenizer_preset)i;
            return true;
        }
    return usage();
}

static bool read_number(const char *text, int64_t *number) {
    char *end = NULL;
    const long value = text ? strtol(text, &end, 10) : 0;
    *number = value;
    return (value > 0 && *end == '\0') || usage();
}

/* Reads one argument and its value; false when it is not valid. */
static bool read_argument(char **argv, int *at, arguments *a) {
    const char *name = argv[*at], *value = argv[*at + 1]; /* argv ends with NULL */
    if (name[0] != '-') {
        const int side = a->path[0] ? 1 : 0;
        if (a->path[side]) return usage();
        a->path[side] = name;
        return true;
    }
    if (strcmp(name, "--reverse") == 0) return a->options.reverse = true;
    if (strcmp(name, "--special") == 0) return a->options.special_pairs = true;
    if (strcmp(name, "--no-exact") == 0) return a->options.disable_exact = true;
    ++*at;
    if (strcmp(name, "--show") == 0) return (a->shown = value) != NULL || usage();
    if (strcmp(name, "-o") == 0) return (a->out = value) != NULL || usage();
    if (strcmp(name, "--pieces") == 0) return read_number(value, &a->options.max_pieces);
    if (strcmp(name, "--keep") == 0) return read_number(value, &a->options.k);
    if (strcmp(name, "--student-preset") == 0) return read_preset(value, &a->desc[0].preset);
    if (strcmp(name, "--teacher-preset") == 0) return read_preset(value, &a->desc[1].preset);
    return usage();
}

static double percent(int64_t part, int64_t whole) {
    return whole ? 100.0 * (double)part / (double)whole : 0.0;
}

static void print_matrix(const xd_projection *p) {
    const unsigned long long hash[2] = { p->origin.student_hash, p->origin.teacher_hash };
    for (int i = 0; i < 2; i++) printf("%s tokenizer   %016llx\n", side_names[i], hash[i]);
    printf("matrix              %lld x %lld, %lld entries\n", (long long)p->student_size,
           (long long)p->teacher_size, (long long)p->entries);
}

static void print_report(const xd_projection *p, const xd_projection_report *r) {
    print_matrix(p);
    printf("student tokens      %lld\n", (long long)r->tokens);
    printf("  covered           %lld (%.2f%%)\n", (long long)r->covered, percent(r->covered, r->tokens));
    printf("  the same in both  %lld (%.2f%%)\n", (long long)r->exact, percent(r->exact, r->tokens));
    printf("  without mapping   %lld\n", (long long)(r->tokens - r->covered));
    printf("  pieces cut off    %lld\n", (long long)r->cut);
    printf("pieces a token      %.3f\n", r->mean_pieces);
    printf("bytes lost          %.3f%%\n", 100.0 * r->lost_bytes);
    printf("votes lost          %.3f%%\n", 100.0 * r->lost_mass);
}

/* A damaged file is refused. */
static xd_result show(xd_ctx *ctx, const char *path, xd_projection *p) {
    XD_TRY(xd_projection_load(ctx, &(xd_projection_load_desc){ .path = path }, p));
    print_matrix(p);
    printf("pieces, kept        %lld, %lld\n", (long long)p->origin.options.max_pieces,
           (long long)p->origin.options.k);
    return XD_OK;
}

static xd_result build(xd_ctx *ctx, const arguments *a, xd_tokenizer **tokenizers, xd_projection *p) {
    xd_projection_report report;
    char name[XD_PROJECTION_NAME_BYTES];
    for (int i = 0; i < 2; i++) {
        xd_tokenizer_desc tokenizer = a->desc[i];
        tokenizer.path = a->path[i];
        XD_TRY(xd_tokenizer_load(ctx, &tokenizer, &tokenizers[i]));
    }
    const xd_projection_desc desc = { tokenizers[0], tokenizers[1], &a->options, NULL };
    XD_TRY(xd_projection_build(ctx, &desc, p, &report));
    xd_projection_cache_name(&p->origin, name);
    XD_TRY(xd_projection_save(ctx, a->out ? a->out : name, p));
    print_report(p, &report);
    printf("written to          %s\n", a->out ? a->out : name);
    return XD_OK;
}

int main(int argc, char **argv) {
    arguments a;
    xd_ctx *ctx = NULL;
    xd_tokenizer *tokenizers[2] = { NULL, NULL };
    xd_projection projection;
    memset(&a, 0, sizeof a);
    a.options = xd_projection_defaults();
    memset(&projection, 0, sizeof projection);
    for (int i = 1; i < argc; i++)
        if (!read_argument(argv, &i, &a)) return 1;
    if (!a.path[1] && !a.shown) {
        usage();
        return 1;
    }
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    const xd_result result =
        a.shown ? show(ctx, a.shown, &projection) : build(ctx, &a, tokenizers, &projection);
    if (result != XD_OK) fprintf(stderr, "projection: %s\n", xd_last_error(ctx)->message);
    xd_projection_destroy(ctx, &projection);
    for (int i = 0; i < 2; i++) xd_tokenizer_destroy(tokenizers[i]);
    xd_ctx_destroy(ctx);
    return result == XD_OK ? 0 : 1;
}
