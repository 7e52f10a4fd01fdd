#!/usr/bin/env python3
"""The tests of sizes, tests/test_sizes*.c, make every matrix of the users' part disagree with the others of its call: each field
and each argument of type xd_rows that docs/api.txt lists is named there, or here because it is an output. A new one fails."""
import glob
import re
import sys

LEFT_OUT = {
    "xd_route_window.rows": "an output",
    "xd_route_slot(rows)": "an output",
}


def matrices(text):
    """Names of all fields and arguments of type xd_rows."""
    struct = None
    for line in text.splitlines():
        if line.startswith("struct "):
            struct = line.split()[1]
        elif match := re.match(r"    xd_rows (\w+)$", line):
            yield "%s.%s" % (struct, match.group(1))
        elif match := re.match(r"function [\w ]*?\**(\w+)\((.*)\)$", line):
            for argument in match.group(2).split(", "):
                if found := re.match(r"(?:const )?xd_rows \*?(\w+)$", argument):
                    yield "%s(%s)" % (match.group(1), found.group(1))


def main():
    wanted = set(matrices(open("docs/api.txt").read()))
    held = set()
    for path in sorted(glob.glob("tests/test_sizes*.c")):
        held |= set(re.findall(r'\{ "([^"]+)", AT\(', open(path).read()))
    held = {re.sub(r"^xd_(mft|topk|xtoken)_desc\.(loss\.)?common\.", "xd_loss_common.", name) for name in held}
    bad = ["%s is in no test: add it to tests/test_sizes*.c" % name for name in sorted(wanted - held - set(LEFT_OUT))]
    bad += ["%s does not exist, or is in tests/test_sizes*.c now" % name for name in sorted(set(LEFT_OUT) - (wanted - held))]
    print("\n".join(bad) if bad else "%d matrices" % len(wanted))
    return bool(bad) or len(wanted) < 30


if __name__ == "__main__":
    sys.exit(main())
