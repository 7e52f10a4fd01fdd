#ifndef XDI_XTOKEN_INTERNAL_H
#define XDI_XTOKEN_INTERNAL_H

#include "align/internal.h"
#include "loss/internal.h"
#include "xtoken/xtoken.h"

/* The floor of the reference's divisions and logarithms. */
#define XDI_XTOKEN_EPSILON XD_XTOKEN_EPSILON

enum { XDI_XTOKEN_TILE_MAX = 65536 };

/* Rows of the student, or of a teacher, by the places of their chunks. */
typedef struct xdi_xtoken_side {
    int64_t *begin; /* [B C + 1] where the rows of a place begin, C places a sequence */
    int64_t *rows;  /* [rows] those whose chunk has a place */
} xdi_xtoken_side;

/* One teacher during a call. Its chunks have places, sequence by sequence: see xdi_xtoken_share. */
typedef struct xdi_xtoken_term {
    const xd_xtoken_teacher *teacher;
    int64_t held;       /* teacher positions of a sequence on this rank */
    int64_t vocabulary; /* V_t */
    int64_t k;          /* columns in J */
    int64_t tile;
    int64_t *student_sizes, *teacher_sizes; /* [B, C] */
    int64_t *order, *place;                 /* [B, C] the chunk of a place, and the place of a chunk or -1 */
    int64_t *shared, *listed;               /* [B] places of chunks that several ranks hold, and all */
    xdi_xtoken_side student_rows, teacher_rows;
    double denominator; /* D */
    double weight;      /* omega */
    double length;      /* ln V_i / ln min V, or 1 */
    bool active;        /* takes part in KD */
    int64_t cell;       /* of its sums, in the order of XDI_XTOKEN_DIVERGENCE and on */
} xdi_xtoken_term;

/* A teacher's cells of x->sums. */
enum {
    XDI_XTOKEN_DIVERGENCE,
    XDI_XTOKEN_TAIL,
    XDI_XTOKEN_AGREEING,
    XDI_XTOKEN_COMPARED,
    XDI_XTOKEN_PER_TEACHER
};

/* Widths of the blocks that teachers use in turn: the largest of each. */
typedef struct xdi_xtoken_sizes {
    int64_t ids, mask, student, teacher, tail, held, tile, slots, begin, entries, scratch, teachers;
} xdi_xtoken_sizes;

/* LIKELIHOOD: what the kind needs beside the workspace. */
typedef struct xdi_likelihood {
    double *sums;    /* cells [2 B C]: l_s of every chunk, then l_t; l_s then becomes d loss / d l */
    double *moments; /* [teacher rows, XD_XTOKEN_MOMENTS] where it reads logits */
    int64_t *rows;   /* [count] of the student that have a gradient */
    double *slopes;  /* [count] d loss / d log-probability of those */
    int64_t count;
} xdi_likelihood;

/* CACHED: where the positions of all chunks are in the cache, the same on every rank that shares the sequences. */
typedef struct xdi_xcached_places {
    int64_t k, most, total;  /* ids a position, teacher rows of a rank, those with a chunk on all ranks */
    int64_t *mine, *all;     /* [2 most] and those of all ranks: chunk and place in the cache of each row */
    int64_t *begin, *filled; /* [B C + 1] where a chunk's places begin; [B C] how many are there, first 0 */
    int64_t *places;         /* [total] ascending within a chunk */
    double *mass;            /* [V_t] zero between uses */
    int32_t *ids;            /* [k] of one position, and their probabilities */
    double *probabilities;
} xdi_xcached_places;

/* CACHED on a device: J and a of all chunks, tile after tile, in memory of their own as a cache's size is known in
 * the call alone. The host's are copied once a call. */
