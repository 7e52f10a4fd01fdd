#!/usr/bin/env python3
"""Write the interface of xdistill.h for other programs, and check the policy for its changes.

    tools/api.py             write build/api.json and build/xdistill_ctypes.py
    tools/api.py --accept    the same, and take what the header declares now into docs/api.txt
    tools/api.py --check     write nothing; fail when docs/api.txt is not what the header declares
    tools/api.py --root D    work on another tree
    tools/api.py --build D   write the two files of build/ to another folder

build/api.json has every struct with its fields, enum, constant, opaque type, callback and function, in the order of
the header, with comment, section and part (users' or back ends'). declarations.py reads them from the header's text;
sizes, offsets and values come from the compiler: $CC builds a probe that declares everything again from the parsed
text, so that a parsing error does not compile, and prints the numbers; struct layouts and enum values are also
computed from the text and compared.

docs/api.txt has the users' part, one name a line. While its policy is "open", --accept rewrites it. Once a person
has changed that word to "held", --accept and --check refuse changes that break existing programs:

  - a name that is removed, unless it was marked XD_DEPRECATED in an earlier minor version
  - a field that is removed, moves or changes its type: fields are only appended
  - a number that changes for an enumerator (a last one called ..._COUNT may grow)
  - another result or other types of arguments of a function, a callback or a macro with parameters
"""

import argparse
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

import api_ctypes
import structs
from declarations import Array, Base, Function, Pointer, Reader, Refused, render

MARKER = "---- for back ends ----"
PROBE = """#define xdi_is_floating(x) (((x) * 0 + 1) / 2 != 0)
#define xdi_is_signed(x) ((x) * 0 - 1 < 0)
static void xdi_number(const char *what, int floating, int sign, double real, long long whole) {
    if (floating) printf("%s floating %.17g\\n", what, real);
    else if (sign) printf("%s integer %lld\\n", what, whole);
    else printf("%s integer %llu\\n", what, (unsigned long long)whole);
}
"""


# ---- what the compiler says ----

