"""Tokenizers, alignment of two tokenizers, projections between their vocabularies, and caches of a teacher.

Lists of numbers are array.array of the standard library: numpy.asarray and torch.frombuffer read them without a copy.
"""

import array as arrays
import ctypes
import itertools
import os
import threading
import weakref

from . import _api as api
from ._arrays import rows
from ._library import Context, context as current, lib, release_later

PRESETS = {None: api.XD_TOKENIZER_PRESET_NONE, "gpt2": api.XD_TOKENIZER_PRESET_GPT2, "cl100k": api.XD_TOKENIZER_PRESET_CL100K,
           "o200k": api.XD_TOKENIZER_PRESET_O200K, "llama3": api.XD_TOKENIZER_PRESET_LLAMA3,
           "llama4": api.XD_TOKENIZER_PRESET_LLAMA4, "qwen": api.XD_TOKENIZER_PRESET_QWEN}
CODINGS = {"8 bits": api.XD_CACHE_8_BITS, "16 bits": api.XD_CACHE_16_BITS, "f32": api.XD_CACHE_F32}


def copied(letter, address, count):
    """array.array of `count` numbers of the library's memory."""
    made = arrays.array(letter)
    if count:
        made.frombytes(ctypes.string_at(address, count * made.itemsize))
    return made


def filled(letter, value, count):
    return arrays.array(letter, [value]) * count


def shaped(numbers, rows, columns):
    """The numbers of an array.array as a memoryview [rows, columns]; flat if there are none."""
    flat = memoryview(numbers)
    return flat.cast("B").cast(flat.format, (rows, columns)) if rows and columns else flat


def address(numbers, kind):
    """A pointer to the numbers of an array.array, which the caller keeps; NULL of None."""
    if numbers is None:
        return None
    return ctypes.cast((ctypes.c_char * (len(numbers) * numbers.itemsize)).from_buffer(numbers), ctypes.POINTER(kind))


def expect(x, kind, name):
    if not isinstance(x, kind):
        raise TypeError("%s is a %s, not xdistill's %s" % (name, type(x).__name__, kind.__name__))
    return x


class Numbered:
    """An object that a number stands for, in graphs of PyTorch: `find` gives it back while it lives."""

    numbers, every = itertools.count(1), weakref.WeakValueDictionary()

    def enlist(self):
        self.number = next(self.numbers)
        self.every[self.number] = self


def find(number):
    """The Numbered of a number; None of 0."""
    return Numbered.every[number] if number else None


class Encoding:
    """The tokens of a text.

    ids    array('i')
    spans  array('q'): begin and end of each token in the text's UTF-8 bytes, one after the other
    roles  array('B') of xd_token_role, or None without add_special
    size   bytes of the whole text, also of a slice; None: not known
    """

    def __init__(self, ids, spans, roles=None, size=None):
        self.ids, self.spans, self.roles, self.size = ids, spans, roles, size

    def __repr__(self):
        return "Encoding(%d tokens%s)" % (len(self), "" if self.size is None else " of a text of %d bytes" % self.size)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, part):
        """The tokens of a slice with step 1, with the spans that they had."""
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise TypeError("tokens are a slice of step 1, not %r; ids have each" % (part,))
        begin, end, _ = part.indices(len(self))
        return Encoding(self.ids[begin:end], self.spans[2 * begin:2 * max(begin, end)],
                        None if self.roles is None else self.roles[begin:end], self.size)

    def side(self, mask=None):
        if mask is not None:
            mask = arrays.array("B", map(bool, mask))
            if len(mask) != len(self):
                raise ValueError("the mask has %d elements for %d tokens" % (len(mask), len(self)))
        made = api.xd_align_side(count=len(self), spans=address(self.spans, api.xd_token_span),
                                 roles=address(self.roles, ctypes.c_uint8), mask=address(mask, ctypes.c_uint8))
        return made, mask


