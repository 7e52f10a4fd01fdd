"""Opens model directories with Hugging Face transformers, and compares with what the demonstration says of them.

    check_transformers.py PROGRAM TEXT DIR...      PROGRAM is the demonstration, TEXT its held-out text

The ids of the text must be the same, and its bits per byte within 1e-3: rows of 128 tokens, each token predicted
from what precedes it in its row. So must be what curve.json in the folder says, or sharded.json beside it, where there is
one, and what result.json beside it says where its report is of that text. Each model then goes on from a beginning, by its own generation_config.json; the sample is printed, for a reader to
judge.
The last line is `N passed, N failed, N skipped`.
"""
import json
import math
import os
import re
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROW = 128
ODD = "Ünïcode — “quotes”, 漢字 🙂\t tabs,  spaces \n\n\nand 12345 don't WE'LL <|endoftext|> end  \n"
results = []


def verdict(good, what):
    results.append(good)
    print("ok    " if good else "FAILED", what)


def ours(program, *options):
    return subprocess.run([program, *options], check=True, stdout=subprocess.PIPE, text=True).stdout


def our_ids(program, directory, path):
    return [int(line) for line in ours(program, "--eval", directory, "--encode", path).split()]


def bits_per_byte(model, ids, text_bytes):
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 32 * ROW):
            part = ids[start : start + 32 * ROW + 1]
            rows = math.ceil((len(part) - 1) / ROW)
            given = torch.zeros(rows * ROW, dtype=torch.long)
            wanted = torch.full((rows * ROW,), -100, dtype=torch.long)
            given[: len(part) - 1] = torch.tensor(part[:-1])
            wanted[: len(part) - 1] = torch.tensor(part[1:])
            logits = model(input_ids=given.view(rows, ROW)).logits.float()
            nats += torch.nn.functional.cross_entropy(
                logits.view(rows * ROW, -1).double(), wanted, ignore_index=-100, reduction="sum"
            ).item()
    return nats / math.log(2.0) / text_bytes


def sample(model, tokenizer, directory):
    beginning = "And it came to pass"
    given = tokenizer(beginning, add_special_tokens=False, return_tensors="pt").input_ids
    torch.manual_seed(1)
    with torch.no_grad():
        out = model.generate(given, attention_mask=torch.ones_like(given), min_new_tokens=40, max_new_tokens=40)[0]
    text = tokenizer.decode(out)
    print("       " + text.replace("\n", " / "))
    settings = model.generation_config
    good = len(out) == given.shape[1] + 40 and text.startswith(beginning) and len(set(out.tolist())) > 10
    verdict(good and settings.do_sample and settings.temperature == 0.8, f"{directory}: generate() goes on from a beginning")


def check(program, text_path, directory):
    with open(text_path, encoding="utf-8", newline="") as file:
        text = file.read()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = tokenizer.encode(text, add_special_tokens=False)
    verdict(ids == our_ids(program, directory, text_path), f"{directory}: the same {len(ids)} ids of the held-out text")
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="") as odd:
        odd.write(ODD)
        odd.flush()
        theirs = tokenizer.encode(ODD, add_special_tokens=False)
        verdict(theirs == our_ids(program, directory, odd.name), f"{directory}: the same {len(theirs)} ids of an odd text")
    verdict(tokenizer.decode(ids) == text, f"{directory}: the ids give the text back")
    first = len(tokenizer.decode(ids[:1]).encode())
    theirs = bits_per_byte(model, ids, len(text.encode()) - first)
    mine = float(re.search(r"([0-9.]+) bits/byte", ours(program, "--eval", directory)).group(1))
    verdict(abs(theirs - mine) <= 1e-3, f"{directory}: {theirs:.6f} bits per byte in transformers, {mine:.6f} here")
    for told_by in (os.path.join(directory, "curve.json"), os.path.join(os.path.dirname(directory), "sharded.json")):
        if os.path.exists(told_by):
            with open(told_by, encoding="utf-8") as file:
                told = json.load(file)["bits_per_byte"]
            verdict(abs(theirs - told) <= 1e-3, f"{directory}: {told:.6f} bits per byte in {os.path.basename(told_by)}")
    result = os.path.join(os.path.dirname(directory), "result.json")
    if os.path.exists(result):
        with open(result, encoding="utf-8") as file:
            told = json.load(file)
        arm = told["text_alone" if os.path.basename(directory) == "alone" else "student"]
        if told["report_bytes"] == len(text.encode()):
            verdict(abs(theirs - arm["best"]) <= 1e-3, f"{directory}: {arm['best']:.6f} bits per byte in result.json")
    sample(model, tokenizer, directory)


for path in sys.argv[3:]:
    check(sys.argv[1], sys.argv[2], path)
print(f"{results.count(True)} passed, {results.count(False)} failed, 0 skipped")
sys.exit(results.count(False) > 0)
