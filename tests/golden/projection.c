/* Golden cases of projection programs (area align) and of what losses make of them (area xtoken-parts). */
#include "golden.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- tensors and lists ---- */

static double *doubles(golden_case *c, int64_t count) {
    return (double *)golden_memory(c, (size_t)(count + 1) * sizeof(double));
}

/* in.<prefix>indices and in.<prefix>likelihoods as rows; memory of the case. */
static xd_projection_rows rows_of(golden_case *c, const char *indices, const char *likelihoods) {
    const golden_array ids = golden_tensor(c, indices), weights = golden_tensor(c, likelihoods);
    xd_projection_rows rows = { NULL, golden_f32(c, &weights), ids.shape[0], ids.shape[1] };
    rows.ids = (int32_t *)golden_memory(c, (size_t)(ids.count + 1) * sizeof *rows.ids);
    for (int64_t i = 0; i < ids.count; i++) rows.ids[i] = (int32_t)ids.values[i];
    return rows;
}

static double *ids_of(golden_case *c, const xd_projection_rows *rows) {
    const int64_t count = rows->rows * rows->k;
    double *out = doubles(c, count);
    for (int64_t i = 0; i < count; i++) out[i] = (double)rows->ids[i];
    return out;
}

static double *weights_of(golden_case *c, const xd_projection_rows *rows) {
    return golden_widen(c, rows->weights, XD_DTYPE_F32, rows->rows * rows->k);
}

static xd_json *parse(golden_case *c, const char *key) {
    const char *text = golden_text(c, key);
    xd_json *root = NULL;
    if (text)
        golden_ok(c, xd_json_load_memory(golden_ctx(c), NULL, text, strlen(text), &root));
    else
        golden_fail(c, "no metadata %s", key);
    return root;
}

/* Strings of the metadata; they live as long as the document. */
static xd_text *strings(golden_case *c, const xd_json *list, int64_t *count) {
    xd_text *texts = (xd_text *)golden_memory(c, (xd_json_count(list) + 1) * sizeof *texts);
    int64_t n = 0;
    for (const xd_json *item = xd_json_first(list); item; item = xd_json_next(item)) {
        size_t bytes = 0;
        texts[n].data = xd_json_string(item, &bytes);
        texts[n++].size = (int64_t)bytes;
    }
    *count = n;
    return texts;
}

/* ---- small programs ---- */

/* With the tensor of this name, if it is a result: of double arithmetic or of float32. */
static void compare_table(golden_case *c, const char *name, const double *got, int64_t count) {
    if (strncmp(name, "out.", 4) == 0)
        golden_double(c, name, got, count);
    else if (strncmp(name, "out32.", 6) == 0)
        golden_close(c, name, got, count);
}

static bool weights_claims(const golden_case *c) {
    return golden_origin_has(c, "::create_weight_distribution");
}

static void weights_run(golden_case *c) {
    for (int i = 0; i < golden_tensor_count(c); i++) {
        const int64_t count = golden_result_count(c, golden_tensor_name(c, i));
        double *weights = doubles(c, count);
        if (count < 1) continue;
        xdi_piece_weights(count, weights);
        compare_table(c, golden_tensor_name(c, i), weights, count);
    }
}

static bool sinkhorn_claims(const golden_case *c) {
    return golden_origin_has(c, "::sinkhorn_one_dim");
}

static void sinkhorn_run(golden_case *c) {
    const golden_array in = golden_tensor(c, "in.matrix");
    double *matrix = doubles(c, in.count);
    memcpy(matrix, in.values, (size_t)in.count * sizeof *matrix);
    xdi_normalise_rows(matrix, in.shape[0], in.shape[1]);
    for (int i = 0; i < golden_tensor_count(c); i++)
        compare_table(c, golden_tensor_name(c, i), matrix, in.count);
}

static bool cut_claims(const golden_case *c) {
    return golden_origin_has(c, "::sort_and_cut_projection_matrix");
}