class Tokenizer:
    """A BPE vocabulary: a tokenizer.json, a SentencePiece .model, Tekken JSON, or a rank file with a preset. Threads may share it.

    path     the file, or a directory with tokenizer.json
    preset   of a rank file: "gpt2", "cl100k", "o200k", "llama3", "llama4" or "qwen"
    threads  of encode_batch; None: as many as this process may use
    """

    def __init__(self, path, preset=None, threads=None):
        if preset not in PRESETS:
            raise ValueError("preset is %r, expected one of %s" % (preset, ", ".join(map(repr, PRESETS))))
        path = os.fspath(path)
        path = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        self.opened = os.path.abspath(path), preset, threads
        self.context, self.lock = Context(threads), threading.Lock()
        desc = api.xd_tokenizer_desc(path=os.fsencode(path), preset=PRESETS[preset])
        self.handle = self.context.create("xd_tokenizer_load", desc, api.xd_tokenizer)
        release_later(self, lib.xd_tokenizer_destroy, self.handle, self.context)
        desc = api.xd_encoder_desc(tokenizer=self.handle, batches=True)
        self.encoder = self.context.create("xd_encoder_create", desc, api.xd_encoder)
        release_later(self, lib.xd_encoder_destroy, self.encoder, self.context)
        self.about = lib.xd_tokenizer_describe(self.handle)

    def __reduce__(self):
        """A pickle has the path: a process that is spawned opens the file."""
        return type(self), self.opened

    def __len__(self):
        """The largest id, and 1: the columns of logits."""
        return self.about.size

    @property
    def hash(self):
        return self.about.hash

    @property
    def bos(self):
        """The id before a text, or None."""
        return None if self.about.bos < 0 else self.about.bos

    @property
    def eos(self):
        return None if self.about.eos < 0 else self.about.eos

    def encode(self, text, add_special=False, parse_special=False):
        """The Encoding of a str, or of UTF-8 bytes.

        add_special    with the tokens that the file puts around a text
        parse_special  names of special tokens in the text become tokens: not for untrusted text
        """
        data = text.encode() if isinstance(text, str) else bytes(text)
        desc, out = api.xd_encode_desc(add_special=add_special, parse_special=parse_special), api.xd_encoding()
        with self.lock:
            self.context.check(lib.xd_encode(self.encoder, data, len(data), ctypes.byref(desc), ctypes.byref(out)))
            return Encoding(copied("i", out.ids, out.count), copied("q", out.spans, 2 * out.count),
                            copied("B", out.roles, out.count) if out.roles else None, len(data))

    def encode_batch(self, texts, add_special=False, parse_special=False):
        """A list with the Encoding of each text, made on several threads."""
        data = [text.encode() if isinstance(text, str) else bytes(text) for text in texts]
        each = (api.xd_text * len(data))(*[
            api.xd_text(ctypes.cast(ctypes.c_char_p(one), dict(api.xd_text._fields_)["data"]), len(one)) for one in data])
        desc, out = api.xd_encode_desc(add_special=add_special, parse_special=parse_special), api.xd_encoding_batch()
        with self.lock:
            self.context.check(lib.xd_encode_batch(self.encoder, ctypes.byref(api.xd_texts(each, len(data))), ctypes.byref(desc),
                                                   ctypes.byref(out)))
            ends = out.offset[:len(data) + 1]
            ids, spans = copied("i", out.ids, ends[-1]), copied("q", out.spans, 2 * ends[-1])
            roles = copied("B", out.roles, ends[-1]) if out.roles else None
        return [Encoding(ids, spans, roles, len(text))[begin:end] for text, begin, end in zip(data, ends, ends[1:])]

    def decode_bytes(self, ids, skip_special=False):
        """The bytes of ids; they may end inside a character."""
        ids, length = arrays.array("i", ids), ctypes.c_size_t()
        desc = api.xd_decode_desc(ids=address(ids, ctypes.c_int32), count=len(ids), skip_special=skip_special)
        with self.lock:
            self.context.call("xd_tokenizer_decode", self.handle, ctypes.byref(desc), ctypes.byref(length))
            out = ctypes.create_string_buffer(max(length.value, 1))
            desc.out, desc.capacity = ctypes.cast(out, ctypes.POINTER(ctypes.c_char)), length.value
            self.context.call("xd_tokenizer_decode", self.handle, ctypes.byref(desc), ctypes.byref(length))
        return out.raw[:length.value]

    def decode(self, ids, skip_special=False):
        return self.decode_bytes(ids, skip_special).decode("utf-8", "replace")

    def token(self, id):
        """The bytes of an id, or None where there is no such token."""
        about = lib.xd_tokenizer_token(self.handle, id)
        return ctypes.string_at(about.bytes, about.length) if about.kind else None


