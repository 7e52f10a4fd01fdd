#!/usr/bin/env python3
"""Every field that a public call takes is read, and set by a test or an example.

    tests/build/check_fields.py API.json [HEADER [DIRECTORY]]   the file that tools/api.py writes; the generated header

A field is taken when its struct is an argument that a public call reads, or is part of one. Clang finds its uses, by type: in
a copy of the header each such field is marked deprecated, and each warning is a use. It is read when the library uses it in
an expression that is not: a hash or a fact that ranks compare, a check that refuses it, what a message prints, an
assignment to it, or a copy to the same field of another taken struct. It is set when a test, example, bench or tool names
it where it gets a value. Exceptions are below, each with its reason."""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[2]
USERS = ("tests/*.c", "tests/compose/*.c", "tests/golden/*.c", "examples/*.c", "examples/*/*.c", "bench/*.c", "tools/*.c", "tools/*/*.c")
OTHERS = ("tests/helpers/*.h", "tests/mpi/*.c", "tests/cuda/*.cpp", "tests/cuda/*.h", "tests/emu/*.cpp", "examples/*.cpp", "examples/cuda/*.cu",
          "bench/*.cu")

# Fields that nothing reads, by the reason.
NOT_READ = {name: reason for reason, names in {
    "it lets a call do what is refused without it": """xd_dmd_desc.allow_shared xd_checkpoint_save_desc.overwrite""",
    "an extent of the caller's: what does not fit into it is refused": """xd_weight_desc.room
        xd_mesh_desc.world_size xd_expert_desc.virtual_pipeline""",
    "told to the caller, who acts on it: the provider of a stage, the loop over pieces": """xd_stage_place.pipeline_ranks xd_stage_place.virtual_stage xd_stage_place.virtual_stages
        xd_stage_place.first_layer""",
    "xd_build fills it in for the caller's layers, as tensor_parallel, partition_dim and partition_stride":
        "xd_weight_traits.expert_tensor_parallel",
    "the library sets it, and transports compare it": "xd_collective.sequence",
    "whose memory it is, for back ends: all data of a call is on the context's device": "xd_tensor.device",
    "xdistill_cuda.cu reads it": "xd_cuda_desc.allocator xd_cuda_desc.two_sweeps xd_cuda_desc.cublas",
    "a fact for the caller": "xd_denominator.positions",
}.items() for name in names.split()}
# Fields that no test and no example sets by name, by the reason.
NOT_SET = {name: reason for reason, names in {
    "a state that calls make and take back": """xd_collective.sequence xd_status.first_row xd_status.first_value
        xd_status.large_norms xd_ticket.number xd_ema_record.config""",
    "xd_grid_create makes all groups: tests/test_build_places.c and test_mesh.c": """xd_groups.embedding
        xd_groups.expert_tp xd_groups.inter_expert_instances xd_groups.intra_expert_dp xd_groups.mp
        xd_groups.position_embedding xd_groups.tp_cp xd_groups.tp_dp_cp xd_groups.tp_ep xd_groups.tp_ep_pp""",
    "set within a struct that contains it: tests/helpers/xtoken_parity.h": "xd_xtoken_projected.column_ids",
    "see above": "xd_tensor.device xd_weight_traits.expert_tensor_parallel",
    "set in a row of a macro: tests/test_sizes_files.c": "xd_weights_desc.max_header_bytes xd_tokenizer_desc.max_bytes",
}.items() for name in names.split()}

WARNING = re.compile(r"^(.*?):(\d+):(\d+): warning: '\w+' is deprecated: (xd_\w+\.\w+) \[")
BEYOND = r"(?:\s*\[[^\]]*\]|\.\w+|->\w+)*"  # of a use: elements and members of it
WRITTEN = re.compile(BEYOND + r"\s*(?:=(?!=)|[-+*/|&^]=|\+\+|--)")
CHECKS = re.compile(r"\b(?:XD_REQUIRE|XD_FAIL\w*|XD_ASSERT|xd_log|snprintf|xdi?_fact\w*|xd_hash|xdi_hash_\w+)\s*\(")
TELLING = re.compile(r"hash|facts|list_settings|list_fields|_agree_|_equal$|_same$|print|_write_row$")


