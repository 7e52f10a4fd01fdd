#!/usr/bin/env python3
"""PyTorch's time of the operations of bench/gpu.cu, on one GPU, for its column "peer". Lines "name dtype ms" on standard output.

    python3 bench/torch/peers.py [SECONDS]      stops after so many seconds, 25; what is left has no line

Sizes are those of bench/gpu_side.h. Each operation is timed as PyTorch has it and, while a third of the time is left, compiled; the
faster one counts. compare.py is the careful comparison: it checks results and takes both sides in turn."""

import os
import re
import sys
import time

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
LOSSES = {  # name: hard, soft, temperature, smoothing, kind
    "ce": (1, 0, 1, 0, "kl"), "ce_smoothed": (1, 0, 1, 0.1, "kl"), "kl": (0, 1, 2, 0, "kl"), "kl_t1": (0, 1, 1, 0, "kl"),
    "reverse_kl": (0, 1, 2, 0, "reverse"), "jsd": (0, 1, 2, 0, "jsd"), "hard_soft": (0.5, 0.5, 2, 0, "kl"),
    "hard_soft_t1": (0.5, 0.5, 1, 0, "kl"),
}
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}


def read_sizes():
    """The numbers of a GPU: the second list of gpu_side.h, and those below it."""
    text = open(os.path.join(HERE, "..", "gpu_side.h")).read().split("#else", 1)[1]
    return {name: int(a) << int(b or 0) for name, a, b in re.findall(r"\b([A-Z_]{3,}) = (\d+)(?: << (\d+))?", text)}


S = read_sizes()


def divergence(kind, s, t):
    if kind == "kl": return F.kl_div(s, t, log_target=True, reduction="batchmean")
    if kind == "reverse": return F.kl_div(t, s, log_target=True, reduction="batchmean")
    middle = torch.logaddexp(s, t) - 0.6931471805599453
    return 0.5 * (F.kl_div(middle, s, log_target=True, reduction="batchmean") + F.kl_div(middle, t, log_target=True, reduction="batchmean"))


def loss_of(name, dtype):
    hard, soft, tau, smoothing, kind = LOSSES[name]
    student, teacher = noise(S["LOSS_ROWS"], S["VOCABULARY"], dtype=dtype, size=8), None
    if soft: teacher = noise(S["LOSS_ROWS"], S["VOCABULARY"], dtype=dtype, size=8)
    labels = torch.randint(S["VOCABULARY"], (S["LOSS_ROWS"],), device="cuda")
    student.requires_grad_()

    def value(x, y):
        loss = hard * F.cross_entropy(x, labels, label_smoothing=smoothing) if hard else 0
        if soft: loss = loss + soft * tau ** 2 * divergence(kind, F.log_softmax(x / tau, -1), F.log_softmax(y / tau, -1))
        return loss
    return value, lambda f: torch.autograd.grad(f(student, teacher), student)


def noise(*shape, dtype=torch.bfloat16, size=1.0):
    return torch.empty(*shape, dtype=dtype, device="cuda").uniform_(-size, size)


def plain(function, *tensors):
    """A function and how it is called."""
    return function, lambda f: f(*tensors)


def rows_of(name):
    rows, columns = S["LOSS_ROWS"], S["VOCABULARY"]
    if name == "statistics": return plain(lambda x: (torch.logsumexp(x.float(), -1), x.argmax(-1)), noise(rows, columns))
    if name == "select_64": return plain(lambda x: torch.topk(x, 64), noise(rows, columns))
    return plain(lambda x: torch.topk(x, S["LIST_LENGTH"]), noise(16, S["LIST_COLUMNS"], dtype=torch.float32))


def parameters_of(name, dtype):
    """Lists are of small arrays. PyTorch's bf16 AdamW has bf16 moments: ours has f32 ones, so the peer's are f32 throughout."""
    block, blocks = S["BLOCK"], S["BLOCKS"]
    shapes = [block] * S["ARRAYS"] if "list" in name else [block * blocks * (5 if "norm" in name and dtype == torch.float32 else
                                                                            10 if "norm" in name else 1)]
    weights = [noise(n, dtype=dtype) for n in shapes]
    if name.startswith("norm"): return plain(lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(weights))))
    averages = [w.float() for w in weights]
    average = lambda: torch._foreach_lerp_(averages, [w.float() for w in weights], 0.001)
    if name.startswith("ema"): return plain(average)
    held = [torch.nn.Parameter(w.float()) for w in weights]
    for p in held: p.grad = torch.ones_like(p)
    step = torch.optim.AdamW(held, fused=True).step
    return plain(lambda: (step(), torch._foreach_lerp_(averages, [p.detach() for p in held], 0.001)) if "ema" in name else step())


