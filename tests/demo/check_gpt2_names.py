"""A GPT-2 that Hugging Face transformers has saved goes through a map of names and layouts, and comes back to the bit.

    check_gpt2_names.py PROGRAM FOLDER      PROGRAM is examples/16_gpt2_names, FOLDER is made anew

The model is random, with the sizes of the example. It is saved once as one file, and once in shards with an index. What two
ranks of the library have read and written again, times 1, must hold the same tensors, and transformers must open it with the same
state; times one half, with half of it. The last line is `N passed, N failed, N skipped`.
"""
import os
import pathlib
import shutil
import subprocess
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors import safe_open
from transformers import GPT2Config, GPT2LMHeadModel

results = []


def verdict(good, what):
    results.append(bool(good))
    print("ok    " if good else "FAILED", what)


def tensors(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})
    return found


def equal(one, other, scale):
    def bits(x):
        return x.contiguous().view(torch.int32)

    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape and torch.equal(bits(one[name] * scale), bits(other[name])) for name in one)


def check(program, model, folder, shard, scale):
    source, target = folder / f"theirs-{shard}", folder / f"ours-{shard}-{scale}"
    target.mkdir()
    if not source.exists():
        model.save_pretrained(source, max_shard_size=shard)
    subprocess.run([program, str(source), str(target), str(scale)], check=True, stdout=subprocess.DEVNULL)
    shutil.copy(source / "config.json", target)
    one, other = tensors(source), tensors(target)
    verdict(len(one) > 20 and equal(one, other, scale), f"{len(one)} tensors of shards of {shard}, times {scale}, in the files")
    again, problems = GPT2LMHeadModel.from_pretrained(target, output_loading_info=True)
    verdict(equal(model.state_dict(), again.state_dict(), scale), "and in the state that transformers opens")
    verdict(not any(problems.values()), "without a missing or unexpected key")


def main():
    program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=30, n_positions=12, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    check(program, model, folder, "5GB", 1.0)
    check(program, model, folder, "5GB", 0.5)
    check(program, model, folder, "4KB", 1.0)
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed, 0 skipped")
    return 0 if all(results) else 1


sys.exit(main())
