"""Losses of arrays: values, and gradients that are written to arrays of the caller. xdistill.torch makes its losses of these.

Every function takes arrays as xdistill.array does, of f32 or bf16 where logits are meant, and raises Error for data errors:
a label outside the vocabulary, logits that are not finite. If no row counts, the loss is 0. Arrays on a GPU are computed there,
and so are their labels, masks and weights; those of xtoken_loss and uld_loss stay on the CPU. Arguments that several have:

    labels        [rows] int64 or int32, the token that a row predicts; rows of ignore_index do not count, in divergences too
    mask          [rows] bytes or booleans; 0: does not count
    row_weight    [rows] f32
    reduction     "mean" over counted rows, "sum", or "none" with row_loss
    denominator   what a mean's sum is divided by; 0: the number of counted rows
    vocabulary    columns in use; further ones are padding. None: all
    gradient      written: d loss / d the first array, and may be that array
    row_loss      [rows] f32, written; sample_loss [samples] f64, written
    scale         of loss and gradient
    context       None: this thread's, for the device of the first array
"""

import ctypes
import inspect

from . import _api as api
from ._arrays import Array, array, flat, product, rows
from ._library import context as current, lib
from .text import Chunks, Projection, TeacherCache, expect

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

# What the elements of a list are for the header, and the types that fit.
IDS = None, (api.XD_DTYPE_I64, api.XD_DTYPE_I32)  # an xd_ids, which says the type
LONGS = ctypes.c_int64, (api.XD_DTYPE_I64,)
BYTES = ctypes.c_uint8, (api.XD_DTYPE_U8, api.XD_DTYPE_BOOL)
FLOATS = ctypes.c_float, (api.XD_DTYPE_F32,)
DOUBLES = ctypes.c_double, (api.XD_DTYPE_F64,)
TERMS = api.xd_denoise_term, (api.XD_DTYPE_F64,)
CHUNKS = api.xd_aligned_chunk, (api.XD_DTYPE_I32,)
NEEDED = inspect.Parameter.empty
COMMON = api.xd_loss_common(has_ignore_index=True)


def student_rows(desc):
    return desc.student.rows


# ---- arguments: how a value gets into the desc ----

def field(desc, path):
    """The struct that has the last field of a path, and that field's name."""
    *outer, last = path.split(".")
    for name in outer:
        desc = getattr(desc, name)
        desc = getattr(desc, "contents", desc)
    return desc, last


class Setting:
    """A number for a field; without a path it is for `settle` of the loss."""

    is_array, late, host, own, hidden, of, like = False, False, False, False, False, None, None

    def __init__(self, path, default=NEEDED, schema=None):
        self.path, self.default = path, default
        self.schema = schema or {bool: "bool", int: "SymInt", float: "float", str: "str"}[type(default)]

    def put(self, desc, value, name):
        if name == "temperature" and not value > 0:  # the header takes 0 for 1
            raise ValueError("temperature is %g, expected more than 0" % value)
        if self.path and value is not None:
            setattr(*field(desc, self.path), value)


class Choice(Setting):
    """One of the names of a table."""

    def __init__(self, path, default, table, schema="str"):
        super().__init__(path, default, schema)
        self.table = table

    def put(self, desc, value, name):
        if value not in self.table:
            words = list(map(repr, self.table))
            raise ValueError("%s is %r, expected %s" % (
                name, value, " or ".join(words) if len(words) == 2 else "one of " + ", ".join(words)))
        super().put(desc, self.table[value], name)


class Object(Setting):
    """A Numbered of xdistill.text; PyTorch's operations have its number."""

    def __init__(self, kind):
        super().__init__(None, None, "int")
        self.kind = kind

    def put(self, desc, value, name):
        if value is not None:
            expect(value, self.kind, name)


class Rows(Setting):
    """xd_rows of an array [..., columns]. of: it is written, the gradient by the argument of this name. like: it has the leading
    dimensions of this argument, all but the last `apart`."""

    is_array, apart = True, 1

    def __init__(self, path, default=NEEDED, of=None, schema=None, like=None, apart=None):
        super().__init__(path, default, schema or ("Tensor" if default is NEEDED else "Tensor?"))
        self.of, self.own = of, of is not None  # own: it is written, and functions of PyTorch do not have it
        self.like, self.apart = like or of, self.apart if apart is None else apart

    def leading(self, x):
        return [size for size in x.shape[:max(len(x.shape) - self.apart, 0)] if size != 1]

    def put(self, desc, x, name):
        if x is not None:
            setattr(*field(desc, self.path), self.convert(desc, x, name))

    def convert(self, desc, x, name):
        return rows(x, name)


