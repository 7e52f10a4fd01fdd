"""The part of Markdown that README.md, CHANGELOG.md and docs/ use, as HTML.

Headings, paragraphs, lists, tables, fenced and indented code, `code`, **strong**, *stress* and [links](target). The
caller decides how names in code, files in plain text and targets of links are rendered.
"""

import html
import re

FENCE = re.compile(r"^```(.*)$")
ITEM = re.compile(r"^( *)(-|\d+\.) +(.*)$")
INLINE = re.compile(r"`([^`]+)`|\*\*(.+?)\*\*|\[([^]]+)\]\(([^)\s]+)\)|(?<![\w*])\*([^*\s][^*]*)\*(?!\w)", re.S)


def slug(title):
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


class Page:
    """Renders one page: `code(text)` gives the HTML of code, `words(text)` that of other text, `target(address)` where a
    link of the page goes."""

    def __init__(self, text, code, words, target):
        self.code, self.words, self.target = code, words, target
        self.headings = []  # (level, anchor, HTML)
        self.html = self.blocks(text.split("\n"))

    def inline(self, text):
        out, at = [], 0
        for match in INLINE.finditer(text):
            out.append(self.words(text[at:match.start()]))
            code, strong, words, address, stress = match.groups()
            if code is not None:
                out.append("<code>%s</code>" % self.code(code))
            elif strong is not None:
                out.append("<strong>%s</strong>" % self.inline(strong))
            elif stress is not None:
                out.append("<em>%s</em>" % self.inline(stress))
            else:
                out.append('<a href="%s">%s</a>' % (html.escape(self.target(address)), self.inline(words)))
            at = match.end()
        return "".join(out) + self.words(text[at:])

    def blocks(self, lines):
        """The HTML of lines that stand at one level."""
        out, at = [], 0
        while at < len(lines):
            line = lines[at]
            if not line.strip():
                at += 1
                continue
            if FENCE.match(line):
                made, at = self.fenced(lines, at)
            elif line.startswith("    "):
                made, at = self.indented(lines, at)
            elif re.match(r"#{1,6} ", line):
                made, at = self.heading(line), at + 1
            elif line.startswith("|"):
                made, at = self.table(lines, at)
            elif ITEM.match(line):
                made, at = self.list(lines, at)
            else:
                made, at = self.paragraph(lines, at)
            out.append(made)
        return "\n".join(out)

    def fenced(self, lines, at):
        end = at + 1
        while end < len(lines) and not lines[end].startswith("```"):
            end += 1
        name = FENCE.match(lines[at]).group(1).partition(" ")[2]  # ```c model.h
        title = '<p class="file">%s</p>' % html.escape(name) if "." in name else ""
        return title + "<pre>%s</pre>" % self.code("\n".join(lines[at + 1:end])), end + 1

    def indented(self, lines, at):
        end = at
        while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
            end += 1
        text = "\n".join(line[4:] for line in lines[at:end]).rstrip("\n")
        return "<pre>%s</pre>" % self.code(text), end

    def heading(self, line):
        marks, title = line.split(" ", 1)
        anchor, words = slug(title), self.inline(title)
        same = sum(re.fullmatch(re.escape(anchor) + r"(-\d+)?", other) is not None for _, other, _ in self.headings)
        anchor += "-%d" % same if same else ""  # as GitHub tells headings of one name apart
        self.headings.append((len(marks), anchor, words))
        return '<h%d id="%s">%s</h%d>' % (len(marks), anchor, words, len(marks))

    def table(self, lines, at):
        rows = []
        while at < len(lines) and lines[at].startswith("|"):
            cells = re.split(r"(?<!\\)\|", lines[at].strip()[1:-1])
            rows.append([cell.strip().replace("\\|", "|") for cell in cells])
            at += 1
        head = rows[0] if len(rows) > 1 and all(re.fullmatch(r":?-+:?", cell) for cell in rows[1]) else None
        out = ["<table>"]
        for kind, row in [("th", head)] * bool(head) + [("td", row) for row in rows[2 if head else 0:]]:
            out.append("<tr>%s</tr>" % "".join("<%s>%s</%s>" % (kind, self.inline(cell), kind) for cell in row))
        return "\n".join([*out, "</table>"]), at

    def list(self, lines, at):
        depth, mark = len(ITEM.match(lines[at]).group(1)), ITEM.match(lines[at]).group(2)
        tag, items = "ol" if mark[0].isdigit() else "ul", []
        while at < len(lines):
            match = ITEM.match(lines[at])
            inside = len(lines[at]) - len(lines[at].lstrip()) > depth
            if match and len(match.group(1)) == depth:
                items.append([match.group(3)])
            elif not lines[at].strip():
                following = next((line for line in lines[at:] if line.strip()), "")
                again = ITEM.match(following)
                if not (again and len(again.group(1)) == depth) and not following.startswith(" " * (depth + 2)):
                    break
                items[-1].append("")
            elif inside:
                items[-1].append(lines[at][depth + (3 if tag == "ol" else 2):])
            else:
                break
            at += 1
        made = []
        for item in items:
            body = self.blocks(item)
            single = re.fullmatch(r"<p>(.*)</p>", body, re.S)
            made.append("<li>%s</li>" % (single.group(1) if single and body.count("<p>") == 1 else
                                         re.sub(r"^<p>(.*?)</p>", r"\1", body, count=1, flags=re.S)))
        return "<%s>\n%s\n</%s>" % (tag, "\n".join(made), tag), at

    def paragraph(self, lines, at):
        end = at
        while end < len(lines) and lines[end].strip() and not lines[end].startswith(("#", "|", "```")) and (
                end == at or not ITEM.match(lines[end])):
            end += 1
        return "<p>%s</p>" % self.inline("\n".join(lines[at:end])), end
