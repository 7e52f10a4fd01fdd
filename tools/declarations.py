"""The declarations of a C header, read from its text: structs, enums, typedefs, functions and macros with their comments.

The reader knows only the C of a public header: anything else is an error that names the line, so
that nothing is skipped. The compiler's preprocessor decides which branch of an #if is active and what a macro of
enumerators expands to. The reader computes no number: constants, sizes and offsets come from a compiled probe.
"""

import re
import subprocess
import textwrap

TOKEN = re.compile(r"""
    (?P<comment>/\*.*?\*/|//[^\n]*)
  | (?P<directive>^[ \t]*\#(?:/\*.*?\*/|\\\n|[^\n])*)
  | (?P<string>"(?:\\.|[^"\\\n])*")
  | (?P<character>'(?:\\.|[^'\\\n])*')
  | (?P<word>[A-Za-z_]\w*)
  | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
  | (?P<mark>\.\.\.|->|<<|>>|[<>=!]=|&&|\|\||[^\w\s])
""", re.X | re.M | re.S)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
END = re.compile(r"^#[ \t]*ifdef[ \t]+XDISTILL_IMPLEMENTATION[ \t]*$", re.M)
SECTION = re.compile(r">>(\S+)$")
RULE = re.compile(r"---- (.+) ----$")
BASIC = {"void", "bool", "_Bool", "char", "short", "int", "long", "float", "double", "signed", "unsigned"}
STORAGE = {"extern", "static", "inline", "typedef"}
SPECIFIER = STORAGE | {"__inline", "__inline__", "__forceinline", "__host__", "__device__", "__attribute__", "unused",
                       "always_inline", "__always_inline__"}
STANDARD = {"size_t", "intptr_t", "uintptr_t", "ptrdiff_t",
            *("%sint%d_t" % (sign, bits) for sign in ("", "u") for bits in (8, 16, 32, 64))}
DIRECTIVES = {"if", "ifdef", "ifndef", "elif", "else", "endif", "define", "undef", "include", "error", "pragma", ""}
DEPRECATED = "XD_DEPRECATED"


class Refused(Exception):
    """What the reader does not understand, with its line."""

    def __init__(self, line, message):
        super().__init__(message)
        self.line = line


class Token:
    def __init__(self, kind, text, line, start):
        self.kind, self.text, self.line, self.start = kind, text, line, start
        self.last = line + text.count("\n")
        self.end = start + len(text)
        self.alone = False  # of a comment: nothing stands before it on its line


def tokens_of(text):
    """All tokens of a text, comments and directives among them."""
    found, at, line = [], 0, 1
    for match in TOKEN.finditer(text):
        if text[at:match.start()].strip():
            raise Refused(line, "cannot read %r" % text[at:match.start()].strip())
        line += text.count("\n", at, match.start())
        token = Token(match.lastgroup, match.group(), line, match.start())
        token.alone = not found or found[-1].last < line
        found.append(token)
        at, line = match.end(), token.last
    return found


def clean(comment):
    """The words of a comment without its frame; lines keep their indentation."""
    if comment.startswith("//"):
        return comment[2:].strip()
    first, *rest = [line.rstrip() for line in comment[2:-2].split("\n")]
    framed = all(line.lstrip().startswith("*") or not line for line in rest)
    rest = [re.sub(r"^\s*\* ?", "", line) for line in rest] if framed else textwrap.dedent("\n".join(rest)).split("\n")
    return "\n".join([first.strip(), *rest]).strip()


# ---- types ----

class Base:
    """A named type: `const xd_rows`, `struct xd_kernels`, `unsigned char`."""

    def __init__(self, name, const):
        self.name, self.const = name, const


class Pointer:
    def __init__(self, to, const=False):
        self.to, self.const = to, const


class Array:
    def __init__(self, of, length):
        self.of, self.length = of, length


class Function:
    def __init__(self, result, arguments, variadic):
        self.result, self.arguments, self.variadic = result, arguments, variadic


