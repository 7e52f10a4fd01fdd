"""Losses of arrays: values, and gradients that are written to arrays of the caller. xdistill.torch builds on them.

Every function takes arrays as xdistill.array does, of f32 or bf16 where logits are meant, and raises Error for data errors:
a label outside the vocabulary, logits that are not finite. `context` None is this thread's context.
"""

import ctypes

from . import _api as api
from ._arrays import array, flat, holding, product, rows
from ._library import context as current, lib

IDS = (api.XD_DTYPE_I64, api.XD_DTYPE_I32)
BYTES = (api.XD_DTYPE_U8, api.XD_DTYPE_BOOL)
FLOATS = (api.XD_DTYPE_F32,)
DOUBLES = (api.XD_DTYPE_F64,)
DIVERGENCES = {"kl": api.XD_KL_FORWARD, "reverse_kl": api.XD_KL_REVERSE, "jsd": api.XD_JSD, "soft_ce": api.XD_SOFT_CE,
               "mixed": api.XD_KL_MIXED, "cosine": api.XD_COSINE}
FACTORS = {None: api.XD_TEMPERATURE_FACTOR_DEFAULT, True: api.XD_TEMPERATURE_FACTOR_SQUARED,
           False: api.XD_TEMPERATURE_FACTOR_ONE}
TOPK_MODES = {"tail": api.XD_TOPK_TAIL, "renormalise": api.XD_TOPK_RENORMALISE, "truncate": api.XD_TOPK_TRUNCATE,
              "zero_outside": api.XD_TOPK_ZERO_OUTSIDE}
NORMALISERS = {"mean": api.XD_VSD_MEAN, "original": api.XD_VSD_ORIGINAL, "none": api.XD_VSD_NONE}
XTOKEN_KINDS = {"projected": api.XD_XTOKEN_PROJECTED, "gold": api.XD_XTOKEN_GOLD, "cached": api.XD_XTOKEN_CACHED,
                "likelihood": api.XD_XTOKEN_LIKELIHOOD}
GAN_KINDS = {"softplus": api.XD_GAN_SOFTPLUS, "hinge": api.XD_GAN_HINGE}


def choice(table, name, what):
    if name not in table:
        raise ValueError("%s is %r, expected one of %s" % (what, name, ", ".join(map(repr, table))))
    return table[name]


def pointer(x, name, count, kind, dtypes):
    """A pointer to the elements of a dense array, NULL of None."""
    return ctypes.cast(flat(x, name, count, *dtypes)[0], ctypes.POINTER(kind))


def common(count, labels=None, mask=None, row_weight=None, ignore_index=-100, denominator=0.0, scale=1.0, gradient=None,
           row_loss=None):
    """xd_loss_common over `count` rows.

    labels        [rows] int64 or int32; rows of ignore_index do not count
    mask          [rows] bytes or booleans; 0: does not count
    row_weight    [rows] f32
    denominator   what the sum is divided by; 0: the number of counted rows
    scale         of loss and gradient
    gradient      written: d loss / d student; may be the student itself
    row_loss      [rows] f32, written
    """
    made = api.xd_loss_common(has_ignore_index=True, ignore_index=ignore_index, denominator_value=denominator)
    made.labels = api.xd_ids(*flat(labels, "labels", count, *IDS))
    made.mask = pointer(mask, "mask", count, ctypes.c_uint8, BYTES)
    made.row_weight = pointer(row_weight, "row_weight", count, ctypes.c_float, FLOATS)
    made.row_loss = pointer(row_loss, "row_loss", count, ctypes.c_float, FLOATS)
    if scale != 1:
        made.scale = ctypes.pointer(ctypes.c_double(scale))
    if gradient is not None:
        made.gradient = rows(gradient, "gradient")
    return made