class Probe:
    """A C program that declares and measures what was read; `said` holds its answers by their first words."""

    def __init__(self, reader, header, compiler):
        self.reader, self.header, self.number = reader, header, 0
        self.top, self.main = [], []
        self.scalars = set()
        for item in reader.items:
            getattr(self, "ask_" + item.kind)(item)
        for name in sorted(self.scalars):
            self.ask_scalar(name)
        self.said = self.run(compiler)

    def at(self, line, text):
        """Text of the probe whose errors are those of a line of the header."""
        return '#line %d "%s"\n%s\n' % (line, self.header.name, text)

    def next(self, name):
        self.number += 1
        return "xdi_%s_%d" % (name, self.number)

    def alignment(self, kind, line):
        holder = self.next("align")
        self.top.append(self.at(line, "struct %s { char first; %s; };" % (holder, render(kind, "member"))))
        return "offsetof(struct %s, member)" % holder

    def say(self, line, what, *numbers):
        form = " ".join([what] + ["%llu"] * len(numbers))
        self.main.append(self.at(line, '    printf("%s\\n"%s);' % (
            form, "".join(", (unsigned long long)(%s)" % number for number in numbers))))

    def ask_struct(self, item):
        own = "struct " + item.name
        self.say(item.line, "size " + item.name, "sizeof(%s)" % own, self.alignment(Base(own, False), item.line))
        for field in item.fields:
            self.note(field.type)
            check, place = self.next("field"), "((%s *)0)->%s" % (own, field.name)
            self.top.append(self.at(field.line, "static void %s(%s *s) { %s = &s->%s; (void)p; }" % (
                check, own, render(Pointer(field.type), "p"), field.name)))
            self.main.append("    (void)%s;\n" % check)
            kind, index, lengths = field.type, "", []
            while isinstance(kind, Array):
                lengths.append("sizeof(%s%s) / sizeof(%s%s[0])" % (place, index, place, index))
                kind, index = kind.of, index + "[0]"
            self.say(field.line, "field %s.%s" % (item.name, field.name), "offsetof(%s, %s)" % (own, field.name),
                     "sizeof(%s)" % place, self.alignment(field.type, field.line), *lengths)

    def ask_enum(self, item):
        if item.name:
            own = "enum " + item.name
            self.say(item.line, "size " + item.name, "sizeof(%s)" % own, self.alignment(Base(own, False), item.line),
                     "(%s)-1 < (%s)1" % (own, own))
        for value in item.values:
            self.main.append(self.at(value.line, '    printf("value %s %%lld\\n", (long long)(%s));' % (
                value.name, value.name)))

    def ask_macro(self, item):
        if item.form == "constant":
            self.main.append(self.at(item.line, (
                '    xdi_number("macro {0}", xdi_is_floating({0}), xdi_is_signed({0}), (double)({0}),\n'
                '               (long long)(xdi_is_floating({0}) ? 0 : ({0})));').format(item.name)))
        elif item.form == "string":
            self.main.append(self.at(item.line, '    printf("macro %s string %%s\\n", %s);' % (item.name, item.name)))

    def ask_opaque(self, item):
        self.top.append(self.at(item.line, "struct %s { %s *p; };" % (self.next("opaque"), item.name)))

    def ask_callback(self, item):
        self.note(item.type)
        check = self.next("callback")
        self.top.append(self.at(item.line, "static void %s(%s f) { %s = f; (void)p; }" % (
            check, item.name, render(item.type, "p"))))
        self.main.append("    (void)%s;\n" % check)

    def ask_function(self, item):
        self.note(item.type)
        if item.inline:
            check = self.next("inline")
            self.top.append(self.at(item.line, "static %s = %s;" % (render(Pointer(item.type), check), item.name)))
            self.main.append("    (void)%s;\n" % check)
        else:  # in parentheses, for a macro of the same name
            self.top.append(self.at(item.line, "extern %s;" % render(item.type, "(%s)" % item.name)))

    def note(self, kind):
        """Remembers the basic types in a type, to ask their sizes."""
        if isinstance(kind, Function):
            for one in (kind.result, *(argument.type for argument in kind.arguments)):
                self.note(one)
        elif isinstance(kind, (Pointer, Array)):
            self.note(kind.to if isinstance(kind, Pointer) else kind.of)
        elif self.reader.kind_of(kind.name) == "scalar":
            self.scalars.add(kind.name)

    def ask_scalar(self, name):
        self.say(1, "scalar %s" % name.replace(" ", "_"), "sizeof(%s)" % name, self.alignment(Base(name, False), 1),
                 "(%s)-1 < (%s)1" % (name, name), "(%s)0.5 != 0 && (%s)2 != (%s)1" % (name, name, name))

    def run(self, compiler):
        source = '#include <stdio.h>\n#include "%s"\n%s%s\nint main(void) {\n%s    return 0;\n}\n' % (
            self.header, PROBE, "".join(self.top), "".join(self.main))
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "probe.c"
            path.write_text(source)
            result = subprocess.run([*compiler, "-std=c99", "-Werror", "-Wno-deprecated-declarations", str(path), "-o",
                                     str(path.with_suffix("")), "-lm"], capture_output=True, text=True)
            if result.returncode:
                raise Refused(0, "the compiler does not agree with what was read:\n" + result.stderr)
            text = subprocess.run([str(path.with_suffix(""))], capture_output=True, text=True, check=True).stdout
        return {tuple(line.split(" ", 2)[:2]): line.split(" ")[2:] for line in text.splitlines()}

    def numbers(self, *what):
        return [int(word) for word in self.said[what]]


