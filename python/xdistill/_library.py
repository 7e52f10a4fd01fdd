"""The library beside this file, its errors, and its contexts: one for each thread."""

import ctypes
import mmap
import os
import pathlib
import threading
import weakref

try:
    from . import _api as api
except ImportError as error:
    raise ImportError("xdistill is not built: pip install ./python, or python3 python/build_xdistill.py") from error

PATH = pathlib.Path(__file__).resolve().parent / "libxdistill.so"


class Error(RuntimeError):
    """The library refused a call; the text is its own.

    result   the xd_result
    name     its name, "ERROR_SHAPE"
    rank     world rank of the context
    culprit  world rank that caused it; -1: unknown or this one
    """

    def __init__(self, result, message, rank=0, culprit=-1):
        self.result, self.rank, self.culprit = api.xd_result(result), rank, culprit
        self.name = self.result.name[len("XD_"):]
        super().__init__("%s: %s" % (self.name, message) if message else self.name)


def compare(version, sizes):
    """Refuses a library that is not what _api.py describes."""
    expected = [int(word) for word in api.VERSION.split(".")]
    found = [version // 10000, version // 100 % 100, version % 100]
    if found != expected:
        raise ImportError("xdistill: %s is version %s, the package is %s: install it again" % (
            PATH, ".".join(map(str, found)), api.VERSION))
    structs = [one for one in vars(api).values() if isinstance(one, type) and issubclass(one, ctypes.Structure)
               and "_fields_" in vars(one)]
    if len(structs) != len(sizes):
        raise ImportError("xdistill: %s has %d structs, the package %d: install it again" % (PATH, len(sizes), len(structs)))
    for struct, size in zip(structs, sizes):
        if ctypes.sizeof(struct) != size:
            raise ImportError("xdistill: %s has %d bytes in %s and %d in the package: install it again" % (
                struct.__name__, size, PATH, ctypes.sizeof(struct)))


def load():
    library = api.load(str(PATH))
    if hasattr(library, "xdistill_python_cuda"):  # a build with XDISTILL_CUDA=1
        library.xdistill_python_device.argtypes = [ctypes.c_void_p]
        library.xdistill_python_cuda.argtypes = [ctypes.POINTER(api.xd_ctx), ctypes.c_int, ctypes.POINTER(ctypes.POINTER(api.xd_cuda))]
    head = (ctypes.c_int64 * 2).in_dll(library, "xdistill_python_facts")
    facts = (ctypes.c_int64 * (2 + head[1])).in_dll(library, "xdistill_python_facts")
    compare(head[0], facts[2:])
    return library


lib = load()


def release_later(owner, function, handle, *keep):
    """Calls function(handle) when `owner` is gone; what stands in `keep` lives until then."""
    return weakref.finalize(owner, lambda handle, keep: function(handle), handle, keep)


def anonymous(size):
    """Private memory, of large pages where there are any; only what is touched is taken."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, size, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without them
    return memory


free = []  # blocks of gradients that are gone


def borrow(size):
    """A buffer of so many bytes. Its memory is used again when the buffer is gone: a new block costs a fault for every page."""
    fitting = [one for one in list(free) if size <= len(one) <= 2 * size]
    memory = None
    for one in sorted(fitting, key=len):
        try:
            free.remove(one)  # unless another thread was faster
            memory = one
            break
        except ValueError:
            pass
    if memory is None:
        memory = anonymous(size)
    buffer = (ctypes.c_char * size).from_buffer(memory)
    weakref.finalize(buffer, give_back, memory).atexit = False
    return buffer


def give_back(memory):
    free.append(memory)
    del free[:-KEPT]


KEPT = 2  # idle blocks


class Report(ctypes.Structure):
    """What a call on a GPU reads and writes there beside arrays."""

    _fields_ = [("values", ctypes.c_double * 16), ("status", api.xd_status), ("scale", ctypes.c_double)]


class Gpu:
    """A context's GPU: memory there for a Report and for the workspace."""

    def __init__(self, context, device):
        self.handle, gpu = context.handle, ctypes.POINTER(api.xd_cuda)()
        context.check(lib.xdistill_python_cuda(self.handle, device, ctypes.byref(gpu)))
        self.memory = lib.xd_ctx_kernels(self.handle).contents.memory
        self.taken = {}
        release_later(context, lib.xd_cuda_destroy, gpu)
        release_later(context, lambda gpu: list(map(gpu.release, list(gpu.taken))), self)

    def place(self, name, size):
        """Address and size of a block of this name, which grows."""
        address, has = self.taken.get(name, (None, 0))
        if has < size:
            self.release(name)
            address, has = self.memory.allocate(self.handle, size), size
            if not address:
                raise Error(api.XD_ERROR_MEMORY, "no room for %d bytes on the GPU" % size)
            self.taken[name] = address, has
        return address, has

    def release(self, name):
        self.memory.release(self.handle, self.taken.pop(name, (None, 0))[0])

    def write(self, report):
        """Copies a Report there; it must not change until it is read."""
        launch, address = lib.xd_ctx_launch(self.handle), self.place("report", ctypes.sizeof(Report))[0]
        self.memory.copy(ctypes.byref(launch), address, ctypes.byref(report), ctypes.sizeof(report), api.XD_COPY_TO_DEVICE)
        return address


class Context:
    """Threads, settings, error text and workspace of calls. Only one thread at a time may use it.

    threads    cores of a call; None: as many as this process may use
    invariant  results do not depend on how a batch is cut
    cpu        an xd_cpu_level; 0: the best
    device     the number of a GPU, for arrays there; None: arrays are on the CPU
    """

    def __init__(self, threads=None, invariant=False, cpu=0, device=None):
        self.threads, self.device = threads or available_threads(), device
        desc = api.xd_ctx_desc(threads=self.threads, cpu=cpu, reduction=api.XD_REDUCTION_INVARIANT if invariant else 0)
        self.handle = ctypes.POINTER(api.xd_ctx)()
        result = lib.xd_ctx_create(ctypes.byref(desc), ctypes.byref(self.handle))
        if result:
            raise Error(result, "no context of %d threads" % self.threads)
        release_later(self, lib.xd_ctx_destroy, self.handle)
        self.memory, self.vocabularies = None, {}
        self.gpu = None if device is None else Gpu(self, device)

    def check(self, result):
        """Raises what the last call reports."""
        if result:
            error = lib.xd_last_error(self.handle).contents
            message = error.message.decode("utf-8", "replace") if error.result == result else ""
            raise Error(result, message, error.rank, error.culprit)

    def call(self, name, *arguments):
        """lib.name(ctx, arguments...); raises Error."""
        self.check(getattr(lib, name)(self.handle, *arguments))

    def create(self, name, desc, kind):
        """What xd_..._create or _open of the desc makes: a pointer to `kind`."""
        handle = ctypes.POINTER(kind)()
        self.check(getattr(lib, name)(self.handle, ctypes.byref(desc), ctypes.byref(handle)))
        return handle

    def vocabulary(self, size):
        """The xd_vocab of so many columns, made once."""
        if size not in self.vocabularies:
            handle = self.create("xd_vocab_create", api.xd_vocab_desc(size=size), api.xd_vocab)
            release_later(self, lib.xd_vocab_destroy, handle)
            self.vocabularies[size] = handle
        return self.vocabularies[size]

    def workspace(self, size):
        """Address and size of memory for a call, kept for later ones."""
        if self.gpu:
            return self.gpu.place("workspace", size)
        if self.memory is None or len(self.memory) < size:
            self.memory = anonymous(size)
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory)), len(self.memory)

    def release_memory(self):
        self.memory = None
        if self.gpu:
            self.gpu.release("workspace")

    def compute(self, name, desc, common, out, place=None, scale=1.0, on_host=False):
        """Calls a loss with this context's workspace, which grows and is reused, and raises its data errors.

        common, place  parts of the desc: with `status` and `scale`, and with the workspace
        on_host        `out` and status are on the host even with a GPU
        """
        place, there = common if place is None else place, self.gpu is not None and not on_host
        report, planned = Report(scale=scale), api.xd_planned()
        base = self.gpu.write(report) if there else ctypes.addressof(report)
        common.status = ctypes.cast(base + Report.status.offset, ctypes.POINTER(api.xd_status))
        if scale != 1:
            common.scale = ctypes.cast(base + Report.scale.offset, ctypes.POINTER(ctypes.c_double))
        arguments = ctypes.byref(desc), ctypes.cast(base, ctypes.POINTER(type(out)))
        self.call("xd_plan_begin", None)
        result = getattr(lib, name)(self.handle, *arguments)
        try:
            self.check(result)
        finally:
            result = lib.xd_plan_end(self.handle, ctypes.byref(planned))
        self.check(result)
        if planned.workspace:
            place.workspace, place.workspace_bytes = self.workspace(planned.workspace)
        self.call(name, *arguments)
        if there:
            self.call("xd_read", ctypes.byref(report), base, ctypes.sizeof(report))
        report.status.nothing_counted = 0  # the loss is 0 then
        self.call("xd_status_check", ctypes.byref(report.status))
        return type(out).from_buffer_copy(report)


def available_threads():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Local(threading.local):
    """A thread's contexts by device, and the devices whose contexts `use` has set."""

    def __init__(self):
        self.contexts, self.chosen = {}, set()


local = Local()


def context(threads=None, device=None):
    """This thread's context of a device. Another number of threads makes a new one, unless `use` has set it."""
    current = local.contexts.get(device)
    if current is None or (threads and threads != current.threads and device is None and device not in local.chosen):
        current = local.contexts[device] = Context(threads, device=device)
    return current


def release_memory():
    """Frees the workspaces of this thread's contexts and the memory of gradients that are gone."""
    free.clear()
    for one in local.contexts.values():
        one.release_memory()


def use(context):
    """Makes calls of this thread use the context for arrays of its device; None: ones of its own again."""
    if context is None:
        for device in local.chosen:
            del local.contexts[device]
        local.chosen = set()
    else:
        local.contexts[context.device] = context
        local.chosen.add(context.device)
