"""A binding for Python's ctypes, written from what api.py found in the header. No number in it is copied by hand.

Structs become ctypes structures of the same name with the header's comments as docstrings, enums Python's IntEnum,
constants numbers. A field of an enum is the integer that the compiler gave it. load(path) opens a shared library of
the header with the prototype and the comment of every function.
"""

import keyword
import re

HEAD = '''"""xdistill {version} for ctypes. Written by tools/api.py from xdistill.h: edit neither this file nor its numbers.

    xd = load("libxdistill.so")
    ctx = ctypes.POINTER(xd_ctx)()
    result = xd.xd_ctx_create(None, ctypes.byref(ctx))

A function that the library lacks (set-up of a GPU, without the CUDA unit) is in xd.absent. `const char *` is bytes that
end with a NUL; a text with its size beside it is read by ctypes.string_at. An array that a struct points to stays
the caller's: keep a reference to it in Python for as long as the library may read it.
"""

import ctypes
import enum
from ctypes import CFUNCTYPE, POINTER

VERSION = "{version}"


class Structure(ctypes.Structure):
    """Shown in one line, with its fields; a pointer is None or Ellipsis."""

    def __repr__(self):
        fields = [(name, getattr(self, name)) for name, *_ in getattr(self, "_fields_", ())]
        return "%s(%s)" % (type(self).__name__, ", ".join(
            "%s=%r" % (name, list(x) if isinstance(x, ctypes.Array) else (... if x else None) if isinstance(x, ctypes._Pointer) else x)
            for name, x in fields))
'''

LOAD = '''

def load(path):
    """The library at a path, with prototypes; names that it lacks are listed in its `absent`."""
    library = ctypes.CDLL(path)
    library.absent = []
    for name, (result, arguments) in FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            library.absent.append(name)
            continue
        function.restype, function.argtypes = result, arguments
        function.__doc__ = COMMENTS.get(name)
    for name, (function, macro) in MACROS.items():
        if function not in library.absent:
            setattr(library, name, macro(getattr(library, function)))
    return library
'''


def docstring(name, comment, members):
    """The comment of a class, and those of its members, as the first lines of its body."""
    width = max((len(one["name"]) for one in members if one["comment"]), default=0)
    lines = [comment] if comment else []
    if width:
        lines += [""] * bool(lines) + ["%-*s  %s" % (width, one["name"], " ".join(one["comment"].split()))
                                       for one in members if one["comment"]]
    text = "\n".join(lines or [name]).replace("\\", "\\\\").replace('"""', '\\"\\"\\"').replace("\n", "\n    ").replace("    \n", "\n")
    return '    """%s%s"""' % (text, "\n    " if "\n" in text or text.endswith('"') else "")


