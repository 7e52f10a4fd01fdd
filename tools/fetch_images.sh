#!/bin/sh
# Fashion-MNIST as idx files in build/images: from the Debian package dataset-fashion-mnist where it is installed, else from
# apt's archive, without installing it. The last line is `N files ready, N skipped`; the status is 0 when none is skipped.
#
#   tools/fetch_images.sh [DIRECTORY]      build/images; files that are there already are kept
#   IMAGES_DEB=FILE                        a copy of the package instead of apt's
set -u
out=${1:-build/images}
package=dataset-fashion-mnist
folder=usr/share/datasets/fashion-mnist
ready=0 skipped=0 why=
mkdir -p "$out" || exit 1
source=/$folder

names='b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7 train-images-idx3-ubyte
0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056 train-labels-idx1-ubyte
cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa t10k-images-idx3-ubyte
8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05 t10k-labels-idx1-ubyte'

# unpack: $source becomes a folder with the package's files; $why says what is in the way.
unpack() {
    deb=${IMAGES_DEB:-}
    command -v dpkg >/dev/null 2>&1 || { why="$package is not installed and there is no dpkg"; return 1; }
    if [ -z "$deb" ]; then
        command -v apt-get >/dev/null 2>&1 || { why="$package is not installed and there is no apt-get"; return 1; }
        echo "fetching $package, 31 MB"
        (cd "$out" && rm -f "$package"_*.deb && apt-get download "$package") >"$out/apt.log" 2>&1 ||
            { why="apt-get download $package failed, see $out/apt.log"; return 1; }
        deb=$(ls "$out/$package"_*.deb)
    fi
    dpkg -x "$deb" "$out/package" 2>"$out/dpkg.log" || { why="dpkg -x $deb failed, see $out/dpkg.log"; return 1; }
    source=$out/package/$folder
}

# take NAME SUM: one file, checked and decompressed; a name appears when its file is complete.
take() {
    [ -s "$out/$1" ] && return
    [ -s "$source/$1.gz" ] || { why=${why:-"$source/$1.gz is missing"}; return 1; }
    echo "$2  $source/$1.gz" | sha256sum -c - >/dev/null 2>&1 || { why="$source/$1.gz has another sha256 sum"; return 1; }
    gzip -dc "$source/$1.gz" >"$out/$1.part" && mv "$out/$1.part" "$out/$1" || { why="$1.gz cannot be decompressed"; return 1; }
}

for name in train-images-idx3 train-labels-idx1 t10k-images-idx3 t10k-labels-idx1; do
    [ -s "$out/$name-ubyte" ] || [ -s "$source/$name-ubyte.gz" ] || { unpack; break; }
done
while read -r sum name; do
    if take "$name" "$sum"; then
        ready=$((ready + 1))
    else
        skipped=$((skipped + 1))
    fi
done <<END
$names
END
rm -rf "$out/package" "$out/$package"_*.deb "$out"/*.part
[ "$skipped" -ne 0 ] || rm -f "$out/apt.log" "$out/dpkg.log"
echo "$out: $ready files ready, $skipped skipped${why:+: $why}"
[ "$skipped" -eq 0 ]
