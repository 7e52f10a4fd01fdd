#!/usr/bin/env python3
"""Say which functions of the users' part no program calls: python3 tools/check_surface.py

A function stays public because somebody needs it. Callers are examples, tools, bench programs, the companions, and programs in
README.md and docs/. Tests are no callers, and neither are lists such as docs/index.md. A macro that a program uses calls what
it is made of. check_docs.py asks for this with the limits below.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
UNCALLED, FUNCTIONS = 0, 380  # at most
CODE = {".c", ".h", ".cpp", ".cu", ".cuh", ".py", ".sh"}
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
CALL = re.compile(r"\bxd_\w+(?=\s*[(,;)}])|\bXD_\w+\b|\bxd\.(xd_\w+)")
MACRO = re.compile(r"^# *define +(\w+)((?:.*\\\n)*.*)", re.M)


def functions():
    """The functions of the users' part."""
    return re.findall(r"^function .*?\b(xd_\w+)\(", (ROOT / "docs/api.txt").read_text(), re.M)


def programs():
    """The text of each program, without comments."""
    for folder in ("examples", "bench", "tools", "src/mpi", "src/nccl"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in CODE and path.name != pathlib.Path(__file__).name:
                yield COMMENT.sub(" ", path.read_text(errors="replace"))
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in re.findall(r"^```(?:c|cpp|cuda)\n(.*?)^```", page.read_text(), re.S | re.M):
            yield COMMENT.sub(" ", block)


def called():
    """Names that programs use, and those that the macros among them use."""
    names = set()
    for text in programs():
        names.update(match.group(1) or match.group() for match in CALL.finditer(text))
    headers = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.h"))
    bodies = {name: set(re.findall(r"\bxd_\w+|\bXD_\w+", body)) for name, body in MACRO.findall(headers)}
    waiting = [name for name in names if name in bodies]
    while waiting:
        for name in bodies[waiting.pop()] - names:
            names.add(name)
            waiting += [name] if name in bodies else []
    return names


def check_surface():
    declared, names = functions(), called()
    uncalled = [name for name in declared if name not in names]
    if len(uncalled) > UNCALLED:
        yield "no example, tool, bench program or page calls %d functions, at most %d: %s" % (len(uncalled), UNCALLED, " ".join(uncalled))
    if len(declared) > FUNCTIONS:
        yield "docs/api.txt has %d functions, at most %d" % (len(declared), FUNCTIONS)


def main():
    declared, names = functions(), called()
    print("\n".join(name for name in declared if name not in names))
    print("%d functions, %d of them uncalled" % (len(declared), sum(name not in names for name in declared)))


if __name__ == "__main__":
    sys.exit(main())
