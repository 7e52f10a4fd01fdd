#!/usr/bin/env python3
"""What tools/check_names.py and the checks of the index, of fragments and of cells find and pass over, on a small tree; what docs.py
finds wrong."""

import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import docs  # noqa: E402
import tutorial  # noqa: E402
from check_calls import check_calls  # noqa: E402
from check_docs import CELL, check_cells, check_figures, check_fragments, check_index  # noqa: E402
from check_names import check_names  # noqa: E402
from check_words import COMMENT, Count, SENTENCE, check_words, sentences  # noqa: E402
from render_markdown import Page  # noqa: E402

FILES = {
    "src/base/low.h": "typedef struct xd_low {\n    int depth; /* see xd_low_make */\n} xd_low;\nint xd_low_make(void);\n"
                      "#define XD_LIST(X) X(ONE, 1)\n#define XDI_ENUM(n, v) XD_LOW_##n,\n",
    "src/base/cpu/low.c": "/* As cpu/low.c says. */\nint xd_low_make(void) { return 1; }\n",
    "Makefile": "test: ## all\n\techo\n",
    "README.md": "`xd_low_make` makes `xd_low.depth`; `XD_LOW_ONE`, `xd_low_*`. See src/base/low.h and `make test`.\n",
    "CHANGELOG.md": "# Changelog\n\n## 2\n\nxd_low came.\n\n## 1\n\nxd_older came.\n",
}


