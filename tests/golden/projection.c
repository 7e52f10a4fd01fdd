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

static bool weights_claims(const golden_case *c) {
    return golden_origin_has(c, "::create_weight_distribution") && golden_has(c, "out.n1");
}

static void weights_run(golden_case *c) {
    for (int i = 0; i < golden_tensor_count(c); i++) {
        const golden_array expected = golden_tensor(c, golden_tensor_name(c, i));
        double *weights = doubles(c, expected.count);
        xd_piece_weights(expected.count, weights);
        golden_double(c, golden_tensor_name(c, i), weights, expected.count);
    }
}

static bool sinkhorn_claims(const golden_case *c) {
    return golden_origin_has(c, "::sinkhorn_one_dim");
}

static void sinkhorn_run(golden_case *c) {
    const golden_array in = golden_tensor(c, "in.matrix");
    double *matrix = doubles(c, in.count);
    memcpy(matrix, in.values, (size_t)in.count * sizeof *matrix);
    xd_normalise_rows(matrix, in.shape[0], in.shape[1]);
    for (int i = 0; i < golden_tensor_count(c); i++)
        if (strncmp(golden_tensor_name(c, i), "out.", 4) == 0)
            golden_double(c, golden_tensor_name(c, i), matrix, in.count);
}

static bool cut_claims(const golden_case *c) {
    return golden_origin_has(c, "::sort_and_cut_projection_matrix");
}

static void cut_run(golden_case *c) {
    const xd_projection_rows in = rows_of(c, "in.indices", "in.likelihoods");
    for (int last = 0; last < 2; last++) {
        const xd_projection_cut_desc desc = { (int64_t)golden_number(c, "cfg.new_top_k", 4.0), last != 0,
                                              false };
        const char *ids = last ? "out.indices_preserve_last" : "out.indices";
        const char *weights = last ? "out.likelihoods_preserve_last" : "out.likelihoods";
        xd_projection_rows out;
        if (!golden_ok(c, xd_projection_rows_cut(golden_ctx(c), &in, &desc, &out))) return;
        golden_exact(c, ids, ids_of(c, &out), out.rows * out.k);
        golden_close(c, weights, weights_of(c, &out), out.rows * out.k);
        xd_projection_rows_destroy(golden_ctx(c), &out);
    }
}

/* ---- similarities ---- */

/* Ids of equal similarity may come in any order, and any of them may be the last: the weights must be equal,
 * and an id that the expected row lacks must have the weight of the row's last. */
static void check_best(golden_case *c, const char *name, const xd_projection_rows *rows) {
    const golden_array expected = golden_tensor(c, name);
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
    const xd_similarity_desc desc = { (int64_t)golden_number(c, "cfg.top_k", 0.0),
                                      golden_number(c, "cfg.weight_threshold", 0.0) };
    const bool embeddings = golden_has(c, "in.embeddings_student");
    const golden_array a = golden_tensor(c, embeddings ? "in.embeddings_student" : "in.similarities");
    const xd_rows first = xd_rows_of(golden_f32(c, &a), XD_DTYPE_F32, a.shape[0], a.shape[1]);
    xd_projection_rows rows;
    xd_result result;
    if (embeddings) {
        const golden_array b = golden_tensor(c, "in.embeddings_teacher");
        const xd_rows second = xd_rows_of(golden_f32(c, &b), XD_DTYPE_F32, b.shape[0], b.shape[1]);
        result = xd_projection_rows_from_embeddings(golden_ctx(c), first, second, &desc, &rows);
    } else {
        result = xd_projection_rows_from_similarities(golden_ctx(c), first, &desc, &rows);
    }
    if (!golden_ok(c, result)) return;
    check_best(c, "out.indices", &rows);
    golden_close(c, golden_has(c, "out.likelihoods") ? "out.likelihoods" : "out32.likelihoods",
                 weights_of(c, &rows), rows.rows * rows.k);
    xd_projection_rows_destroy(golden_ctx(c), &rows);
}

/* ---- votes ---- */

/* Both vocabularies of a case. */
typedef struct vocabularies {
    golden_case *c;
    xd_json *vocab[2], *decoded[2], *pieces[2]; /* student, teacher */
    xd_text *names[2];
    int64_t size[2];
    xd_votes *votes;
} vocabularies;

static bool has_flag(const golden_case *c, const char *flag) {
    const char *flags = golden_text(c, "cfg.flags");
    return flags && strstr(flags, flag) != NULL;
}

