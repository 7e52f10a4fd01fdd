/* name_maps.h - how others call the weights of a Llama: tables for xd_weights_import and xd_weights_export. Ours is a weight
 * for each projection, [out, in]:
 *
 *     embed.weight, blocks.N.{norm_1,norm_2}.weight, blocks.N.{q,k,v,out}.weight, blocks.N.{gate,up,down}.weight, norm.weight, head.weight
 *
 * torchtitan's `q` and `k` keep the two halves of a rotary pair side by side, as Meta's files do; Hugging Face's have them
 * half a head apart. Names do not change that. Examples and users copy what they need. */
#ifndef NAME_MAPS_H
#define NAME_MAPS_H

enum { NAME_MAP_MOST = 512 };

/* A list of entries that is being made. */
typedef struct name_maps {
    xd_weight_map maps[NAME_MAP_MOST];
    int64_t count;
} name_maps;

static inline void name_map(name_maps *m, const char *theirs, const char *ours) {
    const xd_weight_map map = { .theirs = theirs, .ours = ours };
    if (m->count < NAME_MAP_MOST) m->maps[m->count++] = map;
}

/* Rows [their_begin, their_begin + length) of theirs are rows [our_begin, our_begin + length) of ours. `dim` is 1 where their
 * tensor has a dimension for the layers in front. */
static inline void name_rows(name_maps *m, const char *theirs, const char *ours, int dim, int64_t their_begin,
                             int64_t our_begin, int64_t length) {
    const xd_weight_map map = { .theirs = theirs,
                                .ours = ours,
                                .dim = dim,
                                .their_begin = their_begin,
                                .our_begin = our_begin,
                                .length = length };
    if (m->count < NAME_MAP_MOST) m->maps[m->count++] = map;
}

/* torchtitan's llama3, whose checkpoints are those of torch.distributed.checkpoint: `xdistill convert` with --without
 * optimizer., or with
 * --select model. where names begin so. */
static inline void name_torchtitan(name_maps *m) {
    name_map(m, "tok_embeddings.weight", "embed.weight");
    name_map(m, "layers.{}.attention_norm.weight", "blocks.{}.norm_1.weight");
    name_map(m, "layers.{}.attention.wq.weight", "blocks.{}.q.weight");
    name_map(m, "layers.{}.attention.wk.weight", "blocks.{}.k.weight");
    name_map(m, "layers.{}.attention.wv.weight", "blocks.{}.v.weight");
    name_map(m, "layers.{}.attention.wo.weight", "blocks.{}.out.weight");
    name_map(m, "layers.{}.ffn_norm.weight", "blocks.{}.norm_2.weight");
    name_map(m, "layers.{}.feed_forward.w1.weight", "blocks.{}.gate.weight");
    name_map(m, "layers.{}.feed_forward.w3.weight", "blocks.{}.up.weight");
    name_map(m, "layers.{}.feed_forward.w2.weight", "blocks.{}.down.weight");
    name_map(m, "norm.weight", "norm.weight");
    name_map(m, "output.weight", "head.weight");
}

/* Sizes that a fused tensor does not tell. */
typedef struct name_sizes {
    int64_t heads, groups, head_size,
        hidden; /* query heads, key heads, elements of a head, inner width of a feed-forward layer */
} name_sizes;

/* Megatron-Core with Transformer Engine's layers, SwiGLU, grouped queries. Its linear_qkv has, for each group, the query
 * heads of the group, its key and its value: three entries a group say that. linear_fc1 is the gate on top of the rest.
 *   stacked   torch_dist checkpoints of equal layers have one tensor for all of them: "decoder.layers.mlp.linear_fc2.weight",
 *             [layers, ...]; false -> a tensor for each: "decoder.layers.0.mlp.linear_fc2.weight" */
static inline void name_megatron(name_maps *m, const name_sizes *s, bool stacked) {
#define NAME_LAYER(rest) (stacked ? "decoder.layers." rest : "decoder.layers.{}." rest)
    const char *qkv = NAME_LAYER("self_attention.linear_qkv.weight"),
               *fc1 = NAME_LAYER("mlp.linear_fc1.weight");
    const int64_t queries = s->heads / s->groups * s->head_size, group = queries + 2 * s->head_size;
    const int dim = stacked ? 1 : 0;
    name_map(m, "embedding.word_embeddings.weight", "embed.weight");
    name_map(m, NAME_LAYER("self_attention.linear_qkv.layer_norm_weight"), "blocks.{}.norm_1.weight");
    for (int64_t g = 0; g < s->groups; g++) {
        name_rows(m, qkv, "blocks.{}.q.weight", dim, g * group, g * queries, queries);
        name_rows(m, qkv, "blocks.{}.k.weight", dim, g * group + queries, g * s->head_size, s->head_size);
        name_rows(m, qkv, "blocks.{}.v.weight", dim, g * group + queries + s->head_size, g * s->head_size,
                  s->head_size);
    }
    name_map(m, NAME_LAYER("self_attention.linear_proj.weight"), "blocks.{}.out.weight");
    name_map(m, NAME_LAYER("mlp.linear_fc1.layer_norm_weight"), "blocks.{}.norm_2.weight");
    name_rows(m, fc1, "blocks.{}.gate.weight", dim, 0, 0, s->hidden);
    name_rows(m, fc1, "blocks.{}.up.weight", dim, s->hidden, 0, s->hidden);
    name_map(m, NAME_LAYER("mlp.linear_fc2.weight"), "blocks.{}.down.weight");
    name_map(m, "decoder.final_layernorm.weight", "norm.weight");
    name_map(m, "output_layer.weight", "head.weight");
#undef NAME_LAYER
}

#endif
