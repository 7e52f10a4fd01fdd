#!/usr/bin/env python3
"""Write a browsable reference of the library: build/docs/index.html and what it links.

    tools/docs.py            write build/docs/
    tools/docs.py --check    write it to a temporary folder; fail when a link has no target, when a page loads
                             anything from elsewhere, or when a public name has no entry
    tools/docs.py --root D   work on another tree

The first page is the door: the tutorial, then README's table of who starts where, then the pages and the examples. There is one
page for each part of the header (declarations with their comments, structs with offsets, what takes a type), for each companion
header, each Markdown page of the repository, and each example. Every name in code leads to its declaration. The pages need no
server and load nothing from elsewhere.
"""

import argparse
import html
import json
import os
import pathlib
import re
import shlex
import shutil
import sys
from html.parser import HTMLParser

from api import Api
from declarations import clean
from render_markdown import Page

NAME = re.compile(r"\b(?:xd|XD)_\w+")
FILE = re.compile(r"(?<![\w/])[\w/]+\.md")
COMPANIONS = ["xdistill_mpi.h", "xdistill_nccl.h"]
COMPANION = re.compile(r"/\*((?:(?!\*/).)*)\*/\n((?:XD_API|typedef struct|typedef enum)\b(?:[^;{]|\{[^}]*\})*;)", re.S)
OUTSIDE = re.compile(r"""(?:src|srcset|data|poster)\s*=\s*["']?(?:https?:)?//|url\(|@import|<iframe|<link[^>]*https?:""")

STYLE = """
:root { color-scheme: light dark; --line: #8884; --code: #8881; --link: #0757b8 }
@media (prefers-color-scheme: dark) { :root { --link: #7db7ff } }
body { margin: 0; font: 16px/1.5 system-ui, sans-serif; display: flex }
nav { width: 17rem; flex: none; height: 100vh; overflow-y: auto; position: sticky; top: 0; padding: 1rem;
      box-sizing: border-box; border-right: 1px solid var(--line); font-size: 14px }
nav ul { list-style: none; padding: 0; margin: 0 0 .8rem } nav h2 { font-size: 14px; margin: .8rem 0 .2rem }
main { padding: 1rem 2rem 50vh; max-width: 62rem; min-width: 0; flex: 1 }
a { color: var(--link); text-decoration: none } a:hover { text-decoration: underline }
pre, code { font: 13.5px/1.45 ui-monospace, monospace }
pre { background: var(--code); padding: .6rem .8rem; overflow-x: auto; border-radius: 4px }
code { background: var(--code); padding: 0 .2em; border-radius: 3px } pre code { background: none; padding: 0 }
.file { margin: .8rem 0 0; font: bold 13.5px ui-monospace, monospace } .file + pre { margin-top: .2rem }
pre.prose { background: none; padding: 0; white-space: pre-wrap; overflow-wrap: anywhere }
table { border-collapse: collapse; margin: .6rem 0 } td, th { border: 1px solid var(--line); padding: .15rem .5rem;
      text-align: left; vertical-align: top }
h3 { margin: 1.6rem 0 .3rem; font: bold 15px ui-monospace, monospace } h3 small { font-weight: normal; opacity: .7 }
h3:target, tr:target { outline: 2px solid var(--link); outline-offset: 3px }
#search { width: 100%; box-sizing: border-box; font: inherit; padding: .3rem } #found { max-height: 60vh; overflow-y: auto }
nav summary { cursor: pointer; font-weight: bold }
@media (max-width: 50rem) { body { display: block } nav { width: auto; height: auto; position: static; border-right: 0;
      border-bottom: 1px solid var(--line) } main { padding: 1rem } table { display: block; overflow-x: auto } #found { max-height: 40vh }
      h3 { overflow-wrap: anywhere } }
"""

SCRIPT = """
"use strict";
const box = document.getElementById("search"), list = document.getElementById("found");
if (window.innerWidth < 800) document.querySelector("nav details").open = false;
function look() {
    const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
    list.textContent = "";
    if (!words.length) return;
    const hits = NAMES.filter(([name]) => words.every(word => name.toLowerCase().includes(word)));
    const rank = ([name]) => {
        const at = name.toLowerCase().replace(/^xd_/, "").indexOf(words[0].replace(/^xd_/, ""));
        return (at < 0 ? 99 : at) * 1000 + name.length;
    };
    for (const [name, address, kind] of hits.sort((a, b) => rank(a) - rank(b)).slice(0, 60)) {
        const item = list.appendChild(document.createElement("li")), link = item.appendChild(document.createElement("a"));
        link.href = address;
        link.textContent = name;
        link.title = kind;
    }
}
box.addEventListener("input", look);
box.addEventListener("keydown", event => {
    const first = list.querySelector("a");
    if (event.key === "Enter" && first) location.href = first.href;
});
document.addEventListener("keydown", event => {
    if (event.key === "/" && event.target !== box) { event.preventDefault(); box.focus(); }
});
"""