def fill(desc, divergence, temperature, temperature_squared, beta):
    desc.divergence = choice(DIVERGENCES, divergence, "divergence")
    desc.temperature_factor = choice(FACTORS, temperature_squared, "temperature_squared")
    desc.temperature, desc.beta = temperature, beta


def width(x, vocabulary):
    return vocabulary or x.shape[-1]


@holding
def loss(student, teacher=None, labels=None, *, hard_weight=0.0, soft_weight=0.0, temperature=1.0, divergence="kl", beta=0.0,
         temperature_squared=None, label_smoothing=0.0, vocabulary=None, context=None, **others):
    """hard_weight times the cross entropy with labels, plus soft_weight times a divergence from the teacher: xd_loss.

    student, teacher  [..., columns]
    divergence        "kl", "reverse_kl", "jsd", "soft_ce" or "cosine"
    vocabulary        columns in use; further ones are padding. None: all
    others            those of `common`

    Returns an xd_loss_values: loss, hard, soft, counted.
    """
    student, teacher = array(student, "student"), None if teacher is None else array(teacher, "teacher")
    ctx, desc = context or current(), api.xd_loss_desc(hard_weight=hard_weight, soft_weight=soft_weight)
    desc.student, desc.teacher = rows(student, "student"), rows(teacher, "teacher")
    desc.vocab, desc.label_smoothing = ctx.vocabulary(width(student, vocabulary)), label_smoothing
    fill(desc, divergence, temperature, temperature_squared, beta)
    desc.common = common(desc.student.rows, labels, **others)
    return ctx.compute("xd_loss", desc, desc.common, api.xd_loss_values())


@holding
def topk_kl_loss(student, teacher=None, labels=None, *, k=None, ids=None, log_probs=None, mode="tail", divergence="kl", beta=0.0,
                 temperature=1.0, temperature_squared=None, vocabulary=None, context=None, **others):
    """A divergence at k columns of a row: xd_topk_kl_loss.

    teacher    [..., columns] logits, or ids and log_probs
    k          columns of a row; None: as many as ids has
    ids        [..., k] int64 or int32; None: the student's k largest
    log_probs  [..., k] f32, the teacher's at this temperature
    mode       of the mass outside: "tail", "renormalise", "truncate" or "zero_outside"
    """
    student, teacher = array(student, "student"), None if teacher is None else array(teacher, "teacher")
    ids = None if ids is None else array(ids, "ids")
    ctx, desc = context or current(), api.xd_topk_desc(student=rows(student, "student"), teacher=rows(teacher, "teacher"))
    if k is None and ids is None:
        raise ValueError("k or ids is needed")
    desc.k, desc.mode = k or ids.shape[-1], choice(TOPK_MODES, mode, "mode")
    desc.vocab = ctx.vocabulary(width(student, vocabulary))
    fill(desc, divergence, temperature, temperature_squared, beta)
    desc.ids = api.xd_ids(*flat(ids, "ids", desc.student.rows * desc.k, *IDS))
    desc.values = pointer(log_probs, "log_probs", desc.student.rows * desc.k, ctypes.c_float, FLOATS)
    desc.values_temperature = temperature
    desc.common = common(desc.student.rows, labels, **others)
    return ctx.compute("xd_topk_kl_loss", desc, desc.common, api.xd_loss_values())


def head(hidden, weight, bias, name):
    made = api.xd_head(hidden=rows(hidden, name), weight=rows(weight, name + "'s weight"))
    made.bias = pointer(bias, name + "'s bias", made.weight.rows, ctypes.c_float, FLOATS)
    return made


