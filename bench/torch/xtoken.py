#!/usr/bin/env python3
"""Losses across tokenizers beside PyTorch: same memory, same process, interleaved, loss and gradient.

    xtoken.py LIBRARY [--rows N] [--rounds N] [--only KIND] [--form FORM] [--dtype TYPE] [--columns WHICH]
              [--threads N] [--json FILE]

LIBRARY is xtoken_shim.c as a shared library. There are two PyTorch forms of each loss:

    published   one call of the loss as NeMo-RL executes it on one rank, operation by operation, with fixed weights (KD 1,
                CE 0.1): the next-token CE, the accuracy and the metrics that it returns are part of it. Ours then has
                labels too.
    tuned       the divergence alone, written as one would for speed: no copies of logits that are f32 already, no
                division by a temperature of 1, nothing but the loss and its gradient. Ours has no labels then.

Both sides run on --threads; ours are the ranks of one sequence. Every pair of times is taken in the order A B B A; printed
are the medians and the median of the ratios of wall time, and of processor time, which counts all threads and is what to
look at when the machine has other work. The allocator keeps its memory. At 2048 rows the published forms want 12 GB."""

import argparse
import ctypes
import json
import os
import statistics
import sys
import time

ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184", "MALLOC_TOP_PAD_": "268435456"}
STUDENT, TEACHER, PAIRS, ENTRIES, K, TAIL = 128256, 151936, 109000, 4, 8192, 8192
EPSILON = 1e-10
KD_WEIGHT, CE_WEIGHT, TEMPERATURE = 1.0, 0.1, 1.0

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("library")
parser.add_argument("--rows", type=int, default=128)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--only", default="", help="projected or gold")
parser.add_argument("--form", default="", help="published or tuned")
parser.add_argument("--dtype", default="", help="f32 or bf16")
parser.add_argument("--columns", choices=("any", "low"), default="any", help="which of the teacher's ids are likely: "
                    "any, or rather the low ones, which projections spell others with")
parser.add_argument("--json", default="", help="append a JSON line a row")
parser.add_argument("--threads", type=int, default=2)
ARGS = parser.parse_args()
WANTED = dict(ALLOCATOR, OMP_NUM_THREADS=str(ARGS.threads))
if any(os.environ.get(k) != v for k, v in WANTED.items()):
    os.environ.update(WANTED)
    os.execv(sys.executable, [sys.executable] + sys.argv)
try:
    import torch

    import machine
except ImportError:
    print("skipped: needs PyTorch")
    sys.exit(0)
torch.set_num_threads(ARGS.threads)


class Inputs(ctypes.Structure):
    _fields_ = [("student", ctypes.c_void_p), ("teacher", ctypes.c_void_p), ("gradient", ctypes.c_void_p),
                ("rows", ctypes.c_int64), ("student_size", ctypes.c_int64), ("teacher_size", ctypes.c_int64),
                ("student_chunks", ctypes.c_void_p), ("teacher_chunks", ctypes.c_void_p),
                ("chunks", ctypes.c_int64), ("ids", ctypes.c_void_p), ("weights", ctypes.c_void_p),
                ("entries", ctypes.c_int64), ("labels", ctypes.c_void_p), ("temperature", ctypes.c_double),
                ("kd_weight", ctypes.c_double), ("ce_weight", ctypes.c_double), ("bf16", ctypes.c_int)]


class Problem:
    """Logits of a bell with a few ids that stand out; most ids have one partner, the others several."""

    def __init__(self, rows, gold, dtype):
        torch.manual_seed(1)
        self.gold, self.rows, self.dtype = gold, rows, dtype
        self.student, teacher = self.logits(rows, STUDENT).to(dtype), self.logits(rows, TEACHER)
        if ARGS.columns == "low":
            teacher -= 6.0 * torch.arange(TEACHER) / TEACHER
        self.teacher = teacher.to(dtype)
        self.labels = torch.randint(STUDENT, (rows,))
        self.labels[-1] = -100  # nothing follows the last position
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

    def inputs(self, with_labels):
        return Inputs(self.student.data_ptr(), self.teacher.data_ptr(), self.gradient.data_ptr(), self.rows, STUDENT,
                      TEACHER, self.student_chunks.data_ptr(), self.teacher_chunks.data_ptr(), self.chunks,
                      self.ids.data_ptr(), self.weights.data_ptr(), ENTRIES,
                      self.labels.data_ptr() if with_labels else None, TEMPERATURE, KD_WEIGHT, CE_WEIGHT,
                      int(self.dtype is torch.bfloat16))

    def edge_is_tied(self):
        """Is the last of J's column maxima that of another column too? PyTorch's choice among equals is its own."""
        if self.gold:
            return False
        maxima = self.teacher.max(0).values.sort(descending=True).values
        return bool(maxima[K - 1] == maxima[K])

    def projection(self):
        """[V_s, V_t], sparse, coalesced."""
        row = torch.arange(STUDENT)[:, None].expand(-1, ENTRIES).reshape(-1)
        return torch.sparse_coo_tensor(torch.stack([row, self.ids.long().reshape(-1)]), self.weights.reshape(-1),
                                       (STUDENT, TEACHER), check_invariants=False).coalesce()

    def exact_map(self):
        """Pairs of ids, and the ids of both sides without a partner."""
        partners = self.ids[:PAIRS, 0].long()
        alone = torch.ones(TEACHER, dtype=torch.bool)
        alone[partners] = False
        return torch.arange(PAIRS), partners, torch.arange(PAIRS, STUDENT), alone.nonzero().flatten()


