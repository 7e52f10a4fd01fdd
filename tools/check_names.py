"""Dead names in prose: what README.md, CHANGELOG.md, docs/ and the comments of src/ name must exist.

Names are those of the library (xd_, XD_, xdi_, XDI_, XDISTILL_; a field behind a struct's name too), files and folders of
the tree, and targets of the Makefile. `xd_ema_*` and `xd_ema_` stand for all that begin so. Of CHANGELOG.md only the
newest section is read.
"""

import re

from parts import COMMENT_OR_STRING, blank_comments

NAME = re.compile(r"\b(?:xdi?|XDI?|XDISTILL)_\w+")
FIELD = re.compile(r"\b(xd_\w+)\.([a-z_]\w*)\b(?!\()")
FOLDERS = "src|tests|docs|tools|bench|examples|fuzz|cmake|data"
PATH = re.compile(r"(?<![\w./-])(?:%s)/[\w./*-]*" % FOLDERS)
TOP = re.compile(r"(?<![\w./-])xdistill(?:_\w+)?\.(?:h|cu|pc\.in)\b")
PART = re.compile(r"(?<![\w./-])\w+(?:/\w+)?/\w+\.(?:c|h|cu|cuh|inc)\b")
MAKE = re.compile(r"(?:`|^    )(?:\w+=\S* )*make +([a-z][a-z-]*)(?=[ `]|$)")
CODE = {".c", ".h", ".inc", ".cu", ".cuh", ".cpp", ".py", ".sh"}
STRUCT = re.compile(r"\bstruct (xd_\w+) \{(.*?)\n\}", re.S)


class Tree:
    """All names that exist."""

    def __init__(self, root):
        self.root = root
        self.sources = [path for path in sorted((root / "src").rglob("*")) if path.suffix in CODE]
        files = self.sources + sorted(root.glob("xdistill_*.h"))
        code = {path: blank_comments(path.read_text()) for path in files}
        self.names = {name for text in code.values() for name in NAME.findall(text)}
        self.names.update(name for path in files for name in re.findall(r'\bgetenv\("(\w+)"\)', path.read_text()))  # of the environment
        self.made = self.pasted(code)
        self.elsewhere = {name for folder in ("tests", "bench", "examples", "tools", "fuzz", "cmake")
                          for path in (root / folder).rglob("*") if path.suffix in CODE
                          for name in NAME.findall(blank_comments(path.read_text()) if path.suffix != ".py" else path.read_text())}
        if (root / "CMakeLists.txt").is_file():
            self.elsewhere.update(re.findall(r"(?:option|set)\((XDISTILL_\w+)", (root / "CMakeLists.txt").read_text()))
        self.fields = {}
        for text in code.values():
            for name, body in STRUCT.findall(text):
                self.fields.setdefault(name, set()).update(re.findall(r"\b[a-z_]\w*\b", body))
        self.targets = set(re.findall(r"^([a-z][a-z-]*):", (root / "Makefile").read_text(), re.M))

    def pasted(self, code):
        """Names that macros make of a prefix and the words of a list: XD_DTYPE_F32 of XD_DTYPES."""
        prefixes = {match for text in code.values() for match in re.findall(r"\b((?:xd|XD|xdi|XDI)_(?:\w+_)?)##", text)}
        words = {word for text in code.values() for word in re.findall(r"(?:\bX|\(X)\((\w+)", text)}
        return {prefix + word for prefix in prefixes for word in words}

    def has_name(self, name, prose):
        known = [self.names, self.made] + [self.elsewhere] * prose
        if name.endswith("_"):
            return any(one.startswith(name) for names in known for one in names)
        return any(name in names for names in known)

    def has_path(self, path):
        path = re.sub("NAME|LEVEL", "*", path.rstrip("./"))  # what a reader is to fill in
        return any(True for _ in self.root.glob(path)) if "*" in path else (self.root / path).exists() or any(
            self.root.glob(path + ".*"))


def pages(root):
    """(path, [(line, text)]) of each page of prose."""
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        yield path, list(enumerate(path.read_text().split("\n"), 1))
    lines = list(enumerate((root / "CHANGELOG.md").read_text().split("\n"), 1))
    sections = [number for number, line in lines if line.startswith("## ")] + [len(lines) + 1]
    yield root / "CHANGELOG.md", lines[:sections[1] - 1]


def dead(tree, line, prose, folder=""):
    """What a line names and there is not; files also as seen from src/ and from a layer's folder."""
    for name in NAME.findall(line):
        if not tree.has_name(name, prose):
            yield "there is no %s" % name
    for struct, field in FIELD.findall(line):
        if struct in tree.fields and field not in tree.fields[struct]:
            yield "%s has no field %s" % (struct, field)
    for path in [] if prose else PART.findall(line):
        if not any((tree.root / start / path).exists() for start in ("", "src", "src/" + folder)):
            yield "there is no %s" % path
    for path in PATH.findall(line) + TOP.findall(line):
        if not tree.has_path(path):
            yield "there is no %s" % path
    for target in MAKE.findall(line):
        if target not in tree.targets:
            yield "the Makefile has no target %s" % target


def check_page(tree, lines):
    for number, line in lines:
        yield from ((number, message) for message in dead(tree, line, True))


def check_source(tree, path):
    text, layer = path.read_text(), path.relative_to(tree.root / "src").parts[0]
    for match in COMMENT_OR_STRING.finditer(text):
        if match.group()[0] in "\"'":
            continue
        first = text.count("\n", 0, match.start()) + 1
        for number, line in enumerate(match.group().split("\n"), first):
            yield from ((number, message) for message in dead(tree, line, False, layer))


def check_names(root):
    """Each dead name with its place, once a line."""
    tree = Tree(root)
    found = [(path, *one) for path, lines in pages(root) for one in check_page(tree, lines)]
    found += [(path, *one) for path in tree.sources for one in check_source(tree, path)]
    for path, number, message in dict.fromkeys(found):
        yield "%s:%d: %s" % (path.relative_to(root), number, message)
