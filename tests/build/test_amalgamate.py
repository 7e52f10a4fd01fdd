#!/usr/bin/env python3
"""What tools/amalgamate.py refuses, each on a small tree of its own."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "amalgamate.py"
TABLE = """/* example.h - one line
       #include "xdistill.h" */
#ifndef XDISTILL_H
#define XDISTILL_H
#include "base/low.h"
#include "comm/high.h"
#endif
#ifdef XDISTILL_IMPLEMENTATION
#include "base/low.c"
#include "comm/high.c"
#endif
"""
PARTS = {
    "base/low.h": "#ifndef XDI_BASE_LOW_H\n#define XDI_BASE_LOW_H\nXD_API int xd_low(void);\n#endif\n",
    "base/low.c": '/* Low. */\n#include "base/low.h"\n#include <string.h>\n\n'
                  "static int xdi_low_helper(void) { return 1; }\n"
                  "XD_API int xd_low(void) { return xdi_low_helper(); }\n",
    "comm/high.h": '#ifndef XDI_COMM_HIGH_H\n#define XDI_COMM_HIGH_H\n#include "base/low.h"\n'
                   "XD_API int xd_high(void);\n#endif\n",
    "comm/high.c": '/* High. */\n#include "comm/high.h"\nXD_API int xd_high(void) { return xd_low(); }\n',
}
sys.path.insert(0, str(TOOL.parent))
import amalgamate  # noqa: E402


class Amalgamate(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.write("xdistill.h", TABLE)
        for name, text in PARTS.items():
            self.write(name, text)

    def write(self, name, text):
        path = self.root / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run_tool(self, *options):
        return subprocess.run([sys.executable, str(TOOL), "--root", str(self.root), *options],
                              capture_output=True, text=True)

    def assert_refused(self, message, *options):
        result = self.run_tool(*options)
        self.assertEqual(result.returncode, 1)
        self.assertIn(message, result.stderr)

    def test_writes_each_part_once_in_order_without_quoted_includes(self):
        self.assertEqual(self.run_tool().returncode, 0)
        text = (self.root / "xdistill.h").read_text()
        self.assertEqual(text.count('#include "'), 1)  # the one that the manual shows
        self.assertNotIn("XDI_BASE_LOW_H", text)
        self.assertIn("#include <string.h>", text)
        parts = ("base/low", "comm/high", "base/low.c", "comm/high.c")
        places = [text.index(">>" + part + " ") for part in parts]
        self.assertEqual(places, sorted(places))
        self.assertEqual(self.run_tool("--check").returncode, 0)

    def test_writes_a_companion_with_its_own_hash_that_leaves_the_header_to_its_user(self):
        self.write("xdistill_mpi.h", '/* companion.h */\n#ifndef XDISTILL_MPI_H\n#define XDISTILL_MPI_H\n'
                                     '#include "mpi/world.h"\n#endif\n#include "mpi/world.c"\n')
        self.write("mpi/world.h", '#ifndef XDI_MPI_WORLD_H\n#define XDI_MPI_WORLD_H\n#include "xdistill.h"\n'
                                  "XD_API int xd_world(void);\n#endif\n")
        self.write("mpi/world.c", "/* World. */\nXD_API int xd_world(void) { return xd_low(); }\n")
        self.assertEqual(self.run_tool().returncode, 0)
        companion = self.root / "xdistill_mpi.h"
        text = companion.read_text()
        self.assertNotIn('#include "', text)
        self.assertLess(text.index("int xd_world(void);"), text.index(">>mpi/world.c "))
        self.assertNotIn("xd_world", (self.root / "xdistill.h").read_text())
        self.assertEqual(self.run_tool("--check").returncode, 0)
        self.write("mpi/world.c", "/* World. */\nXD_API int xd_world(void) { return 2; }\n")
        self.assert_refused("xdistill_mpi.h is stale", "--check")
        companion.write_text(text.replace("xd_low()", "3"))
        self.assert_refused("xdistill_mpi.h was edited by hand: move the edit to src/")

    def test_sees_a_stale_header(self):
        self.run_tool()
        self.write("base/low.c", PARTS["base/low.c"].replace("return 1", "return 2"))
        self.assert_refused("xdistill.h is stale", "--check")
        self.assertEqual(self.run_tool().returncode, 0)
        self.assertEqual(self.run_tool("--check").returncode, 0)

    def test_does_not_overwrite_an_edit_by_hand(self):
        self.run_tool()
        header = self.root / "xdistill.h"
        edited = header.read_text().replace("return 1", "return 2")
        header.write_text(edited)
        self.assert_refused("move the edit to src/", "--check")
        self.assert_refused("move the edit to src/")
        self.assertEqual(header.read_text(), edited)

    def test_refuses_a_part_that_is_not_listed(self):
        self.write("base/other.c", "")
        self.assert_refused("src/base/other.c: not listed")

    def test_refuses_a_part_that_is_listed_twice(self):
        self.write("xdistill.h", TABLE + '#include "base/low.c"\n')
        self.assert_refused("base/low.c is listed twice")

    def test_refuses_a_part_that_is_used_before_it_is_listed(self):
        lines = TABLE.split("\n")
        lines[4], lines[5] = lines[5], lines[4]
        self.write("xdistill.h", "\n".join(lines))
        self.assert_refused("src/comm/high.h:3: base/low.h is used before it is listed")

    def test_refuses_an_include_of_a_higher_layer(self):
        self.write("base/low.c", '/* Low. */\n#include "comm/high.h"\n')
        self.assert_refused("src/base/low.c:2: layer base must not include comm/high.h")

    def test_refuses_a_call_of_a_higher_layer(self):
        self.write("base/low.c", "/* Low. */\nXD_API int xd_low(void) { return xd_high(); }\n")
        self.assert_refused("src/base/low.c:2: layer base must not use xd_high of comm/high.c")

    def house(self):
        """A tree with one part in every folder, each wing left out by its option; {layer: text of its source}."""
        for path in (self.root / "src").glob("*/*"):
            path.unlink()
        table, sources = "/* every layer */\n", {}
        for end in ("h", "c"):
            for wing, layers in amalgamate.WINGS.items():
                guard = "#ifndef XDISTILL_NO_%s\n%%s#endif\n" % wing.upper() if wing != "core" else "%s"
                table += guard % "".join('#include "%s/part.%s"\n' % (layer, end) for layer in layers)
            table += "/* ---- left out by an option ---- */\n/* ---- implementation ---- */\n" if end == "h" else ""
        for layer in amalgamate.LAYERS:
            name = layer.replace("/", "_")
            guard = "XDI_%s_PART_H" % name.upper()
            self.write("%s/part.h" % layer, "#ifndef %s\n#define %s\nXD_API int xd_%s(void);\n#endif\n" % (guard, guard, name))
            sources[layer] = '/* %s. */\n#include "%s/part.h"\nXD_API int xd_%s(void) { return 0; }\n' % (name, layer, name)
            self.write("%s/part.c" % layer, sources[layer])
        self.write("xdistill.h", table)
        return sources

    def test_every_folder_is_walled_against_those_above_and_other_wings(self):
        sources = self.house()
        self.assertEqual(self.run_tool().returncode, 0)
        above = list(zip(amalgamate.LAYERS, amalgamate.LAYERS[1:]))
        refused = [pair for pair in above if amalgamate.WING[pair[0]] in ("core", amalgamate.WING[pair[1]])]
        refused += [("model", "text"), ("text", "model"), ("xtoken", "checkpoint"), ("dmd", "xtoken"), ("checkpoint", "dmd"), ("compat", "dmd")]
        for below, other in refused:
            part, text, name = "%s/part.c" % below, sources[below], other.replace("/", "_")
            self.write(part, text.replace("return 0", "return xd_%s()" % name))
            self.assert_refused("src/%s:3: layer %s must not use xd_%s of %s/part.c" % (part, below, name, other))
            self.write(part, text.replace("#include", '#include "%s/part.h"\n#include' % other, 1))
            self.assert_refused("src/%s:2: layer %s must not include %s/part.h" % (part, below, other))
            self.write(part, text)
        for user, used in (("compat", "loss"), ("dmd", "loss"), ("checkpoint", "io")):
            text = sources[user].replace("#include", '#include "%s/part.h"\n#include' % used, 1)
            self.write("%s/part.c" % user, text.replace("return 0", "return xd_%s()" % used))
            self.assertEqual(self.run_tool().returncode, 0)

    def test_a_part_that_stays_uses_what_an_option_leaves_out_in_its_guard_alone(self):
        sources = self.house()
        text = sources["dmd"].replace("#include", '#include "model/part.h"\n#include', 1)
        self.write("dmd/part.c", text.replace("return 0", "return xd_model()"))
        self.assert_refused("src/dmd/part.c:4: XDISTILL_NO_MODELS leaves out xd_model of model/part.c, and not this")
        self.write("dmd/part.c", text.replace("{ return 0; }", "{\n#ifndef XDISTILL_NO_MODELS\nreturn xd_model();\n#endif\nreturn 0;\n}"))
        self.assertEqual(self.run_tool().returncode, 0)
        table = (self.root / "src/xdistill.h").read_text()
        self.write("xdistill.h", table.replace("#ifndef XDISTILL_NO_MODELS", "#ifndef XDISTILL_NO_OTHERS"))
        self.assert_refused("src/model/part.c:1: XDISTILL_NO_MODELS does not leave it out")

    def test_the_core_calls_no_kernel_of_a_wing(self):
        sources = self.house()
        call = "{ return xd_table()->uld.merge(0); }"
        self.write("xtoken/part.c", sources["xtoken"].replace("{ return 0; }", call))
        self.assertEqual(self.run_tool().returncode, 0)
        self.write("loss/part.c", sources["loss"].replace("{ return 0; }", call))
        self.assert_refused("src/loss/part.c:3: the core calls a kernel of a wing: uld")

    def test_divides_the_implementation_into_sections_with_the_private_headers_that_each_needs(self):
        sources = self.house()
        self.write("kernel/private.h", "#ifndef XDI_KERNEL_PRIVATE_H\n#define XDI_KERNEL_PRIVATE_H\nXD_PRIVATE int xdi_kernel(void);\n#endif\n")
        table = (self.root / "src/xdistill.h").read_text()
        self.write("xdistill.h", table.replace('#include "kernel/part.c"', '#include "kernel/private.h"\n#include "kernel/part.c"'))
        for layer in ("kernel", "dmd"):
            self.write("%s/part.c" % layer, sources[layer].replace("#include", '#include "kernel/private.h"\n#include', 1))
        self.assertEqual(self.run_tool().returncode, 0)
        text = (self.root / "xdistill.h").read_text()
        self.assertIn("#if XDI_MAKES(1 << 1 | 1 << 6)\n/* >>kernel/private */", text)
        for layer, section in (("base", 3), ("kernel", 1), ("kernel/simd", 2), ("comm", 3), ("text", 4), ("model", 5), ("dmd", 6)):
            before = text[:text.index("/* >>%s/part.c */" % layer)]
            self.assertTrue(before[before.rindex("XDI_MAKES"):].startswith("XDI_MAKES(1 << %d)" % section), layer)

    def test_writes_a_smaller_header_of_the_wings_that_are_named(self):
        self.house()
        out = self.root / "small"
        self.assertEqual(self.run_tool("--wings", "core,models", "--out", str(out)).returncode, 0)
        text = (out / "xdistill.h").read_text()
        self.assertIn("int xd_model(void) { return 0; }", text)
        self.assertIn("#    define XDISTILL_NO_ACROSS\n", text)
        self.assertIn("#    define xd_text (XDISTILL_NO_ACROSS_leaves_out_xd_text)", text)
        self.assertNotIn("int xd_text(void)", text)
        self.assertNotIn("int xd_dmd(void)", text)
        self.assert_refused("--wings takes core, then across, models, diffusion; not core,other", "--wings", "core,other")
        self.assert_refused("not models", "--wings", "models")

    def test_refuses_a_circle(self):
        self.write("xdistill.h", TABLE + '#include "comm/other.c"\n')
        self.write("comm/high.h", PARTS["comm/high.h"].replace("xd_high(void);",
                                                               "xd_high(void); XD_API int xd_other(void);"))
        self.write("comm/other.c", '/* Other. */\n#include "comm/high.h"\n'
                                   "XD_API int xd_other(void) { return xd_high(); }\n")
        self.assertEqual(self.run_tool().returncode, 0)
        self.write("comm/high.c", PARTS["comm/high.c"].replace("xd_low()", "xd_other()"))
        self.assert_refused("src/comm/high.c:1: a circle: uses xd_other of comm/other.c")

    def test_refuses_a_name_whose_declaration_is_not_included(self):
        self.write("comm/high.c", PARTS["comm/high.c"].replace('#include "comm/high.h"\n', ""))
        self.assert_refused("src/comm/high.c:2: xd_low is declared in base/low.h, which this part does not include")

    def test_refuses_a_source_that_does_not_say_what_it_is(self):
        self.write("comm/high.c", PARTS["comm/high.c"].replace("/* High. */\n", ""))
        self.assert_refused("src/comm/high.c:1: the first line is no comment that says what this is")

    def leave_out(self, *lines):
        """The table with comm left out by an option, and with these lines at the end of the declarations."""
        guarded = "#ifndef XDISTILL_NO_COMM\n%s#endif\n"
        table = TABLE
        for include in ('#include "comm/high.h"\n', '#include "comm/high.c"\n'):
            table = table.replace(include, guarded % include)
        self.write("xdistill.h", table.replace("#endif\n#ifdef", "".join(lines) + "#endif\n#ifdef"))

    def test_lists_what_an_option_leaves_out(self):
        self.write("comm/high.h", PARTS["comm/high.h"].replace(
            "XD_API", "typedef struct xd_high_desc {\n    int count;\n} xd_high_desc;\nXD_API"))
        self.leave_out("/* ---- left out by an option ---- */\n")
        self.assertEqual(self.run_tool().returncode, 0)
        text = (self.root / "xdistill.h").read_text()
        self.assertIn("#if defined(XDISTILL_NO_COMM)\n"
                      "#    define xd_high_desc XDISTILL_NO_COMM_leaves_out_xd_high_desc\n"
                      "#    define xd_high (XDISTILL_NO_COMM_leaves_out_xd_high)\n#endif\n", text)
        self.assertNotIn("leaves_out_xd_low", text)

    def test_refuses_an_option_without_a_place_for_its_list(self):
        self.leave_out()
        self.assert_refused("src/xdistill.h:1: no line says where what options leave out is listed")

    def test_refuses_one_private_name_in_two_parts(self):
        self.write("comm/high.c", "/* High. */\nstatic long xdi_low_helper(void) { return 2; }\n")
        self.assert_refused("src/comm/high.c:1: xdi_low_helper is defined in base/low.c too")

    def test_refuses_names_without_a_prefix(self):
        for name, text in (("helper", "static int helper(int (*f)(int)) { return f(1); }\n"),
                           ("LIMIT", "#define LIMIT 3\n"), ("ONE", "enum { ONE = 1 };\n"),
                           ("pair", "struct pair { int a, b; };\n"),
                           ("table", "static const int table[] = { 1 };\n"),
                           ("number", "typedef double (*number)(void);\n")):
            self.write("comm/high.c", PARTS["comm/high.c"] + text)
            self.assert_refused("%s at file scope has no xd_ or xdi_ prefix" % name)


if __name__ == "__main__":
    unittest.main()
