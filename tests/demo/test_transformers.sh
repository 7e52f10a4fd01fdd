#!/bin/sh
# Hugging Face transformers opens the teacher, and students of short runs of two demonstrations and of the tool: see check_transformers.py.
# So it does a GPT-2 of its own that an example has read and written: see check_gpt2_names.py.
#
#   sh tests/demo/test_transformers.sh     from the root
#
# PyTorch and transformers go into build/transformers, 2.4 GB, and stay there; VENV names another place. Status 77
# when they cannot be had. Of the CUDA libraries that PyTorch asks for only those are fetched that no CUDA toolkit
# brings; where the machine has no toolkit either, all of them, 6 GB.
set -u
venv=${VENV:-build/transformers}
run=build/transformers-run

ready() { HF_HUB_OFFLINE=1 "$venv/bin/python" -c 'import torch, transformers' 2>/dev/null; }

pip() { timeout 400 "$venv/bin/python" -m pip install -q --no-compile --disable-pip-version-check "$@"; }

install() {
    rm -rf "$venv"
    python3 -m venv "$venv" || return 1
    pip --no-deps torch==2.15.0 nvidia-cufile 'nvidia-cusparselt-cu13==0.8.1' 'nvidia-nvshmem-cu13==3.7.2' \
        'nvidia-nccl-cu13==2.30.7' || return 1
    pip numpy transformers==5.23.0 safetensors typing_extensions sympy networkx jinja2 fsspec filelock || return 1
    ready || pip torch==2.15.0
}

if ! ready; then
    install
    ready || { echo "needs torch and transformers from a package index"; exit 77; }
fi
make --no-print-directory build/demo build/demo-sharded build/xdistill build/examples/16_gpt2_names || exit 1
build/demo --steps 8 --heldout-bytes 2000 --out "$run" --overwrite || exit 1
build/demo-sharded --steps 8 --out "$run/sharded" --overwrite || exit 1
build/xdistill distil --teacher data/teacher --text data/kjv_heldout.txt --out "$run/distil" --steps 8 --no-alone --overwrite || exit 1
build/xdistill distil --teacher data/teacher --text data/kjv_student.txt --report-text data/kjv_heldout.txt --out "$run/own" \
    --layers 2 --tokenizer data/student/tokenizer.json --steps 4 --live --alone --overwrite || exit 1
"$venv/bin/python" tests/demo/check_gpt2_names.py build/examples/16_gpt2_names "$run/gpt2" || exit 1
"$venv/bin/python" tests/demo/check_transformers.py build/demo data/kjv_heldout.txt data/teacher "$run/student" "$run/sharded/student" "$run/distil/student" "$run/own/student" "$run/own/alone"
