#!/bin/sh
# Errors that composed frameworks are known for, as patches of src/: each is applied to a copy, and build/compose must find it;
# or, where a line `found by tests/test_NAME.c` stands before the patch, that test: what wrapped training does not reach.
#
#   sh tests/mutants/run.sh FOLDER    works in that folder; ends with `N passed, N failed`
#   MUTANTS="a.patch b.patch"         these alone
#
# The library is compiled once, each part by itself; then, for each patch, the parts that are made from the file it changes.
set -u
cd "$(dirname "$0")/../.." || exit 1
out=$1
compiler="${CC:-cc} -std=c99 -O0 -w -D_POSIX_C_SOURCE=200809L"
# What neither compose nor those tests reach is not compiled.
without='^src/(text|xtoken|teacher|compat|dmd|align|mpi|nccl)/'
passed=0 failed=0

object_of() { echo "$1" | sed 's|/|-|g; s|\.c$|.o|'; }

# Parts of the library in a folder that has src/, as objects in another.
compile_parts() {
    from=$1 to=$2
    shift 2
    for part in "$@"; do
        object=$to/$(object_of "$part")
        (cd "$from" && $compiler -Isrc -DXDISTILL_IMPLEMENTATION -DXD_PRIVATE=extern -MMD -MF "$object.d" \
            -c "$part" -o "$object") || return 1
    done
}

# Objects of a program that looks for errors.
compile_finder() {
    for source in "$@"; do
        object=$out/finders/$(object_of "$source")
        [ -e "$object" ] ||
            $compiler -DXDISTILL_IMPLEMENTED -Isrc -Itests/helpers -c "$source" -o "$object" || return 1
        echo "$object"
    done
}

# A copy of src/ with the patch, and in it the parts that this changes.
compile_mutant() {
    cp -r src "$copy/" && patch -d "$copy" -p1 -s <"$patch" || return 1
    changed=$(sed -n 's|^+++ b/||p' "$patch")
    parts=
    for file in $changed; do
        parts="$parts $(cd "$out/parts" && grep -l -- " $file" ./*.d | sed 's|^\./||; s|\.o\.d$|.c|; s|-|/|g')"
    done
    compile_parts "$copy" "$copy" $(echo "$parts" | tr ' ' '\n' | sort -u)
}

out=$(mkdir -p "$out/parts" "$out/finders" && cd "$out" && pwd) || exit 1
compile_parts . "$out/parts" $(find src -name '*.c' | grep -Ev "$without") || exit 1
rm -f "$out/library.a" && ar rc "$out/library.a" "$out"/parts/*.o || exit 1
for patch in ${MUTANTS:-tests/mutants/*.patch}; do
    copy=$out/$(basename "$patch" .patch)
    rm -rf "$copy" && mkdir -p "$copy" || exit 1
    test=$(sed -n 's/^found by //p' "$patch")
    sign='^seed' options='--seed 1 --count 400 --quick'
    [ -z "$test" ] || sign='^FAILED' options=
    # Their objects come first: what they define is not taken from the library.
    if compile_mutant && finder=$(compile_finder ${test:-tests/compose/*.c}) &&
        ${CC:-cc} "$copy"/*.o $finder "$out/library.a" -o "$copy/finder" -lm -lpthread; then
        if "$copy/finder" $options >"$copy/log" 2>&1 || ! grep -q "$sign" "$copy/log"; then
            echo "not found: $patch"
            failed=$((failed + 1))
        else
            passed=$((passed + 1))
            echo "$(basename "$patch" .patch): $(grep "$sign" "$copy/log" | head -n 1)"
        fi
    else
        echo "does not apply, or does not compile: $patch"
        failed=$((failed + 1))
    fi
    rm -rf "$copy/src"
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
