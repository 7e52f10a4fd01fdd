"""Arrays of others, as the library reads them: address, type, shape. No element is copied or converted.

An array is a tensor of PyTorch, or anything with `__array_interface__` (NumPy), `__cuda_array_interface__` (CuPy), `__dlpack__`,
or a writable buffer (array.array). It stays the caller's, who keeps it until the call returns.
"""

import ctypes
import sys

from . import _api as api
from ._library import lib

# Letters of __array_interface__ and of buffers.
TYPES = {"b1": "BOOL", "u1": "U8", "i1": "I8", "i2": "I16", "u2": "U16", "f2": "F16", "i4": "I32", "u4": "U32", "f4": "F32",
         "f8": "F64", "i8": "I64", "u8": "U64"}
LETTERS = {"B": "u1", "b": "i1", "c": "u1", "?": "b1", "h": "i2", "H": "u2", "i": "i4", "I": "u4", "f": "f4", "d": "f8", "q": "i8",
           "Q": "u8", "l": "i%d" % ctypes.sizeof(ctypes.c_long), "L": "u%d" % ctypes.sizeof(ctypes.c_long)}
TORCH = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "int64": "I64", "int32": "I32",
         "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
         "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
NOTHING = ctypes.c_double()  # where arrays without elements are
DLPACK = {0: "i%d", 1: "u%d", 2: "f%d", 6: "b%d"}
CUDA = hasattr(lib, "xdistill_python_cuda")
NO_CUDA = "%s is on a GPU, and this build of xdistill computes on CPUs: XDISTILL_CUDA=1 pip install ./python makes one for both"


class Array:
    """Where the elements of an array are. Strides are in elements; device is the number of a GPU, or None."""

    __slots__ = ("address", "dtype", "shape", "strides", "owner", "device", "stream", "read_only")

    def __init__(self, address, dtype, shape, strides, owner, device=None, stream=None, read_only=False):
        self.shape, self.owner, self.device, self.stream, self.read_only = tuple(shape), owner, device, stream, read_only
        self.address = address or (ctypes.addressof(NOTHING) if 0 in self.shape else None)  # NULL would be an array that is not given
        self.dtype = getattr(api, "XD_DTYPE_" + dtype)
        self.strides = tuple(strides) if strides is not None else dense(self.shape)

    @property
    def size(self):
        return product(self.shape)

    @property
    def is_dense(self):
        return 0 in self.shape or all(size == 1 or stride == expected for size, stride, expected in
                                      zip(self.shape, self.strides, dense(self.shape)))

    def split(self, count):
        """As many equal parts: [i] for each i, or those of a dense array."""
        if self.shape[0] == count:
            step, shape, strides = self.strides[0], self.shape[1:], self.strides[1:]
        else:
            step, shape, strides = self.size // count, (self.size // count,), None
        size, dtype = lib.xd_dtype_size(self.dtype), api.xd_dtype(self.dtype).name[9:]
        return [Array(self.address + i * step * size, dtype, shape, strides, self.owner, self.device, self.stream, self.read_only)
                for i in range(count)]


def product(sizes):
    made = 1
    for size in sizes:
        made *= size
    return made


def dense(shape):
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def array(x, name="array", gpu=False, written=False):
    """The Array of x; TypeError or ValueError for what has none, is on a GPU unless `gpu`, or is read-only but `written`."""
    made = x if isinstance(x, Array) else found(x, name)
    if written and made.read_only:
        raise ValueError("%s is read-only, but would be written" % name)
    if made is not x and made.device is not None and not (gpu and CUDA):
        raise ValueError(("%s is on a GPU: copy it to the CPU first" if CUDA else NO_CUDA) % name)
    return made


def found(x, name):
    if hasattr(x, "data_ptr") and hasattr(x, "untyped_storage"):
        return of_torch(x, name)
    if hasattr(x, "__cuda_array_interface__"):
        about = x.__cuda_array_interface__
        device = lib.xdistill_python_device(about["data"][0]) if CUDA else 0
        return of_interface(x, name, about, max(device, 0), about.get("stream"))
    if hasattr(x, "__array_interface__"):
        return of_interface(x, name, x.__array_interface__)
    return of_dlpack(x, name) if hasattr(x, "__dlpack__") else of_buffer(x, name)