def without_comments(text):
    """Comments become blanks: every place stays where it is."""
    blank = lambda m: m.group() if m.group()[0] in "\"'" else re.sub(r"[^\n]", " ", m.group())
    return re.sub(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text, flags=re.S)


# ---- which fields ----

def taken(api):
    """{struct: fields} of all that calls of the users' part read."""
    structs = {one["name"]: one for one in api["structs"]}
    found, queue = {}, []

    def take(item):
        if item.get("base") in structs and (item["pointers"] == 0 or item["const"]):
            queue.append(item["base"])

    for function in api["functions"]:
        if function["part"] == "users":
            for argument in function["arguments"]:
                take(argument)
    while queue:
        name = queue.pop()
        if name in found or structs[name]["part"] != "users":
            continue
        found[name] = structs[name]["fields"]
        for field in structs[name]["fields"]:
            take(field)
    return found


def marked(text, structs):
    """The header with every field of these structs deprecated under its full name; lines stay where they are."""
    code = without_comments(text)
    starts = [0] + [m.end() for m in re.finditer("\n", code)]
    notes = []
    for name, fields in structs.items():
        for field in fields:
            form = r"\(\*%s\)\(.*?\)(?=;)" if field["kind"] == "function" else r"\b%s(?:\[[^\]]*\])*(?=\s*[,;])"
            place = re.compile(form % field["name"], re.S).search(code, starts[field["line"] - 1])
            notes.append((place.end(), ' __attribute__((deprecated("%s.%s")))' % (name, field["name"])))
    out, at = [], 0
    for end, note in sorted(notes):
        out += [code[at:end], note]
        at = end
    return "".join(out + [code[at:]])


# Fields that are planted into a copy of the header with what uses them, and whether that is reading: the check checks itself.
PLANTED = {"planted_read": True, "planted_hashed": False, "planted_copied": False, "planted_checked": False,
           "planted_written": False, "planted_unused": False}
PLANTED_CODE = """
int xdi_planted(const xd_block_desc *d);
int xdi_planted(const xd_block_desc *d) {
    return d->planted_read ? 1 : 2;
}
uint64_t xdi_planted_hash(const xd_block_desc *d);
uint64_t xdi_planted_hash(const xd_block_desc *d) {
    return d->planted_hashed;
}
xd_result xdi_planted_uses(xd_ctx *ctx, const xd_block_desc *from, xd_block_desc *to);
xd_result xdi_planted_uses(xd_ctx *ctx, const xd_block_desc *from, xd_block_desc *to) {
    XD_REQUIRE(ctx, !from->planted_checked, XD_ERROR_ARGUMENT, "planted");
    to->planted_copied = from->planted_copied;
    to->planted_written = true;
    return XD_OK;
}
"""


def plant(text, structs):
    """The text and the structs with these fields, on the line of the last one of a struct."""
    fields = structs["xd_block_desc"]
    lines = text.split("\n")
    line = fields[-1]["line"]
    lines[line - 1] = lines[line - 1].replace(";", ";" + "".join(" bool %s;" % name for name in PLANTED), 1)
    more = [{"name": name, "line": line, "kind": "bool", "base": "bool", "pointers": 0} for name in PLANTED]
    return "\n".join(lines), {**structs, "xd_block_desc": fields + more}


# ---- where they are used ----

