#!/usr/bin/env python3
"""The programs of docs/tutorial.md.

    tools/tutorial.py FOLDER                  write the files that the page shows into a folder
    tools/tutorial.py --check [--object O]    write them to a temporary folder, run the page's commands there in their
                                              order, and compare what they print

A block that begins with three backticks, a language and a name is that file; a block of `sh` is commands, and a block of
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
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.M | re.S)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def blocks(page):
    """(line, language, name, text, what it prints or None) of each fenced block of the page."""
    for match in BLOCK.finditer(page):
        language, name, text, output = match.groups()
        yield page.count("\n", 0, match.start()) + 1, language, name, text, output


def write_files(page, folder):
    for _, language, name, text, _ in blocks(page):
        if name and language != "sh":
            (folder / name).write_text(text)


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
            text = re.sub(r"^cc .* -c xdistill\.c$", "cp '%s' xdistill.o" % library, text, flags=re.M)
        done = subprocess.run(["sh", "-e"], input=text, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE)
        if done.returncode:
            return "docs/tutorial.md:%d: these commands ended with status %d" % (line, done.returncode)
        if output is not None and not is_alike(output, done.stdout):
            return "docs/tutorial.md:%d: the page says\n%sand the program\n%s" % (line, output, done.stdout)
    return None


def main():
    arguments = argparse.ArgumentParser(description="The programs of docs/tutorial.md.")
    arguments.add_argument("folder", nargs="?", type=pathlib.Path)
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--object", type=pathlib.Path)
    options = arguments.parse_args()
    page = (ROOT / "docs/tutorial.md").read_text()
    if options.folder:
        write_files(page, options.folder)
    if not options.check:
        return 0 if options.folder else arguments.print_usage() or 2
    with tempfile.TemporaryDirectory() as folder:
        write_files(page, pathlib.Path(folder))
        wrong = run(page, folder, options.object and options.object.resolve())
    if wrong:
        print(wrong, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
