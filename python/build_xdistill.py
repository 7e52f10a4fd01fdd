"""Builds the Python package (PEP 517): the C compiler makes the library, tools/api.py the binding. Nothing else is needed.

    CC=cc            the compiler
    CFLAGS=-O2       its flags
    XDISTILL_CUDA=1  with the CUDA unit: nvcc compiles it, found by NVCC, CUDA_HOME or PATH
    CUDA_ARCHS=90    for these compute capabilities; unset: 8.0, 9.0 and 10.0

The header and the tools come from the repository around this folder; a source distribution carries them.

    python3 build_xdistill.py                            makes the package beside its sources, for PYTHONPATH
    python3 build_xdistill.py build/libxdistill.a DIR    makes it in DIR, from a library that exists
"""

import base64
import concurrent.futures
import hashlib
import io
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE if (HERE / "xdistill.h").exists() else HERE.parent
FROM_ROOT = ["xdistill.h", "xdistill_cuda.cu", "LICENSE", "NOTICE"] + [
    "tools/%s.py" % name for name in ("api", "api_ctypes", "declarations", "parts", "structs")]
SECTIONS = range(1, 7)  # of the implementation: xdistill.h says what they are


def version():
    numbers = re.findall(r"^#define XD_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", (ROOT / "xdistill.h").read_text(), re.M)
    return ".".join(numbers)


def metadata():
    project = dict(re.findall(r'^([\w-]+) = "(.*)"$', (HERE / "pyproject.toml").read_text(), re.M))
    return "Metadata-Version: 2.1\nName: xdistill\nVersion: %s\nSummary: %s\nRequires-Python: %s\n" % (
        version(), project["description"], project["requires-python"])


def sources():
    """The files of the package as they stand in the repository."""
    return sorted(path for path in (HERE / "xdistill").glob("*.py") if path.name != "_api.py")


# ---- the library ----

def compiler():
    return shlex.split(os.environ.get("CC", "cc"))


def call(command):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    sys.stdout.write(done.stdout)
    if done.returncode:
        raise SystemExit("xdistill: this command failed with %d:\n  %s" % (done.returncode, shlex.join(map(str, command))))


def write_binding(folder):
    """_api.py, and C text with what it assumes: the package compares both when it is imported."""
    environment = {**os.environ, "CC": shlex.join(compiler())}
    subprocess.run([sys.executable, str(ROOT / "tools" / "api.py"), "--root", str(ROOT), "--build", str(folder)], check=True,
                   env=environment)
    text = (folder / "xdistill_ctypes.py").read_text()
    (folder / "_api.py").write_text(text)
    names = re.findall(r"^class (\w+)\(Structure\):\n(?!    \"\"\"Only the library)", text, re.M)
    (folder / "facts.c").write_text(
        '#include "xdistill.h"\nextern const int64_t xdistill_python_facts[];\n'
        "const int64_t xdistill_python_facts[] = { XD_VERSION, %d%s };\n" % (
            len(names), "".join(",\n    (int64_t)sizeof(struct %s)" % name for name in names)))
    (folder / "unit.c").write_text('#define XDISTILL_IMPLEMENTATION\n#include "xdistill.h"\n')


CUDA_UNIT = """#include "xdistill_cuda.cu"

/* The GPU that has the memory, -1: none. */
extern "C" int xdistill_python_device(const void *address) {
    cudaPointerAttributes about;
    if (cudaPointerGetAttributes(&about, address) != cudaSuccess) return cudaGetLastError(), -1;
    return about.type == cudaMemoryTypeDevice || about.type == cudaMemoryTypeManaged ? about.device : -1;
}

/* xd_cuda_create on this GPU. */
extern "C" xd_result xdistill_python_cuda(xd_ctx *ctx, int device, xd_cuda **out) {
    int before = 0;
    cudaGetDevice(&before);
    XD_REQUIRE(ctx, cudaSetDevice(device) == cudaSuccess, XD_ERROR_DEVICE, "GPU %d: %s", device,
               cudaGetErrorString(cudaGetLastError()));
    const xd_result result = xd_cuda_create(ctx, NULL, out);
    cudaSetDevice(before);
    return result;
}
"""


def nvcc():
    """The compiler of the CUDA unit; None: a build for CPUs."""
    if os.environ.get("XDISTILL_CUDA", "0") in ("", "0"):
        return None
    home = os.environ.get("CUDA_HOME")
    found = os.environ.get("NVCC") or home and shutil.which("nvcc", path=os.path.join(home, "bin")) or shutil.which("nvcc")
    if not found:
        raise SystemExit("xdistill: XDISTILL_CUDA=1 needs nvcc: install NVIDIA's CUDA toolkit, and name its folder in CUDA_HOME")
    return found