static void cut_run(golden_case *c) {
    const xd_projection_rows in = rows_of(c, "in.indices", "in.likelihoods");
    for (int last = 0; last < 2; last++) {
        const xdi_projection_cut_desc desc = { (int64_t)golden_number(c, "cfg.new_top_k", 4.0), last != 0,
                                               false };
        const char *ids = last ? "out.indices_preserve_last" : "out.indices";
        const char *weights = last ? "out.likelihoods_preserve_last" : "out.likelihoods";
        xd_projection_rows out;
        if (!golden_ok(c, xdi_projection_rows_cut(golden_ctx(c), &in, &desc, &out))) return;
        golden_exact(c, ids, ids_of(c, &out), out.rows * out.k);
        golden_close(c, weights, weights_of(c, &out), out.rows * out.k);
        xd_projection_rows_destroy(golden_ctx(c), &out);
    }
}

/* ---- similarities ---- */

/* Ids of equal similarity may come in any order, and any of them may be the last: the weights must be equal,
 * and an id that the expected row lacks must have the weight of the row's last. */
static void check_best(golden_case *c, const char *name, const xd_projection_rows *rows) {
    if (!golden_has(c, name)) return;
    const golden_array expected = golden_tensor(c, name);
    golden_compared(c);
    if (expected.count != rows->rows * rows->k) {
        golden_fail(c, "%s has %lld elements, not %lld", name, (long long)expected.count,
                    (long long)(rows->rows * rows->k));
        return;
    }
    for (int64_t i = 0; i < expected.count; i++) {
        const int64_t row = i / rows->k * rows->k, last = row + rows->k - 1;
        bool found = false;
        for (int64_t j = row; j <= last; j++) found = found || (double)rows->ids[i] == expected.values[j];
        if (!found && rows->weights[i] != rows->weights[last])
            golden_fail(c, "%s: row %lld has no id %d", name, (long long)(i / rows->k), (int)rows->ids[i]);
    }
}

static bool similarity_claims(const golden_case *c) {
    return golden_origin_has(c, "::generate_projection_map_chunk") ||
           golden_origin_has(c, "::compute_chunked_projection_map");
}

static void similarity_run(golden_case *c) {
    const xdi_similarity_desc desc = { (int64_t)golden_number(c, "cfg.top_k", 0.0),
                                       golden_number(c, "cfg.weight_threshold", 0.0) };
    const bool embeddings = golden_has(c, "in.embeddings_student");
    golden_inert(c, "cfg.chunk_size"); /* rows that the peer takes at a time */
    const golden_array a = golden_tensor(c, embeddings ? "in.embeddings_student" : "in.similarities");
    const xd_rows first = xd_rows_of(golden_f32(c, &a), XD_DTYPE_F32, a.shape[0], a.shape[1]);
    xd_projection_rows rows;
    xd_result result;
    if (embeddings) {
        const golden_array b = golden_tensor(c, "in.embeddings_teacher");
        const xd_rows second = xd_rows_of(golden_f32(c, &b), XD_DTYPE_F32, b.shape[0], b.shape[1]);
        result = xdi_projection_rows_from_embeddings(golden_ctx(c), first, second, &desc, &rows);
    } else {
        result = xdi_projection_rows_from_similarities(golden_ctx(c), first, &desc, &rows);
    }
    if (!golden_ok(c, result)) return;
    check_best(c, golden_has(c, "out.indices") ? "out.indices" : "out32.indices", &rows);
    golden_close(c, "out.likelihoods", weights_of(c, &rows), rows.rows * rows.k);
    xd_projection_rows_destroy(golden_ctx(c), &rows);
}

/* ---- votes ---- */

/* How the program casts its votes: options of its command line, or of the function that was called. */
typedef struct vote_options {
    bool canonical, raw, reverse, special, exact, scale_trick;
    double max_pieces, top_k, special_threshold, special_top_k; /* special_top_k 0: as top_k */
    double examples;                                            /* only printed */
} vote_options;

/* Both vocabularies of a case. */
typedef struct vocabularies {
    golden_case *c;
    vote_options options;
    xd_json *ignored; /* names of tokens that cast no votes; NULL: the program's own two */
    xd_json *vocab[2], *decoded[2], *pieces[2]; /* student, teacher */
    xd_text *names[2];
    int64_t size[2];
    xd_votes *votes;
} vocabularies;

