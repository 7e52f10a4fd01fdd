"""Losses for PyTorch: each computes its gradient in the forward pass, and the backward pass only hands it on.

    loss = xdistill.torch.kl_loss(student_logits, teacher_logits, labels, temperature=2.0)
    loss.backward()

Rules of all functions:
- Tensors are on the CPU, or all on one GPU after XDISTILL_CUDA=1 pip install ./python. A call there works on PyTorch's current
  stream, and waits once, for its value and data errors. Logits are f32 or bf16, losses f32, gradients as their tensors.
- Only the first tensor, the student, gets a gradient; of head_loss hidden, weight and bias, of gan_loss both. Teachers are
  constants.
- Logits are [..., vocabulary], with the same leading dimensions for student and teacher. Rows may be a slice of a larger tensor, such as logits[:, 5:] of one sequence. Rows at uneven
  distances and other strided tensors are copied. A tensor whose storage was freed is a ValueError.
- Labels belong to the row: label i is the token that row i predicts (next_labels). Rows of ignore_index do not count, in
  divergences too. Without labels all rows count.
- reduction: "mean" over counted rows (0 if none counts), "sum", or "none", one value a row. `denominator` replaces the
  number of counted rows, for gradient accumulation.
- Data errors raise xdistill.Error: labels outside the vocabulary, logits that are not finite.
- inplace=True writes the gradient over the student's logits: no more memory is taken, and nobody may read the logits
  later, which PyTorch checks. In torch.compile and where no gradient is needed it does nothing.
- A factor of the loss (loss / 4, a GradScaler) multiplies the gradient once, in its own memory, or in new memory with
  retain_graph; a factor of 1 costs nothing.
- There is no second derivative: a backward pass through the gradient raises, in torch.autograd.functional too. Forward mode
  (torch.func.jvp) and torch.func.grad raise.
- Calls use torch.get_num_threads() threads and a workspace that each thread of Python keeps. The memory of a large gradient that is
  gone is used again; two idle blocks stay, until xdistill.release_memory().
"""

import torch
from torch import Tensor

from . import _arrays, _library, losses, text

__all__ = ["cross_entropy", "denoise_loss", "gan_loss", "head_loss", "jsd_loss", "kl_loss", "loss", "next_labels",
           "reverse_kl_loss", "topk_kl_loss", "uld_loss", "vsd_loss", "xtoken_loss"]
NO_SECOND = "xdistill's losses have no second derivative"


# ---- the way of a gradient ----

class Once(torch.autograd.Function):
    """Hands a gradient on; a backward pass through it, to what the gradient depends on, raises."""

    @staticmethod
    def forward(ctx, gradient, *sources):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(NO_SECOND)


def traced(x):
    return type(x) is not Tensor or torch.compiler.is_compiling()


def keeps_graph():
    """Whether this backward pass leaves the graph for another one: saved tensors are then not ours to change."""
    told = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return told is None or told()


def times(ctx, gradient, factor):
    """The saved gradient times what comes from above: in its own memory, unless an earlier or a later pass needs that."""
    if traced(factor) or factor.dim():
        result = gradient * (factor.unsqueeze(-1) if factor.dim() else factor).to(gradient.dtype)
    else:
        on_gpu = _arrays.torch_device(factor) is not None  # then nobody waits for the number
        value = factor.detach() if on_gpu else factor.item()
        if not on_gpu and value == 1:
            result, ctx.given = gradient, True
        elif getattr(ctx, "given", False) or keeps_graph():
            result = gradient * value
        else:
            result = gradient.data.mul_(value)
    if torch.is_grad_enabled() and not traced(factor):  # create_graph
        result = Once.apply(result, factor, *getattr(ctx, "tokens", [torch.zeros((), requires_grad=True)]))
    return result


class InPlace(torch.autograd.Function):
    """A loss whose gradient replaces the student's logits."""

    @staticmethod
    def forward(ctx, student, compute):
        value = compute(student.detach())
        torch.autograd.graph.increment_version(student)
        ctx.save_for_backward(student)
        return value

    @staticmethod
    def backward(ctx, factor):
        gradient, = ctx.saved_tensors
        return times(ctx, gradient.detach(), factor), None


