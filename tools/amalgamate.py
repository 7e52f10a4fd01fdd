#!/usr/bin/env python3
"""Write xdistill.h, xdistill_cuda.cu and the companions xdistill_mpi.h and xdistill_nccl.h from src/.

    tools/amalgamate.py                        write the generated files
    tools/amalgamate.py --check                write nothing; fail when they are stale or were edited by hand
    tools/amalgamate.py --wings core,models    write a smaller xdistill.h, of these wings, to build/core-models/; --out D
    tools/amalgamate.py --root D               work on another tree

src/xdistill.h is the table of contents: each part it includes is inserted there, once, in that order, under
a `>>folder/part` marker. The parts' own quoted includes say what they use; they are checked, then dropped:

  order     a part includes only parts that are listed before it, and every file under src/ is listed exactly once
  wings     a part includes, and names, only things of its folder, of the folders before it in its wing, of the core, and of the
            wing that its wing stands on. The wing's option leaves the part out, with its table of kernels
  circles   no cycles: no part uses another part that uses it, directly or through others
  includes  a part reaches the declaration of every name that it uses by its own includes
  openings  a .c file begins with a comment that says what it is
  names     everything at file scope is prefixed, and defined by one part only (all parts end in one unit)

A template, src/<folder>/<name>.inc, is not listed: parts include it, some several times, with other macros defined. The
generated header has a copy at each of these places. (Once it had one, at its end, and included itself: gcc reads every
word of what it skips, so ten times the whole file, and that was a fifth of the time at -O0.)

Parts between `#ifndef XDISTILL_NO_...` and `#endif` are left out by that option. A list at the end of the
declarations makes each of their types and functions an undeclared name that contains the option's name.

The implementation is one unit, or six sections: XDI_MAKES stands around what a section has of it. Sources belong to the section
of their wing, or of their folder in the core; a private header to the sections of the sources that include it.
"""

import argparse
import hashlib
import pathlib
import re
import sys

import parts
from parts import INCLUDE, line_of

WINGS = {
    "core": ["base", "kernel", "kernel/cpu", "kernel/simd", "comm", "tensor", "train", "io", "loss"],
    "across": ["text", "align", "teacher", "xtoken", "compat"],
    "models": ["model", "checkpoint"],
    "diffusion": ["dmd"],
}
STANDS_ON = {"diffusion": "models"}  # every wing stands on the core too
LAYERS = [layer for layers in WINGS.values() for layer in layers]
WING = {layer: wing for wing, layers in WINGS.items() for layer in layers}
SECTIONS = {"kernel": 1, "kernel/cpu": 1, "kernel/simd": 2, "core": 3, "across": 4, "models": 5, "diffusion": 6}
# parts that close a layer stand over the layer's folders
ROOFS = {"kernel/kernels.c": "kernel/simd", "kernel/across.c": "kernel/simd", "kernel/diffusion.c": "kernel/simd"}
# Tables of xd_kernels that are NULL where an option leaves their wing out: nothing of the core calls them.
TABLES = re.compile(r"(?:->|\.)(xtoken|uld|dmd|dmd_loss)\.\w")
BESIDE = ["cuda", "mpi", "nccl"]  # folders of the other units, each of which sees the public header alone
UNITS = [("src/" + name, name) for name in ("xdistill.h", "xdistill_cuda.cu", "xdistill_mpi.h", "xdistill_nccl.h")]
PREFIXES = ("xd_", "XD_", "xdi_", "XDI_", "XDISTILL_")
NOTICE = "/* Generated from %s by tools/amalgamate.py. Edit src/, then run `make amalgamate`. */\n"
OPTION = re.compile(r"^#(?:ifndef (XDISTILL_NO_\w+)|(if)|(endif))", re.M)
FUNCTION = re.compile(r"^XD_API\b[^;{()]*?\b(xd_\w+)\s*\(", re.M)
TYPE = re.compile(r"^typedef (?:struct|union|enum) (xd_\w+)", re.M)
LEFT_OUT = re.compile(r"^/\* ---- left out by an option\b.*\n", re.M)
SEAL = re.compile(r"/\* xdistill sha256 ([0-9a-f]{64}) \*/\n\Z")