static vote_options options_of_function(golden_case *c) {
    vote_options o = { false, false, false, true, false, false, 4.0, 32.0, 0.3, 0.0, 0.0 };
    o.canonical = golden_flag(c, "cfg.use_canonicalization", false);
    o.raw = golden_flag(c, "cfg.use_raw_tokens", false);
    o.reverse = golden_flag(c, "cfg.reverse_pass", false);
    o.max_pieces = golden_integer(c, "cfg.tokens_to_cut", 4, 1, 1024);
    return o;
}

/* Sets what one flag of the command line says; false for a flag that is none of these. */
static bool set_flag(vote_options *o, const char *flag) {
    const struct {
        const char *name;
        bool *field, value;
    } flags[] = {
        { "--enable-scale-trick", &o->scale_trick, true },
        { "--disable-scale-trick", &o->scale_trick, false },
        { "--enable-reverse-pass", &o->reverse, true },
        { "--disable-reverse-pass", &o->reverse, false },
        { "--enable-special-token-mapping", &o->special, true },
        { "--disable-special-token-mapping", &o->special, false },
        { "--enable-exact-match", &o->exact, true },
        { "--use-raw-tokens", &o->raw, true },
        { "--use-canonicalization", &o->canonical, true },
    };
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (strcmp(flag, flags[i].name) == 0) {
            *flags[i].field = flags[i].value;
            return true;
        }
    return false;
}

/* The same for a flag with a number, given as its own argument or behind a '='; *used says which. */
static bool set_number(vote_options *o, const char *flag, const char *next, bool *used) {
    const struct {
        const char *name;
        double *field;
    } numbers[] = {
        { "--tokens-to-cut", &o->max_pieces },
        { "--top-k", &o->top_k },
        { "--special-token-similarity-threshold", &o->special_threshold },
        { "--special-token-top-k", &o->special_top_k },
        { "--num-examples", &o->examples },
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        const size_t length = strlen(numbers[i].name);
        if (strncmp(flag, numbers[i].name, length) != 0 || (flag[length] && flag[length] != '=')) continue;
        const char *text = flag[length] ? flag + length + 1 : next;
        char *end = NULL;
        *used = !flag[length];
        if (text) *numbers[i].field = strtod(text, &end);
        return end && end != text && *end == '\0';
    }
    return false;
}

static vote_options options_of_program(golden_case *c) {
    vote_options o = { false, false, true, true, false, true, 4.0, 32.0, 0.3, 0.0, 0.0 };
    xd_json *flags = golden_text(c, "cfg.flags") ? parse(c, "cfg.flags") : NULL;
    o.top_k = golden_number(c, "cfg.top_k", 32.0);
    for (const xd_json *item = xd_json_first(flags); item; item = xd_json_next(item)) {
        const char *flag = xd_json_string(item, NULL);
        const xd_json *after = xd_json_next(item);
        bool used = false;
        if (flag && set_flag(&o, flag)) continue;
        if (flag && set_number(&o, flag, after ? xd_json_string(after, NULL) : NULL, &used)) {
            if (used) item = after;
            continue;
        }
        golden_fail(c, "cfg.flags: %s is not known, or its value",
                    flag ? flag : "an entry that is no string");
    }
    xd_json_destroy(golden_ctx(c), flags);
    return o;
}

static bool votes_open(golden_case *c, vocabularies *v, const vote_options *options) {
    static const char *const sides[2] = { "student", "teacher" };
    memset(v, 0, sizeof *v);
    v->c = c;
    v->options = *options;
    if (golden_text(c, "cfg.ignore_tokens")) v->ignored = parse(c, "cfg.ignore_tokens");
    for (int side = 0; side < 2; side++) {
        char key[64];
        snprintf(key, sizeof key, "vocab.%s", sides[side]);
        v->vocab[side] = parse(c, key);
        snprintf(key, sizeof key, "decoded.%s", sides[side]);
        v->decoded[side] = parse(c, key);
        snprintf(key, sizeof key, "reencoded%s.%s", options->canonical ? "_canonical" : "", sides[side]);
        v->pieces[side] = parse(c, key);
        v->names[side] = strings(c, v->vocab[side], &v->size[side]);
        if ((int64_t)xd_json_count(v->decoded[side]) != v->size[side] ||
            (int64_t)xd_json_count(v->pieces[side]) != v->size[side])
            golden_fail(c, "vocab.%s has %lld tokens, not as many as the lists of texts and pieces",
                        sides[side], (long long)v->size[side]);
    }
    return golden_ok(c, votes_create(golden_ctx(c), v->size[0], v->size[1], &v->votes));
}