def of_interface(x, name, about, device=None, stream=None):
    kind, size = TYPES.get(about["typestr"][1:]), int(about["typestr"][2:])
    if kind is None or about["typestr"][0] == ">":
        raise TypeError("%s has elements of type %s, which the library does not know" % (name, about["typestr"]))
    strides = about.get("strides")
    if strides is not None:
        if any(stride % size for stride in strides):
            raise ValueError("%s has strides that are no whole elements" % name)
        strides = [stride // size for stride in strides]
    return Array(about["data"][0], kind, about["shape"], strides, x, device, stream, about["data"][1])


def torch_device(x):
    """The number of the GPU of a tensor; None: the CPU."""
    return x.device.index if x.device.type == "cuda" else None


def torch_stream(device):
    """PyTorch's current stream."""
    return sys.modules["torch"].cuda.current_stream(device).cuda_stream


def of_torch(x, name):
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError("%s is on the device %s" % (name, x.device))
    kind, device = TORCH.get(str(x.dtype).rpartition(".")[2]), torch_device(x)
    if kind is None or x.layout.__str__() != "torch.strided":
        raise TypeError("%s is %s, %s, which the library does not know" % (name, x.dtype, x.layout))
    if x.numel() and not x.untyped_storage().nbytes():
        raise ValueError("%s has no memory: its storage was freed" % name)
    return Array(x.data_ptr(), kind, x.shape, x.stride(), x, device, None if device is None else torch_stream(device))


def of_buffer(x, name):
    try:
        memory = memoryview(x)
    except TypeError:
        raise TypeError("%s is a %s, not an array" % (name, type(x).__name__)) from None
    kind = TYPES.get(LETTERS.get(memory.format.lstrip("@="), ""))
    if kind is None or memory.readonly or not memory.c_contiguous:
        raise TypeError("%s is a buffer of format %s that is read-only, strided or unknown" % (name, memory.format))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory.nbytes else 0
    return Array(address, kind, memory.shape, None, x)


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("offset", ctypes.c_uint64)]


capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype, capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def of_dlpack(x, name):
    """The capsule is not consumed: it goes back to its maker when the Array is gone."""
    kind, number = x.__dlpack_device__() if hasattr(x, "__dlpack_device__") else (1, 0)
    if kind not in (1, 2):
        raise ValueError("%s is on a device of DLPack's kind %d" % (name, kind))
    if kind == 2 and not CUDA:
        raise ValueError(NO_CUDA % name)
    capsule = x.__dlpack__()
    t = ctypes.cast(capsule_pointer(capsule, b"dltensor"), ctypes.POINTER(DLTensor)).contents
    dtype = "BF16" if (t.code, t.bits) == (4, 16) else TYPES.get(DLPACK.get(t.code, "%d") % (t.bits // 8))
    if dtype is None or t.lanes != 1:
        raise TypeError("%s has elements of DLPack's type (%d, %d, %d)" % (name, t.code, t.bits, t.lanes))
    return Array((t.data or 0) + t.offset, dtype, t.shape[:t.ndim], t.strides[:t.ndim] if t.strides else None, (x, capsule),
                 number if kind == 2 else None)


def rows(x, name="array"):
    """xd_rows of an array [..., columns]: every dimension but the last is a dimension of rows."""
    x = array(x, name)
    if not x.shape:
        raise ValueError("%s has no dimensions" % name)
    count, stride = 1, x.shape[-1]
    for size, step in reversed(list(zip(x.shape[:-1], x.strides[:-1]))):
        if size != 1:
            if count != 1 and step != count * stride:
                raise ValueError("%s has rows at uneven distances: copy it first" % name)
            stride = stride if count != 1 else step
        count *= size
    if (x.shape[-1] > 1 and x.strides[-1] != 1 or stride < x.shape[-1]) and 0 not in x.shape:
        raise ValueError("%s has rows with gaps between columns, or that overlap: copy it first" % name)
    return api.xd_rows(data=x.address, dtype=x.dtype, rows=count, cols=x.shape[-1], stride=stride)


def flat(x, name, count, *dtypes):
    """Address and dtype of a dense array of `count` elements and one of the types."""
    x = array(x, name)
    if x.size != count:
        raise ValueError("%s has %d elements, expected %d" % (name, x.size, count))
    if not x.is_dense:
        raise ValueError("%s is strided: copy it first" % name)
    if dtypes and x.dtype not in dtypes:
        raise TypeError("%s is %s, expected %s" % (name, api.xd_dtype(x.dtype).name[9:], " or ".join(one.name[9:] for one in dtypes)))
    return x.address, x.dtype