def render(kind, name=""):
    """The declaration of a name of this type, as C is written here."""
    if isinstance(kind, Base):
        return ("const " if kind.const else "") + kind.name + (" " + name if name else "")
    if isinstance(kind, Pointer):
        star = "*" + ("const" if kind.const else "")
        inner = star + (" " if kind.const and name else "") + name
        return render(kind.to, "(%s)" % inner if isinstance(kind.to, (Array, Function)) else inner)
    if isinstance(kind, Array):
        return render(kind.of, "%s[%s]" % (name, kind.length))
    arguments = ", ".join([render(one.type, one.name) for one in kind.arguments] + ["..."] * kind.variadic)
    return render(kind.result, "%s(%s)" % (name, arguments or "void"))


class Item:
    """One thing that the header declares: a `kind` and what belongs to it."""

    def __init__(self, kind, name, line, **rest):
        self.kind, self.name, self.line = kind, name, line
        self.last = line
        self.comment, self.deprecated, self.group = "", None, None
        self.section, self.part, self.conditions = "", "users", []
        self.__dict__.update(rest)


# ---- what the preprocessor decides ----

class Lines:
    """The text as the compiler's preprocessor sees it: which stretches are active, and what they expand to."""

    def __init__(self, text, compiler):
        self.tokens = tokens_of(text)
        self.stretch = {}  # where a token starts -> the stretch it is in
        self.expanded = self.preprocess(compiler)
        self.active = [one for one in self.tokens if self.stretch.get(one.start) in self.expanded]

    def preprocess(self, compiler):
        """{stretch: its text after expansion}; a stretch is a line, or the lines that one pair of brackets spans."""
        out, depth, number, line = [], 0, 0, 0
        for token in self.tokens:
            if token.kind == "comment":
                continue
            if token.kind == "directive":
                if depth:
                    raise Refused(token.line, "a directive inside parentheses")
                number, line = number + 1, 0
                out.append('\n#line %d "xdistill.h"\n%s\n@@%d@@' % (token.line, COMMENT.sub(" ", token.text).strip(), number))
            else:
                if depth == 0 and token.line != line:
                    number, line = number + 1, token.line
                    out.append('\n#line %d "xdistill.h"\n@@%d@@' % (line, number))
                out.append(" " + token.text)
                depth += (token.text == "(") - (token.text == ")")
                line = token.last
            self.stretch[token.start] = number
        result = subprocess.run([*compiler, "-std=c99", "-E", "-P", "-x", "c", "-"], input="".join(out) + "\n",
                                capture_output=True, text=True)
        if result.returncode:
            raise Refused(0, "the preprocessor refuses it:\n" + result.stderr)
        pieces = re.split(r"@@(\d+)@@", result.stdout)
        return {int(number): text for number, text in zip(pieces[1::2], pieces[2::2])}


def conditions_of(tokens):
    """{start of a token: the #if lines around it}, without those that guard the whole file."""
    stack, found, begun = [], {}, 0
    for token in tokens:
        if token.kind == "comment" and SECTION.match(clean(token.text)) and not begun:
            begun = len(stack)
        if token.kind == "directive":
            words = re.sub(r"^\s*#\s*", "", COMMENT.sub(" ", token.text)).strip()
            if words.startswith("if"):
                stack.append(words)
            elif words.startswith("endif"):
                stack.pop()
            elif words.startswith("el"):
                stack[-1] = "%s, %s" % (stack[-1], words)
        found[token.start] = stack[begun:]
    return found


# ---- the parser ----