@holding
def head_loss(hidden, weight, bias=None, labels=None, *, teacher=None, teacher_hidden=None, teacher_weight=None,
              teacher_bias=None, hard_weight=0.0, soft_weight=0.0, temperature=1.0, divergence="kl", beta=0.0,
              temperature_squared=None, label_smoothing=0.0, hidden_gradient=None, weight_gradient=None, bias_gradient=None,
              chunk_rows=0, bf16=False, context=None, **others):
    """`loss` of the logits hidden weight^T + bias, which exist for a chunk of rows at a time: xd_head_loss.

    hidden           [..., H]; weight [V, H]; bias [V] f32
    teacher          logits [..., V], or teacher_hidden and teacher_weight, of another H
    hidden_gradient  written; weight_gradient [V, H] and bias_gradient [V], f32: added to
    bf16             rounds factors to bf16 where that is faster
    """
    arrays = [None if x is None else array(x, name) for x, name in (
        (hidden, "hidden"), (weight, "weight"), (teacher, "teacher"), (teacher_hidden, "teacher_hidden"),
        (teacher_weight, "teacher_weight"), (hidden_gradient, "hidden_gradient"))]
    ctx, desc = context or current(), api.xd_head_loss_desc(chunk_rows=chunk_rows, bf16=bf16)
    desc.student = head(arrays[0], arrays[1], bias, "hidden")
    desc.loss.teacher = rows(arrays[2], "teacher")
    if teacher_hidden is not None:
        desc.teacher = head(arrays[3], arrays[4], teacher_bias, "teacher_hidden")
    desc.loss.hard_weight, desc.loss.soft_weight, desc.loss.label_smoothing = hard_weight, soft_weight, label_smoothing
    desc.loss.vocab = ctx.vocabulary(desc.student.weight.rows)
    fill(desc.loss, divergence, temperature, temperature_squared, beta)
    desc.loss.common = common(desc.student.hidden.rows, labels, **others)
    desc.hidden_gradient = rows(arrays[5], "hidden_gradient")
    size = desc.student.weight.rows
    desc.weight_gradient = pointer(weight_gradient, "weight_gradient", size * desc.student.weight.cols, ctypes.c_float, FLOATS)
    desc.bias_gradient = pointer(bias_gradient, "bias_gradient", size, ctypes.c_float, FLOATS)
    return ctx.compute("xd_head_loss", desc, desc.loss.common, api.xd_loss_values(), desc)


@holding
def xtoken_loss(student, teacher, chunks, projection=None, labels=None, *, kind="projected", teacher_labels=None, cache=None,
                cache_positions=None, sequences=1, temperature=1.0, reverse=False, columns=8192, tail=8192, relaxed=False,
                kd_weight=1.0, ce_weight=0.1, exact_only=False, context=None, **others):
    """Distance of chunks of tokens that cover the same bytes, for two tokenizers: xd_xtoken_loss.

    student, teacher  logits [..., columns] of `sequences` sequences
    chunks            a Chunks
    kind              "projected" (P-KL, needs the Projection), "gold" (as well), "likelihood" (needs labels and teacher_labels)
                      or "cached" (needs a TeacherCache in place of the teacher)
    cache_positions   [teacher rows] int64: the position in the cache of each row, or -1
    columns, tail     of "projected" and "gold": how many teacher columns, and sorted probabilities, are compared
    relaxed           "gold": H-KL

    Returns an xd_xtoken_values: loss, kd, ce, and counts.
    """
    student, teacher = array(student, "student"), None if teacher is None else array(teacher, "teacher")
    ctx, desc = context or current(), lib.xd_xtoken_defaults()
    one = lib.xd_xtoken_teacher_defaults(choice(XTOKEN_KINDS, kind, "kind"))
    desc.student, one.logits = rows(student, "student"), rows(teacher, "teacher")
    if cache is not None:
        positions = array(cache_positions, "cache_positions")
        one.logits.rows, one.vocabulary, one.cached.cache = positions.size, cache.about.desc.vocabulary, cache.handle
        one.cached.positions = pointer(positions, "cache_positions", one.logits.rows, ctypes.c_int64, IDS[:1])
    here, there = desc.student.rows, one.logits.rows
    one.student_chunks = pointer(chunks.student, "student chunks", here, ctypes.c_int64, IDS[:1])
    one.teacher_chunks = pointer(chunks.teacher, "teacher chunks", there, ctypes.c_int64, IDS[:1])
    one.chunks = chunks.count
    if chunks.exact is not None:
        one.chunk_exact = pointer(chunks.exact, "exact", chunks.count * sequences, ctypes.c_uint8, BYTES)
    if chunks.mask is not None:
        one.chunk_mask = pointer(chunks.mask, "chunk mask", chunks.count * sequences, ctypes.c_uint8, BYTES)
    one.labels = api.xd_ids(*flat(teacher_labels, "teacher_labels", there, *IDS))
    if projection is not None and kind == "gold":
        one.gold.map = ctypes.pointer(projection.exact_map(relaxed))
    elif projection is not None:
        one.projected.projection = one.cached.projection = ctypes.pointer(projection.matrix)
    desc.vocab = ctx.vocabulary(projection.student_size if projection is not None else student.shape[-1])
    desc.sequences, desc.columns, desc.tail, desc.reverse, desc.exact_only = sequences, columns, tail, reverse, exact_only
    desc.temperature, desc.kd_weight, desc.ce_weight = temperature, kd_weight, ce_weight if labels is not None else 0.0
    desc.common = common(here, labels, **others)
    desc.teachers, desc.teacher_count = ctypes.pointer(one), 1
    return ctx.compute("xd_xtoken_loss", desc, desc.common, api.xd_xtoken_values())



