#!/usr/bin/env python3
"""The same model in PyTorch: bits per byte and tokens per second over the ids that `xdistill tokenize encode` prints, in f32 on two threads.

    python3 tools/gguf_peer.py MODEL.gguf IDS BYTES      IDS: one id a line; BYTES that all but the first come from

Needs torch and numpy. Reads what gguf.c reads: a Llama-type file with tensors in F32, Q4_1 and Q8_0.
"""

import json
import math
import struct
import sys
import time

import numpy
import torch
import torch.nn.functional as F

BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
F32, Q4_1, Q8_0 = 0, 3, 8


class File:
    def __init__(self, path):
        with open(path, "rb") as file:
            self.data = file.read()
        self.at = 8  # behind magic and version
        tensors, pairs = self.take("Q"), self.take("Q")
        self.values = {}
        for _ in range(pairs):
            key = self.text()
            self.values[key] = self.value(self.take("I"))
        self.tensors = {}
        for _ in range(tensors):
            name, dims = self.text(), self.take("I")
            shape = [self.take("Q") for _ in range(dims)]
            self.tensors[name] = (shape[::-1], self.take("I"), self.take("Q"))
        self.start = (self.at + 31) // 32 * 32

    def take(self, form):
        value = struct.unpack_from("<" + form, self.data, self.at)[0]
        self.at += struct.calcsize("<" + form)
        return value

    def text(self):
        size = self.take("Q")
        self.at += size
        return self.data[self.at - size:self.at].decode(errors="replace")

    def value(self, kind):
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, count = self.take("I"), self.take("Q")
            if inner == STRING:
                return [self.text() for _ in range(count)]
            self.at += count * BYTES[inner]
            return None
        if kind in (6, 12):
            return self.take("f" if kind == 6 else "d")
        self.at += BYTES[kind]
        return int.from_bytes(self.data[self.at - BYTES[kind]:self.at], "little")

    def tensor(self, name):
        shape, kind, offset = self.tensors[name]
        count, begin = math.prod(shape), self.start + offset
        if kind == F32:
            return torch.from_numpy(numpy.frombuffer(self.data, "<f4", count, begin).copy()).reshape(shape)
        size = {Q4_1: 20, Q8_0: 34}[kind]
        blocks = numpy.frombuffer(self.data, numpy.uint8, count // 32 * size, begin).reshape(-1, size)
        scale = blocks[:, :2].copy().view("<f2").astype(numpy.float32)
        if kind == Q8_0:
            values = blocks[:, 2:].copy().view(numpy.int8) * scale
        else:
            halves = numpy.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1)
            values = halves * scale + blocks[:, 2:4].copy().view("<f2").astype(numpy.float32)
        return torch.from_numpy(values).reshape(shape)


class Model:
    def __init__(self, file):
        v = file.values
        self.heads, self.kv_heads = v["llama.attention.head_count"], v["llama.attention.head_count_kv"]
        self.head_dim = v["llama.embedding_length"] // self.heads
        self.theta, self.eps = v["llama.rope.freq_base"], v["llama.attention.layer_norm_rms_epsilon"]
        self.embed, self.norm = file.tensor("token_embd.weight"), file.tensor("output_norm.weight")
        self.layers = []
        for i in range(v["llama.block_count"]):
            get = lambda name: file.tensor("blk.%d.%s.weight" % (i, name))
            self.layers.append((get("attn_norm"), self.halves(get("attn_q")), self.halves(get("attn_k")),
                                get("attn_v"), get("attn_output"), get("ffn_norm"), get("ffn_gate"), get("ffn_up"),
                                get("ffn_down")))

    def halves(self, weight):
        """Rows of a rotary plane from side by side to half a head apart."""
        return weight.view(-1, self.head_dim // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

    def normal(self, x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

    def turn(self, x, cosine, sine):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)

    @torch.no_grad()
    def forward(self, ids):
        n, group = len(ids), self.heads // self.kv_heads
        frequency = self.theta ** (-torch.arange(0, self.head_dim, 2).double() / self.head_dim)
        angle = torch.arange(n).double()[:, None] * frequency
        cosine, sine = angle.cos().float(), angle.sin().float()
        x = self.embed[ids]
        for norm, q, k, v, o, post, gate, up, down in self.layers:
            h = self.normal(x, norm)
            split = lambda y, heads: y.view(n, heads, self.head_dim).transpose(0, 1)
            q, k, v = split(h @ q.T, self.heads), split(h @ k.T, self.kv_heads), split(h @ v.T, self.kv_heads)
            q, k = self.turn(q, cosine, sine), self.turn(k, cosine, sine)
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
            x = x + y.transpose(0, 1).reshape(n, -1) @ o.T
            h = self.normal(x, post)
            x = x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T
        return self.normal(x, self.norm) @ self.embed.T


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__.strip())
    torch.set_num_threads(2)
    model = Model(File(sys.argv[1]))
    with open(sys.argv[2]) as file:
        ids = torch.tensor([int(line) for line in file])
    best, busy = math.inf, 0.0
    for _ in range(3):
        wall, processor = time.perf_counter(), time.process_time()
        logits = model.forward(ids)
        nats = F.cross_entropy(logits[:-1], ids[1:], reduction="sum").item()
        if time.perf_counter() - wall < best:
            best, busy = time.perf_counter() - wall, time.process_time() - processor
    print(json.dumps({"torch": torch.__version__, "tokens": len(ids),
                      "bits_per_byte": round(nats / math.log(2) / int(sys.argv[3]), 6),
                      "tokens_per_second": round(len(ids) / best, 1),
                      "processor_seconds": round(busy, 2)}))


if __name__ == "__main__":
    main()
