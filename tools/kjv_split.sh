#!/bin/sh
# Splits the King James text into whole chapters: the held-out text, the student's text, the teacher's text.
#
#   usage: tools/kjv_split.sh OUT_DIR          needs the Debian packages bible-kjv and bible-kjv-text
#
# Chapters are numbered 0..1188 in book order. Chapters 10, 30, 50, ... are held out from both; chapters
# 3, 13, 23, ... are the student's text; the teacher reads everything that is not held out. The verse numbers are
# dropped: one verse per line, an empty line between chapters.
set -eu
out=${1:?usage: tools/kjv_split.sh OUT_DIR}
mkdir -p "$out"
bible -f "gen1:1-rev22:21" | awk -v out="$out" '
    function put(file) {
        if (seen[file] && last[file] != chapter) print "" > file
        print > file
        seen[file] = 1
        last[file] = chapter
    }
    BEGIN { chapter = -1 }
    {
        key = $1
        sub(/:.*/, "", key)
        if (key != previous) { chapter++; previous = key }
        sub(/^[^ ]+ /, "")
        if (chapter % 20 == 10) { put(out "/kjv_heldout.txt"); next }
        put(out "/kjv_teacher.txt")
        if (chapter % 10 == 3) put(out "/kjv_student.txt")
    }
    END { if (chapter != 1188) { print "expected 1189 chapters, got " chapter + 1 > "/dev/stderr"; exit 1 } }'