static void votes_close(vocabularies *v) {
    for (int side = 0; side < 2; side++) {
        xd_json_destroy(golden_ctx(v->c), v->vocab[side]);
        xd_json_destroy(golden_ctx(v->c), v->decoded[side]);
        xd_json_destroy(golden_ctx(v->c), v->pieces[side]);
    }
    xd_json_destroy(golden_ctx(v->c), v->ignored);
    xd_votes_destroy(v->votes);
}

static bool is_ignored(const vocabularies *v, xd_text name) {
    static const char *const own[2] = { "<|endoftext|>", "<eos>" };
    for (int i = 0; !v->ignored && i < 2; i++)
        if (name.size == (int64_t)strlen(own[i]) && memcmp(name.data, own[i], (size_t)name.size) == 0)
            return true;
    for (const xd_json *item = xd_json_first(v->ignored); item; item = xd_json_next(item)) {
        size_t bytes = 0;
        const char *text = xd_json_string(item, &bytes);
        if (text && name.size == (int64_t)bytes && memcmp(name.data, text, bytes) == 0) return true;
    }
    return false;
}

/* Ids of the tokens that cast no votes; the programs skip them on both sides. */
static int64_t *skipped_ids(const vocabularies *v, int side, int64_t *count) {
    int64_t *ids = (int64_t *)golden_memory(v->c, (size_t)(v->size[side] + 1) * sizeof *ids);
    *count = 0;
    for (int64_t id = 0; id < v->size[side]; id++)
        if (is_ignored(v, v->names[side][id])) ids[(*count)++] = id;
    return ids;
}

static xdi_vote_pieces *pieces_of(const vocabularies *v, int side) {
    const xd_json *token = xd_json_first(v->pieces[side]);
    int64_t count = 0;
    const xd_text *decoded = strings(v->c, v->decoded[side], &count);
    const xd_text *texts = v->options.raw ? v->names[side] : decoded;
    xdi_vote_pieces *out = (xdi_vote_pieces *)golden_memory(v->c, (size_t)(v->size[side] + 1) * sizeof *out);
    for (int64_t i = 0; i < v->size[side] && token; i++, token = xd_json_next(token)) {
        int64_t *ids = (int64_t *)golden_memory(v->c, (xd_json_count(token) + 1) * sizeof *ids);
        for (const xd_json *id = xd_json_first(token); id; id = xd_json_next(id))
            xd_json_int64(id, &ids[out[i].count++]);
        out[i].text = texts[i];
        out[i].ids = ids;
    }
    return out;
}

static xdi_votes_pass pass_of(const vocabularies *v, int side) {
    xdi_votes_pass pass;
    memset(&pass, 0, sizeof pass);
    pass.tokens = pieces_of(v, side);
    pass.count = v->size[side];
    pass.reverse = side == 1;
    pass.max_pieces = (int64_t)v->options.max_pieces;
    pass.skip = skipped_ids(v, side, &pass.skip_count);
    pass.foreign_skip = skipped_ids(v, 1 - side, &pass.foreign_skip_count);
    return pass;
}

static bool add_pass(vocabularies *v, int side) {
    const xdi_votes_pass pass = pass_of(v, side);
    return golden_ok(v->c, xdi_votes_add_pass(v->votes, &pass));
}

static bool has_id(const int64_t *ids, int64_t count, int64_t id) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] == id) return true;
    return false;
}

/* The program's count of student tokens that vote for several pieces. */
static void check_examples(const vocabularies *v) {
    const xdi_votes_pass pass = pass_of(v, 0);
    int64_t count = 0;
    for (int64_t i = 0; i < pass.count; i++) {
        const xdi_vote_pieces *p = &pass.tokens[i];
        const int64_t n = p->text.size;
        const bool special =
            n >= 4 && memcmp(p->text.data, "<|", 2) == 0 && memcmp(p->text.data + n - 2, "|>", 2) == 0;
        bool votes =
            !special && p->count >= 2 && pass.max_pieces >= 2 && !has_id(pass.skip, pass.skip_count, i);
        for (int64_t k = 0; k < p->count; k++)
            votes = votes && !has_id(pass.foreign_skip, pass.foreign_skip_count, p->ids[k]);
        if (votes) count++;
    }
    golden_only(v->c, "cfg.multi_token_examples", (double)count);
}

