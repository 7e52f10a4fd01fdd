#!/usr/bin/env python3
"""Wrapped models beside PyTorch's, two ranks, on the CPU: the same machine, in turn.

    make bench-wrap         or      wrap.py PROGRAM [-J FILE] [--mpi "mpirun -n 2 PROGRAM"] [--rounds N]

A step of communication has 12 matrices of 2048 x 2048 f32 weights (50 M), each a unit, and no arithmetic: forward, backward,
gradients of zero that are summed. Ours between threads and, with --mpi, between processes; PyTorch's DDP and FSDP2 between
processes over gloo, in the fastest of their forms. The optimizer's row has AdamW with clipping by the norm over both ranks and
one average, on each rank's half of the weights; PyTorch's by separate calls."""

import argparse
import random
import sys

try:
    import torch
    import torch.distributed as dist
except ImportError:
    print("skipped: needs PyTorch")
    sys.exit(0)

import machine
import ranks

UNITS, WIDTH = 12, 2048


class Touch(torch.autograd.Function):
    """Passes the input on. The weight's gradient is zero, of no memory."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.shape = weight.shape
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.zeros(()).expand(ctx.shape)


class Unit(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((WIDTH, WIDTH), 0.5))

    def forward(self, x):
        return Touch.apply(x, self.weight)


class Step:
    """A step of communication."""

    def __init__(self, kind, keep, bucket_mb):
        self.model = torch.nn.Sequential(*(Unit() for _ in range(UNITS)))
        self.keep = keep
        self.x = torch.zeros(1, requires_grad=True)
        if kind == "ddp":
            self.model = torch.nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True,
                                                                   bucket_cap_mb=bucket_mb)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard
            mesh = init_device_mesh("cpu", (ranks.RANKS,))
            for unit in self.model: fully_shard(unit, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def step(self):
        self.model.zero_grad(set_to_none=not self.keep)
        self.model(self.x).sum().backward()

    def run(self):
        return ranks.timed(self.step)


class Optimizer:
    """Norm, clip, AdamW and average of a rank's half, by separate calls."""

    def __init__(self, form):
        count = WIDTH * WIDTH // ranks.RANKS
        self.values = [torch.nn.Parameter(torch.full((count,), 0.5)) for _ in range(UNITS)]
        for value in self.values: value.grad = 1e-3 * (torch.arange(count) % 2039 - 1000).float()
        self.shadows = [value.detach().clone() for value in self.values]
        self.optimizer = torch.optim.AdamW(self.values, **{form: True})

    def step(self):
        norm = torch.nn.utils.get_total_norm([value.grad for value in self.values])
        square = norm.square()
        dist.all_reduce(square)
        torch.nn.utils.clip_grads_with_norm_(self.values, 1.0, square.sqrt())
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.shadows, self.values, 1e-4)

    def run(self):
        return ranks.timed(self.step)


def make(_rank, kind, *arguments):
    return Optimizer(*arguments) if kind == "optimizer" else Step(kind, *arguments)


# Kind, our arm, and PyTorch's forms.
ROWS = [
    ("communication_step", "ddp", {f"DDP, {mb} MB buckets, gradients {'kept' if keep else 'set to none'}": ("ddp", keep, mb)
                                   for keep in (False, True) for mb in (25, 100)}),
    ("communication_step", "fsdp", {"FSDP2": ("fsdp", False, 0)}),
    ("adamw+clip+ema", "optimizer", {f"clip, AdamW {form}, foreach lerp": ("optimizer", form) for form in ("fused", "foreach")}),
]


def fastest(peer, forms):
    """The form that takes the least time; of each the best of three."""
    seen = {}
    for name, arguments in forms.items():
        peer.order("open", *arguments)
        for _ in range(2): peer.order("run")
        seen[name] = min(peer.order("run") for _ in range(3))
        peer.order("close")
    return min(seen, key=seen.get), seen


def measure(row, programs, peer, rounds):
    op, arm, forms = row
    form, seen = fastest(peer, forms)
    peer.order("open", *forms[form])
    arms = {"torch": lambda: peer.order("run")}
    for name, program in programs.items():
        program.order("open", arm)
        arms[name] = lambda program=program: program.order("step", arm)[0]
    seconds = ranks.interleave(arms, rounds)
    sent = {name: program.order("step", arm)[1] for name, program in programs.items()}
    for program in programs.values(): program.order("close", arm)
    peer.order("close")
    for name in programs:
        yield {"schema": "xdistill-bench/1", "op": op, "variant": f"{arm}, {name}",
               "shape": {"n": ranks.RANKS, "P": UNITS * WIDTH * WIDTH, "units": UNITS, "bytes_sent": int(sent[name])},
               "dtype_in": "f32", "arm": "xdistill", "mode": "as_used", "ms": ranks.milliseconds(seconds[name]),
               "reference_ms": ranks.milliseconds(seconds["torch"]),
               "ratio": {"vs": f"torch {torch.__version__} gloo, {form}", **ranks.ratios(seconds[name], seconds["torch"])},
               "forms_ms": {key: round(1e3 * value, 3) for key, value in seen.items()}}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("program", help="build/bench/wrap")
    p.add_argument("-J", metavar="FILE", help="append the rows to FILE as JSON lines")
    p.add_argument("--mpi", metavar="COMMAND", help="what runs build/bench/wrap_mpi on two processes")
    p.add_argument("--rounds", type=int, default=7)
    args = p.parse_args()
    random.seed(1)
    device = machine.describe(1, {})
    programs = {"threads": ranks.Program(args.program, "serve")}
    if args.mpi: programs["mpi"] = ranks.Program(*args.mpi.split(), "serve")
    peer = ranks.Torch(make)
    print(f"# two ranks, one core each, beside PyTorch {torch.__version__} over gloo; {device['cpu']}, git {device['commit'][:12]}")
    print(f"# {'op':<20}{'ours':<22}{'ms':>10}{'torch ms':>10}{'times':>8}  {'10-90 %':<14}form")
    for row in ROWS:
        for line in measure(row, programs, peer, args.rounds):
            r = line["ratio"]
            print(f"  {line['op']:<20}{line['variant']:<22}{line['ms']['median']:>10.2f}{line['reference_ms']['median']:>10.2f}"
                  f"{r['median']:>8.2f}  {'%.2f-%.2f' % (r['p10'], r['p90']):<14}{r['vs'].split(', ', 1)[1]}", flush=True)
            ranks.keep(line, args.J, device)
    peer.close()
    for program in programs.values(): program.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
