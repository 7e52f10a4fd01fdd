#!/usr/bin/env python3
"""xdistill beside PyTorch, on the CPU or one GPU: same memory, same process, interleaved.

    make bench-torch        or      compare.py LIBRARY [-J FILE] [--only NAMES] [--size FACTOR] [--rounds N] [--threads N]

Every row first checks both results against double precision, then picks PyTorch's fastest admissible form (eager and
compiled), then times blocks A B B A or B A A B by a coin, and prints the median of the per-block ratios, its 95 % interval,
and the spread of the same comparison of our arm with itself. The floor of a row is the largest of its bytes over the rate at
which memory is read and written in place, the bytes that it reads over the rate at which memory is only read, which may be
less than half of the other, and its powers, logarithms or products over theirs; the score is the median of floor / measured
over our samples. Rates are the medians of many windows of a few milliseconds just before and just after the sample, the
higher of the two, because a host's other guests take memory and half a core away for seconds: a block during which a rate
falls below nine tenths of its best is void and done again, up to three times; "steady" is the lowest share among the blocks
that count. The best rates of arithmetic are printed at the end. "model" is what to expect: the floor over the score the row
should reach; "H100" the same from that card's recorded rates, a prediction. A row holds when its ratio or its score reaches
the target; it is unsteady, and says nothing, when a rate fell below three quarters of its best all the time.

Gradients of losses go over the logits, as a trainer lets them: the logits are restored before each call of either arm,
outside of the clock, and what the caches then have to write back is driven out. A host may give two cores hardly more
memory bandwidth than one ("near") or nearly twice as much ("far"), and may change that from second to second: what two
cores ask of memory is scored by the state of each sample, which is told from the rates around it.

Threads stay on cores of their own, PyTorch's by OMP_PROC_BIND, ours beside them. Of losses, ours take a few rows at a time
from what is left.

Rows whose memory exceeds 16 times the last-level cache run from memory, the others are "hot". The allocator keeps its
memory, so that no arm pays for page faults, and asks for large pages, so that none pays for the ends of small ones. The
whole table takes some minutes; --hot adds small sizes; --busy counts processor time instead of wall time, for a machine that
others use, where threads that wait in a loop count as well.

--device cuda (make bench-torch-gpu; LIBRARY is gpu_shim.cu) times by events on the stream that both arms use. There the only
ceiling is a copy of as many bytes, the target is the score that a card should reach, rows are eight times as large, and
Liger's kernels are among the forms where they are installed."""

import argparse
import ctypes
import gc
import json
import os
import random
import statistics
import sys
import time

ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184", "MALLOC_TOP_PAD_": "268435456",
             "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
PAUSE = 0.02  # seconds before each sample: PyTorch's worker threads stop spinning meanwhile
WINDOWS = 8  # of a probe before and after a sample: each way through memory twice
STEADY, UNSTEADY = 0.9, 0.75  # of the best rate: below it, somebody else had the machine, or had so much of it
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []  # before PyTorch takes its own


def restart_with_fair_settings(threads):
    """An allocator that keeps its memory, and a core for each thread."""
    wanted = dict(ALLOCATOR, OMP_NUM_THREADS=str(threads))
    if len(CORES) >= threads:
        wanted.update(OMP_PROC_BIND="true", OMP_PLACES=",".join("{%d}" % core for core in CORES[:threads]))
    if any(os.environ.get(k) != v for k, v in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable] + sys.argv)


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("library", help="shim.c as a shared library")
    p.add_argument("-J", metavar="FILE", help="append the rows to FILE as JSON lines")
    p.add_argument("--only", default="", help="comma-separated beginnings of row names")
    p.add_argument("--size", type=float, default=1.0, help="factor on the sizes of the large rows")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--exclusive", action="store_true",
                   help="timed blocks go before all other work of the machine (SCHED_FIFO, needs root)")
    p.add_argument("--hot", action="store_true", help="add rows that stay in the cache")
    p.add_argument("--busy", action="store_true", help="processor time per thread instead of wall time")
    p.add_argument("--check", action="store_true", help="only check results, of all forms, and time nothing")
    p.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    return p.parse_args()


# What a row should reach: ratio to PyTorch (0: none), score, then the same on an H100: score there and the ceiling it is of,
# bytes or operations a second.
COPY, PRODUCTS = 3.0e12, 798e12
TARGETS = {
    "ce_bf16": (10, 0.68, 0.90, COPY), "ce_f32": (8, 0.75, 0.90, COPY),
    "kl_bf16": (20, 0.80, 0.88, COPY), "kl_f32": (12, 0.80, 0.88, COPY),
    "jsd_bf16": (0, 0.65, 0.85, COPY), "jsd_f32": (0, 0.65, 0.85, COPY),
    "ema_bf16": (1.35, 0.95, 0.92, COPY), "ema_f32": (1.35, 0.95, 0.92, COPY),
    "adamw": (1.35, 0.94, 0.92, COPY), "both": (1.7, 0.94, 0.92, COPY),
    "norm_f32": (2.5, 0.90, 0.93, COPY), "norm_bf16": (10, 0.90, 0.93, COPY),
    "select": (14, 1.0, 0.75, COPY), "head": (0, 0.60, 0.92, PRODUCTS),
}
FAR = 1.45  # cores are far apart from this many times one core's rate, in place, on
FAR_SCORES = {"ce_f32": 0.55}  # that a row should reach there, where it is not the same
SELECT_SECONDS = 60e-6  # a list of 8192 of 50,000 on one core