static xdi_special_pair *special_pairs(vocabularies *v, int64_t *count) {
    const vote_options *o = &v->options;
    const xdi_special_desc desc = { { v->names[0], v->size[0] },
                                    { v->names[1], v->size[1] },
                                    o->special_threshold,
                                    (int64_t)(o->special_top_k > 0.0 ? o->special_top_k : o->top_k) };
    xdi_special_pair *pairs = NULL;
    *count = 0;
    golden_ok(v->c, xdi_special_pairs(golden_ctx(v->c), &desc, &pairs, count));
    return pairs;
}

static void check_votes(vocabularies *v, const char *index, const char *value) {
    const xdi_vote *cells = NULL;
    int64_t count = 0;
    if (!golden_ok(v->c, xdi_votes_read(v->votes, &cells, &count))) return;
    double *ids = doubles(v->c, 2 * count), *weights = doubles(v->c, count);
    for (int64_t i = 0; i < count; i++) {
        ids[i] = (double)cells[i].student_id;
        ids[count + i] = (double)cells[i].teacher_id;
        weights[i] = cells[i].weight;
    }
    golden_exact(v->c, index, ids, 2 * count);
    golden_double(v->c, value, weights, count);
}

static bool multitoken_claims(const golden_case *c) {
    return golden_origin_has(c, "::add_multitoken_mappings");
}

static void multitoken_run(golden_case *c) {
    vocabularies v;
    const vote_options options = options_of_function(c);
    if (votes_open(c, &v, &options) && add_pass(&v, 0) && (!options.reverse || add_pass(&v, 1))) {
        check_votes(&v, "out.index", "out.value");
        check_examples(&v);
        xd_json *expected =
            golden_text(c, "expect.special_mappings") ? parse(c, "expect.special_mappings") : NULL;
        int64_t count = 0;
        xdi_special_pair *pairs = expected ? special_pairs(&v, &count) : NULL;
        if (expected) golden_compared(c);
        if (count != (int64_t)xd_json_count(expected))
            golden_fail(c, "%lld special pairs, expected %zu", (long long)count, xd_json_count(expected));
        for (int64_t i = 0; i < count; i++) {
            const xd_json *pair = xd_json_at(expected, (size_t)i);
            int64_t s = -1, t = -1;
            double similarity = 0.0;
            xd_json_int64(xd_json_at(pair, 0), &s);
            xd_json_int64(xd_json_at(pair, 1), &t);
            xd_json_double(xd_json_at(pair, 2), &similarity);
            if (s != pairs[i].student_id || t != pairs[i].teacher_id ||
                fabs(similarity - pairs[i].similarity) > 1e-12)
                golden_fail(c, "special pair %lld is %lld, %lld, %.17g", (long long)i,
                            (long long)pairs[i].student_id, (long long)pairs[i].teacher_id,
                            pairs[i].similarity);
        }
        xd_release(golden_ctx(c), pairs);
        xd_json_destroy(golden_ctx(c), expected);
    }
    votes_close(&v);
}

/* ---- the whole pipeline ---- */

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Free slots hold arbitrary ids in the peer's files: weights are compared as multisets of each row, ids only
 * where they have votes. */
static void check_stage(vocabularies *v, const char *stage, const xd_projection_rows *rows) {
    char name[96];
    snprintf(name, sizeof name, "out.%slikelihoods", stage);
    if (!golden_has(v->c, name)) return;
    const golden_array expected = golden_tensor(v->c, name);
    const int64_t count = rows->rows * rows->k;
    double *got = weights_of(v->c, rows), *sorted = doubles(v->c, count);
    golden_compared(v->c);
    if (expected.count != count) {
        golden_fail(v->c, "%s has %lld elements, not %lld", name, (long long)expected.count,
                    (long long)count);
        return;
    }
    memcpy(sorted, expected.values, (size_t)count * sizeof *sorted);
    for (int64_t r = 0; r < rows->rows; r++) {
        qsort(got + r * rows->k, (size_t)rows->k, sizeof *got, compare_doubles);
        qsort(sorted + r * rows->k, (size_t)rows->k, sizeof *sorted, compare_doubles);
    }
    for (int64_t i = 0; i < count; i++)
        if (fabs(got[i] - sorted[i]) > sorted[i] / 128.0) /* one unit of bf16 */
            golden_fail(v->c, "%s: row %lld has %.9g, expected %.9g", name, (long long)(i / rows->k), got[i],
                        sorted[i]);
}

