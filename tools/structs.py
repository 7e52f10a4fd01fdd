"""The structs of all parts under src/ with their fields, private ones and those of C++ too, read from the text."""

import re

from parts import DIRECTIVE, blank_comments, collapse, line_of

SUFFIXES = (".h", ".c", ".cu", ".cuh", ".inc")
HEAD = re.compile(r"\b(?:struct|union|class)\b(?:\s+XD_DEPRECATED\(\"\"\))?(?:\s+(\w+))?(?:\s*:[^;{}()]*)?\s*(?=\{)")
CALLBACK = re.compile(r"\btypedef\b[^;{}]*?\(\s*\*\s*(\w+)\s*\)\s*\(")
NO_FIELD = ("typedef", "using", "static", "friend", "static_assert", "template")


def behind_braces(code, opening):
    """The place after the brace that closes the one at `opening`."""
    depth = 0
    for at in range(opening, len(code)):
        depth += {"{": 1, "}": -1}.get(code[at], 0)
        if depth == 0:
            return at + 1
    return len(code)


def declared(statement, callbacks):
    """The fields of a declaration without bodies; each is true when it is a pointer to a function."""
    words = statement.split()
    if not words or words[0] in NO_FIELD or (words[0] in ("struct", "union", "enum", "class") and len(words) == 2):
        return []
    while re.search(r"<[^<>]*>", statement):
        statement = re.sub(r"<[^<>]*>", " ", statement)
    flat = re.sub(r"\b(?:decltype|alignas|__align__)\s*\(\)", "int", collapse(statement, "(", ")")[0])
    pointers = len(re.findall(r"\(\)\s*\(\)", flat))
    if pointers and "operator" not in statement:
        return [True] * pointers
    if re.search(r"\w\s*\(\)", flat):
        return []  # a method
    names = flat.split("=")[0].split(",")
    return [any(word in callbacks for word in re.findall(r"\w+", names[0])[:-1])] * len(flat.split(","))


def fields(body, callbacks):
    """Those of a struct's body; the fields of a struct inside it count one by one, methods and types do not."""
    at, found = 0, []
    while stop := re.compile(r"[;{]").search(body, at):
        head = re.sub(r"^(?:\s|\b(?:public|private|protected)\s*:)+", "", body[at:stop.start()])
        at = stop.end()
        if stop.group() == ";":
            found += declared(head, callbacks)
            continue
        at = behind_braces(body, stop.start())
        inner, inside = body[stop.end():at - 1], HEAD.search(head + "{")
        if not inside and "(" in head:  # a method; what a constructor sets before its body has braces too
            while re.match(r"\s*[,{]", body[at:]):
                at = behind_braces(body, body.index("{", at))
            continue
        names = body[at:body.index(";", at)].strip()
        at = body.index(";", at) + 1
        if inside:
            found += fields(inner, callbacks) if names or not inside.group(1) else []
        elif not head.startswith("enum"):
            found += declared(head, callbacks)  # a field with its first value
        elif names:
            found.append(False)
    if re.fullmatch(r"\s*[A-Z][A-Z0-9_]*\(.*\)\s*", body[at:], re.S):
        found.append(True)  # a macro lists functions
    return found


def structs(text, callbacks=()):
    """(line, name, fields) of each struct of a text."""
    code = DIRECTIVE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), blank_comments(text))
    for match in HEAD.finditer(code):
        body = code[match.end() + 1:behind_braces(code, match.end()) - 1]
        yield line_of(code, match.start()), match.group(1) or "a struct without a name", fields(body, callbacks)


def structs_under(folder):
    """(path, line, name, fields) of all parts, in the order of their names."""
    texts = {path: path.read_text() for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES}
    callbacks = {name for text in texts.values() for name in CALLBACK.findall(blank_comments(text))}
    for path, text in texts.items():
        for line, name, found in structs(text, callbacks):
            yield path, line, name, found


def is_table(found):
    """A table of functions: at least three quarters of its fields are pointers to them."""
    return 4 * sum(found) >= 3 * len(found)