ARGS = parse()
restart_with_fair_settings(ARGS.threads)
try:
    import torch
    import torch.nn.functional as F

    import machine
except ImportError:
    print("skipped: needs PyTorch")
    sys.exit(0)
ON_GPU = ARGS.device == "cuda"
if ON_GPU and not torch.cuda.is_available():
    print("skipped: needs a GPU and a PyTorch that can use it")
    sys.exit(0)
if ON_GPU: ARGS.threads = 1
torch.set_default_device(ARGS.device)


def thread_ids():
    """Of this process, where the system tells."""
    return [int(thread) for thread in os.listdir("/proc/self/task")] if os.path.isdir("/proc/self/task") else []


class Shim:
    """One operation of ours on given memory."""

    library = None

    @classmethod
    def load(cls, path):
        cls.library = lib = ctypes.CDLL(os.path.abspath(path))
        pointer, i64, real, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int
        forms = {
            "shim_loss": (pointer, integer, integer, i64, i64, pointer, pointer, pointer, pointer, real, ctypes.c_bool),
            "shim_head": (pointer, integer, i64, i64, i64, pointer, pointer, pointer, pointer, pointer),
            "shim_select": (pointer, integer, integer, i64, i64, pointer, i64),
            "shim_ema": (pointer, integer, i64, integer, pointer, real),
            "shim_adamw": (pointer, integer, i64, integer, pointer, integer, pointer, real),
            "shim_norm": (pointer, integer, i64, integer, pointer),
            "shim_probe": (pointer, integer, pointer, ctypes.c_bool), "shim_probed_bytes": (i64, pointer),
            "shim_unit": (pointer, integer, ctypes.c_bool), "shim_unit_count": (i64,),
            "shim_dots": (pointer, integer), "shim_dot_count": (i64,), "shim_extra_bytes": (i64, pointer),
            "shim_run": (None, pointer), "shim_close": (None, pointer), "shim_value": (real, pointer),
            "shim_ids": (None, pointer, pointer), "shim_average": (None, pointer, pointer),
            "shim_dtype": (integer, ctypes.c_bool), "shim_level": (ctypes.c_char_p,),
        }
        for name, (result, *arguments) in forms.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments

    def __init__(self, kind, *arguments, threads=0):
        count = threads or ARGS.threads
        before = set(thread_ids())
        self.handle = getattr(self.library, "shim_" + kind)(count, *arguments)
        workers = sorted(set(thread_ids()) - before)
        if len(CORES) >= count and len(workers) == count - 1:  # the caller has the first core
            for worker, core in zip(workers, CORES[1:]): os.sched_setaffinity(worker, {core})

    def __call__(self):
        self.library.shim_run(self.handle)

    def value(self):
        return self.library.shim_value(self.handle)

    def close(self):
        self.library.shim_close(self.handle)


def dtype_of(tensor):
    return Shim.library.shim_dtype(tensor.dtype == torch.bfloat16)


def compiled(function):
    """The function under torch.compile, or None when that is left out."""
    return None if ARGS.no_compile else torch.compile(function, dynamic=False)


def liger_forms(row):
    """Liger's kernel for a loss, where it is installed and has one."""
    if not ON_GPU: return {}
    try:
        from liger_kernel.transformers import functional as liger
    except ImportError:
        return {}
    log_softmax = lambda x: F.log_softmax(x.float() / row.temperature, -1)
    value = {
        "ce": liger.liger_cross_entropy,
        "kl": lambda s, t: liger.liger_kl_div(log_softmax(s), log_softmax(t), reduction="batchmean",
                                              log_target=True) * row.temperature ** 2,
        "jsd": lambda s, t: liger.liger_jsd(log_softmax(s), log_softmax(t)),
    }[row.kind]
    return {"liger": row.with_gradient(value)}


def distance(x, reference):
    x, reference = x.double(), reference.double()
    return float((x - reference).norm() / reference.norm())


class Row:
    """One comparison: `ours` is timed against the fastest of `forms`. Subclasses say what they compute, how many bytes it
    moves at least, and how far each side is from double precision."""

    limit = 1e-5  # largest relative error of an arm
    threads = 0   # 0: as many as the others
    powers = logarithms = products = reads = 0  # that the operation takes; reads: bytes of what it reads
    seconds = 0.0  # where the target is a time on all cores
    restore = None  # makes the inputs what they were, of operations that write over them

    def label(self):
        return self.op + (" " + self.dtype if self.dtype else "") + (" hot" if self.hot() else "")

    def floors(self, unit):
        """Seconds that each bound allows, from what one byte and one operation take."""
        return {"bytes": self.bytes * unit.get("bytes", 0.0), "reads": self.reads * unit.get("reads", 0.0),
                "flop": self.products * unit.get("products", 0.0),
                "sfu": self.powers * unit.get("powers", 0.0) + self.logarithms * unit.get("logarithms", 0.0),
                "latency": self.seconds}

    def hot(self):
        return self.footprint < 16 * cache_bytes()

    def close(self):
        self.ours.close()