def check_layout(struct):
    """The rules of C over the fields that were read must give the places and the size that the compiler gave."""
    end = widest = 0
    for field in struct["fields"]:
        widest = max(widest, field["alignment"])
        end = -(-end // field["alignment"]) * field["alignment"]
        if end != field["offset"]:
            raise Refused(field["line"], "%s.%s: read at offset %d, compiled at %d" % (
                struct["name"], field["name"], end, field["offset"]))
        end += field["size"]
    if -(-end // widest) * widest != struct["size"] or widest != struct["alignment"]:
        raise Refused(struct["line"], "%s: the fields that were read take %d bytes, the compiler says %d" % (
            struct["name"], -(-end // widest) * widest, struct["size"]))


def check_values(enum):
    """Enumerators without a number count up, and those with a plain one have it."""
    expected = 0
    for value in enum["values"]:
        text = value.pop("text")
        if re.fullmatch(r"-?\s*\d+", text):
            expected = int(text.replace(" ", ""))
        elif text:
            expected = value["value"]
        if value["value"] != expected:
            raise Refused(value["line"], "%s: read as %d, compiled as %d" % (value["name"], expected, value["value"]))
        expected += 1


# ---- api.json ----

class Api:
    """Everything that the header declares, as plain lists and dictionaries."""

    def __init__(self, header, compiler):
        self.reader = Reader(header.read_text(), compiler, MARKER)
        self.probe = Probe(self.reader, header, compiler)
        self.tables = {name: [] for name in ("structs", "enums", "macros", "opaque", "callbacks", "functions")}
        for item in self.reader.items:
            getattr(self, "add_" + item.kind)(item)
        values = {macro["name"]: macro.get("value") for macro in self.tables["macros"]}
        self.version = ".".join(str(values["XD_VERSION_" + word]) for word in ("MAJOR", "MINOR", "PATCH"))

    def common(self, item, *members):
        """The members that every entry has."""
        entry = {"name": item.name, **dict(members), "comment": item.comment, "section": item.section,
                 "part": item.part, "line": item.line}
        if item.group:
            entry["comment_of"] = item.group
        if item.conditions:
            entry["conditions"] = item.conditions
        if item.deprecated is not None:
            entry["deprecated"] = item.deprecated
        return entry

    def describe(self, kind, line):
        """A type as its text and its pieces: base, kind of the base, pointers, const of the base, array lengths."""
        about = {"type": render(kind)}
        lengths = []
        while isinstance(kind, Array):
            lengths.append(kind.length)
            kind = kind.of
        pointers = 0
        while isinstance(kind, Pointer):
            pointers, kind = pointers + 1, kind.to
        if isinstance(kind, Function) and pointers == 1:
            about.update(kind="function", pointers=1, function=self.function(kind, line))
        elif isinstance(kind, Base):
            name = re.sub(r"^(struct|enum) ", "", kind.name)
            about.update(kind=self.kind(name), base=name, pointers=pointers, const=kind.const)
        else:
            raise Refused(line, "%s: this kind of type has no description" % about["type"])
        if lengths:
            about["array_text"] = lengths
        return about

    def kind(self, name):
        known = self.reader.kind_of(name)
        if known != "scalar":
            return known
        _, _, _, floating = self.probe.numbers("scalar", name.replace(" ", "_"))
        return "bool" if name == "bool" else "floating" if floating else "integer"

    def function(self, kind, line):
        arguments = []
        for argument in kind.arguments:
            about = self.describe(argument.type, line)
            if "array_text" in about:  # an array as an argument is a pointer
                about["pointers"] += 1
            arguments.append({"name": argument.name, **about})
        return {"result": self.describe(kind.result, line), "arguments": arguments, "variadic": kind.variadic}

    def add_struct(self, item):
        size, alignment = self.probe.numbers("size", item.name)
        fields = []
        for field in item.fields:
            offset, bytes_, align, *lengths = self.probe.numbers("field", "%s.%s" % (item.name, field.name))
            about = self.describe(field.type, field.line)
            if lengths:
                about["array"] = lengths
            entry = {"name": field.name, **about, "offset": offset, "size": bytes_, "alignment": align,
                     "comment": field.comment, "line": field.line}
            if field.deprecated is not None:
                entry["deprecated"] = field.deprecated
            fields.append(entry)
        struct = self.common(item, ("size", size), ("alignment", alignment), ("fields", fields))
        check_layout(struct)
        self.tables["structs"].append(struct)

    def add_enum(self, item):
        values = []
        for value in item.values:
            entry = {"name": value.name, "value": self.probe.numbers("value", value.name)[0], "comment": value.comment,
                     "line": value.line, "text": value.text}
            if value.row:
                entry["row"] = value.row
            if value.deprecated is not None:
                entry["deprecated"] = value.deprecated
            values.append(entry)
        enum = self.common(item, ("values", values))
        if item.name:
            enum["size"], enum["alignment"], enum["signed"] = self.probe.numbers("size", item.name)
        check_values(enum)
        self.tables["enums"].append(enum)

    def add_macro(self, item):
        entry = self.common(item, ("form", item.form), ("text", item.body))
        if item.form == "function":
            entry["parameters"] = item.parameters
        elif item.form in ("constant", "string"):
            kind, value = self.probe.said["macro", item.name][0], " ".join(self.probe.said["macro", item.name][1:])
            entry["kind"] = kind
            entry["value"] = int(value) if kind == "integer" else float(value) if kind == "floating" else value
        self.tables["macros"].append(entry)

    def add_opaque(self, item):
        self.tables["opaque"].append(self.common(item))

    def add_callback(self, item):
        self.tables["callbacks"].append(self.common(item, *self.function(item.type.to, item.line).items(),
                                                    ("declaration", "typedef " + render(item.type, item.name))))

    def add_function(self, item):
        self.tables["functions"].append(self.common(
            item, *self.function(item.type, item.line).items(), ("inline", item.inline),
            ("declaration", render(item.type, item.name))))

    def json(self):
        scalars = {}
        for name in sorted(self.probe.scalars):
            size, alignment, signed, floating = self.probe.numbers("scalar", name.replace(" ", "_"))
            scalars[name] = {"size": size, "alignment": alignment, "signed": bool(signed), "floating": bool(floating)}
        sections = [{"name": section.name, "part": section.part, "line": section.line, "comments": section.prose}
                    for section in self.reader.sections]
        return {"version": self.version, "sections": sections, "scalars": scalars, **self.tables}


# ---- docs/api.txt ----

HEAD = """# The users' part of xdistill.h, name by name: written by `make api`, compared by tools/api.py --check, which says what
# may change. Policy "open": whatever the header declares is accepted. Policy "held": only what breaks no program.
"""
MARK = re.compile(r"  \[deprecated in (\d+)\.(\d+)\]$")
NAME = [re.compile(r"^typedef .*?\(\*(\w+)\)"), re.compile(r"(\w+)\("), re.compile(r"(\w+)")]  # the first that is found
KINDS = {"opaque": "an opaque type", "callback": "a type of callbacks", "struct": "a struct", "enum": "an enum",
         "value": "an enumerator", "macro": "a macro", "function": "a function"}
ORDER = list(KINDS)


def names_of(api):
    """Of the users' part: {(kind, name): [line, then one for each field]}, {enumerator: enum}, what is deprecated."""
    found, homes, deprecated = {}, {}, set()

    def add(entry, kind, line, members=()):
        if entry["part"] == "users":
            found[kind, entry["name"]] = [line, *members]
            if "deprecated" in entry:
                deprecated.add(entry["name"])

    for entry in api["functions"]:
        add(entry, "function", "function " + entry["declaration"])
    for entry in api["callbacks"]:
        add(entry, "callback", "callback " + entry["declaration"])
    for entry in api["opaque"]:
        add(entry, "opaque", "opaque " + entry["name"])
    for entry in api["structs"]:
        add(entry, "struct", "struct " + entry["name"], [field_line(field) for field in entry["fields"]])
    for entry in api["enums"]:
        if entry["name"]:
            add(entry, "enum", "enum " + entry["name"])
        for value in entry["values"]:
            line = "value %s = %d" % (value["name"], value["value"])
            add({**value, "part": entry["part"], **({"deprecated": ""} if "deprecated" in entry else {})}, "value", line)
            homes[value["name"]] = entry["name"]
    for entry in api["macros"]:
        value = entry.get("value")
        line = "(%s)" % ", ".join(entry["parameters"]) if entry["form"] == "function" else "" if value is None else " " + (
            '"%s"' % value if isinstance(value, str) else repr(value))
        add(entry, "macro", "macro %s%s" % (entry["name"], line))
    return found, homes, deprecated


def field_line(field):
    kind = field["type"]
    if "function" in field:
        return "    " + kind.replace("(*)", "(*%s)" % field["name"], 1)
    lengths = "".join("[%d]" % length for length in field.get("array", []))
    base = kind.split("[")[0].rstrip()
    return "    %s%s%s%s" % (base, "" if base.endswith("*") else " ", field["name"], lengths)


class Names:
    """A docs/api.txt: version, policy, and each name's lines with the version that deprecated it."""

    def __init__(self, version, policy, lines, homes, deprecated):
        self.version, self.policy, self.lines, self.homes, self.deprecated = version, policy, lines, homes, deprecated

    @classmethod
    def read(cls, path):
        words, names = {"policy": "open", "version": "0.0.0"}, cls("", "", {}, {}, {})
        for line in path.read_text().splitlines() if path.is_file() else []:
            kind, _, rest = line.partition(" ")
            if kind in words:
                words[kind] = rest
            elif line and kind != "#":
                names.add(line)
        names.version, names.policy = words["version"], words["policy"]
        if names.policy not in ("open", "held"):
            raise SystemExit("%s: policy %s is neither open nor held" % (path, names.policy))
        return names

    def add(self, line):
        """Takes one line of the file, after those above it."""
        mark, line = MARK.search(line), MARK.sub("", line)
        above = next(reversed(self.lines), (None, None))
        if line.startswith("    ") and above[0] == "struct":
            self.lines[above].append(line)
            return
        home = ""
        if line.startswith("    "):  # an enumerator, below its enum or another one
            home = self.homes[above[1]] if above[0] == "value" else above[1]
            line = "value " + line.strip()
        kind, rest = line.split(" ", 1)
        name = next(pattern.search(rest).group(1) for pattern in NAME if pattern.search(rest))
        self.lines[kind, name] = [line]
        if kind == "value":
            self.homes[name] = home
        if mark:
            self.deprecated[name] = (int(mark.group(1)), int(mark.group(2)))

    @classmethod
    def of(cls, api, old):
        """What the header declares now; a name that was deprecated before keeps the version that said so first."""
        lines, homes, marked = names_of(api)
        minor = minor_of(api["version"])
        return cls(api["version"], old.policy, lines, homes, {name: old.deprecated.get(name, minor) for name in marked})

    def marked(self, name, line):
        return line + ("  [deprecated in %d.%d]" % self.deprecated[name] if name in self.deprecated else "")

    def text(self):
        out, before = [HEAD + "version %s\npolicy %s" % (self.version, self.policy)], None
        for kind, name in sorted(self.lines, key=lambda key: (ORDER.index(key[0]), key[1] if key[0] != "value" else "")):
            first, *members = self.lines[kind, name]
            if kind == "value" and self.homes[name]:
                continue  # stands below its enum
            if kind == "enum":
                members = [self.marked(value, "    " + self.lines["value", value][0].split(" ", 1)[1])
                           for value, home in self.homes.items() if home == name]
            out += [""] * (kind != before) + [self.marked(name, first), *members]
            before = kind
        return "\n".join(out) + "\n"


def minor_of(version):
    return tuple(int(part) for part in version.split(".")[:2])


def shape(line):
    """A prototype without the names of its arguments."""
    head, arguments = line.split("(", 1) if "(*" not in line else line.split(")(", 1)
    if "(*" in arguments:
        return line
    bare = [re.sub(r"(?<=[\s*])\w+((?:\[[^]]*\])*)$", r"\1", one.strip()) for one in arguments.rstrip(")").split(",")]
    return head + "(" + ", ".join(one.strip() for one in bare)


def violations(old, new):
    """Changes that break programs written for the old names."""
    now = minor_of(new.version)
    kinds = {}
    for kind, name in new.lines:
        kinds.setdefault(name, []).append(kind)
    for (kind, name), (line, *members) in old.lines.items():
        if (kind, name) in new.lines:
            yield from changes(kind, name, [line, *members], new.lines[kind, name])
        elif name in old.deprecated:
            if old.deprecated[name] >= now:
                yield "%s leaves in %d.%d, the minor version that deprecated it: it may leave in the next one" % (name, *now)
        elif name in kinds:
            yield "%s was %s and is %s" % (name, KINDS[kind], " and ".join(KINDS[one] for one in kinds[name]))
        else:
            yield "%s leaves without having been marked XD_DEPRECATED" % name


def changes(kind, name, old, new):
    """The same for one name that is still there."""
    if kind in ("function", "callback") and shape(old[0]) != shape(new[0]):
        yield "%s had another prototype:\n    was %s\n    is  %s" % (name, old[0], new[0])
    if kind == "macro" and old[0].count(",") + old[0].count("(") != new[0].count(",") + new[0].count("("):
        yield "%s had other parameters: %s, now %s" % (name, old[0], new[0])
    if kind == "value" and old[0] != new[0] and not name.endswith("_COUNT"):
        yield "%s was renumbered: %s, now %s" % (name, old[0].split(" = ")[1], new[0].split(" = ")[1])
    if kind == "struct" and new[1:len(old)] != old[1:]:
        for was, is_ in zip(old[1:], [*new[1:], *[None] * len(old)]):
            if was != is_:
                yield "%s: `%s` stood where now `%s` stands; fields are only appended" % (
                    name, was.strip(), is_.strip() if is_ else "nothing")
                break


# ---- sizes ----

MOST_ARGUMENTS, MOST_FIELDS = 5, 24


def excepted(text):
    """The functions that docs/interface.md lists as arithmetic on arrays."""
    at = ("\n" + text).find("\nArithmetic on arrays:")
    return set(re.findall(r"`(\w+)`", text[at:].split("\n\n", 1)[0])) if at >= 0 else set()


def large_structs(root):
    """Structs with too many fields, of all parts under src/."""
    for path, line, name, fields in structs.structs_under(root / "src"):
        if len(fields) > MOST_FIELDS and not structs.is_table(fields):
            yield "%s:%d: %s has %d fields, of %d at most: fields that belong together are a struct" % (
                path.relative_to(root), line, name, len(fields), MOST_FIELDS)


def too_large(api, text):
    """Functions with too many arguments, and names that are excepted for nothing."""
    arrays = excepted(text)
    long = {function["name"]: len(function["arguments"]) for function in api["functions"]
            if function["part"] == "users" and len(function["arguments"]) > MOST_ARGUMENTS}
    for name, count in long.items():
        if name not in arrays:
            yield "%s takes %d arguments, of %d at most: a desc, or a name in docs/interface.md if it is arithmetic on arrays" % (
                name, count, MOST_ARGUMENTS)
    for name in sorted(arrays - set(long)):
        yield "docs/interface.md excepts %s, which has at most %d arguments or is no function" % (name, MOST_ARGUMENTS)


def difference(old, new):
    """A few of the lines in which two texts differ, for a message."""
    before, after = set(old.splitlines()), set(new.splitlines())
    lines = ["    - " + line.strip() for line in old.splitlines() if line not in after]
    lines += ["    + " + line.strip() for line in new.splitlines() if line not in before]
    return "\n".join(lines[:12] + ["    and %d more" % (len(lines) - 12)] * (len(lines) > 12))


def main():
    arguments = argparse.ArgumentParser(description="The interface of xdistill.h, written down and held.")
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--accept", action="store_true")
    arguments.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    arguments.add_argument("--build", type=pathlib.Path)
    options = arguments.parse_args()
    root = options.root.resolve()
    build = options.build or root / "build"
    header, names = root / "xdistill.h", root / "docs" / "api.txt"
    try:
        api = Api(header, shlex.split(os.environ.get("CC", "cc"))).json()
    except Refused as refused:
        print("%s:%d: %s" % (header.name, refused.line, refused), file=sys.stderr)
        return 1
    old = Names.read(names)
    new = Names.of(api, old)
    broken = list(violations(old, new)) if old.policy == "held" and (options.check or options.accept) else []
    broken = ["docs/api.txt: " + message for message in broken]
    rules = root / "docs" / "interface.md"
    if options.check or options.accept:
        broken += too_large(api, rules.read_text() if rules.is_file() else "")
        broken += large_structs(root)
    for message in broken:
        print(message, file=sys.stderr)
    if broken:
        return 1
    if options.check:
        text = names.read_text() if names.is_file() else ""
        if text != new.text():
            print("docs/api.txt is not what xdistill.h declares: run `make api` to accept\n%s" % difference(
                text, new.text()), file=sys.stderr)
            return 1
        return 0
    build.mkdir(exist_ok=True)
    (build / "api.json").write_text(json.dumps(api, indent=1) + "\n")
    (build / "xdistill_ctypes.py").write_text(api_ctypes.binding(api))
    if options.accept:
        names.parent.mkdir(exist_ok=True)
        names.write_text(new.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
