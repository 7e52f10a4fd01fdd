"""Losses for PyTorch: each computes its gradient in the forward pass, and the backward pass only hands it on.

    loss = xdistill.torch.kl_loss(student_logits, teacher_logits, labels, temperature=2.0)
    loss.backward()

Rules of all functions:
- Tensors are on the CPU, logits f32 or bf16. Losses are f32, gradients have the type of their tensors.
- Only the first tensor, the student, gets a gradient; of head_loss hidden, weight and bias, of gan_loss both. Teachers are
  constants.
- Logits are [..., vocabulary]. Rows may be a slice of a larger tensor, such as logits[:, 5:] of one sequence. Rows at uneven
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
- There is no second derivative: a backward pass through the gradient raises.
- Calls use torch.get_num_threads() threads and a workspace that each thread of Python keeps. The memory of a large gradient that is
  gone is used again; two idle blocks stay, until xdistill.release_memory().
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from . import _library, losses
from ._arrays import array

__all__ = ["cross_entropy", "denoise_loss", "gan_loss", "head_loss", "jsd_loss", "kl_loss", "loss", "next_labels",
           "reverse_kl_loss", "topk_kl_loss", "uld_loss", "vsd_loss", "xtoken_loss"]
NO_SECOND = "xdistill's losses have no second derivative"


def context():
    return _library.context(torch.get_num_threads())


# ---- the way of a gradient ----

class Once(torch.autograd.Function):
    """Hands a gradient on; a backward pass through it raises."""

    @staticmethod
    def forward(ctx, gradient, token):
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
        value = factor.item()
        if value == 1:
            result, ctx.given = gradient, True
        elif getattr(ctx, "given", False) or keeps_graph():
            result = gradient * value
        else:
            result = gradient.data.mul_(value)
    if torch.is_grad_enabled() and not traced(factor):  # create_graph
        result = Once.apply(result, torch.zeros((), requires_grad=True))
    return result


def register(op, fake, *places):
    """Gives a custom op its shapes and its autograd: output 1 + i is the gradient of input places[i]."""

    def setup(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])
        ctx.inputs = len(inputs)

    def backward(ctx, factor, *_):
        result = [None] * ctx.inputs
        for place, gradient in zip(places, ctx.saved_tensors):
            if factor is not None and ctx.needs_input_grad[place]:
                result[place] = times(ctx, gradient, factor)
        return tuple(result)

    op.register_fake(fake)
    op.register_autograd(backward, setup_context=setup)


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


def even(x, name="student"):
    """x, or a copy where the library cannot read its rows in place; None of None."""
    if x is None:
        return None
    where = array(x, name)  # what a copy does not mend is an error here
    try:
        losses.rows(where, name)
    except ValueError:
        return x.contiguous()
    return x


def constant(x):
    return None if x is None else x.detach()


def dense(x):
    return None if x is None else x.contiguous()


def empty(like, dtype=None):
    """A dense tensor of the same shape. Large ones use memory of earlier gradients again."""
    dtype = dtype or like.dtype
    size = like.numel() * torch.empty(0, dtype=dtype).element_size()
    if size < 1 << 20:
        return torch.empty(like.shape, dtype=dtype)
    return torch.frombuffer(_library.borrow(size), dtype=dtype).view(like.shape)


def none(x):
    return x.new_empty(0)


def reduced(reduction, denominator, student):
    """Arguments of `losses` and the tensor of row losses of a reduction."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError("reduction is %r, expected 'mean', 'sum' or 'none'" % (reduction,))
    row_loss = torch.empty(student.shape[:-1], dtype=torch.float32) if reduction == "none" else None
    return {"denominator": denominator if reduction == "mean" else 1.0, "row_loss": row_loss}


def answer(values, arguments):
    return arguments["row_loss"] if arguments["row_loss"] is not None else torch.tensor(values.loss, dtype=torch.float32)


def fake_value(student, reduction):
    return student.new_empty(student.shape[:-1] if reduction == "none" else (), dtype=torch.float32)


# ---- one vocabulary ----

def run_loss(student, teacher, labels, mask, gradient, hard_weight, soft_weight, temperature, divergence, beta, squared,
             smoothing, ignore_index, denominator, reduction, vocabulary):
    arguments = reduced(reduction, denominator, student)
    values = losses.loss(
        student, even(teacher, "teacher"), dense(labels), mask=dense(mask), gradient=gradient,
        hard_weight=hard_weight, soft_weight=soft_weight, temperature=temperature, divergence=divergence, beta=beta,
        temperature_squared=squared, label_smoothing=smoothing, ignore_index=ignore_index, vocabulary=vocabulary,
        context=context(), **arguments)
    return answer(values, arguments)


