#!/usr/bin/env python3
"""What more threads bring: the rows of compare.py without PyTorch, on one thread and on several, in turn.

    threads.py LIBRARY [--before LIBRARY] [-J FILE] [--only NAMES] [--size FACTOR] [--rounds N] [--threads N] [--exclusive]

LIBRARY is shim.c as a shared library; --before is that of another commit, timed on as many threads beside it. A round times
every arm once, in an order of chance, and gives ratios; printed are their medians and the best times of the arms. Inputs
that an operation writes over are restored outside of the clock. "memory" marks rows that it is known to bind: two cores of
one socket ask for more than it gives. --exclusive puts all threads before everything else on the machine: needs root."""

import argparse
import ctypes
import json
import os
import random
import statistics
import struct
import sys
import time

import machine

P, I64, REAL, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int
FORMS = {
    "shim_loss": (P, INT, INT, I64, I64, P, P, P, P, REAL, ctypes.c_bool), "shim_select": (P, INT, INT, I64, I64, P, I64),
    "shim_head": (P, INT, I64, I64, I64, P, P, P, P, P), "shim_ema": (P, INT, I64, INT, P, REAL),
    "shim_adamw": (P, INT, I64, INT, P, INT, P, REAL), "shim_norm": (P, INT, I64, INT, P), "shim_run": (None, P),
    "shim_close": (None, P), "shim_dtype": (INT, ctypes.c_bool), "shim_level": (ctypes.c_char_p,),
}