class Reader:
    """Reads the active tokens of a header's declarations into items, in their order."""

    def __init__(self, text, compiler, marker):
        cut = END.search(text)
        opened = len(re.findall(r"^#[ \t]*if", text[:cut.start()], re.M)) - len(
            re.findall(r"^#[ \t]*endif", text[:cut.start()], re.M)) if cut else 0
        self.lines = Lines(text[:cut.start()] + "#endif\n" * opened if cut else text, compiler)
        self.comments = [one for one in self.lines.tokens if one.kind == "comment"]
        self.conditions = conditions_of(self.lines.tokens)
        self.code = [one for one in self.lines.active if one.kind != "directive"]
        self.directives = {line for one in self.lines.tokens if one.kind == "directive"
                           for line in range(one.line, one.last + 1)}
        self.at, self.used = 0, set()
        self.types = {**{name: "standard" for name in STANDARD}, **{name: "basic" for name in BASIC}}
        self.macros = {}
        self.items = self.read_macros() + self.read_all()
        structs = {item.name for item in self.items if item.kind == "struct"}
        self.items = [item for item in self.items if item.kind != "opaque" or item.name not in structs]
        self.items.sort(key=lambda item: (item.line, item.start))
        self.place(marker)
        self.explain()

    # tokens

    def peek(self, ahead=0):
        at = self.at + ahead
        return self.code[at] if at < len(self.code) else Token("end", "", self.code[-1].last if self.code else 1, -1)

    def take(self, text=None):
        token = self.peek()
        if text is not None and token.text != text:
            self.refuse("expected %s, found %s" % (text, token.text or "the end"))
        self.at += 1
        return token

    def accept(self, text):
        if self.peek().text == text:
            self.at += 1
            return True
        return False

    def refuse(self, message, token=None):
        raise Refused((token or self.peek()).line, message)

    def name(self):
        token = self.take()
        if token.kind != "word":
            self.refuse("expected a name, found %s" % (token.text or "the end"), token)
        return token

    def balanced(self, opening, closing):
        """The tokens between a pair of brackets, which are taken with it."""
        self.take(opening)
        inside, depth = [], 1
        while depth:
            token = self.take()
            if token.kind == "end":
                self.refuse("%s is never closed" % opening)
            depth += (token.text == opening) - (token.text == closing)
            inside.append(token)
        return inside[:-1]

    # macros

    def read_macros(self):
        """Every #define that holds, as an item; private ones and options are remembered only."""
        items = []
        for token in self.lines.tokens:
            if token.kind != "directive":
                continue
            bare = COMMENT.sub(" ", token.text).replace("\\\n", " ")
            word = re.match(r"\s*#\s*(\w*)", bare).group(1)
            define = re.match(r"\s*#\s*define\s+(\w+)(\([^)]*\))?\s*(.*?)\s*$", bare, re.S)
            if self.lines.stretch[token.start] not in self.lines.expanded:
                continue
            if word not in DIRECTIVES:
                raise Refused(token.line, "#%s is no directive of a public header" % word)
            if not define:
                continue
            name, parameters, body = define.groups()
            self.macros[name] = (parameters, body)
            if name.startswith(("XDI_", "XDISTILL_")):
                continue
            if not name.startswith(("XD_", "xd_")):
                raise Refused(token.line, "the macro %s has no XD_ prefix" % name)
            items.append(self.macro(token, name, parameters, body))
        return items

    def macro(self, token, name, parameters, body):
        names = [one.strip() for one in parameters[1:-1].split(",")] if parameters and parameters[1:-1].strip() else []
        if parameters is not None:
            form = "function"
        elif not body:
            form = "flag"
        elif set(re.findall(r"\w+", body)) <= SPECIFIER:
            form = "specifier"
        elif re.fullmatch(r'(?:"(?:\\.|[^"\\])*"\s*)+', body):
            form = "string"
        else:
            form = "constant"
        item = Item("macro", name, token.line, form=form, parameters=names, body=re.sub(r"\s+", " ", body),
                    start=token.start, end=token.end)
        item.last = token.last
        item.inner = [clean(comment) for comment in COMMENT.findall(token.text)]
        return item

    def is_attribute(self, token):
        """Whether a word is a macro that stands for storage or an attribute."""
        if token.text not in self.macros:
            return False
        parameters, body = self.macros[token.text]
        if parameters is not None:
            return not body or body.startswith(("__attribute__", "__declspec", "[["))
        return set(re.findall(r"\w+", body)) <= SPECIFIER

    def attributes(self, found):
        """Takes the macros that stand here; what XD_DEPRECATED says goes into found."""
        while self.peek().kind == "word" and self.is_attribute(self.peek()):
            token = self.take()
            inside = self.balanced("(", ")") if self.macros[token.text][0] is not None else []
            if token.text == DEPRECATED:
                found["deprecated"] = "".join(one.text[1:-1] for one in inside if one.kind == "string")
            found.setdefault("macros", []).append(token.text)
            found.update({word: True for word in STORAGE & set(self.macros[token.text][1].split())})

    # declarations

    def read_all(self):
        items = []
        while self.peek().kind != "end":
            first = self.peek()
            made = self.declaration()
            last = self.code[self.at - 1]
            for item in made:
                item.start, item.end, item.last = first.start, last.end, last.last
            items += made
        return items

    def declaration(self):
        """One declaration up to its semicolon, or an inline function up to its closing brace."""
        found, line = {}, self.peek().line
        base, made = self.specifiers(found, "file")
        if self.accept(";"):
            if made or (isinstance(base, Base) and base.name.startswith("struct ") and not found):
                return made  # a struct announced by its tag is what its definition says, or opaque
            self.refuse("a declaration that declares nothing", self.code[self.at - 1])
        while True:
            name, kind = self.declarator(base)
            self.attributes(found)
            item = self.declared(name, kind, found, line, made)
            if item:
                made.append(item)
            if self.peek().text == "{" and isinstance(kind, Function):
                self.balanced("{", "}")
                item.inline = True
                break
            if not self.accept(","):
                self.take(";")
                break
        for item in made:
            item.deprecated = item.deprecated or found.get("deprecated")
        return made

    def declared(self, name, kind, found, line, made):
        """The item of one declarator; None where it only names what its specifiers have made."""
        if name is None:
            self.refuse("a declaration without a name")
        if "typedef" not in found:
            if not isinstance(kind, Function):
                self.refuse("the object %s: a header declares no objects" % name)
            if "XD_API" not in found.get("macros", []) and not {"static", "inline"} & set(found):
                self.refuse("%s is not marked XD_API" % name)
            return Item("function", name, line, type=kind, inline=False)
        if isinstance(kind, Base) and not kind.const and kind.name in ("struct " + name, "enum " + name):
            self.types[name] = kind.name.split()[0]
            if made or self.types.get(kind.name) == "struct":
                return None  # the typedef of what stands before it
            return Item("opaque", name, line)
        if isinstance(kind, Pointer) and isinstance(kind.to, Function):
            self.types[name] = "callback"
            return Item("callback", name, line, type=kind)
        return self.refuse("typedef %s: neither a struct, an enum nor a pointer to a function" % name)

    def specifiers(self, found, where):
        """The type before the declarators, and the items that it defines on its way."""
        words, const, made, base = [], False, [], None
        while True:
            self.attributes(found)
            token = self.peek()
            if token.text in STORAGE and where == "file":
                found[self.take().text] = True
            elif token.text == "const":
                self.take()
                const = True
            elif token.text in ("struct", "enum", "union") and not words:
                base = self.tagged(found, made, where)
                words = [base]
            elif token.text in BASIC and (not words or words[-1] in BASIC):
                words.append(self.take().text)
            elif token.kind == "word" and not words and token.text in self.types:
                words.append(self.take().text)
            elif not words:
                self.refuse("%s is no type that this header declares" % (token.text or "the end"))
            else:
                return Base(" ".join("bool" if one == "_Bool" else one for one in words), const), made

    def tagged(self, found, made, where):
        """struct and enum: a definition with its body, or a use of the tag."""
        keyword = self.take()
        self.attributes(found)
        tag = self.take().text if self.peek().kind == "word" else ""
        if keyword.text == "union":
            self.refuse("a union", keyword)
        if self.peek().text != "{":
            if not tag:
                self.refuse("%s without a name or a body" % keyword.text, keyword)
            return "%s %s" % (keyword.text, tag)
        if where != "file":
            self.refuse("a %s defined inside another declaration" % keyword.text, keyword)
        if not tag and (keyword.text == "struct" or "typedef" in found):
            self.refuse("a %s without a tag" % keyword.text, keyword)
        item = Item(keyword.text, tag, keyword.line)
        self.take("{")
        item.opening = self.code[self.at - 1]
        if keyword.text == "struct":
            self.types["struct " + tag] = "struct"
            item.fields = self.fields()
        else:
            item.values = self.values()
        made.append(item)
        return "%s %s" % (keyword.text, tag)

    def fields(self):
        fields = []
        while not self.accept("}"):
            found, first = {}, self.peek()
            base, _ = self.specifiers(found, "struct")
            group = []
            while True:
                name, kind = self.declarator(base)
                self.attributes(found)
                if name is None or isinstance(kind, Function):
                    self.refuse("a field without a name" if name is None else "a function inside a struct", first)
                if self.peek().text == ":":
                    self.refuse("a bit field")
                group.append(Item("field", name, first.line, type=kind))
                if not self.accept(","):
                    break
            end = self.take(";")
            for field in group:
                field.start, field.end, field.last = first.start, end.end, end.last
                field.deprecated = found.get("deprecated")
            fields += group
        return fields

    def values(self):
        """Enumerators; a macro that lists some stands on a line of its own."""
        values = []
        while not self.accept("}"):
            token = self.peek()
            if self.peek(1).text == "(" and token.text in self.macros:
                values += self.listed()
                self.accept(",")
                continue
            found, name = {}, self.name()
            self.attributes(found)
            text = []
            if self.accept("="):
                depth = 0
                while depth or self.peek().text not in (",", "}"):
                    text.append(self.take())
                    depth += (text[-1].text == "(") - (text[-1].text == ")")
            last = self.take() if self.peek().text == "," else self.code[self.at - 1]
            value = Item("value", name.text, name.line, text=" ".join(one.text for one in text), row=None)
            value.start, value.end, value.last = name.start, last.end, last.last
            value.deprecated = found.get("deprecated")
            values.append(value)
        return values

    def listed(self):
        """The enumerators that a macro expands to, by the word of the preprocessor, each with its row of the list."""
        macro = self.take()
        stretch = self.lines.stretch[macro.start]
        call = self.balanced("(", ")")
        mates = [one for one in self.code if self.lines.stretch[one.start] == stretch]
        if mates[0] is not macro or mates[-1].start > self.peek().start:
            self.refuse("%s does not stand on a line of its own" % macro.text, macro)
        rows = [[one.strip() for one in row.split(",")] for row in
                re.findall(r"\b%s\(([^)]*)\)" % self.macros[macro.text][0][1:-1].strip(), self.macros[macro.text][1])]
        names = re.findall(r"\w+", self.lines.expanded[stretch])
        if len(rows) != len(names) or not call:
            self.refuse("%s has %d rows and expands to %d words" % (macro.text, len(rows), len(names)), macro)
        made = []
        for name, row in zip(names, rows):
            value = Item("value", name, macro.line, text="", row=row)
            value.start, value.end, value.last = macro.start, macro.start, macro.line
            made.append(value)
        return made

    # declarators

    def declarator(self, base):
        """(name, type) of one declarator; the name is None where it is abstract."""
        while self.accept("*"):
            base = Pointer(base)
            while self.peek().text in ("const", "restrict"):
                base.const = self.take().text == "const" or base.const
        if self.peek().text == "(" and self.peek(1).text in ("*", "("):
            self.take("(")
            inner = self.at
            self.skip_declarator()
            self.take(")")
            outer = self.suffixes(base)
            after, self.at = self.at, inner
            name, kind = self.declarator(outer)
            self.at = after
            return name, kind
        name = self.take().text if self.peek().kind == "word" else None
        return name, self.suffixes(base)

    def skip_declarator(self):
        depth = 0
        while depth or self.peek().text != ")":
            token = self.take()
            if token.kind == "end":
                self.refuse("a bracket is never closed")
            depth += (token.text == "(") - (token.text == ")")

    def suffixes(self, base):
        if self.peek().text == "(":
            self.take("(")
            return Function(base, *self.arguments())
        lengths = []
        while self.peek().text == "[":
            inside = self.balanced("[", "]")
            if not inside:
                self.refuse("an array without a length")
            lengths.append(" ".join(one.text for one in inside))
        for length in reversed(lengths):
            base = Array(base, re.sub(r"\( | \)", lambda m: m.group().strip(), length))
        return base

    def arguments(self):
        """What stands between the parentheses of a function: its arguments, and whether more may follow."""
        if self.peek().text == "void" and self.peek(1).text == ")":
            self.take(), self.take()
            return [], False
        arguments = []
        if self.peek().text == ")":
            self.refuse("() says nothing of the arguments: write (void)")
        while True:
            if self.accept("..."):
                self.take(")")
                return arguments, True
            found, first = {}, self.peek()
            base, _ = self.specifiers(found, "argument")
            name, kind = self.declarator(base)
            arguments.append(Item("argument", name or "", first.line, type=kind))
            if not self.accept(","):
                self.take(")")
                return arguments, False

    # where an item stands, and what is said of it

    def place(self, marker):
        """Section, part and conditions of each item; the sections in their order."""
        part, section, at = "users", None, 0
        self.sections = [Item("section", "", 1, start=0, prose=[])]
        for comment in self.comments:
            text = clean(comment.text)
            if SECTION.match(text) or RULE.match(text):
                self.used.add(comment.start)
                while at < len(self.items) and self.items[at].start < comment.start:
                    self.items[at].section, self.items[at].part, at = section.name if section else "", part, at + 1
                if text == marker:
                    part = "back ends"
                if SECTION.match(text):
                    section = Item("section", SECTION.match(text).group(1), comment.line, start=comment.start, prose=[])
                    section.part = part
                    self.sections.append(section)
        for item in self.items[at:]:
            item.section, item.part = section.name if section else "", part
        for item in self.items:
            item.conditions = self.conditions[item.start]

    def above(self, item, floor):
        """The words of the comments that end on the line above an item, after the offset floor."""
        found, line = [], item.line
        for comment in reversed(self.comments):
            if comment.start < floor or comment.start in self.used:
                continue
            if comment.start < item.start and comment.alone and comment.last == line - 1:
                found.insert(0, comment)
                line = comment.line
        self.used.update(one.start for one in found)
        return "\n".join(clean(one.text) for one in found)

    def above_if(self, item, floor):
        """The same for a macro that stands inside an #if which the comment is above of."""
        line = item.line
        while item.kind == "macro" and line - 1 in self.directives:
            line -= 1
        return self.above(Item("", "", line, start=item.start), floor) if line < item.line else ""

    def beside(self, item, ceiling):
        """The words of the comments inside an item and after it on its last line."""
        found = [one for one in self.comments if one.start > item.start and one.start not in self.used and
                 (one.start < item.end or (one.line == item.last and one.start < ceiling))]
        self.used.update(one.start for one in found)
        return "\n".join(clean(one.text) for one in found)

    def explain(self):
        """Gives each item its comment, and each section what is said in it of no single item."""
        for item in self.items:
            for members in (getattr(item, "fields", []), getattr(item, "values", [])):
                self.explain_members(item, members)
        floor, before = 0, None
        starts = [item.start for item in self.items] + [1 << 60]
        for number, item in enumerate(self.items):
            leading = self.above(item, floor) or self.above_if(item, floor)
            ceiling = next(start for start in starts if start > item.start)
            trailing = "\n".join(getattr(item, "inner", [])) or self.beside(item, ceiling)
            if not leading and before is not None and before.last >= item.line - 1:
                item.group, leading = before.group or before.name or before.values[0].name, before.leading
            item.leading = leading
            item.comment = "\n".join(one for one in (leading, trailing) if one)
            if item.kind == "macro" and DEPRECATED in item.comment and item.name != DEPRECATED:
                item.deprecated = item.comment.split(DEPRECATED, 1)[1].strip(" :(\"").rstrip(")\"")
            floor, before = item.end, item
        for comment in self.comments:
            if comment.start not in self.used:
                home = [one for one in self.sections if one.start <= comment.start][-1]
                home.prose.append(clean(comment.text))

    def explain_members(self, item, members):
        floor = item.opening.end if members else 0
        blocks = []  # fields of one declaration have one comment
        for member in members:
            if not blocks or blocks[-1][0].start != member.start:
                blocks.append([])
            blocks[-1].append(member)
        for number, block in enumerate(blocks):
            ceiling = blocks[number + 1][0].start if number + 1 < len(blocks) else item.end
            leading = self.above(block[0], floor)
            text = "\n".join(one for one in (leading, self.beside(block[0], ceiling)) if one)
            for member in block:
                member.comment = text
            floor = block[0].end

    def kind_of(self, name):
        """What a type's name stands for: void, scalar, struct, enum, callback or opaque."""
        bare = re.sub(r"^(struct|enum) ", "", name)
        if bare == "void":
            return "void"
        for item in self.items:
            if item.name == bare and item.kind in ("struct", "enum", "callback", "opaque"):
                return item.kind
        return "opaque" if name.startswith("struct ") else "scalar"
