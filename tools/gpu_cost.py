#!/usr/bin/env python3
"""What each operation of the CUDA unit costs on a GPU, without one: the table that `make cuda` prints.

    python3 tools/gpu_cost.py REPORT OPERATIONS LOG [BUDGET]
    python3 tools/gpu_cost.py --check          what it says of code that was measured

REPORT: of the PTX interpreter (EMU_PTX_REPORT), for OPERATIONS, the output of tests/cuda/cost.cpp. LOG: of `nvcc -Xptxas -v`.
BUDGET: bench/gpu_budget.txt. An operation over its budget, or with fewer bytes on their way than it says, fails. ARCH in the
environment: 90, or 80 and 100, which have no budgets.
Every figure is counted, but those under "predicted": they are of the model, tools/gpu_model.py."""

import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import gpu_head
import gpu_model

COUNTED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bench", "results", "h200-counted.tsv")
BUDGET = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bench", "gpu_budget.txt")

# Classes of the interpreter under the columns of the table. Moves have a column of their own: most of them cost nothing.
COLUMNS = {
    "float": ["float"], "f64": ["double"], "int": ["integer"], "special": ["special"], "conv": ["convert"],
    "memory": ["load", "store", "atomic"], "shared": ["shared", "local"], "warp": ["exchange"], "control": ["control"],
}
MOVES = ["move", "element"]
ISSUED = [name for names in COLUMNS.values() for name in names]

# The row in one thread that gpu_model.py has fitted, as times of what the interpreter's clock says that the others wait for it: calls,
# double precision and misses of the instruction cache are slower than a loop.
SERIAL = 3.0
# The same of kernels that keep rows on the chip (src/cuda/loss_ring.cu): whole warps wait for each other, not for one thread. Assumed.
RING_SERIAL = 1.0
# From the end of a kernel to the first instructions of the next, in ns. Assumed.
LAUNCH = 2000.0
# Grids that do not grow with the work.
FIXED = ("xdi_cuda_norm", "xdi_cuda_rows_column_maxima")
# Kernels whose work is that of a vocabulary or a selection, once a call.
ONCE = ("xdi_cuda_matrix_", "xdi_cuda_xtoken_slots", "xdi_cuda_sort_", "xdi_cuda_gold_partners")

# Of a multiprocessor, by compute capability: shared memory and threads.
LIMITS = {"80": (164 << 10, 2048), "90": (228 << 10, 2048), "100": (228 << 10, 2048)}


def read_report(path):
    lines = [line.rstrip("\n").split("\t") for line in open(path)]
    names = lines[0]
    sections = {}
    for words in lines[1:]:
        row = dict(zip(names, words))
        kernel = {name: float(value) for name, value in row.items() if name not in ("section", "kernel")}
        kernel["name"] = row["kernel"]
        sections.setdefault(row["section"], []).append(kernel)
    return sections


def read_operations(path):
    """name, elements of the call, bytes an element must move, launches."""
    for line in open(path):
        name, elements, must, launches = line.rstrip("\n").split("\t")
        yield name, float(elements), float(must), int(launches)


def read_log(path, arch):
    """Registers and static shared memory by mangled name."""
    kernels, name = {}, None
    for line in open(path):
        found = re.search(r"Compiling entry function '(\S+)' for 'sm_(\d+)'", line)
        if found:
            name = found.group(1) if found.group(2) == arch else None
        found = re.search(r"Used (\d+) registers", line)
        if found and name:
            shared = re.search(r"(\d+) bytes smem", line)
            kernels[name] = (int(found.group(1)), int(shared.group(1)) if shared else 0)
            name = None
    return kernels


def read_budget(path):
    budget = {}
    for line in open(path):
        words = line.split("#")[0].split()
        if words:
            number = [None if word == "-" else float(word) for word in words[2:]]
            budget[words[0] + " " + words[1]] = dict(zip(("size", "slots", "aim", "flight"), number))
    return budget


# ---- an operation ----


def machines_of(arch):
    """Those of the architecture; for 9.0 that of the next one too."""
    return [(name, machine) for name, machine in gpu_model.MACHINES.items() if machine["arch"] in (arch, "100" if arch == "90" else arch)]


def title_of(name, machine):
    return name + (" *" if machine["note"].startswith("extrapolated") else "")


