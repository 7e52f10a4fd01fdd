"""What a part of the library (a file under src/) declares, defines and uses, read from its text."""

import re

FEATURES = {"_POSIX_C_SOURCE", "_GNU_SOURCE", "_DEFAULT_SOURCE", "_XOPEN_SOURCE", "_DARWIN_C_SOURCE"}
TEMPLATE = ".inc"  # the end of a file's name that other parts include several times
INCLUDE = re.compile(r'^#[ \t]*include[ \t]+"([^"]+)".*\n', re.M)  # the manual shows indented ones
COMMENT_OR_STRING = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*\n", re.M)
OUR_NAME = re.compile(r"\b(?:xdi?|XDI?)_\w+")


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
    """(defined, announced, called): the names a part gives to the whole unit, those it only announces, and
    which of the defined ones are functions.

    Defined are macros, functions, objects, types, tags and constants; announced are prototypes and opaque
    types.
    """
    code = blank_comments(text)
    defined = set(re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", code, re.M))
    code = re.sub(r'extern "" \{', "", DIRECTIVE.sub("", code))
    code = re.sub(r"\(\s*\*\s*(?:const\s+)?(\w+)\s*(?:\[\w*\])?\)", r" \1 ", code)  # pointers to functions
    flat, bodies = collapse(code, "{", "}")
    for before, body in zip(re.findall(r"(\benum\b[\w\s]*|\S\s*)\{\}", flat), bodies):
        if before.startswith("enum"):
            defined.update(re.findall(r"(?:^|,)\s*(\w+)", collapse(body, "(", ")")[0]))
    flat = re.sub(r"\bXD_PRINTF\([^)]*\)", "", flat)
    flat = collapse(collapse(flat, "(", ")")[0], "[", "]")[0].replace("[]", "")
    called = set(re.findall(r"(\w+)\s*\(\)\s*\{\}", flat))
    defined.update(called)
    defined.update(re.findall(r"\b(?:struct|union|enum)\s+(\w+)\s*\{\}", flat))
    announced = set()
    for statement in re.sub(r"\(\)\s*\{\}", ";", flat).split(";"):
        head = statement.split("=")[0].strip()
        callable_only = head.endswith("()") and "=" not in statement and "typedef" not in head
        opaque = re.match(r"extern\b|(?:typedef\s+)?(?:struct|union|enum)\s+(\w+)(?:\s+\1)?$", head)
        last = re.search(r"[\w*}]\s*\b(\w+)$", head.replace("()", "").strip())
        if last:
            (announced if callable_only or opaque else defined).add(last.group(1))
    undefined = set(re.findall(r"^[ \t]*#[ \t]*undef[ \t]+(\w+)", blank_comments(text), re.M)) | FEATURES
    return defined - undefined, announced - undefined, called


class Parts:
    """The parts of one unit in their order: where each name is at home, and who uses it.

    A template counts as a part of whoever includes it.
    """

    def __init__(self, texts, templates=None):
        self.templates = templates or {}
        self.texts = {name: self.filled(text) for name, text in texts.items()}
        texts = self.texts
        self.names = {name: declared_names(text) for name, text in texts.items()}
        self.known = {}     # name -> the part that first makes it known
        self.makers = {}    # name -> all parts that make it known
        self.function = {}  # function -> the part with its body
        for part, (defined, announced, called) in self.names.items():
            for symbol in called:
                self.function.setdefault(symbol, part)
            for symbol in defined | announced:
                self.known.setdefault(symbol, part)
                self.makers.setdefault(symbol, set()).add(part)
        self.includes = {part: INCLUDE.findall(text) for part, text in texts.items()}
        self.used = {part: self._uses(part) for part in texts}

    def filled(self, text):
        """The text with every template in its place."""
        def fill(match):
            return self.filled(self.templates[match.group(1)]) if match.group(1) in self.templates else match.group()
        return INCLUDE.sub(fill, text)

    def _uses(self, part):
        """{name: line} of what a part names besides what it announces."""
        uses, code = {}, blank_comments(self.texts[part])
        announced = self.names[part][1]
        for match in OUR_NAME.finditer(code):
            symbol = match.group()
            if symbol in self.known and symbol not in uses and symbol not in announced:
                uses[symbol] = line_of(code, match.start())
        return uses

    def owner(self, symbol):
        """Where a function has its body, and where anything else is first made known."""
        return self.function.get(symbol, self.known[symbol])

    def reach(self, part):
        """The part and all that it includes, directly or by what it includes."""
        seen, todo = set(), [part]
        while todo:
            one = todo.pop()
            if one not in seen:
                seen.add(one)
                todo += [used for used in self.includes.get(one, ()) if used in self.texts]
        return seen

    def arrows(self):
        """{part: {other part: names}} of what each part takes from another."""
        arrows = {}
        for part, uses in self.used.items():
            for symbol in uses:
                if self.owner(symbol) != part:
                    arrows.setdefault(part, {}).setdefault(self.owner(symbol), set()).add(symbol)
        return arrows


def circles(arrows):
    """The strongly connected groups of more than one part."""
    index, low, stack, on, found = {}, {}, [], set(), []

    def visit(part):
        index[part] = low[part] = len(index)
        stack.append(part)
        on.add(part)
        for other in sorted(arrows.get(part, ())):
            if other not in index:
                visit(other)
            if other in on:
                low[part] = min(low[part], low[other])
        if low[part] == index[part]:
            group = []
            while not group or group[-1] != part:
                group.append(stack.pop())
                on.discard(group[-1])
            if len(group) > 1:
                found.append(sorted(group))

    for part in sorted(arrows):
        if part not in index:
            visit(part)
    return found