# ---- as published ----


class PublishedProduct(torch.autograd.Function):
    """The transposed sparse matrix times a dense one, in f32 under any autocast; the matrix is constant."""

    @staticmethod
    def forward(ctx, matrix, dense):
        ctx.matrix = matrix
        return torch.sparse.mm(matrix.t(), dense)

    @staticmethod
    def backward(ctx, gradient):
        return None, torch.sparse.mm(ctx.matrix, gradient)


def published_chunk_means(values, ids, chunks):
    """A one-hot matrix of all chunks in the dtype of the values, one batched product, and the sizes."""
    one_hot = ids.unsqueeze(-1) == torch.arange(chunks).view(1, 1, -1)
    sums = torch.bmm(one_hot.transpose(1, 2).to(values.dtype), values)
    sizes = one_hot.sum(dim=1).float()
    return sums / (sizes.unsqueeze(-1) + EPSILON), sizes


def published_divergence(log_p, log_target):
    return torch.nn.functional.kl_div(log_p, log_target, reduction="none", log_target=True)


class Published:
    """What both losses have in common: a batch of one sequence, masks of ones, CE and accuracy, fixed weights, metrics."""

    with_labels = True

    def __init__(self, p):
        self.p = p
        self.teacher = p.teacher[None]
        self.student_chunks, self.teacher_chunks = p.student_chunks[None], p.teacher_chunks[None]
        self.pair_valid = torch.ones(1, p.chunks, dtype=torch.bool)
        self.sample_mask = torch.ones(1)
        self.token_mask = torch.ones(1, p.rows - 1)

    def student_log_probs(self, z):
        return torch.log_softmax(z.float() / TEMPERATURE, dim=-1)

    def teacher_log_probs(self, logits):
        """Divided as it is, then f32: what autocast makes of the operation."""
        return torch.log_softmax(logits / TEMPERATURE, dim=-1, dtype=torch.float32)

    def valid(self, student_sizes, teacher_sizes):
        return (student_sizes > 0) & (teacher_sizes > 0) & self.pair_valid

    def cross_entropy(self, z):
        """Logits less the last position as a copy, in f32; the mean over the mask."""
        before, labels = z[:, :-1].contiguous(), self.p.labels[None, :-1].contiguous()
        each = torch.nn.functional.cross_entropy(before.reshape(-1, STUDENT).float(), labels.reshape(-1),
                                                 reduction="none").reshape(labels.shape)
        mask = self.token_mask * self.sample_mask.unsqueeze(-1)
        return (each * mask).sum() / (mask.sum() + 1e-8)

    def accuracy(self, z):
        with torch.no_grad():
            right = (z[:, :-1].argmax(dim=-1) == self.p.labels[None, :-1]) * self.token_mask
            return right.sum() / self.token_mask.sum().clamp(min=1.0)

    def run(self):
        z = self.p.student.detach()[None].requires_grad_()
        cross_entropy = self.cross_entropy(z)
        distilled, metrics = self.distilled(z)
        loss = KD_WEIGHT * distilled + CE_WEIGHT * cross_entropy
        metrics += [loss, distilled, cross_entropy, self.accuracy(z)]
        values = [m.item() for m in metrics]
        loss.backward()
        return values[-4], z.grad[0]