@torch.library.custom_op("xdistill::loss", mutates_args=())
def loss_op(student: Tensor, teacher: Optional[Tensor], labels: Optional[Tensor], mask: Optional[Tensor], want: bool,
            hard_weight: float, soft_weight: float, temperature: float, divergence: str, beta: float,
            squared: Optional[bool], smoothing: float, ignore_index: int, denominator: float, reduction: str,
            vocabulary: int) -> Tuple[Tensor, Tensor]:
    student = even(student)
    gradient = empty(student) if want else None
    value = run_loss(student, teacher, labels, mask, gradient, hard_weight, soft_weight, temperature, divergence, beta, squared,
                     smoothing, ignore_index, denominator, reduction, vocabulary)
    return value, none(student) if gradient is None else gradient


def fake_loss(student, teacher, labels, mask, want, *others):
    return fake_value(student, others[-2]), student.new_empty(student.shape) if want else none(student)


register(loss_op, fake_loss, 0)


def loss(student, teacher=None, labels=None, *, hard_weight=0.0, soft_weight=0.0, temperature=1.0, divergence="kl", beta=0.0,
         temperature_squared=None, label_smoothing=0.0, ignore_index=-100, mask=None, reduction="mean", denominator=0.0,
         vocabulary=None, inplace=False):
    """hard_weight times the cross entropy with labels plus soft_weight times a divergence from the teacher, in one pass.

    divergence           "kl" (teacher || student), "reverse_kl", "jsd", "soft_ce" or "cosine"
    beta                 of "jsd": the teacher's share
    temperature_squared  whether tau^2 multiplies the divergence; None: for "kl" and "reverse_kl"
    mask                 [rows] bytes or booleans; 0: does not count
    vocabulary           columns in use; further ones are padding with gradient 0. None: all
    """
    settings = (float(hard_weight), float(soft_weight), float(temperature), divergence, float(beta), temperature_squared,
                float(label_smoothing), ignore_index, float(denominator), reduction, vocabulary or 0)
    teacher = constant(teacher)
    if in_place(student, inplace) and even(student) is student:
        return InPlace.apply(student, lambda own: run_loss(own, teacher, labels, mask, own, *settings))
    return loss_op(student, teacher, labels, mask, wants(student)[0], *settings)[0]


def cross_entropy(student, labels, ignore_index=-100, reduction="mean", label_smoothing=0.0, **others):
    """Cross entropy, as torch.nn.functional.cross_entropy over the last dimension; others: see `loss`."""
    return loss(student, None, labels, hard_weight=1.0, ignore_index=ignore_index, reduction=reduction,
                label_smoothing=label_smoothing, **others)


def kl_loss(student, teacher, labels=None, temperature=1.0, ignore_index=-100, reduction="mean", **others):
    """KL(teacher || student), times temperature^2; others: see `loss`, such as hard_weight for cross entropy too."""
    return loss(student, teacher, labels, temperature=temperature, ignore_index=ignore_index, reduction=reduction,
                **{"soft_weight": 1.0, **others})


def reverse_kl_loss(student, teacher, labels=None, temperature=1.0, ignore_index=-100, reduction="mean", **others):
    """KL(student || teacher), times temperature^2."""
    return kl_loss(student, teacher, labels, temperature, ignore_index, reduction, divergence="reverse_kl", **others)


def jsd_loss(student, teacher, labels=None, temperature=1.0, ignore_index=-100, reduction="mean", beta=0.5, **others):
    """beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student, as GKD. Not times
    temperature^2. beta 0 is the forward KL, 1 the reverse."""
    return kl_loss(student, teacher, labels, temperature, ignore_index, reduction, divergence="jsd", beta=beta, **others)


def run_topk(student, teacher, labels, ids, log_probs, gradient, k, mode, divergence, beta, temperature, squared, ignore_index,
             denominator, reduction, vocabulary):
    arguments = reduced(reduction, denominator, student)
    values = losses.topk_kl_loss(
        student, even(teacher, "teacher"), dense(labels), ids=dense(ids), log_probs=dense(log_probs),
        gradient=gradient, k=k or None, mode=mode, divergence=divergence, beta=beta, temperature=temperature,
        temperature_squared=squared, ignore_index=ignore_index, vocabulary=vocabulary, context=context(), **arguments)
    return answer(values, arguments)


