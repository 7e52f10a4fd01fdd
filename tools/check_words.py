#!/usr/bin/env python3
"""Count the words of comments and prose, and say what is long: python3 tools/check_words.py [FILE...]

Of a header: words of comments for each function, comments above 120 words. Of headers and pages: sentences above 25 words,
their average, and phrases that a reader has to read twice (PHRASES). Lists of errors, tables and code are no sentences.
Without a file: the totals of the users' headers, README.md, CHANGELOG.md and docs/.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMENT_WORDS, SENTENCE_WORDS, AVERAGE_WORDS, FUNCTION_WORDS = 120, 25, 14, 72

# Persons for ranks, clauses as subjects, words of another language's grammar.
PHRASES = [r"\bnobody\b", r"\bsomebody\b", r"\bwho (?:is|has|are|asks|wants|speaks|calls|loads|reads)\b", r"\bspeaks? for\b", r"\ball ranks alike\b",
           r"\bfor the (?:first|second) time\b(?= that)", r"\bis no (?:error|more than|number|tensor)\b", r"\blikewise\b",
           r"\bat (?:its|the) end(?= of the world)", r"\bamid\b", r"\bas for every\b", r"\bof the caller's own\b",
           r"\bwhich are (?:those|what)\b", r"^What \w+ (?:is|has|are|was)\b"]

COMMENT = re.compile(r"/\*(.*?)\*/", re.S)
FUNCTION = re.compile(r"^XD_API\b[^;{]*?\bxd_\w+\s*\(", re.M)


def words(text):
    return [w for w in text.split() if w not in ("*", "/*", "*/", "|", "---")]


def comments(text):
    """(line, text) of each comment, without the stars that begin its lines."""
    for match in COMMENT.finditer(text):
        body = "\n".join(re.sub(r"^ *\*+ ?", "", line) for line in match.group(1).split("\n"))
        yield text.count("\n", 0, match.start()) + 1, body.strip()


def is_table(line):
    return bool(re.search(r"\S {3,}\S", line)) or line.startswith(("|", "    ", "$", "```", "#"))


def sentences(text):
    """Runs of words that end with a full stop, a question mark or a blank line; lists of errors are left out."""
    prose, fenced = [], False
    for line in text.split("\n"):
        if line.startswith("```"):
            fenced = not fenced
        prose.append("\n" if fenced or is_table(line) or not line.strip() else re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n", line))
    for part in re.split(r"\n\s*\n|(?<=[.?!])\s+(?=[A-Z`(\"])|\n(?=\n)", "\n".join(prose)):
        part = " ".join(words(part))
        if part and not re.match(r"(?:Errors?|Source|From)\b", part):
            yield part


def report(path, text, is_header):
    long_comments = found = 0
    lengths = []
    parts = list(comments(text)) if is_header else [(1, text)]
    for line, body in parts:
        if is_header and len(words(body)) > COMMENT_WORDS:
            print("%s:%d: a comment of %d words" % (path, line, len(words(body))))
            long_comments += 1
        for sentence in sentences(body):
            count = len(sentence.split())
            lengths.append(count)
            if count > SENTENCE_WORDS:
                print("%s:%d: %d words: %s ..." % (path, line, count, sentence[:90]))
                found += 1
            for phrase in PHRASES:
                if re.search(phrase, sentence, re.I):
                    print("%s:%d: `%s`: %s" % (path, line, phrase, sentence[:90]))
    return lengths, found, long_comments


def users_headers():
    listing = (ROOT / "src/xdistill.h").read_text().split("for back ends")[0]
    return [ROOT / "src" / name for name in re.findall(r'^#include "(.*\.h)"', listing, re.M)]


def main(arguments):
    files = [pathlib.Path(a) for a in arguments] or [*users_headers(), ROOT / "README.md", ROOT / "CHANGELOG.md",
                                                    *sorted((ROOT / "docs").glob("*.md"))]
    lengths, total, functions, long_sentences, long_comments = [], 0, 0, 0, 0
    for path in files:
        text, is_header = path.read_text(), path.suffix == ".h"
        more, long, comments_too_long = report(path, text, is_header)
        lengths += more
        long_sentences += long
        long_comments += comments_too_long
        if is_header:
            total += sum(len(words(body)) for _, body in comments(text))
            functions += len(FUNCTION.findall(text))
    print("%d words of comment, %d functions: %.0f each (at most %d); %d comments above %d words; %d sentences of %.1f words "
          "(at most %d), %d above %d" % (total, functions, total / max(1, functions), FUNCTION_WORDS, long_comments, COMMENT_WORDS,
                                         len(lengths), sum(lengths) / max(1, len(lengths)), AVERAGE_WORDS, long_sentences,
                                         SENTENCE_WORDS))


if __name__ == "__main__":
    main(sys.argv[1:])