class Samples(Rows):
    """xd_rows [samples, elements] of an array [samples, ...]."""

    apart = 0

    def convert(self, desc, x, name):
        if not x.is_dense or not x.shape:
            raise ValueError("%s is strided or has no dimensions: copy it first" % name)
        return api.xd_rows(data=x.address, dtype=x.dtype, rows=x.shape[0], cols=product(x.shape[1:]))


class Elements(Rows):
    """A list of count(desc) elements. host: on the CPU, even with a GPU; hidden: `expand` makes it of another argument."""

    late = True  # behind `settle`: its size depends on the others

    def __init__(self, path, kind, count, default=None, of=None, own=False, host=False, hidden=False):
        super().__init__(path, default, of)
        self.kind, self.count, self.host, self.hidden, self.own = kind, count, host, hidden, own or of is not None

    def convert(self, desc, x, name):
        pointer, dtypes = self.kind
        address, dtype = flat(x, name.replace("_", " ") if self.hidden else name, self.count(desc), *dtypes)
        return ctypes.cast(address, ctypes.POINTER(pointer)) if pointer else api.xd_ids(address, dtype)


def of_rows(path, count, reductions, host=False):
    """Arguments for the xd_loss_common at a path."""
    made = {"ignore_index": Setting(path + ".ignore_index", -100), "denominator": Setting(path + ".denominator_value", 0.0),
            "mask": Elements(path + ".mask", BYTES, count, host=host),
            "row_weight": Elements(path + ".row_weight", FLOATS, count, host=host)}
    if reductions:
        made["reduction"] = Choice(path + ".denominator_value", "mean", {"mean": None, **dict.fromkeys(reductions, 1.0)})
        made["row_loss"] = Elements(path + ".row_loss", FLOATS, count, own=True)
    return made


def of_samples(count):
    """Arguments for an xd_sample_common."""
    return {"weight": Setting("common.weight", 1.0), "denominator": Setting("common.denominator_value", 0.0),
            "sample_loss": Elements("common.sample_loss", DOUBLES, count, own=True)}


def of_divergence(path=""):
    return {"temperature": Setting(path + "temperature", 1.0), "divergence": Choice(path + "divergence", "kl", DIVERGENCES),
            "beta": Setting(path + "beta", 0.0),
            "temperature_squared": Choice(path + "temperature_factor", None, FACTORS, "bool?")}


def of_both(path=""):
    """Arguments of cross entropy beside a divergence."""
    return {"hard_weight": Setting(path + "hard_weight", 0.0), "soft_weight": Setting(path + "soft_weight", 0.0),
            **of_divergence(path), "label_smoothing": Setting(path + "label_smoothing", 0.0)}


# ---- losses ----

def where(device):
    return "the CPU" if device is None else "GPU %d" % device


