#!/usr/bin/env python3
"""Checkpoints between xdistill and torch.distributed.checkpoint, both ways and to the bit. Needs PyTorch; --hf needs safetensors too.

    test_dcp.py PROGRAM             PROGRAM is build/xdistill: checkpoints with pickles, of 1 and of 2 ranks
    test_dcp.py --hf PROGRAM RANKS  RANKS is dcp_ranks.c, built: pieces in safetensors files
"""

import json
import math
import os
import pathlib
import socket
import struct
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from checking import check, failures


def tool(program, *args, status=0):
    done = subprocess.run([program, *map(str, args)], capture_output=True, text=True)
    check(done.returncode == status, f"status {done.returncode} of {args}: {done.stderr}")
    return done.stderr


# ---- ranks ----


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(rank, ranks, port, work, argument):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    work(init_device_mesh("cpu", (ranks,)), argument)
    dist.destroy_process_group()


def on_ranks(ranks, work, argument):
    torch.multiprocessing.start_processes(start, args=(ranks, free_port(), work, argument), nprocs=ranks, start_method="fork")


# ---- with pickles ----


def tensors():
    torch.manual_seed(5)
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
             torch.uint8, torch.uint16, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
    made = {f"model.kind.{str(kind)[6:]}": (torch.randn(5, 6) * 3).to(kind) for kind in kinds}
    made["model.rows"] = torch.randn(7, 3)
    made["model.columns"] = torch.randn(4, 9).to(torch.bfloat16)
    made["model.turned"] = torch.randn(6, 5).t()
    made["model.deep"] = torch.randn(3, 4, 5, 2)
    made["model.short"] = torch.randn(1, 3)
    made["model.large"] = torch.randn(1200, 1100)
    made["model.scalar"] = torch.tensor(3.5)
    made["optim.state.model.rows.exp_avg"] = torch.randn(7, 3)
    return made


def state(mesh, made):
    """One rank's part: rows, columns, both kinds of copies."""
    out = {}
    for i, (name, tensor) in enumerate(made.items()):
        placement = Replicate() if tensor.ndim == 0 or i % 5 == 4 else Shard(i % tensor.ndim)
        # gloo does not carry the small types: every rank has the whole, and takes its part of it
        part = tensor
        if isinstance(placement, Shard):
            pieces = list(torch.chunk(tensor, mesh.size(), dim=placement.dim))
            here = mesh.get_local_rank()
            part = pieces[here] if here < len(pieces) else tensor.narrow(placement.dim, 0, 0)
        out[name] = torch.distributed.tensor.DTensor.from_local(part, mesh, [placement], run_check=False, shape=tensor.shape,
                                                                stride=tensor.contiguous().stride())
    return out


def save_pickled(mesh, folder):
    parts = state(mesh, tensors())
    parts.update({"step": 12, "lr": 0.1, "big": 1 << 62, "name": "student \u00e9", "none": None, "flag": True, "nan": math.nan,
                  "groups": [{"betas": (0.9, 0.95), "params": ["a", "b"]}]})
    dcp.save(parts, checkpoint_id=folder)


def load_safetensors(folder):
    """Bytes, dtype and shape of every tensor, by the format's own words."""
    out = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        data = path.read_bytes()
        length, = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8:8 + length]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                out[name] = (entry["dtype"], entry["shape"], data[8 + length + begin:8 + length + end])
    return out


