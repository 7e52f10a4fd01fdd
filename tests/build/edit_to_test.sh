#!/bin/sh
# What an edit costs until its test can run: one file of each layer is touched, and a test is built again.
#
#   make edit-to-test                                  a line for each layer, in seconds of processors
#   make edit-to-test ARGS=SANITIZE=address            the same, sanitized
#
# It fails when a layer takes more than 3 seconds, or more than 8 in the kernel layers; three times that with SANITIZE.
set -u
test=${TEST:-test_loss}
case "$*" in *SANITIZE=*) times=3 ;; *) times=1 ;; esac
program=$(make -s --no-print-directory "$@" print-test-dir)/$test
make -s --no-print-directory "$@" "$program" || exit 1

# Seconds of all processors that a command took, with those it waited for.
seconds() {
    { LC_ALL=C bash -c 'TIMEFORMAT="%U %S"; time "$@" >/dev/null' sh "$@"; } 2>&1 | awk 'END { printf "%.2f", $1 + $2 }'
}

status=0
printf '%-12s  %-28s %7s %5s\n' layer touched seconds most
for layer in $(sed -n 's|^#include "\(.*\)/[^/]*\.c"$|\1|p' src/xdistill.h | sort -u); do
    case $layer in kernel*) most=$((8 * times)) ;; *) most=$((3 * times)) ;; esac
    longest=0 # of the layer's objects, which take every n-th of its files, four at most
    for file in $(sed -n "s|^#include \"\($layer/[^/]*\.c\)\"\$|src/\1|p" src/xdistill.h | head -n 4); do
        touch "$file"
        took=$(seconds make -s --no-print-directory "$@" "$program")
        if awk "BEGIN { exit !($took > $longest) }"; then longest=$took touched=$file; fi
    done
    mark=
    awk "BEGIN { exit !($longest > $most) }" && mark=' too long' status=1
    printf '%-12s  %-28s %7s %5s%s\n' "$layer" "$touched" "$longest" "$most" "$mark"
done
exit $status