class Loss:
    """One loss of the header as a table.

    name       its function; values: the struct of its results
    desc       makes the desc of the arguments
    first      names of the arguments that may be given without them
    arguments  by name, the student first
    settle     finishes the desc when rows and numbers are in it: settle(context, desc, arguments)
    expand     replaces objects among the arguments by arrays and numbers
    common     path of what has status and scale; None: the desc, of a function of one sequence
    workspace  path of the workspace
    host       results are on the CPU even with a GPU
    in_place   PyTorch's function may write the gradient over the student
    """

    def __init__(self, name, values, desc, first, arguments, settle=None, expand=dict, common="common",
                 workspace="common.workspace", host=False, in_place=False):
        self.name, self.values, self.desc, self.first, self.arguments = name, values, desc, first.split(), arguments
        self.settle, self.expand, self.common, self.workspace, self.host = settle, expand, common, workspace, host
        self.in_place, self.gradients = in_place, {one.of: name for name, one in arguments.items() if one.of}

    def function(self, name, doc, call, names, **more):
        """A function of the arguments of these names, and more with defaults, which calls call(arguments by name)."""
        names = self.first + [one for one in names if one not in self.first]
        shown = ["%s=%r" % (one, self.arguments[one].default) if self.arguments[one].default is not NEEDED else one for one in names]
        shown[len(self.first):] = ["*", *shown[len(self.first):], *("%s=%r" % one for one in more.items())]
        space = {"call": call, "__name__": call.__module__}
        exec("def %s(%s):\n    return call(dict(%s))" % (
            name, ", ".join(shown), ", ".join("%s=%s" % (one, one) for one in [*names, *more])), space)
        space[name].__doc__, space[name].table = doc, self
        return space[name]

    def compute(self, given, context=None, threads=None, scale=1.0):
        """The values. `given` has arguments by name, after `expand`."""
        given = {name: array(given[name], name, not one.host, one.own) if one.is_array and given[name] is not None else given[name]
                 for name, one in self.arguments.items() if name in given}
        student, first = next(iter(given.items()))
        context = context or current(threads, first.device)
        devices = {name: x.device for name, x in given.items() if isinstance(x, Array) and not self.arguments[name].host}
        for name, device in {**devices, "the context": context.device}.items():
            if device != first.device:
                raise ValueError("%s is on %s, but %s on %s" % (name, where(device), student, where(first.device)))
        for name, x in given.items():
            one, like = self.arguments[name], given.get(self.arguments[name].like)
            if isinstance(x, Array) and like and not one.late and one.leading(x) != one.leading(like):
                raise ValueError("%s is %s, but %s %s: their leading dimensions differ" % (name, list(x.shape), one.like, list(like.shape)))
        if context.gpu:
            lib.xd_ctx_set_stream(context.handle, first.stream)
        if self.common is None and len(first.shape) == 3:
            return self.add(given, context, scale, first.shape[0])
        desc = self.desc(given)
        for late in (False, True):
            for name, x in given.items():
                if self.arguments[name].late == late:
                    self.arguments[name].put(desc, x, name)
            if self.settle and not late:
                self.settle(context, desc, given)
        if self.common is None:
            out, desc.scale = self.values(), scale
            context.call(self.name, ctypes.byref(desc), ctypes.byref(out))
            return out
        return context.compute(self.name, desc, field(desc, self.common + ".status")[0], self.values(),
                               field(desc, self.workspace)[0], scale, self.host)

    def add(self, given, context, scale, count):
        """The mean over sequences, of a function of one."""
        parts, total = [x.split(count) if isinstance(x, Array) else [x] * count for x in given.values()], self.values()
        for one in zip(*parts):
            values = self.compute(dict(zip(given, one)), context, None, scale / count)
            for name, _ in total._fields_:
                setattr(total, name, getattr(total, name) + getattr(values, name))
        return total


def define(name, doc, *about, **more):
    """The function of a Loss, for arrays."""
    table = Loss("xd_" + name, *about, **more)

    def call(given):
        context, scale = given.pop("context"), given.pop("scale")
        return table.compute(table.expand(given), context, None, scale)

    return table.function(name, doc, call, [name for name, one in table.arguments.items() if not one.hidden], scale=1.0, context=None)


def settle_loss(context, desc, given):
    desc.vocab = context.vocabulary(given["vocabulary"] or desc.student.cols)


loss = define("loss", """hard_weight times the cross entropy with labels, plus soft_weight times a divergence from the teacher, in one pass.

    student, teacher     [..., columns]
    divergence           "kl" (teacher || student), "reverse_kl", "jsd", "soft_ce" or "cosine"
    beta                 of "jsd": the teacher's share
    temperature_squared  whether tau^2 multiplies the divergence; None: for "kl" and "reverse_kl"

    Other arguments: help(xdistill.losses). Of arrays it returns an xd_loss_values: loss, hard, soft, counted.
    """, api.xd_loss_values, lambda given: api.xd_loss_desc(common=COMMON), "student teacher labels", {
        "student": Rows("student"), "teacher": Rows("teacher", None, like="student"),
        "labels": Elements("common.labels", IDS, student_rows), **of_both(), **of_rows("common", student_rows, ("sum", "none")),
        "vocabulary": Setting(None, None, "SymInt?"), "gradient": Rows("common.gradient", None, of="student")}, settle_loss, in_place=True)


def settle_topk(context, desc, given):
    if given["k"] is None and given["ids"] is None:
        raise ValueError("k or ids is needed")
    desc.k, desc.values_temperature = given["k"] or given["ids"].shape[-1], given["temperature"]
    settle_loss(context, desc, given)


