#!/usr/bin/env python3
"""Checkpoints by two ranks beside PyTorch's, in a memory file system: the same bytes, in turn.

    make bench-files        or      files.py PROGRAM [-J FILE] [--directory DIRECTORY] [--rounds N]

Half of each tensor is on each rank. PyTorch's are torch.distributed.checkpoint.save of DTensors over gloo, and the same as
safetensors of each rank that are then consolidated into the file that ours is at every save. BENCH_MIB is the size, 1024 without
it."""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
except ImportError:
    print("skipped: needs PyTorch and its distributed checkpoints")
    sys.exit(0)

import machine
import ranks

ROWS_OF_TENSOR, COLUMNS = 8192, 1024  # 32 MiB


def mib():
    return int(os.environ.get("BENCH_MIB", "1024"))


class Save:
    """A model of as many tensors as ours."""

    def __init__(self, rank, kind, directory, threads):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard
        self.rank, self.kind, self.directory, self.threads = rank, kind, directory, threads
        mesh = init_device_mesh("cpu", (ranks.RANKS,))
        self.state = {}
        for i in range(max(1, mib() // 32)):
            own = torch.arange(ROWS_OF_TENSOR * COLUMNS // ranks.RANKS, dtype=torch.float32).view(-1, COLUMNS) * (7919 + i)
            self.state[f"weight.{i:03d}"] = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)

    def save(self):
        if self.kind == "dcp":
            writer = dcp.FileSystemWriter(self.directory, thread_count=self.threads)
        else:
            writer = HuggingFaceStorageWriter(self.directory, save_distributed=True, enable_consolidation=True,
                                              thread_count=self.threads, thread_count_consolidation=2)
        dcp.save(self.state, storage_writer=writer)

    def run(self):
        if self.rank == 0: shutil.rmtree(self.directory, ignore_errors=True)
        return ranks.timed(self.save)


def make(rank, *arguments):
    return Save(rank, *arguments)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("program", help="build/bench/files")
    p.add_argument("-J", metavar="FILE", help="append the rows to FILE as JSON lines")
    p.add_argument("--directory", default="/dev/shm", help="where; a folder of this run's own is made in it")
    p.add_argument("--rounds", type=int, default=3)
    args = p.parse_args()
    free = shutil.disk_usage(args.directory).free if os.path.isdir(args.directory) else 0
    if free < 6 * mib() << 20:
        print(f"skipped: {args.directory} has no room for {6 * mib()} MiB")
        return 0
    random.seed(1)
    device = machine.describe(1, {})
    print(f"# save of {mib()} MiB by two ranks in {args.directory}, beside PyTorch {torch.__version__}; {device['cpu']}, "
          f"git {device['commit'][:12]}")
    print(f"# {'PyTorch':<24}{'ours ms':>10}{'torch ms':>10}{'times':>8}  10-90 %")
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="xdistill-bench-") as folder:
        ours = ranks.Program(args.program, "serve", os.path.join(folder, "ours"))
        peer = ranks.Torch(make)
        try:
            run(args, device, folder, ours, peer)
        finally:
            peer.close()
            ours.close()
    return 0


def run(args, device, folder, ours, peer):
    for kind, name in (("dcp", "DCP"), ("hugging face", "DCP, consolidated")):
        peer.order("open", kind, os.path.join(folder, "torch"), 1)
        seconds = ranks.interleave({"ours": lambda: ours.order("step", "save")[0], "torch": lambda: peer.order("run")},
                                   args.rounds, 1)
        peer.order("close")
        line = {"schema": "xdistill-bench/1", "op": "checkpoint", "variant": "memory, save",
                "shape": {"n": ranks.RANKS, "bytes": mib() << 20}, "dtype_in": "f32", "arm": "xdistill", "mode": "as_used",
                "ms": ranks.milliseconds(seconds["ours"]), "reference_ms": ranks.milliseconds(seconds["torch"]),
                "ratio": {"vs": f"torch {torch.__version__} {name}", **ranks.ratios(seconds["ours"], seconds["torch"])},
                "device": device}
        r = line["ratio"]
        print(f"  {name:<24}{line['ms']['median']:>10.1f}{line['reference_ms']['median']:>10.1f}{r['median']:>8.2f}  "
              f"{r['p10']:.2f}-{r['p90']:.2f}", flush=True)
        if args.J:
            with open(args.J, "a", encoding="utf-8") as file: file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