def resident_blocks(kernel, registers, shared, arch):
    most_shared, most_threads = LIMITS[arch]
    warps = -(-kernel["threads"] // 32)
    by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = most_shared // (shared + kernel["dynamic"] + 1024)
    return int(min(32, most_threads // kernel["threads"], by_registers, by_shared))


def hits(resident_bytes, machine):
    """The part of a second reading that L2 has, by what all blocks have on their way, each byte once: .38 and .25 were measured at 101
    and 135 MB."""
    return max(0.0, min(1.0, 1.08 * 50e6 / max(resident_bytes * machine["processors"], 1.0) - 0.15))


def is_named(kernel, names):
    return any(name in kernel["name"] for name in names)


def is_alone(kernel):
    return kernel["blocks"] == kernel["launches"]


def kernel_time(kernel, scale, blocks, machine):
    """Seconds. A kernel of one block stays what it is; any other grows with the work."""
    if is_alone(kernel):
        return kernel["path"] * 1e-9
    if is_named(kernel, ONCE):
        scale = 1
    grid = kernel["blocks"] / kernel["launches"] * (1 if is_named(kernel, FIXED) else scale)
    resident = min(blocks, grid / machine["processors"])
    warps = kernel["warps"]
    again = kernel["again"] * (1 - hits(resident * (kernel["read"] - kernel["again"]) / kernel["blocks"], machine))
    moved = kernel["read"] - kernel["again"] + again + kernel["written"]
    serial = RING_SERIAL if "loss_ring" in kernel["name"] else SERIAL
    # SERIAL is of what other warps compute: the cluster's barrier takes as long whatever they do.
    delay = kernel["waited"] + kernel.get("crossed", 0) + serial * kernel["stalled"]
    issued = kernel.get("issued") or sum(kernel[name] for name in ISSUED)
    return gpu_model.time_of(warps * scale, resident * warps / kernel["blocks"], issued / warps, moved / warps, delay / warps, machine)


def time_of_all(kernels, blocks, scale, launches, machine):
    """Seconds of an operation; blocks: resident in a multiprocessor, by the kernel's name."""
    return sum(kernel_time(kernel, scale, blocks[kernel["name"]], machine) for kernel in kernels) + LAUNCH * 1e-9 * launches


def with_all(kernels, all_kernels):
    """Kernels of one block as they are at the size of the budget, where the operation has been run with all that it has."""
    full = {kernel["name"]: kernel for kernel in all_kernels if is_alone(kernel)}
    return [full.get(kernel["name"], kernel) if is_alone(kernel) else kernel for kernel in kernels]


def cost_of(kernels, elements, must, launches, size, log, arch):
    main = max(kernels, key=lambda kernel: (kernel["loaded"] + kernel["written"], sum(kernel[name] for name in ISSUED)))
    growing = [kernel for kernel in kernels if kernel is main or not (is_alone(kernel) or is_named(kernel, ONCE))]
    sums = {column: 32 * sum(kernel[name] for kernel in growing for name in names) / elements for column, names in COLUMNS.items()}
    blocks = {}
    for kernel in kernels:
        registers, shared = log[kernel["name"]]
        blocks[kernel["name"]] = resident_blocks(kernel, registers, shared, arch)
    of_main = min(blocks[main["name"]], main["blocks"]) if is_alone(main) else blocks[main["name"]]
    warps = of_main * main["warps"] / main["blocks"]
    cost = dict(sums)
    cost["slots"] = sum(sums.values())
    cost["moves"] = 32 * sum(kernel[name] for kernel in growing for name in MOVES) / elements
    cost["registers"] = log[main["name"]][0]
    cost["blocks"] = of_main
    cost["flight"] = (warps * main["flight"] + of_main * main["bulk_flight"]) / 1024
    cost["read"] = sum(kernel["read"] for kernel in growing) / elements
    cost["written"] = sum(kernel["written"] for kernel in growing) / elements
    cost["launches"] = launches
    cost["main"] = main["name"]
    for name, machine in machines_of(arch):
        time = time_of_all(kernels, blocks, size / elements, launches, machine)
        cost[name] = 1e3 * time
        cost[name + " share"] = must * size / machine["copy"] / time
    return cost


# ---- the table ----


def print_table(costs, arch):
    names = list(COLUMNS)
    print("sm_%s: instructions an element, bytes an element of memory, and what the model predicts (docs/performance.md)" % arch)
    print("%-21s" % "operation" + "".join("%8s" % name for name in ["slots"] + names + ["moves"]) +
          "  regs blocks KiB/SM   read  write launches | predicted ms (share of copy): " +
          ", ".join(title_of(name, machine) for name, machine in machines_of(arch)))
    for operation, cost in costs.items():
        print("%-21s" % operation + "".join("%8.2f" % cost[name] for name in ["slots"] + names + ["moves"]) +
              " %5d %6d %6.1f %6.2f %6.2f %8d |" % tuple(cost[name] for name in ("registers", "blocks", "flight", "read", "written", "launches")) +
              "".join(" %9.3f (%.2f)" % (cost[name], cost[name + " share"]) for name, _ in machines_of(arch)))
    for name, machine in machines_of(arch):
        print("%s: %s" % (title_of(name, machine), machine["note"]))


def judge(costs, budget):
    failed = 0
    for operation, cost in costs.items():
        limit = budget.get(operation)
        if not limit:
            print("%s is not in bench/gpu_budget.txt" % operation)
            failed += 1
            continue
        if limit["slots"] is not None and cost["slots"] > limit["slots"]:
            print("%s issues %.2f instructions an element, its budget is %g" % (operation, cost["slots"], limit["slots"]))
            failed += 1
        if limit["flight"] is not None and cost["flight"] < limit["flight"]:
            print("%s has %.1f KiB on their way to a multiprocessor, it needs %g" % (operation, cost["flight"], limit["flight"]))
            failed += 1
    over = [operation for operation, cost in costs.items() if (budget.get(operation) or {}).get("aim") and cost["slots"] > budget[operation]["aim"]]
    if over:
        print("within the budget, above the aim: " + ", ".join("%s (%.1f of %g)" % (operation, costs[operation]["slots"], budget[operation]["aim"]) for operation in over))
    return failed


# ---- code that was measured ----


def check():
    """What the model makes of counts of code that an H200 has run, beside its times. 1 when it is further off than docs/performance.md says."""
    lines = [line.rstrip("\n").split("\t") for line in open(COUNTED) if not line.startswith("#")]
    operations = {}
    for words in lines[1:]:
        row = dict(zip(lines[0], words))
        kernel = {name: float(value) for name, value in row.items() if name not in ("operation", "kernel")}
        kernel["name"] = row["kernel"]
        operations.setdefault(row["operation"], []).append(kernel)
    errors = []
    for name, kernels in operations.items():
        first = kernels[0]
        blocks = {kernel["name"]: resident_blocks(kernel, int(kernel["registers"]), kernel["shared"], "90") for kernel in kernels}
        time = 1e3 * time_of_all(kernels, blocks, first["size"] / first["elements"], first["launches_of_all"], gpu_model.MACHINES["H200"])
        errors.append(time / first["ms"] - 1)
        print("%-18s measured %6.2f ms, predicted %6.2f, %+4.0f %%" % (name, first["ms"], time, 100 * errors[-1]))
    print("counted and measured: mean error %.1f %%, the largest %.0f %%" % (100 * gpu_model.mean(errors), 100 * max(abs(e) for e in errors)))
    return 0 if gpu_model.mean(errors) < 0.16 and max(abs(e) for e in errors) < 0.3 else 1


def main(argv):
    if argv[1:] == ["--check"]: return check()
    arch = os.environ.get("ARCH", "90")
    report, operations, log = argv[1:4]
    budget = read_budget(argv[4] if len(argv) > 4 else BUDGET)
    sections, log = read_report(report), read_log(log, arch)
    costs = {}
    for name, elements, must, launches in read_operations(operations):
        limit = budget.get(name)
        size = limit["size"] if limit else elements
        costs[name] = cost_of(with_all(sections[name], sections.get(name + ", all", [])), elements, must, launches, size, log, arch)
    print_table(costs, arch)
    if arch != "90":
        print("%d operations; the budgets are those of 9.0" % len(costs))
        return 0
    failed = judge(costs, budget)
    if "ce bf16" in costs:
        failed += gpu_head.report({name: costs["ce bf16"][name] for name in ("H200", "H100")})
    print("%d operations, %d over their budget" % (len(costs), failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