# ---- two tokenizers ----

class Alignment:
    """The chunks of one text: the shortest runs of tokens of both sides that cover the same bytes.

    chunks  list of (student begin, student end, teacher begin, teacher end, flags); flags of XD_CHUNK_EXACT, XD_CHUNK_MASKED
    report  an xd_align_report: counts of chunks and bytes
    """

    def __init__(self, student, teacher, student_mask=None, teacher_mask=None):
        sizes = [expect(side, Encoding, name).size for side, name in ((student, "student"), (teacher, "teacher"))]
        if None not in sizes and sizes[0] != sizes[1]:
            raise ValueError("student and teacher are encodings of two texts, of %d and %d bytes" % tuple(sizes))
        ctx, out, self.report = current(), api.xd_alignment(), api.xd_align_report()
        sides = [student.side(student_mask), teacher.side(teacher_mask)]
        ctx.call("xd_align_bytes", *[ctypes.byref(side) for side, _ in sides], ctypes.byref(out), ctypes.byref(self.report))
        numbers = copied("i", out.chunks, 5 * out.count)
        self.chunks = [tuple(numbers[i:i + 5]) for i in range(0, len(numbers), 5)]
        self.ids = []
        for which, (side, _) in enumerate(sides):
            ids = filled("q", -1, side.count)
            lib.xd_chunk_ids(ctypes.byref(out), which, ctypes.byref(side), address(ids, ctypes.c_int64), None)
            self.ids.append(ids)
        lib.xd_alignment_destroy(ctx.handle, ctypes.byref(out))

    def __len__(self):
        return len(self.chunks)

    def __repr__(self):
        return "Alignment(%d chunks of %d and %d tokens)" % (len(self), *map(len, self.ids))


def align(student, teacher, student_mask=None, teacher_mask=None):
    """The Alignment of two Encodings of one text. A chunk with a token whose mask is 0 does not count."""
    return Alignment(student, teacher, student_mask, teacher_mask)


def positions(ids, length, first):
    """The chunk of the next token of each position, -1 where there is none, or where that token is not a chunk's first."""
    own = ids[:length]
    made = arrays.array("q", (-1 if first and after == before else after for before, after in zip(own, own[1:])))
    return made + filled("q", -1, length - len(made))


class Chunks:
    """What xtoken_loss and uld_loss read of a batch: numbers of chunks for each position of both sides.

    student, teacher  [sequences, positions] int64: the chunk of the next token, or -1
    count             chunks of the longest sequence
    exact, mask       [sequences, count] bytes
    pieces            [sequences, count, 5] int32: the fields of xd_aligned_chunk, for uld_loss; 0 where no position precedes
                      a chunk, or where a side was cut
    first             whether only the position before a chunk's first token has it
    """

    def __init__(self, student, teacher, count, exact=None, mask=None, pieces=None, first=False):
        self.student, self.teacher, self.count, self.exact, self.mask = student, teacher, count, exact, mask
        self.pieces, self.first = pieces, first

    def __repr__(self):
        return "Chunks(up to %d a sequence, at %d student and %d teacher positions%s)" % (
            self.count, len(self.student), len(self.teacher), ", first" if self.first else "")

    def tensors(self):
        """The same with tensors of PyTorch over the same memory."""
        if not isinstance(self.student, arrays.array):
            return self
        import torch
        kinds = {"q": torch.int64, "B": torch.uint8, "i": torch.int32}
        fields = [None if x is None else torch.frombuffer(x, dtype=kinds[x.typecode]) if len(x) else torch.empty(
            0, dtype=kinds[x.typecode]) for x in (self.student, self.teacher, self.exact, self.mask, self.pieces)]
        return Chunks(fields[0], fields[1], self.count, *fields[2:], self.first)


