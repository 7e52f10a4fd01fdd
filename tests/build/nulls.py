#!/usr/bin/env python3
"""What calls do with NULL: writes the C file that asks, and judges what it found.

    tests/build/nulls.py --write API.json OUT.c      a wrapper of each call of the users' part that returns xd_result
    tests/build/nulls.py --flags API.json            the words for the linker, which puts the wrappers before the calls
    tests/build/nulls.py --judge API.json LOG        what must be refused and was not; and what no program has asked

A wrapper makes the call of a test program first with one pointer after the other set to NULL: each argument, each field of a
desc, and of the structs in it. What a comment calls optional, or says of NULL, is left alone. All else has to return
XD_ERROR_ARGUMENT with the name in the message, write nothing, and the call of the program then works: the test sees to that.
"""
import argparse
import collections
import json
import pathlib
import re
import sys

# What the comment promises in other words.
PROMISED = """
    xd_ctx_create_versioned(desc) xd_row_stats(log_sum_exp) xd_row_stats(argmax) xd_tensor_part_fill(part.name)
    xd_redistribution_agree(plan) xd_redistribution_execute(source) xd_redistribution_execute(destination)
    xd_redistribution_pack(source) xd_redistribution_pack(send) xd_redistribution_unpack(source)
    xd_redistribution_unpack(recv) xd_redistribution_unpack(destination) xd_tensor_full(full) xd_halo_exchange(wide)
    xd_halo_exchange_backward(part) xd_halo_exchange_backward(wide) xd_crossing_forward(in) xd_crossing_forward(out)
    xd_crossing_backward(d_out) xd_crossing_backward(d_in) xd_built_parts(parts) xd_parallel_parts(parts)
    xd_gradient_norm_check(comm) xd_vocab_create_even(tp) xd_queue_bytes(desc) xd_ema_import(report)
    xd_ema_copy_to(targets.name) xd_ema_load(sources.name) xd_ema_bytes(params.name) xd_projection_from_cells(cells.cells) xd_agree_same(what)
    xd_reduce_scatter(send) xd_reduce_scatter(recv) xd_all_gather(send) xd_all_gather(recv) xd_all_to_all(send)
    xd_all_to_all(recv) xd_gather(send) xd_gather(recv) xd_scatter(send) xd_scatter(recv)
""".split()

# Calls that make a world, and its ranks: of several ranks only local calls are asked, since the others of the world would wait.
WORLDS = {"xd_run_threads": "ranks", "xd_thread_world_create": "ranks", "xd_comm_node": "2", "xd_comm_launched": "2"}

# What is asked of no program, with the reason.
LEFT_OUT = {}


def said_of(text, name, names):
    """What the comment of a call says of an argument: its own lines where it has some, "name  text", else all others."""
    own, others, at = [], [], None
    for line in text.split("\n"):
        head = re.match(r"\s+(\w+)(?:, \w+)*\s{2,}\S", line)
        at = head.group(1) if head and head.group(1) in names else at if re.match(r"\s{4,}\S", line) else None
        (own if at == name else others).append(line)
    return " ".join(own), " ".join(others)


def optional(text, name, names):
    """Does the comment of a call promise something for NULL at this argument?"""
    own, others = said_of(text, name, names)
    return bool(re.search(r"\bNULL\b|optional", own) or re.search(
        r"\b%s(,? may be|:)? NULL\b|\b%s \((may be )?NULL\b|\bNULL %s\b" % (name, name, name), others))


def list_of(field, siblings):
    """The count that belongs to a list, None when it is no list."""
    name = field["name"]
    for other in siblings:
        if other.get("pointers", 0) == 0 and other.get("kind") == "integer" and other["name"] in (
                name.rstrip("s") + "_count", name + "_count", "count", "bytes"):
            return other["name"]
    return None