def page_of(section):
    return "api_%s.html" % (section or "head").replace("/", "_")


def groups_of(table):
    """[(title, [section])] from the comments over the lists of headers in src/xdistill.h."""
    groups = []
    for line in table.split("/* ---- implementation ---- */")[0].split("\n"):
        title = re.fullmatch(r"/\* ([A-Z][^*]{2,60})\.(?: \*/)?", line)
        include = re.match(r'#include "(\w+/\w+)\.h"', line)
        if title or line.startswith("/* Kernel tables"):
            groups.append((title.group(1) if title else "For back ends", []))
        elif include:
            groups[-1][1].append(include.group(1))
    return [(title, sections) for title, sections in groups if sections]


class Site:
    """All pages as {name of the file: text}."""

    def __init__(self, root):
        self.root, self.files = root, {}
        self.api = Api(root / "xdistill.h", shlex.split(os.environ.get("CC", "cc"))).json()
        self.sections = {section["name"]: section for section in self.api["sections"]}
        self.groups = groups_of((root / "src/xdistill.h").read_text())
        self.entries = {name: [] for name in self.sections}
        for table in ("structs", "enums", "macros", "opaque", "callbacks", "functions"):
            for entry in self.api[table]:
                self.entries[entry["section"]].append((entry["line"], table, entry))
        self.texts = {path.relative_to(root).as_posix(): "%s.html" % path.stem.lower() for path in
                      [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").glob("*.md"))]}
        if "docs/index.md" in self.texts:
            self.texts["docs/index.md"] = "tasks.html"
        self.titles = {path: self.title_of(path) for path in self.texts}
        self.examples = {path.relative_to(root).as_posix(): "example_%s.html" % path.stem for path in
                         sorted([*root.glob("examples/*.c"), *root.glob("examples/*.cpp"), *root.glob("examples/cuda/*.cu")])}
        self.where, self.kinds = {}, {}
        self.find_names()
        self.takers = self.find_takers()
        self.companions = {name: self.read_companion(name) for name in COMPANIONS if (root / name).is_file()}
        self.write()

    def title_of(self, path):
        """The first heading of a Markdown page."""
        heading = re.search(r"^# (.*)$", (self.root / path).read_text(), re.M)
        return heading.group(1) if heading else path

    # where names are

    def know(self, name, page, kind):
        if name and name not in self.where:
            self.where[name], self.kinds[name] = "%s#%s" % (page, name), kind

    def find_names(self):
        for section, entries in self.entries.items():
            for _, table, entry in entries:
                self.know(entry["name"], page_of(section), table.rstrip("s"))
                for value in entry.get("values", []):
                    self.know(value["name"], page_of(section), "value of " + (entry["name"] or "an enum"))

    def find_takers(self):
        """{type: functions that take or return it}."""
        takers = {}
        for function in self.api["functions"]:
            bases = {about.get("base") for about in [function["result"], *function["arguments"]]}
            for base in bases - {None}:
                takers.setdefault(base, []).append(function["name"])
        return takers

    def read_companion(self, name):
        """(the opening comment, [(comment, declaration, names)]) of a companion header."""
        text = (self.root / name).read_text()
        text = text[:text.index("#if defined(XDISTILL_IMPLEMENTATION)")]
        opening = clean(re.match(r"/\*.*?\*/", text, re.S).group())
        found = []
        for comment, declaration in COMPANION.findall(text):
            last = re.search(r"\}\s*(xd_\w+)\s*;$", declaration)
            names = [last.group(1)] if last else re.findall(r"\b(xd_\w+)\(", declaration)
            found.append((clean("/*%s*/" % comment), declaration, names))
            for one in names:
                self.know(one, "api_%s.html" % name.replace(".", "_"), "of " + name)
        return opening, found

    # pieces of HTML

    def linked(self, text, own=()):
        """Escaped text whose names lead to their declarations."""
        out, at = [], 0
        for match in NAME.finditer(text):
            name = match.group()
            out.append(html.escape(text[at:match.start()], False))
            out.append('<a href="%s">%s</a>' % (self.where[name], name) if name in self.where and name not in own else name)
            at = match.end()
        return "".join(out) + html.escape(text[at:], False)

    def code(self, text):
        """The HTML of code in a Markdown page: names lead to their declarations, pages to pages."""
        if text in self.texts or text in self.examples:
            return '<a href="%s">%s</a>' % (self.texts.get(text) or self.examples[text], text)
        return self.linked(text)

    def words(self, text):
        """The HTML of other text in a Markdown page: the pages it names are links."""
        return FILE.sub(lambda match: '<a href="%s">%s</a>' % (self.texts[match.group()], match.group())
                        if match.group() in self.texts else match.group(), html.escape(text, False))

    def prose(self, comment, own=()):
        """A comment of the header: its lines stay, because tables and formulas are drawn in it."""
        return '<pre class="prose">%s</pre>' % self.linked(comment, own) if comment else ""

    def wrapped(self, declaration):
        """A prototype; arguments that do not fit go on in further lines."""
        if len(declaration) <= 100 or "(" not in declaration:
            return declaration + ";"
        head, arguments = declaration.split("(", 1)
        lines, indent = [head + "("], " " * (len(head) + 1 if len(head) < 60 else 8)
        for argument in re.split(r"(?<=,) ", arguments):
            if len(lines[-1]) + len(argument) > 100 and lines[-1].strip():
                lines.append(indent)
            lines[-1] += ("" if lines[-1].endswith(("(", " ")) or not lines[-1].strip() else " ") + argument
        return "\n".join(lines) + ";"

    def page(self, file, title, body):
        navigation = ['<h2><a href="index.html">xdistill %s</a></h2>' % self.api["version"],
                      '<input id="search" type="search" placeholder="name   ( / )" aria-label="search by name">',
                      '<ul id="found"></ul>', "<h2>Pages</h2><ul>"]
        navigation.insert(3, "<details open><summary>Contents</summary>")
        navigation += ['<li><a href="%s">%s</a></li>' % (address, html.escape(self.titles[name])) for name, address in self.texts.items()]
        navigation.append('<li><a href="manual.html">Manual of the header</a></li>')
        for group, sections in self.groups:
            navigation.append("</ul><h2>%s</h2><ul>" % group)
            navigation += ['<li><a href="%s">%s</a></li>' % (page_of(one), one) for one in sections if self.entries.get(one)]
        navigation.append("</ul><h2>Companions</h2><ul>")
        navigation += ['<li><a href="api_%s.html">%s</a></li>' % (name.replace(".", "_"), name) for name in self.companions]
        navigation.append("</ul></details><ul>")
        self.files[file] = (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>%s</title>\n'
            '<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="style.css"></head>\n'
            '<body><nav>%s</ul></nav>\n<main>\n%s\n</main>\n<script src="names.js"></script><script src="search.js"></script>\n'
            '</body></html>\n' % (html.escape(title), "\n".join(navigation), body))

    # pages

    def write(self):
        for section in self.sections:
            if self.entries[section]:
                self.page(page_of(section), section, self.section(section))
        for name, (opening, found) in self.companions.items():
            body = ["<h1>%s</h1>" % name, "<pre>%s</pre>" % self.linked(opening)]
            for comment, declaration, names in found:
                body.append('<h3 id="%s">%s</h3><pre>%s</pre>%s' % (names[0], names[0], self.linked(declaration, names),
                                                                   self.prose(comment, names)))
            self.page("api_%s.html" % name.replace(".", "_"), name, "\n".join(body))
        for path, file in self.texts.items():
            self.markdown(path, file)
        for path, file in self.examples.items():
            self.page(file, path, "<h1>%s</h1><pre>%s</pre>" % (path, self.linked((self.root / path).read_text())))
        self.page("manual.html", "Manual of the header", self.manual())
        self.page("index.html", "xdistill", self.front())
        self.files["style.css"] = STYLE.lstrip()
        self.files["search.js"] = SCRIPT.lstrip()
        names = [[name, self.where[name], self.kinds[name]] for name in sorted(self.where)]
        self.files["names.js"] = "const NAMES = %s;\n" % json.dumps(names)

    def markdown(self, path, file):
        here = pathlib.PurePosixPath(path).parent

        def target(address):
            if re.match(r"[a-z]+:", address) or address.startswith("#"):
                return address
            name, _, anchor = address.partition("#")
            name = os.path.normpath(str(here / name))
            if name in self.examples:
                return self.examples[name]
            if name in self.texts:
                return self.texts[name] + ("#" + anchor if anchor else "")
            return os.path.relpath(self.root / name, self.root / "build/docs")

        page = Page((self.root / path).read_text(), self.code, self.words, target)
        title = re.sub(r"<[^>]*>", "", page.headings[0][2]) if page.headings else path
        self.page(file, html.unescape(title), page.html)

    def front(self):
        """The door: what this is, the tutorial, who starts where, the pages by subject, the examples."""
        readme = (self.root / "README.md").read_text() if "README.md" in self.texts else ""
        opening = re.search(r"^# [^\n]*\n\n(.*?)\n\n", readme, re.S)
        table = re.search(r"^## Where to start\n\n(\|.*?)\n\n", readme, re.S | re.M)
        body = ["<h1>xdistill %s</h1>" % self.api["version"], "<p>%s</p>" % self.words(opening.group(1)) if opening else ""]
        if "docs/tutorial.md" in self.texts:
            body.append('<p><b><a href="tutorial.html">%s</a></b></p>' % html.escape(self.titles["docs/tutorial.md"]))
        if table:
            body.append(Page(table.group(1) + "\n", self.code, self.words, lambda address: self.texts.get(address, "readme.html")).html)
        body.append("<h2>Pages</h2><ul>%s</ul>" % "".join(
            '<li><a href="%s">%s</a></li>' % (file, html.escape(self.titles[path])) for path, file in self.texts.items()))
        body.append('<p><a href="manual.html">Manual of the header</a>: options, errors, ranks, and all names in its order.</p>')
        body.append("<h2>Examples</h2><ul>%s</ul>" % "".join(
            '<li><a href="%s">%s</a> %s</li>' % (file, path, html.escape(self.about(path))) for path, file in self.examples.items()))
        return "\n".join(body)

    def about(self, path):
        """The first sentence of an example's opening comment."""
        comment = re.match(r"/\*(.*?)\*/|((?://[^\n]*\n)+)", (self.root / path).read_text(), re.S)
        words = " ".join(re.sub(r"^\s*(?:\*|//)", "", comment.group(1) or comment.group(2), flags=re.M).split()) if comment else ""
        return re.split(r"(?<=[.:])\s", words)[0]

    def manual(self):
        """What the header says of itself, and all names by section."""
        body = ["<h1>Manual of the header</h1>"]
        head = self.sections[""]["comments"]
        body.append("<pre>%s</pre>" % self.linked(head[0]) if head else "")
        for group, sections in self.groups:
            body.append("<h2>%s</h2><table>" % group)
            for section in sections:
                names = ['<a href="%s">%s</a>' % (self.where[entry["name"]], entry["name"])
                         for _, _, entry in sorted(self.entries.get(section, []), key=lambda one: one[0]) if entry["name"]]
                if names:
                    body.append('<tr><td><a href="%s">%s</a></td><td>%s</td></tr>' % (page_of(section), section, ", ".join(names)))
            body.append("</table>")
        return "\n".join(body)

    def section(self, name):
        """One part of the header, its entries in the order of the header; those that share a comment stand together."""
        section, titles = self.sections[name], {title + "." for title, _ in self.groups}
        body = ["<h1>%s</h1>" % (name or "xdistill.h"),
                "<p>%s</p>" % ("For users." if section["part"] == "users" else "For back ends: may change until 1.0.")]
        body += [self.prose(comment) for comment in section["comments"] if comment not in titles and not comment.startswith("Kernel tables,")]
        entries = sorted(self.entries[name], key=lambda one: one[0])
        for number, (_, table, entry) in enumerate(entries):
            following = entries[number + 1][2] if number + 1 < len(entries) else {}
            shared = entry.get("comment_of") or entry["name"]
            together = bool(following.get("comment_of")) and following["comment_of"] == shared
            body.append(getattr(self, "show_" + table)(entry))
            if not together:
                body.append(self.prose(entry["comment"], [entry["name"]]))
                body.append(self.uses(entry) if table in ("structs", "enums", "opaque", "callbacks") else "")
        return "\n".join(body)

    def title(self, entry, kind):
        name = entry["name"] or "constants"
        mark = ' id="%s"' % entry["name"] if entry["name"] else ""
        old = " <small>deprecated: %s</small>" % html.escape(entry["deprecated"]) if "deprecated" in entry else ""
        return '<h3%s>%s <small>%s</small>%s</h3>' % (mark, name, kind, old)

    def uses(self, entry):
        names = self.takers.get(entry["name"], [])
        if len(names) > 40:  # of contexts and of results
            return ""
        links = ", ".join('<a href="%s">%s</a>' % (self.where[name], name) for name in names)
        return "<p>Taken or given by %s.</p>" % links if links else ""

    def show_functions(self, entry):
        return self.title(entry, "function") + "<pre>%s</pre>" % self.linked(self.wrapped(entry["declaration"]), [entry["name"]])

    def show_callbacks(self, entry):
        return self.title(entry, "callback") + "<pre>%s</pre>" % self.linked(entry["declaration"] + ";", [entry["name"]])

    def show_opaque(self, entry):
        return self.title(entry, "object") + "<pre>typedef struct %s %s;</pre>" % (entry["name"], entry["name"])

    def show_macros(self, entry):
        parameters = "(%s)" % ", ".join(entry["parameters"]) if entry["form"] == "function" else ""
        text = entry["text"].replace(") X(", ")\n    X(")
        return self.title(entry, "macro") + "<pre>#define %s%s %s</pre>" % (
            entry["name"], parameters, self.linked(text, [entry["name"]]))

    def show_enums(self, entry):
        rows = "".join('<tr id="%s"><td><code>%s</code></td><td>%d</td><td>%s</td></tr>' % (
            value["name"], value["name"], value["value"], self.linked(value["comment"])) for value in entry["values"])
        return self.title(entry, "enum") + "<table><tr><th>name</th><th>value</th><th></th></tr>%s</table>" % rows

    def show_structs(self, entry):
        rows = []
        for field in entry["fields"]:
            lengths = "".join("[%s]" % length for length in field.get("array", []))
            kind = field["type"].split("[")[0].rstrip() if lengths else field["type"]
            rows.append("<tr><td>%d</td><td><code>%s</code></td><td><code>%s</code></td><td>%s</td></tr>" % (
                field["offset"], self.linked(kind), field["name"] + lengths, self.linked(field["comment"])))
        return self.title(entry, "struct, %d bytes" % entry["size"]) + (
            "<table><tr><th>offset</th><th>type</th><th>field</th><th></th></tr>%s</table>" % "\n".join(rows))


class Nesting(HTMLParser):
    """Finds tags that are closed in another order than they were opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.wrong = [], []
        self.feed(text)
        self.wrong += ["<%s> of line %d is not closed" % one for one in self.open]

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "link", "input", "br"):
            self.open.append((tag, self.getpos()[0]))

    def handle_endtag(self, tag):
        if self.open and self.open[-1][0] == tag:
            self.open.pop()
        else:
            self.wrong.append("line %d closes <%s> out of order" % (self.getpos()[0], tag))


def complaints(site):
    """What is wrong with the pages: names without an entry, links that lead nowhere, resources from elsewhere."""
    anchors = {}
    for file, text in site.files.items():
        if file.endswith(".html"):
            yield from ("%s: %s" % (file, one) for one in Nesting(text).wrong[:3])
        found = re.findall(r'\bid="([^"]*)"', text)
        anchors[file] = set(found)
        for anchor in sorted({one for one in found if found.count(one) > 1}):
            yield "%s: two things are called %s" % (file, anchor)
        if OUTSIDE.search(text):
            yield "%s loads something from elsewhere: %s" % (file, OUTSIDE.search(text).group())
    for name, address in site.where.items():
        file, _, anchor = address.partition("#")
        if anchor not in anchors.get(file, ()):
            yield "%s has no entry" % name
    for file, text in site.files.items():
        for address in sorted(set(re.findall(r'\b(?:href|src)="([^"]*)"', text))):
            address = html.unescape(address)
            page, _, anchor = address.partition("#")
            page = page or file
            if re.match(r"[a-z]+:", address):
                continue
            if page not in site.files and not (site.root / "build/docs" / page).resolve().exists():
                yield "%s: %s leads nowhere" % (file, address)
            elif anchor and page in site.files and anchor not in anchors[page]:
                yield "%s: %s has no such anchor" % (file, address)


def main():
    arguments = argparse.ArgumentParser(description="A browsable reference of the library.")
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    options = arguments.parse_args()
    root = options.root.resolve()
    site = Site(root)
    if options.check:
        found = list(complaints(site))
        for one in found:
            print(one, file=sys.stderr)
        return 1 if found else 0
    folder = root / "build/docs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file, text in site.files.items():
        (folder / file).write_text(text)
    print("%s: %d pages, %d names" % (folder / "index.html", sum(file.endswith(".html") for file in site.files), len(site.where)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