/* Does another vote of the same student id have the same weight up to one unit of bf16? Then either may be selected. */
static bool tied(const xdi_vote *cells, int64_t count, int64_t i) {
    for (int64_t j = 0; j < count; j++)
        if (j != i && cells[j].student_id == cells[i].student_id &&
            fabs(cells[j].weight - cells[i].weight) <= cells[i].weight / 128.0)
            return true;
    return false;
}

static void check_ids(vocabularies *v, const char *stage, const xd_projection_rows *rows) {
    char name[96];
    const xdi_vote *cells = NULL;
    int64_t count = 0;
    snprintf(name, sizeof name, "out.%sindices", stage);
    if (!golden_has(v->c, name)) return;
    const golden_array expected = golden_tensor(v->c, name);
    golden_compared(v->c);
    if (expected.count != rows->rows * rows->k) {
        golden_fail(v->c, "%s has %lld elements, not %lld", name, (long long)expected.count,
                    (long long)(rows->rows * rows->k));
        return;
    }
    golden_ok(v->c, xdi_votes_read(v->votes, &cells, &count));
    for (int64_t i = 0; i < count; i++) {
        bool theirs = false, ours = false;
        for (int64_t j = 0; j < rows->k; j++) {
            const int64_t at = cells[i].student_id * rows->k + j;
            theirs = theirs || expected.values[at] == (double)cells[i].teacher_id;
            ours = ours || rows->ids[at] == cells[i].teacher_id;
        }
        if (theirs != ours && !tied(cells, count, i))
            golden_fail(v->c, "%s: row %d %s id %d", name, (int)cells[i].student_id,
                        ours ? "should not have" : "lacks", (int)cells[i].teacher_id);
    }
}

static bool pipeline_claims(const golden_case *c) {
    return golden_origin_has(c, "(whole program)");
}

/* The names of a side, in canonical form where the program makes it. */
static xd_text *names_of(const vocabularies *v, int side) {
    xd_text *names = (xd_text *)golden_memory(v->c, (size_t)(v->size[side] + 1) * sizeof *names);
    size_t bytes = 0;
    for (int64_t id = 0; id < v->size[side]; id++) bytes += (size_t)v->names[side][id].size + 3;
    char *room = (char *)golden_memory(v->c, bytes);
    for (int64_t id = 0; id < v->size[side]; id++) {
        names[id] = v->names[side][id];
        if (!v->options.canonical) continue;
        const xd_text made = { room, xdi_canonical_token(names[id], room) };
        room += names[id].size + 3;
        names[id] = made;
    }
    return names;
}

/* A student token that the teacher has too votes for it alone; of equal teacher tokens the last is taken. */
static bool pipeline_exact(vocabularies *v) {
    const xd_text *student = names_of(v, 0), *teacher = names_of(v, 1);
    for (int64_t s = 0; s < v->size[0]; s++) {
        int64_t t = v->size[1] - 1;
        while (t >= 0 && (teacher[t].size != student[s].size ||
                          memcmp(teacher[t].data, student[s].data, (size_t)student[s].size) != 0))
            t--;
        if (t >= 0 && !golden_ok(v->c, xdi_votes_set_exact(v->votes, s, t))) return false;
    }
    return true;
}

static bool pipeline_votes(vocabularies *v) {
    golden_case *c = v->c;
    if (!add_pass(v, 0) || (v->options.reverse && !add_pass(v, 1))) return false;
    int64_t count = 0;
    xdi_special_pair *pairs = v->options.special ? special_pairs(v, &count) : NULL;
    for (int64_t i = 0; i < count; i++)
        golden_ok(
            c, xd_votes_add(v->votes, pairs[i].student_id, pairs[i].teacher_id, 0.8 * pairs[i].similarity));
    xd_release(golden_ctx(c), pairs);
    return !v->options.exact || pipeline_exact(v);
}

