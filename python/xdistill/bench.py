"""Losses with their gradients, and PyTorch's: python -m xdistill.bench [--rows 512] [--vocabulary 49152] [--hidden 576] [--threads 2]

Each line has the median of forward and backward pass in milliseconds, and how many times longer PyTorch takes. `max` is the
largest difference of the gradients, relative to the largest gradient.

Products alone are the three of a head (logits, and the gradients by hidden states and weight) as PyTorch multiplies, with nothing
between them. Their share of each time stands beside them, and how many times faster than PyTorch's fastest head one could be whose
only work they were.
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


def median(run, repeats, least):
    """Milliseconds of the median of some runs, after two to warm up."""
    run()
    run()
    times, begin = [], time.perf_counter()
    while len(times) < repeats or time.perf_counter() - begin < least:
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def step(loss, inputs):
    """Forward and backward."""
    return torch.autograd.grad(loss(*inputs), inputs)


def compare(name, ours, others, inputs, arguments):
    """Prints a line, and returns milliseconds by name."""
    own, exact = median(lambda: step(ours, inputs), arguments.repeats, arguments.seconds), step(ours, inputs)
    line, times = "%-24s xdistill %8.2f ms" % (name, own), {"xdistill": own}
    for title, function in others:
        try:
            theirs = median(lambda: step(function, inputs), arguments.repeats, arguments.seconds)
        except Exception as error:
            line += "   %s: none (%s)" % (title, str(error).split("\n")[0][:40])
            continue
        times[title] = theirs
        worst = max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in
                    zip(exact, step(function, inputs)))
        line += "   %s %8.2f ms, %5.2f times, max %.0e" % (title, theirs, theirs / own, worst)
    print(line, flush=True)
    return times


def products(name, hidden, weight, times, arguments):
    """The line of products alone, with shares of a head's times."""
    logits = torch.randn(hidden.shape[0], weight.shape[0]).to(hidden.dtype)
    each = [median(run, arguments.repeats, arguments.seconds) for run in (
        lambda: hidden @ weight.T, lambda: logits @ weight, lambda: logits.T @ hidden)]
    print("%-24s PyTorch  %8.2f ms = %.2f + %.2f + %.2f; share of %s; nothing beside them: %.2f times" % (
        name, sum(each), *each, ", ".join("%s %.0f %%" % (title, 100 * sum(each) / time) for title, time in times.items()),
        min(time for title, time in times.items() if title != "xdistill") / sum(each)), flush=True)


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
    compiled = (lambda f: []) if arguments.no_compile else (lambda f: [("compiled", torch.compile(f))])
    for dtype in (torch.float32, torch.bfloat16):
        teacher = torch.randn(rows, size).mul_(2).to(dtype)
        student = torch.randn(rows, size).mul_(2).to(dtype).requires_grad_()
        kl = lambda x: eager_kl(x, teacher)  # noqa: E731
        compare("KL %s" % str(dtype)[6:], lambda x: xt.kl_loss(x, teacher), [("eager", kl), *compiled(kl)], [student], arguments)
        own = median(lambda: step(lambda x: xt.kl_loss(Alias.apply(x), teacher, inplace=True), [student]), arguments.repeats,
                     arguments.seconds)
        print("%-24s xdistill %8.2f ms" % ("KL %s in place" % str(dtype)[6:], own))
    labels = torch.randint(0, size, (rows,))
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [torch.randn(rows, arguments.hidden).to(dtype).requires_grad_(),
                  torch.randn(size, arguments.hidden).mul_(0.05).to(dtype).requires_grad_()]
        head = lambda h, w: eager_head(h, w, labels)  # noqa: E731
        others = [("eager", head), *compiled(head)]
        if hasattr(F, "linear_cross_entropy"):
            others.append(("linear_cross_entropy", lambda h, w: F.linear_cross_entropy(h, w, labels)))
        times = compare("head CE %s" % str(dtype)[6:], lambda h, w: xt.head_loss(
            h, w, None, labels, hard_weight=1.0, bf16=dtype == torch.bfloat16), others, inputs, arguments)
        products("products alone %s" % str(dtype)[6:], *[x.detach() for x in inputs], times, arguments)


if __name__ == "__main__":
    main()