class PublishedProjected(Published):
    """In the order of the code: log-softmax of the whole student and its exponential; importance of the teacher's
    columns, the K largest, sorted; the sparse matrix cut to them by a binary search of every entry; the projection; the
    teacher's log-softmax in the K columns; chunk means; renormalisation and logarithm; masks; agreement; divergence."""

    def __init__(self, p):
        super().__init__(p)
        self.matrix = p.projection()

    def columns(self):
        with torch.no_grad():
            importance = self.teacher.reshape(-1, TEACHER).max(dim=0).values
            return torch.topk(importance, k=K, dim=-1).indices.sort().values

    def restricted(self, columns):
        indices, values = self.matrix.indices(), self.matrix.values()
        place = torch.searchsorted(columns, indices[1]).clamp(max=len(columns) - 1)
        there = columns[place] == indices[1]
        kept = indices[:, there].clone()
        kept[1] = place[there]
        return torch.sparse_coo_tensor(kept, values[there], (STUDENT, len(columns)),
                                       check_invariants=False).coalesce()

    def distilled(self, z):
        p = self.p
        probs = self.student_log_probs(z).exp()
        columns = self.columns()
        flat = probs.reshape(-1, STUDENT)
        projected = PublishedProduct.apply(self.restricted(columns), flat.t()).t().reshape(1, p.rows, K)
        target = self.teacher_log_probs(self.teacher[..., columns])
        q, student_sizes = published_chunk_means(projected, self.student_chunks, p.chunks)
        a, teacher_sizes = published_chunk_means(target, self.teacher_chunks, p.chunks)
        q = q / (q.sum(dim=-1, keepdim=True) + EPSILON)
        s = (q + EPSILON).log()
        there = self.valid(student_sizes, teacher_sizes)
        counted = (there & self.sample_mask.bool().unsqueeze(-1)).sum().float()
        if counted.item() == 0:
            return torch.zeros(()), []
        with torch.no_grad():
            agree = (q.argmax(dim=-1) == torch.exp(a).argmax(dim=-1)) & there
            agreement = agree.sum().float() / there.sum().float().clamp(min=1.0)
        each = published_divergence(s, a).sum(dim=-1)
        weights = there.to(each.dtype) * self.sample_mask.unsqueeze(-1)
        loss = (each * weights).sum() / counted.clamp(min=1.0) * TEMPERATURE ** 2
        return loss, [weights.sum(), agreement]


class PublishedGold(Published):
    """In the order of the code: log-softmax of both sides, chunk means of whole vocabularies, masks, the divergence of
    the pairs, the largest of the others' probabilities side by side, the pairs' agreement."""

    def __init__(self, p):
        super().__init__(p)
        self.pairs, self.partners, self.rest, self.other_rest = p.exact_map()

    @staticmethod
    def largest(log_probs, k):
        probs = log_probs.exp()
        return torch.topk(probs, k=k, dim=-1).values if probs.shape[-1] > k else probs.sort(-1, descending=True).values

    def distilled(self, z):
        p = self.p
        student, teacher = self.student_log_probs(z), self.teacher_log_probs(self.teacher)
        alpha, student_sizes = published_chunk_means(student, self.student_chunks, p.chunks)
        beta, teacher_sizes = published_chunk_means(teacher, self.teacher_chunks, p.chunks)
        counted = self.valid(student_sizes, teacher_sizes) & self.sample_mask.bool().unsqueeze(-1)
        count = counted.sum().float()
        if count.item() == 0:
            return torch.zeros(()), []
        common, other_common = alpha[:, :, self.pairs], beta[:, :, self.partners]
        divergence = (published_divergence(common, other_common).sum(dim=-1) * counted).sum() / count.clamp(min=1.0)
        rest, other_rest = alpha[:, :, self.rest][counted], beta[:, :, self.other_rest][counted]
        k = min(rest.shape[-1], other_rest.shape[-1], TAIL)
        x, y = self.largest(rest, k), self.largest(other_rest, k)
        tail = torch.nn.functional.l1_loss(x, y, reduction="none").sum(dim=-1).sum() / count.clamp(min=1.0)
        with torch.no_grad():
            agree = common[counted].argmax(dim=-1) == other_common[counted].argmax(dim=-1)
            agreement = agree.sum().float() / count.clamp(min=1.0)
        return (divergence + tail) * TEMPERATURE ** 2, [divergence.detach(), tail.detach(), count, agreement]


# ---- tuned ----


def chunk_means(values, chunk_ids, chunks):
    mask = (chunk_ids[None, :] == torch.arange(chunks)[:, None]).float()
    return mask @ values / (mask.sum(1, keepdim=True) + EPSILON)


