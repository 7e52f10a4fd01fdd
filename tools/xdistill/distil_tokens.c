/* distil_tokens.c - which tokenizer the student has, and the text in its tokens and in the teacher's. */
#include "bpe.h"
#include "distil.h"
#include "ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the student's tokenizer ---- */

static xd_result own_from_text(distil_run *r) {
    const bpe_desc desc = { r->split.data[TEXT_TRAIN], r->split.bytes[TEXT_TRAIN], r->o->vocabulary, "gpt2" };
    char *json = NULL;
    bool failed = false;
    XD_TRY(bpe_train(r->ctx, &desc, &json, &r->own.json_bytes, NULL));
    r->own.json = (char *)ranks_room(r->ctx, (int64_t)r->own.json_bytes + 1, 1, &failed);
    if (!failed) memcpy(r->own.json, json, r->own.json_bytes);
    free(json);
    return failed ? XD_FAIL(r->ctx, XD_ERROR_MEMORY, "no room for a tokenizer") : XD_OK;
}

static xd_result own_load(distil_run *r) {
    const xd_tokenizer_desc desc = { .data = r->own.json, .data_bytes = r->own.json_bytes };
    static const char *const ends[] = { "<|endoftext|>", "</s>", "<eos>" };
    XD_TRY(xd_tokenizer_load(r->ctx, &desc, &r->own.tokenizer));
    r->own.end_of_text = -1;
    for (int i = 0; i < 3 && r->own.end_of_text < 0; i++) {
        r->own.end_of_text = xd_tokenizer_find_special(r->own.tokenizer, ends[i]);
        snprintf(r->own.end_token, sizeof r->own.end_token, "%s", ends[i]);
    }
    return XD_OK;
}

/* A directory with the teacher's tokenizer is a student as any other. */
static xd_result own_from_directory(distil_run *r) {
    lm student;
    XD_TRY(lm_open(r->ctx, r->o->from, &student));
    const uint64_t hash = xd_tokenizer_describe(student.tokenizer).hash;
    if (hash != xd_tokenizer_describe(r->teacher.tokenizer).hash) {
        r->own.json = student.tokenizer_text;
        r->own.json_bytes = student.tokenizer_bytes;
        r->own.tokenizer = student.tokenizer;
        r->own.end_of_text = student.end_of_text;
        memcpy(r->own.end_token, student.end_token, sizeof r->own.end_token);
        student.tokenizer_text = NULL;
        student.tokenizer = NULL;
    }
    lm_free(r->ctx, &student);
    return XD_OK;
}

xd_result distil_choose_tokenizer(distil_run *r) {
    const distil_options *o = r->o;
    if (o->from) return own_from_directory(r);
    if (!o->tokenizer && !o->vocabulary) return XD_OK;
    if (o->tokenizer) {
        XD_TRY(xd_file_load(r->ctx, o->tokenizer, 0, &r->own.json, &r->own.json_bytes));
        XD_REQUIRE(r->ctx, r->own.json[strspn(r->own.json, " \t\r\n")] == '{', XD_ERROR_FORMAT,
                   "%s is no tokenizer.json: that begins with {", o->tokenizer);
    }
    if (o->vocabulary) XD_TRY(own_from_text(r));
    return own_load(r);
}

void distil_tokenizer_free(distil_run *r) {
    xd_tokenizer_destroy(r->own.tokenizer);
    xd_release(r->ctx, r->own.json);
    memset(&r->own, 0, sizeof r->own);
}

/* ---- texts ---- */

const xd_tokenizer *distil_tokenizer(const distil_run *r) {
    return r->own.tokenizer ? r->own.tokenizer : r->teacher.tokenizer;
}

const tokens *distil_teacher_text(const distil_run *r, text_part part) {
    return r->own.tokenizer ? &r->teacher_text[part] : &r->text[part];
}

xd_result distil_encode(distil_run *r) {
    for (int p = 0; p < TEXT_PARTS; p++) {
        const char *data = r->split.data[p];
        const size_t bytes = r->split.bytes[p];
        XD_TRY(tokens_encode(r->ctx, distil_tokenizer(r), data, bytes, &r->text[p]));
        if (r->own.tokenizer)
            XD_TRY(tokens_encode(r->ctx, r->teacher.tokenizer, data, bytes, &r->teacher_text[p]));
    }
    return XD_OK;
}

xd_result distil_pair(distil_run *r) {
    const int vocabularies[2] = { r->config.vocab, r->teacher.config.vocab };
    if (!r->own.tokenizer) return XD_OK;
    return pairing_create(r->ctx, &r->text[TEXT_TRAIN], &r->teacher_text[TEXT_TRAIN], vocabularies, &r->pair);
}