static void pipeline_cut(vocabularies *v, const xd_projection_rows *rows, bool preserve_last) {
    golden_case *c = v->c;
    const xdi_projection_cut_desc desc = { (int64_t)golden_number(c, "cfg.runtime_top_k", 4.0), preserve_last,
                                           true };
    xd_projection_rows out;
    if (!golden_ok(c, xdi_projection_rows_cut(golden_ctx(c), rows, &desc, &out))) return;
    check_stage(v, preserve_last ? "cut_preserve_last_" : "cut_", &out);
    check_ids(v, preserve_last ? "cut_preserve_last_" : "cut_", &out);
    xd_projection_rows_destroy(golden_ctx(c), &out);
}

static void pipeline_run(golden_case *c) {
    vocabularies v;
    xd_projection_rows rows;
    const vote_options options = options_of_program(c);
    golden_inert(c,
                 "out.dense_normalized"); /* the program's matrix between two stages, which we never have */
    if (votes_open(c, &v, &options) && pipeline_votes(&v)) {
        const xd_projection_rows_desc desc = { (int64_t)options.top_k, true, options.scale_trick };
        check_votes(&v, "out.counts_index", "out.counts_value");
        if (golden_ok(c, xd_projection_rows_from_votes(v.votes, &desc, &rows))) {
            check_stage(&v, "", &rows);
            check_ids(&v, "", &rows);
            golden_ok(c, xdi_projection_rows_apply_exact(golden_ctx(c), &rows,
                                                         (xd_texts){ v.names[0], v.size[0] },
                                                         (xd_texts){ v.names[1], v.size[1] }));
            check_stage(&v, "exact_", &rows);
            check_ids(&v, "exact_", &rows);
            pipeline_cut(&v, &rows, false);
            pipeline_cut(&v, &rows, true);
            xd_projection_rows_destroy(golden_ctx(c), &rows);
        }
    }
    votes_close(&v);
}

const golden_kind golden_kinds_projection[] = {
    { "piece weights", weights_claims, weights_run },
    { "sinkhorn", sinkhorn_claims, sinkhorn_run },
    { "pipeline", pipeline_claims, pipeline_run },
    { "cut", cut_claims, cut_run },
    { "similarity", similarity_claims, similarity_run },
    { "votes", multitoken_claims, multitoken_run },
    { NULL, NULL, NULL },
};

/* ---- exact maps and sparse matrices (xtoken-parts) ---- */

bool golden_exact_map(golden_case *c, const xd_projection_rows *rows, int64_t size, bool relaxed,
                      xd_exact_map *out) {
    for (int64_t i = 0; !relaxed && i < rows->rows * rows->k; i++)
        if (rows->ids[i] >= size) {
            golden_skip(c, "not built: cfg.xtoken_loss = false with teacher ids beyond the vocabulary, which "
                           "strict maps refuse");
            return false;
        }
    return golden_ok(c, exact_map_create(golden_ctx(c), rows, size, relaxed, out));
}

static bool exact_claims(const golden_case *c) {
    return golden_origin_has(c, "::build_exact_token_map");
}

static void check_list(golden_case *c, const char *name, const int32_t *ids, int64_t count) {
    double *values = doubles(c, count);
    for (int64_t i = 0; i < count; i++) values[i] = (double)ids[i];
    golden_exact(c, name, values, count);
}

static void exact_run(golden_case *c) {
    const xd_projection_rows rows = rows_of(c, "in.proj_indices", "in.proj_likelihoods");
    const int64_t size = (int64_t)golden_number(c, "cfg.teacher_vocab_size", 0.0);
    xd_exact_map map;
    if (!golden_exact_map(c, &rows, size, golden_flag(c, "cfg.xtoken_loss", false), &map)) return;
    check_list(c, "out.common_student", map.student, map.pairs);
    check_list(c, "out.common_teacher", map.teacher, map.pairs);
    check_list(c, "out.uncommon_student", map.student_rest, map.student_rest_count);
    check_list(c, "out.uncommon_teacher", map.teacher_rest, map.teacher_rest_count);
    xd_exact_map_destroy(golden_ctx(c), &map);
}

static bool sparse_claims(const golden_case *c) {
    return golden_origin_has(c, "::get_sparse_projection_matrix");
}