typedef struct xdi_staged_cached {
    int64_t width;               /* tiles have so many offsets */
    int64_t *begin;              /* [tiles + 1] where the entries of a tile begin */
    int64_t *offset;             /* [tiles, width] where, within a tile, those of its chunks begin */
    double *target;              /* a */
    int32_t *ids;                /* J */
    double *q, *settled;         /* the device's: cells of the largest tile, and these as doubles */
    int32_t *slots;              /* the device's: [tile, V_t] places of teacher ids in a chunk's J */
    unsigned char *here, *there; /* the lists; both to be released */
    size_t bytes;                /* of the lists */
} xdi_staged_cached;

/* What the kernels of a device are told of one teacher: lists that the host makes before the first of them. */
typedef struct xdi_xtoken_lists {
    /* [tiles + 1] begins of a tile's rows (SAME: a sequence's); the student's, and their places in the tile */
    int64_t *first, *rows, *places;
    int64_t *teacher_first, *teacher_rows, *teacher_places; /* the same of the teacher */
    int64_t *ids;  /* [B, 2k] J where it is given, and its places in the rows; SAME: [k] where J is all ids */
    uint8_t *mask; /* [teacher rows] who has a say in J */
    int32_t *pair, *other, *rest, *other_rest; /* GOLD: the exact map */
    xd_xtoken_chunk *chunks;          /* [B, C], SAME: [rows]; they come back with their divergences */
    xd_projection projection, copied; /* in memory of the device; what to free of it */
    xdi_likelihood likelihood;
    double *moments; /* LIKELIHOOD: the device's */
    xdi_staged_cached cached;
} xdi_xtoken_lists;

/* A call on a device. The lists lie in one block of the host, from `here` on, and in the same order on the
 * device, so that one copy brings them; the pointers to them are the host's. The other blocks are the device's. */
typedef struct xdi_xtoken_device {
    const xd_kernels *kernels;
    unsigned char *here, *there;
    size_t list_bytes, chunk_bytes; /* chunks are the last of the lists */
    xdi_xtoken_lists *lists;        /* [teacher_count] */
    int64_t *rest;                  /* a list: rows that no teacher looks at */
    uint8_t *written;               /* [rows] */
    int64_t *labels, *argmax;       /* [rows] */
    double *log_probs;              /* [rows] */
    float *maxima;                  /* [most V_t] of columns */
    double *values;                 /* [most k] */
    double *settled, *delta;        /* [2, most tile * k] cells as doubles; [held] */
    double *merged;                 /* [2] what `merge` writes */
    double *moments;                /* [most teacher rows, XD_XTOKEN_MOMENTS] */
    int64_t *teacher_labels;        /* [most teacher rows] */
    int64_t *all_rows;              /* a list: [most teacher rows] 0, 1, ... */
    void *memory;                   /* to be released */
} xdi_xtoken_device;

/* One call: defaults, statistics of rows, and the blocks of whichever teacher is at work. Blocks that sum
 * over rows or ranks are "cells": see xdi_xtoken_add. */
typedef struct xdi_xtoken {
    xd_ctx *ctx;
    xd_launch launch;
    xd_xtoken_kernels kernels;
    xd_xtoken_desc d;
    xd_vocab_info vocab;
    int64_t held, columns;  /* student positions of a sequence; columns of this shard */
    double *lse, *lse_one;  /* [rows] log-sum-exp at the temperature and at 1 */
    int64_t *argmax;        /* [rows] */
    double *log_probs;      /* [rows] of the labels */
    double *row_weight;     /* [rows] 0 where not counted */
    double *ce_factor;      /* [rows] of the cross entropy's gradient */
    uint8_t *written;       /* [rows] the gradient has this row */
    float *u;               /* [columns] */
    xdi_xtoken_term *terms; /* [teacher_count] */
    double *sums;           /* cells: what is summed over comm */
    double *row_sums;       /* [rows + 1] cells */
    double token_denominator;
    double kd_weight, ce_weight;
    xd_status found, found_in_rows; /* of this pass, and of the labels alone */
    int64_t *ids;                   /* [most k] J */
    uint8_t *mask;                  /* [most teacher rows] who has a say in J */
    double *student, *teacher;      /* cells of a tile */
    int64_t *rows,
        *places; /* [most of held, the teacher's and ranks] rows at work, and their chunks' places in the tile */
    xd_xtoken_chunk *chunks; /* [most tile] */
    float *scratch;          /* for the kernels */
    xd_xtoken_matrix matrix; /* PROJECTED: the projection in J ... */
    int32_t *slots;          /* ... and for making it: [V_t] */
    int64_t *row_begin;
    int32_t *entry_student, *entry_slot;
    float *entry_weight;
    double *row_delta;         /* [held] cells */
    double *tails, *all_tails; /* GOLD: what a shard tells the others of a chunk, and what all have told */
    double *other_tail;        /* GOLD: the teacher's */
    int64_t *tail_ids;         /* GOLD: both tails' */
    double *moments; /* on a device: [most teacher rows, XD_XTOKEN_MOMENTS] of the teacher that is scored */
    xdi_xtoken_device device;
    void *memory; /* of the host, to be released */
    int selected;
    bool on_device;
    bool fixed; /* INVARIANT: cells are xd_fixed */
    bool write; /* this pass writes the gradient */
    bool owner; /* this rank tells what all ranks of sequence_comm know */
} xdi_xtoken;

