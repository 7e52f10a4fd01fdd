#!/usr/bin/env python3
"""Every public call that takes numbers is in the table of tests/test_poison.c, or named there with the reason why not.

    tests/build/test_poison_table.py [API.json]     the file that tools/api.py writes; default build/api.json

A call takes numbers when an argument is a floating-point number, an array of them that it reads, or memory with a dtype,
by itself or as a field of a struct that it reads.
"""

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TYPED = {"xd_rows", "xd_param", "xd_tensor"}  # memory whose element type is a field


def numeric(item, structs, seen):
    """Is this argument or field a number that the callee reads?"""
    if item["pointers"] > 0 and not item["const"] and item["base"] in ("float", "double"):
        return False  # an output
    if item["base"] in ("float", "double") or item["base"] in TYPED:
        return True
    if item["base"] not in structs or item["base"] in seen or (item["pointers"] > 0 and not item["const"]):
        return False
    seen = seen | {item["base"]}
    return any(numeric(field, structs, seen) for field in structs[item["base"]]["fields"] if "base" in field)


def takes_numbers(function, structs):
    arguments = function["arguments"]
    typed = any(a["base"] == "xd_dtype" for a in arguments) and any(
        a["base"] == "void" and a["pointers"] > 0 and a["const"] for a in arguments)
    return typed or any(numeric(a, structs, set()) for a in arguments)


def main():
    api = json.loads(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build/api.json").read_text())
    structs = {s["name"]: s for s in api["structs"]}
    wanted = {f["name"] for f in api["functions"] if f["part"] == "users" and takes_numbers(f, structs)}
    test = (ROOT / "tests/test_poison.c").read_text()
    texts = [p.read_text() for p in sorted((ROOT / "tests/helpers").glob("poison_*.h"))]
    table = {name for text in texts for name in re.findall(r'poison_family_\w+ = \{\s*(?:\.name = )?"(xd_\w+)"', text)}
    table |= {name for text in texts for name in re.findall(r'^POISON_SOFTMAX_FAMILY\(\w+, "(xd_\w+)"', text, re.M)}
    excused = {}
    for names, reason in re.findall(r"^ \*   ((?:xd_\w+(?:,\s+\*?\s*)?)+): (\S.*)$", test, re.M):
        excused.update({name: reason for name in re.findall(r"xd_\w+", names)})
    known = {f["name"] for f in api["functions"]}
    failures = [f"{name} takes numbers: put it into the table of tests/test_poison.c, or say there why not"
                for name in sorted(wanted - table - set(excused))]
    failures += [f"{name} is named in tests/test_poison.c, but there is no such function"
                 for name in sorted((table | set(excused)) - known)]
    failures += [f"{name} is in the table, and also among the exceptions" for name in sorted(table & set(excused))]
    for failure in failures:
        print(failure)
    print(f"{len(wanted)} calls take numbers: {len(wanted & table)} in the table, {len(wanted & set(excused))} exceptions")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
