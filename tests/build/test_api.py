#!/usr/bin/env python3
"""What tools/api.py reads, what it refuses to pass over, and which changes of the interface docs/api.txt holds off."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "api.py"
sys.path.insert(0, str(TOOL.parent))
import api  # noqa: E402
import declarations  # noqa: E402

TYPES = r"""
/* >>one/types */

/* What a section says of no single name. */

/* Sizes of
 *   things. */
#define XD_SIZE_MAX 4
#define XD_HALF 0.5 /* of one */
#define XD_WHO "one\ttwo"
#define XD_TWICE(x) (2 * (x))

/* How it went: a code, and what it means. */
#define XD_CODES(X) \
    X(BAD, "it is bad") \
    X(WORSE, "it is worse")

/* A result. */
typedef enum xd_code {
    XD_FINE = 0, /* all is well */
#define XDI_CODE(name, text) XD_##name,
    XD_CODES(XDI_CODE)
#undef XDI_CODE
    XD_CODE_COUNT
} xd_code;

/* Bits. */
enum { XD_BIT_ONE = 1, XD_BIT_EIGHT = 8, XD_BIT_NEXT };

/* Nobody sees into it. */
typedef struct xd_thing xd_thing; /* really */

/* Three numbers. */
typedef struct xd_three {
    char one;
    int64_t two, three; /* two of them */
    /* Above it. */
    xd_code codes[XD_SIZE_MAX][2]; /* beside it,
                                      and below */
} xd_three;

/* Called back. */
typedef xd_code (*xd_call)(void *user, const xd_three *three);

/* Settings. */
typedef struct xd_thing_desc {
    xd_three three; /* a struct in a struct */
    const char *const *names;
    xd_call call;
    void (*done)(void *user, int code);
    struct xd_later *later;
} xd_thing_desc;
"""
FUNCTIONS = """
/* >>two/functions */

/* Makes one. */
XD_API xd_code xd_thing_create(const xd_thing_desc *desc, const uint32_t key[2], xd_thing **out);
XD_API void xd_thing_destroy(xd_thing *thing);
#ifdef XD_UNKNOWN_OPTION
XD_API void xd_hidden(void);
#endif
#ifndef XD_UNKNOWN_OPTION

/* One line. */
XD_API void xd_say(const char *format, ...) XD_PRINTF(1, 2);
#endif
"""
BACK_ENDS = """
/* ---- for back ends ---- */

/* >>three/tables */

/* For both compilers. */
#if defined(__CUDACC__)
#define XD_BOTH static inline __host__ __device__
#else
#define XD_BOTH static inline
#endif

/* Twice. */
XD_BOTH int xd_twice(int x) {
    const int one[] = { x };
    if (x) { return XD_TWICE(one[0]); }
    return 0;
}
static inline int xd_thrice(int x) { return 3 * x; }

/* Later. */
struct xd_later {
    int when;
};
"""


class Tree(unittest.TestCase):
    """A small tree of one header, and the tool run on it."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "docs").mkdir()
        self.names = self.root / "docs" / "api.txt"
        self.write("0.2.0")

    def write(self, version="0.2.0", *changes):
        """The header, with pairs (old, new) of text exchanged."""
        config = (ROOT / "src" / "base" / "config.h").read_text()
        for word, number in zip(("MAJOR", "MINOR", "PATCH"), version.split(".")):
            config = re.sub(r"(#define XD_VERSION_%s) \d+" % word, r"\1 " + number, config)
        text = "/* example.h - one line */\n#ifndef XDISTILL_H\n#define XDISTILL_H\n" + config + TYPES + FUNCTIONS + (
            BACK_ENDS + "#endif\n#ifdef XDISTILL_IMPLEMENTATION\nanything @ all\n#endif\n")
        for old, new in changes:
            self.assertEqual(text.count(old), 1, old)
            text = text.replace(old, new)
        self.text = text
        (self.root / "xdistill.h").write_text(text)

    def line(self, words):
        return self.text[:self.text.index(words)].count("\n") + 1

    def run_tool(self, *options):
        return subprocess.run([sys.executable, str(TOOL), "--root", str(self.root), *options],
                              capture_output=True, text=True)

    def assert_refused(self, message, *options):
        result = self.run_tool(*options)
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn(message, result.stderr)

    def assert_accepted(self, *options):
        result = self.run_tool(*options)
        self.assertEqual((result.returncode, result.stderr), (0, ""))

    def read(self):
        self.assert_accepted()
        return json.loads((self.root / "build" / "api.json").read_text())