/* check.c: the desc with every default filled in, V_t and the size of J of a teacher, and the
 * checks. */
XD_PRIVATE xd_xtoken_desc xdi_xtoken_defaults(const xd_xtoken_desc *desc);
XD_PRIVATE int64_t xdi_xtoken_vocabulary(const xd_xtoken_teacher *t);
XD_PRIVATE int64_t xdi_xtoken_columns(const xd_xtoken_desc *d, const xd_xtoken_teacher *t, int64_t size);
XD_PRIVATE int64_t xdi_xtoken_tile_size(const xd_xtoken_desc *d, const xd_xtoken_teacher *t, int64_t k);
XD_PRIVATE xd_result xdi_xtoken_validate(xd_ctx *ctx, const xd_xtoken_desc *d);

/* ---- xtoken.c ---- */

/* Cells are doubles or, in INVARIANT mode, xd_fixed in the same memory, which has room for either. They are
 * zeroed, added to, and joined over the ranks of up to two groups (NULL -> none); joining leaves doubles.
 * -infinity is a legal term. NaN, and in INVARIANT mode what does not fit, makes the cell NaN. */
XD_PRIVATE void xdi_xtoken_zero(const xdi_xtoken *x, double *cells, int64_t count);
XD_PRIVATE void xdi_xtoken_add(const xdi_xtoken *x, double *cells, int64_t i, double term);
XD_PRIVATE xd_result xdi_xtoken_join(const xdi_xtoken *x, double *cells, int64_t count, xd_comm *first,
                                     xd_comm *second);
/* Adds up cells over one group; they stay what they are. */
XD_PRIVATE xd_result xdi_xtoken_reduce(const xdi_xtoken *x, xd_comm *comm, double *cells, int64_t count);

/* Does the chunk count, and is it looked at (a chunk that is not counted may be compared)? */
XD_PRIVATE bool xdi_xtoken_counts(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c);
XD_PRIVATE bool xdi_xtoken_looks(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c);

/* ---- share.c ---- */

/* Gives the chunks that are looked at their places: first those with tokens on several ranks of sequence_comm, which all of
 * them work on, then this rank's own; another's have none. Their sizes are known. Collective over sequence_comm. */
XD_PRIVATE xd_result xdi_xtoken_share(const xdi_xtoken *x, const xdi_xtoken_term *term);

/* Does this rank add what is known of the chunk to the sums? One of those that work on it does. */
XD_PRIVATE bool xdi_xtoken_tells(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c);

/* Places [first, first + count) of sequence b; sums over rows are joined over comm: NULL where they are complete. */
typedef struct xdi_xtoken_tile {
    int64_t b, first, count;
    xd_comm *comm;
} xdi_xtoken_tile;

/* At most so many tiles of `tile` chunks a sequence; how many there are, of chunks of several ranks and of all, the former
 * first; and one of them. */