@holding
def uld_loss(student, teacher, pieces, student_ids, teacher_ids, *, temperature=1.0, scale=1.0, gradient=None, context=None):
    """Universal logit distillation of one sequence, by sorted probabilities and without a projection: xd_uld_loss.

    student, teacher          logits [tokens, columns]
    pieces                    [chunks, 5] int32, as Chunks has them
    student_ids, teacher_ids  [tokens] int64
    """
    student, teacher, pieces = array(student, "student"), array(teacher, "teacher"), array(pieces, "pieces")
    ctx, desc, out = context or current(), api.xd_uld_desc(scale=scale), api.xd_uld_values()
    for side, name, logits, ids in ((desc.student, "student", student, student_ids), (desc.teacher, "teacher", teacher, teacher_ids)):
        side.logits, side.vocabulary, side.temperature = rows(logits, name), logits.shape[-1], temperature
        side.ids = pointer(ids, name + "_ids", side.logits.rows, ctypes.c_int64, IDS[:1])
    desc.chunk_count = pieces.size // 5
    desc.chunks = pointer(pieces, "pieces", 5 * desc.chunk_count, api.xd_aligned_chunk, (api.XD_DTYPE_I32,))
    if gradient is not None:
        desc.gradient = rows(gradient, "gradient")
    ctx.call("xd_uld_loss", ctypes.byref(desc), ctypes.byref(out))
    return out


# ---- diffusion ----

def sample_common(made, weight, denominator, scale, sample_loss, samples):
    made.weight, made.denominator_value = weight, denominator
    if scale != 1:
        made.scale = ctypes.pointer(ctypes.c_double(scale))
    made.sample_loss = pointer(sample_loss, "sample_loss", samples, ctypes.c_double, DOUBLES)


def samples(x, name):
    """xd_rows [samples, elements] of an array [samples, ...]."""
    x = array(x, name)
    if not x.is_dense or not x.shape:
        raise ValueError("%s is strided or has no dimensions: copy it first" % name)
    return api.xd_rows(data=x.address, dtype=x.dtype, rows=x.shape[0], cols=product(x.shape[1:]))