def layer_of(name):
    """A part's layer; None for the other units, whose folders use the public header alone."""
    folder = ROOFS.get(name, name.rsplit("/", 1)[0])
    return folder if folder in LAYERS else None


def may_use(user, used):
    """Whether a layer may use another one."""
    if user is None or used is None:
        return True
    if WING[user] == WING[used]:
        return LAYERS.index(used) <= LAYERS.index(user)
    return WING[used] == "core" or STANDS_ON.get(WING[user]) == WING[used]


def option_of(wing):
    return "XDISTILL_NO_" + wing.upper()


def options_by_line(text):
    """For each line, the XDISTILL_NO_ options that leave it out."""
    lines, around = [], []
    for line in text.split("\n"):
        lines.append({option for option in around if option})
        match = re.match(r"#[ \t]*(?:ifndef (XDISTILL_NO_\w+)|(if)|(endif))", line)
        if match and match.group(3):
            if around:
                around.pop()
        elif match:
            around.append(match.group(1))
    return lines


def without(text, options):
    """The text without what these options leave out."""
    kept, skipped = [], 0
    for line in text.split("\n"):
        match = re.match(r"#[ \t]*(?:ifndef (XDISTILL_NO_\w+)|(if)|(endif))", line)
        if skipped:
            skipped += 0 if not match else -1 if match.group(3) else 1
        elif match and match.group(1) in options:
            skipped = 1
        else:
            kept.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept))