XD_PRIVATE int64_t xdi_xtoken_most_tiles(int64_t chunks, int64_t tile);
XD_PRIVATE int64_t xdi_xtoken_shared_tiles(const xdi_xtoken_term *term, int64_t b);
XD_PRIVATE int64_t xdi_xtoken_tiles(const xdi_xtoken_term *term, int64_t b);
XD_PRIVATE xdi_xtoken_tile xdi_xtoken_tile_at(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b,
                                              int64_t index);

/* A side's rows of the tile and their places in it; returns how many. */
XD_PRIVATE int64_t xdi_xtoken_tile_rows(const xdi_xtoken_term *term, const xdi_xtoken_side *side,
                                        const xdi_xtoken_tile *tile, int64_t *rows, int64_t *places);

/* w_c, and what one unit of d(c) adds to the whole loss. */
XD_PRIVATE double xdi_xtoken_weight(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c);
XD_PRIVATE double xdi_xtoken_factor(const xdi_xtoken *x, const xdi_xtoken_term *term);

/* A chunk or position whose loss is not finite. */
XD_PRIVATE void xdi_xtoken_found(xdi_xtoken *x, int64_t row, double value);

/* What the kernels are told of the student's rows: count of x->rows. */
XD_PRIVATE xd_xtoken_args xdi_xtoken_student_args(const xdi_xtoken *x, int64_t count);
/* And of a teacher's. */
XD_PRIVATE xd_xtoken_args xdi_xtoken_teacher_args(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                                  int64_t count);

/* Adds u - p_v shift to a row of the gradient, p the student's probabilities. A row's first visit brings the
 * cross entropy's part; u NULL: that alone. */
XD_PRIVATE xd_result xdi_xtoken_write(xdi_xtoken *x, int64_t row, const float *u, double shift);

/* Chooses x->ids for sequence b, or for all where compat. Collective over sequence_comm, agreed over the
 * vocabulary. */
XD_PRIVATE xd_result xdi_xtoken_choose(xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b);

/* Which of the teacher's rows of sequence b count, in mask [held]; true when all of them have a say. */
XD_PRIVATE bool xdi_xtoken_voters(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, uint8_t *mask);

/* ---- device.c: the same on a device ---- */

/* The lists from the arena of the host and everything else from the device's; false when it does not fit. */
XD_PRIVATE bool xdi_xtoken_device_layout(xdi_xtoken *x, const xdi_xtoken_sizes *s, xd_arena *host,
                                         xd_arena *device);
/* Projections of the host are copied to the device. */
XD_PRIVATE xd_result xdi_xtoken_device_open(xdi_xtoken *x);
XD_PRIVATE void xdi_xtoken_device_close(xdi_xtoken *x, xd_result result);
/* Log-sum-exp of every row, and with labels x->argmax and x->log_probs, and the moments of LIKELIHOOD, for which the
 * host waits. */
XD_PRIVATE xd_result xdi_xtoken_device_stats(xdi_xtoken *x);
/* What all passes use, once weights and chunks are known: CACHED. Collective over comm and the vocabulary. */
XD_PRIVATE xd_result xdi_xtoken_device_begin(xdi_xtoken *x);
/* Moments of all rows of a teacher in moments, for which the host waits; `a` says which. */
XD_PRIVATE xd_result xdi_xtoken_device_moments(const xdi_xtoken *x, const xd_xtoken_args *a, double *moments);
/* All teachers and the rest of the gradient; waits for the divergences. */
XD_PRIVATE xd_result xdi_xtoken_device_pass(xdi_xtoken *x);

/* The device's address of something in the lists, and the arguments of the kernels with the device's memory. */
XD_PRIVATE void *xdi_xtoken_there(const xdi_xtoken *x, const void *list);
XD_PRIVATE xd_xtoken_args xdi_xtoken_device_args(const xdi_xtoken *x, const int64_t *rows,
                                                 const int64_t *places, int64_t count);