def samples_of(name):
    rows = S["SAMPLES"] * 4 if name == "vsd_16384" else S["SAMPLES"] * 3 // 4
    x, y, z = (noise(rows, S["SAMPLE"] if name == "vsd_16384" else S["LONG_SAMPLE"]) for _ in range(3))
    if name == "draw": return plain(lambda a: a.normal_(), x)
    if name == "mix": return plain(lambda a, b: 0.5 * a + 0.7 * b, x, y)
    if name == "denoise": return plain(lambda a, b, c: ((a - b).float().square().mean(), (a - c) * (2.0 / a.numel())), x, y, z)
    return plain(lambda a, t, f: (f - t) / ((a - t).float().abs().mean(-1, keepdim=True) + 1e-6).to(a.dtype), x, y, z)


def copies_of(name):
    if name == "redistribute":
        x = noise(S["PIECE_ROWS"], S["BLOCK"])
        return plain(lambda: x[:, :S["BLOCK"] // 2].contiguous())
    pieces = noise(8, S["PIECE_ROWS"] * 2048, dtype=torch.float32)
    return plain(lambda: pieces.sum(0))


def head_of(_):
    hidden, weight = noise(S["HEAD_ROWS"], S["HEAD_WIDTH"], size=0.1), noise(S["VOCABULARY"], S["HEAD_WIDTH"])
    labels = torch.randint(S["VOCABULARY"], (S["HEAD_ROWS"],), device="cuda")
    for tensor in (hidden, weight): tensor.requires_grad_()
    return (lambda h, w: F.cross_entropy(h @ w.T, labels)), lambda f: torch.autograd.grad(f(hidden, weight), (hidden, weight))


def operations():
    """name, dtype, and what makes the function and its call; the most telling first."""
    both, narrow, wide = (torch.bfloat16, torch.float32), torch.bfloat16, torch.float32
    for name in ("ce", "kl", "jsd"):
        for dtype in both: yield name, dtype, lambda n=name, d=dtype: loss_of(n, d)
    for name, dtype in (("norm", narrow), ("norm", wide), ("ema", narrow), ("adamw", narrow), ("adamw_ema", narrow), ("norm_list", narrow),
                        ("ema_list", narrow), ("adamw_list", narrow), ("adamw_ema_list", narrow)):
        yield name, dtype, lambda n=name, d=dtype: parameters_of(n, d)
    for name, dtype in (("statistics", narrow), ("select_64", narrow), ("select_8192", wide)):
        yield name, dtype, lambda n=name: rows_of(n)
    yield "head", narrow, lambda: head_of("head")
    for name in ("vsd_16384", "vsd_65536", "denoise", "mix", "draw"): yield name, narrow, lambda n=name: samples_of(n)
    for name, dtype in (("redistribute", narrow), ("reduce_pieces", wide)): yield name, dtype, lambda n=name: copies_of(n)
    for name in ("reverse_kl", "hard_soft", "ce_smoothed", "kl_t1", "hard_soft_t1"):
        for dtype in both: yield name, dtype, lambda n=name, d=dtype: loss_of(n, d)


def clock(call):
    """ms, the best of a few."""
    best = float("inf")
    for i in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if i > 1: best = min(best, begin.elapsed_time(end))
    return best


def main(seconds):
    begin = time.monotonic()
    for name, dtype, make in operations():
        spent = time.monotonic() - begin
        if spent > seconds: break
        try:
            function, call = make()
            best = clock(lambda: call(function))
            if spent < seconds * 2 / 3 and not name.startswith(("adamw", "select")):
                fast = torch.compile(function, dynamic=False)
                best = min(best, clock(lambda: call(fast)))
            print(name, NAMES[dtype], "%.5f" % best, flush=True)
        except Exception as error:  # of one operation: the others still have lines
            print("# %s %s: %s" % (name, NAMES[dtype], str(error).split("\n")[0]), flush=True)
        function = call = make = fast = None
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 25.0)