def load(path):
    library = ctypes.CDLL(os.path.abspath(path))
    for name, (result, *arguments) in FORMS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Memory:
    """Normal numbers of bf16 or f32; the same few thousand over and over."""

    def __init__(self, count, narrow, deviation=1.0, seed=1):
        chance = random.Random(seed)
        some = [struct.pack("<f", chance.gauss(0.0, deviation))[2 if narrow else 0:] for _ in range(8191)]
        self.bytes = count * (2 if narrow else 4)
        pattern = b"".join(some)
        self.memory = ctypes.create_string_buffer(pattern * (self.bytes // len(pattern) + 1), self.bytes + len(pattern))
        self.at = ctypes.addressof(self.memory)


class Row:
    """An operation on memory of its own; open(library, threads) gives a handle."""

    before_threads = 0  # of the shim that had a pool of its own, where it used one thread only

    def __init__(self, name, bound, open_with, written=None):
        self.name, self.bound, self.open, self.written = name, bound, open_with, written
        self.kept = bytes(written.memory) if written else None

    def restore(self):
        if self.written: ctypes.memmove(self.written.at, self.kept, self.written.bytes)


def loss(name, kind, narrow, rows, bound, cols=128256):
    student = Memory(rows * cols, narrow, 4.0)
    teacher = Memory(rows * cols, narrow, 4.0, seed=2) if kind != "ce" else None
    labels = (ctypes.c_int64 * rows)(*[i * 7919 % cols for i in range(rows)])
    temperature = 2.0 if kind == "kl" else 1.0
    def open_with(library, threads):
        return library.shim_loss(threads, library.shim_dtype(narrow), rows, cols, student.at, teacher.at if teacher else None,
                                 None if teacher else ctypes.addressof(labels), student.at, temperature, kind == "jsd")
    return Row(name, bound, open_with, student)


def params(name, count, narrow, bound):
    value, gradient = Memory(count, narrow), Memory(count, narrow, 0.01, seed=2)
    def open_with(library, threads):
        dtype = library.shim_dtype(narrow)
        if "ema" in name: return library.shim_ema(threads, count, dtype, value.at, 0.999)
        if "norm" in name: return library.shim_norm(threads, count, dtype, value.at)
        return library.shim_adamw(threads, count, dtype, value.at, dtype, gradient.at, 0.999 if "both" in name else 0.0)
    return Row(name, bound, open_with)


def select(name, rows, k=8192, cols=128256):
    data = Memory(rows * cols, False, 4.0)
    return Row(name, "", lambda library, threads: library.shim_select(threads, library.shim_dtype(False), rows, cols, data.at, k))


def head(name, rows=512, cols=16384, width=1024):
    hidden, weight = Memory(rows * width, True, 0.1), Memory(cols * width, True, 0.1, seed=2)
    to_hidden, to_weight = Memory(rows * width, False, 0.0), Memory(cols * width, False, 0.0)
    labels = (ctypes.c_int64 * rows)(*[i * 7919 % cols for i in range(rows)])
    def open_with(library, threads):
        return library.shim_head(threads, rows, cols, width, hidden.at, weight.at, ctypes.addressof(labels), to_hidden.at,
                                 to_weight.at)
    row = Row(name, "", open_with, to_weight)
    row.before_threads = 1
    return row


def rows(size):
    n = lambda count: max(1 << 12, int(count * size) // 4096 * 4096)
    r = lambda count: max(16, int(count * size))
    return [
        ("ce_bf16", lambda name: loss(name, "ce", True, r(1024), "")), ("ce_f32", lambda name: loss(name, "ce", False, r(512), "memory")),
        ("kl_bf16", lambda name: loss(name, "kl", True, r(768), "")), ("kl_f32", lambda name: loss(name, "kl", False, r(384), "memory")),
        ("jsd_bf16", lambda name: loss(name, "jsd", True, r(768), "")), ("jsd_f32", lambda name: loss(name, "jsd", False, r(384), "")),
        ("ema_bf16", lambda name: params(name, n(96 << 20), True, "memory")),
        ("ema_f32", lambda name: params(name, n(80 << 20), False, "memory")),
        ("adamw", lambda name: params(name, n(40 << 20), False, "memory")),
        ("both", lambda name: params(name, n(40 << 20), False, "memory")),
        ("norm_f32", lambda name: params(name, n(160 << 20), False, "memory")),
        ("norm_bf16", lambda name: params(name, n(320 << 20), True, "memory")),
        ("select", lambda name: select(name, 16)), ("head", head),
        ("hot_ce_bf16", lambda name: loss(name, "ce", True, 16, "")), ("hot_ce_f32", lambda name: loss(name, "ce", False, 16, "")),
        ("hot_kl_bf16", lambda name: loss(name, "kl", True, 16, "")), ("hot_kl_f32", lambda name: loss(name, "kl", False, 16, "")),
        ("hot_ema_bf16", lambda name: params(name, 1 << 20, True, "")), ("hot_adamw", lambda name: params(name, 1 << 20, False, "")),
        ("hot_both", lambda name: params(name, 1 << 20, False, "")), ("hot_norm_f32", lambda name: params(name, 4 << 20, False, "")),
        ("hot_norm_bf16", lambda name: params(name, 4 << 20, True, "")),
    ]


def clock(library, handle, row):
    """Seconds of a call: the mean of as many as come to some milliseconds."""
    row.restore()
    begin = time.perf_counter()
    library.shim_run(handle)
    seconds = time.perf_counter() - begin
    if row.written or seconds > 0.02: return seconds
    calls = int(0.02 / max(seconds, 1e-6)) + 1
    begin = time.perf_counter()
    for _ in range(calls): library.shim_run(handle)
    return (time.perf_counter() - begin) / calls


def measure(row, arms, rounds):
    """{arm: seconds of each round}."""
    if "before" in arms and row.before_threads: arms = {**arms, "before": (arms["before"][0], row.before_threads)}
    handles = {name: (library, row.open(library, threads)) for name, (library, threads) in arms.items()}
    seconds = {name: [] for name in arms}
    for turn in range(-1, rounds):
        for name in random.sample(list(handles), len(handles)):
            sample = clock(*handles[name], row)
            if turn >= 0: seconds[name].append(sample)
    for library, handle in handles.values(): library.shim_close(handle)
    return seconds


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("library")
    p.add_argument("--before")
    p.add_argument("-J", dest="json")
    p.add_argument("--only", default="")
    p.add_argument("--size", type=float, default=1.0)
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--exclusive", action="store_true")
    options = p.parse_args()
    if options.exclusive: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # threads to come inherit it
    library = load(options.library)
    arms = {"one": (library, 1), "several": (library, options.threads)}
    if options.before: arms["before"] = (load(options.before), options.threads)
    device = machine.describe(options.threads, {})
    print(f"# {library.shim_level().decode()}, {options.threads} threads, {device['cpu']}, {device['cores']} cores, "
          f"load {os.getloadavg()[0]:.1f}")
    wanted = [name for name in options.only.split(",") if name]
    for name, make in rows(options.size):
        if wanted and name not in wanted: continue
        row = make(name)
        seconds = measure(row, arms, options.rounds)
        ratio = lambda a, b: statistics.median(x / y for x, y in zip(seconds[a], seconds[b]))
        least = {arm: min(times) for arm, times in seconds.items()}
        line = {"schema": "xdistill-threads/1", "op": name, "bound": row.bound, "size": options.size, "rounds": options.rounds,
                "ms": {arm: round(1e3 * statistics.median(times), 4) for arm, times in seconds.items()},
                "best_ms": {arm: round(1e3 * time, 4) for arm, time in least.items()},
                "speedup": round(ratio("one", "several"), 3), "best_speedup": round(least["one"] / least["several"], 3)}
        if options.before:
            line["before_over_now"] = round(ratio("before", "several"), 3)
            line["best_before_over_now"] = round(least["before"] / least["several"], 3)
        line["load"] = os.getloadavg()[0]
        print(" ".join("%s %s" % (key, line[key]) for key in line if key not in ("schema", "size", "rounds")), flush=True)
        if options.json:
            with open(options.json, "a", encoding="utf-8") as file: file.write(json.dumps({**line, "device": device}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
