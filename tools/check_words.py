#!/usr/bin/env python3
"""Count the words of comments and prose, and say what is too long: python3 tools/check_words.py [FILE...]

Of headers: words of comments for each function, and comments above COMMENT words. Of headers and pages: sentences above SENTENCE
words, their average, and phrases that a reader has to read twice (PHRASES). Lists of errors, tables and code are no sentences.
Without a file: the users' headers, README.md, CHANGELOG.md and docs/, within TOTAL words too; check_docs.py asks for these.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOTAL, FUNCTION, COMMENT, SENTENCE, AVERAGE = 27000, 72, 120, 25, 14

# Persons for ranks, clauses as subjects, words of another language's grammar.
PHRASES = [r"\b(?:no|some|every)body\b", r"\bwhoever\b", r"\bwho (?:is|has|are|asks|wants|speaks|calls|loads|reads)\b",
           r"\bspeaks? for\b", r"\ball ranks alike\b", r"\bis no (?:error|more than|number|tensor)\b", r"\blikewise\b",
           r"\bamid\b", r"\bas for every\b", r"\bwhich are (?:those|what)\b", r"^What \w+ (?:is|has|are|was)\b(?!.*\?$)"]

BLOCK = re.compile(r"/\*(.*?)\*/", re.S)
CALL = re.compile(r"^XD_API\b[^;{]*?\bxd_\w+\s*\(", re.M)


def words(text):
    return [word for word in text.split() if word not in ("*", "/*", "*/", "|", "---")]


def comments(text):
    """(line, text) of each comment, without the stars that begin its lines."""
    for match in BLOCK.finditer(text):
        body = "\n".join(re.sub(r"^ *\*+ ?", "", line) for line in match.group(1).split("\n"))
        yield text.count("\n", 0, match.start()) + 1, body.strip()


def is_table(line):
    return bool(re.search(r"\S {3,}\S", line)) or line.startswith(("|", "    ", "$", "#"))


def sentences(text):
    """Runs of words up to a full stop, a question mark, an entry of a list or a blank line, without lists of errors."""
    prose, fenced = [], False
    for line in text.split("\n"):
        fence = line.startswith("```")
        fenced = fenced != fence
        prose.append("\n" if fence or fenced or is_table(line) or not line.strip() else
                     re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n", line))
    for part in re.split(r"\n\s*\n|(?<=[.?!])\s+(?=[A-Z`(\"])", "\n".join(prose)):
        part = " ".join(words(part))
        if part and not re.match(r"(?:Errors?|Source|From)\b", part):
            yield part


class Count:
    """What has been read so far."""

    def __init__(self):
        self.words = self.functions = 0
        self.lengths = []

    def read(self, path):
        """Adds a file. Complaints."""
        text, header = path.read_text(), path.suffix == ".h"
        name = path.resolve().relative_to(ROOT) if path.resolve().is_relative_to(ROOT) else path
        for line, body in comments(text) if header else [(1, text)]:
            long = len(words(body))
            self.words += long if header else 0
            if header and long > COMMENT:
                yield "%s:%d: a comment of %d words, at most %d" % (name, line, long, COMMENT)
            for sentence in sentences(body):
                self.lengths.append(len(sentence.split()))
                if self.lengths[-1] > SENTENCE:
                    yield "%s:%d: a sentence of %d words, at most %d: %s ..." % (name, line, self.lengths[-1], SENTENCE, sentence[:60])
                for phrase in PHRASES:
                    if re.search(phrase, sentence, re.I):
                        yield "%s:%d: `%s`: %s" % (name, line, re.search(phrase, sentence, re.I).group(), sentence[:60])
        self.functions += len(CALL.findall(text)) if header else 0

    def average(self):
        return sum(self.lengths) / max(1, len(self.lengths))

    def limits(self, total):
        if total is not None and self.words > total:
            yield "the users' headers have %d words of comments, at most %d" % (self.words, total)
        if self.functions and self.words > FUNCTION * self.functions:
            yield "comments have %d words for each of %d functions, at most %d" % (self.words / self.functions, self.functions, FUNCTION)
        if self.average() > AVERAGE:
            yield "sentences have %.1f words on average, at most %d" % (self.average(), AVERAGE)


def read_by_default():
    """The users' headers and the pages; docs/index.md is a list of names."""
    listing = (ROOT / "src/xdistill.h").read_text().split("/* ---- for back ends")[0]
    headers = [ROOT / "src" / name for name in re.findall(r'^#include "(.*\.h)"', listing, re.M)]
    pages = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "index.md"]
    return [*headers, ROOT / "README.md", ROOT / "CHANGELOG.md", *pages]


def check_words(files=None, total=TOTAL, count=None):
    count = count or Count()
    for path in files or read_by_default():
        yield from count.read(path)
    yield from count.limits(None if files else total)


def main(arguments):
    count = Count()
    complaints = list(check_words([pathlib.Path(name) for name in arguments], count=count))
    print("\n".join(complaints + ["%d words of comments, %d functions; %d sentences of %.1f words" % (
        count.words, count.functions, len(count.lengths), count.average())]))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