def compile_library(folder, library=None):
    cuda, optimize = nvcc(), shlex.split(os.environ.get("CFLAGS", "-O2"))
    head = [*compiler(), "-std=c99", *optimize, "-fPIC", "-I", ROOT]
    jobs = [[*head, "-c", folder / "facts.c", "-o", folder / "facts.o"]]
    for section in SECTIONS if library is None else ():
        jobs.append([*head, "-DXDISTILL_SECTION=%d" % section, "-c", folder / "unit.c", "-o", folder / ("section%d.o" % section)])
    if cuda:
        (folder / "cuda.cu").write_text(CUDA_UNIT)
        targets = ["-gencode=arch=compute_%s,code=sm_%s" % (one, one) for one in os.environ.get("CUDA_ARCHS", "80 90 100").split()]
        jobs.insert(0, [cuda, "-O2", *targets, "-Xcompiler", "-fPIC", "-I", ROOT, "-c", folder / "cuda.cu", "-o", folder / "cuda.o"])
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(call, jobs))
    objects = [job[-1] for job in jobs]
    if library:
        objects += ["-Xlinker", "--whole-archive", library, "-Xlinker", "--no-whole-archive"]
    strip = ["-Xlinker", "-s"] if sys.platform.startswith("linux") else []
    call([*([cuda] if cuda else compiler()), "-shared", *strip, *objects, "-o", folder / "libxdistill.so", "-lm", "-lpthread"])


# ---- archives ----

class Wheel:
    """A wheel that is being written; each file is noted in RECORD."""

    def __init__(self, path):
        self.archive = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9)
        self.info = "xdistill-%s.dist-info/" % version()
        self.record = []

    def add(self, name, data, mode=0o644):
        entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
        entry.external_attr = (0o100000 | mode) << 16
        entry.compress_type = zipfile.ZIP_DEFLATED
        self.archive.writestr(entry, data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        self.record.append("%s,sha256=%s,%d" % (name, digest, len(data)))

    def close(self):
        name = self.info + "RECORD"
        self.archive.writestr(name, "\n".join([*self.record, name + ",,", ""]))
        self.archive.close()


def tag():
    return "py3-none-" + re.sub(r"[-.]", "_", sysconfig.get_platform())


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = "xdistill-%s-%s.whl" % (version(), tag())
    with tempfile.TemporaryDirectory() as folder:
        made = pathlib.Path(folder)
        write_binding(made)
        compile_library(made)
        wheel = Wheel(pathlib.Path(wheel_directory) / name)
        for path in sources():
            wheel.add("xdistill/" + path.name, path.read_bytes())
        wheel.add("xdistill/_api.py", (made / "_api.py").read_bytes())
        wheel.add("xdistill/libxdistill.so", (made / "libxdistill.so").read_bytes(), 0o755)
        wheel.add(wheel.info + "METADATA", metadata().encode())
        wheel.add(wheel.info + "WHEEL", (
            "Wheel-Version: 1.0\nGenerator: build_xdistill\nRoot-Is-Purelib: false\nTag: %s\n" % tag()).encode())
        for file in ("LICENSE", "NOTICE"):
            wheel.add(wheel.info + "licenses/" + file, (ROOT / file).read_bytes())
        wheel.close()
    return name


def build_sdist(sdist_directory, config_settings=None):
    base = "xdistill-%s" % version()
    with tarfile.open(pathlib.Path(sdist_directory) / (base + ".tar.gz"), "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for path in [HERE / "pyproject.toml", HERE / "build_xdistill.py", *sources()]:
            archive.add(path, "%s/%s" % (base, path.relative_to(HERE)))
        for name in FROM_ROOT:
            archive.add(ROOT / name, "%s/%s" % (base, name))
        entry = tarfile.TarInfo(base + "/PKG-INFO")
        entry.size = len(metadata().encode())
        archive.addfile(entry, io.BytesIO(metadata().encode()))
    return base + ".tar.gz"


def build_in_place(library=None, folder=HERE):
    """Makes the package in a folder for PYTHONPATH, from a static library of the header if there is one already."""
    with tempfile.TemporaryDirectory() as temporary:
        made = pathlib.Path(temporary)
        write_binding(made)
        compile_library(made, library)
        package = pathlib.Path(folder) / "xdistill"
        package.mkdir(parents=True, exist_ok=True)
        for path in [made / "_api.py", made / "libxdistill.so", *(sources() if package != HERE / "xdistill" else [])]:
            shutil.copy(path, package / path.name)


if __name__ == "__main__":
    build_in_place(*sys.argv[1:])
