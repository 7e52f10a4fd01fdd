"""Calls that README.md and docs/ write out have the number of arguments that the header declares."""

import re

NAME = re.compile(r"\b(xd_\w+)\(")
CODE = re.compile(r"^```(?:c|cpp|cuda|text)?\b.*?\n(.*?)^```|`([^`\n]+)`|^ {4}([^\n]*)$", re.M | re.S)


def split_arguments(text):
    """The arguments up to the parenthesis that closes a call, or None where the text ends before."""
    depth, pieces, start = 0, [], 0
    for i, c in enumerate(text):
        if c in "([{":
            depth += 1
        elif c in ")]}" and depth:
            depth -= 1
        elif c in ",)" and depth == 0:
            pieces.append(text[start:i].strip())
            start = i + 1
            if c == ")":
                return pieces if pieces != [""] else []
    return None


def declared(names):
    """{function: (number of arguments, whether more may follow)} of docs/api.txt."""
    found = {}
    for line in re.findall(r"^function (.*)$", names, re.M):
        name = NAME.search(line)
        arguments = split_arguments(line[name.end():])
        fixed = [argument for argument in arguments if argument not in ("void", "...")]
        found[name.group(1)] = len(fixed), "..." in arguments
    return found


def calls(page):
    """(line, function, arguments) of each call in the code of a page; a name with () is no call."""
    for match in CODE.finditer(page):
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", match.group(match.lastindex), flags=re.S)
        for name in NAME.finditer(text):
            arguments = split_arguments(text[name.end():])
            if arguments and not any("..." in argument for argument in arguments):
                yield page.count("\n", 0, match.start()) + 1, name.group(1), arguments


def check_calls(root):
    known = declared((root / "docs/api.txt").read_text())
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        for line, name, arguments in calls(path.read_text()):
            count, more = known.get(name, (len(arguments), False))
            if len(arguments) < count or len(arguments) > count and not more:
                yield "%s:%d: %s takes %d arguments, not %d: %s" % (path.relative_to(root), line, name, count, len(arguments), ", ".join(arguments))