def named(entries, name):
    return next(entry for entry in entries if entry["name"] == name)


class Reading(Tree):
    def test_finds_every_name_in_its_section_and_part(self):
        found = self.read()
        self.assertEqual(found["version"], "0.2.0")
        places = {entry["name"]: (entry["section"], entry["part"]) for table in (
            "structs", "enums", "macros", "opaque", "callbacks", "functions") for entry in found[table]
            if entry["section"] != "" and entry["name"]}
        one, two, three = ("one/types", "users"), ("two/functions", "users"), ("three/tables", "back ends")
        self.assertEqual(places, {
            **{name: one for name in ("XD_SIZE_MAX", "XD_HALF", "XD_WHO", "XD_TWICE", "XD_CODES", "xd_code", "xd_thing",
                                      "xd_three", "xd_call", "xd_thing_desc")},
            **{name: two for name in ("xd_thing_create", "xd_thing_destroy", "xd_say")},
            "XD_BOTH": three, "xd_twice": three, "xd_thrice": three, "xd_later": three})
        self.assertEqual([(s["name"], s["part"], s["comments"]) for s in found["sections"]][1:], [
            ("one/types", "users", ["What a section says of no single name."]), ("two/functions", "users", []),
            ("three/tables", "back ends", [])])

    def test_finds_values_as_the_compiler_has_them(self):
        found = self.read()
        self.assertEqual([(v["name"], v["value"], v["comment"]) for v in named(found["enums"], "xd_code")["values"]], [
            ("XD_FINE", 0, "all is well"), ("XD_BAD", 1, ""), ("XD_WORSE", 2, ""), ("XD_CODE_COUNT", 3, "")])
        self.assertEqual(named(named(found["enums"], "xd_code")["values"], "XD_WORSE")["row"],
                         ["WORSE", '"it is worse"'])
        self.assertEqual([v["value"] for v in named(found["enums"], "")["values"]], [1, 8, 9])
        self.assertEqual([named(found["macros"], name)["value"] for name in ("XD_SIZE_MAX", "XD_HALF", "XD_WHO")],
                         [4, 0.5, "one\ttwo"])
        self.assertEqual(named(found["macros"], "XD_TWICE")["parameters"], ["x"])

    def test_finds_fields_with_place_type_and_comment(self):
        found = self.read()
        three = named(found["structs"], "xd_three")
        self.assertEqual([(f["name"], f["offset"], f["size"], f["comment"]) for f in three["fields"]], [
            ("one", 0, 1, ""), ("two", 8, 8, "two of them"), ("three", 16, 8, "two of them"),
            ("codes", 24, 32, "Above it.\nbeside it,\nand below")])
        self.assertEqual((three["size"], three["alignment"]), (56, 8))
        codes = three["fields"][3]
        self.assertEqual((codes["kind"], codes["base"], codes["array"], codes["array_text"]),
                         ("enum", "xd_code", [4, 2], ["XD_SIZE_MAX", "2"]))
        desc = {f["name"]: f for f in named(found["structs"], "xd_thing_desc")["fields"]}
        self.assertEqual(desc["names"]["type"], "const char *const *")
        self.assertEqual((desc["names"]["base"], desc["names"]["pointers"], desc["names"]["const"]), ("char", 2, True))
        self.assertEqual([desc[name]["kind"] for name in ("three", "call", "done", "later")],
                         ["struct", "callback", "function", "struct"])
        self.assertEqual([a["name"] for a in desc["done"]["function"]["arguments"]], ["user", "code"])

    def test_finds_functions_with_arguments_and_the_comment_of_their_block(self):
        functions = self.read()["functions"]
        create, destroy = named(functions, "xd_thing_create"), named(functions, "xd_thing_destroy")
        self.assertEqual(create["declaration"],
                         "xd_code xd_thing_create(const xd_thing_desc *desc, const uint32_t key[2], xd_thing **out)")
        self.assertEqual([(a["name"], a["base"], a["pointers"], a["const"]) for a in create["arguments"]], [
            ("desc", "xd_thing_desc", 1, True), ("key", "uint32_t", 1, True), ("out", "xd_thing", 2, False)])
        self.assertEqual((destroy["comment"], destroy["comment_of"]), ("Makes one.", "xd_thing_create"))
        say = named(functions, "xd_say")
        self.assertEqual((say["variadic"], say["conditions"]), (True, ["ifndef XD_UNKNOWN_OPTION"]))
        self.assertEqual([named(functions, name)["inline"] for name in ("xd_say", "xd_twice", "xd_thrice")],
                         [False, True, True])

    def test_the_binding_calls_a_macro_that_calls_a_function(self):
        self.write("0.2.0", ("#define XD_WHO", "#define xd_thing_make(desc, out) xd_thing_create((desc), XD_BIT_NEXT + 1, (out))\n"
                             "#define XD_HERE(x) xd_thing_create((x), __FILE__, 0)\n#define XD_WHO"))
        self.assert_accepted()
        binding = {}
        exec((self.root / "build" / "xdistill_ctypes.py").read_text(), binding)
        self.assertEqual(list(binding["MACROS"]), ["xd_thing_make"])
        function, macro = binding["MACROS"]["xd_thing_make"]
        self.assertEqual((function, macro(lambda *arguments: arguments)("desc", "out")),
                         ("xd_thing_create", ("desc", 10, "out")))
        self.assertEqual((binding["XD_WHO"], binding["xd_three"].codes.offset), (b"one\ttwo", 24))

    def test_names_the_line_of_what_it_does_not_know(self):
        field, function = "    char one;\n", "XD_API void xd_thing_destroy(xd_thing *thing);\n"
        for old, new, message in (
                (field, "    unsigned one : 3;\n", "a bit field"),
                (field, "    struct { int x; } one;\n", "a struct defined inside another declaration"),
                (field, "    xd_missing one;\n", "xd_missing is no type that this header declares"),
                (function, "typedef union xd_either { int x; float y; } xd_either;\n", "a union"),
                (function, "typedef struct { int x; } xd_untagged;\n", "a struct without a tag"),
                (function, "typedef int xd_number;\n", "typedef xd_number: neither a struct, an enum nor a"),
                (function, "XD_API int xd_count;\n", "the object xd_count: a header declares no objects"),
                (function, "XD_API int xd_old_style();\n", "() says nothing of the arguments"),
                (function, "int xd_unmarked(void);\n", "xd_unmarked is not marked XD_API"),
                (function, "XD_CODES(XDI_DECLARE)\n", "XD_CODES is no type that this header declares"),
                (function, "#warning once\n", "#warning is no directive of a public header"),
                (function, "#define LIMIT 3\n", "the macro LIMIT has no XD_ prefix"),
                (function, "#if 1 /* here */\nXD_API int xd_one(void);\n#endif\nXD_API int xd_cut(\n#if 2\nint x);\n#endif\n",
                 "a directive inside parentheses"),
                ("    XD_CODES(XDI_CODE)\n", "    XD_EXTRA, XD_CODES(XDI_CODE)\n", "XD_CODES does not stand on a line of its own"),
                (function, "XD_API @ int xd_odd(void);\n", "@ is no type that this header declares")):
            self.write("0.2.0", (old, new))
            shown = "#if 2" if "#if 2" in new else new.split("\n")[0].strip()
            self.assert_refused("xdistill.h:%d: %s" % (self.line(shown), message))

    def test_an_error_of_the_preprocessor_names_the_line(self):
        self.write("0.2.0", ("#define XD_SIZE_MAX 4\n", "#define XD_SIZE_MAX 4\n#if XD_CODES(\n#endif\n"))
        self.assert_refused("xdistill.h:%d:" % self.line("#if XD_CODES("))

    def test_leaves_the_verdict_on_constants_to_the_compiler(self):
        self.write("0.2.0", ("#define XD_SIZE_MAX 4\n", "#define XD_SIZE_MAX 4\n#define XD_ODD xd_nowhere\n"))
        self.assert_refused("xdistill.h:%d:" % self.line("#define XD_ODD"))

    def test_a_misreading_does_not_pass_the_probe(self):
        def drop_field(reader):
            named_item(reader, "xd_three").fields.pop(1)

        def swap_type(reader):
            named_item(reader, "xd_three").fields[1].type = declarations.Base("double", False)

        def lose_const(reader):
            named_item(reader, "xd_thing_create").type.arguments[0].type.to.const = False

        def rename_value(reader):
            named_item(reader, "xd_code").values[0].text = "5"

        def named_item(reader, name):
            return next(item for item in reader.items if item.name == name)

        reading = api.Reader
        for spoil, message in ((drop_field, "xd_three.three: read at offset 8, compiled at 16"),
                               (swap_type, "the compiler does not agree"), (lose_const, "the compiler does not agree"),
                               (rename_value, "XD_FINE: read as 5, compiled as 0")):
            def spoiled(*arguments):
                reader = reading(*arguments)
                spoil(reader)
                return reader
            api.Reader = spoiled
            try:
                with self.assertRaisesRegex(declarations.Refused, message):
                    api.Api(self.root / "xdistill.h", [os.environ.get("CC", "cc")])
            finally:
                api.Reader = reading