def uses_in(source, folder, flags):
    """(field, file, offset of its name) of each use in a source that compiles against the marked header."""
    command = ["clang", "-std=gnu99", "-fsyntax-only", "-ferror-limit=0", "-Wno-everything", "-Wdeprecated-declarations", "-I" + str(folder), "-Itests/helpers",
               *flags, str(source)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if " file not found" in done.stderr: # of MPI or a device, which not every machine has
        return []
    if done.returncode and not re.search(r"\bxdi_", (ROOT / source).read_text()): # private names are not declared here
        sys.exit("%s: %s" % (source, "\n".join(line for line in done.stderr.splitlines() if "error:" in line)))
    return [match.groups() for match in map(WARNING.match, done.stderr.splitlines()) if match]


class Text:
    """A source without its comments, and places in it."""

    def __init__(self, path):
        self.text = without_comments(pathlib.Path(ROOT, path).read_text())
        self.starts = [0] + [m.end() for m in re.finditer("\n", self.text)]
        self.functions = [(m.start(), m.group(1)) for m in re.finditer(r"^[A-Za-z][^;=\n]*?\b(\w+)\((?=[^;]*?\{$)", self.text, re.M)]

    def at(self, line, column):
        return self.starts[line - 1] + column - 1

    def function(self, offset):
        name = ""
        for start, found in self.functions:
            if start > offset:
                break
            name = found
        return name

    def statement(self, offset):
        """The statement around a place: its text before and from there on."""
        begin = max(self.text.rfind(mark, 0, offset) for mark in ";{}") + 1
        end = min(found for found in (self.text.find(mark, offset) for mark in ";{}") if found >= 0)
        return self.text[begin:offset], self.text[offset:end]


def is_read(field, text, offset, fields):
    """True, False, or the field that this one is copied to."""
    before, after = text.statement(offset)
    name = field.split(".")[1]
    if TELLING.search(text.function(offset)) or CHECKS.search(before):
        return False
    rest = after[len(name):]
    if WRITTEN.match(rest):
        return False
    copied = re.search(r"([\w.>\[\]-]*?[.>])\w+\s*=\s*[\w.>\[\]()*-]*$", before)
    return fields.get(offset - len(before) + copied.end(1), True) if copied and not rest.strip() else True


def is_set(field, text, offset):
    before, after = text.statement(offset)
    name = field.split(".")[1]
    given = re.search(r"(?:&[\w.>\[\]-]*|\b(?:memcpy|memset|snprintf|strcpy)\([\w.>\[\]&-]*)$", before)
    return bool(given or WRITTEN.match(after[len(name):]))


# ---- initialisers by place ----

def items_of(text, offset):
    """What stands between the brackets at a place: a list of (offset, text) at the top level."""
    depth, begin, out = 0, offset + 1, []
    for match in re.compile(r"[{}()\[\],]").finditer(text, offset):
        mark = match.group()
        depth += (mark in "{([") - (mark in "})]")
        if (mark == "," and depth == 1) or depth == 0:
            out.append((begin, text[begin:match.start()]))
            begin = match.end()
        if depth == 0:
            break
    return [(at + len(item) - len(item.lstrip()), item.strip()) for at, item in out if item.strip()]


def by_place(structs, name, text, offset, found):
    """Takes the fields of a struct whose initialiser begins at a place, or those of an array of them."""
    items = items_of(text, offset)
    if items and all(item[0] == "{" for _, item in items) and structs[name][0].get("base") not in structs:
        for at, _ in items:
            by_place(structs, name, text, at, found)
        return
    fields = iter(structs[name])
    for at, item in items:
        field = next(fields, None)
        if item[0] == "." or not field or items == [(at, "0")]:
            return
        found.add("%s.%s" % (name, field["name"]))
        if item[0] == "{" and field.get("base") in structs and field["pointers"] == 0:
            by_place(structs, field["base"], text, at, found)


def set_by_place(structs, texts):
    found, names = set(), "|".join(structs)
    form = re.compile(r"\b(%s) (?:[\w\[\] ,+*]*,\s*)?\w+(?:\[[^\]]*\])*\s*=\s*\{|\((?:const )?(%s)(?:\[\w*\])?\)\s*\{" % (names, names))
    inside = re.compile(r"\.(\w+) = (?=\{)")
    kinds = {}
    for fields in structs.values():
        for field in fields:
            if field.get("base") in structs and not field["pointers"]:
                kinds.setdefault(field["name"], set()).add(field["base"])
    for text in texts:
        for match in form.finditer(text):
            by_place(structs, match.group(1) or match.group(2), text, match.end() - 1, found)
        for match in inside.finditer(text):
            if len(kinds.get(match.group(1), ())) == 1:
                by_place(structs, next(iter(kinds[match.group(1)])), text, match.end(), found)
    return found


# ---- both questions ----

def read_fields(folder, header):
    unit = folder / "unit.c"
    unit.write_text('#define XDISTILL_IMPLEMENTATION\n#include "xdistill.h"\n' + PLANTED_CODE)
    texts, found = {str(path): Text(path) for path in (header, unit)}, {}
    places = {path: {} for path in texts}
    for path, line, column, field in uses_in(unit, folder, []):
        places[path][texts[path].at(int(line), int(column))] = field
    for path, fields in places.items():
        for offset, field in fields.items():
            found.setdefault(field, set()).add(is_read(field, texts[path], offset, fields))
    read = {field for field, reads in found.items() if True in reads}
    while more := {field for field, reads in found.items() if field not in read and reads & read}:
        read |= more
    return read


def named_in(structs, text):
    """What a source sets of the structs that it names: for those that clang does not read alone, as C."""
    written = set(re.findall(r"(?:\.|->)(\w+)%s = " % BEYOND, text))
    return {"%s.%s" % (name, field["name"]) for name, fields in structs.items() if re.search(r"\b%s\b" % name, text)
            for field in fields if field["name"] in written}


def set_fields(folder, structs):
    texts, found = {}, set()
    every = {"%s.%s" % (name, field["name"]) for name, fields in structs.items() for field in fields} - set(NOT_SET)
    sources = [path.relative_to(ROOT) for pattern in USERS for path in sorted(ROOT.glob(pattern))]

    def look(source):
        text = (ROOT / source).read_text()
        if re.search(r"\bxdi_|XDISTILL_IMPLEMENTATION", text):
            found.update(named_in(structs, without_comments(text)))
            if not re.search(r"\bxdi_", text):
                return []
        if not re.search(r"(?:\.|->)(?:%s)\b" % "|".join(one.split(".")[1] for one in every - found), text):
            return []
        return uses_in(source, folder, ["-Iexamples/common", "-Iexamples/nn", "-I."])

    for pattern in OTHERS:
        for path in sorted(ROOT.glob(pattern)):
            found.update(named_in(structs, without_comments(path.read_text())))
    with ThreadPoolExecutor(2) as pool:
        for path, line, column, field in (use for uses in pool.map(look, sources) for use in uses):
            if field in found or pathlib.Path(path).name == "xdistill.h":
                continue
            text = texts.setdefault(path, Text(path))
            if is_set(field, text, text.at(int(line), int(column))):
                found.add(field)
    return found


def main():
    api = json.loads(pathlib.Path(sys.argv[1]).read_text())
    header = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else ROOT / "xdistill.h")
    structs = taken(api)
    every = ["%s.%s" % (name, field["name"]) for name, fields in structs.items() for field in fields]
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "xdistill.h"
        copy.write_text(marked(*plant(header.read_text(), structs)))
        read = read_fields(pathlib.Path(folder), copy)
        declared = copy.read_text()
        copy.write_text(declared[:re.search(r"^#ifdef XDISTILL_IMPLEMENTATION$", declared, re.M).start()])
        given = set_fields(pathlib.Path(folder), structs)
    given |= set_by_place(structs, [without_comments(path.read_text()) for pattern in USERS + OTHERS
                                    for path in sorted(ROOT.glob(pattern))])
    bad = ["xd_block_desc.%s, which is planted: %s" % (name, "not found to be read" if reads else "taken for read")
           for name, reads in PLANTED.items() if ("xd_block_desc." + name in read) != reads]
    bad += ["%s: nothing in the library reads it" % f for f in every if f not in read and f not in NOT_READ]
    bad += ["%s: no test or example sets it" % f for f in every if f not in given and f not in NOT_SET]
    bad += ["%s: an exception that is none" % f for f in NOT_READ if f in read or f not in every]
    bad += ["%s: an exception that is none" % f for f in NOT_SET if f in given or f not in every]
    print("\n".join(bad))
    print("%d fields of %d structs: %d exceptions of reading, %d of setting" % (
        len(every), len(structs), len(NOT_READ), len(NOT_SET)))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
