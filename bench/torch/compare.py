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

import ctypes
import gc
import json
import os
import random
import statistics
import sys
import time

from arms import ALLOCATOR, ARGS, ON_GPU, Shim, cache_bytes, thread_ids  # restarts with fair settings

import torch

import machine
import rows
import samples

PAUSE = 0.02  # seconds before each sample: PyTorch's worker threads stop spinning meanwhile
WINDOWS = 8  # of a probe before and after a sample: each way through memory twice
STEADY, UNSTEADY = 0.9, 0.75  # of the best rate: below it, somebody else had the machine, or had so much of it
# What a row should reach: ratio to PyTorch (0: none), score, then the same on an H100: score there and the ceiling it is of,
# bytes or operations a second.
COPY, PRODUCTS = 3.0e12, 798e12
TARGETS = {
    "ce_bf16": (10, 0.68, 0.90, COPY), "ce_f32": (8, 0.75, 0.90, COPY),
    "kl_bf16": (20, 0.80, 0.88, COPY), "kl_f32": (12, 0.80, 0.88, COPY),
    "jsd_bf16": (0, 0.65, 0.85, COPY), "jsd_f32": (0, 0.65, 0.85, COPY),
    "ema_bf16": (1.35, 0.95, 0.92, COPY), "ema_f32": (1.35, 0.95, 0.92, COPY),
    "adamw": (1.35, 0.94, 0.92, COPY), "both": (1.7, 0.94, 0.92, COPY),
    "two_averages": (1.7, 0.90, 0.92, COPY),
    "norm_f32": (2.5, 0.90, 0.93, COPY), "norm_bf16": (10, 0.90, 0.93, COPY),
    "vsd_f32": (3, 0.80, 0.88, COPY), "vsd_bf16": (3, 0.80, 0.88, COPY), "denoise_f32": (3, 0.80, 0.88, COPY),
    "denoise_bf16": (3, 0.80, 0.88, COPY), "convert_f32": (3, 0.80, 0.88, COPY), "convert_bf16": (3, 0.80, 0.88, COPY),
    "vsd_long_f32": (3, 0.80, 0.88, COPY),
    "denoise_long_f32": (3, 0.80, 0.88, COPY), "gan": (3, 0.01, 0.88, COPY),
    "select": (14, 1.0, 0.75, COPY), "head": (0, 0.60, 0.92, PRODUCTS),
}
FAR = 1.45  # cores are far apart from this many times one core's rate, in place, on
FAR_SCORES = {"ce_f32": 0.55}  # that a row should reach there, where it is not the same


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
    roof, goal, card = roofline(row, target, FAR_SCORES.get(name.replace("hot_", ""), target[1]), blocks)
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
        "roof": roof, "target_ms": round(goal, 5), "target_h100_ms": round(card, 5), "verdict": verdict,
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
    print(f"# {'op':<26}{'ours ms':>10}{'target ms':>10}{'torch ms':>10}{'ratio':>8}  {'95 %':<14}{'A/A':>6}{'asked':>7}"
          f"{'score':>7}{'asked':>6}  {'bound':<9}{'GB/s':>7}{'extra':>9}{'cpu':>6}{'steady':>7}{'far':>6}{'error':>9}{'H100':>9}"
          f"  {'holds by':<9}form")
    for name, make in rows.rows() + samples.rows():
        if only and not any(name.startswith(o) for o in only): continue
        if name.startswith("hot_") and not (ARGS.hot or only): continue
        row = make()
        if ARGS.check:
            wrong += check(row)
            row.close()
            continue
        line = measure(name, row, device)
        r, roof = line["ratio"], line["roof"]
        print(f"  {row.label():<26}{line['ms']['median']:>10.3f}{line['target_ms']:>10.3f}{line['reference_ms']['median']:>10.3f}"
              f"{r['median']:>8.2f}  {'%.2f-%.2f' % (r['ci_lo'], r['ci_hi']):<14}{r['aa_spread']:>6.2f}{r['target']:>7g}"
              f"{roof['score']:>7.2f}{roof['target']:>6.2f}  {roof['bound']:<9}{line['achieved']['GBps_min']:>7.1f}"
              f"{line['mem']['peak_extra_bytes'] / 1024:>6.0f} KB{line['cpu_share']:>6.2f}{line['steadiness']:>7.2f}{roof['far']:>6.2f}{line['check']['rel_l2']:>9.1e}"
              f"{line['target_h100_ms']:>9.3f}  {line['verdict']:<9}{r['vs'].split(' ', 2)[2]}", flush=True)
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