@torch.library.custom_op("xdistill::topk_kl_loss", mutates_args=())
def topk_op(student: Tensor, teacher: Optional[Tensor], labels: Optional[Tensor], ids: Optional[Tensor],
            log_probs: Optional[Tensor], want: bool, k: int, mode: str, divergence: str, beta: float, temperature: float,
            squared: Optional[bool], ignore_index: int, denominator: float, reduction: str,
            vocabulary: int) -> Tuple[Tensor, Tensor]:
    student = even(student)
    gradient = empty(student) if want else None
    value = run_topk(student, teacher, labels, ids, log_probs, gradient, k, mode, divergence, beta, temperature, squared,
                     ignore_index, denominator, reduction, vocabulary)
    return value, none(student) if gradient is None else gradient


def fake_topk(student, teacher, labels, ids, log_probs, want, *others):
    return fake_value(student, others[-2]), student.new_empty(student.shape) if want else none(student)


register(topk_op, fake_topk, 0)


def topk_kl_loss(student, teacher=None, labels=None, temperature=1.0, ignore_index=-100, reduction="mean", *, k=None, ids=None,
                 log_probs=None, mode="tail", divergence="kl", beta=0.0, temperature_squared=None, denominator=0.0,
                 vocabulary=None, inplace=False):
    """A divergence at k columns of a row: those of `ids`, or the student's k largest.

    teacher    logits; or log_probs [..., k] f32 at `ids`, at this temperature
    mode       of the mass outside the k: "tail" (one more entry), "renormalise", "truncate" or "zero_outside"
    """
    settings = (k or 0, mode, divergence, float(beta), float(temperature), temperature_squared, ignore_index,
                float(denominator), reduction, vocabulary or 0)
    teacher, log_probs = constant(teacher), constant(log_probs)
    if in_place(student, inplace) and even(student) is student:
        return InPlace.apply(student, lambda own: run_topk(own, teacher, labels, ids, log_probs, own, *settings))
    return topk_op(student, teacher, labels, ids, log_probs, wants(student)[0], *settings)[0]


# ---- output weights and loss in one ----

@torch.library.custom_op("xdistill::head_loss", mutates_args=())
def head_op(hidden: Tensor, weight: Tensor, bias: Optional[Tensor], labels: Optional[Tensor], teacher: Optional[Tensor],
            teacher_hidden: Optional[Tensor], teacher_weight: Optional[Tensor], teacher_bias: Optional[Tensor],
            want_hidden: bool, want_weight: bool, want_bias: bool, hard_weight: float, soft_weight: float, temperature: float,
            divergence: str, beta: float, squared: Optional[bool], smoothing: float, ignore_index: int, denominator: float,
            reduction: str, chunk_rows: int, bf16: bool) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    floats = [None if x is None else x.float().contiguous() for x in (bias, teacher_bias)]
    hidden, weight, teacher = even(hidden, "hidden"), even(weight, "weight"), even(teacher, "teacher")
    teacher_hidden, teacher_weight = even(teacher_hidden, "teacher_hidden"), even(teacher_weight, "teacher_weight")
    to_hidden = empty(hidden) if want_hidden else None
    to_weight = empty(weight, torch.float32).zero_() if want_weight else None
    to_bias = torch.zeros(bias.shape, dtype=torch.float32) if want_bias else None
    values = losses.head_loss(
        hidden, weight, floats[0], dense(labels), teacher=teacher, teacher_hidden=teacher_hidden, teacher_weight=teacher_weight,
        teacher_bias=floats[1], hard_weight=hard_weight, soft_weight=soft_weight, temperature=temperature, divergence=divergence,
        beta=beta, temperature_squared=squared, label_smoothing=smoothing, hidden_gradient=to_hidden, weight_gradient=to_weight,
        bias_gradient=to_bias, chunk_rows=chunk_rows, bf16=bf16, ignore_index=ignore_index,
        denominator=denominator if reduction == "mean" else 1.0, context=context())
    return (torch.tensor(values.loss, dtype=torch.float32), none(hidden) if to_hidden is None else to_hidden,
            none(weight) if to_weight is None else to_weight if weight.dtype == torch.float32 else empty(weight).copy_(to_weight),
            none(hidden) if to_bias is None else to_bias.to(bias.dtype))