class Unit:
    """One generated file: the parts in their order, and every complaint about them."""

    def __init__(self, root, source):
        self.root, self.source = root, root / source
        self.texts, self.templates, self.errors = {}, {}, []

    def complain(self, name, line, message):
        path = name if isinstance(name, pathlib.Path) else self.root / "src" / name
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
            elif name in self.texts:
                self.complain(self.source, line, "%s is listed twice" % name)
            else:
                self.texts[name] = path.read_text()
                self.read_templates(self.texts[name])
        self.parts = parts.Parts(self.texts, self.templates)
        self.options = {name: set() for name in self.texts}  # those that leave a part out
        for line, options in zip(table.split("\n"), options_by_line(table)):
            for name in INCLUDE.findall(line + "\n"):
                if name in self.options:
                    self.options[name] = options
        return table

    def section_of(self, name):
        """The section of a source."""
        folder = name.rsplit("/", 1)[0]
        for wing in reversed(WINGS):
            if option_of(wing) in self.options[name]:
                return SECTIONS[wing]
        return SECTIONS.get(layer_of(name) if folder != "kernel" else folder, SECTIONS["core"])

    def sections(self):
        """{part: sections that have it} of the sources and the private headers."""
        found = {}
        for name in self.texts:
            if name.endswith(".c"):
                for part in self.parts.reach(name):
                    found.setdefault(part, set()).add(self.section_of(name))
        return found

    def divided(self, table):
        """The table of contents with XDI_MAKES around the parts that only some sections have."""
        head, mark, tail = table.partition("/* ---- implementation ---- */\n")
        sections, lines, now = self.sections(), [], None
        for line in tail.split("\n"):
            name = (INCLUDE.findall(line + "\n") or [None])[0]
            wanted = sorted(sections.get(name, SECTIONS.values())) if name else now
            wanted = None if line.startswith("#") and not name or wanted and len(wanted) == 6 else wanted
            if wanted != now:
                lines += ["#endif"] if now else []
                lines += ["#if XDI_MAKES(%s)" % " | ".join("1 << %d" % section for section in wanted)] if wanted else []
                now = wanted
            lines.append(line)
        return head + mark + "\n".join(lines)

    def left_out(self, table):
        """{options: (types, functions) that each of these options leaves out}, of the listed headers."""
        found, around, at = {}, [], 0
        for match in OPTION.finditer(table):
            options = tuple(option for option in around if option)
            headers = [name for name in INCLUDE.findall(table, at, match.start()) if name.endswith(".h")]
            for text in [self.texts.get(name, "") for name in headers] if options else ():
                types, functions = found.setdefault(options, ([], []))
                types += [name for name in TYPE.findall(text) if name not in types]
                functions += FUNCTION.findall(text)
            at = match.end()
            if match.group(3):
                around.pop()
            else:
                around.append(match.group(1))
        return found

    def read_templates(self, text):
        for name in INCLUDE.findall(text):
            path = self.root / "src" / name
            if name.endswith(parts.TEMPLATE) and name not in self.templates and path.is_file():
                self.templates[name] = path.read_text()
                self.read_templates(self.templates[name])

    def check_includes(self):
        listed = set()
        for name, text in self.texts.items():
            folder = name.rsplit("/", 1)[0]
            listed.add(name)
            if folder not in LAYERS + BESIDE:
                self.complain(name, 1, "folder %s is not one of the layers" % folder)
                continue
            for match in INCLUDE.finditer(text):
                used, line = match.group(1), line_of(text, match.start())
                if used in self.templates:
                    continue
                if used not in self.texts and not (folder in BESIDE and used == "xdistill.h"):
                    self.complain(name, line, "%s is not listed in %s" % (used, self.source.name))
                elif used not in listed and used != "xdistill.h":
                    self.complain(name, line, "%s is used before it is listed" % used)
                elif not may_use(layer_of(name), layer_of(used)):
                    self.complain(name, line, "layer %s must not include %s" % (folder, used))
            wing = WING.get(folder, "core")
            if wing != "core" and option_of(wing) not in self.options[name]:
                self.complain(name, 1, "%s does not leave it out" % option_of(wing))

    def check_names(self):
        home = {}  # where a name is defined
        for name in self.texts:
            for symbol in sorted(self.parts.names[name][0]):
                if not symbol.startswith(PREFIXES):
                    self.complain(name, 1, "%s at file scope has no xd_ or xdi_ prefix" % symbol)
                elif home.setdefault(symbol, name) != name:
                    self.complain(name, 1, "%s is defined in %s too" % (symbol, home[symbol]))

    def check_uses(self):
        """What a part names of others: nothing of a higher layer or another wing, nothing that an option leaves out and it keeps, and
        nothing that its includes do not bring."""
        for name, uses in self.parts.used.items():
            reach, options = self.parts.reach(name), options_by_line(self.parts.texts[name])
            for symbol, line in uses.items():
                owner = self.parts.owner(symbol)
                if not may_use(layer_of(name), layer_of(owner)):
                    self.complain(name, line, "layer %s must not use %s of %s" % (name.rsplit("/", 1)[0], symbol, owner))
                elif self.options[owner] - self.options[name] - options[line - 1]:
                    self.complain(name, line, "%s leaves out %s of %s, and not this" % (
                        sorted(self.options[owner] - self.options[name])[0], symbol, owner))
                elif layer_of(name) and not self.parts.makers[symbol] & reach:
                    self.complain(name, line, "%s is declared in %s, which this part does not include"
                                  % (symbol, self.parts.known[symbol]))

    def check_tables(self):
        """No part that stays calls a kernel that an option leaves out."""
        for name, text in self.parts.texts.items():
            if layer_of(name) in WINGS["core"] and not self.options[name]:
                for match in TABLES.finditer(parts.blank_comments(text)):
                    self.complain(name, line_of(text, match.start()), "the core calls a kernel of a wing: %s" % match.group(1))

    def check_circles(self):
        arrows = self.parts.arrows()
        for group in parts.circles(arrows):
            for name in group:
                for other in sorted(set(group) & set(arrows[name])):
                    symbols = ", ".join(sorted(arrows[name][other])[:4])
                    self.complain(name, 1, "a circle: uses %s of %s" % (symbols, other))

    def check_openings(self):
        for name, text in self.texts.items():
            if name.endswith(".c") and not text.startswith("/* "):
                self.complain(name, 1, "the first line is no comment that says what this is")

    def inlined(self, name, marker=False):
        """A template with the templates that it includes inserted."""
        text = INCLUDE.sub(lambda match: self.inlined(match.group(1), True) + "\n", self.templates[name]).strip("\n")
        return "/* >>%s */\n\n%s\n" % (name, text) if marker else text

    def generate(self, wings=WINGS):
        """The text of the generated file with these wings, sealed by its hash."""
        table = self.read()
        self.check_includes()
        self.check_names()
        self.check_uses()
        self.check_tables()
        self.check_circles()
        self.check_openings()

        def inline(match):
            name = match.group(1)
            if name not in self.texts:  # the CUDA unit keeps its include of the header beside it
                return match.group() if self.source.suffix == ".cu" and name == "xdistill.h" else ""
            body = INCLUDE.sub(again, without_guard(self.texts[name])).strip("\n")
            marker = name[:-2] if name.endswith(".h") else name
            return "/* >>%s */\n\n%s\n\n" % (marker, re.sub(r"\n{3,}", "\n\n", body))

        def again(match):
            name = match.group(1)
            return self.inlined(name, True) if name in self.templates else ""

        left_out, text = self.left_out(table), INCLUDE.sub(inline, self.divided(table))
        if left_out and not LEFT_OUT.search(text):
            self.complain(self.source, 1, "no line says where what options leave out is listed")
        text = LEFT_OUT.sub(lambda match: errors_of(left_out), text)
        first = re.search(r"^#", text, re.M)
        at = first.start() if first else len(text)
        options = [option_of(wing) for wing in WINGS if wing not in wings]
        chosen = "".join("#if !defined(%s)\n#    define %s\n#endif\n" % (option, option) for option in options)
        text = text[:at] + NOTICE % self.source.relative_to(self.root).as_posix() + chosen + text[at:]
        text = without(text, options) if options else text
        return text + "/* xdistill sha256 %s */\n" % hashlib.sha256(text.encode()).hexdigest()


