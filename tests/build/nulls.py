#!/usr/bin/env python3
"""What calls do with NULL: writes the C file that asks, and judges what it found.

    tests/build/nulls.py --write API.json OUT.c      a wrapper of each call of the users' part that returns xd_result
    tests/build/nulls.py --flags API.json            the words for the linker, which puts the wrappers before the calls
    tests/build/nulls.py --programs                  the test programs that are linked with them
    tests/build/nulls.py --judge API.json LOG        what must be refused and was not

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
    xd_log_probs(desc.at_ids) xd_log_probs(desc.log_sum_exp) xd_log_probs(desc.logits_at_ids) xd_log_probs(desc.accuracy) xd_log_probs(desc.argmax)
    xd_ctx_create_versioned(desc) xd_tensor_part_fill(part.name)
    xd_halo_exchange(wide)
    xd_halo_exchange_backward(part) xd_halo_exchange_backward(wide) xd_crossing_forward(in) xd_crossing_forward(out)
    xd_crossing_backward(d_out) xd_crossing_backward(d_in) xd_built_parts(parts) xd_parallel_parts(parts)
    xd_gradient_norm_check(comm) xd_clip_gradients(params.name) xd_clip_gradients(params.value) xd_denoise_loss(desc.mask) xd_exchange(records.send_counts) xd_exchange(records.recv_counts) xd_queue_start(record.send) xd_queue_start(record.recv)
    xd_queue_start(record.send_counts) xd_queue_start(record.recv_counts) xd_state_inherit(desc.from) xd_dmd_warm_up_step(values)
    xd_policy_find(desc.param_dtype) xd_policy_find(desc.reduce_dtype) xd_policy_find(desc.output_dtype)
    xd_ema_copy_to(targets.name) xd_ema_load(desc.sources.name) xd_agree_same(what)
    xd_reduce_scatter(send) xd_reduce_scatter(recv) xd_all_gather(send) xd_all_gather(recv) xd_all_to_all(send)
    xd_all_to_all(recv) xd_gather(send) xd_gather(recv) xd_scatter(send) xd_scatter(recv)
    xd_all_gather_even(send) xd_all_gather_even(recv)
""".split()

# Fields that are read in some calls only: with what else.
WHEN = {
    ("xd_collective", "send_counts"): "kind == XD_COLLECTIVE_REDUCE_SCATTER",
    ("xd_collective", "recv_counts"): "kind == XD_COLLECTIVE_ALL_GATHER",
    ("xd_time_sampler", "list"): "kind == XD_TIME_LIST",
    ("xd_fake_score_meta_desc", "source.parts"): "source.from == XD_FAKE_SCORE_FROM_PARTS",
    ("xd_fake_score_meta_desc", "source.tensors"): "source.from == XD_FAKE_SCORE_FROM_ROOT",
    ("xd_fake_score_meta_desc", "source.reader.entries"): "source.from == XD_FAKE_SCORE_FROM_READER",
}
# Fields of structs, of which the comment promises something in other words.
PROMISED_FIELDS = {
    ("xd_expert_ranks", "data"), ("xd_expert_ranks", "replicas"), ("xd_collective", "send_displacements"),
    ("xd_collective", "recv_displacements"), ("xd_fsdp_desc", "groups"), ("xd_fake_score_meta_desc", "groups"),
    ("xd_tokenizer_desc", "pattern"), ("xd_route_side", "samples"), ("xd_state_inherit_desc", "state"),
}

# Pointers whose object has the context: there is no place for a message.
ANONYMOUS = [("xd_stage_cast", "stage.model")]

# Of two ranks, which make one of the two each.
PAIRS = ["xd_send", "xd_recv"]

# Calls that make a world, and its ranks: of several ranks only local calls are asked, since the others of the world would wait.
WORLDS = {"xd_thread_world_create": "desc->ranks", "xd_comm_node": "2", "xd_comm_launched": "2"}