class Names(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name, text in FILES.items():
            self.write(name, text)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def found(self, name, text):
        """The complaints once a file has this text."""
        self.write(name, text)
        complaints = list(check_names(self.root))
        self.write(name, FILES.get(name, ""))
        return complaints

    def test_passes_what_exists(self):
        self.assertEqual(list(check_names(self.root)), [])

    def test_finds_what_does_not_exist_in_pages(self):
        for text, message in (("xd_gone", "there is no xd_gone"), ("`xd_high_*`", "there is no xd_high_"),
                              ("`xd_low.width`", "xd_low has no field width"), ("src/base/high.h", "there is no src/base/high.h"),
                              ("`make tests`", "the Makefile has no target tests"),
                              ("    A=1 make all", "the Makefile has no target all"), ("xdistill_tpu.h", "there is no xdistill_tpu.h"),
                              ("XD_LOW_TWO", "there is no XD_LOW_TWO"), ("src/high/*.c", "there is no src/high/*.c")):
            for page in ("README.md", "docs/page.md"):
                self.assertEqual(self.found(page, "\n%s\n" % text), ["%s:2: %s" % (page, message)])

    def test_finds_what_does_not_exist_in_comments(self):
        self.assertEqual(self.found("src/base/low.c", "/* One\n * xd_gone */\n"), ["src/base/low.c:2: there is no xd_gone"])
        self.assertEqual(self.found("src/base/low.c", "/* base/high.c */\n"), ["src/base/low.c:1: there is no base/high.c"])

    def test_reads_the_newest_section_of_the_changelog_only(self):
        text = FILES["CHANGELOG.md"].replace("xd_low ", "xd_old ")
        self.assertEqual(self.found("CHANGELOG.md", text), ["CHANGELOG.md:5: there is no xd_old"])

    def test_finds_names_that_the_index_lacks(self):
        self.write("docs/api.txt", "version 1.0.0\npolicy open\n\nstruct xd_low\n    int depth\n\nenum xd_kind\n    XD_KIND_A = 0\n"
                   "\nvalue XD_LOW_ONE = 1\n\nfunction int xd_low_make(void)\n")
        self.write("docs/index.md", "`xd_low`, `xd_kind`, `XD_LOW_ONE`: all but one.\n")
        self.assertEqual(list(check_index(self.root)), ["docs/index.md: xd_low_make is missing"])
        self.write("xdistill_far.h", "typedef struct xd_far_desc {\n    int a;\n} xd_far_desc;\nXD_API int xd_comm_far(int a);\n"
                   "#if defined(XDISTILL_IMPLEMENTATION)\nXD_API int xd_comm_far(int a) { return xd_hidden(a); }\n#endif\n")
        self.assertEqual(list(check_index(self.root)), ["docs/index.md: xd_far_desc of xdistill_far.h is missing",
                         "docs/index.md: xd_comm_far of xdistill_far.h is missing", "docs/index.md: xd_low_make is missing"])
        (self.root / "xdistill_far.h").unlink()
        self.write("docs/index.md", "- `xd_low`, `xd_kind`: as `xd_low`.\n- `xd_low_make`, `XD_LOW_ONE`, `xd_low`: twice.\n")
        self.assertEqual(list(check_index(self.root)), ["docs/index.md: xd_low has two entries"])

    def test_finds_figures_that_their_page_lacks(self):
        self.write("docs/page.md", "| a | 1.97 to 2,048 |\n")
        self.write("README.md", "| speed | 1.97 of 2,048 | [page](docs/page.md) |\n")
        self.assertEqual(list(check_figures(self.root)), [])
        self.write("README.md", "| speed | 1.9 of 2,048 | [page](docs/page.md) |\n")
        self.assertEqual(list(check_figures(self.root)), ["README.md: 1.9 is not in docs/page.md"])
        self.write("README.md", "nothing\n")
        self.assertEqual(list(check_figures(self.root)), ["README.md has no table of numbers"])

    def test_compiles_fragments_of_pages(self):
        self.write("tools/fragments.h", "typedef int xd_result;\ntypedef struct { int ours; } xd_weight_map;\n#define XD_OK 0\n"
                   "extern int a;\n#if defined(PAGE_page)\nint one(int b);\n#endif\n")

        def found(name, *blocks):
            self.write("docs/%s.md" % name, "A page.\n\n" + "\n".join("```c\n%s\n```\n" % block for block in blocks))
            complaints = list(check_fragments(self.root))
            self.write("docs/%s.md" % name, "")
            return "\n".join(complaints)
        self.assertEqual(found("page", "if (a) {\n    a = one(a);\n}", "static int two(int b) {\n    return one(b);\n}", "return two(a);",
                               "{ .ours = 1 },\n{ 2 },"), "")
        self.assertIn("docs/other.md:8", found("other", "a = 1;", "a = one(a);"))  # declared for another page
        self.assertIn("docs/page.md:5", found("page", "static int two(int b) {\n    return three(b);\n}"))
        self.assertIn("docs/page.md:4", found("page", "a = one(a, a);"))
        self.assertIn("docs/page.md:4", found("page", "{ .theirs = 1 },"))

    def test_finds_long_comments_and_sentences_and_phrases(self):
        def found(name, text, **limits):
            self.write(name, text)
            return list(check_words([self.root / name], **limits))
        self.assertEqual(found("a.md", "One two. Word " + "word " * (SENTENCE - 2) + "end.\n"), [])
        self.assertIn("a sentence of %d words" % (SENTENCE + 1), found("a.md", "word " * SENTENCE + "end.\n" + 9 * "A b.\n")[0])
        self.assertEqual(found("a.md", "```\n" + "word " * 99 + "\n```\n| " + "cell " * 99 + "|\n"), [])
        self.assertIn("`nobody`: Here nobody waits.", found("a.md", "Here nobody waits.\n")[0])
        declaration = "/* %s. */\nXD_API int xd_a(void);\n"
        self.assertEqual(found("a.h", declaration % "Returns one\n * two. Errors: %s" % ("A, " * 50)), [])
        self.assertIn("a.h:1: a comment of %d words" % (COMMENT + 1), found("a.h", declaration % ("B c. " * (COMMENT // 2) + "d"))[0])
        self.assertIn("75 words for each of 1 functions", found("a.h", declaration % ("B c. " * 37))[-1])
        self.assertIn("on average", found("a.md", ("word " * 19 + "end. ") * 3)[-1])
        count = Count()
        count.words = 11
        self.assertEqual(list(count.limits(10)), ["the users' headers have 11 words of comments, at most 10"])
        self.assertEqual(list(sentences("A list:\n- one\n- two. Three\n\nfour")), ["A list:", "one", "two.", "Three", "four"])

    def test_finds_long_cells(self):
        table = "| what | how |\n|---|---|\n| a | %s |\n"
        for name in ("docs/page.md", "bench/results/README.md"):
            for text, length in ((table % ("x" * CELL), 0), (table % ("x" * (CELL + 1)), CELL + 1),
                                 ("```\n%s```\n" % (table % ("x" * 300)), 0), (table % ("%s\\|%s" % ("x" * 150, "x" * 150)), 302),
                                 ("x" * 300 + "\n", 0), ("```\n```\n%s" % (table % ("x" * 300)), 300)):
                self.write(name, text)
                found = list(check_cells(self.root))
                self.assertEqual(len(found), 1 if length else 0, text)
                if length:
                    self.assertIn("%s:%d: a cell of %d characters" % (name, 3 + 2 * text.startswith("```\n```"), length), found[0])
            self.write(name, "")


def page(text):
    return Page(text, lambda code: code.replace("<", "&lt;"), lambda words: words, lambda address: address).html


class Pages(unittest.TestCase):
    def test_markdown_becomes_html(self):
        self.assertEqual(page("# A `b`\n\ntext *s* **t**\nmore [w](u)"),
                         '<h1 id="a-b">A <code>b</code></h1>\n<p>text <em>s</em> <strong>t</strong>\nmore <a href="u">w</a></p>')
        self.assertEqual(page("| a | b |\n|---|---|\n| 1 | `2` |"), "<table>\n<tr><th>a</th><th>b</th></tr>\n"
                         "<tr><td>1</td><td><code>2</code></td></tr>\n</table>")
        self.assertEqual(page("- a\n  b\n- c\n  - d\n"), "<ul>\n<li>a\nb</li>\n<li>c\n<ul>\n<li>d</li>\n</ul></li>\n</ul>")
        self.assertEqual(page("```c\nint *a;\n\n# b\n```\n\n    x * y\n"), "<pre>int *a;\n\n# b</pre>\n<pre>x * y</pre>")
        self.assertEqual(page("1. a\n2. b\n\nc"), "<ol>\n<li>a</li>\n<li>b</li>\n</ol>\n<p>c</p>")

    def test_finds_what_is_wrong_with_pages(self):
        class Site:
            root = pathlib.Path("/nowhere")
            files = {"a.html": '<p id="x"><a href="b.html">b</a> <a href="#y">y</a></p><b>', "c.html": '<img src="https://e.org/i">'}
            where = {"xd_low": "a.html#xd_low"}
        found = "\n".join(docs.complaints(Site))
        for message in ("a.html: <b> of line 1 is not closed", "c.html loads something from elsewhere", "xd_low has no entry",
                        "a.html: b.html leads nowhere", "a.html: #y has no such anchor"):
            self.assertIn(message, found)


class Calls(unittest.TestCase):
    def complaints(self, page):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "docs").mkdir()
            (root / "docs/api.txt").write_text("function int xd_one(int a, int (*f)(int, int), char b)\nfunction void xd_none(void)\n"
                                               "function void xd_many(int a, ...)\n")
            (root / "README.md").write_text(page)
            return list(check_calls(root))

    def test_counts_arguments_in_blocks_and_in_the_text(self):
        self.assertEqual(self.complaints("`xd_one(a, f(1, 2), (x[]){ 1, 2 })`, `xd_one()`, `xd_many(1, 2, 3)`\n\n```c\nxd_one(a, b, c); /* d, e */\n```\n"), [])
        self.assertEqual(self.complaints("one\n\n```c\nxd_one(a, b);\n```\n"), ["README.md:3: xd_one takes 3 arguments, not 2: a, b"])
        self.assertEqual(self.complaints("see `xd_none(a)`"), ["README.md:1: xd_none takes 0 arguments, not 1: a"])
        self.assertEqual(self.complaints("    xd_one(a, ...)\n"), [])


class Quotes(unittest.TestCase):
    def test_parts_of_examples_are_whole_lines_of_them(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "examples").mkdir()
            (root / "examples/a.c").write_text("one;\ntwo;\nthree;\n")
            for text, complaint in (("two;\nthree;\n", None), ("two;\n", None), ("wo;\n", "4: this is no part of examples/a.c"),
                                    ("two;\none;\n", "4: this is no part of examples/a.c")):
                page = "text\n\n\n```c examples/a.c\n%s```\n" % text
                self.assertEqual(tutorial.misquoted(page, root), complaint)
                tutorial.write_files(page, root / "none")  # writes nothing

    def test_commands_take_an_object(self):
        for command, made in (("cc -O2 -c xdistill.c\n", "cp 'x.o' xdistill.o\n"),
                              ("cc -O2 a.c -o a -lm\n", "cc -O2 a.c -DXDISTILL_IMPLEMENTED 'x.o' -o a -lm\n"),
                              ("cc -O2 a.c xdistill.o -o a -lm\n", "cc -O2 a.c xdistill.o -o a -lm\n")):
            self.assertEqual(tutorial.with_object(command, "x.o"), made)


if __name__ == "__main__":
    unittest.main()
