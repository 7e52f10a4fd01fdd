#!/bin/sh
# The package with CUDA: what it says without nvcc; its losses through the emulation of tests/emu; and where nvcc is, built by
# pip and imported.
#
#   sh tests/python/cuda.sh DIR    from the root, after make lib; PYTHON runs the tests, those of tensors if it has PyTorch
dir=$1
python=$("${PYTHON:-python3}" -c "import sys; print(sys.executable)") || exit 1 # not a script of the name, which looks for bash
[ "${dir#/}" != "$dir" ] || dir=$PWD/$dir
rm -rf "$dir/emulated" "$dir/compiled"

said=$(cd python && env -u NVCC -u CUDA_HOME PATH="$dir/none" XDISTILL_CUDA=1 "$python" -B -c 'import build_xdistill; build_xdistill.nvcc()' 2>&1) && exit 1
[ "$said" = "xdistill: XDISTILL_CUDA=1 needs nvcc: install NVIDIA's CUDA toolkit, and name its folder in CUDA_HOME" ] || { echo "$said"; exit 1; }

CXX="${CXX:-g++} -fPIC" sh tests/emu/build.sh plain "$dir/emu" || exit 1
EMU="$dir/emu" XDISTILL_CUDA=1 NVCC="$PWD/tests/python/emulated_nvcc.sh" "$python" -B python/build_xdistill.py build/libxdistill.a "$dir/emulated" || exit 1
for setting in EMU_STREAMS=eager EMU_STREAMS=lazy; do
    env PYTHONPATH="$dir/emulated" "$setting" "$python" -B -W ignore tests/python/test_cuda.py || exit 1
done
# What reads the GPU's memory from the host dies here; tests of tensors do.
PYTHONPATH="$dir/emulated" EMU_HOST_FAULTS=1 "$python" -B tests/python/test_cuda.py Losses TwoTokenizers Places || exit 1

command -v "${NVCC:-nvcc}" >/dev/null 2>&1 || { echo "without nvcc: nothing is compiled by it"; exit 0; }
XDISTILL_CUDA=1 CUDA_ARCHS=90 CFLAGS=-O0 "$python" -m pip install -q --no-index --no-cache-dir --no-deps --disable-pip-version-check \
    --root-user-action ignore --target "$dir/compiled" ./python || exit 1
cd / && PYTHONPATH="$dir/compiled" "$python" -B -c '
import xdistill
try:
    print(xdistill.Context(device=0).device)
except xdistill.Error as error:  # without a GPU
    assert error.name == "ERROR_DEVICE" and "GPU 0: " in str(error), error
    print(error)'
