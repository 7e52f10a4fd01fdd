"""Weights in safetensors files and Hugging Face directories. Types keep their bits; bf16 and 8-bit floats have names only."""

import collections.abc
import ctypes
import os

from . import _api as api
from ._arrays import array, product
from ._library import Context, lib, release_later


class Weights(collections.abc.Mapping):
    """Open weights: a mapping of names to their bytes.

    path  a .safetensors file, or a directory with model.safetensors, an index, or several files
    """

    def __init__(self, path):
        self.context, path = Context(1), os.fspath(path)
        place = {"directory" if os.path.isdir(path) else "file": os.fsencode(path)}
        self.handle = self.context.create("xd_weights_open", api.xd_weights_desc(**place), api.xd_weights)
        release_later(self, lib.xd_weights_close, self.handle, self.context)
        self.count = lib.xd_weights_describe(self.handle).tensor_count

    def at(self, name):
        index = lib.xd_weights_find(self.handle, name.encode())
        if index < 0:
            raise KeyError(name)
        return index, lib.xd_weights_at(self.handle, index).contents

    def __iter__(self):
        return (lib.xd_weights_at(self.handle, i).contents.name.decode() for i in range(self.count))

    def __len__(self):
        return self.count

    def shape(self, name):
        about = self.at(name)[1]
        return tuple(about.shape[:about.ndim])

    def dtype(self, name):
        """As in the file: "BF16"."""
        return self.at(name)[1].type.decode()

    def metadata(self, key):
        value = lib.xd_weights_metadata(self.handle, key.encode())
        return None if value is None else value.decode()

    def __getitem__(self, name):
        """The tensor's bytes, a new bytearray: numpy.frombuffer and torch.frombuffer read it."""
        index, about = self.at(name)
        data = bytearray(product(self.shape(name)) * lib.xd_dtype_size(about.dtype))
        memory = (ctypes.c_char * len(data)).from_buffer(data) if data else None
        self.context.check(lib.xd_weights_read(self.handle, index, None, memory))
        return data

    def read_into(self, name, out):
        """Copies the tensor to a dense array of its shape and type."""
        index, about = self.at(name)
        out = array(out, "out", written=True)
        if out.shape != self.shape(name) or out.dtype != about.dtype or not out.is_dense:
            raise ValueError("%s is %s %s; out is %s %s, %s" % (
                name, self.dtype(name), self.shape(name), api.xd_dtype(out.dtype).name[9:], out.shape,
                "dense" if out.is_dense else "strided"))
        self.context.check(lib.xd_weights_read(self.handle, index, None, out.address))


def save_weights(path, tensors, metadata=None, max_shard_bytes=0):
    """Writes dense arrays by name to a .safetensors file, or to a directory that exists, with shards and an index where needed.

    The file, or the directory's model, is replaced in one step when all is written.
    """
    ctx, path = Context(1), os.fspath(path)
    kept = [(name.encode(), array(x, name)) for name, x in tensors.items()]
    for name, x in kept:
        if not x.is_dense:
            raise ValueError("%s is strided: copy it first" % name.decode())
    entries = (api.xd_weights_entry * len(kept))(*[
        api.xd_weights_entry(name=name, dtype=x.dtype, ndim=len(x.shape), shape=(ctypes.c_int64 * len(x.shape))(*x.shape))
        for name, x in kept])
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError("metadata has %r: %r, and both must be a str" % (key, value))
    pairs = (api.xd_weights_pair * len(metadata or {}))(*[
        api.xd_weights_pair(key.encode(), value.encode()) for key, value in (metadata or {}).items()])
    desc = api.xd_weights_writer_desc(entries=entries, entry_count=len(kept), metadata=pairs, metadata_count=len(pairs),
                                      max_shard_bytes=max_shard_bytes)
    setattr(desc, "directory" if os.path.isdir(path) else "file", os.fsencode(path))
    writer = ctx.create("xd_weights_writer_create", desc, api.xd_weights_writer)
    try:
        for index, (_, x) in enumerate(kept):
            ctx.check(lib.xd_weights_writer_write(writer, index, 0, api.XD_WEIGHTS_REST, x.address))
    except BaseException:
        lib.xd_weights_writer_abort(writer)
        raise
    ctx.check(lib.xd_weights_writer_commit(writer))
