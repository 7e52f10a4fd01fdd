#!/usr/bin/env python3
"""xdistill convert on files of torch.save, which are made here without PyTorch: its pickles name functions of modules that are
made up, and the bytes are those that PyTorch writes.

    test_saved.py PROGRAM    PROGRAM is build/xdistill
"""

import collections
import io
import json
import pathlib
import pickle
import struct
import subprocess
import sys
import tempfile
import types
import zipfile

from checking import check, failures


# ---- what PyTorch's pickles name ----

for name in ("torch", "torch._utils", "torch.storage"):
    sys.modules[name] = types.ModuleType(name)


def made_up(module, name):
    def function(*_):
        raise RuntimeError(f"{module}.{name} was called")

    function.__module__, function.__name__, function.__qualname__ = module, name, name
    setattr(sys.modules[module], name, function)
    return function


REBUILD = made_up("torch._utils", "_rebuild_tensor_v2")
REBUILD_UNTYPED = made_up("torch._utils", "_rebuild_tensor_v3")
PARAMETER = made_up("torch._utils", "_rebuild_parameter")
UNTYPED = made_up("torch.storage", "UntypedStorage")
UINT16 = made_up("torch", "uint16")
TYPES = {"FloatStorage": "F32", "BFloat16Storage": "BF16", "LongStorage": "I64", "BoolStorage": "BOOL", "ByteStorage": "U8",
         "DoubleStorage": "F64", "HalfStorage": "F16", "ComplexFloatStorage": None}
BYTES = {"FloatStorage": 4, "BFloat16Storage": 2, "LongStorage": 8, "BoolStorage": 1, "ByteStorage": 1, "DoubleStorage": 8,
         "HalfStorage": 2, "ComplexFloatStorage": 8, "UntypedStorage": 1}
CLASSES = {name: made_up("torch", name) for name in TYPES}
CLASSES["UntypedStorage"] = UNTYPED


class Storage:
    def __init__(self, kind, data):
        self.kind, self.data = kind, data
        self.count = len(data) // BYTES[kind]


class Tensor:
    """A view of a storage."""

    def __init__(self, storage, shape, stride=None, offset=0):
        dense = [1]
        for size in reversed(shape[1:]):
            dense.insert(0, dense[0] * size)
        self.storage, self.shape, self.offset = storage, tuple(shape), offset
        self.stride = tuple(stride) if stride is not None else tuple(dense[:len(shape)])

    def __reduce__(self):
        if self.storage.kind == "UntypedStorage":
            return REBUILD_UNTYPED, (self.storage, self.offset, self.shape, self.stride, False, collections.OrderedDict(), UINT16)
        return REBUILD, (self.storage, self.offset, self.shape, self.stride, False, collections.OrderedDict())

    def expected(self):
        """The bytes of its elements in their order."""
        size = BYTES[self.storage.kind] if self.storage.kind != "UntypedStorage" else 2
        places = [self.offset]
        for extent, step in zip(self.shape, self.stride):
            places = [place + i * step for place in places for i in range(extent)]
        return b"".join(self.storage.data[p * size:(p + 1) * size] for p in places)


class Parameter:
    def __init__(self, tensor):
        self.tensor = tensor

    def __reduce__(self):
        return PARAMETER, (self.tensor, True, collections.OrderedDict())


class Versioned(collections.OrderedDict):
    """A state_dict: an OrderedDict with an attribute."""

    def __reduce__(self):
        return collections.OrderedDict, (), {"_metadata": collections.OrderedDict({"": {"version": 1}})}, None, iter(self.items())


class Pickler(pickle.Pickler):
    def __init__(self, to, legacy):
        super().__init__(to, protocol=2)
        self.legacy, self.storages = legacy, []

    def persistent_id(self, thing):
        if not isinstance(thing, Storage):
            return None
        if thing not in self.storages:
            self.storages.append(thing)
        key = str(94000000000000 + 64 * (9 - self.storages.index(thing))) if self.legacy else str(self.storages.index(thing))
        what = ("storage", CLASSES[thing.kind], key, "cpu", thing.count)
        thing.key = key
        return what + (None,) if self.legacy else what


def pickled(value, legacy=False):
    to = io.BytesIO()
    pickler = Pickler(to, legacy)
    pickler.dump(value)
    return to.getvalue(), pickler.storages


def save_zip(path, value, folder="archive", order=b"little", compression=zipfile.ZIP_STORED):
    text, storages = pickled(value)
    with zipfile.ZipFile(path, "w", compression) as to:
        to.writestr(f"{folder}/data.pkl", text)
        if order:
            to.writestr(f"{folder}/byteorder", order)
        for storage in storages:
            to.writestr(f"{folder}/data/{storage.key}", storage.data)
        to.writestr(f"{folder}/version", b"3\n")
        to.writestr(f"{folder}/.data/serialization_id", b"0" * 40)