static xd_result sparse_projection(golden_case *c, xd_projection *out) {
    int64_t student = (int64_t)golden_number(c, "cfg.student_vocab_size", 0.0);
    int64_t teacher = (int64_t)golden_number(c, "cfg.teacher_vocab_size", 0.0);
    if (golden_has(c, "in.proj_indices")) { /* the peer's matrix is as large as its entries need */
        const xd_projection_rows rows = rows_of(c, "in.proj_indices", "in.proj_likelihoods");
        if (rows.rows > student) student = rows.rows;
        for (int64_t i = 0; i < rows.rows * rows.k; i++)
            if (rows.ids[i] >= teacher) teacher = rows.ids[i] + 1;
        return xd_projection_from_rows(golden_ctx(c), &rows, student, teacher, out);
    }
    const golden_array index = golden_tensor(c, "in.proj_coo_index"),
                       value = golden_tensor(c, "in.proj_coo_value");
    xdi_vote *cells = (xdi_vote *)golden_memory(c, (size_t)(value.count + 1) * sizeof *cells);
    for (int64_t i = 0; i < value.count; i++) {
        cells[i].student_id = (int32_t)index.values[i];
        cells[i].teacher_id = (int32_t)index.values[value.count + i];
        cells[i].weight = value.values[i];
        if (cells[i].student_id >= student) student = cells[i].student_id + 1;
        if (cells[i].teacher_id >= teacher) teacher = cells[i].teacher_id + 1;
    }
    const xdi_projection_cells list = { cells, value.count, student, teacher };
    return xdi_projection_from_cells(golden_ctx(c), &list, out);
}

/* The index of a teacher id in a sorted list of columns; the id itself without a list; -1 when it is not there. */
static int64_t column_place(const golden_array *columns, int32_t id) {
    for (int64_t i = 0; columns && i < columns->count; i++)
        if (columns->values[i] == (double)id) return i;
    return columns ? -1 : id;
}

/* Rows [begin, end) and some columns of the matrix, against "out.<part>index" and "value". */
static void check_part(golden_case *c, const xd_projection *p, const char *part, int64_t begin, int64_t end,
                       const golden_array *columns) {
    char name[64];
    int64_t count = 0;
    double *ids = doubles(c, 2 * p->entries), *values = doubles(c, p->entries);
    double *places = doubles(c, p->entries);
    for (int64_t s = begin; s < end; s++)
        for (int64_t i = p->row_begin[s]; i < p->row_begin[s + 1]; i++) {
            const int64_t place = column_place(columns, p->teacher_id[i]);
            if (place < 0) continue;
            ids[count] = (double)(s - begin);
            places[count] = (double)place;
            values[count++] = (double)p->weight[i];
        }
    memcpy(ids + count, places, (size_t)count * sizeof *ids);
    const double shape[2] = { (double)(end - begin), (double)(columns ? columns->count : p->teacher_size) };
    snprintf(name, sizeof name, "out.%sindex", part);
    golden_exact(c, name, ids, 2 * count);
    snprintf(name, sizeof name, "out.%svalue", part);
    golden_close(c, name, values, count);
    snprintf(name, sizeof name, "out.%sshape", part);
    golden_exact(c, name, shape, 2);
}

static void sparse_run(golden_case *c) {
    golden_array columns;
    xd_projection p;
    memset(&columns, 0, sizeof columns);
    if (golden_has(c, "in.cols")) columns = golden_tensor(c, "in.cols");
    if (!golden_ok(c, sparse_projection(c, &p))) return;
    check_part(c, &p, "", 0, p.student_size, NULL);
    const int64_t begin = golden_integer(c, "cfg.row_start", 0, 0, (int)p.student_size);
    check_part(c, &p, "rows_", begin,
               golden_integer(c, "cfg.row_end", (int)p.student_size, (int)begin, (int)p.student_size), NULL);
    if (columns.values) check_part(c, &p, "cols_", 0, p.student_size, &columns);
    xd_projection_destroy(golden_ctx(c), &p);
}

const golden_kind golden_kinds_projection_parts[] = {
    { "exact map", exact_claims, exact_run },
    { "sparse projection", sparse_claims, sparse_run },
    { NULL, NULL, NULL },
};