class Loss(Row):
    """Value and gradient of a mean loss over rows of logits; the gradient goes over the logits."""

    ceiling = "in place"

    def __init__(self, kind, dtype, rows, cols=128256, temperature=1.0):
        self.op, self.kind, self.temperature = kind + "_fwd_bwd", kind, temperature
        soft = kind != "ce"
        self.dtype, self.shape = str(dtype).split(".")[1], {"N": rows, "V": cols, "T": temperature}
        self.limit = 1e-5 if dtype == torch.float32 else 6e-3
        self.student = torch.empty(rows, cols, dtype=dtype).normal_(0, 4)
        self.kept = self.student.clone()
        self.passed_by = torch.zeros(2 * cache_bytes() // 4)
        self.student.requires_grad_()
        self.teacher = None
        self.labels = torch.randint(cols, (rows,))
        if soft:
            self.teacher = self.kept + torch.empty(rows, cols, dtype=dtype).normal_(0, 1)
        units = 3 if soft else 2
        self.bytes = units * self.student.numel() * self.student.element_size()
        self.footprint, self.elements = self.bytes, self.student.numel()
        self.reads = self.bytes // units * (units - 1)
        self.powers = {"ce": 2, "kl": 4, "jsd": 7}[kind] * self.elements
        self.logarithms = 2 * self.elements if kind == "jsd" else 0
        self.ours = Shim("loss", dtype_of(self.student), rows, cols, self.student.data_ptr(),
                         self.teacher.data_ptr() if soft else None, None if soft else self.labels.data_ptr(),
                         self.student.data_ptr(), temperature, kind == "jsd")
        self.forms = {}
        for widen in (False, True) if dtype != torch.float32 else (False,):
            value = self.value_function(widen)
            suffix = " .float()" if widen else ""
            self.forms["eager" + suffix] = self.with_gradient(value)
            fast = compiled(value)
            if fast: self.forms["compile" + suffix] = self.with_gradient(fast)
        self.forms.update(liger_forms(self))

    def restore(self):
        self.student.detach().copy_(self.kept)
        if self.footprint > cache_bytes(): self.passed_by.sum()

    def value_function(self, widen):
        tau = self.temperature
        if self.kind == "ce":
            return lambda s, t: F.cross_entropy(s.float() if widen else s, t)

        def kl(s, t):
            if widen: s, t = s.float(), t.float()
            s, t = F.log_softmax(s / tau, -1), F.log_softmax(t / tau, -1)
            return F.kl_div(s, t, log_target=True, reduction="batchmean") * tau ** 2

        def jsd(s, t):
            if widen: s, t = s.float(), t.float()
            s, t = F.log_softmax(s, -1), F.log_softmax(t, -1)
            middle = torch.logaddexp(s, t) - 0.6931471805599453
            return 0.5 * (F.kl_div(middle, s, log_target=True, reduction="batchmean") +
                          F.kl_div(middle, t, log_target=True, reduction="batchmean"))
        return kl if self.kind == "kl" else jsd

    def with_gradient(self, value):
        other = self.labels if self.kind == "ce" else self.teacher

        def run():
            loss = value(self.student, other)
            return loss, torch.autograd.grad(loss, self.student)[0]
        return run

    def expected(self, n):
        student = self.kept[:n].double().requires_grad_()
        other = self.labels[:n] if self.kind == "ce" else self.teacher[:n].double()
        loss = self.value_function(False)(student, other)
        return torch.autograd.grad(loss, student)[0] * (n / self.student.shape[0])

    def check(self, form):
        n = min(4, self.student.shape[0])
        expected = self.expected(n)
        self.restore()
        if form is None:
            self.ours()
            return distance(self.student.detach()[:n], expected)
        return distance(form()[1][:n], expected)


class Ema(Row):
    op, ceiling, decay = "ema", "in place", 0.999

    def __init__(self, dtype, count):
        self.dtype, self.shape = "f32 of " + str(dtype).split(".")[1], {"P": count}
        self.live = torch.empty(count, dtype=dtype).normal_()
        self.ours = Shim("ema", count, dtype_of(self.live), self.live.data_ptr(), self.decay)
        self.shadow = self.live.float().clone()
        self.before = self.shadow[:1 << 16].clone()
        self.live.add_(torch.ones_like(self.live))
        self.bytes = self.footprint = count * (8 + self.live.element_size())
        self.reads = count * (4 + self.live.element_size())
        self.elements = count
        weight = 1 - self.decay

        def lerp(shadow, live):
            shadow.lerp_(live.float(), weight)

        def multiply(shadow, live):
            shadow.mul_(self.decay).add_(live, alpha=weight)
        self.forms = {"lerp_": lambda: lerp(self.shadow, self.live),
                      "mul_ add_": lambda: multiply(self.shadow, self.live)}
        fast = compiled(lerp)
        if fast: self.forms["compile lerp_"] = lambda: fast(self.shadow, self.live)

    def check(self, form):
        n = self.before.numel()
        target = self.before.double() + (1 - self.decay) * (self.live[:n].double() - self.before.double())
        if form is None:
            self.ours()
            found = torch.empty_like(self.live, dtype=torch.float32)
            Shim.library.shim_average(self.ours.handle, found.data_ptr())
            return distance(found[:n], target)
        self.shadow[:n] = self.before
        form()
        return distance(self.shadow[:n], target)


class AdamW(Row):
    op, dtype, ceiling, decay = "adamw", "float32", "in place", 0.0

    def __init__(self, count):
        self.shape = {"P": count}
        self.value = torch.empty(count).normal_()
        self.gradient = torch.empty(count).normal_()
        self.parameter = torch.nn.Parameter(self.value.clone())
        self.parameter.grad = self.gradient
        self.start = self.value[:1 << 16].clone()
        self.shadow = self.value.clone() if self.decay else None
        self.bytes, self.reads = count * (36 if self.decay else 28), count * (20 if self.decay else 16)
        self.footprint, self.elements = count * (20 if self.decay else 16), count
        self.ours = Shim("adamw", count, dtype_of(self.value), self.value.data_ptr(), dtype_of(self.gradient),
                         self.gradient.data_ptr(), self.decay)
        self.forms = {}
        for name, options in (("fused", {"fused": True}), ("foreach", {"foreach": True})):
            optimizer = torch.optim.AdamW([self.parameter], **options)
            self.forms[name] = self.step(optimizer.step)
        fast = compiled(torch.optim.AdamW([self.parameter], foreach=True).step)
        if fast: self.forms["compile"] = self.step(fast)

    def step(self, step):
        return step

    def check(self, form):
        n, start, g = self.start.numel(), self.start.double(), self.gradient[:self.start.numel()].double()
        expected = start * (1 - 1e-5) - 1e-3 * g / (g.abs() + 1e-8)
        with torch.no_grad():
            self.parameter[:n] = self.start
        (form or self.ours)()
        found = self.parameter.detach()[:n] if form else self.value[:n]
        return distance(found - self.start, expected - start)

    limit = 1e-4  # of the difference that the first step makes


class AdamWEma(AdamW):
    """One pass of ours against PyTorch's two."""

    op, decay = "adamw+ema", 0.999

    def __init__(self, count):
        self.averages = [lambda s, p: s.lerp_(p, 1 - 0.999)]
        fast = compiled(self.averages[0])
        if fast: self.averages.append(fast)
        super().__init__(count)
        self.forms = {name + " + " + ("compile " if i else "") + "lerp_": self.both(form, average)
                      for name, form in self.forms.items() for i, average in enumerate(self.averages)}

    def both(self, step, average):
        def run():
            step()
            with torch.no_grad():
                average(self.shadow, self.parameter)
        return run


class Norm(Row):
    op, ceiling = "grad_norm", "read"

    def __init__(self, dtype, count):
        self.dtype, self.shape = str(dtype).split(".")[1], {"P": count}
        self.gradient = torch.empty(count, dtype=dtype).normal_()
        self.bytes = self.footprint = self.reads = count * self.gradient.element_size()
        self.elements = count
        self.ours = Shim("norm", count, dtype_of(self.gradient), self.gradient.data_ptr())
        self.expected = sum(float(part.double().square().sum()) for part in self.gradient.split(1 << 22)) ** 0.5
        self.limit = 1e-3 if dtype == torch.float32 else 1e-2
        self.forms = {"vector_norm": lambda: torch.linalg.vector_norm(self.gradient),
                      "get_total_norm": lambda: torch.nn.utils.get_total_norm([self.gradient]),
                      "_foreach_norm": lambda: torch._foreach_norm([self.gradient])[0]}
        if dtype != torch.float32:
            self.forms["float().norm()"] = lambda: self.gradient.float().norm()
        fast = compiled(lambda x: torch.linalg.vector_norm(x.float()))
        if fast: self.forms["compile vector_norm"] = lambda: fast(self.gradient)

    def check(self, form):
        if form: return abs(float(form()) / self.expected - 1)
        self.ours()
        return abs(self.ours.value() ** 0.5 / self.expected - 1)


class Select(Row):
    """On one core, as its target is."""

    op, dtype, ceiling, limit, threads = "select", "float32", None, 0.0, 1

    def __init__(self, rows, cols=50000, k=8192):
        self.shape = {"N": rows, "V": cols, "K": k}
        self.data, self.k = torch.randn(rows, cols), k
        self.bytes = self.footprint = self.data.numel() * 4 + rows * k * 12
        self.seconds = 0.0 if ON_GPU else SELECT_SECONDS * rows
        self.elements = self.data.numel()
        self.ours = Shim("select", dtype_of(self.data), rows, cols, self.data.data_ptr(), k, threads=1)
        self.forms = {"topk": lambda: torch.topk(self.data, k), "sort": lambda: torch.sort(self.data, descending=True)}

    def check(self, form):
        expected = torch.topk(self.data, self.k).values
        if form: return distance(form()[0][:, :self.k], expected)
        self.ours()
        ids = torch.empty(self.data.shape[0], self.k, dtype=torch.int64)
        Shim.library.shim_ids(self.ours.handle, ids.data_ptr())
        return distance(self.data.gather(1, ids), expected)


class Head(Row):
    """Cross entropy with its head, on one core: the products decide, of bf16 or, without an instruction for those, f32."""

    op, dtype, ceiling, limit, threads = "head", "bfloat16", None, 1e-2, 1

    def __init__(self, rows=512, cols=16384, width=1024):
        self.shape = {"N": rows, "V": cols, "H_s": width}
        self.hidden = torch.randn(rows, width).mul_(0.1).bfloat16().requires_grad_()
        self.weight = torch.randn(cols, width).mul_(0.1).bfloat16().requires_grad_()
        self.labels = torch.randint(cols, (rows,))
        self.hidden_gradient, self.weight_gradient = torch.zeros(rows, width), torch.zeros(cols, width)
        self.products, self.elements = 6 * rows * cols * width, rows * cols
        self.bytes = 2 * (rows + cols) * width + 4 * rows * width + 8 * cols * width
        self.footprint = self.bytes
        self.ours = Shim("head", rows, cols, width, self.hidden.data_ptr(), self.weight.data_ptr(),
                         self.labels.data_ptr(), self.hidden_gradient.data_ptr(), self.weight_gradient.data_ptr(), threads=1)

        def value(x, w, labels):
            return F.cross_entropy((x @ w.t()).float(), labels)

        def with_gradient(function):
            return lambda: torch.autograd.grad(function(self.hidden, self.weight, self.labels), (self.hidden, self.weight))[0]
        self.forms = {"eager": with_gradient(value)}
        fast = compiled(value)
        if fast: self.forms["compile"] = with_gradient(fast)

    def check(self, form):
        hidden = self.hidden.detach()[:4].float().requires_grad_()
        loss = F.cross_entropy(hidden @ self.weight.detach().float().t(), self.labels[:4]) * (4 / self.hidden.shape[0])
        expected = torch.autograd.grad(loss, hidden)[0]
        if form: return distance(form()[:4], expected)
        self.ours()
        return distance(self.hidden_gradient[:4], expected)


def rows():
    """Sizes: the large rows come to at least 16 times a cache of 32 MiB, the small ones stay in it."""
    s, bf16, f32 = ARGS.size * (8 if ON_GPU else 1), torch.bfloat16, torch.float32
    n = lambda count: max(1 << 12, int(count * s) // 4096 * 4096)
    return [
        ("ce_bf16", lambda: Loss("ce", bf16, max(16, int(1024 * s)))),
        ("ce_f32", lambda: Loss("ce", f32, max(16, int(512 * s)))),
        ("kl_bf16", lambda: Loss("kl", bf16, max(16, int(768 * s)), temperature=2.0)),
        ("kl_f32", lambda: Loss("kl", f32, max(16, int(384 * s)), temperature=2.0)),
        ("jsd_bf16", lambda: Loss("jsd", bf16, max(16, int(768 * s)))),
        ("jsd_f32", lambda: Loss("jsd", f32, max(16, int(384 * s)))),
        ("ema_bf16", lambda: Ema(bf16, n(96 << 20))),
        ("ema_f32", lambda: Ema(f32, n(80 << 20))),
        ("adamw", lambda: AdamW(n(40 << 20))),
        ("both", lambda: AdamWEma(n(40 << 20))),
        ("norm_f32", lambda: Norm(f32, n(160 << 20))),
        ("norm_bf16", lambda: Norm(bf16, n(320 << 20))),
        ("select", lambda: Select(16)),
        ("head", Head),
        ("hot_ce_bf16", lambda: Loss("ce", bf16, 16)),
        ("hot_ce_f32", lambda: Loss("ce", f32, 16)),
        ("hot_kl_bf16", lambda: Loss("kl", bf16, 16, temperature=2.0)),
        ("hot_kl_f32", lambda: Loss("kl", f32, 16, temperature=2.0)),
        ("hot_ema_bf16", lambda: Ema(bf16, 1 << 20)),
        ("hot_adamw", lambda: AdamW(1 << 20)),
        ("hot_both", lambda: AdamWEma(1 << 20)),
        ("hot_norm_f32", lambda: Norm(f32, 4 << 20)),
        ("hot_norm_bf16", lambda: Norm(bf16, 4 << 20)),
    ]


def prefer(first):
    """Puts all threads of the process before everything else on the machine, or back among the others."""
    if not ARGS.exclusive: return
    for thread in thread_ids():
        os.sched_setscheduler(thread, os.SCHED_FIFO if first else os.SCHED_OTHER, os.sched_param(1 if first else 0))


def clock(function, calls=1, threads=0, restore=None, pause=True):
    """Seconds of one call, and the processor time that the process took for it, per thread. Without `restore` the calls
    are timed together."""
    turns = calls if restore else 1
    together, cpu, wall = calls // turns, 0.0, 0.0
    for _ in range(turns):
        if restore: restore()
        if pause and not ON_GPU: time.sleep(PAUSE)
        if ON_GPU:
            wall += clock_events(function, together)
            continue
        cpu_begin, begin = time.process_time(), time.perf_counter()
        for _ in range(together): function()
        wall += time.perf_counter() - begin
        cpu += time.process_time() - cpu_begin
    share = 1.0 if ON_GPU else cpu / (threads or ARGS.threads) / wall
    return (wall * share if ARGS.busy else wall) / calls, share


def clock_events(function, calls):
    """Seconds of the calls on the stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls): function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def calls_for(function, restore):
    """Calls that fill some milliseconds: what runs hot must find its data where the call before left them. Few where each
    has a pause of its own."""
    seen = statistics.median(clock(function, restore=restore)[0] for _ in range(3))
    return max(1, min(8 if restore else 1 << 20, int(0.02 / max(1e-6, seen))))


def warm_up(function, restore):
    begin, calls = time.perf_counter(), 0
    while calls < 3 or (time.perf_counter() - begin < 0.2 and calls < 10):
        if restore: restore()
        function()
        calls += 1


def pick(row):
    """PyTorch's fastest form whose result is as good as the row asks; and every form's milliseconds and error."""
    seen = {}
    for name, form in row.forms.items():
        error = row.check(form)
        warm_up(form, row.restore)
        seen[name] = {"ms": statistics.median(clock(form, restore=row.restore)[0] for _ in range(5)) * 1e3, "error": error}
    admissible = [name for name in seen if seen[name]["error"] <= row.limit] or list(seen)
    return min(admissible, key=lambda name: seen[name]["ms"]), seen


class Probes:
    """What a byte, a power, a logarithm and a product take at best, with the row's threads: the bytes on the row's own
    arrays, the others from registers and the first cache."""

    best = {}  # seconds of one, by name and threads, of the run so far
    alone = 0.0  # of a byte in place, by one core; 0: not asked for

    def __init__(self, row):
        library, threads = Shim.library, row.threads or ARGS.threads
        self.threads, self.arms = threads, {}
        if row.ceiling:
            probe = Shim("probe", row.ours.handle, False, threads=threads)
            self.arms["reads"] = (probe, library.shim_probed_bytes(probe.handle))
        if row.ceiling == "in place":
            probe = Shim("probe", row.ours.handle, True, threads=threads)
            self.arms["bytes"] = (probe, library.shim_probed_bytes(probe.handle) * 2)
            if threads > 1 and not ON_GPU: self.alone = self.of_one_core(row)
        if row.powers: self.add("powers", Shim("unit", False, threads=threads), library.shim_unit_count())
        if row.logarithms: self.add("logarithms", Shim("unit", True, threads=threads), library.shim_unit_count())
        if row.products: self.add("products", Shim("dots", threads=threads), library.shim_dot_count())

    @staticmethod
    def of_one_core(row):
        probe = Shim("probe", row.ours.handle, True, threads=1)
        count = Shim.library.shim_probed_bytes(probe.handle) * 2
        seen = [clock(probe, 1, 1, pause=False)[0] / count for _ in range(2 * WINDOWS)]
        probe.close()
        return statistics.median(seen)

    def state(self, units):
        """How far apart the cores were."""
        return "far" if self.alone and units["bytes"] * FAR < self.alone else "near"

    def add(self, name, shim, count):
        """An arm that does count of something on every thread, where the library has it."""
        if shim.handle: self.arms[name] = (shim, count * self.threads)

    def look(self):
        """Seconds of one of each, just now."""
        units = {}
        time.sleep(PAUSE)
        for name, (shim, count) in self.arms.items():
            seen = [clock(shim, 1, self.threads, pause=False)[0] / count for _ in range(WINDOWS)]
            units[name] = statistics.median(seen)
            if name not in ("bytes", "reads"):
                key = (name, self.threads)
                self.best[key] = min(min(seen), self.best.get(key, 1.0))
        return units

    def steadiness(self, looks):
        """The lowest rate of the looks as a share of the best one: of memory among them, of arithmetic in the run."""
        shares = [1.0]
        for name in self.arms:
            seen = [look[name] for look in looks]
            shares.append(min([self.best.get((name, self.threads), 1.0)] + seen) / max(seen))
        return min(shares)

    def close(self):
        for shim, _ in self.arms.values(): shim.close()


class Block:
    """Samples in the order ABBA or BAAB: seconds of both arms and, of every a, the units around it and the state."""

    def __init__(self, arms, probes, threads, restore):
        self.times, self.around, self.shares, looks, last = {"a": [], "b": []}, [], [], [], None
        for arm in random.choice(("abba", "baab")):
            if probes and arm == "a" and last is None: looks.append(probes.look())
            seconds, share = clock(*arms[arm], threads, restore)
            self.times[arm].append(seconds)
            self.shares.append(share)
            last = None
            if probes and arm == "a":
                looks.append(probes.look())
                before, last = looks[-2:]
                units = {name: min(before[name], last[name]) for name in last}
                self.around.append((seconds, units, probes.state(units)))
        self.ratio = sum(self.times["b"]) / sum(self.times["a"])
        self.steadiness = probes.steadiness(looks) if looks else 1.0


def interleave(a, b, rounds, restore, probes=None, threads=0):
    """As many blocks as asked: the steady ones or, when there are too few in three times as many, the steadiest."""
    arms, blocks = {"a": (a, calls_for(a, restore)), "b": (b, calls_for(b, restore))}, []
    for _ in range(3 * rounds):
        blocks.append(Block(arms, probes, threads, restore))
        if sum(block.steadiness >= STEADY for block in blocks) == rounds: break
    return sorted(blocks, key=lambda block: -block.steadiness)[:rounds]


def bootstrap(values, draws=2000):
    medians = sorted(statistics.median(random.choices(values, k=len(values))) for _ in range(draws))
    return medians[draws // 40], medians[-draws // 40]


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(blocks, arm):
    ms = [1e3 * t for block in blocks for t in block.times[arm]]
    return {"median": round(statistics.median(ms), 5), "p10": round(percentile(ms, 0.1), 5),
            "p90": round(percentile(ms, 0.9), 5), "samples": len(ms), "rounds": len(blocks)}


def roofline(row, target, far, blocks):
    """Floor, bound and score by sample, and what the model expects. What is asked is `far` of samples in that state."""
    around = [sample for block in blocks for sample in block.around]
    floors = [row.floors(units) for _, units, _ in around]
    tops = [max(floor, key=floor.get) for floor in floors]
    scores = [floor[top] / seconds for floor, top, (seconds, _, _) in zip(floors, tops, around)]
    states = [state for _, _, state in around]
    asked = [far if state == "far" else target[1] for state in states]
    of_state = {state: [score for score, other in zip(scores, states) if other == state] for state in sorted(set(states))}
    floor = statistics.median(max(f.values()) for f in floors)
    names = {"bytes": "in place", "reads": "read", "sfu": "exp", "flop": "dot", "latency": "target"}
    bound = max(set(tops), key=tops.count)
    amount = {"bytes": row.bytes, "reads": row.reads, "sfu": row.powers + row.logarithms, "flop": row.products,
              "latency": 0}[bound]
    roof = {"min_bytes": row.bytes, "min_flop": row.products, "bound": bound, "floor_ms": round(floor * 1e3, 5),
            "ceiling_name": names[bound], "ceiling_value": amount / floor if floor else 0.0,
            "score": round(statistics.median(scores), 4), "target": statistics.median(asked),
            "met": round(statistics.median(score / share for score, share in zip(scores, asked)), 4),
            "far": round(states.count("far") / len(states), 3),
            "by_state": {state: round(statistics.median(seen), 4) for state, seen in of_state.items()}}
    card = (row.products if target[3] == PRODUCTS else row.bytes) / target[3] / target[2]
    return roof, floor / roof["target"] * 1e3, card * 1e3


def measure(name, row, device):
    target = TARGETS[name.replace("hot_", "")]
    if ON_GPU: target = (0, target[2]) + target[2:]  # as far as ratios go, to be ahead is not asked for
    torch.set_num_threads(row.threads or ARGS.threads)
    error = row.check(None)
    form, forms = pick(row)
    warm_up(row.ours, row.restore)
    prefer(True)
    probes = Probes(row)
    blocks = interleave(row.ours, row.forms[form], ARGS.rounds, row.restore, probes, row.threads)
    again = interleave(row.ours, row.ours, max(3, ARGS.rounds // 2), row.restore, None, row.threads)
    same = [block.ratio for block in again]
    prefer(False)
    probes.close()
    ratios = [block.ratio for block in blocks]
    low, high = bootstrap(ratios)
    ours = summary(blocks, "a")
    seconds = ours["median"] * 1e-3
    roof, predicted, card = roofline(row, target, FAR_SCORES.get(name.replace("hot_", ""), target[1]), blocks)
    ratio = statistics.median(ratios)
    steadiness = min(block.steadiness for block in blocks)
    verdict = "ratio" if 0 < target[0] <= ratio else "score" if roof["met"] >= 1 else "below"
    if steadiness < UNSTEADY: verdict = "unsteady"
    return {
        "schema": "xdistill-bench/1", "op": row.op, "variant": "hot" if row.hot() else "", "shape": row.shape,
        "dtype_in": row.dtype, "arm": "xdistill", "mode": "hot" if row.hot() else "as_used", "ms": ours,
        "reference_ms": summary(blocks, "b"),
        "ratio": {"vs": "torch " + torch.__version__ + " " + form, "median": round(ratio, 4), "ci_lo": round(low, 4),
                  "ci_hi": round(high, 4), "aa_spread": round(max(same) - min(same), 4), "target": target[0]},
        "achieved": {"GBps_min": round(row.bytes / seconds * 1e-9, 2), "Gelem_s": round(row.elements / seconds * 1e-9, 3)},
        "roof": roof, "predicted_ms": round(predicted, 5), "predicted_h100_ms": round(card, 5), "verdict": verdict,
        "mem": {"peak_extra_bytes": Shim.library.shim_extra_bytes(row.ours.handle)},
        "check": {"rel_l2": error, "limit": row.limit, "oracle": "float64", "pass": error <= row.limit},
        "forms": forms, "exclusive": ARGS.exclusive, "clock": "processor" if ARGS.busy else "wall",
        "cpu_share": round(statistics.median(share for block in blocks for share in block.shares), 3),
        "steadiness": round(steadiness, 3), "device": device,
    }


def check(row):
    """Prints the errors of all forms; is ours too large?"""
    errors = {name: row.check(form) for name, form in {"xdistill": None, **row.forms}.items()}
    print(f"  {row.label():<26}at most {row.limit:g}: " + ", ".join(f"{name} {errors[name]:.1e}" for name in errors), flush=True)
    return int(not errors["xdistill"] <= row.limit)


def cache_bytes():
    """Of the last level."""
    return torch.cuda.get_device_properties(0).L2_cache_size if ON_GPU else machine.last_level_cache_bytes()


def describe_gpu():
    card = torch.cuda.get_device_properties(0)
    return {"gpu": card.name, "capability": f"{card.major}.{card.minor}", "sm_count": card.multi_processor_count,
            "gpu_memory_bytes": card.total_memory, "cuda": torch.version.cuda,
            "driver": machine.output_of("nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit",
                                        "--format=csv,noheader")}


def describe_device():
    mine = {"isa": Shim.library.shim_level().decode(), "llc_bytes": cache_bytes()}
    return {**(describe_gpu() if ON_GPU else {}), **machine.describe(ARGS.threads, ALLOCATOR), **mine}


def release_free_memory():
    """The next row begins with fresh pages, which large ones can be; where the libc has no such call, with used ones."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim: trim(0)
    if ON_GPU: torch.cuda.empty_cache()


def main():
    Shim.load(ARGS.library)
    torch.set_num_threads(ARGS.threads)
    torch.manual_seed(1)
    random.seed(1)
    device, wrong = describe_device(), 0
    only = [name for name in ARGS.only.split(",") if name]
    print(f"# xdistill ({device['isa']}) beside PyTorch {torch.__version__}, {ARGS.threads} threads each, {device['cpu']}, "
          f"git {device['commit'][:12]}")
    print(f"# {'op':<26}{'ours ms':>10}{'model ms':>10}{'torch ms':>10}{'ratio':>8}  {'95 %':<14}{'A/A':>6}{'asked':>7}"
          f"{'score':>7}{'asked':>6}  {'bound':<9}{'GB/s':>7}{'extra':>9}{'cpu':>6}{'steady':>7}{'far':>6}{'error':>9}{'H100 ms':>9}"
          f"  {'holds by':<9}form")
    for name, make in rows():
        if only and not any(name.startswith(o) for o in only): continue
        if name.startswith("hot_") and not (ARGS.hot or only): continue
        row = make()
        if ARGS.check:
            wrong += check(row)
            row.close()
            continue
        line = measure(name, row, device)
        r, roof = line["ratio"], line["roof"]
        print(f"  {row.label():<26}{line['ms']['median']:>10.3f}{line['predicted_ms']:>10.3f}{line['reference_ms']['median']:>10.3f}"
              f"{r['median']:>8.2f}  {'%.2f-%.2f' % (r['ci_lo'], r['ci_hi']):<14}{r['aa_spread']:>6.2f}{r['target']:>7g}"
              f"{roof['score']:>7.2f}{roof['target']:>6.2f}  {roof['bound']:<9}{line['achieved']['GBps_min']:>7.1f}"
              f"{line['mem']['peak_extra_bytes'] / 1024:>6.0f} KB{line['cpu_share']:>6.2f}{line['steadiness']:>7.2f}{roof['far']:>6.2f}{line['check']['rel_l2']:>9.1e}"
              f"{line['predicted_h100_ms']:>9.3f}  {line['verdict']:<9}{r['vs'].split(' ', 2)[2]}", flush=True)
        if not line["check"]["pass"]: wrong += 1
        if ARGS.J:
            with open(ARGS.J, "a", encoding="utf-8") as file: file.write(json.dumps(line) + "\n")
        row.close()
        del row, line
        gc.collect()
        release_free_memory()
    for (unit, threads), seconds in sorted(Probes.best.items()):
        print(f"# ceiling: {1e-9 / seconds:.2f} G {unit} a second, {threads} threads")
    print(f"# wrong results: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