def legacy(value, little=True):
    text, storages = pickled(value, True)
    out = pickle.dumps(0x1950a86a20f9469cfc6c, 2) + pickle.dumps(1001, 2)
    out += pickle.dumps({"protocol_version": 1001, "little_endian": little, "type_sizes": {"short": 2, "int": 4, "long": 4}}, 2)
    out += text + pickle.dumps(sorted(storage.key for storage in storages), 2)
    for storage in sorted(storages, key=lambda s: s.key):
        out += struct.pack("<q", storage.count) + storage.data
    return out


# ---- the tool ----


def load_safetensors(folder):
    out = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        data = path.read_bytes()
        length, = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8:8 + length]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                out[name] = (entry["dtype"], tuple(entry["shape"]), data[8 + length + begin:8 + length + end])
    return out


def convert(source, target, *options):
    done = subprocess.run([PROGRAM, "convert", *options, str(source), str(target)], capture_output=True, text=True)
    return done.returncode, done.stderr


def refuse(source, target, says, *options):
    status, message = convert(source, target, *options)
    check(status == 2 and says in message, f"{source}: {status}, {message!r} and not {says!r}")
    check(not target.exists(), f"{source}: something is left")


# ---- values ----


def model():
    flat = Storage("FloatStorage", struct.pack("<24f", *range(24)))
    tied = Tensor(flat, (4, 6))
    return Versioned([("embed.weight", Parameter(tied)), ("head.weight", tied), ("turned", Tensor(flat, (6, 4), (1, 6))),
                      ("part", Tensor(flat, (2, 3), (6, 1), 7)), ("ids", Tensor(Storage("LongStorage", struct.pack("<3q", 1, -2, 3)), (3,))),
                      ("scalar", Tensor(Storage("DoubleStorage", struct.pack("<d", 2.5)), ())),
                      ("none", Tensor(Storage("BFloat16Storage", b""), (0, 4))),
                      ("mask", Tensor(Storage("BoolStorage", b"\1\0\1\1"), (4,))),
                      ("words", Tensor(Storage("UntypedStorage", struct.pack("<4H", 1, 2, 3, 65535)), (2, 2)))])


def checkpoint():
    rope = Tensor(Storage("ComplexFloatStorage", struct.pack("<4f", 1, 2, 3, 4)), (2,))
    moment = Tensor(Storage("FloatStorage", struct.pack("<2f", 5, 6)), (2,))
    return {"model": {"w": Tensor(Storage("HalfStorage", b"abcdef"), (3,)), "rope": rope}, "step": 7, "args": {"lr": 0.5, "names": ["a", "b"]},
            "optimizer": {"state": {0: {"exp_avg": moment, "step": 3}}, "groups": [{"params": [0]}]}}


def tensors_of(value):
    return {name: t.tensor if isinstance(t, Parameter) else t for name, t in value.items()}


def check_model(source, target):
    status, message = convert(source, target)
    check(status == 0, f"{source}: {message}")
    if status:
        return
    got, want = load_safetensors(target), tensors_of(model())
    check(got.keys() == want.keys(), f"{source}: names {sorted(got)}")
    for name, tensor in want.items():
        kind = TYPES.get(tensor.storage.kind, "U16")
        check(got.get(name) == (kind, tensor.shape, tensor.expected()), f"{source}: {name} is {got.get(name)}")
    check(not (target / "objects.json").exists(), "objects of a model")


def check_checkpoint(source, folder):
    refuse(source, folder / "no", "tensor \"model.rope\" is of type complex64, which cannot be converted; --without model.rope")
    for i, options in enumerate((("--without", "model.rope"), ("--without", "model.rope", "--tensors-only"))):
        target = folder / f"yes{i}"
        status, message = convert(source, target, *options)
        check(status == 0, f"{source}: {message}")
        got = load_safetensors(target)
        check(got == {"model.w": ("F16", (3,), b"abcdef"), "optimizer.state.0.exp_avg": ("F32", (2,), struct.pack("<2f", 5, 6))},
              f"{source}: {got}")
        objects = json.loads((target / "objects.json").read_text()) if (target / "objects.json").exists() else None
        check(objects == (None if i else {"step": 7, "args": {"lr": 0.5, "names": ["a", "b"]}, "optimizer.state.0.step": 3,
                                          "optimizer.groups": [{"params": [0]}]}), f"{source}: objects {objects}")
    status, message = convert(source, folder / "selected", "--select", "optimizer.state.")
    check(status == 0 and load_safetensors(folder / "selected").keys() == {"0.exp_avg"}, f"{source}: {message}")


