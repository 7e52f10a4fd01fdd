#!/usr/bin/env python3
"""Apply the table of docs/renames.md to files, word by word: tools/rename.py FILE...

Prints the files that changed. Running it twice changes nothing more."""

import pathlib
import re
import sys

TABLE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "renames.md"
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \|", re.M)


def main():
    names = dict(ROW.findall(TABLE.read_text()))
    word = re.compile(r"\b(%s)\b" % "|".join(sorted(names, key=len, reverse=True)))
    for path in map(pathlib.Path, sys.argv[1:]):
        text = path.read_bytes().decode("latin-1")  # any bytes go through unchanged
        renamed = word.sub(lambda match: names[match.group()], text)
        if renamed != text:
            path.write_bytes(renamed.encode("latin-1"))
            print(path)


if __name__ == "__main__":
    main()
