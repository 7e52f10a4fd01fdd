"""Two processes of PyTorch over gloo, and programs of bench/ that take orders, for comparisons in turn. Whoever is not asked
sleeps."""

import json
import multiprocessing
import os
import random
import statistics
import subprocess
import tempfile
import traceback

RANKS = 2


def show(line, path, device):
    """A row of a table of two columns of milliseconds; as a line of a file too, where there is one."""
    r = line["ratio"]
    print(f"  {line['variant']:<50}{line['ms']['median']:>10.3f}{line['reference_ms']['median']:>10.3f}{r['median']:>8.2f}"
          f"  {'%.2f-%.2f' % (r['p10'], r['p90'])}", flush=True)
    keep(line, path, device)


def keep(line, path, device):
    if not path: return
    with open(path, "a", encoding="utf-8") as file: file.write(json.dumps({**line, "device": device}) + "\n")


class Program:
    """A benchmark of bench/ that carries out orders from its standard input."""

    def __init__(self, *command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.arms = self.process.stdout.readline().split()

    def order(self, *words):
        """The numbers that it answers."""
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().split()
        if not answer: raise RuntimeError(f"{self.process.args} ended")
        return [float(word) for word in answer]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def work(rank, pipe, store, make):
    """A rank: makes what it is told, and runs it."""
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=RANKS)
    scene = None
    try:
        for word, *arguments in iter(pipe.recv, None):
            if word == "open":
                scene = make(rank, *arguments)
                pipe.send(None)
            elif word == "close":
                scene = None
                pipe.send(None)
            else:
                pipe.send(scene.run(*arguments))
    except Exception:  # told to who waits for the answer
        pipe.send(RuntimeError(traceback.format_exc()))
    dist.destroy_process_group()


class Torch:
    """Both ranks. `make(rank, *arguments)` returns an object whose run() returns seconds."""

    def __init__(self, make):
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(RANKS):
            here, there = context.Pipe()
            self.pipes.append(here)
            self.processes.append(context.Process(target=work, args=(rank, there, os.path.join(self.folder.name, "store"), make)))
            self.processes[-1].start()

    def order(self, *words):
        """Rank 0's answer."""
        for pipe in self.pipes: pipe.send(words)
        answers = [pipe.recv() for pipe in self.pipes]
        for answer in answers:
            if isinstance(answer, Exception): raise answer
        return answers[0]

    def close(self):
        for pipe in self.pipes: pipe.send(None)
        for process in self.processes: process.join()
        self.folder.cleanup()


def timed(action):
    """Seconds between barriers of both ranks."""
    import time
    import torch.distributed as dist
    dist.barrier()
    begin = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begin


def interleave(arms, rounds, warm=2):
    """Seconds of each arm by round: all of them forwards and then backwards, or the other way round."""
    for _ in range(warm):
        for arm in arms.values(): arm()
    seconds = {name: [] for name in arms}
    for _ in range(rounds):
        names = list(arms)
        if random.random() < 0.5: names.reverse()
        once = {name: 0.0 for name in arms}
        for name in names + names[::-1]: once[name] += arms[name]() / 2
        for name in arms: seconds[name].append(once[name])
    return seconds


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def milliseconds(seconds):
    return {"median": round(1e3 * statistics.median(seconds), 3), "p10": round(1e3 * percentile(seconds, 0.1), 3),
            "p90": round(1e3 * percentile(seconds, 0.9), 3), "rounds": len(seconds)}


def ratios(ours, other):
    """How many times as fast ours is."""
    seen = [b / a for a, b in zip(ours, other)]
    return {"median": round(statistics.median(seen), 3), "p10": round(percentile(seen, 0.1), 3),
            "p90": round(percentile(seen, 0.9), 3)}