# Test programs whose calls are asked: each ends in two seconds, bears that its ranks ask together, and makes a call that the
# others do not. test_nulls_calls makes what none of the tests makes on one rank.
PROGRAMS = """
    test_allocations_local test_buckets test_build test_build_places test_build_casts test_build_errors test_chain test_checkpoint_damage
    test_checkpoint_refusals test_classic test_crossing test_denoise_terms test_dmd test_dmd_failures test_dmd_record
    test_ema_swap test_fake_score test_fake_score_errors test_full_state test_gather test_launch test_mesh test_model
    test_name_maps test_nn_patch test_noise_schedule test_nulls_calls test_offload test_pack test_pipeline_errors test_plan
    test_sampler test_shapes test_sizes test_sizes_counts test_sizes_dmd test_sizes_files test_thaw test_times
    test_tokenizer_special test_trajectory
""".split()
LEAST = 560  # pointers that these programs ask for at least; a call that none of them makes is not asked


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
    one = field.get("kind") == "struct" and not name.endswith("s")
    for other in siblings:
        if other.get("pointers", 0) == 0 and other.get("kind") == "integer" and other["name"] in (
                name.rstrip("s") + "_count", name + "_count", *(() if one else ("count", "bytes", "size"))):
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
                promised = (base, field["name"]) in PROMISED_FIELDS or re.search("NULL|optional", field["comment"])
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
            number_of_call = self.calls.index(call)
            several = int("ocal" not in call["comment"])
            if name in PAIRS:  # the two meet at one place
                several, number_of_call = 2, next(i for i, c in enumerate(self.calls) if c["name"] == PAIRS[0])
            first = call["arguments"][0]
            own = next((a["name"] for a in call["arguments"] if a["base"] == "xd_ctx" and a["pointers"] == 1), None)
            comm = next((a["name"] for a in call["arguments"] if a["base"] == "xd_comm" and a["pointers"] == 1), None)
            handle = first["name"] if first.get("kind") == "opaque" and first["pointers"] == 1 else None
            context = own or ("nulls_ctx(%s, %s)" % (comm or "NULL", handle or "NULL") if comm or handle else "NULL")
            ctx = "%s ? xd_comm_ctx(%s) : %s" % (comm, comm, own) if own and comm else context
            group = comm or "NULL"
            created = next((a["name"] for a in call["arguments"] if a["pointers"] == 2 and a["kind"] == "opaque"), "NULL")
            if created == "NULL" and name not in WORLDS and name != "xd_run_threads":
                print("    if (!nulls_open(%d, %d)) return __real_%s(%s);" % (
                    number, len(asked[name]), name, ", ".join(arguments)), file=out)
            print("    nulls_frame frame;", file=out)
            print("    nulls_begin(&frame, %s, \"%s\", %d, %d, %s, %s);" % (
                ctx, name, number_of_call, several, group, handle or "NULL"), file=out)
            for a in call["arguments"]:
                if a["pointers"] and not a["const"] and "const" not in a["type"] and a["base"] != "void" and a["name"] != "report":
                    if a["pointers"] == 2:
                        print("    nulls_output(&frame, %s, sizeof *%s);" % (a["name"], a["name"]), file=out)
                    elif a["kind"] != "opaque" and a["kind"] != "callback":
                        print("    nulls_output(&frame, %s, sizeof *%s);" % (a["name"], a["name"]), file=out)
            opaque = [a["name"] for a in call["arguments"] if a.get("kind") == "opaque" and a["pointers"] == 1]
            given, alone = [], []
            for path in asked[name]:
                root, _, rest = path.partition(".")
                given.append(self.given(kinds[root], root, rest, call["arguments"]))
                alone.append(str(int([path] == opaque)))
            if given:
                print("    const bool given[] = {\n        %s\n    };" % ",\n        ".join(given), file=out)
                print("    const bool alone[] = { %s };" % ", ".join(alone), file=out)
                print("    nulls_plan(&frame, %d, %d, given, alone);" % (number, len(given)), file=out)
            for path in asked[name]:
                root, _, rest = path.partition(".")
                passed = list(arguments)
                place = arguments.index(root)
                named = (name, path) not in ANONYMOUS and ctx != "NULL" and (
                    root not in (first["name"], own) and kinds[root]["base"] != "xd_ctx" or bool(rest))
                print("    if (nulls_wants(&frame, %d, \"%s\", %d)) {" % (number, path, named), file=out)
                if not rest:
                    passed[place] = "NULL"
                elif kinds[root]["pointers"] and list_of(kinds[root], call["arguments"]):
                    print("        %s copy[NULLS_LIST];" % kinds[root]["base"], file=out)
                    print("        memcpy(copy, %s, (size_t)%s * sizeof *copy);" % (
                        root, list_of(kinds[root], call["arguments"])), file=out)
                    print("        copy[0].%s = NULL;" % rest, file=out)
                    passed[place] = "copy"
                else:
                    by_value = kinds[root]["pointers"] == 0
                    print("        %s copy = %s%s;" % (kinds[root]["base"], "" if by_value else "*", root), file=out)
                    print("        copy.%s = NULL;" % rest, file=out)
                    passed[place] = "copy" if by_value else "&copy"
                print("        NULLS_TRY(&frame, __real_%s(%s));\n    }" % (name, ", ".join(passed)), file=out)
                number += 1
            if name in WORLDS:
                print("    if (%s > 1) nulls_several++;" % WORLDS[name], file=out)
            real = "nulls_run_threads" if name == "xd_run_threads" else "__real_" + name
            print("    frame.real = %s(%s);" % (real, ", ".join(arguments)), file=out)
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
            text = "%s >= 1 && %s <= NULLS_LIST && %s" % (counted, counted, text)
        for part in parts[:-1]:
            field = next(f for f in struct["fields"] if f["name"] == part)
            struct, prefix = self.structs[field["base"]], prefix + part + "."
        field = next(f for f in struct["fields"] if f["name"] == parts[-1])
        test = "%s%s%s != NULL" % (text, joint, rest)
        if (base, rest) in WHEN:
            test += " && %s%s%s" % (root, joint, WHEN[base, rest])
        elif (struct["name"], parts[-1]) in WHEN:
            test += " && %s%s%s%s" % (root, joint, prefix, WHEN[struct["name"], parts[-1]])
        count = list_of(field, struct["fields"]) if (struct["name"], parts[-1]) not in WHEN else None
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
    missing = wanted - set(tried)
    if len(set(tried)) < LEAST:
        failures.append("%d pointers asked, %d expected" % (len(set(tried)), LEAST))
    calls = collections.OrderedDict()
    for call, path, promised in writer.asked():
        if (call, path) in missing:
            calls.setdefault(call, []).append(path)
    for call, paths in calls.items():
        print("not asked: %s(%s)" % (call, ", ".join(paths)))
    print("\n".join(failures))
    print("%d pointers of %d calls, %d asked, %d wrong, %d not asked" % (
        len(wanted), len({c for c, _ in wanted}), len(set(tried)), len(bad), len(missing)))
    return bool(failures)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", nargs=2)
    parser.add_argument("--flags")
    parser.add_argument("--judge", nargs=2)
    parser.add_argument("--programs", action="store_true")
    asked = parser.parse_args()
    if asked.programs:
        print("\n".join(PROGRAMS))
        return
    writer = Writer(json.loads(pathlib.Path(
        (asked.write or asked.judge or [asked.flags])[0]).read_text()))
    if asked.write:
        with open(asked.write[1], "w") as out:
            writer.write(out)
    elif asked.flags:
        print("\n".join("-Wl,--wrap=" + name for name in ["xd_ctx_destroy"] + [call["name"] for call in writer.calls]))
    else:
        sys.exit(judge(writer, asked.judge[1]))


if __name__ == "__main__":
    main()