topk_kl_loss = define("topk_kl_loss", """A divergence at k columns of a row: those of `ids`, or the student's k largest.

    student    [..., columns]
    teacher    [..., columns] logits, or log_probs at `ids`
    k          columns of a row; None: as many as ids has
    ids        [..., k] int64 or int32
    log_probs  [..., k] f32, the teacher's at this temperature
    mode       of the mass outside the k: "tail" (one more entry), "renormalise", "truncate" or "zero_outside"
    divergence "kl", "reverse_kl", "jsd" or "mixed"; beta: of both last ones

    Other arguments: help(xdistill.losses). Of arrays it returns an xd_loss_values: loss, counted.
    """, api.xd_loss_values, lambda given: api.xd_topk_desc(common=COMMON),
    "student teacher labels temperature ignore_index reduction", {
        "student": Rows("student"), "teacher": Rows("teacher", None, like="student"),
        "labels": Elements("common.labels", IDS, student_rows), "k": Setting(None, None, "SymInt?"),
        "ids": Elements("ids", IDS, lambda d: d.student.rows * d.k),
        "log_probs": Elements("values", FLOATS, lambda d: d.student.rows * d.k), "mode": Choice("mode", "tail", TOPK_MODES),
        **of_divergence(), **of_rows("common", student_rows, ("sum", "none")), "vocabulary": Setting(None, None, "SymInt?"),
        "gradient": Rows("common.gradient", None, of="student")}, settle_topk, in_place=True)


def settle_head(context, desc, given):
    desc.loss.vocab = context.vocabulary(desc.student.weight.rows)


head_loss = define("head_loss", """`loss` of the logits hidden weight^T + bias, of which only a chunk of rows exists at a time.

    hidden           [..., H]; weight [V, H], as torch.nn.Linear has it; bias [V] f32
    teacher          its logits [..., V]; or teacher_hidden [..., H'], teacher_weight [V, H'] and teacher_bias
    reduction        "mean" or "sum"
    chunk_rows       rows at a time, a multiple of 256; 0: 256
    bf16             rounds factors of products to bf16 where that is faster
    hidden_gradient  written; weight_gradient [V, H] and bias_gradient [V], f32: added to

    Other arguments: help(xdistill.losses) and `loss`. Of arrays it returns an xd_loss_values.
    """, api.xd_loss_values, lambda given: api.xd_head_loss_desc(loss=api.xd_loss_desc(common=COMMON)), "hidden weight bias labels", {
        "hidden": Rows("student.hidden"), "weight": Rows("student.weight"),
        "bias": Elements("student.bias", FLOATS, lambda d: d.student.weight.rows),
        "labels": Elements("loss.common.labels", IDS, lambda d: d.student.hidden.rows),
        "teacher": Rows("loss.teacher", None, like="hidden"), "teacher_hidden": Rows("teacher.hidden", None, like="hidden"),
        "teacher_weight": Rows("teacher.weight", None),
        "teacher_bias": Elements("teacher.bias", FLOATS, lambda d: d.teacher.weight.rows), **of_both("loss."),
        **of_rows("loss.common", lambda d: d.student.hidden.rows, ("sum",)),
        "chunk_rows": Setting("chunk_rows", 0), "bf16": Setting("bf16", False),
        "hidden_gradient": Rows("hidden_gradient", None, of="hidden"),
        "weight_gradient": Elements("weight_gradient", FLOATS, lambda d: d.student.weight.rows * d.student.weight.cols, of="weight"),
        "bias_gradient": Elements("bias_gradient", FLOATS, lambda d: d.student.weight.rows, of="bias")},
    settle_head, common="loss.common", workspace="workspace")


# ---- two tokenizers ----

def xtoken_desc(given):
    desc = lib.xd_xtoken_defaults()
    desc.common.has_ignore_index, desc.teacher_count = True, 1
    desc.teachers = ctypes.pointer(lib.xd_xtoken_teacher_defaults(XTOKEN_KINDS.get(given["kind"], 0)))
    return desc