def fake_head(hidden, weight, bias, labels, teacher, teacher_hidden, teacher_weight, teacher_bias, want_hidden, want_weight,
              want_bias, *others):
    return (hidden.new_empty((), dtype=torch.float32), hidden.new_empty(hidden.shape) if want_hidden else none(hidden),
            weight.new_empty(weight.shape) if want_weight else none(weight),
            bias.new_empty(bias.shape) if want_bias else none(hidden))


register(head_op, fake_head, 0, 1, 2)


def head_loss(hidden, weight, bias=None, labels=None, *, teacher=None, teacher_hidden=None, teacher_weight=None,
              teacher_bias=None, hard_weight=0.0, soft_weight=0.0, temperature=1.0, divergence="kl", beta=0.0,
              temperature_squared=None, label_smoothing=0.0, ignore_index=-100, reduction="mean", denominator=0.0, chunk_rows=0,
              bf16=False):
    """`loss` of the logits hidden weight^T + bias, of which only a chunk of rows exists at a time.

    hidden          [..., H]; weight [V, H], as torch.nn.Linear has it; bias [V]
    teacher         its logits; or teacher_hidden [..., H'] and teacher_weight [V, H'] (and teacher_bias)
    reduction       "mean" or "sum"
    chunk_rows      rows at a time, a multiple of 256; 0: 256
    bf16            rounds factors of products to bf16 where that is faster
    """
    if reduction not in ("mean", "sum"):
        raise ValueError("reduction is %r, expected 'mean' or 'sum'" % (reduction,))
    teachers = map(constant, (teacher, teacher_hidden, teacher_weight, teacher_bias))
    return head_op(hidden, weight, bias, labels, *teachers,
                   *wants(hidden, weight, bias), float(hard_weight), float(soft_weight), float(temperature), divergence,
                   float(beta), temperature_squared, float(label_smoothing), ignore_index, float(denominator), reduction,
                   chunk_rows, bf16)[0]


# ---- two tokenizers ----

def run_xtoken(student, teacher, student_chunks, teacher_chunks, exact, mask, labels, teacher_labels, cache_positions, gradient,
               count, projection, cache, kind, sequences, temperature, reverse, columns, tail, relaxed, kd_weight, ce_weight,
               exact_only, ignore_index, denominator):
    from . import text
    chunks = text.Chunks(student_chunks, teacher_chunks, count, exact, mask)
    values = losses.xtoken_loss(
        student, even(teacher, "teacher"), chunks, text.find(projection), dense(labels), kind=kind,
        teacher_labels=dense(teacher_labels), cache=text.find(cache), cache_positions=dense(cache_positions),
        sequences=sequences, temperature=temperature, reverse=reverse, columns=columns, tail=tail, relaxed=relaxed, kd_weight=kd_weight, ce_weight=ce_weight, exact_only=exact_only, ignore_index=ignore_index,
        denominator=denominator, gradient=gradient, context=context())
    return torch.tensor(values.loss, dtype=torch.float32)


@torch.library.custom_op("xdistill::xtoken_loss", mutates_args=())
def xtoken_op(student: Tensor, teacher: Optional[Tensor], student_chunks: Tensor, teacher_chunks: Tensor, exact: Optional[Tensor],
              mask: Optional[Tensor], labels: Optional[Tensor], teacher_labels: Optional[Tensor],
              cache_positions: Optional[Tensor], want: bool, count: int, projection: int, cache: int, kind: str, sequences: int,
              temperature: float, reverse: bool, columns: int, tail: int, relaxed: bool, kd_weight: float, ce_weight: float, exact_only: bool, ignore_index: int, denominator: float) -> Tuple[Tensor, Tensor]:
    student = even(student)
    gradient = empty(student) if want else None
    value = run_xtoken(student, teacher, student_chunks, teacher_chunks, exact, mask, labels, teacher_labels, cache_positions,
                       gradient, count, projection, cache, kind, sequences, temperature, reverse, columns, tail, relaxed,
                       kd_weight, ce_weight, exact_only, ignore_index, denominator)
    return value, none(student) if gradient is None else gradient


def fake_xtoken(student, teacher, student_chunks, teacher_chunks, exact, mask, labels, teacher_labels, cache_positions, want,
                *others):
    return student.new_empty((), dtype=torch.float32), student.new_empty(student.shape) if want else none(student)


