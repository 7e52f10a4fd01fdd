"""Rows of compare.py: losses over one vocabulary, averages, optimizers, norms, selections and heads."""

import torch
import torch.nn.functional as F

from arms import ARGS, ON_GPU, Row, Shim, cache_bytes, compiled, distance, dtype_of

SELECT_SECONDS = 60e-6  # a list of 8192 of 50,000 on one core


def liger_forms(row):
    """Liger's kernel for a loss, where it is installed and has one."""
    if not ON_GPU: return {}
    try:
        from liger_kernel.transformers import functional as liger
    except ImportError:
        return {}
    log_softmax = lambda x: F.log_softmax(x.float() / row.temperature, -1)
    value = {
        "ce": liger.liger_cross_entropy,
        "kl": lambda s, t: liger.liger_kl_div(log_softmax(s), log_softmax(t), reduction="batchmean",
                                              log_target=True) * row.temperature ** 2,
        "jsd": lambda s, t: liger.liger_jsd(log_softmax(s), log_softmax(t)),
    }[row.kind]
    return {"liger": row.with_gradient(value)}


class Loss(Row):
    """Value and gradient of a mean loss over rows of logits; the gradient goes over the logits."""

    ceiling = "in place"

    def __init__(self, kind, dtype, rows, cols=128256, temperature=1.0):
        self.op, self.kind, self.temperature = kind + "_fwd_bwd", kind, temperature
        soft = kind != "ce"
        self.dtype, self.shape = str(dtype).split(".")[1], {"N": rows, "V": cols, "T": temperature}
        self.limit = 1e-5 if dtype == torch.float32 else 6e-3
        self.student = torch.empty(rows, cols, dtype=dtype).normal_(0, 4)
        self.kept = self.student.clone()
        self.passed_by = torch.zeros(2 * cache_bytes() // 4)
        self.student.requires_grad_()
        self.teacher = None
        self.labels = torch.randint(cols, (rows,))
        if soft:
            self.teacher = self.kept + torch.empty(rows, cols, dtype=dtype).normal_(0, 1)
        units = 3 if soft else 2
        self.bytes = units * self.student.numel() * self.student.element_size()
        self.footprint, self.elements = self.bytes, self.student.numel()
        self.reads = self.bytes // units * (units - 1)
        self.powers = {"ce": 2, "kl": 4, "jsd": 7}[kind] * self.elements
        self.logarithms = 2 * self.elements if kind == "jsd" else 0
        self.ours = Shim("loss", dtype_of(self.student), rows, cols, self.student.data_ptr(),
                         self.teacher.data_ptr() if soft else None, None if soft else self.labels.data_ptr(),
                         self.student.data_ptr(), temperature, kind == "jsd")
        self.forms = {}
        for widen in (False, True) if dtype != torch.float32 else (False,):
            value = self.value_function(widen)
            suffix = " .float()" if widen else ""
            self.forms["eager" + suffix] = self.with_gradient(value)
            fast = compiled(value)
            if fast: self.forms["compile" + suffix] = self.with_gradient(fast)
        self.forms.update(liger_forms(self))

    def restore(self):
        self.student.detach().copy_(self.kept)
        if self.footprint > cache_bytes(): self.passed_by.sum()

    def value_function(self, widen):
        tau = self.temperature
        if self.kind == "ce":
            return lambda s, t: F.cross_entropy(s.float() if widen else s, t)

        def kl(s, t):
            if widen: s, t = s.float(), t.float()
            s, t = F.log_softmax(s / tau, -1), F.log_softmax(t / tau, -1)
            return F.kl_div(s, t, log_target=True, reduction="batchmean") * tau ** 2

        def jsd(s, t):
            if widen: s, t = s.float(), t.float()
            s, t = F.log_softmax(s, -1), F.log_softmax(t, -1)
            middle = torch.logaddexp(s, t) - 0.6931471805599453
            return 0.5 * (F.kl_div(middle, s, log_target=True, reduction="batchmean") +
                          F.kl_div(middle, t, log_target=True, reduction="batchmean"))
        return kl if self.kind == "kl" else jsd

    def with_gradient(self, value):
        other = self.labels if self.kind == "ce" else self.teacher

        def run():
            loss = value(self.student, other)
            return loss, torch.autograd.grad(loss, self.student)[0]
        return run

    def expected(self, n):
        student = self.kept[:n].double().requires_grad_()
        other = self.labels[:n] if self.kind == "ce" else self.teacher[:n].double()
        loss = self.value_function(False)(student, other)
        return torch.autograd.grad(loss, student)[0] * (n / self.student.shape[0])

    def check(self, form):
        n = min(4, self.student.shape[0])
        expected = self.expected(n)
        self.restore()
        if form is None:
            self.ours()
            return distance(self.student.detach()[:n], expected)
        return distance(form()[1][:n], expected)


class Ema(Row):
    op, ceiling, decay = "ema", "in place", 0.999

    def __init__(self, dtype, count):
        self.dtype, self.shape = "f32 of " + str(dtype).split(".")[1], {"P": count}
        self.live = torch.empty(count, dtype=dtype).normal_()
        self.ours = Shim("ema", count, dtype_of(self.live), self.live.data_ptr(), self.decay)
        self.shadow = self.live.float().clone()
        self.before = self.shadow[:1 << 16].clone()
        self.live.add_(torch.ones_like(self.live))
        self.bytes = self.footprint = count * (8 + self.live.element_size())
        self.reads = count * (4 + self.live.element_size())
        self.elements = count
        weight = 1 - self.decay

        def lerp(shadow, live):
            shadow.lerp_(live.float(), weight)

        def multiply(shadow, live):
            shadow.mul_(self.decay).add_(live, alpha=weight)
        self.forms = {"lerp_": lambda: lerp(self.shadow, self.live),
                      "mul_ add_": lambda: multiply(self.shadow, self.live)}
        fast = compiled(lerp)
        if fast: self.forms["compile lerp_"] = lambda: fast(self.shadow, self.live)

    def check(self, form):
        n = self.before.numel()
        target = self.before.double() + (1 - self.decay) * (self.live[:n].double() - self.before.double())
        if form is None:
            self.ours()
            found = torch.empty_like(self.live, dtype=torch.float32)
            Shim.library.shim_average(self.ours.handle, found.data_ptr())
            return distance(found[:n], target)
        self.shadow[:n] = self.before
        form()
        return distance(self.shadow[:n], target)


class AdamW(Row):
    op, dtype, ceiling, decay = "adamw", "float32", "in place", 0.0

    def __init__(self, count):
        self.shape = {"P": count}
        self.value = torch.empty(count).normal_()
        self.gradient = torch.empty(count).normal_()
        self.parameter = torch.nn.Parameter(self.value.clone())
        self.parameter.grad = self.gradient
        self.start = self.value[:1 << 16].clone()
        self.shadow = self.value.clone() if self.decay else None
        self.bytes, self.reads = count * (36 if self.decay else 28), count * (20 if self.decay else 16)
        self.footprint, self.elements = count * (20 if self.decay else 16), count
        self.ours = Shim("adamw", count, dtype_of(self.value), self.value.data_ptr(), dtype_of(self.gradient),
                         self.gradient.data_ptr(), self.decay)
        self.forms = {}
        for name, options in (("fused", {"fused": True}), ("foreach", {"foreach": True})):
            optimizer = torch.optim.AdamW([self.parameter], **options)
            self.forms[name] = self.step(optimizer.step)
        fast = compiled(torch.optim.AdamW([self.parameter], foreach=True).step)
        if fast: self.forms["compile"] = self.step(fast)

    def step(self, step):
        return step

    def check(self, form):
        n, start, g = self.start.numel(), self.start.double(), self.gradient[:self.start.numel()].double()
        expected = start * (1 - 1e-5) - 1e-3 * g / (g.abs() + 1e-8)
        with torch.no_grad():
            self.parameter[:n] = self.start
        (form or self.ours)()
        found = self.parameter.detach()[:n] if form else self.value[:n]
        return distance(found - self.start, expected - start)

    limit = 1e-4  # of the difference that the first step makes


class AdamWEma(AdamW):
    """One pass of ours against PyTorch's two."""

    op, decay = "adamw+ema", 0.999

    def __init__(self, count):
        self.averages = [lambda s, p: s.lerp_(p, 1 - 0.999)]
        fast = compiled(self.averages[0])
        if fast: self.averages.append(fast)
        super().__init__(count)
        self.forms = {name + " + " + ("compile " if i else "") + "lerp_": self.both(form, average)
                      for name, form in self.forms.items() for i, average in enumerate(self.averages)}

    def both(self, step, average):
        def run():
            step()
            with torch.no_grad():
                average(self.shadow, self.parameter)
        return run


class AdamWTwo(AdamW):
    """One pass of ours over the parameters against PyTorch's three."""

    op, decay = "adamw+2 ema", 0.999

    def __init__(self, count):
        super().__init__(count)
        self.second = self.value.clone()
        self.bytes, self.reads = count * 44, count * 24
        self.footprint = count * 24
        self.ours.close()
        self.ours = Shim("adamw_two", count, self.value.data_ptr(), self.gradient.data_ptr(), self.decay)
        weights = 1 - self.decay, 0.1 * (1 - self.decay)

        def apart(one, two, p):
            one.lerp_(p, weights[0])
            two.lerp_(p, weights[1])
        averages = {"lerp_ twice": apart}
        fast = compiled(apart)
        if fast: averages["compile lerp_ twice"] = fast
        self.forms = {name + " + " + other: self.both(form, average)
                      for name, form in self.forms.items() for other, average in averages.items()}

    def both(self, step, averages):
        def run():
            step()
            with torch.no_grad():
                averages(self.shadow, self.second, self.parameter)
        return run


class Norm(Row):
    op, ceiling = "grad_norm", "read"

    def __init__(self, dtype, count):
        self.dtype, self.shape = str(dtype).split(".")[1], {"P": count}
        self.gradient = torch.empty(count, dtype=dtype).normal_()
        self.bytes = self.footprint = self.reads = count * self.gradient.element_size()
        self.elements = count
        self.ours = Shim("norm", count, dtype_of(self.gradient), self.gradient.data_ptr())
        self.expected = sum(float(part.double().square().sum()) for part in self.gradient.split(1 << 22)) ** 0.5
        self.limit = 1e-3 if dtype == torch.float32 else 1e-2
        self.forms = {"vector_norm": lambda: torch.linalg.vector_norm(self.gradient),
                      "get_total_norm": lambda: torch.nn.utils.get_total_norm([self.gradient]),
                      "_foreach_norm": lambda: torch._foreach_norm([self.gradient])[0]}
        if dtype != torch.float32:
            self.forms["float().norm()"] = lambda: self.gradient.float().norm()
        fast = compiled(lambda x: torch.linalg.vector_norm(x.float()))
        if fast: self.forms["compile vector_norm"] = lambda: fast(self.gradient)

    def check(self, form):
        if form: return abs(float(form()) / self.expected - 1)
        self.ours()
        return abs(self.ours.value() ** 0.5 / self.expected - 1)


class Select(Row):
    """On one core, as its target is."""

    op, dtype, ceiling, limit, threads = "select", "float32", None, 0.0, 1

    def __init__(self, rows, cols=50000, k=8192):
        self.shape = {"N": rows, "V": cols, "K": k}
        self.data, self.k = torch.randn(rows, cols), k
        self.bytes = self.footprint = self.data.numel() * 4 + rows * k * 12
        self.seconds = 0.0 if ON_GPU else SELECT_SECONDS * rows
        self.elements = self.data.numel()
        self.ours = Shim("select", dtype_of(self.data), rows, cols, self.data.data_ptr(), k, threads=1)
        self.forms = {"topk": lambda: torch.topk(self.data, k), "sort": lambda: torch.sort(self.data, descending=True)}

    def check(self, form):
        expected = torch.topk(self.data, self.k).values
        if form: return distance(form()[0][:, :self.k], expected)
        self.ours()
        ids = torch.empty(self.data.shape[0], self.k, dtype=torch.int64)
        Shim.library.shim_ids(self.ours.handle, ids.data_ptr())
        return distance(self.data.gather(1, ids), expected)


class Head(Row):
    """Cross entropy with its head, on one core: the products decide, of bf16 or, without an instruction for those, f32."""

    op, dtype, ceiling, limit, threads = "head", "bfloat16", None, 1e-2, 1

    def __init__(self, rows=512, cols=16384, width=1024):
        self.shape = {"N": rows, "V": cols, "H_s": width}
        self.hidden = torch.randn(rows, width).mul_(0.1).bfloat16().requires_grad_()
        self.weight = torch.randn(cols, width).mul_(0.1).bfloat16().requires_grad_()
        self.labels = torch.randint(cols, (rows,))
        self.hidden_gradient, self.weight_gradient = torch.zeros(rows, width), torch.zeros(cols, width)
        self.products, self.elements = 6 * rows * cols * width, rows * cols
        self.bytes = 2 * (rows + cols) * width + 4 * rows * width + 8 * cols * width
        self.footprint = self.bytes
        self.ours = Shim("head", rows, cols, width, self.hidden.data_ptr(), self.weight.data_ptr(),
                         self.labels.data_ptr(), self.hidden_gradient.data_ptr(), self.weight_gradient.data_ptr(), threads=1)

        def value(x, w, labels):
            return F.cross_entropy((x @ w.t()).float(), labels)

        def with_gradient(function):
            return lambda: torch.autograd.grad(function(self.hidden, self.weight, self.labels), (self.hidden, self.weight))[0]
        self.forms = {"eager": with_gradient(value)}
        fast = compiled(value)
        if fast: self.forms["compile"] = with_gradient(fast)

    def check(self, form):
        hidden = self.hidden.detach()[:4].float().requires_grad_()
        loss = F.cross_entropy(hidden @ self.weight.detach().float().t(), self.labels[:4]) * (4 / self.hidden.shape[0])
        expected = torch.autograd.grad(loss, hidden)[0]
        if form: return distance(form()[:4], expected)
        self.ours()
        return distance(self.hidden_gradient[:4], expected)


def rows():
    """Sizes: the large rows come to at least 16 times a cache of 32 MiB, the small ones stay in it."""
    s, bf16, f32 = ARGS.size * (8 if ON_GPU else 1), torch.bfloat16, torch.float32
    n = lambda count: max(1 << 12, int(count * s) // 4096 * 4096)
    two = [("two_averages", lambda: AdamWTwo(n(40 << 20))), ("hot_two_averages", lambda: AdamWTwo(1 << 20))]
    return [
        ("ce_bf16", lambda: Loss("ce", bf16, max(16, int(1024 * s)))),
        ("ce_f32", lambda: Loss("ce", f32, max(16, int(512 * s)))),
        ("kl_bf16", lambda: Loss("kl", bf16, max(16, int(768 * s)), temperature=2.0)),
        ("kl_f32", lambda: Loss("kl", f32, max(16, int(384 * s)), temperature=2.0)),
        ("jsd_bf16", lambda: Loss("jsd", bf16, max(16, int(768 * s)))),
        ("jsd_f32", lambda: Loss("jsd", f32, max(16, int(384 * s)))),
        ("ema_bf16", lambda: Ema(bf16, n(96 << 20))),
        ("ema_f32", lambda: Ema(f32, n(80 << 20))),
        ("adamw", lambda: AdamW(n(40 << 20))),
        ("both", lambda: AdamWEma(n(40 << 20))),
        ("norm_f32", lambda: Norm(f32, n(160 << 20))),
        ("norm_bf16", lambda: Norm(bf16, n(320 << 20))),
        ("select", lambda: Select(16)),
        ("head", Head),
        ("hot_ce_bf16", lambda: Loss("ce", bf16, 16)),
        ("hot_ce_f32", lambda: Loss("ce", f32, 16)),
        ("hot_kl_bf16", lambda: Loss("kl", bf16, 16, temperature=2.0)),
        ("hot_kl_f32", lambda: Loss("kl", f32, 16, temperature=2.0)),
        ("hot_ema_bf16", lambda: Ema(bf16, 1 << 20)),
        ("hot_adamw", lambda: AdamW(1 << 20)),
        ("hot_both", lambda: AdamWEma(1 << 20)),
        ("hot_norm_f32", lambda: Norm(f32, 4 << 20)),
        ("hot_norm_bf16", lambda: Norm(bf16, 4 << 20)),
    ] + ([] if ON_GPU else two)  # gpu_shim.cu has one average
