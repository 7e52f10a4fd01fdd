"""Losses with their gradients, and PyTorch's: python -m xdistill.bench [--rows 512] [--vocabulary 49152] [--hidden 576] [--threads 2]

Each line has the median of forward and backward pass in milliseconds, and how many times longer PyTorch takes. `max` is the
largest difference of the gradients, relative to the largest gradient.

Products alone are the three of a head (logits, and the gradients by hidden states and by weight) as PyTorch multiplies, with nothing
between them. Their share of each time stands beside them, and how many times longer PyTorch's fastest head takes: no head with these
products exceeds that.
"""

import argparse
import os
import statistics
import time

import torch
import torch.nn.functional as F

from . import _library, torch as xt


def eager_kl(student, teacher):
    s, t = F.log_softmax(student.float(), -1), F.log_softmax(teacher.float(), -1)
    return F.kl_div(s, t, reduction="batchmean", log_target=True)


def eager_head(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def medians(runs, arguments):
    """Median milliseconds of each, after two to warm up. They take turns, so that other work of the machine meets all alike."""
    for run in list(runs.values()) * 2:
        run()
    times, begin = {name: [] for name in runs}, time.perf_counter()
    while len(next(iter(times.values()))) < arguments.repeats or time.perf_counter() - begin < arguments.seconds * len(runs):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def step(loss, inputs):
    """Forward and backward."""
    return torch.autograd.grad(loss(*inputs), inputs)


def compare(name, functions, inputs, arguments, **beside):
    """Prints a line on losses, ours first, and returns milliseconds by name, also of what else takes turns with them."""
    line, runs, exact = "%-24s" % name, {}, None
    for title, function in functions.items():
        try:
            found = step(function, inputs)
        except Exception as error:
            line += "   %s: none (%s)" % (title, str(error).split("\n")[0][:40])
            continue
        exact = found if exact is None else exact
        worst = max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in zip(exact, found))
        runs[title] = lambda function=function: step(function, inputs), worst
    times = medians({**{title: run for title, (run, _) in runs.items()}, **beside}, arguments)
    own = times["xdistill"]
    for title, (_, worst) in runs.items():
        line += " %s %.2f ms" % (title, times[title]) + (", %.2f times, max %.0e;" % (times[title] / own, worst) if title != "xdistill" else ";")
    print(line.rstrip(";"), flush=True)
    return times


def head(name, functions, inputs, arguments):
    """The lines of a head and of its products alone."""
    hidden, weight = [x.detach() for x in inputs]
    logits = torch.randn(hidden.shape[0], weight.shape[0]).to(hidden.dtype)
    each = {"logits": lambda: hidden @ weight.T, "by hidden": lambda: logits @ weight, "by weight": lambda: logits.T @ hidden}
    times = compare("head CE " + name, functions, inputs, arguments, **each)
    parts = [times.pop(one) for one in each]
    alone, others = sum(parts), [time for title, time in times.items() if title != "xdistill"]
    print("%-24s PyTorch %.2f ms = %.2f + %.2f + %.2f; share of %s; with nothing beside them %.2f times" % (
        "products alone " + name, alone, *parts, ", ".join("%s %.0f %%" % (title, 100 * alone / one) for title, one in times.items()),
        min(others) / alone), flush=True)


class Alias(torch.autograd.Function):
    """The same memory as no leaf, as logits of a model are."""

    @staticmethod
    def forward(ctx, x):
        return torch.empty(0, dtype=x.dtype).set_(x.detach())

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def main():
    parser = argparse.ArgumentParser(prog="python -m xdistill.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 512), ("vocabulary", 49152), ("hidden", 576), ("threads", 2), ("repeats", 5)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--seconds", type=float, default=1.0, help="at least so long for each")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    rows, size = arguments.rows, arguments.vocabulary
    print("PyTorch %s, %d threads, %d rows, vocabulary %d, hidden %d" % (
        torch.__version__, arguments.threads, rows, size, arguments.hidden))
    load, cores = os.getloadavg()[0], _library.available_threads()
    if load > 0.5 * cores:
        print("busy: load %.1f on %d cores, so times and ratios are rough" % (load, cores))
    compiled = (lambda f: {}) if arguments.no_compile else (lambda f: {"compiled": torch.compile(f)})
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype)[6:]
        teacher = torch.randn(rows, size).mul_(2).to(dtype)
        student = torch.randn(rows, size).mul_(2).to(dtype).requires_grad_()
        kl = lambda x: eager_kl(x, teacher)  # noqa: E731
        in_place = lambda: step(lambda x: xt.kl_loss(Alias.apply(x), teacher, inplace=True), [student])  # noqa: E731
        times = compare("KL " + name, {"xdistill": lambda x: xt.kl_loss(x, teacher), "eager": kl, **compiled(kl)}, [student], arguments,
                        in_place=in_place)
        print("%-24s xdistill %.2f ms" % ("KL %s in place" % name, times["in_place"]))
    labels = torch.randint(0, size, (rows,))
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [torch.randn(rows, arguments.hidden).to(dtype).requires_grad_(),
                  torch.randn(size, arguments.hidden).mul_(0.05).to(dtype).requires_grad_()]
        eager = lambda h, w: eager_head(h, w, labels)  # noqa: E731
        functions = {"xdistill": lambda h, w: xt.head_loss(h, w, None, labels, hard_weight=1.0, bf16=dtype == torch.bfloat16),
                     "eager": eager, **compiled(eager)}
        if hasattr(F, "linear_cross_entropy"):
            functions["linear_cross_entropy"] = lambda h, w: F.linear_cross_entropy(h, w, labels)
        head(str(dtype)[6:], functions, inputs, arguments)


if __name__ == "__main__":
    main()