class Binding:
    """The lines of the binding, section by section in the order in which Python needs them."""

    def __init__(self, api):
        self.api = api
        self.scalars = {name: self.scalar(name, about) for name, about in api["scalars"].items()}
        for enum in api["enums"]:
            if enum["name"]:
                self.scalars[enum["name"]] = "ctypes.c_%sint%d" % ("" if enum["signed"] else "u", 8 * enum["size"])

    @staticmethod
    def scalar(name, about):
        """The ctypes type with the size and the sign that the compiler gave a basic type."""
        if name in ("bool", "char"):
            return "ctypes.c_" + name
        if about["floating"]:
            return {4: "ctypes.c_float", 8: "ctypes.c_double"}[about["size"]]
        return "ctypes.c_%sint%d" % ("" if about["signed"] else "u", 8 * about["size"])

    def type(self, about):
        """The ctypes type of a described type, without its array lengths."""
        if "function" in about:
            return self.function(about["function"])
        pointers, base = about["pointers"], about["base"]
        if base == "void" and pointers:
            kind, pointers = "ctypes.c_void_p", pointers - 1
        elif base == "void":
            return "None"
        elif base == "char" and about["const"] and pointers:
            kind, pointers = "ctypes.c_char_p", pointers - 1
        else:
            kind = self.scalars.get(base, base)
        return "POINTER(" * pointers + kind + ")" * pointers

    def function(self, about):
        return "CFUNCTYPE(%s)" % ", ".join([self.type(about["result"])] + [self.type(one) for one in about["arguments"]])

    def constants(self):
        """Enums with their enumerators, which are names of the module too, then constants."""
        for enum in self.api["enums"]:
            yield ""
            if enum["name"]:
                yield "\nclass %s(enum.IntEnum):" % enum["name"]
                yield docstring(enum["name"], enum["comment"], enum["values"])
                for value in enum["values"]:
                    yield "    %s = %d" % (value["name"], value["value"])
                yield "\n\nglobals().update(%s.__members__)" % enum["name"]
            else:
                for value in enum["values"]:
                    yield "%s = %d" % (value["name"], value["value"])
        yield ""
        for macro in self.api["macros"]:
            if "value" in macro:
                value = macro["value"].encode() if macro["kind"] == "string" else macro["value"]
                yield "%s = %r" % (macro["name"], value)

    def classes(self):
        """In the order of the header. A struct's fields stand in its class, or behind the last class that they name."""
        declared = {one["name"] for one in self.api["opaque"]} | self.unseen()
        for name in sorted(declared):
            yield '\n\nclass %s(Structure):\n    """Only the library knows what is in it."""' % name
        waiting, complete = [], set(declared)
        structs = {struct["name"] for struct in self.api["structs"]}
        for item in sorted(self.api["structs"] + self.api["callbacks"], key=lambda one: one["line"]):
            if "fields" not in item:
                yield "\n\n%s = %s" % (item["name"], self.function(item))
                continue
            yield "\n\nclass %s(Structure):" % item["name"]
            yield docstring(item["name"], item["comment"], item["fields"])
            if self.ready(item, structs, declared, complete):
                yield from self.fields(item, "    _fields_ = [")
                complete.add(item["name"])
            else:
                waiting.append(item)
            declared.add(item["name"])
            for other in [one for one in waiting if self.ready(one, structs, declared, complete)]:
                yield "\n"
                yield from self.fields(other, other["name"] + "._fields_ = [")
                complete.add(other["name"])
                waiting.remove(other)
        assert not waiting, waiting[0]["name"]

    def ready(self, struct, structs, declared, complete):
        """Can Python evaluate the types of the struct's fields?"""

        def known(about):
            if "function" in about:
                return all(known(one) for one in (about["function"]["result"], *about["function"]["arguments"]))
            needed = declared if about["pointers"] else complete
            return about["base"] not in structs or about["base"] in needed

        return all(known(field) for field in struct["fields"])

    def unseen(self):
        """Structs that are named by their tags alone."""
        found, known = set(), {one["name"] for one in self.api["structs"]}

        def look(about):
            if isinstance(about, dict):
                if about.get("kind") == "opaque":
                    found.add(about["base"])
                about = list(about.values())
            for one in about if isinstance(about, list) else ():
                look(one)

        look([self.api["structs"], self.api["callbacks"], self.api["functions"]])
        return found - known

    def fields(self, struct, head):
        space = " " * (len(head) - len(head.lstrip()))
        yield head
        for field in struct["fields"]:
            name = field["name"] + "_" * keyword.iskeyword(field["name"])
            kind = self.type(field)
            for length in reversed(field.get("array", [])):
                kind = "%s * %d" % (kind, length) if "*" not in kind else "(%s) * %d" % (kind, length)
            yield '%s    ("%s", %s),' % (space, name, kind)
        yield space + "]"

    def functions(self):
        yield "\nFUNCTIONS = {"
        for function in self.api["functions"]:
            if not function["inline"]:
                yield '    "%s": (%s, [%s]),' % (function["name"], self.type(function["result"]), ", ".join(
                    self.type(one) for one in function["arguments"]))
        yield "}"

    def comments(self):
        yield "\nCOMMENTS = {"
        for function in self.api["functions"]:
            if not function["inline"]:
                yield '    "%s": %r,' % (function["name"], function["declaration"] + "\n\n" + function["comment"])
        yield "}"

    def macros(self):
        """Macros that call a function with their parameters and constants: xd.name is then called like the macro."""
        constants = {value["name"] for enum in self.api["enums"] for value in enum["values"]}
        constants |= {macro["name"] for macro in self.api["macros"] if "value" in macro}
        functions = {function["name"] for function in self.api["functions"] if not function["inline"]}
        yield "\nMACROS = {"
        for macro in self.api["macros"]:
            call = re.fullmatch(r"\(?(\w+)\)? ?\((.*)\)", macro["text"]) if macro["form"] == "function" else None
            names = set(re.findall(r"[A-Za-z_]\w*", call.group(2))) if call else set()
            if call and call.group(1) in functions and names <= constants | set(macro["parameters"]) and not re.search(
                    r'["\'?:&!]', call.group(2)):
                yield '    "%s": ("%s", lambda call: lambda %s: call(%s)),' % (
                    macro["name"], call.group(1), ", ".join(macro["parameters"]), call.group(2))
        yield "}"


def binding(api):
    """The text of the binding."""
    made = Binding(api)
    lines = [*made.constants(), *made.classes(), *made.functions(), *made.comments(), *made.macros()]
    return HEAD.format(version=api["version"]) + "\n".join(lines) + "\n" + LOAD