class Writer:
    def __init__(self, api):
        self.api = api
        self.structs = {s["name"]: s for s in api["structs"]}
        said = ""
        for f in api["functions"]:  # "The same ...": what is promised of the call above holds here too
            said = f["comment"] + (" " + said if re.match(r"(The same|As xd_)", f["comment"]) else "")
            f["promises"] = said
        self.calls = [f for f in api["functions"] if f["part"] == "users" and not f["inline"] and not f["variadic"] and f["section"] != "kernel/cuda"
                      and f["result"]["base"] == "xd_result" and f["result"]["pointers"] == 0]

    def is_pointer(self, item):
        return item.get("pointers", 0) > 0 or item.get("kind") == "callback"

    def paths(self, base, prefix, depth, counted=None):
        """(path of a pointer to set to NULL, lists of structs on the way that need a copy, is it optional)"""
        for field in self.structs[base]["fields"]:
            path = prefix + field["name"]
            if "base" not in field or "array" in field or field["name"] == "user":
                continue
            if base in ("xd_rows", "xd_ids"):
                continue  # tests/build/check_sizes.py
            if self.is_pointer(field):
                promised = "NULL" in field["comment"] or "optional" in field["comment"]
                yield path, promised
            elif field["base"] in self.structs and depth < 3:
                yield from self.paths(field["base"], path + ".", depth + 1)

    def asked(self):
        for call, path, promised in self.pointers():
            yield call, path, promised or "%s(%s)" % (call, path) in PROMISED

    def pointers(self):
        """(call, path as text, is it optional) of everything that may be NULL"""
        for call in self.calls:
            for argument in call["arguments"]:
                if "base" not in argument or argument["name"] in ("user", "argument"):
                    continue
                if self.is_pointer(argument):
                    yield call["name"], argument["name"], optional(
                        call["promises"], argument["name"], [a.get("name") for a in call["arguments"]])
                if argument["base"] in self.structs and argument["const"] or argument.get("pointers") == 0:
                    if argument["base"] in self.structs and argument["pointers"] <= 1:
                        for path, promised in self.paths(argument["base"], "", 0):
                            yield call["name"], "%s.%s" % (argument["name"], path), promised

    def write(self, out):
        print('#include "nulls.h"\n', file=out)
        asked = collections.defaultdict(list)
        for call, path, promised in self.asked():
            if not promised:
                asked[call].append(path)
        number = 0
        for call in self.calls:
            name = call["name"]
            head = re.sub(r"^.*?\b%s\(" % name, "", call["declaration"].replace("\n", " "))
            print("xd_result __real_%s(%s;" % (name, head), file=out)
            print("xd_result __wrap_%s(%s {" % (name, head), file=out)
            arguments = [a["name"] for a in call["arguments"]]
            kinds = {a["name"]: a for a in call["arguments"]}
            several = "ocal" not in call["comment"]
            first = call["arguments"][0]
            own = next((a["name"] for a in call["arguments"] if a["base"] == "xd_ctx" and a["pointers"] == 1), None)
            comm = next((a["name"] for a in call["arguments"] if a["base"] == "xd_comm" and a["pointers"] == 1), None)
            handle = first["name"] if first.get("kind") == "opaque" and first["pointers"] == 1 else None
            ctx = own or ("nulls_ctx(%s, %s)" % (comm or "NULL", handle or "NULL") if comm or handle else "NULL")
            print("    nulls_frame frame;", file=out)
            print("    nulls_begin(&frame, %s, \"%s\", %d);" % (ctx, name, several), file=out)
            for a in call["arguments"]:
                if a["pointers"] and not a["const"] and "const" not in a["type"] and a["base"] not in ("void",):
                    if a["pointers"] == 2:
                        print("    nulls_output(&frame, %s, sizeof *%s);" % (a["name"], a["name"]), file=out)
                    elif a["kind"] != "opaque" and a["kind"] != "callback":
                        print("    nulls_output(&frame, %s, sizeof *%s);" % (a["name"], a["name"]), file=out)
            for path in asked[name]:
                root, _, rest = path.partition(".")
                passed = list(arguments)
                place = arguments.index(root)
                print("    if (nulls_wants(&frame, %d, \"%s\", %d, %s)) {" % (
                    number, path, ctx != "NULL" and root not in (first["name"], own) and kinds[root]["base"] != "xd_ctx" or bool(rest), self.given(kinds[root], root, rest, call["arguments"])), file=out)
                if not rest:
                    passed[place] = "NULL"
                else:
                    by_value = kinds[root]["pointers"] == 0
                    print("        %s copy = %s%s;" % (kinds[root]["base"], "" if by_value else "*", root), file=out)
                    print("        copy.%s = NULL;" % rest, file=out)
                    passed[place] = "copy" if by_value else "&copy"
                print("        NULLS_TRY(&frame, __real_%s(%s));\n    }" % (name, ", ".join(passed)), file=out)
                number += 1
            created = next((a["name"] for a in call["arguments"] if a["pointers"] == 2 and a["kind"] == "opaque"), "NULL")
            ranks = WORLDS.get(name)
            if ranks:
                print("    if (%s > 1) nulls_several++;" % ranks, file=out)
            print("    frame.real = __real_%s(%s);" % (name, ", ".join(arguments)), file=out)
            if name == "xd_run_threads":
                print("    if (%s > 1) nulls_several--;" % ranks, file=out)
            print("    nulls_end(&frame, (void *const *)%s);\n    return frame.real;\n}\n" % created, file=out)
        print("enum { NULLS_NUMBER = %d };\nconst int nulls_number = NULLS_NUMBER;\nunsigned char nulls_asked[NULLS_NUMBER];" % number,
              file=out)

    def given(self, argument, root, rest, siblings):
        if not rest:
            counted = list_of(argument, siblings)
            return "%s != NULL" % root + (" && %s > 0" % counted if counted else "")
        base, text = argument["base"], root if argument["pointers"] == 0 else root + " && " + root
        joint = "." if argument["pointers"] == 0 else "->"
        # a list whose count is 0 is no list
        parts = rest.split(".")
        struct = self.structs[base]
        prefix = ""
        counted = list_of(argument, siblings)
        if argument["pointers"] and counted:
            text = "%s == 1 && %s" % (counted, text)
        for part in parts[:-1]:
            field = next(f for f in struct["fields"] if f["name"] == part)
            struct, prefix = self.structs[field["base"]], prefix + part + "."
        field = next(f for f in struct["fields"] if f["name"] == parts[-1])
        test = "%s%s%s != NULL" % (text, joint, rest)
        count = list_of(field, struct["fields"])
        if count and field["kind"] != "callback":
            test += " && %s%s%s%s > 0" % (root, joint, prefix, count)
        return test