def check(tensors, given):
    """Refuses what is no tensor, forward mode, and tensors of two devices. `tensors` has (name, may be None, may be on the CPU)."""
    student = tensors[0][0]
    for name, optional, host in tensors:
        x = given[name]
        if optional and x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError("%s is a %s, not a tensor%s" % (name, type(x).__name__, ": pass its .logits" if hasattr(x, "logits") else ""))
        if x.device != given[student].device and not (host and x.device.type == "cpu"):
            raise ValueError("%s is on %s, but %s on %s" % (name, x.device, student, given[student].device))
        if not torch.compiler.is_compiling() and torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError("xdistill's losses have no forward mode, which %s has a tangent for" % name)


def wants(*tensors):
    return [torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors]


def in_place(student, inplace):
    """Whether the gradient goes over the student's logits."""
    if not inplace or torch.compiler.is_compiling() or not wants(student)[0]:
        return False
    base = student if student._base is None else student._base
    if student.is_leaf or base.is_leaf and base.requires_grad:
        raise ValueError("inplace=True would overwrite a leaf tensor that requires a gradient, or a view of one")
    return True


def empty(like, dtype=None):
    """A dense tensor of the same shape and device. Large ones on the CPU use memory of earlier gradients again."""
    dtype = dtype or like.dtype
    size = like.numel() * dtype.itemsize
    if size < 1 << 20 or _arrays.torch_device(like) is not None:
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    return torch.frombuffer(_library.borrow(size), dtype=dtype).view(like.shape)


# ---- operations of PyTorch, made of the tables of `losses` ----

FLOATS = {losses.FLOATS: torch.float32, losses.DOUBLES: torch.float64, losses.TERMS: torch.float64}


def fitting(x, argument, name):
    """The Array of x, or a dense copy where the library cannot read x in place."""
    if isinstance(argument, losses.Samples):
        return x.contiguous()
    if isinstance(argument, losses.Elements):
        return x.to("cpu" if argument.host else x.device, FLOATS.get(argument.kind, x.dtype)).contiguous()
    where = _arrays.array(x, name, gpu=True)  # what a copy does not mend is an error here
    try:
        losses.rows(where, name)
    except ValueError:
        return x.contiguous()
    return where


def evaluate(table, given, gradients):
    """The value of a loss as a tensor; gradients by argument are written."""
    student = next(iter(given.values()))
    given = {name: fitting(x, table.arguments[name], name) if isinstance(x, Tensor) else x for name, x in given.items()}
    given = {name: text.find(x) if isinstance(table.arguments[name], losses.Object) else x for name, x in given.items()}
    rows = None
    if given.get("reduction") == "none":
        rows = given["row_loss"] = torch.empty(student.shape[:-1], dtype=torch.float32, device=student.device)
    given.update((table.gradients[name], x) for name, x in gradients.items())
    value = table.compute(given, None, torch.get_num_threads()).loss
    return torch.tensor(value, dtype=torch.float32, device=student.device) if rows is None else rows


def operation(name, table, names, tensors):
    """The custom op of a loss. Its outputs are the value, and the gradient by each argument that has one, empty if not wanted."""
    kinds = [(one, table.arguments[one].schema) for one in names]
    wanted = [(one, "bool", "want_" + one) for one in table.gradients]
    schema = "(%s) -> (%s)" % (", ".join("%s %s" % (kind, one) for one, kind in kinds + [(w, k) for _, k, w in wanted]),
                               ", ".join(["Tensor"] * (1 + len(wanted))))
    places = [names.index(one) for one in table.gradients]

    def outputs(values, make):
        return {one: make(one, values[place]) for one, place, want in zip(table.gradients, places, values[len(names):]) if want}

    def gradient(one, x):
        if isinstance(table.arguments[table.gradients[one]], losses.Elements):  # added to
            return empty(x, torch.float32).zero_()
        return empty(x)

    def compute(*values):
        made = outputs(values, gradient)
        value = evaluate(table, dict(zip(names, values)), made)
        made = outputs(values, lambda one, x: made[one] if made[one].dtype == x.dtype else empty(x).copy_(made[one]))
        return (value, *(made.get(one, values[0].new_empty(0)) for one in table.gradients))

    def fake(*values):
        check(tensors, dict(zip(names, values)))
        made = outputs(values, lambda _, x: x.new_empty(x.shape))
        none = "reduction" in names and values[names.index("reduction")] == "none"
        return (values[0].new_empty(values[0].shape[:-1] if none else (), dtype=torch.float32),
                *(made.get(one, values[0].new_empty(0)) for one in table.gradients))

    def setup(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])

    def backward(ctx, factor, *_):
        result = [None] * (len(names) + len(places))
        for place, saved in zip(places, ctx.saved_tensors):
            if factor is not None and ctx.needs_input_grad[place]:
                result[place] = times(ctx, saved, factor)
        return tuple(result)

    op = torch.library.custom_op("xdistill::" + name, compute, mutates_args=(), schema=schema)
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=setup)
    return op