static bool votes_open(golden_case *c, vocabularies *v) {
    static const char *const sides[2] = { "student", "teacher" };
    const bool canonical = golden_flag(c, "cfg.use_canonicalization", false);
    memset(v, 0, sizeof *v);
    v->c = c;
    for (int side = 0; side < 2; side++) {
        char key[64];
        snprintf(key, sizeof key, "vocab.%s", sides[side]);
        v->vocab[side] = parse(c, key);
        snprintf(key, sizeof key, "decoded.%s", sides[side]);
        v->decoded[side] = parse(c, key);
        snprintf(key, sizeof key, "reencoded%s.%s", canonical ? "_canonical" : "", sides[side]);
        v->pieces[side] = parse(c, key);
        v->names[side] = strings(c, v->vocab[side], &v->size[side]);
    }
    return golden_ok(c, xd_votes_create(golden_ctx(c), v->size[0], v->size[1], &v->votes));
}

static void votes_close(vocabularies *v) {
    for (int side = 0; side < 2; side++) {
        xd_json_destroy(golden_ctx(v->c), v->vocab[side]);
        xd_json_destroy(golden_ctx(v->c), v->decoded[side]);
        xd_json_destroy(golden_ctx(v->c), v->pieces[side]);
    }
    xd_votes_destroy(v->votes);
}

/* Ids of the two tokens that cast no votes; the programs skip them on both sides. */
static int64_t skipped_ids(const vocabularies *v, int side, int64_t *ids) {
    static const char *const names[2] = { "<|endoftext|>", "<eos>" };
    int64_t n = 0;
    for (int64_t id = 0; id < v->size[side]; id++)
        for (int i = 0; i < 2; i++) {
            const xd_text text = v->names[side][id];
            if (text.size == (int64_t)strlen(names[i]) && memcmp(text.data, names[i], (size_t)text.size) == 0)
                ids[n++] = id;
        }
    return n;
}

static xd_pieces *pieces_of(const vocabularies *v, int side) {
    const xd_json *token = xd_json_first(v->pieces[side]);
    int64_t count = 0;
    const xd_text *texts = strings(v->c, v->decoded[side], &count);
    xd_pieces *out = (xd_pieces *)golden_memory(v->c, (size_t)(count + 1) * sizeof *out);
    for (int64_t i = 0; i < count; i++, token = xd_json_next(token)) {
        int64_t *ids = (int64_t *)golden_memory(v->c, (xd_json_count(token) + 1) * sizeof *ids);
        for (const xd_json *id = xd_json_first(token); id; id = xd_json_next(id))
            xd_json_int64(id, &ids[out[i].count++]);
        out[i].text = texts[i];
        out[i].ids = ids;
    }
    return out;
}

static bool add_pass(vocabularies *v, int side, int64_t max_pieces) {
    int64_t skip[2][8];
    xd_votes_pass pass;
    memset(&pass, 0, sizeof pass);
    pass.tokens = pieces_of(v, side);
    pass.count = v->size[side];
    pass.reverse = side == 1;
    pass.max_pieces = max_pieces;
    pass.skip = skip[0];
    pass.skip_count = skipped_ids(v, side, skip[0]);
    pass.foreign_skip = skip[1];
    pass.foreign_skip_count = skipped_ids(v, 1 - side, skip[1]);
    return golden_ok(v->c, xd_votes_add_pass(v->votes, &pass));
}

static xd_special_pair *special_pairs(vocabularies *v, int64_t most, int64_t *count) {
    const xd_special_desc desc = {
        { v->names[0], v->size[0] }, { v->names[1], v->size[1] }, 0.3, most ? most : 32
    };
    xd_special_pair *pairs = NULL;
    *count = 0;
    golden_ok(v->c, xd_special_pairs(golden_ctx(v->c), &desc, &pairs, count));
    return pairs;
}