def judge(writer, log):
    tried, bad = collections.defaultdict(int), collections.OrderedDict()
    for line in open(log):
        call, path, verdict, message = (line.rstrip("\n").split("\t") + ["", "", ""])[:4]
        tried[call, path] += 1
        if verdict != "refused":
            bad.setdefault((call, path), (verdict, message))
    failures = ["%s(%s): %s %s" % (call, path, *what) for (call, path), what in bad.items()]
    wanted = {(call, path) for call, path, promised in writer.asked() if not promised}
    left = {name for names in LEFT_OUT.values() for name in names.split()}
    missing = sorted("%s(%s)" % key for key in wanted - set(tried))
    failures += ["%s is asked by no program" % name for name in missing if name not in left]
    failures += ["%s is asked, or does not exist" % name for name in sorted(left - set(missing))]
    print("\n".join(failures))
    print("%d pointers of %d calls, %d asked, %d wrong, %d not asked" % (
        len(wanted), len({c for c, _ in wanted}), len(set(tried)), len(bad), len(missing)))
    return bool(failures)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", nargs=2)
    parser.add_argument("--flags")
    parser.add_argument("--judge", nargs=2)
    parser.add_argument("--optional")
    asked = parser.parse_args()
    writer = Writer(json.loads(pathlib.Path(
        (asked.write or asked.judge or [asked.flags or asked.optional])[0]).read_text()))
    if asked.write:
        with open(asked.write[1], "w") as out:
            writer.write(out)
    elif asked.flags:
        print("\n".join("-Wl,--wrap=" + name for name in ["xd_ctx_destroy"] + [call["name"] for call in writer.calls]))
    elif asked.optional:
        for call, path, promised in writer.asked():
            print("optional" if promised else "required", call, path)
    else:
        sys.exit(judge(writer, asked.judge[1]))


if __name__ == "__main__":
    main()
