#!/usr/bin/env python3
"""Say which public functions no program calls: python3 tools/check_surface.py

A function stays public because somebody needs it. Callers are examples, tools, bench programs, the companions, and programs in
README.md and docs/. Tests are no callers, and neither are lists such as docs/index.md. A macro that a program uses calls what
it is made of. check_docs.py asks for this with the limits below. Functions for back ends that have no caller here are in KEPT,
with the reason.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
UNCALLED, FUNCTIONS = 0, 380  # at most, of the users' part
KEPT = {
    **dict.fromkeys(["xd_reduce_leaves"], "transports outside the tree add what they received"),
    **dict.fromkeys(["xd_json_kind_of", "xd_json_offset", "xd_json_at", "xd_json_key", "xd_json_uint64", "xd_json_write_uint64"],
                    "JSON is read and written as a whole"),
}
CODE = {".c", ".h", ".cpp", ".cu", ".cuh", ".py", ".sh"}
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
CALL = re.compile(r"\bxd_\w+(?=\s*[(,;)}])|\bXD_\w+\b|\bxd\.(xd_\w+)")
FUNCTION = re.compile(r"^XD_API\b[^;{(]*?\b(xd_\w+)\(", re.M)
MACRO = re.compile(r"^# *define +(\w+)((?:.*\\\n)*.*)", re.M)


def functions():
    """The functions of the users' part."""
    return re.findall(r"^function .*?\b(xd_\w+)\(", (ROOT / "docs/api.txt").read_text(), re.M)


def back_end_functions():
    """The functions of the part for back ends."""
    part = (ROOT / "src/xdistill.h").read_text().split("/* ---- for back ends ---- */")[1].split("/* ---- left out")[0]
    return [name for header in re.findall(r'^#include "(.*)"', part, re.M) for name in FUNCTION.findall((ROOT / "src" / header).read_text())]


def programs():
    """The text of each program, without comments."""
    for folder in ("examples", "bench", "tools", "src/cuda", "src/mpi", "src/nccl"):
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
    behind = back_end_functions()
    for name in behind:
        if name not in names and name not in KEPT:
            yield "no companion or program calls %s, and tools/check_surface.py has no reason to keep it for back ends" % name
    for name in KEPT:
        if name in names or name not in behind:
            yield "tools/check_surface.py has a reason to keep %s, which %s" % (name, "is called" if name in behind else "is no such function")


def main():
    names = called()
    for part, declared in ("users' part", functions()), ("part for back ends", back_end_functions()):
        uncalled = [name for name in declared if name not in names]
        print("\n".join(uncalled + ["%s: %d functions, %d of them uncalled" % (part, len(declared), len(uncalled))]))


if __name__ == "__main__":
    sys.exit(main())