def differentiable(function):
    """PyTorch's function of a loss of arrays."""
    table = function.table
    names = [name for name, one in table.arguments.items() if not one.own]
    tensors = [(one, table.arguments[one].schema == "Tensor?", table.arguments[one].host) for one in names if table.arguments[one].is_array]
    op = operation(function.__name__, table, names, tensors)
    floats = [name for name in names if table.arguments[name].schema == "float"]
    constants = [name for name in names if table.arguments[name].is_array and name not in table.gradients]
    student = names[0]

    def call(given):
        inplace = given.pop("inplace", False)
        if isinstance(given.get("chunks"), text.Chunks):
            given["chunks"] = given["chunks"].tensors()
        given = table.expand(given)
        check(tensors, given)
        for name in floats:
            given[name] = float(given[name])
        for name in constants:
            if given[name] is not None:
                given[name] = given[name].detach()
        for name in ("projection", "cache"):
            if name in given:
                table.arguments[name].put(None, given[name], name)
                given[name] = given[name].number if given[name] is not None else 0
        x, sources = given[student], [given[name] for name in table.gradients]
        if in_place(x, inplace) and isinstance(fitting(x, table.arguments[student], student), _arrays.Array):
            value = InPlace.apply(x, lambda own: evaluate(table, {**{name: given[name] for name in names}, student: own}, {student: own}))
        else:
            value = op(*[given[name] for name in names], *wants(*sources))[0]
        if not torch.compiler.is_compiling() and value.grad_fn is not None:
            value.grad_fn.tokens = [x[..., :0].sum() for x in sources if x is not None and x.requires_grad]  # they keep no memory of x
        return value

    return table.function(function.__name__, function.__doc__, call, [name for name in names if not table.arguments[name].hidden],
                          **({"inplace": False} if table.in_place else {}))


loss = differentiable(losses.loss)
topk_kl_loss = differentiable(losses.topk_kl_loss)
head_loss = differentiable(losses.head_loss)
xtoken_loss = differentiable(losses.xtoken_loss)
uld_loss = differentiable(losses.uld_loss)
vsd_loss = differentiable(losses.vsd_loss)
denoise_loss = differentiable(losses.denoise_loss)
gan_loss = differentiable(losses.gan_loss)


def cross_entropy(student, labels, ignore_index=-100, reduction="mean", label_smoothing=0.0, **others):
    """Cross entropy, as torch.nn.functional.cross_entropy over the last dimension; others: see `loss`."""
    return loss(student, None, labels, hard_weight=1.0, ignore_index=ignore_index, reduction=reduction,
                label_smoothing=label_smoothing, **others)


def kl_loss(student, teacher, labels=None, temperature=1.0, ignore_index=-100, reduction="mean", *, soft_weight=1.0, **others):
    """KL(teacher || student), times temperature^2; others: see `loss`, such as hard_weight for cross entropy too."""
    return loss(student, teacher, labels, temperature=temperature, ignore_index=ignore_index, reduction=reduction,
                soft_weight=soft_weight, **others)


def reverse_kl_loss(student, teacher, labels=None, temperature=1.0, ignore_index=-100, reduction="mean", **others):
    """KL(student || teacher), times temperature^2; others: see `kl_loss`."""
    return kl_loss(student, teacher, labels, temperature, ignore_index, reduction, divergence="reverse_kl", **others)


def jsd_loss(student, teacher, labels=None, temperature=1.0, ignore_index=-100, reduction="mean", beta=0.5, **others):
    """beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student, as GKD. Not times
    temperature^2. beta 0 is the forward KL, 1 the reverse; others: see `kl_loss`."""
    return kl_loss(student, teacher, labels, temperature, ignore_index, reduction, divergence="jsd", beta=beta, **others)


def next_labels(ids, ignore_index=-100):
    """The label of each position of ids [..., tokens]: the next token; the last one has none. Logits need no shift then."""
    return torch.nn.functional.pad(ids[..., 1:], (0, 1), value=ignore_index)
