#!/bin/sh
# The package in an empty environment: pip and cc make it from the tree and from a source distribution, without an index;
# then the tests that need nothing else.
#
#   sh tests/python/install.sh DIR    from the root; DIR is for the environment
#
# The library is compiled with -O0, since the tests look at what is there, not at its speed.
set -u
dir=$1
python=${PYTHON:-python3}
rm -rf "$dir/venv" "$dir/sdist"
mkdir -p "$dir/sdist"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' || { echo "needs Python 3.9"; exit 77; }
"$python" -m venv "$dir/venv" >/dev/null 2>&1 || { echo "needs the modules venv and ensurepip of $python"; exit 77; }

install() {
    env -u PYTHONPATH CC="${CC:-cc}" CFLAGS=-O0 "$dir/venv/bin/python" -m pip install -q --no-index --no-cache-dir --force-reinstall \
        --disable-pip-version-check "$1"
}

try() {
    env -u PYTHONPATH "$dir/venv/bin/python" "tests/python/$1.py" || exit 1
}

(cd python && "$python" -B -c 'import sys, build_xdistill; build_xdistill.build_sdist(sys.argv[1])' "$OLDPWD/$dir/sdist") || exit 1
env -u PYTHONPATH CC="${CC:-cc}" CFLAGS=-O0 "$dir/venv/bin/python" -m pip wheel -q --no-index --no-cache-dir --no-deps \
    --disable-pip-version-check -w "$dir/sdist" "$dir/sdist/"xdistill-*.tar.gz || exit 1
size=$(du -k "$dir/sdist/"xdistill-*.whl | cut -f 1)
[ "$size" -le 2048 ] || { echo "the wheel has $size KiB, more than 2048"; exit 1; }
install "$dir/sdist/"xdistill-*.whl || exit 1
try test_package
install ./python || exit 1
(cd / && "$OLDPWD/$dir/venv/bin/python" -c 'import sys, xdistill
assert xdistill.__file__.startswith(sys.prefix), xdistill.__file__') || exit 1
try test_package
try test_text
