"""A binding for Python's ctypes, written from what api.py found in the header. No number in it is copied by hand.

Structs become ctypes structures of the same name, enumerators and constants Python numbers, enums the integer type
that the compiler gave them, and load(path) opens a shared library of the header with the prototype of every function.
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
from ctypes import CFUNCTYPE, POINTER, Structure

VERSION = "{version}"
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
    for name, (function, macro) in MACROS.items():
        if function not in library.absent:
            setattr(library, name, macro(getattr(library, function)))
    return library
'''


class Binding:
    """The lines of the binding, section by section in the order in which Python needs them."""

    def __init__(self, api):
        self.api = api
        self.scalars = {name: self.scalar(name, about) for name, about in api["scalars"].items()}

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
        for enum in self.api["enums"]:
            yield ""
            if enum["name"]:
                yield "%s = ctypes.c_%sint%d" % (enum["name"], "" if enum["signed"] else "u", 8 * enum["size"])
            for value in enum["values"]:
                yield "%s = %d" % (value["name"], value["value"])
        yield ""
        for macro in self.api["macros"]:
            if "value" in macro:
                value = macro["value"].encode() if macro["kind"] == "string" else macro["value"]
                yield "%s = %r" % (macro["name"], value)

    def classes(self):
        opaque = {one["name"] for one in self.api["opaque"]} | self.unseen()
        for name in sorted(opaque):
            yield "\n\nclass %s(Structure):\n    pass  # only the library knows what is in it" % name
        for struct in self.api["structs"]:
            yield "\n\nclass %s(Structure):\n    pass" % struct["name"]

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

    def fields(self):
        """In the order of the header: a struct stands behind those that it holds."""
        yield "\n"
        for callback in self.api["callbacks"]:
            yield "%s = %s" % (callback["name"], self.function(callback))
        for struct in self.api["structs"]:
            yield "%s._fields_ = [" % struct["name"]
            for field in struct["fields"]:
                name = field["name"] + "_" * keyword.iskeyword(field["name"])
                kind = self.type(field)
                for length in reversed(field.get("array", [])):
                    kind = "%s * %d" % (kind, length) if "*" not in kind else "(%s) * %d" % (kind, length)
                yield '    ("%s", %s),' % (name, kind)
            yield "]"

    def functions(self):
        yield "\nFUNCTIONS = {"
        for function in self.api["functions"]:
            if not function["inline"]:
                yield '    "%s": (%s, [%s]),' % (function["name"], self.type(function["result"]), ", ".join(
                    self.type(one) for one in function["arguments"]))
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
    lines = [*made.constants(), *made.classes(), *made.fields(), *made.functions(), *made.macros()]
    return HEAD.format(version=api["version"]) + "\n".join(lines) + "\n" + LOAD