@holding
def vsd_loss(generated, teacher, fake, *, normaliser="mean", compat=False, mask=None, sample_scale=None, gradient=None,
             weight=1.0, denominator=0.0, scale=1.0, sample_loss=None, context=None):
    """The student's term of distribution matching distillation: xd_vsd_loss. docs/diffusion.md has its formula.

    generated, teacher, fake  [samples, ...] f32, bf16 or f16: what the student made, and both models' clean estimates of it
    normaliser                "mean", "original" (DMD2) or "none"
    mask                      generated's shape, bytes; sample_scale [samples] f64
    gradient                  written: d loss / d generated

    Returns an xd_sample_values: loss, denominator, counted.
    """
    generated, teacher, fake = array(generated, "generated"), array(teacher, "teacher"), array(fake, "fake")
    ctx, desc = context or current(), lib.xd_vsd_defaults()
    desc.generated, desc.teacher, desc.fake = samples(generated, "generated"), samples(teacher, "teacher"), samples(fake, "fake")
    count = desc.generated.rows
    desc.normaliser, desc.form = choice(NORMALISERS, normaliser, "normaliser"), api.XD_VSD_COMPAT if compat else 0
    desc.mask = pointer(mask, "mask", count * desc.generated.cols, ctypes.c_uint8, BYTES)
    desc.sample_scale = pointer(sample_scale, "sample_scale", count, ctypes.c_double, DOUBLES)
    if gradient is not None:
        desc.gradient = samples(gradient, "gradient")
    sample_common(desc.common, weight, denominator, scale, sample_loss, count)
    return ctx.compute("xd_vsd_loss", desc, desc.common, api.xd_sample_values())


@holding
def denoise_loss(prediction, clean, noise, terms, *, mask=None, gradient=None, weight=1.0, denominator=0.0, scale=1.0,
                 sample_loss=None, context=None):
    """The denoising term: mean of w (c_p prediction + c_x clean + c_e noise)^2: xd_denoise_loss.

    prediction, clean, noise  [samples, ...] f32, bf16 or f16
    terms                     [samples, 4] f64: c_p, c_x, c_e and w of each sample
    gradient                  written: d loss / d prediction
    """
    prediction, clean, noise = array(prediction, "prediction"), array(clean, "clean"), array(noise, "noise")
    ctx, desc = context or current(), lib.xd_denoise_defaults()
    desc.prediction, desc.clean = samples(prediction, "prediction"), samples(clean, "clean")
    desc.noise, count = samples(noise, "noise"), desc.prediction.rows
    desc.mask = pointer(mask, "mask", count * desc.prediction.cols, ctypes.c_uint8, BYTES)
    desc.terms = ctypes.cast(flat(terms, "terms", 4 * count, *DOUBLES)[0], ctypes.POINTER(api.xd_denoise_term))
    if gradient is not None:
        desc.gradient = samples(gradient, "gradient")
    sample_common(desc.common, weight, denominator, scale, sample_loss, count)
    return ctx.compute("xd_denoise_loss", desc, desc.common, api.xd_sample_values())


@holding
def gan_loss(fake, real=None, *, kind="softplus", fake_gradient=None, real_gradient=None, weight=1.0, denominator=0.0, scale=1.0,
             sample_loss=None, context=None):
    """The adversarial term of a discriminator's logits: the generator's without `real`, else the discriminator's: xd_gan_loss.

    fake, real  [samples, heads]
    kind        "softplus" or "hinge"
    """
    fake, real = array(fake, "fake"), None if real is None else array(real, "real")
    ctx, desc = context or current(), lib.xd_gan_defaults()
    desc.role = api.XD_GAN_GENERATOR if real is None else api.XD_GAN_DISCRIMINATOR
    desc.kind, desc.fake = choice(GAN_KINDS, kind, "kind"), samples(fake, "fake")
    if real is not None:
        desc.real = samples(real, "real")
    if fake_gradient is not None:
        desc.fake_gradient = samples(fake_gradient, "fake_gradient")
    if real_gradient is not None:
        desc.real_gradient = samples(real_gradient, "real_gradient")
    sample_common(desc.common, weight, denominator, scale, sample_loss, desc.fake.rows)
    return ctx.compute("xd_gan_loss", desc, desc.common, api.xd_sample_values())
