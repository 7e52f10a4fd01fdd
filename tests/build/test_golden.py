"""The program that judges golden vectors, judged: vectors changed so that it must accept or refuse them.

    test_golden.py GOLDEN VECTORS

Each test copies one or more vectors into a folder, changes them and looks at what the program prints.
"""

import json
import math
import os
import re
import struct
import subprocess
import sys
import tempfile
import unittest

PROGRAM, VECTORS = sys.argv[1:3]
PACKING = {"F64": "d", "F32": "f", "I64": "q", "BOOL": "?"}


class Vector:
    """A file of the folder: metadata and tensors, as [dtype, shape, bytes]."""

    def __init__(self, name):
        with open(os.path.join(VECTORS, name + ".safetensors"), "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header, data = json.loads(file.read(length)), file.read()
        self.metadata = header.pop("__metadata__")
        self.tensors = {}
        for tensor, entry in header.items():
            begin, end = entry["data_offsets"]
            self.tensors[tensor] = [entry["dtype"], entry["shape"], data[begin:end]]

    def values(self, tensor):
        dtype, _, data = self.tensors[tensor]
        letter = PACKING[dtype]
        return list(struct.unpack("<%d%s" % (len(data) // struct.calcsize(letter), letter), data))

    def put(self, tensor, dtype, shape, values):
        self.tensors[tensor] = [dtype, shape, struct.pack("<%d%s" % (len(values), PACKING[dtype]), *values)]

    def fill(self, tensor, value):
        dtype, shape, _ = self.tensors[tensor]
        self.put(tensor, dtype, shape, [value] * len(self.values(tensor)))

    def rename(self, before, after):
        for tensor in list(self.tensors):
            if tensor.endswith("." + before):
                self.tensors[tensor[: -len(before)] + after] = self.tensors.pop(tensor)

    def save(self, folder, name):
        header, data = {"__metadata__": self.metadata}, b""
        for tensor, (dtype, shape, content) in self.tensors.items():
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
            data += content
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(os.path.join(folder, name + ".safetensors"), "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text + data)


def run(vectors):
    """What the program prints about these vectors, and its three counts."""
    with tempfile.TemporaryDirectory() as folder:
        for name, vector in vectors.items():
            vector.save(folder, name)
        done = subprocess.run([PROGRAM, folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    counts = re.search(r"^(\d+) passed, (\d+) failed, (\d+) skipped\n\Z", done.stdout, re.M)
    assert counts and done.returncode == (1 if int(counts[2]) else 0), done.stdout
    return done.stdout, tuple(map(int, counts.groups()))


class Judge(unittest.TestCase):
    def passes(self, vector):
        output, counts = run({"case": vector})
        self.assertEqual(counts, (1, 0, 0), output)

    def fails(self, vector, pattern):
        output, counts = run({"case": vector})
        self.assertEqual(counts, (0, 1, 0), output)
        self.assertRegex(output, pattern)

    def test_crash_and_unknown_key(self):
        names = [CE_MEAN, TOPK_FORWARD, EMA, DP]
        folder = {"m%d" % i: Vector(name) for i, name in enumerate(names)}
        crash, memory, unknown = Vector(CE_NEXT), Vector(CHUNKS), Vector(names[0])
        crash.tensors["in.global_valid_toks"][1] = [1] * 9  # more dimensions than the program holds
        memory.tensors["in.grad_chunk_avg"] = ["F32", [2, 1 << 41, 0], b""]
        unknown.metadata["cfg.planted"] = "3"
        output, counts = run(dict(folder, a=crash, b=memory, c=unknown))
        self.assertEqual(counts, (len(names), 3, 0), output)
        self.assertRegex(output, r"a\.safetensors: its process (was killed by signal|ended with status)")
        self.assertRegex(output, r"b\.safetensors: its process (was killed by signal|ended with status)")
        self.assertRegex(output, r"c\.safetensors: cfg\.planted")

    def test_result_that_nothing_is_compared_with(self):
        vector = Vector(CE_MEAN)
        vector.put("grad.planted", "F64", [1], [0.0])
        self.fails(vector, r"grad\.planted")

    def test_values_that_are_none(self):
        for key, value in [("cfg.label_smoothing", "much"), ("cfg.reduction", "median"), ("cfg.ignore_index", "[1]")]:
            vector = Vector(CE_MEAN)
            vector.metadata[key] = value
            self.fails(vector, re.escape(key))

    def test_nothing_counted(self):
        for expected in 0.0, math.nan:
            vector = Vector(CE_MEAN)
            vector.fill("in.labels", -100)
            vector.fill("out.loss", expected)
            vector.fill("grad.logits", expected)
            self.passes(vector)
            vector.fill("out.loss", 1.0)
            self.fails(vector, r"out\.loss")
        vector = Vector(CE_MEAN)
        vector.fill("out.loss", math.nan)  # something counts here
        self.fails(vector, r"out\.loss")

    def test_mask_turned_off(self):
        vector = Vector(TOPK_FORWARD)
        vector.metadata["cfg.masked"] = "false"
        self.fails(vector, r"out\.loss")
        batch, length, width = vector.tensors["in.student_logits"][1]
        k = vector.tensors["in.teacher_topk_indices"][1][2]
        student, ids = vector.values("in.student_logits"), vector.values("in.teacher_topk_indices")
        teacher = vector.values("in.teacher_topk_logits")
        loss, gradient, count = 0.0, [0.0] * len(student), batch * (length - 1)
        for row in range(batch * length):
            if row % length == length - 1:
                continue
            at = [row * width + ids[row * k + i] for i in range(k)]
            p, q = softmax(teacher[row * k : row * k + k]), softmax([student[i] for i in at])
            loss += sum(a * math.log(a / b) for a, b in zip(p, q)) / count
            for i, a, b in zip(at, p, q):
                gradient[i] += (b - a) / count
        vector.put("out.loss", "F64", [], [loss])
        vector.put("grad.student_logits", "F64", [batch, length, width], gradient)
        self.passes(vector)

    def test_options_of_the_vote_programs(self):
        for flags, pattern in [
            (["--planted"], r"cfg\.flags: --planted"),
            (["--tokens-to-cut", "some"], r"cfg\.flags: --tokens-to-cut"),
            (["--tokens-to-cut=1"], r"out\.counts_"),
            (["--use-canonicalization", "--enable-exact-match"], r"out\.counts_"),
        ]:
            vector = Vector("align/pipeline_default")
            vector.metadata["cfg.flags"] = json.dumps(flags)
            self.fails(vector, pattern)
        vector = Vector("align/pipeline_default")
        vector.metadata["cfg.flags"] = json.dumps(["--disable-scale-trick", "--enable-scale-trick", "--tokens-to-cut", "4"])
        self.passes(vector)
        vector = Vector("align/multitoken_c1_c2")
        vector.metadata["cfg.ignore_tokens"] = json.dumps(json.loads(vector.metadata["vocab.student"])[40:50])
        self.fails(vector, r"out\.(index|value)")

    def test_scores_of_the_aligner(self):
        vector = Vector(DP)
        vector.metadata["cfg.gap_penalty"] = "-2.5"
        self.fails(vector, r"cfg\.gap_penalty|out\.score|pair")

    def test_buffers(self):
        vector = Vector(EMA)
        vector.rename("w", "running_w")  # a parameter all the same
        self.passes(vector)
        vector = Vector(EMA)
        vector.rename("running_mean", "mean")
        self.fails(vector, r"step\d+\.mean")
        vector.metadata["cfg.buffers"] = json.dumps(["mean"])
        self.passes(vector)


def softmax(row):
    largest = max(row)
    terms = [math.exp(x - largest) for x in row]
    return [term / sum(terms) for term in terms]


def one(area, **wanted):
    """The first vector of an area whose metadata contain these texts."""
    for file in sorted(os.listdir(os.path.join(VECTORS, area))):
        name = area + "/" + file[: -len(".safetensors")]
        metadata = Vector(name).metadata
        if all(text in metadata.get(key, metadata.get("cfg." + key, "")) for key, text in wanted.items()):
            return name
    raise SystemExit("no vector in %s with %s" % (area, wanted))


CE_MEAN = one("classic", origin="functional.cross_entropy", reduction="mean")
CE_NEXT = one("xtoken-parts", origin="student_next_token_ce")
CHUNKS = one("xtoken-parts", origin="chunk_log_prob_sums")
TOPK_FORWARD = one("classic", origin="get_distillation_topk_logprobs", kl_type="forward", zero_outside_topk="false")
DP = one("align", origin="_align_dp")
EMA = one("ema", origin="ExponentialMovingAverage", type="constant", dtype="float32", param_dtype="float32")

if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
