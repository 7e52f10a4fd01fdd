"""Writes a GGUF file of a tiny random Llama model whose tokens are bytes: a stand-in for a real teacher.

    tiny_gguf.py FILE
"""
import random
import struct
import sys

HIDDEN, HEADS, FFN = 32, 2, 48
U32, F32, STRING, ARRAY, INT = 4, 6, 8, 9, 5


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key, kind, data):
    return text(key) + struct.pack("<I", kind) + data


def array(kind, items):
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


def byte_names():
    """The characters by which byte-level tokenizers write the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return [chr(b) if b in plain else chr(256 + others.index(b)) for b in range(256)]


tokens = ["<|endoftext|>", *byte_names()]
pairs = [
    pair("general.architecture", STRING, text("llama")),
    pair("llama.embedding_length", U32, struct.pack("<I", HIDDEN)),
    pair("llama.block_count", U32, struct.pack("<I", 1)),
    pair("llama.attention.head_count", U32, struct.pack("<I", HEADS)),
    pair("llama.feed_forward_length", U32, struct.pack("<I", FFN)),
    pair("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)),
    pair("tokenizer.ggml.model", STRING, text("gpt2")),
    pair("tokenizer.ggml.pre", STRING, text("gpt-2")),
    pair("tokenizer.ggml.tokens", ARRAY, array(STRING, [text(t) for t in tokens])),
    pair("tokenizer.ggml.token_type", ARRAY, array(INT, [struct.pack("<i", 3 if i == 0 else 1) for i in range(len(tokens))])),
    pair("tokenizer.ggml.merges", ARRAY, array(STRING, [])),
]
shapes = {
    "token_embd.weight": (HIDDEN, len(tokens)),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_k.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_v.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (HIDDEN, FFN),
    "blk.0.ffn_up.weight": (HIDDEN, FFN),
    "blk.0.ffn_down.weight": (FFN, HIDDEN),
}
numbers = random.Random(1)
infos, data = [], b""
for name, shape in shapes.items():
    count = 1
    for size in shape:
        count *= size
    values = [1.0] * count if len(shape) == 1 else [numbers.gauss(0.0, 0.1) for _ in range(count)]
    infos.append(text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", s) for s in shape) + struct.pack("<IQ", 0, len(data)))
    data += struct.pack("<%df" % count, *values)
    data += bytes(-len(data) % 32)
head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(pairs)) + b"".join(pairs) + b"".join(infos)
with open(sys.argv[1], "wb") as file:
    file.write(head + bytes(-len(head) % 32) + data)