def settle_xtoken(context, desc, given):
    one, projection, cache, shape = desc.teachers.contents, given["projection"], given["cache"], given["student"].shape
    if len({given["kind"] == "cached", cache is not None, given["cache_positions"] is not None}) > 1:
        raise TypeError("kind 'cached' needs cache and cache_positions, and no other kind reads them")
    if cache is not None:
        one.logits.rows, one.vocabulary, one.cached.cache = given["cache_positions"].size, cache.about.desc.vocabulary, cache.handle
    if projection is not None and given["kind"] == "gold":
        one.gold.map = ctypes.pointer(projection.exact_map(given["relaxed"]))
    elif projection is not None:
        one.projected.projection = one.cached.projection = ctypes.pointer(projection.matrix)
    desc.vocab = context.vocabulary(shape[-1] if projection is None else projection.student_size)
    desc.sequences = given["sequences"] or (shape[0] if len(shape) == 3 else 1)
    if given["labels"] is None:
        desc.ce_weight = 0.0


def expand_chunks(given):
    chunks = expect(given["chunks"], Chunks, "chunks")
    if chunks.first and given["kind"] == "likelihood":
        raise ValueError("kind 'likelihood' needs all positions: make the chunks with first=False")
    return {**given, "chunks": chunks.count, "student_chunks": chunks.student, "teacher_chunks": chunks.teacher,
            "chunk_exact": chunks.exact, "chunk_mask": chunks.mask}


xtoken_loss = define("xtoken_loss", """Distillation from a teacher with another tokenizer, by chunks of tokens that cover the same bytes.

    student, teacher  logits [sequences, tokens, columns] of both, or [tokens, columns]
    chunks            of xdistill.chunks; its .tensors() for torch.compile
    projection        an xdistill.Projection, for kinds "projected" (P-KL) and "gold"; for "cached" of another vocabulary
    labels            the student's next tokens: adds ce_weight times their cross entropy, and kind "likelihood" needs them
    teacher_labels    the teacher's, for kind "likelihood"
    cache             a TeacherCache, for kind "cached": the teacher is None, and cache_positions [its rows] int64 has the
                      position in the cache of each row, or -1
    sequences         of logits [rows, columns]; 0: 1
    columns, tail     of "projected" and "gold": how many teacher columns, and sorted probabilities, are compared
    relaxed           "gold": H-KL
    exact_only        chunks with the same text on both sides only

    loss = kd_weight KD + ce_weight CE: docs/xtoken.md. Other arguments: help(xdistill.losses). Of arrays it returns an
    xd_xtoken_values: loss, kd, ce, and counts.
    """, api.xd_xtoken_values, xtoken_desc, "student teacher chunks projection labels", {
        "student": Rows("student"), "teacher": Rows("teachers.logits", schema="Tensor?", like="student", apart=2),
        "chunks": Setting("teachers.chunks", NEEDED, "SymInt"),
        **{name: Elements("teachers." + name, kind, count, host=True, hidden=True) for name, kind, count in (
            ("student_chunks", LONGS, student_rows), ("teacher_chunks", LONGS, lambda d: d.teachers.contents.logits.rows),
            ("chunk_exact", BYTES, lambda d: d.teachers.contents.chunks * d.sequences),
            ("chunk_mask", BYTES, lambda d: d.teachers.contents.chunks * d.sequences))},
        "projection": Object(Projection), "labels": Elements("common.labels", IDS, student_rows, host=True),
        "kind": Choice(None, "projected", XTOKEN_KINDS),
        "teacher_labels": Elements("teachers.labels", IDS, lambda d: d.teachers.contents.logits.rows, host=True),
        "cache": Object(TeacherCache),
        "cache_positions": Elements("teachers.cached.positions", LONGS, lambda d: d.teachers.contents.logits.rows, host=True),
        "sequences": Setting(None, 0), "temperature": Setting("temperature", 1.0), "reverse": Setting("reverse", False),
        "columns": Setting("columns", 8192), "tail": Setting("tail", 8192), "relaxed": Setting(None, False),
        "kd_weight": Setting("kd_weight", 1.0), "ce_weight": Setting("ce_weight", 0.1), "exact_only": Setting("exact_only", False),
        **of_rows("common", student_rows, (), host=True), "gradient": Rows("common.gradient", None, of="student")},
    settle_xtoken, expand_chunks, host=True, in_place=True)


def settle_uld(context, desc, given):
    desc.chunk_count = given["chunks"].size // 5
    for side in (desc.student, desc.teacher):
        side.vocabulary, side.temperature = side.logits.cols, given["temperature"]


