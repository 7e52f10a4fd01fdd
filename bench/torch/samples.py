"""Rows of compare.py: losses and conversions of a diffusion distillation, on samples [samples, elements].

PyTorch's forms are those of FastGen and Model-Optimizer, and what one would write in f32 where they work in double."""

import torch
import torch.nn.functional as F

from arms import ARGS, ON_GPU, Row, Shim, compiled, distance, dtype_of


class Samples(Row):
    """Three tensors in, one of the same type out; a loss's value besides."""

    ceiling = "in place"

    def __init__(self, op, dtype, samples, elements):
        self.samples = samples
        self.op, self.dtype, self.shape = op, str(dtype).split(".")[1], {"B": self.samples, "D": elements}
        self.limit = 1e-6 if dtype == torch.float32 else 4e-3
        size = torch.empty(0, dtype=dtype).element_size()
        self.elements = self.samples * elements
        self.tensors = [torch.empty(self.samples, elements, dtype=dtype).normal_() for _ in range(self.inputs)]
        self.out = torch.empty_like(self.tensors[0])
        self.bytes = self.footprint = (self.inputs + 1) * self.elements * size
        self.reads = self.inputs * self.elements * size
        self.times = torch.linspace(0.1, 0.9, self.samples, dtype=torch.float64)
        self.ours = Shim(op, dtype_of(self.out), self.samples, elements, *(t.data_ptr() for t in self.tensors),
                         self.out.data_ptr(), *self.extra())
        self.forms = {}
        for name, form in self.eager().items():
            self.forms["eager" + name] = self.arm(form)
            fast = compiled(form)
            if fast: self.forms["compile" + name] = self.arm(fast)

    inputs = 3

    def extra(self):
        return ()

    def arm(self, form):
        """Value, and gradient by the first tensor."""
        first = self.tensors[0].requires_grad_()

        def run():
            return torch.autograd.grad(form(*self.tensors), first)[0]
        return run

    def check(self, form):
        n = min(1 << 16, self.out.shape[1])
        expected = self.expected(n)
        found = form() if form else (self.ours(), self.out)[1]
        return distance(found.detach()[:, :n], expected)


class Vsd(Samples):
    """The student's term: x, T, F."""

    @staticmethod
    def eager():
        def term(x, teacher, fake):
            with torch.no_grad():
                weight = 1 / ((x.float() - teacher.float()).abs().mean(1, keepdim=True) + 1e-6)
                target = x - (fake - teacher) * weight.to(x.dtype)
            return 0.5 * F.mse_loss(x, target)

        def by_hand(x, teacher, fake):
            with torch.no_grad():
                weight = 1 / ((x.float() - teacher.float()).abs().mean(1, keepdim=True) + 1e-6)
                pull = (fake.float() - teacher.float()) * (weight / x.numel())
            return (x.float() * pull).sum()
        return {"": term, " closed form": by_hand}

    def expected(self, n):
        x, teacher, fake = (t.detach() for t in self.tensors)
        mean = torch.stack([(a.double() - b.double()).abs().mean() for a, b in zip(x, teacher)])
        return (fake[:, :n].double() - teacher[:, :n].double()) / (mean[:, None] + 1e-6) / x.numel()


class Denoise(Samples):
    """The fake score's term: the prediction of a flow network, x and eps; compared in x0."""

    def extra(self):
        return (self.times.data_ptr(),)

    def eager(self):
        t = self.times[:, None]

        def in_double(v, x, eps):
            with torch.no_grad():
                noised = ((1 - t) * x.double() + t * eps.double()).to(v.dtype)
            return F.mse_loss((noised.double() - t * v.double()).to(v.dtype), x)

        def in_single(v, x, eps):
            s = t.float()
            with torch.no_grad():
                noised = (1 - s) * x + s * eps
            return F.mse_loss(noised - s * v, x.float() if noised.dtype != x.dtype else x)
        return {" double": in_double, "": in_single}

    def expected(self, n):
        v, x, eps = (tensor.detach()[:, :n].double() for tensor in self.tensors)
        return 2 * self.times[:, None] ** 2 * (v - (eps - x)) / self.elements


class Convert(Samples):
    """x0 of a flow network's prediction and x_t; the references compute it in double."""

    inputs = 2

    def extra(self):
        return (self.times.data_ptr(),)

    def eager(self):
        t = self.times[:, None]
        return {" double": lambda v, noised: (noised.double() - t * v.double()).to(v.dtype),
                "": lambda v, noised: (noised - t.float() * v).to(v.dtype)}

    def arm(self, form):
        def run():
            with torch.no_grad():
                return form(*self.tensors)
        return run

    def expected(self, n):
        v, noised = (tensor[:, :n].double() for tensor in self.tensors)
        return noised - self.times[:, None] * v


class Gan(Row):
    """The discriminator's term on logits of a few heads, one core."""

    op, dtype, ceiling, threads = "gan", "float32", None, 1

    def __init__(self, samples, heads):
        self.shape = {"B": samples, "K": heads}
        self.logits = [torch.empty(samples, heads).normal_(0, 3).requires_grad_() for _ in range(2)]
        self.gradients = [torch.empty(samples, heads) for _ in range(2)]
        self.elements = 2 * samples * heads
        self.bytes = self.footprint = 8 * self.elements
        self.powers = self.elements
        self.ours = Shim("gan", samples, heads, *(x.data_ptr() for x in self.logits + self.gradients), threads=1)
        term = lambda fake, real: F.softplus(fake).mean() + F.softplus(-real).mean()
        self.forms = {"eager": lambda: torch.autograd.grad(term(*self.logits), self.logits)}
        fast = compiled(term)
        if fast: self.forms["compile"] = lambda: torch.autograd.grad(fast(*self.logits), self.logits)

    def check(self, form):
        fake, real = (x.detach().double() for x in self.logits)
        expected = torch.cat((torch.sigmoid(fake), -torch.sigmoid(-real))) / fake.numel()
        found = form() if form else (self.ours(), self.gradients)[1]
        return distance(torch.cat(tuple(found)), expected)


def rows():
    """Large samples, and the batch of a small model, which stays in the cache."""
    if ON_GPU: return []  # gpu_shim.cu has none of them
    bf16, f32 = torch.bfloat16, torch.float32
    n = lambda count: max(8, int(count * ARGS.size))
    latent, film = 16 * 64 * 64, 6 << 20  # elements of a picture of 512 x 512 pixels as latents, and of many
    return [
        ("vsd_f32", lambda: Vsd("vsd", f32, n(768), latent)),
        ("vsd_bf16", lambda: Vsd("vsd", bf16, n(1536), latent)),
        ("vsd_long_f32", lambda: Vsd("vsd", f32, n(8), film)),
        ("denoise_f32", lambda: Denoise("denoise", f32, n(768), latent)),
        ("denoise_bf16", lambda: Denoise("denoise", bf16, n(1536), latent)),
        ("denoise_long_f32", lambda: Denoise("denoise", f32, n(8), film)),
        ("convert_f32", lambda: Convert("convert", f32, n(1024), latent)),
        ("convert_bf16", lambda: Convert("convert", bf16, n(2048), latent)),
        ("gan", lambda: Gan(64, 4)),
        ("hot_vsd_f32", lambda: Vsd("vsd", f32, 8, latent)),
        ("hot_denoise_f32", lambda: Denoise("denoise", f32, 8, latent)),
        ("hot_convert_f32", lambda: Convert("convert", f32, 8, latent)),
    ]