/* J of sequence b in x->ids, of ids [0, size): the places of its columns in the teacher's rows. */
XD_PRIVATE xd_result xdi_xtoken_device_choose(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                              const xdi_xtoken_lists *l, int64_t size, int64_t b);
/* A side's rows of one tile after the other: rows, their places in the tile, and where each of the tiles begins. */
XD_PRIVATE void xdi_xtoken_device_rows(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                       const xdi_xtoken_side *side, int64_t *first, int64_t *rows,
                                       int64_t *places);

/* The chunks of a tile, in the lists. */
XD_PRIVATE xd_xtoken_chunk *xdi_xtoken_device_chunks(const xdi_xtoken_term *term, const xdi_xtoken_lists *l,
                                                     const xdi_xtoken_tile *tile);

/* device_gold.c: all chunks of a teacher. */
XD_PRIVATE xd_result xdi_xtoken_device_gold(xdi_xtoken *x, const xdi_xtoken_term *term,
                                            const xdi_xtoken_lists *l);
/* device_same.c: a teacher's lists, and all its positions. */
XD_PRIVATE void xdi_xtoken_device_same_fill(xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xtoken_lists *l);
XD_PRIVATE xd_result xdi_xtoken_device_same(xdi_xtoken *x, const xdi_xtoken_term *term,
                                            const xdi_xtoken_lists *l);
/* device_cached.c: J and a of all chunks, collective like xdi_xtoken_device_begin; their release; what a pass
 * adds to the lists; and all chunks. */
XD_PRIVATE xd_result xdi_xtoken_device_cached_open(xdi_xtoken *x, const xdi_xtoken_term *term,
                                                   xdi_xtoken_lists *l);
XD_PRIVATE void xdi_xtoken_device_cached_close(const xdi_xtoken *x, xdi_xtoken_lists *l);
XD_PRIVATE void xdi_xtoken_device_cached_fill(xdi_xtoken *x, const xdi_xtoken_term *term,
                                              xdi_xtoken_lists *l);
XD_PRIVATE xd_result xdi_xtoken_device_cached(xdi_xtoken *x, const xdi_xtoken_term *term,
                                              const xdi_xtoken_lists *l);

/* ---- the kinds: sums of a term, and the gradient when x->write ---- */
XD_PRIVATE xd_result xdi_xtoken_projected(xdi_xtoken *x, xdi_xtoken_term *term);
/* projected.c: a chunk before its divergence is computed, and what it then adds to the sums. */
XD_PRIVATE xd_xtoken_chunk xdi_projected_chunk(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b,
                                               int64_t c);
XD_PRIVATE void xdi_projected_add_chunk(xdi_xtoken *x, const xdi_xtoken_term *term,
                                        const xd_xtoken_chunk *chunk, int64_t b, int64_t c);
XD_PRIVATE xd_result xdi_xtoken_gold(xdi_xtoken *x, xdi_xtoken_term *term);
/* gold.c: what a chunk, value its KL and delta its tail's part, adds to the sums. */
XD_PRIVATE void xdi_gold_add_chunk(xdi_xtoken *x, const xdi_xtoken_term *term, const xd_xtoken_chunk *chunk,
                                   int64_t b, int64_t c);
/* gold.c: the tails: the k largest probabilities of this shard's ids, behind its likeliest pair in
 * x->tails, and of the teacher's without a partner, in x->other_tail; a shorter list of this shard ends in -1,
 * which is less than any probability. All pointers are memory of the kernels' device. */
XD_PRIVATE xd_result xdi_gold_tails(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t k,
                                    const double *means, const double *others, const int32_t *rest,
                                    const int32_t *other_rest);
/* gold.c: the tails and likeliest pairs of all shards against the teacher's: out as xd_xtoken_merge has
 * it; x->u gets the derivative by alpha where an entry is ours. */
XD_PRIVATE xd_result xdi_gold_merge(const xdi_xtoken *x, int64_t k, double *out);
/* gold.c: entries of the sorted tails. */
XD_PRIVATE int64_t xdi_xtoken_tail(const xd_xtoken_desc *d, const xd_exact_map *map);
XD_PRIVATE xd_result xdi_xtoken_same(xdi_xtoken *x, xdi_xtoken_term *term);
/* same.c: a row before it is compared, the comparison of rows at work, of which `a` tells, and what a row that
 * was compared adds to the sums. */
