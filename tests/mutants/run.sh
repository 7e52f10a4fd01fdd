#!/bin/sh
# Errors that composed frameworks are known for, as patches of src/: each is applied to a copy, and build/compose must find it.
#
#   sh tests/mutants/run.sh FOLDER    works in that folder; ends with `N passed, N failed`
#   MUTANTS="a.patch b.patch"         these alone
set -u
cd "$(dirname "$0")/../.." || exit 1
out=$1
passed=0 failed=0
for patch in ${MUTANTS:-tests/mutants/*.patch}; do
    copy=$out/$(basename "$patch" .patch)
    rm -rf "$copy" && mkdir -p "$copy" && cp -r src "$copy/" || exit 1
    if patch -d "$copy" -p1 -s <"$patch" &&
        ${CC:-cc} -std=c99 -O0 -w -D_POSIX_C_SOURCE=200809L -DXDISTILL_IMPLEMENTED -I"$copy/src" tests/compose/*.c \
            -x c tests/mutants/implementation.c -o "$copy/compose" -lm -lpthread; then
        if "$copy/compose" --seed 1 --count 400 --quick >"$copy/log" 2>&1 || ! grep -q '^seed' "$copy/log"; then
            echo "not found: $patch"
            failed=$((failed + 1))
        else
            passed=$((passed + 1))
            echo "$(basename "$patch" .patch): $(grep '^seed' "$copy/log")"
        fi
    else
        echo "does not apply, or does not compile: $patch"
        failed=$((failed + 1))
    fi
    rm -rf "$copy/src"
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