class TunedProjected:
    with_labels = False

    def __init__(self, p):
        self.p = p
        self.matrix = p.projection()

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


class TunedGold:
    with_labels = False

    def __init__(self, p):
        self.p = p
        self.pairs, self.partners, self.rest, self.other_rest = p.exact_map()

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


FORMS = {("published", False): PublishedProjected, ("published", True): PublishedGold,
         ("tuned", False): TunedProjected, ("tuned", True): TunedGold}


def timed(function):
    wall, processor = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - processor


def gradient_error(ours, theirs):
    """The largest difference by the largest element; a part of the rows at a time."""
    parts = [(a.float(), b.float()) for a, b in zip(ours.split(64), theirs.split(64))]
    return max((a - b).abs().max().item() for a, b in parts) / max(b.abs().max().item() for _, b in parts)


def compare(library, form, p):
    inputs = p.inputs(FORMS[form, p.gold].with_labels)
    shim = library.xtoken_shim_open(ctypes.byref(inputs), int(p.gold), ARGS.threads)
    theirs = FORMS[form, p.gold](p)
    ours = library.xtoken_shim_run
    value, (reference, gradient) = ours(shim), theirs.run()
    error = gradient_error(p.gradient, gradient)
    del gradient
    limit = (1e-2, 1.0) if p.edge_is_tied() else (1e-4, 0.01 if p.dtype is torch.bfloat16 else 1e-3)
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
    report(form, p, a, b, (value, reference, error))
    return True


def report(form, p, a, b, check):
    row = 1e6 / p.rows
    walls = [statistics.median(t[0] for t in x) * row for x in (a, b)]
    works = [statistics.median(t[1] for t in x) * row for x in (a, b)]
    ratios = [statistics.median(y[i] / x[i] for x, y in zip(a, b)) for i in (0, 1)]
    kind, dtype = "gold" if p.gold else "projected", "bf16" if p.dtype is torch.bfloat16 else "f32"
    print(f"{kind:9} {form:9} {dtype:4}  us/row: {walls[0]:8.1f} {walls[1]:9.1f}  ratio {ratios[0]:6.1f}"
          f"   processor us/row: {works[0]:8.1f} {works[1]:9.1f}  ratio {ratios[1]:6.1f}"
          f"   loss {check[0]:.6g} {check[1]:.6g}, gradient error {check[2]:.1e}", flush=True)
    if not ARGS.json:
        return
    shape = {"T": p.rows, "Vs": STUDENT, "Vt": TEACHER, "K": K, "chunks": p.chunks}
    ms = [{"median": statistics.median(t[0] for t in x) * 1e3, "cpu_median": statistics.median(t[1] for t in x) * 1e3,
           "samples": len(x), "rounds": ARGS.rounds} for x in (a, b)]
    line = {"schema": "xdistill-bench/1", "op": "cross-tokenizer loss", "variant": f"{kind}, columns {ARGS.columns}",
            "shape": shape, "dtype_in": dtype, "arm": "xdistill", "mode": "as_used", "ms": ms[0], "reference_ms": ms[1],
            "ratio": {"vs": f"torch {torch.__version__} {form}", "median": ratios[0], "cpu_median": ratios[1]},
            "cpu_share": works[1] / walls[1] / ARGS.threads,  # near 1 where the machine had no other work
            "check": {"loss": check[0], "reference": check[1], "gradient_error": check[2], "pass": True},
            "device": machine.describe(ARGS.threads, ALLOCATOR)}
    with open(ARGS.json, "a") as out:
        out.write(json.dumps(line) + "\n")


def main():
    library = ctypes.CDLL(os.path.abspath(ARGS.library))
    library.xtoken_shim_open.restype = ctypes.c_void_p
    library.xtoken_shim_open.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    library.xtoken_shim_run.restype, library.xtoken_shim_run.argtypes = ctypes.c_double, (ctypes.c_void_p,)
    library.xtoken_shim_close.restype, library.xtoken_shim_close.argtypes = None, (ctypes.c_void_p,)
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads each, {ARGS.rows} rows, "
          f"columns: {ARGS.columns}")
    right = True
    for gold in (False, True):
        for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            if ARGS.only not in ("", "gold" if gold else "projected") or ARGS.dtype not in ("", name):
                continue
            p = Problem(ARGS.rows, gold, dtype)
            for form in ("published", "tuned"):
                right = (ARGS.form not in ("", form) or compare(library, form, p)) and right
            del p
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