uld_loss = define("uld_loss", """Universal logit distillation: sorted probabilities of chunks, without a projection (Boizard et al., 2024).

    student, teacher          logits [sequences, tokens, columns], or [tokens, columns] of one sequence
    chunks                    of xdistill.chunks, or its pieces [sequences, chunks, 5] int32
    student_ids, teacher_ids  [sequences, tokens] int64, any id of the vocabulary at padding

    The mean over sequences of the mean over chunks of sum |p - q|. A chunk's probabilities are those of its last token times
    the probabilities of the tokens before it: docs/xtoken.md. Of arrays it returns an xd_uld_values.
    """, api.xd_uld_values, lambda given: api.xd_uld_desc(), "student teacher chunks student_ids teacher_ids", {
        "student": Rows("student.logits"), "teacher": Rows("teacher.logits", like="student", apart=2),
        "chunks": Elements("chunks", CHUNKS, lambda d: 5 * d.chunk_count, NEEDED, host=True),
        "student_ids": Elements("student.ids", LONGS, lambda d: d.student.logits.rows, NEEDED, host=True),
        "teacher_ids": Elements("teacher.ids", LONGS, lambda d: d.teacher.logits.rows, NEEDED, host=True),
        "temperature": Setting(None, 1.0), "gradient": Rows("gradient", None, of="student")}, settle_uld,
    lambda given: {**given, "chunks": getattr(given["chunks"], "pieces", given["chunks"])}, common=None)


# ---- diffusion ----

vsd_loss = define("vsd_loss", """The student's term of distribution matching distillation: docs/diffusion.md has its formula.

    generated, teacher, fake  [samples, ...] f32, bf16 or f16: what the student made, and both models' clean estimates of it
    normaliser                "mean", "original" (DMD2) or "none"
    mask                      generated's shape, bytes or booleans; sample_scale [samples] f64

    Of arrays it returns an xd_sample_values: loss, denominator, counted.
    """, api.xd_sample_values, lambda given: lib.xd_vsd_defaults(), "generated teacher fake", {
        "generated": Samples("generated"), "teacher": Samples("teacher", like="generated"), "fake": Samples("fake", like="generated"),
        "normaliser": Choice("normaliser", "mean", NORMALISERS),
        "compat": Choice("form", False, {False: 0, True: api.XD_VSD_COMPAT}, "bool"),
        "mask": Elements("mask", BYTES, lambda d: d.generated.rows * d.generated.cols),
        "sample_scale": Elements("sample_scale", DOUBLES, lambda d: d.generated.rows), **of_samples(lambda d: d.generated.rows),
        "gradient": Samples("gradient", None, of="generated")})

denoise_loss = define("denoise_loss", """The denoising term: mean of w (c_p prediction + c_x clean + c_e noise)^2.

    prediction, clean, noise  [samples, ...] f32, bf16 or f16
    terms                     [samples, 4] f64: c_p, c_x, c_e and w of each sample
    mask                      prediction's shape, bytes or booleans
    """, api.xd_sample_values, lambda given: lib.xd_denoise_defaults(), "prediction clean noise terms", {
        "prediction": Samples("prediction"), "clean": Samples("clean", like="prediction"), "noise": Samples("noise", like="prediction"),
        "terms": Elements("terms", TERMS, lambda d: 4 * d.prediction.rows, NEEDED),
        "mask": Elements("mask", BYTES, lambda d: d.prediction.rows * d.prediction.cols), **of_samples(lambda d: d.prediction.rows),
        "gradient": Samples("gradient", None, of="prediction")})


def settle_gan(context, desc, given):
    desc.role = api.XD_GAN_GENERATOR if given["real"] is None else api.XD_GAN_DISCRIMINATOR


gan_loss = define("gan_loss", """The adversarial term of a discriminator's logits: the generator's without `real`, else the discriminator's.

    fake, real  [samples, heads]
    kind        "softplus" or "hinge"
    """, api.xd_sample_values, lambda given: lib.xd_gan_defaults(), "fake real", {
        "fake": Samples("fake"), "real": Samples("real", None), "kind": Choice("kind", "softplus", GAN_KINDS),
        **of_samples(lambda d: d.fake.rows), "fake_gradient": Samples("fake_gradient", None, of="fake"),
        "real_gradient": Samples("real_gradient", None, of="real")}, settle_gan)
