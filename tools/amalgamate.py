#!/usr/bin/env python3
"""Write xdistill.h (and xdistill_cuda.cu) from src/.

    tools/amalgamate.py            write the generated files
    tools/amalgamate.py --check    write nothing; fail when they are stale or were edited by hand
    tools/amalgamate.py --root D   work on another tree

src/xdistill.h is the table of contents: each part it includes is put in its place, once, in that order, under
a `>>folder/part` marker. The parts' own quoted includes say what they use; they are checked, then dropped:

  order   a part uses only parts that are listed before it, and every file under src/ is listed exactly once
  layers  a part includes, and names, only things of its own folder and of the folders below it
  names   everything at file scope is prefixed, and defined by one part only (all parts end in one unit)
"""

import argparse
import hashlib
import pathlib
import re
import sys

LAYERS = ["base", "kernel", "comm", "tensor", "model", "train", "distill", "io"]
UNITS = [("src/xdistill.h", "xdistill.h"), ("src/xdistill_cuda.cu", "xdistill_cuda.cu")]
PREFIXES = ("xd_", "XD_", "xdi_", "XDI_", "XDISTILL_")
FEATURES = {"_POSIX_C_SOURCE", "_GNU_SOURCE", "_DEFAULT_SOURCE", "_XOPEN_SOURCE", "_DARWIN_C_SOURCE"}
NOTICE = "/* Generated from %s by tools/amalgamate.py. Edit src/, then run `make amalgamate`. */\n"
SEAL = re.compile(r"/\* xdistill sha256 ([0-9a-f]{64}) \*/\n\Z")
INCLUDE = re.compile(r'^#[ \t]*include[ \t]+"([^"]+)".*\n', re.M)  # the manual shows indented ones
COMMENT_OR_STRING = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*\n", re.M)


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


def blank_comments(text):
    """The code alone: comments and string contents become blanks, line numbers stay."""
    def blank(match):
        piece = match.group()
        return '""' if piece[0] in "\"'" else " " + "\n" * piece.count("\n")
    return COMMENT_OR_STRING.sub(blank, text)


def collapse(text, opening, closing):
    """Replace each outermost bracketed piece by the empty pair; return the text and the pieces."""
    out, pieces, depth, start = [], [], 0, 0
    for i, c in enumerate(text):
        if c == opening:
            if depth == 0:
                out.append(text[start:i + 1])
                start = i + 1
            depth += 1
        elif c == closing and depth > 0:
            depth -= 1
            if depth == 0:
                pieces.append(text[start:i])
                out.append(closing)
                start = i + 1
    if depth == 0:
        out.append(text[start:])
    return "".join(out), pieces


