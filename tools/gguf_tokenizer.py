#!/usr/bin/env python3
"""Write a tokenizer.json from the tokenizer in a GGUF file.

    python3 tools/gguf_tokenizer.py MODEL.gguf tokenizer.json

Needs no package. Two kinds of vocabulary are known, "gpt2" (byte-level BPE with merges) and "llama" (SentencePiece BPE
with scores); for the first the split pattern follows from the name in tokenizer.ggml.pre, and a name that is not in the
table below is refused. BOS and EOS around a text become a post-processor where tokenizer.ggml.add_bos_token and
add_eos_token ask for them; where the file does not say, BOS is added for "llama" and for Llama 3's "llama-bpe", as
llama.cpp does.
"""

import json
import struct
import sys

MARK = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # token types

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_level(use_regex):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def split(pattern):
    return {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, byte_level(False)]}


# tokenizer.ggml.pre -> (pre-tokenizer, normalizer, ignore_merges)
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level(True)]}
PRE = {
    "default": (byte_level(True), None, False),
    "gpt-2": (byte_level(True), None, False),
    "smollm": (DIGITS, None, False),
    "starcoder": (DIGITS, None, False),
    "llama-bpe": (split(LLAMA3), None, True),
    "qwen2": (split(LLAMA3.replace("{1,3}", "")), {"type": "NFC"}, False),
}


class Reader:
    """The metadata of a GGUF file, versions 2 and 3, little-endian."""

    FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    STRING, ARRAY = 8, 9

    def __init__(self, path):
        self.file = open(path, "rb")
        magic, version, _, count = struct.unpack("<4sIQQ", self.take(24))
        if magic != b"GGUF" or version not in (2, 3):
            sys.exit("%s: not a GGUF file of version 2 or 3" % path)
        self.values = {}
        for _ in range(count):
            key = self.text()
            self.values[key] = self.value(self.number("I"))

    def take(self, count):
        data = self.file.read(count)
        if len(data) != count:
            sys.exit("the file ends in its metadata, at byte %d" % self.file.tell())
        return data

    def number(self, form):
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def text(self):
        return self.take(self.number("Q")).decode(errors="replace")

    def value(self, kind):
        if kind == self.STRING:
            return self.text()
        if kind == self.ARRAY:
            inner, count = self.number("I"), self.number("Q")
            return [self.value(inner) for _ in range(count)]
        if kind not in self.FORMATS:
            sys.exit("a metadata value of unknown kind %d at byte %d" % (kind, self.file.tell()))
        return self.number(self.FORMATS[kind])


def merges_by_score(tokens, scores, types):
    """Every pair that makes a token, the highest score of the result first."""
    ids = {t: i for i, t in enumerate(tokens) if types[i] in (NORMAL, UNUSED)}
    found = []
    for token, i in ids.items():
        pairs = [(ids[token[:k]], ids[token[k:]]) for k in range(1, len(token))
                 if token[:k] in ids and token[k:] in ids]
        found += [(-scores[i], i, left, right) for left, right in sorted(pairs)]
    return [[tokens[left], tokens[right]] for _, _, left, right in sorted(found)]


def added(i, content, special):
    return {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": special}


def post_processor(values, tokens, kind):
    """The tokens around a text, or None."""
    wanted = {"bos": kind == "llama" or values.get("tokenizer.ggml.pre") == "llama-bpe", "eos": False}
    usual = {"bos": 1, "eos": 2} if kind == "llama" else {}
    pieces, table = {"bos": [], "eos": []}, {}
    for end, otherwise in wanted.items():
        if not values.get("tokenizer.ggml.add_%s_token" % end, otherwise):
            continue
        i = values.get("tokenizer.ggml.%s_token_id" % end, usual.get(end, -1))
        if not 0 <= i < len(tokens):
            sys.exit("%s is to be added, but %s_token_id is %d of %d tokens" % (end.upper(), end, i, len(tokens)))
        table[tokens[i]] = {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]}
        pieces[end] = [tokens[i]]
    if not table:
        return None

    def around(text, type_id):
        return [*({"SpecialToken": {"id": t, "type_id": type_id}} for t in pieces["bos"]),
                {"Sequence": {"id": text, "type_id": type_id}},
                *({"SpecialToken": {"id": t, "type_id": type_id}} for t in pieces["eos"])]

    return {"type": "TemplateProcessing", "single": around("A", 0), "pair": around("A", 0) + around("B", 1),
            "special_tokens": table}


def convert(values):
    kind, tokens = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama") or not tokens:
        sys.exit("tokenizer of kind %s: only gpt2 and llama are known" % kind)
    types = values.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": {t: i for i, t in enumerate(tokens)}}
    result = {"version": "1.0", "truncation": None, "padding": None,
              "added_tokens": [added(i, t, types[i] == CONTROL) for i, t in enumerate(tokens)
                               if types[i] in (CONTROL, USER)],
              "normalizer": None, "pre_tokenizer": None, "post_processor": post_processor(values, tokens, kind),
              "decoder": None, "model": model}
    if kind == "gpt2":
        pre = values.get("tokenizer.ggml.pre", "default")
        if pre not in PRE:
            sys.exit("pre-tokenizer %s is not known; these are: %s" % (pre, ", ".join(sorted(PRE))))
        result["pre_tokenizer"], result["normalizer"], model["ignore_merges"] = PRE[pre]
        result["decoder"] = byte_level(True)
        model["merges"] = values["tokenizer.ggml.merges"]
        return result
    prepend = [{"type": "Prepend", "prepend": MARK}] if values.get("tokenizer.ggml.add_space_prefix", True) else []
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    result["normalizer"] = {"type": "Sequence", "normalizers": prepend + [blanks]}
    result["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": MARK}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": len(prepend), "stop": 0}]}
    model["unk_token"] = next((t for i, t in enumerate(tokens) if types[i] == UNKNOWN), None)
    model["byte_fallback"] = BYTE in types
    model["fuse_unk"] = True
    model["merges"] = merges_by_score(tokens, values["tokenizer.ggml.scores"], types)
    return result


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    result = convert(Reader(sys.argv[1]).values)
    with open(sys.argv[2], "w", encoding="utf-8") as out:
        json.dump(result, out, ensure_ascii=False, indent=1)
        out.write("\n")


if __name__ == "__main__":
    main()