def chunks(alignments, student_length, teacher_length, first=True):
    """The Chunks of a batch whose sequences are padded, or cut, to these numbers of positions.

    first  a chunk has the position before its first token only, where both models have read the same bytes; False: all
           positions, as kind "likelihood" needs
    """
    alignments = [alignments] if isinstance(alignments, Alignment) else [expect(one, Alignment, "one of alignments") for one in alignments]
    longest = [max((len(one.ids[side]) for one in alignments), default=0) for side in (0, 1)]
    if longest[0] != longest[1] and longest == [teacher_length, student_length]:
        raise ValueError("the lengths are %d and %d, but align had up to %d and %d tokens: the student comes first in both" % (
            student_length, teacher_length, *longest))
    count = max(map(len, alignments), default=0)
    made = Chunks(arrays.array("q"), arrays.array("q"), count, arrays.array("B"), arrays.array("B"), arrays.array("i"),
                  first)
    for one in alignments:
        made.student.extend(positions(one.ids[0], student_length, first))
        made.teacher.extend(positions(one.ids[1], teacher_length, first))
        flags = [chunk[4] for chunk in one.chunks]
        made.exact.extend(bool(flag & api.XD_CHUNK_EXACT) for flag in flags)
        made.mask.extend(not flag & api.XD_CHUNK_MASKED for flag in flags)
        for numbers in (made.exact, made.mask):
            numbers.extend(filled("B", 0, count - len(flags)))
        for begin, end, other_begin, other_end, flag in one.chunks:
            fits = begin > 0 and other_begin > 0 and end <= student_length and other_end <= teacher_length
            counts = fits and not flag & api.XD_CHUNK_MASKED
            made.pieces.extend((begin, end, other_begin, other_end, flag) if counts else (0, 0, 0, 0, 0))
        made.pieces.extend(filled("i", 0, 5 * (count - len(flags))))
    return made


class Projection(Numbered):
    """Which teacher tokens a student token stands for, with weights: [student ids, teacher ids], sparse. Threads may share it.

    directory  keeps the projection under a name of both tokenizers
    options    fields of xd_projection_options. Without any: those for chunks(first=True), where a student token leads to
               all teacher tokens that begin with it
    """

    def __init__(self, student, teacher, directory=None, **options):
        self.context, self.matrix, self.report = Context(1), api.xd_projection(), api.xd_projection_report()
        settings = lib.xd_projection_defaults()
        for name, value in (options or {"reverse": True, "disable_exact": True, "max_pieces": 1, "k": 1024}).items():
            if name not in dict(settings._fields_):
                raise TypeError("a projection has no option %s" % name)
            setattr(settings, name, value)
        desc = api.xd_projection_desc(student=student.handle, teacher=teacher.handle, options=ctypes.pointer(settings),
                                      directory=None if directory is None else os.fsencode(directory))
        self.context.call("xd_projection_build", ctypes.byref(desc), ctypes.byref(self.matrix), ctypes.byref(self.report))
        context = self.context
        release_later(self, lambda matrix: lib.xd_projection_destroy(context.handle, ctypes.byref(matrix)), self.matrix, context)
        self.maps = {}
        self.enlist()

    def exact_map(self, relaxed=False):
        """The xd_exact_map of kind "gold": pairs of one token in both vocabularies. Build the projection with max_pieces=4."""
        if relaxed not in self.maps:
            rows, made = api.xd_projection_rows(), api.xd_exact_map()
            context = self.context
            context.call("xd_projection_to_rows", ctypes.byref(self.matrix), 0, ctypes.byref(rows))
            try:
                desc = api.xd_exact_map_desc(rows=ctypes.pointer(rows), teacher_size=self.teacher_size, relaxed=relaxed)
                context.call("xd_exact_map_create", ctypes.byref(desc), ctypes.byref(made))
            finally:
                lib.xd_projection_rows_destroy(context.handle, ctypes.byref(rows))
            release_later(self, lambda made: lib.xd_exact_map_destroy(context.handle, ctypes.byref(made)), made, context)
            self.maps[relaxed] = made
        return self.maps[relaxed]

    @property
    def student_size(self):
        return self.matrix.student_size

    @property
    def teacher_size(self):
        return self.matrix.teacher_size


# ---- caches ----