def check_forms(folder):
    save_zip(folder / "zip.bin", model())
    save_zip(folder / "old.pt", model(), "pytorch_model", None)
    (folder / "legacy.bin").write_bytes(legacy(model()))
    for name in ("zip.bin", "old.pt", "legacy.bin"):
        check_model(folder / name, folder / f"from-{name}")
    (folder / "single").mkdir()
    save_zip(folder / "single" / "pytorch_model.bin", model())
    check_model(folder / "single", folder / "from-single")
    parts = folder / "parts"
    parts.mkdir()
    names = list(model())
    for i in range(2):
        save_zip(parts / f"pytorch_model-0000{i + 1}-of-00002.bin", dict(list(model().items())[4 * i:4 * i + 4 + i]))
    index = {"metadata": {}, "weight_map": {name: f"pytorch_model-0000{1 + (i > 3)}-of-00002.bin" for i, name in enumerate(names)}}
    (parts / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    check_model(parts, folder / "from-parts")
    for form in ("zip", "legacy"):
        (folder / form).mkdir()
        path = folder / form / "checkpoint.pt"
        save_zip(path, checkpoint()) if form == "zip" else path.write_bytes(legacy(checkpoint()))
        check_checkpoint(path, folder / form)


class Hostile:
    def __reduce__(self):
        return subprocess.call, (["touch", "/tmp/xdistill-was-executed"],)


def check_lies(folder):
    """What a file says that it is not: a message, and nothing is left."""
    target = folder / "no"
    whole = legacy(model())
    lies = {
        "a call": (lambda p: save_zip(p, {"w": model()["turned"], "x": Hostile()}), ".call\" is not in the list of classes"),
        "a call in the older form": (lambda p: p.write_bytes(legacy({"x": Hostile()})), ".call\" is not in the list of classes"),
        "no dict": (lambda p: save_zip(p, 7), "no dict of tensors"),
        "no list": (lambda p: p.write_bytes(whole[:len(whole) - 200]), ""),
        "an end": (lambda p: p.write_bytes(whole + b"x"), "1 bytes behind the last storage"),
        "nothing": (lambda p: p.write_bytes(b""), "neither a zip archive nor the older form"),
        "a pointer": (lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
                      "is a pointer of Git LFS, not the file itself"),
        "another order": (lambda p: save_zip(p, model(), order=b"big"), "its byte order is not \"little\""),
        "another order of old": (lambda p: p.write_bytes(legacy(model(), False)), "the byte order is not \"little\""),
        "a packed entry": (lambda p: save_zip(p, model(), compression=zipfile.ZIP_DEFLATED), "is packed"),
        "a tensor outside": (lambda p: save_zip(p, {"w": Tensor(Storage("FloatStorage", b"x" * 8), (3,))}), "a tensor of 3 elements in a storage of 2"),
        "a stride outside": (lambda p: save_zip(p, {"w": Tensor(Storage("FloatStorage", b"x" * 8), (2,), (2,))}), "the last element is 2 of a storage of 2"),
        "a name twice": (lambda p: save_zip(p, {"a": {"b": model()["turned"]}, "a.b": model()["turned"]}), "both named \"a.b\""),
    }
    for name, (write, says) in lies.items():
        write(folder / "lie.bin")
        refuse(folder / "lie.bin", target, says)
    check(not pathlib.Path("/tmp/xdistill-was-executed").exists(), "something was executed")
    save_zip(folder / "damaged.bin", model())
    data = bytearray((folder / "damaged.bin").read_bytes())
    at = data.index(struct.pack("<24f", *range(24)))
    data[at + 5] ^= 1
    (folder / "damaged.bin").write_bytes(data)
    refuse(folder / "damaged.bin", target, "has checksum")
    shared = [1]
    for _ in range(40):
        shared = [shared, shared]
    save_zip(folder / "wide.bin", {"w": model()["turned"], "wide": shared})
    refuse(folder / "wide.bin", target, "more than")
    for length in range(0, len(whole), 23):
        (folder / "cut.bin").write_bytes(whole[:length])
        status, _ = convert(folder / "cut.bin", target)
        check(status == 2 and not target.exists(), f"{length} bytes of {len(whole)} are a file")


PROGRAM = str(pathlib.Path(sys.argv[1]).resolve())
with tempfile.TemporaryDirectory() as root:
    check_forms(pathlib.Path(root))
    check_lies(pathlib.Path(root))
print("files of torch.save are converted" if not failures else f"{len(failures)} failures")
sys.exit(bool(failures))