register(xtoken_op, fake_xtoken, 0)


def xtoken_loss(student, teacher, chunks, projection=None, labels=None, *, kind="projected", teacher_labels=None,
                cache=None, cache_positions=None, temperature=1.0, reverse=False, columns=8192, tail=8192, relaxed=False, kd_weight=1.0, ce_weight=0.1, exact_only=False,
                ignore_index=-100, denominator=0.0, inplace=False):
    """Distillation from a teacher with another tokenizer, by chunks of tokens that cover the same bytes.

    student         [sequences, tokens, V] or [tokens, V]; teacher [sequences, its tokens, V_t] or [its tokens, V_t]
    chunks          of xdistill.chunks; its .tensors() for torch.compile
    projection      an xdistill.Projection, for kinds "projected" (P-KL) and "gold"; for "cached" of another vocabulary
    labels          the student's next tokens: adds ce_weight times their cross entropy, and kind "likelihood" needs them
    teacher_labels  the teacher's, for kind "likelihood"
    cache           a TeacherCache, for kind "cached": the teacher is None, and cache_positions [its rows] has the position in
                    the cache of each row, or -1
    columns, tail   of "projected" and "gold": how many teacher columns, and sorted probabilities, are compared
    relaxed         "gold": H-KL

    loss = kd_weight KD + ce_weight CE: docs/xtoken.md.
    """
    sequences = student.shape[0] if student.dim() == 3 else 1
    chunks = chunks.tensors()
    inputs = (constant(teacher), chunks.student, chunks.teacher, chunks.exact, chunks.mask, labels, teacher_labels,
              cache_positions)
    settings = (chunks.count, projection.number if projection is not None else 0, cache.number if cache is not None else 0, kind,
                sequences, float(temperature), reverse, columns, tail, relaxed, float(kd_weight), float(ce_weight), exact_only, ignore_index, float(denominator))
    if in_place(student, inplace) and even(student) is student:
        return InPlace.apply(student, lambda own: run_xtoken(own, *inputs, own, *settings))
    return xtoken_op(student, *inputs, wants(student)[0], *settings)[0]


@torch.library.custom_op("xdistill::uld_loss", mutates_args=())
def uld_op(student: Tensor, teacher: Tensor, pieces: Tensor, student_ids: Tensor, teacher_ids: Tensor, want: bool,
           temperature: float) -> Tuple[Tensor, Tensor]:
    student, teacher, pieces = student.contiguous(), teacher.contiguous(), pieces.contiguous().view(student.shape[0], -1)
    gradient, loss = empty(student) if want else None, 0.0
    for row in range(student.shape[0]):
        values = losses.uld_loss(student[row], teacher[row], pieces[row], student_ids[row].contiguous(), teacher_ids[row].contiguous(),
                                 temperature=temperature, scale=1.0 / student.shape[0],
                                 gradient=None if gradient is None else gradient[row], context=context())
        loss += values.loss
    return torch.tensor(loss, dtype=torch.float32), none(student) if gradient is None else gradient


def fake_uld(student, teacher, pieces, student_ids, teacher_ids, want, temperature):
    return student.new_empty((), dtype=torch.float32), student.new_empty(student.shape) if want else none(student)


register(uld_op, fake_uld, 0)


def uld_loss(student, teacher, chunks, student_ids, teacher_ids, *, temperature=1.0):
    """Universal logit distillation: sorted probabilities of chunks, without a projection (Boizard et al., 2024).

    student, teacher          [sequences, tokens, columns], or [tokens, columns] of one sequence
    chunks                    of xdistill.chunks
    student_ids, teacher_ids  [sequences, tokens] int64, any id of the vocabulary at padding

    The mean over sequences of the mean over chunks of sum |p - q|. A chunk's probabilities are those of its last token times
    the probabilities of the tokens before it: docs/xtoken.md.
    """
    if student.dim() == 2:
        student, teacher, student_ids, teacher_ids = student[None], teacher[None], student_ids[None], teacher_ids[None]
    return uld_op(student, constant(teacher), chunks.tensors().pieces, student_ids, teacher_ids, wants(student)[0],
                  float(temperature))[0]


def next_labels(ids, ignore_index=-100):
    """The label of each position of ids [..., tokens]: the next token; the last one has none. Logits need no shift then."""
    return torch.nn.functional.pad(ids[..., 1:], (0, 1), value=ignore_index)


