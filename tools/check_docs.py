#!/usr/bin/env python3
"""Fail when the documentation and the code disagree.

  comments   every XD_API function and every public type in src/ has a comment directly above it
  snippets   every ```c block of README.md that holds a main() compiles without a warning
  fragments  every ```c block of docs/ compiles after tools/fragments.h, which declares what a page does not
  options    docs/building.md's tables of options that leave parts out have those of src/xdistill.h
  figures    each figure of README.md's table of numbers stands on the page that its row links
  index      docs/index.md has every name of the users' part, as docs/api.txt lists them, and of the companions, once
  names      what prose names exists: check_names.py
  words      comments, sentences and phrases within their limits: check_words.py
  calls      written out have the number of arguments of their declaration: check_calls.py
  surface    programs and companions call the functions of both parts: check_surface.py
  tests      every function of the users' part (docs/api.txt) is called by a file of tests/
  version    the top entry of CHANGELOG.md and the first line of src/xdistill.h name the version of config.h
  cells      no cell of a table in README.md, docs/ and bench/results/README.md has more than CELL characters
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

from api import Names
from check_calls import check_calls
from check_names import check_names
from check_surface import check_surface
from check_words import check_words

ROOT = pathlib.Path(__file__).resolve().parent.parent
FUNCTION = re.compile(r"^XD_API\b[^;{]*?\b(xd_\w+)\s*\(")
CELL = 200
TYPE = re.compile(r"^(?:typedef\s+)?(?:struct|union|enum)\s+(xd_\w+)\s*\{|"
                  r"^typedef\b[^;{]*?\b(xd_\w+)\s*\)?\s*[(;]")


def declarations(path):
    """(line, name, explained) of each public declaration of a header.

    A comment explains the declaration directly below it, and the block of declarations that goes on without a
    blank line; a trailing comment explains its own line.
    """
    explained = inside = False
    for number, line in enumerate(path.read_text().split("\n"), 1):
        text = line.strip()
        if inside or text.startswith("/*"):
            inside = "*/" not in text
            explained = True
        elif not text:
            explained = False
        match = FUNCTION.match(line) or TYPE.match(line)
        if match:
            yield number, match.group(match.lastindex), explained or "/*" in line


def check_comments():
    found = [(path, *declaration) for path in sorted(ROOT.glob("src/**/*.h")) if path.name != "internal.h"
             for declaration in declarations(path)]
    explained = {name for _, _, name, good in found if good}  # a type may be announced before it is explained
    for path, line, name, _ in found:
        if name not in explained:
            yield "%s:%d: %s has no comment directly above it" % (path.relative_to(ROOT), line, name)


def check_snippets():
    readme = ROOT / "README.md"
    if not readme.is_file():
        yield "there is no README.md"
        return
    text = readme.read_text()
    for block in re.finditer(r"^```c\n(.*?)^```", text, re.M | re.S):
        if "main(" not in block.group(1):
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder) / "snippet.c"
            source.write_text(block.group(1))
            command = [os.environ.get("CC", "cc"), "-std=c99", "-O0", "-Wall", "-Wextra", "-Werror",
                       "-I", str(ROOT), str(source), "-o", str(source.with_suffix("")), "-lm", "-lpthread"]
            result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            line = text.count("\n", 0, block.start()) + 1
            yield "README.md:%d: this snippet does not compile:\n%s" % (line, result.stderr)


FRAGMENT = re.compile(r"^```c\n(.*?)^```", re.M | re.S)
DEFINITION = re.compile(r"^(?!(?:if|for|while|switch)\b)\w[^;=]*\) \{$", re.M)


def unit_of(page):
    """The fragments of a page as one file: definitions as they stand, statements in functions, entries in a list."""
    text, parts = page.read_text(), []
    for match in FRAGMENT.finditer(text):
        body = '#line %d "docs/%s"\n%s' % (text.count("\n", 0, match.start(1)) + 1, page.name, match.group(1))
        if match.group(1).startswith("{"):
            body = "const xd_weight_map fragment_%d[] = {\n%s};\n" % (len(parts), body)
        elif not DEFINITION.search(body):
            body = "xd_result fragment_%d(void) {\n%sreturn XD_OK;\n}\n" % (len(parts), body)
        parts.append(body)
    return "".join(parts)


def check_fragments(root=ROOT):
    for page in sorted((root / "docs").glob("*.md")):
        unit = unit_of(page)
        command = [os.environ.get("CC", "cc"), "-std=c99", "-fsyntax-only", "-Wall", "-Wno-unused", "-Werror", "-I", str(root),
                   "-DPAGE_" + page.stem, "-include", str(root / "tools/fragments.h"), "-x", "c", "-"]
        result = subprocess.run(command, input=unit, capture_output=True, text=True) if unit else None
        if result and result.returncode != 0:
            yield "docs/%s: a fragment does not compile:\n%s" % (page.name, result.stderr)


def check_options():
    known = set(re.findall(r"^#ifndef (XDISTILL_NO_\w+)", (ROOT / "src/xdistill.h").read_text(), re.M))
    told = set(re.findall(r"^\| `(XDISTILL_NO_\w+)`", (ROOT / "docs/building.md").read_text(), re.M))
    for name in sorted(known ^ told):
        yield "%s is %s" % (name, "not in docs/building.md's table of options" if name in known else "no option of src/xdistill.h")


FIGURE = re.compile(r"\d*[.,]?\d+(?:,\d+)*(?:\.\d+)?")


def check_figures(root=ROOT):
    rows = re.findall(r"^\| [^|\n]+ \| ([^|\n]+) \| \[[^\]]*\]\(([^)]*)\) \|$", (root / "README.md").read_text(), re.M)
    if not rows:
        yield "README.md has no table of numbers"
    for text, page in rows:
        known = FIGURE.findall((root / page).read_text())
        for figure in FIGURE.findall(text):
            if figure not in known:
                yield "README.md: %s is not in %s" % (figure, page)


def check_index(root=ROOT):
    names = Names.read(root / "docs/api.txt")
    text = (root / "docs/index.md").read_text()
    told = set(re.findall(r"`(\w+)`", text))
    entries = [name for line in re.findall(r"^- ([^:]*):", text, re.M) for name in re.findall(r"`(\w+)`", line)]
    for path in sorted(root.glob("xdistill_*.h")):
        declared = path.read_text().split("defined(XDISTILL_IMPLEMENTATION)")[0]
        for name in re.findall(r"^(?:XD_API\b[^;(]*?|\} )(xd_\w+)(?=\(|;)", declared, re.M):
            if name not in told:
                yield "docs/index.md: %s of %s is missing" % (name, path.name)
    for kind, name in names.lines:
        if name not in told and not (kind == "value" and names.homes[name]):  # enumerators stand with their enum
            yield "docs/index.md: %s is missing" % name
    for name in sorted({name for name in entries if entries.count(name) > 1}):
        yield "docs/index.md: %s has two entries" % name


def cells(text):
    """(line, cell) of each cell of the tables of a page; code in fences has no tables."""
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        fenced ^= line.startswith("```")
        if line.startswith("|") and not fenced:
            yield from ((number, cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:])


def check_cells(root=ROOT):
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md")), root / "bench/results/README.md"]
    for path in pages:
        name = path.relative_to(root).as_posix()
        if not path.is_file():
            continue
        for number, cell in cells(path.read_text()):
            if len(cell) > CELL:
                yield "%s:%d: a cell of %d characters, at most %d: %s ..." % (name, number, len(cell), CELL, cell[:40])


def check_tests():
    promised = re.findall(r"^function [^(]*?(\w+)\(", (ROOT / "docs/api.txt").read_text(), re.M)
    called = set()
    for path in ROOT.glob("tests/**/*"):
        if path.suffix in (".c", ".cpp", ".h"):
            text = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.S)
            called.update(re.findall(r"\b(xd_\w+)\s*\(", text))
    if not promised:
        yield "docs/api.txt names no function"
    for name in promised:
        if name not in called:
            yield "%s is called by no file of tests/" % name


def first_version(path):
    match = re.search(r"\bv?(\d+\.\d+\.\d+)\b", path.read_text()) if path.is_file() else None
    return match.group(1) if match else "none"


def check_version():
    config = (ROOT / "src/base/config.h").read_text()
    version = ".".join(re.findall(r"^#define XD_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", config, re.M))
    for name in ("CHANGELOG.md", "src/xdistill.h"):
        found = first_version(ROOT / name)
        if found != version:
            yield "%s: its first version is %s, XD_VERSION is %s" % (name, found, version)


def main():
    complaints = [*check_comments(), *check_options(), *check_figures(), *check_tests(), *check_version(), *check_index(),
                  *check_cells(), *check_names(ROOT), *check_words(), *check_surface(), *check_calls(ROOT), *check_fragments(),
                  *check_snippets()]
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
