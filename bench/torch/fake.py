#!/usr/bin/env python3
"""A fake score of a teacher that is sharded over two ranks, beside PyTorch's way to one, on the CPU: the same machine, in turn.

    make bench-fake        or      fake.py PROGRAM [-J FILE] [--rounds N]

Ours is made from the teacher's shards where they are. PyTorch's, as FastGen does it: rank 0 has the whole state dict, broadcasts it
over gloo, tensor by tensor, and every rank keeps its half, in memory that it takes then. Both end with the same shards."""

import argparse
import os
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

LAYERS, WIDTH = 24, 1024
# PyTorch's processes keep their memory and take no page faults after the first round. Ours takes fresh pages, as a training does
# that makes one fake score: glibc gives blocks of that size back, and would move on in its heap if it were told not to.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184", "MALLOC_TOP_PAD_": "268435456",
             "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class Broadcast:
    """A state dict of rank 0 alone, and what each rank makes of it."""

    def __init__(self, rank):
        self.rank = rank
        names = [f"layer{i}.weight" for i in range(LAYERS)]
        self.state = {name: torch.full((WIDTH, WIDTH), i + 1.0) if rank == 0 else None for i, name in enumerate(names)}

    def create(self):
        shards = {}
        for name, whole in self.state.items():
            if whole is None: whole = torch.empty(WIDTH, WIDTH)
            dist.broadcast(whole, 0)
            shards[name] = whole.chunk(ranks.RANKS)[self.rank].clone()
        return shards

    def run(self):
        """Seconds; shards are released out of the clock."""
        kept = []
        seconds = ranks.timed(lambda: kept.append(self.create()))
        for i, shard in enumerate(kept[0].values()):
            if float(shard[-1, -1]) != i + 1.0: raise RuntimeError(f"shard {i} has not arrived")
        return seconds


def make(rank):
    return Broadcast(rank)


def measure(arm, program, peer, rounds):
    program.order("open", arm)
    arms = {"ours": lambda: program.order("step", arm)[0], "torch": lambda: peer.order("run")}
    seconds = ranks.interleave(arms, rounds)
    program.order("close", arm)
    return {"schema": "xdistill-bench/1", "op": "fake_score", "variant": f"{arm}, threads",
            "shape": {"n": ranks.RANKS, "tensors": LAYERS, "P": LAYERS * WIDTH * WIDTH}, "dtype_in": "f32", "arm": "xdistill",
            "mode": "as_used", "ms": ranks.milliseconds(seconds["ours"]), "reference_ms": ranks.milliseconds(seconds["torch"]),
            "ratio": {"vs": f"torch {torch.__version__} state dict of rank 0, broadcast over gloo",
                      **ranks.ratios(seconds["ours"], seconds["torch"]), "target": 10}}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("program", help="build/bench/fake")
    p.add_argument("-J", metavar="FILE", help="append the rows to FILE as JSON lines")
    p.add_argument("--rounds", type=int, default=9)
    args = p.parse_args()
    random.seed(1)
    device = machine.describe(1, ALLOCATOR)
    program = ranks.Program(args.program, "serve")
    os.environ.update(ALLOCATOR)
    peer = ranks.Torch(make)
    peer.order("open")
    print(f"# two ranks, one core each, beside PyTorch {torch.__version__} over gloo; {device['cpu']}, git {device['commit'][:12]}")
    print(f"# {'fake score of a sharded teacher':<50}{'ms':>10}{'torch ms':>10}{'times':>8}  10-90 %")
    for arm in ("fake-shards", "fake-root"):
        line = measure(arm, program, peer, args.rounds)
        ranks.show(line, args.J, device)
    peer.close()
    program.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
