#!/usr/bin/env python3
"""The time of a kernel on a GPU that is not there, from what its warps issue, move and wait for.

    python3 tools/gpu_model.py          fits the constants to bench/gpu_history.txt, and judges them by rows left out

Each multiprocessor has four schedulers, which share its warps. A warp needs its scheduler for one cycle an instruction, a part of
the memory for its bytes, and it waits: for memory, for other warps, and between its instructions. Three times bound the work: those
of the scheduler, of the memory, and of a warp's whole path divided among the warps that are there. They overlap in part: the model
adds their cubes. docs/performance.md has the model in words and its errors."""

import os
import sys

HISTORY = os.path.join(os.path.dirname(__file__), "..", "bench", "gpu_history.txt")

# Fitted: the latency of memory in ns, the cycles that a warp stands still after an instruction, and the ns of a row that one thread
# computes alone. The interpreter's clock (tests/emu/ptx_flight.h) has the first two.
LATENCY, STALL, SERIAL = 700.0, 3.5, 12000.0

# A copy's bytes a second, as read and written together; multiprocessors; cycles a ns; threads, registers and shared memory of one.
MACHINES = {
    "H100": dict(arch="90", copy=2.9e12, processors=132, clock=1.98, note="copy: 4.2 TB/s of the H200 times 3.35 of 4.8 TB/s by the data sheets"),
    "H200": dict(arch="90", copy=4.2e12, processors=132, clock=1.98, note="copy measured: bench/results/h200-gpu.jsonl"),
    "A100": dict(arch="80", copy=1.78e12, processors=108, clock=1.41, note="extrapolated: 2.04 TB/s by its data sheet times .875, the H200's share"),
    "B200": dict(arch="100", copy=7.0e12, processors=148, clock=1.96, note="extrapolated: 8 TB/s by its data sheet times .875, the H200's share"),
}


def time_of(warps, resident, instructions, moved, delay, machine):
    """Seconds for `warps` in all, `resident` of them at a time in a multiprocessor. Of each: instructions, bytes to and from memory,
    and the ns it waits, which do not include the standing still after instructions."""
    clock, processors = machine["clock"], machine["processors"]
    rate = machine["copy"] / processors / 1e9
    issue = instructions / clock
    path = (delay + instructions * (1 + STALL) / clock) / max(resident, 1e-9)
    times = (issue / 4, moved / rate, path)
    return warps / processors * sum(t**3 for t in times) ** (1 / 3) * 1e-9


# ---- the rows that were measured ----


def read_history(path=HISTORY):
    rows = []
    for line in open(path):
        words = line.split("#")[0].split()
        if not words:
            continue
        phases = [p.split(":") for p in words[8:]]
        rows.append(dict(set=words[0], name=words[1], ms=float(words[2]), rows=int(words[3]), blocks=float(words[4]), warps=int(words[5]),
                         parts=int(words[6]), serial=float(words[7]), phases=phases))
    return rows


def time_of_row(row, latency, stall, serial):
    """ms of all rows."""
    machine = MACHINES["H200"]
    instructions = moved = delay = 0.0
    for steps, issued, reads, writes, ahead, hits in row["phases"]:
        steps, issued = float(steps), float(issued)
        own = issued * (1 + stall) / machine["clock"]
        wait = 0.0 if ahead == "on" else max(0.0, latency - int(ahead) * own)
        instructions += steps * issued
        moved += steps * 32 * (float(reads) * (1 - float(hits)) + float(writes))
        delay += steps * wait
    delay += serial * row["serial"] + instructions * (stall - STALL) / machine["clock"]
    warps = row["rows"] * row["parts"] * row["warps"]
    return 1e3 * time_of(warps, row["blocks"] * row["warps"], instructions, moved, delay, machine)


def errors(rows, constants):
    return [time_of_row(row, *constants) / row["ms"] - 1 for row in rows]


def mean(values):
    return sum(abs(v) for v in values) / len(values)


def fit(rows):
    """The constants with the least mean error, by trying all of a grid."""
    grid = [(latency, stall, serial) for latency in range(500, 1001, 50) for stall in (2, 2.5, 3, 3.5, 4, 4.5)
            for serial in range(4000, 24001, 2000)]
    return min(grid, key=lambda constants: mean(errors(rows, constants)))


def main():
    rows = read_history()
    fitted = [row for row in rows if row["set"] == "fit"]
    left_out = [row for row in rows if row["set"] == "test"]
    best = fit(fitted)
    print("latency %g ns, %g cycles after an instruction, %g ns of a row in one thread" % best)
    for title, chosen in (("fitted", fitted), ("not fitted", left_out)):
        found = errors(chosen, best)
        for row, error in zip(chosen, found):
            print("  %-18s measured %6.2f ms, model %6.2f, %+4.0f %%" % (row["name"], row["ms"], row["ms"] * (1 + error), 100 * error))
        print("%s: mean error %.1f %%, the largest %.0f %%" % (title, 100 * mean(found), 100 * max(abs(e) for e in found)))
    if best != (LATENCY, STALL, SERIAL):
        print("tools/gpu_model.py has other constants: %g, %g, %g" % (LATENCY, STALL, SERIAL))
        return 1
    return 0 if mean(errors(left_out, best)) < 0.2 else 1


if __name__ == "__main__":
    sys.exit(main())