class Sizes(Tree):
    """Functions of at most five arguments, structs of at most 24 fields, but for those that docs/interface.md names."""

    def declare(self, arguments, name="xd_wide"):
        words = "/* One line. */", "/* Wide. */\nXD_API int %s(%s);\n\n/* One line. */" % (
            name, ", ".join("int a%d" % i for i in range(arguments)))
        self.write("0.2.0", words)

    def rules(self, text):
        (self.root / "docs" / "interface.md").write_text("# Rules\n\nNo `xd_wide` here.\n\n" + text)

    def test_five_arguments_are_enough(self):
        self.declare(5)
        self.assert_accepted("--accept")
        self.declare(6)
        for option in ("--check", "--accept"):
            self.assert_refused("xd_wide takes 6 arguments, of 5 at most", option)

    def test_arithmetic_on_arrays_is_named(self):
        self.declare(6)
        self.rules("Arithmetic on arrays: `xd_other`,\n`xd_wide`.\n")
        self.assert_refused("docs/interface.md excepts xd_other, which has at most 5 arguments or is no function", "--accept")
        self.rules("Arithmetic on arrays: `xd_wide`.\n\nNot `xd_other`.\n")
        self.assert_accepted("--accept")
        self.declare(5)
        self.assert_refused("docs/interface.md excepts xd_wide, which", "--accept")

    def test_back_ends_may_take_more(self):
        self.write("0.2.0", ("int xd_thrice(int x)", "int xd_thrice(int x, int b, int c, int d, int e, int f)"))
        self.assert_accepted("--accept")

    def plant(self, text, name="xd_wide", path="teacher/internal.h"):
        part = self.root / "src" / path
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text("/* A part. */\ntypedef struct %s {\n%s} %s;\n" % (name, text, name))
        self.write()

    def test_structs_have_24_fields(self):
        for path in ("teacher/internal.h", "io/header.c", "cuda/loss.cu", "mpi/wait.c", "kernel/simd/loops.inc"):
            self.plant("".join("    int a%d; /* one; two { */\n" % i for i in range(24)), path=path)
            self.assert_accepted("--accept")
            self.plant("    int *a, b[2], c;\n" + "".join("    const xd_rows *a%d;\n" % i for i in range(22)), path=path)
            for option in ("--check", "--accept"):
                self.assert_refused("src/%s:2: xd_wide has 25 fields, of 24 at most" % path, option)
            (self.root / "src" / path).unlink()

    def test_fields_of_structs_inside_count(self):
        rows = "".join("        int a%d;\n" % i for i in range(22))
        for inside in ("    struct {\n%s    } inner;\n", "    union {\n%s    };\n", "    struct xd_inner {\n%s    } *inner;\n"):
            self.plant("    int a, b;\n" + inside % rows)
            self.assert_accepted("--accept")
            self.plant("    int a, b, c;\n" + inside % rows)
            self.assert_refused("src/teacher/internal.h:2: xd_wide has 25 fields", "--check")
        self.plant("    int a, b, c;\n    xd_inner inner[22];\n    enum { XD_ONE, XD_TWO };\n    enum { XD_THREE } which;\n")
        self.assert_accepted("--accept")

    def test_methods_are_no_fields(self):
        method = "    __device__ int f%d(int x, int y) const {\n        int z = x;\n        return z + y;\n    }\n"
        self.plant("    static const int limit = 3;\n    typedef int number;\n" +
                   "    xd_wide(int x) : a(x), b{ x } {}\n    int g(int x);\n" +
                   "".join("    xd_pair<int, float> a%d;\n" % i for i in range(24)) +
                   "".join(method % i for i in range(30)), path="cuda/loss.cuh")
        self.assert_accepted("--accept")

    def test_tables_of_functions_have_any_number(self):
        def table(functions, fields):
            self.plant("".join("    int (*a%d)(int (*of)(int x));\n    xd_call b%d;\n" % (i, i) for i in range(functions // 2)) +
                       "".join("    int c%d;\n" % i for i in range(fields)))
            path = self.root / "src" / "teacher" / "route.h"
            path.write_text("typedef int (*xd_call)(void *user);\n")
        table(30, 10)
        self.assert_accepted("--accept")
        table(30, 11)
        self.assert_refused("xd_wide has 41 fields", "--check")


class Holding(Tree):
    """docs/api.txt under the policy "held": what may change and what may not."""

    def setUp(self):
        super().setUp()
        self.assert_accepted("--accept")
        self.hold()

    def hold(self):
        self.names.write_text(self.names.read_text().replace("policy open", "policy held"))
        self.assert_accepted("--check")

    def assert_held(self, message, *changes, version="0.2.0"):
        self.write(version, *changes)
        before = self.names.read_text()
        self.assert_refused(message, "--check")
        self.assert_refused(message, "--accept")
        self.assertEqual(self.names.read_text(), before)

    def assert_allowed(self, added, *changes, version="0.2.0"):
        """Asked for at first, and in the file once it was accepted."""
        self.write(version, *changes)
        self.assert_refused("run `make api` to accept", "--check")
        self.assert_accepted("--accept")
        self.assertIn(added, self.names.read_text())
        self.assert_accepted("--check")

    def test_one_line_a_name(self):
        lines = self.names.read_text().split("\n")
        for line in ("opaque xd_thing", "callback typedef xd_code (*xd_call)(void *user, const xd_three *three)",
                     "struct xd_three", "    char one", "    xd_code codes[4][2]", "    void (*done)(void *user, int code)",
                     "enum xd_code", "    XD_WORSE = 2", "value XD_BIT_NEXT = 9", "macro XD_SIZE_MAX 4", "macro XD_TWICE(x)",
                     "function void xd_thing_destroy(xd_thing *thing)"):
            self.assertEqual(lines.count(line), 1, line)
        self.assertNotIn("xd_twice", "\n".join(lines))  # back ends

    def test_additions_are_asked_for_and_accepted(self):
        self.assert_allowed("function int xd_more(void)", ("/* One line. */", "/* More. */\nXD_API int xd_more(void);\n\n/* One line. */"))

    def test_a_name_does_not_leave_at_once(self):
        self.assert_held("xd_thing_destroy leaves without having been marked XD_DEPRECATED",
                         ("XD_API void xd_thing_destroy(xd_thing *thing);\n", ""))
        self.assert_held("XD_BIT_EIGHT leaves without", (" XD_BIT_EIGHT = 8, XD_BIT_NEXT ", " XD_BIT_NEXT = 9 "))
        self.assert_held("XD_HALF leaves without", ("#define XD_HALF 0.5 /* of one */\n", ""), version="0.3.0")

    def test_a_name_does_not_leave_for_the_back_ends(self):
        self.assert_held("xd_say leaves without", ("/* One line. */", "/* ---- for back ends ---- */\n/* One line. */"),
                         ("\n/* ---- for back ends ---- */\n\n/* >>three", "\n/* >>three"))

    def test_a_deprecated_name_leaves_in_the_next_minor_version(self):
        marked = ("XD_API void xd_thing_destroy", 'XD_API XD_DEPRECATED("use xd_thing_free") void xd_thing_destroy')
        gone = ("XD_API void xd_thing_destroy(xd_thing *thing);\n", "")
        self.assert_allowed("function void xd_thing_destroy(xd_thing *thing)  [deprecated in 0.2]", marked)
        self.assertEqual(named(self.read()["functions"], "xd_thing_destroy")["deprecated"], "use xd_thing_free")
        self.assert_held("xd_thing_destroy leaves in 0.2, the minor version that deprecated it", gone)
        self.assert_held("xd_thing_destroy leaves in 0.2, the minor", gone, version="0.2.1")
        self.assert_allowed("[deprecated in 0.2]", marked, version="0.3.0")  # the version that said so first
        self.assert_allowed("version 0.3.1", gone, version="0.3.1")
        self.assertNotIn("xd_thing_destroy", self.names.read_text())

    def test_types_enumerators_and_macros_can_be_deprecated(self):
        self.assert_allowed("struct xd_three  [deprecated in 0.2]",
                            ("typedef struct xd_three {", 'typedef struct XD_DEPRECATED("old") xd_three {'))
        self.assert_allowed("    XD_FINE = 0  [deprecated in 0.2]",
                            ("XD_FINE = 0,", 'XD_FINE XD_DEPRECATED("old") = 0,'))
        self.assert_allowed("macro XD_HALF 0.5  [deprecated in 0.2]",
                            ("/* of one */", "/* XD_DEPRECATED: of one */"))

    def test_fields_are_only_appended(self):
        self.assert_allowed("    int fourth", ("and below */\n", "and below */\n    int fourth;\n"))
        was = "xd_three: `int64_t two` stood where now `%s` stands"
        for new, found in (("    int64_t before, two, three;", "int64_t before"), ("    int64_t three, two;", "int64_t three"),
                           ("    int64_t three;", "int64_t three"), ("    double two;\n    int64_t three;", "double two")):
            self.assert_held(was % found, ("    int64_t two, three;", new), ("and below */\n", "and below */\n    int fourth;\n"))
        self.assert_held("`int fourth` stood where now `nothing` stands")

    def test_enumerators_keep_their_numbers_but_the_count_grows(self):
        self.assert_held("XD_BIT_NEXT was renumbered: 9, now 10", ("XD_BIT_EIGHT = 8,", "XD_BIT_EIGHT = 8, XD_BIT_NINE,"))
        self.assert_held("XD_BAD was renumbered: 1, now 2", ("    X(BAD,", '    X(FIRST, "new") \\\n    X(BAD,'))
        self.assert_allowed("    XD_CODE_COUNT = 4", ('X(WORSE, "it is worse")', 'X(WORSE, "it is worse") \\\n    X(WORST, "no")'))

    def test_prototypes_stay_but_for_the_names_of_arguments(self):
        first = "const xd_thing_desc *desc, const uint32_t key[2], xd_thing **out"
        for new in ("xd_thing_desc *desc, const uint32_t key[2], xd_thing **out", first + ", int more",
                    "const xd_thing_desc *desc, const uint64_t key[2], xd_thing **out", "xd_thing **out"):
            self.assert_held("xd_thing_create had another prototype", (first, new))
        self.assert_held("xd_thing_destroy had another prototype", ("XD_API void xd_thing_destroy", "XD_API int xd_thing_destroy"))
        self.assert_held("xd_call had another prototype", ("(void *user, const xd_three *three)", "(void *user, xd_three *three)"))
        self.assert_held("xd_say had another prototype", ("const char *format, ...) XD_PRINTF(1, 2)", "const char *format)"))
        self.assert_held("XD_TWICE had other parameters", ("#define XD_TWICE(x) (2 * (x))", "#define XD_TWICE(x, y) ((y) * (x))"),
                         ("XD_TWICE(one[0])", "2 * one[0]"))
        self.assert_allowed("xd_thing **made)", (first, first.replace("out", "made")))

    def test_a_name_does_not_become_another_thing(self):
        self.assert_held("xd_thing was an opaque type and is a struct",
                         ("typedef struct xd_thing xd_thing; /* really */", "typedef struct xd_thing { int x; } xd_thing;"))

    def test_an_open_file_takes_everything_and_says_so(self):
        self.names.write_text(self.names.read_text().replace("policy held", "policy open"))
        self.write("0.2.0", ("XD_API void xd_thing_destroy(xd_thing *thing);\n", ""))
        self.assert_refused("- function void xd_thing_destroy(xd_thing *thing)", "--check")
        self.assert_accepted("--accept")
        self.assert_accepted("--check")
        self.assertIn("policy open", self.names.read_text())


class Deprecating(unittest.TestCase):
    def test_every_compiler_warns_with_the_message(self):
        text = ('#include "base/config.h"\nXD_API XD_DEPRECATED("use xd_new") int xd_old(void);\n'
                'typedef struct XD_DEPRECATED("use xd_big") xd_small { int x; } xd_small;\n'
                'typedef enum xd_kind { XD_KIND_A XD_DEPRECATED("use XD_KIND_B") = 1, XD_KIND_B } xd_kind;\n'
                "int use(void);\nint use(void) { xd_small s; s.x = xd_old(); return s.x + XD_KIND_A; }\n")
        compilers = [one for one in ("gcc", "clang") if shutil.which(one)]
        self.assertTrue(compilers)
        for compiler in compilers:
            for language, standard in (("c", "c99"), ("c", "c11"), ("c++", "c++11"), ("c++", "c++17")):
                result = subprocess.run([compiler, "-x", language, "-std=" + standard, "-Wall", "-fsyntax-only", "-I",
                                         str(ROOT / "src"), "-"], input=text, capture_output=True, text=True)
                self.assertEqual(result.returncode, 0, result.stderr)
                for message in ("use xd_new", "use xd_big", "use XD_KIND_B"):
                    self.assertIn(message, result.stderr, "%s %s" % (compiler, standard))


if __name__ == "__main__":
    unittest.main()