def bytes_of(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def check_pickled(program, folder, ranks, *options):
    made = tensors()
    source, target = folder / f"from{ranks}", folder / f"to{ranks}{len(options)}"
    if not source.exists():
        on_ranks(ranks, save_pickled, str(source))
    tool(program, "convert", *options, source, target)
    got = load_safetensors(target)
    check(got.keys() == made.keys(), f"names {sorted(got)}")
    for name, tensor in made.items():
        check(got[name][1] == list(tensor.shape), f"shape of {name}")
        check(got[name][2] == bytes_of(tensor), f"{ranks} ranks: elements of {name}")
    objects = json.loads((target / "objects.json").read_text(encoding="utf-8"))
    # DCP calls the members of lists and dicts by their places
    betas = objects.pop("groups.0.betas", None) or objects["groups"][0]["betas"]
    check(betas == [0.9, 0.95], f"betas {betas}")
    check({k: objects[k] for k in ("step", "lr", "big", "name", "none", "flag", "nan")} ==
          {"step": 12, "lr": 0.1, "big": 1 << 62, "name": "student \u00e9", "none": None, "flag": True, "nan": "nan"}, f"{objects}")


class Hostile:
    def __reduce__(self):
        return os.system, ("touch /tmp/xdistill-was-executed",)


def save_hostile(_, folder):
    dcp.save({"w": torch.ones(3), "thing": Hostile()}, checkpoint_id=folder)


def check_hostile(program, folder):
    """PyTorch writes it, and would run it."""
    on_ranks(1, save_hostile, str(folder / "hostile"))
    said = tool(program, "convert", folder / "hostile", folder / "no", status=2)
    check(f"{os.system.__module__}.system\" is not in the list of classes" in said, said)
    check("--tensors-only leaves objects out" in said, said)
    check(not (folder / "no").exists(), "a directory is left")
    tool(program, "convert", "--tensors-only", folder / "hostile", folder / "yes")
    check(list(load_safetensors(folder / "yes")) == ["w"], "the tensors alone")


# ---- files of torch.save ----


def check_saved(program, folder):
    """Both forms, of a state_dict with parameters, tied weights and a view, and of a training script's checkpoint."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 5, bias=False))
    model.register_buffer("turned", torch.randn(6, 4).t())
    model.register_parameter("tied", model[0].weight)
    made = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    made.update({f"kind.{name}": tensor for name, tensor in tensors().items()})
    saved = {"model": model.state_dict(), "kind": tensors(), "step": 5, "rope": torch.polar(torch.ones(3), torch.ones(3))}
    for zipped in (True, False):
        source, target = folder / f"saved{zipped}.pt", folder / f"from_saved{zipped}"
        torch.save(saved, source, _use_new_zipfile_serialization=zipped)
        check("of type complex64" in tool(program, "convert", source, target, status=2), "complex64 is named")
        tool(program, "convert", "--without", "rope", source, target)
        got = load_safetensors(target)
        check(got.keys() == made.keys(), f"names {sorted(got)}")
        for name, tensor in made.items():
            check(got.get(name, (0, 0, 0))[1:] == (list(tensor.shape), bytes_of(tensor)), f"saved {zipped}: {name}")
        check(json.loads((target / "objects.json").read_text()) == {"step": 5}, "objects of a file")


# ---- pieces in safetensors files ----

RANKS = {"embed.weight": (torch.float32, (13, 5)), "layers.0.w": (torch.bfloat16, (6, 4, 3)),
         "layers.0.count": (torch.int64, (7,)), "layers.1.half": (torch.float16, (2, 9)), "layers.1.wide": (torch.float64, (5, 8))}


def computed():
    """The tensors of dcp_ranks.c."""
    return {name: torch.tensor([(k * 7 + t * 31) % 201 - 100 for k in range(math.prod(shape))], dtype=torch.float64)
            .reshape(shape).to(kind) for t, (name, (kind, shape)) in enumerate(RANKS.items())}


def save_pieces(mesh, folder):
    parts = {name: distribute_tensor(tensor, mesh, [Shard(i % tensor.ndim)]) for i, (name, tensor) in enumerate(computed().items())}
    parts["layers.0.count"] = distribute_tensor(computed()["layers.0.count"], mesh, [Replicate()])
    dcp.save(parts, storage_writer=dcp.HuggingFaceStorageWriter(folder, save_distributed=True))


def load_pieces(mesh, folder):
    made = computed()
    parts = {name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard((i + 1) % tensor.ndim)])
             for i, (name, tensor) in enumerate(made.items())}
    dcp.load(parts, storage_reader=dcp.HuggingFaceStorageReader(folder))
    for name, tensor in made.items():
        if not torch.equal(parts[name].full_tensor(), tensor):
            raise AssertionError(f"{name} from {folder}")


def loads(ranks, folder, what):
    try:
        on_ranks(ranks, load_pieces, str(folder))
    except Exception as error:  # pylint: disable=broad-except
        check(False, f"{what}: {error}")


def check_pieces(program, ranks_program, folder):
    theirs = folder / "theirs"
    on_ranks(2, save_pieces, str(theirs))
    check(len(list(theirs.glob("shard-*.safetensors"))) == 2, "PyTorch writes a file for each rank")
    for ranks in (1, 2, 3):
        tool(ranks_program, "read", theirs, ranks)
    tool(program, "convert", theirs, folder / "joined")
    got = load_safetensors(folder / "joined")
    for name, tensor in computed().items():
        check(got[name][2] == bytes_of(tensor), f"{name} of joined pieces")
    loads(2, folder / "joined", "what convert made")
    for what in ("pieces", "whole"):
        for ranks in (1, 3):
            ours = folder / f"{what}{ranks}"
            ours.mkdir()
            tool(ranks_program, what, ours, ranks)
            loads(2, ours, f"{what} of {ranks} ranks")


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if sys.argv[1] == "--hf":
            check_pieces(sys.argv[2], sys.argv[3], folder)
        else:
            for ranks in (1, 2, 3):
                check_pickled(sys.argv[1], folder, ranks)
            check_pickled(sys.argv[1], folder, 2, "--max-shard-bytes", "1000")
            check_hostile(sys.argv[1], folder)
            check_saved(sys.argv[1], folder)
    print("failed" if failures else "passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
