#!/usr/bin/env python3
"""Losses across tokenizers beside the dense PyTorch forms that NeMo-RL publishes: same memory, same process,
interleaved, loss and gradient.

    xtoken.py LIBRARY [--rows N] [--rounds N] [--only KIND] [--threads N]

LIBRARY is xtoken_shim.c as a shared library. Both run on --threads; ours are the ranks of one sequence. Every pair of
times is taken in the order A B B A; printed are the medians and the median of the ratios of wall time, and of processor time,
which counts all threads and is what to look at when the machine has other work. The allocator keeps its memory."""

import argparse
import ctypes
import os
import statistics
import sys
import time

ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184", "MALLOC_TOP_PAD_": "268435456"}
STUDENT, TEACHER, PAIRS, ENTRIES, K, TAIL = 128256, 151936, 109000, 4, 8192, 8192
EPSILON = 1e-10

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("library")
parser.add_argument("--rows", type=int, default=128)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--only", default="", help="projected or gold")
parser.add_argument("--threads", type=int, default=2)
ARGS = parser.parse_args()
WANTED = dict(ALLOCATOR, OMP_NUM_THREADS=str(ARGS.threads))
if any(os.environ.get(k) != v for k, v in WANTED.items()):
    os.environ.update(WANTED)
    os.execv(sys.executable, [sys.executable] + sys.argv)
try:
    import torch
except ImportError:
    print("skipped: needs PyTorch")
    sys.exit(0)
torch.set_num_threads(ARGS.threads)


class Inputs(ctypes.Structure):
    _fields_ = [("student", ctypes.c_void_p), ("teacher", ctypes.c_void_p), ("gradient", ctypes.c_void_p),
                ("rows", ctypes.c_int64), ("student_size", ctypes.c_int64), ("teacher_size", ctypes.c_int64),
                ("student_chunks", ctypes.c_void_p), ("teacher_chunks", ctypes.c_void_p),
                ("chunks", ctypes.c_int64), ("ids", ctypes.c_void_p), ("weights", ctypes.c_void_p),
                ("entries", ctypes.c_int64), ("temperature", ctypes.c_double), ("bf16", ctypes.c_int)]


class Problem:
    """Logits of a bell with a few ids that stand out; most ids have one partner, the others several."""

    def __init__(self, rows, gold, dtype):
        torch.manual_seed(1)
        self.gold, self.rows, self.dtype = gold, rows, dtype
        self.student, self.teacher = self.logits(rows, STUDENT).to(dtype), self.logits(rows, TEACHER).to(dtype)
        self.gradient = torch.zeros(rows, STUDENT, dtype=dtype)
        ids = (torch.rand(STUDENT, ENTRIES).prod(1, keepdim=True) ** 0.25 * torch.rand(STUDENT, ENTRIES) ** 2 * TEACHER)
        ids = ids.long().clamp(0, TEACHER - 1)
        weights = torch.full((STUDENT, ENTRIES), 1.0 / ENTRIES)
        ids[:PAIRS, 0] = torch.arange(PAIRS) * 7 % TEACHER
        weights[:PAIRS] = torch.tensor([0.9] + [0.1 / (ENTRIES - 1)] * (ENTRIES - 1))
        if gold:
            ids[:PAIRS, 1:] = -1
            weights[:PAIRS] = torch.tensor([1.0] + [0.0] * (ENTRIES - 1))
        self.ids, self.weights = ids.int().contiguous(), weights.contiguous()
        one = torch.arange(rows) % 5 != 4
        self.student_chunks = one.long().cumsum(0) - 1
        self.chunks = int(self.student_chunks[-1]) + 1
        self.teacher_chunks = torch.arange(rows) * self.chunks // rows

    @staticmethod
    def logits(rows, cols):
        return torch.randn(rows, cols) * 1.2 + (torch.rand(rows, cols) < 1e-4).float() * 8

    def inputs(self):
        return Inputs(self.student.data_ptr(), self.teacher.data_ptr(), self.gradient.data_ptr(), self.rows, STUDENT,
                      TEACHER, self.student_chunks.data_ptr(), self.teacher_chunks.data_ptr(), self.chunks,
                      self.ids.data_ptr(), self.weights.data_ptr(), ENTRIES, 1.0,
                      int(self.dtype is torch.bfloat16))


def chunk_means(values, chunk_ids, chunks):
    """One-hot matrix product, as published."""
    mask = (chunk_ids[None, :] == torch.arange(chunks)[:, None]).float()
    return mask @ values / (mask.sum(1, keepdim=True) + EPSILON)