# ---- diffusion ----

@torch.library.custom_op("xdistill::vsd_loss", mutates_args=())
def vsd_op(generated: Tensor, teacher: Tensor, fake: Tensor, mask: Optional[Tensor], sample_scale: Optional[Tensor], want: bool,
           normaliser: str, compat: bool, weight: float, denominator: float) -> Tuple[Tensor, Tensor]:
    gradient = empty(generated) if want else None
    values = losses.vsd_loss(
        generated.contiguous(), teacher.contiguous(), fake.contiguous(), normaliser=normaliser, compat=compat, mask=dense(mask),
        sample_scale=dense(sample_scale), gradient=gradient, weight=weight, denominator=denominator, context=context())
    return torch.tensor(values.loss, dtype=torch.float32), none(generated) if gradient is None else gradient


@torch.library.custom_op("xdistill::denoise_loss", mutates_args=())
def denoise_op(prediction: Tensor, clean: Tensor, noise: Tensor, terms: Tensor, mask: Optional[Tensor], want: bool,
               weight: float, denominator: float) -> Tuple[Tensor, Tensor]:
    gradient = empty(prediction) if want else None
    values = losses.denoise_loss(
        prediction.contiguous(), clean.contiguous(), noise.contiguous(), terms.double().contiguous(), mask=dense(mask),
        gradient=gradient, weight=weight, denominator=denominator, context=context())
    return torch.tensor(values.loss, dtype=torch.float32), none(prediction) if gradient is None else gradient


@torch.library.custom_op("xdistill::gan_loss", mutates_args=())
def gan_op(fake: Tensor, real: Optional[Tensor], want_fake: bool, want_real: bool, kind: str, weight: float,
           denominator: float) -> Tuple[Tensor, Tensor, Tensor]:
    to_fake = empty(fake) if want_fake else None
    to_real = empty(real) if want_real else None
    values = losses.gan_loss(fake.contiguous(), dense(real), kind=kind, fake_gradient=to_fake, real_gradient=to_real,
                             weight=weight, denominator=denominator, context=context())
    return (torch.tensor(values.loss, dtype=torch.float32), none(fake) if to_fake is None else to_fake,
            none(fake) if to_real is None else to_real)


def fake_vsd(generated, teacher, fake, mask, sample_scale, want, *others):
    return generated.new_empty((), dtype=torch.float32), generated.new_empty(generated.shape) if want else none(generated)


def fake_denoise(prediction, clean, noise, terms, mask, want, *others):
    return prediction.new_empty((), dtype=torch.float32), prediction.new_empty(prediction.shape) if want else none(prediction)


def fake_gan(fake, real, want_fake, want_real, *others):
    return (fake.new_empty((), dtype=torch.float32), fake.new_empty(fake.shape) if want_fake else none(fake),
            real.new_empty(real.shape) if want_real else none(fake))


register(vsd_op, fake_vsd, 0)
register(denoise_op, fake_denoise, 0)
register(gan_op, fake_gan, 0, 1)


def vsd_loss(generated, teacher, fake, *, normaliser="mean", compat=False, mask=None, sample_scale=None, weight=1.0,
             denominator=0.0):
    """The student's term of distribution matching distillation: docs/diffusion.md.

    generated, teacher, fake  [samples, ...] f32, bf16 or f16: what the student made, and both models' clean estimates of it
    normaliser                "mean", "original" (DMD2) or "none"
    mask                      generated's shape, bytes or booleans; sample_scale [samples] f64
    """
    return vsd_op(generated, constant(teacher), constant(fake), mask, sample_scale, wants(generated)[0], normaliser, compat, float(weight),
                  float(denominator))[0]


def denoise_loss(prediction, clean, noise, terms, *, mask=None, weight=1.0, denominator=0.0):
    """Mean of w (c_p prediction + c_x clean + c_e noise)^2, with terms [samples, 4] of c_p, c_x, c_e and w."""
    return denoise_op(prediction, constant(clean), constant(noise), constant(terms), mask, wants(prediction)[0], float(weight), float(denominator))[0]


def gan_loss(fake, real=None, *, kind="softplus", weight=1.0, denominator=0.0):
    """The generator's adversarial term of logits [samples, heads]; with `real`, the discriminator's. kind: "softplus", "hinge"."""
    return gan_op(fake, real, *wants(fake, real), kind, float(weight), float(denominator))[0]