def declared_names(text):
    """(defined, announced): the names a part gives to the whole unit, and those it only announces.

    Defined are macros, functions, objects, types, tags and constants; announced are prototypes and opaque
    types.
    """
    code = blank_comments(text)
    macros = set(re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", code, re.M))
    defined = macros - set(re.findall(r"^[ \t]*#[ \t]*undef[ \t]+(\w+)", code, re.M)) - FEATURES
    code = re.sub(r'extern "" \{', "", DIRECTIVE.sub("", code))
    code = re.sub(r"\(\s*\*\s*(?:const\s+)?(\w+)\s*(?:\[\w*\])?\)", r" \1 ", code)  # pointers to functions
    flat, bodies = collapse(code, "{", "}")
    for before, body in zip(re.findall(r"(\benum\b[\w\s]*|\S\s*)\{\}", flat), bodies):
        if before.startswith("enum"):
            defined.update(re.findall(r"(?:^|,)\s*(\w+)", collapse(body, "(", ")")[0]))
    flat = collapse(collapse(flat, "(", ")")[0], "[", "]")[0].replace("[]", "")
    defined.update(re.findall(r"(\w+)\s*\(\)\s*\{\}", flat))
    defined.update(re.findall(r"\b(?:struct|union|enum)\s+(\w+)\s*\{\}", flat))
    announced = set()
    for statement in re.sub(r"\(\)\s*\{\}", ";", flat).split(";"):
        head = statement.split("=")[0].strip()
        callable_only = head.endswith("()") and "=" not in statement and "typedef" not in head
        opaque = re.match(r"extern\b|(?:typedef\s+)?(?:struct|union|enum)\s+(\w+)(?:\s+\1)?$", head)
        last = re.search(r"[\w*}]\s*\b(\w+)$", head.replace("()", "").strip())
        if last:
            (announced if callable_only or opaque else defined).add(last.group(1))
    return defined, announced


class Unit:
    """One generated file: the parts in their order, and every complaint about them."""

    def __init__(self, root, source):
        self.root, self.source = root, root / source
        self.parts, self.errors = {}, []

    def complain(self, path, line, message):
        self.errors.append("%s:%d: %s" % (path.relative_to(self.root), line, message))

    def read(self):
        """Collect the listed parts, each with its text."""
        table = self.source.read_text()
        for match in INCLUDE.finditer(table):
            name, line = match.group(1), line_of(table, match.start())
            path = self.root / "src" / name
            if name == "xdistill.h":
                continue
            if not path.is_file():
                self.complain(self.source, line, "there is no src/%s" % name)
            elif name in self.parts:
                self.complain(self.source, line, "%s is listed twice" % name)
            else:
                self.parts[name] = path.read_text()
        return table

    def check_includes(self):
        listed = set()
        for name, text in self.parts.items():
            path, folder = self.root / "src" / name, name.split("/")[0]
            listed.add(name)
            if folder not in LAYERS + ["cuda"]:
                self.complain(path, 1, "folder %s is not one of the layers" % folder)
                continue
            for match in INCLUDE.finditer(text):
                used, line = match.group(1), line_of(text, match.start())
                below = used.split("/")[0]
                if used not in self.parts and not (folder == "cuda" and used == "xdistill.h"):
                    self.complain(path, line, "%s is not listed in %s" % (used, self.source.name))
                elif used not in listed and used != "xdistill.h":
                    self.complain(path, line, "%s is used before it is listed" % used)
                elif folder in LAYERS and LAYERS.index(below) > LAYERS.index(folder):
                    self.complain(path, line, "layer %s must not include %s" % (folder, used))

    def check_names(self):
        home, owner = {}, {}  # where a name is defined, and where it is first made known
        for name, text in self.parts.items():
            defined, announced = declared_names(text)
            for symbol in sorted(defined):
                if not symbol.startswith(PREFIXES):
                    message = "%s at file scope has no xd_ or xdi_ prefix" % symbol
                    self.complain(self.root / "src" / name, 1, message)
                elif home.setdefault(symbol, name) != name:
                    message = "%s is defined in %s too" % (symbol, home[symbol])
                    self.complain(self.root / "src" / name, 1, message)
            for symbol in defined | announced:
                owner.setdefault(symbol, name)
        for name, text in self.parts.items():
            self.check_uses(name, blank_comments(text), owner)

    def check_uses(self, name, code, owner):
        """A .c file includes nothing, so its layer shows only in the names that it uses."""
        folder, seen = name.split("/")[0], set()
        for match in re.finditer(r"\b(?:xdi?|XDI?)_\w+", code):
            symbol = match.group()
            above = owner.get(symbol, name).split("/")[0]
            if not {folder, above} <= set(LAYERS) or symbol in seen:
                continue
            if LAYERS.index(above) > LAYERS.index(folder):
                self.complain(self.root / "src" / name, line_of(code, match.start()),
                              "layer %s must not use %s of %s" % (folder, symbol, owner[symbol]))
                seen.add(symbol)

    def generate(self):
        """The text of the generated file, sealed by its hash."""
        table = self.read()
        self.check_includes()
        self.check_names()

        def inline(match):
            name = match.group(1)
            if name not in self.parts:  # the CUDA unit keeps its include of the header beside it
                return match.group() if self.source.suffix == ".cu" and name == "xdistill.h" else ""
            body = INCLUDE.sub("", without_guard(self.parts[name])).strip("\n")
            marker = name[:-2] if name.endswith(".h") else name
            return "/* >>%s */\n\n%s\n\n" % (marker, re.sub(r"\n{3,}", "\n\n", body))

        text = INCLUDE.sub(inline, table)
        first = re.search(r"^#", text, re.M)
        at = first.start() if first else len(text)
        text = text[:at] + NOTICE % self.source.relative_to(self.root).as_posix() + text[at:]
        return text + "/* xdistill sha256 %s */\n" % hashlib.sha256(text.encode()).hexdigest()


def without_guard(text):
    """A part's include guard has done its work once the part stands in one file."""
    guard = re.search(r"^#ifndef (XDI_\w+_H)\n#define \1\n", text, re.M)
    if not guard:
        return text
    end = text.rstrip().rfind("\n#endif")
    return text[:guard.start()] + text[guard.end():end] + "\n"


def is_intact(text):
    """Whether the hash on the last line is the hash of the text above it."""
    seal = SEAL.search(text)
    return bool(seal) and hashlib.sha256(text[:seal.start()].encode()).hexdigest() == seal.group(1)


def main():
    arguments = argparse.ArgumentParser(description="Write the generated files from src/.")
    arguments.add_argument("--check", action="store_true")
    here = pathlib.Path(__file__).resolve().parent.parent
    arguments.add_argument("--root", type=pathlib.Path, default=here)
    options = arguments.parse_args()
    root = options.root.resolve()

    errors, listed, outputs = [], set(), []
    for source, target in UNITS:
        if (root / source).is_file():
            unit = Unit(root, source)
            outputs.append((root / target, unit.generate()))
            errors += unit.errors
            listed |= set(unit.parts)
    sources = {p.relative_to(root / "src").as_posix() for p in (root / "src").glob("*/*") if p.is_file()}
    errors += ["src/%s: not listed" % name for name in sorted(sources - listed)]

    for path, text in outputs:
        old = path.read_text() if path.is_file() else ""
        if old and not is_intact(old):
            errors.append("%s was edited by hand: move the edit to src/" % path.name)
        elif options.check and old != text:
            errors.append("%s is stale: run `make amalgamate`" % path.name)
    for error in errors:
        print(error, file=sys.stderr)
    if errors:
        return 1
    if not options.check:
        for path, text in outputs:
            path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