static void check_votes(vocabularies *v, const char *index, const char *value) {
    const xd_vote *cells = NULL;
    int64_t count = 0;
    if (!golden_ok(v->c, xd_votes_read(v->votes, &cells, &count))) return;
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
    const int64_t most = (int64_t)golden_number(c, "cfg.tokens_to_cut", 4.0);
    if (votes_open(c, &v) && add_pass(&v, 0, most) &&
        (!golden_flag(c, "cfg.reverse_pass", false) || add_pass(&v, 1, most))) {
        check_votes(&v, "out.index", "out.value");
        xd_json *expected = parse(c, "expect.special_mappings");
        int64_t count = 0;
        xd_special_pair *pairs = special_pairs(&v, 0, &count);
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
    const golden_array expected = golden_tensor(v->c, name);
    const int64_t count = rows->rows * rows->k;
    double *got = weights_of(v->c, rows), *sorted = doubles(v->c, count);
    if (expected.count != count) golden_fail(v->c, "%s has %lld elements", name, (long long)expected.count);
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
static bool tied(const xd_vote *cells, int64_t count, int64_t i) {
    for (int64_t j = 0; j < count; j++)
        if (j != i && cells[j].student_id == cells[i].student_id &&
            fabs(cells[j].weight - cells[i].weight) <= cells[i].weight / 128.0)
            return true;
    return false;
}

static void check_ids(vocabularies *v, const char *stage, const xd_projection_rows *rows) {
    char name[96];
    const xd_vote *cells = NULL;
    int64_t count = 0;
    snprintf(name, sizeof name, "out.%sindices", stage);
    const golden_array expected = golden_tensor(v->c, name);
    golden_ok(v->c, xd_votes_read(v->votes, &cells, &count));
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

static bool pipeline_votes(vocabularies *v) {
    golden_case *c = v->c;
    if (!add_pass(v, 0, 4) || (!has_flag(c, "--disable-reverse-pass") && !add_pass(v, 1, 4))) return false;
    if (has_flag(c, "--disable-special-token-mapping")) return true;
    int64_t count = 0;
    xd_special_pair *pairs = special_pairs(v, (int64_t)golden_number(c, "cfg.top_k", 32.0), &count);
    for (int64_t i = 0; i < count; i++)
        golden_ok(
            c, xd_votes_add(v->votes, pairs[i].student_id, pairs[i].teacher_id, 0.8 * pairs[i].similarity));
    xd_release(golden_ctx(c), pairs);
    return true;
}

static void pipeline_cut(vocabularies *v, const xd_projection_rows *rows, bool preserve_last) {
    golden_case *c = v->c;
    const xd_projection_cut_desc desc = { (int64_t)golden_number(c, "cfg.runtime_top_k", 4.0), preserve_last,
                                          true };
    xd_projection_rows out;
    if (!golden_ok(c, xd_projection_rows_cut(golden_ctx(c), rows, &desc, &out))) return;
    check_stage(v, preserve_last ? "cut_preserve_last_" : "cut_", &out);
    xd_projection_rows_destroy(golden_ctx(c), &out);
}

static void pipeline_run(golden_case *c) {
    vocabularies v;
    xd_projection_rows rows;
    if (votes_open(c, &v) && pipeline_votes(&v)) {
        const xd_projection_rows_desc desc = { (int64_t)golden_number(c, "cfg.top_k", 32.0), true,
                                               !has_flag(c, "--disable-scale-trick") };
        check_votes(&v, "out.counts_index", "out.counts_value");
        if (golden_ok(c, xd_projection_rows_from_votes(v.votes, &desc, &rows))) {
            check_stage(&v, "", &rows);
            check_ids(&v, "", &rows);
            golden_ok(c, xd_projection_rows_apply_exact(golden_ctx(c), &rows,
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
    xd_exact_map map;
    if (!golden_ok(c, xd_exact_map_create(golden_ctx(c), &rows,
                                          (int64_t)golden_number(c, "cfg.teacher_vocab_size", 0.0),
                                          golden_flag(c, "cfg.xtoken_loss", false), &map)))
        return;
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
    const int64_t student = (int64_t)golden_number(c, "cfg.student_vocab_size", 0.0);
    const int64_t teacher = (int64_t)golden_number(c, "cfg.teacher_vocab_size", 0.0);
    if (golden_has(c, "in.proj_indices")) {
        const xd_projection_rows rows = rows_of(c, "in.proj_indices", "in.proj_likelihoods");
        return xd_projection_from_rows(golden_ctx(c), &rows, student, teacher, out);
    }
    const golden_array index = golden_tensor(c, "in.proj_coo_index"),
                       value = golden_tensor(c, "in.proj_coo_value");
    xd_vote *cells = (xd_vote *)golden_memory(c, (size_t)(value.count + 1) * sizeof *cells);
    for (int64_t i = 0; i < value.count; i++) {
        cells[i].student_id = (int32_t)index.values[i];
        cells[i].teacher_id = (int32_t)index.values[value.count + i];
        cells[i].weight = value.values[i];
    }
    const xd_projection_cells list = { cells, value.count, student, teacher };
    return xd_projection_from_cells(golden_ctx(c), &list, out);
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
    const golden_array columns = golden_tensor(c, "in.cols");
    xd_projection p;
    if (!golden_ok(c, sparse_projection(c, &p))) return;
    check_part(c, &p, "", 0, p.student_size, NULL);
    check_part(c, &p, "rows_", (int64_t)golden_number(c, "cfg.row_start", 0.0),
               (int64_t)golden_number(c, "cfg.row_end", 0.0), NULL);
    check_part(c, &p, "cols_", 0, p.student_size, &columns);
    xd_projection_destroy(golden_ctx(c), &p);
}

const golden_kind golden_kinds_projection_parts[] = {
    { "exact map", exact_claims, exact_run },
    { "sparse projection", sparse_claims, sparse_run },
    { NULL, NULL, NULL },
};
