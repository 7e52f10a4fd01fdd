#!/usr/bin/env python3
"""Steps of distribution-matching distillation beside PyTorch's, two ranks, on the CPU: the same machine, in turn.

    make bench-dmd         or      dmd.py PROGRAM [-J FILE] [--rounds N]

A turn is a step of the student and four of the fake score over 256 samples, with the networks of examples/toys. PyTorch's: DDP over
gloo, fused AdamW, one average, the terms as FastGen has them. What is outside of the networks' own passes is what a library is
answerable for; PyTorch's is the turn under DDP less the passes of the same networks without DDP, each timed as a section."""

import argparse
import random
import sys
import time

try:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
except ImportError:
    print("skipped: needs PyTorch")
    sys.exit(0)

import machine
import ranks

BATCH, WIDTH, HIDDEN, FREQUENCIES, STEPS, START = 256, 96, 4, 8, 5, 0.999


class Flow(torch.nn.Module):
    """Points at times to their flow."""

    def __init__(self):
        super().__init__()
        sizes = [2 + 2 * FREQUENCIES] + [WIDTH] * HIDDEN
        layers = [part for a, b in zip(sizes, sizes[1:]) for part in (torch.nn.Linear(a, b), torch.nn.SiLU())]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 2))
        self.register_buffer("frequencies", 1.5707963267948966 * 1.7 ** torch.arange(FREQUENCIES), persistent=False)

    def forward(self, x, t):
        angles = t * self.frequencies
        return self.net(torch.cat((x, angles.sin(), angles.cos()), 1))


class Turn:
    """Both forms of the networks: under DDP, and alone with their passes timed."""

    def __init__(self, rank):
        torch.manual_seed(rank)
        self.teacher = Flow().requires_grad_(False)
        self.passes = 0.0
        self.forms = {}
        for form in ("ddp", "alone"):
            student, fake = Flow(), Flow()
            if form == "ddp":
                student, fake = (torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
                                 for net in (student, fake))
            optimizers = [torch.optim.AdamW(net.parameters(), lr=rate, betas=(0.0, 0.99), fused=True)
                          for net, rate in ((student, 3e-4), (fake, 2e-3))]
            average = [value.detach().clone() for value in student.parameters()]
            self.forms[form] = (student, fake, optimizers, average)

    def section(self, action):
        begin = time.perf_counter()
        result = action()
        self.passes += time.perf_counter() - begin
        return result

    def noised(self, x):
        t = 0.02 + 0.96 * torch.rand(x.shape[0], 1, dtype=torch.float64)
        eps = torch.randn_like(x)
        return ((1 - t) * x.double() + t * eps.double()).to(x.dtype), t, eps

    def clean(self, net, x, t):
        flow = self.section(lambda: net(x, t.to(x.dtype)))
        return (x.double() - t * flow.double()).to(x.dtype)

    def student_step(self, form):
        student, fake, optimizers, average = self.forms[form]
        noise = START * torch.randn(BATCH // ranks.RANKS, 2)
        x = self.clean(student, noise, torch.full((noise.shape[0], 1), START, dtype=torch.float64))
        with torch.no_grad():
            noised, t, _ = self.noised(x)
            found, target = self.clean(fake, noised, t), self.clean(self.teacher, noised, t)
            weight = 1 / ((x - target).abs().mean(1, keepdim=True) + 1e-6)
            pseudo = x - (found - target) * weight
        loss = 0.5 * F.mse_loss(x, pseudo)
        optimizers[0].zero_grad(set_to_none=False)
        self.section(loss.backward)
        optimizers[0].step()
        with torch.no_grad(): torch._foreach_lerp_(average, list(student.parameters()), 0.01)
        return x.detach()

    def fake_step(self, form, x):
        _, fake, optimizers, _ = self.forms[form]
        noised, t, eps = self.noised(x)
        flow = self.section(lambda: fake(noised, t.to(x.dtype)))
        loss = F.mse_loss(flow, eps - x)
        optimizers[1].zero_grad(set_to_none=False)
        self.section(loss.backward)
        optimizers[1].step()

    def turn(self, form):
        x = self.student_step(form)
        for _ in range(STEPS - 1): self.fake_step(form, x)

    def run(self, form):
        """Seconds of a turn; of the networks' passes alone."""
        self.passes = 0.0
        seconds = ranks.timed(lambda: self.turn(form))
        return self.passes if form == "alone" else seconds


def make(rank):
    return Turn(rank)


def measure(arm, program, peer, rounds):
    """A row of the whole turn, and one of what is outside of the networks."""
    program.order("open", arm)
    answers = []

    def ours():
        answers.append(program.order("step", arm))
        return answers[-1][0]
    arms = {"ours": ours, "torch": lambda: peer.order("run", "ddp"), "passes": lambda: peer.order("run", "alone")}
    seconds = ranks.interleave(arms, rounds)
    program.order("close", arm)
    told = answers[-2 * rounds:]
    outside = [(a[1] + b[1]) / 2 for a, b in zip(told[::2], told[1::2])]
    other = [a - b for a, b in zip(seconds["torch"], seconds["passes"])]
    shape = {"n": ranks.RANKS, "B": BATCH, "steps": STEPS}
    for variant, a, b in (("whole", seconds["ours"], seconds["torch"]), ("outside of the networks", outside, other)):
        yield {"schema": "xdistill-bench/1", "op": "dmd_turn", "variant": f"{arm}, threads, {variant}", "shape": shape,
               "dtype_in": "f32", "arm": "xdistill", "mode": "as_used", "ms": ranks.milliseconds(a),
               "reference_ms": ranks.milliseconds(b),
               "ratio": {"vs": f"torch {torch.__version__} DDP over gloo", **ranks.ratios(a, b)}}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("program", help="build/bench/dmd")
    p.add_argument("-J", metavar="FILE", help="append the rows to FILE as JSON lines")
    p.add_argument("--rounds", type=int, default=15)
    args = p.parse_args()
    random.seed(1)
    device = machine.describe(1, {})
    program, peer = ranks.Program(args.program, "serve"), ranks.Torch(make)
    peer.order("open")
    print(f"# two ranks, one core each, beside PyTorch {torch.__version__} over gloo; {device['cpu']}, git {device['commit'][:12]}")
    print(f"# {'turn of five steps':<50}{'ms':>10}{'torch ms':>10}{'times':>8}  10-90 %")
    for arm in ("dmd", "dmd-invariant"):
        for line in measure(arm, program, peer, args.rounds):
            ranks.show(line, args.J, device)
    peer.close()
    program.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