XD_PRIVATE xd_xtoken_chunk xdi_same_chunk(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t row);
XD_PRIVATE xd_result xdi_same_compare(xdi_xtoken *x, const xdi_xtoken_term *term, xd_xtoken_args *a);
XD_PRIVATE void xdi_same_add_chunk(xdi_xtoken *x, const xdi_xtoken_term *term, const xd_xtoken_chunk *chunk,
                                   int64_t row);
XD_PRIVATE xd_result xdi_xtoken_cached(xdi_xtoken *x, xdi_xtoken_term *term);
/* cached.c: sizes of p, collective over sequence_comm; its blocks; its places, collective again; J and a of one
 * chunk, which has at most `bound` entries, and returns how many; the chunk before it is compared. */
XD_PRIVATE xd_result xdi_xcached_size_places(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                             xdi_xcached_places *p);
XD_PRIVATE void xdi_xcached_layout_places(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                          xdi_xcached_places *p, xd_arena *arena, bool *fits);
XD_PRIVATE xd_result xdi_xcached_find_places(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                             xdi_xcached_places *p);
XD_PRIVATE int64_t xdi_xcached_bound(const xdi_xtoken_term *term, const xdi_xcached_places *p, int64_t slot);
XD_PRIVATE int64_t xdi_xcached_target(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached_places *p,
                                      int64_t slot, int32_t *columns, double *target);
XD_PRIVATE xd_xtoken_chunk xdi_xcached_chunk(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b,
                                             int64_t c, bool compared);
XD_PRIVATE xd_result xdi_xtoken_likelihood(xdi_xtoken *x, xdi_xtoken_term *term);
/* likelihood.c: the blocks that a device is told of and the others; the loss of all chunks, added to the sums,
 * and the rows that have a gradient, collective over sequence_comm. On a device the moments are given. */
XD_PRIVATE void xdi_likelihood_layout_lists(const xdi_xtoken *x, xdi_likelihood *h, xd_arena *arena,
                                            bool *fits);
XD_PRIVATE void xdi_likelihood_layout_work(const xdi_xtoken *x, const xd_xtoken_teacher *t, xdi_likelihood *h,
                                           xd_arena *arena, bool *fits);
XD_PRIVATE xd_result xdi_likelihood_settle(xdi_xtoken *x, const xdi_xtoken_term *term, xdi_likelihood *h);

/* cached.c: does the teacher come as logits? Else as log-probabilities of its tokens, or a cache. */
XD_PRIVATE bool xdi_xtoken_reads_logits(const xd_xtoken_teacher *t);
/* cached.c: log-probability, at temperature 1, of the token that a row of such a teacher predicts;
 * -infinity where there is none. */
XD_PRIVATE double xdi_xtoken_known(const xd_xtoken_teacher *t, int64_t row);
/* cached.c: checks of a teacher without logits, and of both kinds. */
XD_PRIVATE xd_result xdi_xtoken_check_known(xd_ctx *ctx, const xd_xtoken_desc *d, int index);
XD_PRIVATE xd_result xdi_xtoken_check_cached(xd_ctx *ctx, const xd_xtoken_desc *d, int index, int64_t size);
/* likelihood.c */
XD_PRIVATE xd_result xdi_xtoken_check_likelihood(xd_ctx *ctx, const xd_xtoken_desc *d, int index);

/* score.c: adds numerator and denominator of a teacher's score on this rank to two cells. */
XD_PRIVATE xd_result xdi_xtoken_score_sums(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                           xd_xtoken_score score, int64_t cell);
/* score.c: omega of every teacher, and who takes part; scores [teacher_count][2] over comm become
 * means. */
XD_PRIVATE void xdi_xtoken_weigh(xdi_xtoken *x, double *scores);

#endif