def errors_of(left_out):
    """Macros that turn the use of a name that an option leaves out into an error with the option's name. Functions stand in parentheses, because a C99
    compiler may take an unknown name before an argument list for a function that is declared elsewhere."""
    lines = ["/* >>left_out */", "", "/* What an option leaves out: the compiler calls it undeclared by a name that tells the option. */"]
    for options, (types, functions) in sorted(left_out.items()):
        for number, option in enumerate(options):
            lines.append("#%s defined(%s)" % ("elif" if number else "if", option))
            lines += ["#    define %s %s_leaves_out_%s" % (name, option, name) for name in types]
            lines += ["#    define %s (%s_leaves_out_%s)" % (name, option, name) for name in functions]
        lines.append("#endif")
    return "\n".join(lines) + "\n"


def without_guard(text):
    """A part without its include guard, which the single file does not need."""
    guard = re.search(r"^#ifndef (XDI_\w+_H)\n#define \1\n", text, re.M)
    if not guard:
        return text
    end = text.rstrip().rfind("\n#endif")
    return text[:guard.start()] + text[guard.end():end] + "\n"


def is_intact(text):
    """Whether the hash on the last line is the hash of the text above it."""
    seal = SEAL.search(text)
    return bool(seal) and hashlib.sha256(text[:seal.start()].encode()).hexdigest() == seal.group(1)


def write_wings(root, wings, folder):
    """Write a smaller header, of these wings."""
    unknown = [wing for wing in wings if wing not in WINGS]
    if unknown or "core" not in wings:
        print("--wings takes core, then %s; not %s" % (", ".join(list(WINGS)[1:]), ",".join(wings)), file=sys.stderr)
        return 1
    unit = Unit(root, UNITS[0][0])
    path = (folder or root / "build" / "-".join(wings)) / UNITS[0][1]
    text = unit.generate(wings)
    if unit.errors:
        print("\n".join(unit.errors), file=sys.stderr)
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print("%s: %d KB" % (path, len(text) // 1000))
    return 0


def main():
    arguments = argparse.ArgumentParser(description="Write the generated files from src/.")
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--wings")
    arguments.add_argument("--out", type=pathlib.Path)
    here = pathlib.Path(__file__).resolve().parent.parent
    arguments.add_argument("--root", type=pathlib.Path, default=here)
    options = arguments.parse_args()
    root = options.root.resolve()
    if options.wings:
        return write_wings(root, options.wings.split(","), options.out)

    errors, listed, outputs = [], set(), []
    for source, target in UNITS:
        if (root / source).is_file():
            unit = Unit(root, source)
            outputs.append((root / target, unit.generate()))
            errors += unit.errors
            listed |= set(unit.texts) | set(unit.templates)
    sources = {p.relative_to(root / "src").as_posix() for p in (root / "src").glob("*/**/*") if p.is_file()}
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