class Projected:
    def __init__(self, p):
        self.p = p
        row = torch.arange(STUDENT)[:, None].expand(-1, ENTRIES).reshape(-1)
        matrix = torch.sparse_coo_tensor(torch.stack([row, p.ids.long().reshape(-1)]), p.weights.reshape(-1),
                                         (STUDENT, TEACHER), check_invariants=False)
        self.matrix = matrix.coalesce()

    def slice(self, columns):
        slots = torch.full((TEACHER,), -1)
        slots[columns] = torch.arange(len(columns))
        rows, cols = self.matrix.indices()
        kept = slots[cols] >= 0
        return torch.sparse_coo_tensor(torch.stack([slots[cols[kept]], rows[kept]]), self.matrix.values()[kept],
                                       (len(columns), STUDENT), check_invariants=False).coalesce()

    def run(self):
        p = self.p
        z = p.student.detach().requires_grad_()
        columns = p.teacher.max(0).values.topk(K).indices.sort().values
        y = torch.sparse.mm(self.slice(columns), torch.softmax(z.float(), -1).t()).t()
        target = torch.log_softmax(p.teacher[:, columns].float(), -1)
        q = chunk_means(y, p.student_chunks, p.chunks)
        a = chunk_means(target, p.teacher_chunks, p.chunks)
        s = torch.log(q / (q.sum(-1, keepdim=True) + EPSILON) + EPSILON)
        loss = torch.nn.functional.kl_div(s, a, reduction="sum", log_target=True) / p.chunks
        loss.backward()
        return loss.item(), z.grad


class Gold:
    def __init__(self, p):
        self.p = p
        partner = p.ids[:PAIRS, 0].long()
        self.pairs, self.partners = torch.arange(PAIRS), partner
        alone = torch.ones(TEACHER, dtype=torch.bool)
        alone[partner] = False
        self.rest, self.other_rest = torch.arange(PAIRS, STUDENT), alone.nonzero().flatten()

    def run(self):
        p = self.p
        z = p.student.detach().requires_grad_()
        a = chunk_means(torch.log_softmax(z.float(), -1), p.student_chunks, p.chunks)
        b = chunk_means(torch.log_softmax(p.teacher.float(), -1), p.teacher_chunks, p.chunks)
        common = torch.nn.functional.kl_div(a[:, self.pairs], b[:, self.partners], reduction="sum", log_target=True)
        k = min(len(self.rest), len(self.other_rest), TAIL)
        x = a[:, self.rest].exp().topk(k).values
        y = b[:, self.other_rest].exp().topk(k).values
        loss = (common + (x - y).abs().sum()) / p.chunks
        loss.backward()
        return loss.item(), z.grad


def timed(function):
    wall, processor = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - processor


def compare(library, gold, dtype):
    p = Problem(ARGS.rows, gold, dtype)
    shim = library.xtoken_shim_open(ctypes.byref(p.inputs()), int(gold), ARGS.threads)
    theirs = (Gold if gold else Projected)(p)
    ours = library.xtoken_shim_run
    value, (reference, gradient) = ours(shim), theirs.run()
    error = (p.gradient.float() - gradient.float()).abs().max().item() / gradient.float().abs().max().item()
    # Many column maxima are equal in bf16, and PyTorch's choice among equals is its own: another J.
    narrow = dtype is torch.bfloat16
    limit = (1e-2, 1.0) if narrow and not gold else (1e-4, 0.01 if narrow else 1e-3)
    if not (abs(value - reference) <= limit[0] * abs(reference) and error <= limit[1]):
        print(f"wrong: loss {value} and {reference}, gradient differs by {error:.2g} of its largest")
        return False
    a, b = [], []
    for _ in range(ARGS.rounds):
        a.append(timed(lambda: ours(shim)))
        b.append(timed(theirs.run))
        b.append(timed(theirs.run))
        a.append(timed(lambda: ours(shim)))
    library.xtoken_shim_close(shim)
    row = 1e6 / ARGS.rows
    walls = [statistics.median(t[0] for t in x) * row for x in (a, b)]
    works = [statistics.median(t[1] for t in x) * row for x in (a, b)]
    ratios = [statistics.median(y[i] / x[i] for x, y in zip(a, b)) for i in (0, 1)]
    name = ("gold" if gold else "projected") + (" bf16" if narrow else " f32")
    print(f"{name:15} T={ARGS.rows} chunks={p.chunks}  us/row: {walls[0]:8.1f} {walls[1]:9.1f}"
          f"  ratio {ratios[0]:6.1f}   processor us/row: {works[0]:8.1f} {works[1]:9.1f}  ratio {ratios[1]:6.1f}"
          f"   loss {value:.6g} {reference:.6g}, gradient error {error:.1e}", flush=True)
    return True


def main():
    library = ctypes.CDLL(os.path.abspath(ARGS.library))
    library.xtoken_shim_open.restype = ctypes.c_void_p
    library.xtoken_shim_open.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    library.xtoken_shim_run.restype, library.xtoken_shim_run.argtypes = ctypes.c_double, (ctypes.c_void_p,)
    library.xtoken_shim_close.restype, library.xtoken_shim_close.argtypes = None, (ctypes.c_void_p,)
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads each")
    cases = [(gold, dtype) for gold in (False, True) for dtype in (torch.float32, torch.bfloat16)]
    kept = [c for c in cases if ARGS.only in ("", "gold" if c[0] else "projected")]
    sys.exit(0 if all([compare(library, *c) for c in kept]) else 1)


if __name__ == "__main__":
    main()
