#!/usr/bin/env python3
"""The programs of docs/tutorial.md and docs/diffusion.md.

    tools/tutorial.py FOLDER                  write the files that the tutorial shows into a folder
    tools/tutorial.py --check [--object O]    of each page write them to a temporary folder, run the page's commands there
                                              in their order, and compare what they print

A block that begins with three backticks, a language and a name is that file; of a name in examples/ it is a part of that file of
the repository, whole lines of it, and nothing is written. A block of `sh` is commands, and a block of
`text` directly after it is their output, with numbers within two per cent. `sh MODULE` is skipped if python3 lacks the module.
With --object the library is that object instead of being compiled.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ["docs/tutorial.md", "docs/diffusion.md"]
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.M | re.S)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def blocks(page):
    """(line, language, name, text, what it prints or None) of each fenced block of the page."""
    for match in BLOCK.finditer(page):
        language, name, text, output = match.groups()
        yield page.count("\n", 0, match.start()) + 1, language, name, text, output


def is_quoted(name):
    return bool(name) and name.startswith("examples/")


def write_files(page, folder):
    for _, language, name, text, _ in blocks(page):
        if name and language != "sh" and not is_quoted(name):
            (folder / name).write_text(text)


def misquoted(page, root=ROOT):
    """The first block that is no part of the file that it names, or nothing."""
    for line, _, name, text, _ in blocks(page):
        if is_quoted(name) and "\n" + text not in "\n" + (root / name).read_text():
            return "%d: this is no part of %s" % (line, name)
    return None


def with_object(commands, library):
    """Commands that compile the library, or a program with it, take the object instead."""
    commands = re.sub(r"^cc .* -c xdistill\.c$", "cp '%s' xdistill.o" % library, commands, flags=re.M)
    return re.sub(r"^(cc (?!.*xdistill\.o).*\.c) (-o .*)$", r"\1 -DXDISTILL_IMPLEMENTED '%s' \2" % library, commands, flags=re.M)


def is_alike(told, printed):
    """The same words, and numbers within two per cent or two of the last digit that is printed."""
    if NUMBER.sub("#", told) != NUMBER.sub("#", printed):
        return False
    for one, other in zip(NUMBER.findall(told), NUMBER.findall(printed)):
        digits = len(one.split(".")[1]) if "." in one else 0
        if abs(float(one) - float(other)) > max(0.02 * abs(float(one)), 2.1 * 10.0 ** -digits if digits else 0):
            return False
    return True


def run(page, folder, library):
    """The first command that fails or prints something else than the page says, or nothing."""
    environment = {**os.environ, "XDISTILL": str(ROOT)}
    for line, language, name, text, output in blocks(page):
        if language != "sh":
            continue
        if name and subprocess.run(["python3", "-c", "import " + name], capture_output=True).returncode:
            print("passed over, python3 has no %s: %s" % (name, text.strip()))
            continue
        if library:
            text = with_object(text, library)
        done = subprocess.run(["sh", "-e"], input=text, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE)
        if done.returncode:
            return "%d: these commands ended with status %d" % (line, done.returncode)
        if output is not None and not is_alike(output, done.stdout):
            return "%d: the page says\n%sand the program\n%s" % (line, output, done.stdout)
    return None


def check(name, library):
    """What is wrong with a page, or nothing."""
    page = (ROOT / name).read_text()
    wrong = misquoted(page)
    with tempfile.TemporaryDirectory() as folder:
        write_files(page, pathlib.Path(folder))
        wrong = wrong or run(page, pathlib.Path(folder), library)
    return wrong and "%s:%s\n" % (name, wrong)


def main():
    arguments = argparse.ArgumentParser(description="The programs of docs/tutorial.md and docs/diffusion.md.")
    arguments.add_argument("folder", nargs="?", type=pathlib.Path)
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--object", type=pathlib.Path)
    options = arguments.parse_args()
    if options.folder:
        write_files((ROOT / PAGES[0]).read_text(), options.folder)
    if not options.check:
        return 0 if options.folder else arguments.print_usage() or 2
    wrong = [check(name, options.object and options.object.resolve()) for name in PAGES]
    print("\n".join(filter(None, wrong)), file=sys.stderr, end="")
    return 1 if any(wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
