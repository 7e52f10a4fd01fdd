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
RESULT = re.compile(r"(out|out32|grad|grad32)\.")


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

    def keep(self, *patterns):
        """Of the results those whose names match."""
        kept = lambda name: any(re.fullmatch(pattern, name) for pattern in patterns)
        for tensor in list(self.tensors):
            if RESULT.match(tensor) and not kept(tensor):
                del self.tensors[tensor]
        for key in list(self.metadata):
            if key.startswith("expect") and not kept(key):
                del self.metadata[key]

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
        names = [CE_MEAN, TOPK_FORWARD, EMA, "align/dp_basic"]
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

    def skips(self, vector, pattern):
        output, counts = run({"case": vector})
        self.assertEqual(counts, (0, 0, 1), output)
        self.assertRegex(output, pattern)

    def test_every_vector_in_what_it_has(self):
        # The last: shares of ranks are no result where they are sums of some chunks.
        for name, *patterns in [
            ("no gradient", r"out.*", r"expect.*"),
            ("gradients alone", r"grad\..*"),
            ("float32 alone", r".*32\..*"),
            ("numbers alone", r"expect.*"),
            ("tensors alone", r"out.*", r"grad.*"),
        ]:
            vectors = {}
            for area in sorted(os.listdir(VECTORS)):
                for file in sorted(os.listdir(os.path.join(VECTORS, area))) if "." not in area else []:
                    vector = Vector(area + "/" + file[: -len(".safetensors")])
                    vector.keep(*patterns)
                    if name == "no gradient":
                        for tensor in "in.weight", "in.grad_chunk_avg":
                            vector.tensors.pop(tensor, None)
                    names = list(filter(RESULT.match, vector.tensors)) + [k for k in vector.metadata if k.startswith("expect")]
                    if any(not re.search(r"\.rank\d", n) for n in names):
                        vectors[file[: -len(".safetensors")]] = vector
            output, counts = run(vectors)
            self.assertGreater(len(vectors), 20)
            self.assertEqual(counts, (len(vectors), 0, 0), name + ": " + output)

    def test_nothing_at_all(self):
        vector = Vector(CE_MEAN)
        vector.keep()
        self.fails(vector, "nothing was compared")

    def test_a_wrong_number_of_the_metadata(self):
        vector = Vector(CE_MEAN)
        vector.keep("expect.loss")
        self.passes(vector)
        vector.metadata["expect.loss"] = "1.5"
        self.fails(vector, r"out\.loss")

    def test_nothing_counts_and_the_count_is_0(self):
        vector = Vector(one("xtoken", teacher_kind="dense", num_teachers="1", kd_loss_mode="sum", gold_loss="false"))
        vector.fill("in.t0.pair_valid", 0)
        vector.keep(r"out\.num_valid_pairs_t0")
        self.fails(vector, r"num_valid_pairs_t0\[0\]: got 0,")
        vector.fill("out.num_valid_pairs_t0", 0)
        self.passes(vector)

    def test_scores_of_the_aligner(self):
        # the, quick = qu + ick, fox: twice a match, and two tokens in combination
        for key, value, score in [("exact_match_score", 2.5, 8.0), ("combination_score_multiplier", 2.0, 10.0)]:
            vector = Vector("align/dp_basic")
            vector.metadata["cfg." + key] = str(value)
            vector.keep(r"out\.score", r"expect\.pairs")
            self.fails(vector, r"out\.score")
            vector.fill("out.score", score)
            self.passes(vector)
        vector = Vector("align/dp_empty_teacher")
        vector.metadata["cfg.gap_penalty"] = "-2.5"
        vector.fill("out.score", -5.0)
        self.passes(vector)
        vector = Vector(one("align", origin="TokenAligner.align"))
        vector.metadata["cfg.exact_match_score"] = "3.0"
        self.passes(vector)

    def test_v_of_another_type(self):
        # The peer makes flow of x0, and compares it with (1 - t) eps - t x0.
        vector = Vector("dmd/step_fake_eps_from_x0")
        vector.metadata["cfg.fake_score_pred_type"] = "v"
        vector.keep(r"out\.call.*", r"out\.fake_score", r"grad\.call1\.raw")
        self.fails(vector, r"out\.fake_score")
        clean, raw, mixed = (vector.values("out." + name) for name in ("call0.raw", "call1.raw", "call1.hidden"))
        noise, times, count = vector.values("in.draw1.randn_like"), vector.values("out.call1.timestep"), len(raw)
        each = [times[i * len(times) // count] for i in range(count)]
        rest = [(m - r) / t - ((1 - t) * e - t * x) for m, r, t, e, x in zip(mixed, raw, each, noise, clean)]
        vector.fill("out.fake_score", sum(r * r for r in rest) / count)
        vector.put("grad.call1.raw", "F64", vector.tensors["grad.call1.raw"][1], [-2 * r / t / count for r, t in zip(rest, each)])
        self.passes(vector)

    def test_through_x0_where_v_is_flow(self):
        vector = Vector(one("dmd", origin="flow_matching.py::add_noise"))
        t = vector.values("in.t")
        t[0] = 0.0
        vector.put("in.t", vector.tensors["in.t"][0], vector.tensors["in.t"][1], t)
        row = len(vector.values("in.raw")) // len(t)
        for way in "v_to_flow", "flow_to_v":
            vector.keep(r"out\.convert_" + way)
            values = vector.values("in.raw")
            values[:row] = [0.0] * row  # x0 is x_t there
            vector.put("out.convert_" + way, "F64", vector.tensors["in.raw"][1], values)
            self.passes(vector)

    def test_narrow_flow(self):
        vector = Vector("dmd/schedule_rf")
        vector.metadata.update({"cfg.min_t": "0.2", "cfg.max_t": "0.7"})
        times = [0.2, 0.3, 0.45, 0.6, 0.7]
        index = [min(range(1000), key=lambda i: abs(0.2 + 0.5 * i / 999 - t)) for t in times]
        vector.put("in.t", "F64", [5], times)
        vector.put("in.closest_sigma_query", "F64", [5], times)
        vector.put("out.closest_sigma_idx", "I64", [5], index)
        vector.put("out.sigma_idx_to_t", "F64", [5], [i / 1000 for i in index])
        vector.put("out.sqrt_snr_to_t", "F64", [5], times)
        vector.put("out.t_list_2", "F64", [3], [0.7, 0.35, 0.0])
        vector.fill("out.max_sigma", 0.7)
        vector.put("out.latents", "F64", [5, 4], [0.7 * e for e in vector.values("in.eps")])
        vector.keep(r"out\.(closest_sigma_idx|sigma_idx_to_t|sqrt_snr_to_t|t_list_2|max_sigma|latents)")
        self.passes(vector)

    def test_rho_and_lists_of_edm(self):
        vector = Vector("dmd/schedule_edm")
        vector.metadata["cfg.rho"] = "7"
        self.passes(vector)
        vector.metadata["cfg.rho"] = "5.0"
        self.skips(vector, r"cfg\.rho = 5\.0, only 7\.0")
        vector = Vector("dmd/schedule_edm")
        vector.metadata.update({"cfg.num_steps": "500", "cfg.max_step_percent": "0.9"})
        a, b = 80 ** (1 / 7), 0.002 ** (1 / 7)
        grid = [(a + (499 - j) / 499 * (b - a)) ** 7 for j in range(500)]
        vector.put("out.t_list_4", "F64", [5], [grid[i] for i in (450, 337, 225, 113)] + [0.0])
        vector.keep(r"out\.t_list_4")
        self.passes(vector)

    def test_ids_beyond_the_vocabulary(self):
        vector = Vector(one("xtoken-parts", origin="build_exact_token_map", xtoken_loss="true"))
        size = max(vector.values("out.common_teacher"))
        vector.metadata["cfg.teacher_vocab_size"] = str(size)
        pairs = list(zip(vector.values("out.common_student"), vector.values("out.common_teacher")))
        kept = [pair for pair in pairs if pair[1] < size]
        rest = vector.values("out.uncommon_student") + [pair[0] for pair in pairs if pair[1] >= size]
        vector.put("out.common_student", "I64", [len(kept)], [s for s, _ in kept])
        vector.put("out.common_teacher", "I64", [len(kept)], [t for _, t in kept])
        vector.put("out.uncommon_student", "I64", [len(rest)], sorted(rest))
        vector.keep(r"out\.common.*", r"out\.uncommon_student")
        self.passes(vector)
        vector.metadata["cfg.xtoken_loss"] = "false"
        self.skips(vector, r"cfg\.xtoken_loss = false with teacher ids beyond the vocabulary")

    def test_settings_that_nothing_has(self):
        for name, key, value in [("optim/" + OPTIMIZER, "amsgrad", "true"), ("optim/" + OPTIMIZER, "optimizer", "Lion")]:
            vector = Vector(name)
            vector.metadata["cfg." + key] = value
            self.skips(vector, "not built: cfg." + key + " = " + value)

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
OPTIMIZER = one("optim", optimizer="AdamW").split("/")[1]
EMA = one("ema", origin="ExponentialMovingAverage", type="constant", dtype="float32", param_dtype="float32")

if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
