#!/usr/bin/env python3
"""The time of losses from the head (xd_head_loss) on a GPU that is not there: products, and what they must read and write.

    python3 tools/gpu_head.py       fits the rate of products to the row that was measured, and predicts

Three products a chunk of rows: logits, gradient of hidden states, gradient of the weight. Their operations take a rate of their own.
Bytes come on top, at the rate of a copy, and so do the loss and the launches: nothing is hidden behind anything. Fails when a
prediction is under the budget. docs/performance.md has the model in words; tools/gpu_cost.py has its lines under the table."""

import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import gpu_model

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "src", "loss", "head.c")

# The row of the H200: cross entropy, bf16 factors, chunks of 256 rows, f32 logits that were rounded for each product.
MEASURED = dict(rows=2048, columns=128256, width=2048, chunk=256, tflops=274.0)

# Bytes of a chunk. dW is f32, added to by the product itself. The weight is read by two products, as bf16.
SUM_READ_AND_WRITTEN = 4 + 4
WEIGHT_READS, NARROW = 2, 2
# Of a logit, in elements of its dtype: the product writes it, two products read its gradient.
WRITTEN, READ = 1, 2
# An f32 gradient was rounded for each of two products: read and written as bf16. The products read that.
ROUNDED = 2 * (4 + NARROW + NARROW)
# Cross entropy over 8,192 rows of 128,256 columns, in ms, as measured: bench/results/h200-gpu.jsonl.
LOSS_ELEMENTS, LOSS_F32, LOSS_BF16 = 8192 * 128256, 3.471, 2.247
# Kernels of a chunk, and the seconds from the end of one to the first instructions of the next (tools/gpu_cost.py: assumed).
LAUNCHES, LAUNCH = 14, 2e-6

# Of the data sheet, dense bf16: no product is faster, and one that has its operands loses to it what they wait.
SHEET = 989e12
# What is assumed of it, in the place of the fit, for the prediction that is on the safe side.
SUSTAINED = 0.80

SHAPE = dict(rows=4096, columns=128256, width=4096)
AIM, BUDGET = 600e12, 560e12


def operations(rows, columns, width):
    return 6.0 * rows * columns * width


def beside_products(rows, columns, width, chunk, narrow, loss, machine):
    """Seconds: dW, the weight, the logits, their loss (ms of LOSS_ELEMENTS), the launches."""
    chunks, weight = -(-rows // chunk), columns * width
    logit = NARROW * (WRITTEN + READ) if narrow else 4 * WRITTEN + ROUNDED
    moved = chunks * weight * (SUM_READ_AND_WRITTEN + WEIGHT_READS * NARROW) + rows * columns * logit
    return moved / machine["copy"] + 1e-3 * loss * rows * columns / LOSS_ELEMENTS + chunks * LAUNCHES * LAUNCH


def fitted_rate():
    """Operations a second of the products, once what was beside them in the measured row is taken off."""
    shape = {name: MEASURED[name] for name in ("rows", "columns", "width")}
    work, machine = operations(**shape), gpu_model.MACHINES["H200"]
    beside = beside_products(chunk=MEASURED["chunk"], narrow=False, loss=LOSS_F32, machine=machine, **shape)
    return work / (work / (MEASURED["tflops"] * 1e12) - beside)


def time_of(chunk, machine, rate, loss):
    return operations(**SHAPE) / rate + beside_products(chunk=chunk, narrow=True, loss=loss, machine=machine, **SHAPE)


def constant(name, text):
    """A number of head.c, as "2048" or "(size_t)256 << 20"."""
    found = re.search(name + r"\s*=\s*(?:\(size_t\))?(\d+)(?:\s*<<\s*(\d+))?", text)
    return int(found.group(1)) << int(found.group(2) or 0)


def chunks(source=SOURCE):
    """Rows of a chunk with a workspace that holds them, and without one."""
    text = open(source).read()
    block, most, room = (constant(name, text) for name in ("XDI_HEAD_BLOCK", "XDI_HEAD_CHUNK_MOST", "xdi_head_logits_most"))
    return most, min(most, max(block, room // (NARROW * SHAPE["columns"]) // block * block))


def report(losses=None, source=SOURCE):
    """Prints; how many predictions of the H200 are under the budget. losses: ms of cross entropy in bf16, by machine. source: head.c."""
    under = 0
    rates = (fitted_rate(), SUSTAINED * SHEET)
    print("head_ce: products at %.0f TFLOP/s, fitted to the %.0f of the row that was measured (the data sheet has %.0f); in brackets "
          "at %.0f" % (rates[0] / 1e12, MEASURED["tflops"], SHEET / 1e12, rates[1] / 1e12))
    for name in ("H200", "H100"):
        machine = gpu_model.MACHINES[name]
        loss = losses[name] if losses else LOSS_BF16 * gpu_model.MACHINES["H200"]["copy"] / machine["copy"]
        for title, rows in zip(("with a workspace", "without"), chunks(source)):
            times = [time_of(rows, machine, rate, loss) for rate in rates]
            reached = [operations(**SHAPE) / time for time in times]
            aim = ", under the aim of %.0f" % (AIM / 1e12) if reached[0] < AIM else ""
            print("head_ce, %s, %s (%d rows a chunk): %d x %d x %d in %.1f ms, %.0f TFLOP/s (%.1f ms, %.0f)%s" %
                  (name, title, rows, SHAPE["rows"], SHAPE["width"], SHAPE["columns"], 1e3 * times[0], reached[0] / 1e12, 1e3 * times[1],
                   reached[1] / 1e12, aim))
            under += name == "H200" and reached[0] < BUDGET
    if under:
        print("head_ce: %d under the budget of %.0f TFLOP/s" % (under, BUDGET / 1e12))
    return under


if __name__ == "__main__":
    sys.exit(1 if report(source=sys.argv[1] if len(sys.argv) > 1 else SOURCE) else 0)