class TeacherCache(Numbered):
    """An open file of a teacher's k likeliest tokens at each position.

    about  an xd_teacher_cache_info; about.desc has vocabulary, k, temperature
    """

    def __init__(self, path):
        self.context = Context(1)
        desc = api.xd_teacher_cache_open_desc(path=os.fsencode(path))
        self.handle = self.context.create("xd_teacher_cache_open", desc, api.xd_teacher_cache)
        release_later(self, lib.xd_teacher_cache_close, self.handle, self.context)
        self.about = lib.xd_teacher_cache_describe(self.handle)
        self.enlist()

    def __len__(self):
        return self.about.positions

    def document(self, index):
        """An xd_cached_document: positions [first, first + count), size and checksum of its text."""
        out = api.xd_cached_document()
        self.context.call("xd_teacher_cache_find_document", self.handle, index, ctypes.byref(out))
        return out

    @property
    def entries(self):
        """Ids of a position: the k likeliest, then those drawn."""
        return self.about.desc.k + self.about.desc.draws

    def read(self, first=0, count=None):
        """(positions, ids, probabilities) of a range: a list of xd_cached_position, and [count, entries] of int32 and f64.

        Both are memoryviews: x[i, j] reads an element, numpy.asarray(x) and torch.from_numpy of that share the memory.
        """
        count = len(self) - first if count is None else count
        size = max(count, 0)
        positions = (api.xd_cached_position * size)()
        ids, likely = filled("i", 0, size * self.entries), filled("d", 0.0, size * self.entries)
        desc = api.xd_teacher_cache_read_desc(first=first, count=count, positions=positions, ids=address(ids, ctypes.c_int32),
                                              probabilities=address(likely, ctypes.c_double))
        self.context.call("xd_teacher_cache_read", self.handle, ctypes.byref(desc))
        return list(positions), shaped(ids, size, self.entries), shaped(likely, size, self.entries)


class TeacherCacheWriter:
    """Writes a cache in a `with` block; the file appears at its end, and not at all after an exception.

    vocabulary   columns of logits in use
    k            tokens of a position
    teacher      the Tokenizer, or its hash
    student      a Tokenizer if the cache is for this student only
    coding       of log-probabilities: "8 bits", "16 bits" or "f32"
    draws, seed  this many of the other ids are drawn, unbiased: docs/routes.md
    """

    def __init__(self, path, vocabulary, k, teacher=0, student=0, temperature=1.0, coding="8 bits", spans=True, name="",
                 draws=0, seed=0):
        self.context, self.spans = Context(), spans
        if coding not in CODINGS:
            raise ValueError("coding is %r, expected one of %s" % (coding, ", ".join(map(repr, CODINGS))))
        if not temperature > 0:
            raise ValueError("temperature is %g, expected more than 0" % temperature)
        desc = api.xd_teacher_cache_desc(
            vocabulary=vocabulary, k=k, teacher_hash=getattr(teacher, "hash", teacher), student_hash=getattr(student, "hash", student),
            draws=draws, seed=seed, temperature=temperature, coding=CODINGS[coding], spans=spans, name=name.encode(), path=os.fsencode(path))
        self.handle = self.context.create("xd_teacher_cache_writer_create", desc, api.xd_teacher_cache_writer)
        self.abort = release_later(self, lib.xd_teacher_cache_writer_abort, self.handle, self.context)

    def add(self, text, encoding, logits):
        """A whole document: its text, its tokens, and the teacher's logits [tokens, columns] after each of them."""
        data = text.encode() if isinstance(text, str) else bytes(text)
        if expect(encoding, Encoding, "encoding").size not in (None, len(data)):
            raise ValueError("the text has %d bytes, but the encoding is of a text of %d" % (len(data), encoding.size))
        self.context.check(lib.xd_teacher_cache_writer_document(self.handle, data, len(data)))
        block = api.xd_teacher_cache_block(logits=rows(logits, "logits"))
        if block.logits.rows != len(encoding):
            raise ValueError("logits have %d rows for %d tokens" % (block.logits.rows, len(encoding)))
        following = encoding.ids[1:] + arrays.array("i", [-1])
        block.ids, block.next = address(encoding.ids, ctypes.c_int32), address(following, ctypes.c_int32)
        if self.spans:
            block.spans = address(encoding.spans, api.xd_token_span)
        self.context.check(lib.xd_teacher_cache_writer_append(self.handle, ctypes.byref(block)))

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            self.abort()
        elif self.abort.detach():
            self.context.check(lib.xd_teacher_cache_writer_commit(self.handle))
