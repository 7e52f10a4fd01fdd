"""What a result says of where it was measured: machine, system, compiler, commit and PyTorch, where there is one."""

import datetime
import os
import subprocess

try:
    import torch
except ImportError:
    torch = None


def output_of(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def git(*arguments):
    return output_of("git", "-C", os.path.dirname(os.path.abspath(__file__)), *arguments)


def read_line(path, prefix=""):
    """What follows the colon of the first line that begins so."""
    try:
        with open(path, encoding="utf-8") as file:
            return next((line.split(":", 1)[-1].strip() for line in file if line.startswith(prefix)), "unknown")
    except OSError:
        return "unknown"


def last_level_cache_bytes():
    """As the system reports it."""
    text = read_line("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return int(text[:-1]) * 1024 if text.endswith("K") else 32 << 20


def describe(threads, allocator):
    return {
        "cpu": read_line("/proc/cpuinfo", "model name"), "family": read_line("/proc/cpuinfo", "cpu family"),
        "model": read_line("/proc/cpuinfo", "model\t"), "stepping": read_line("/proc/cpuinfo", "stepping"),
        "threads": threads, "cores": os.cpu_count(), "llc_bytes": last_level_cache_bytes(),
        "huge_pages": read_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "compiler": output_of("cc", "--version").splitlines()[0], "flags": "-O2", "os": os.uname().release,
        "commit": git("rev-parse", "HEAD"), "dirty": git("status", "--porcelain") != "unknown",
        "torch": torch.__version__ if torch else "none", "allocator": allocator,
        "torch_isa": torch.backends.cpu.get_cpu_capability() if torch else "none",
        "utc": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
