"""What compare.py's rows stand on: its options, fair settings for both sides, an operation of ours as an arm, and the row itself."""

import argparse
import ctypes
import os
import sys

ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184", "MALLOC_TOP_PAD_": "268435456",
             "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []  # before PyTorch takes its own


def restart_with_fair_settings(threads):
    """An allocator that keeps its memory, and a core for each thread."""
    wanted = dict(ALLOCATOR, OMP_NUM_THREADS=str(threads))
    if len(CORES) >= threads:
        wanted.update(OMP_PROC_BIND="true", OMP_PLACES=",".join("{%d}" % core for core in CORES[:threads]))
    if any(os.environ.get(k) != v for k, v in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable] + sys.argv)


def parse():
    p = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("library", help="shim.c as a shared library")
    p.add_argument("-J", metavar="FILE", help="append the rows to FILE as JSON lines")
    p.add_argument("--only", default="", help="comma-separated beginnings of row names")
    p.add_argument("--size", type=float, default=1.0, help="factor on the sizes of the large rows")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--exclusive", action="store_true",
                   help="timed blocks go before all other work of the machine (SCHED_FIFO, needs root)")
    p.add_argument("--hot", action="store_true", help="add rows that stay in the cache")
    p.add_argument("--busy", action="store_true", help="processor time per thread instead of wall time")
    p.add_argument("--check", action="store_true", help="only check results, of all forms, and time nothing")
    p.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    return p.parse_args()


ARGS = parse()
restart_with_fair_settings(ARGS.threads)
try:
    import torch

    import machine
except ImportError:
    print("skipped: needs PyTorch")
    sys.exit(0)
ON_GPU = ARGS.device == "cuda"
if ON_GPU and not torch.cuda.is_available():
    print("skipped: needs a GPU and a PyTorch that can use it")
    sys.exit(0)
if ON_GPU: ARGS.threads = 1
torch.set_default_device(ARGS.device)


def thread_ids():
    """Of this process, where the system tells."""
    return [int(thread) for thread in os.listdir("/proc/self/task")] if os.path.isdir("/proc/self/task") else []


class Shim:
    """One operation of ours on given memory."""

    library = None

    @classmethod
    def load(cls, path):
        cls.library = lib = ctypes.CDLL(os.path.abspath(path))
        pointer, i64, real, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int
        forms = {
            "shim_loss": (pointer, integer, integer, i64, i64, pointer, pointer, pointer, pointer, real, ctypes.c_bool),
            "shim_head": (pointer, integer, i64, i64, i64, pointer, pointer, pointer, pointer, pointer),
            "shim_select": (pointer, integer, integer, i64, i64, pointer, i64),
            "shim_ema": (pointer, integer, i64, integer, pointer, real),
            "shim_adamw": (pointer, integer, i64, integer, pointer, integer, pointer, real),
            "shim_adamw_two": (pointer, integer, i64, pointer, pointer, real),
            "shim_norm": (pointer, integer, i64, integer, pointer),
            "shim_vsd": (pointer, integer, integer, i64, i64) + (pointer,) * 4,
            "shim_denoise": (pointer, integer, integer, i64, i64) + (pointer,) * 5,
            "shim_convert": (pointer, integer, integer, i64, i64) + (pointer,) * 4,
            "shim_gan": (pointer, integer, i64, i64) + (pointer,) * 4,
            "shim_probe": (pointer, integer, pointer, ctypes.c_bool), "shim_probed_bytes": (i64, pointer),
            "shim_unit": (pointer, integer, ctypes.c_bool), "shim_unit_count": (i64,),
            "shim_dots": (pointer, integer), "shim_dot_count": (i64,), "shim_extra_bytes": (i64, pointer),
            "shim_run": (None, pointer), "shim_close": (None, pointer), "shim_value": (real, pointer),
            "shim_ids": (None, pointer, pointer), "shim_average": (None, pointer, pointer),
            "shim_dtype": (integer, ctypes.c_bool), "shim_level": (ctypes.c_char_p,),
        }
        for name, (result, *arguments) in forms.items():
            if not hasattr(lib, name): continue  # the GPU's has not all
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments

    def __init__(self, kind, *arguments, threads=0):
        count = threads or ARGS.threads
        before = set(thread_ids())
        self.handle = getattr(self.library, "shim_" + kind)(count, *arguments)
        workers = sorted(set(thread_ids()) - before)
        if len(CORES) >= count and len(workers) == count - 1:  # the caller has the first core
            for worker, core in zip(workers, CORES[1:]): os.sched_setaffinity(worker, {core})

    def __call__(self):
        self.library.shim_run(self.handle)

    def value(self):
        return self.library.shim_value(self.handle)

    def close(self):
        self.library.shim_close(self.handle)


def dtype_of(tensor):
    return Shim.library.shim_dtype(tensor.dtype == torch.bfloat16)


def compiled(function):
    """The function under torch.compile, or None when that is left out."""
    return None if ARGS.no_compile else torch.compile(function, dynamic=False)


def distance(x, reference):
    x, reference = x.double(), reference.double()
    return float((x - reference).norm() / reference.norm())


class Row:
    """One comparison: `ours` is timed against the fastest of `forms`. Subclasses say what they compute, how many bytes it
    moves at least, and how far each side is from double precision."""

    limit = 1e-5  # largest relative error of an arm
    threads = 0   # 0: as many as the others
    powers = logarithms = products = reads = 0  # that the operation takes; reads: bytes of what it reads
    seconds = 0.0  # where the target is a time on all cores
    restore = None  # makes the inputs what they were, of operations that write over them

    def label(self):
        return self.op + (" " + self.dtype if self.dtype else "") + (" hot" if self.hot() else "")

    def floors(self, unit):
        """Seconds that each bound allows, from what one byte and one operation take."""
        return {"bytes": self.bytes * unit.get("bytes", 0.0), "reads": self.reads * unit.get("reads", 0.0),
                "flop": self.products * unit.get("products", 0.0),
                "sfu": self.powers * unit.get("powers", 0.0) + self.logarithms * unit.get("logarithms", 0.0),
                "latency": self.seconds}

    def hot(self):
        return self.footprint < 16 * cache_bytes()

    def close(self):
        self.ours.close()


def cache_bytes():
    """Of the last level."""
    return torch.cuda.get_device_properties(0).L2_cache_size if ON_GPU else machine.last_level_cache_bytes()
