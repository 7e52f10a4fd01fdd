#!/usr/bin/env python3
"""Projections between NeMo-RL's PyTorch files and this library's.

    projection_pt.py IN.pt OUT.xdproj [--student-size N] [--teacher-size N]
                     [--student-hash HEX] [--teacher-hash HEX] [--keep N] [--pieces N]
    projection_pt.py IN.xdproj OUT.pt [--form rows|pairs] [--columns K]
                     [--student-model NAME] [--teacher-model NAME]

A .pt file (nemo_rl/algorithms/x_token/loss_utils.py) is one of two dictionaries:

    rows    indices [V_s, K], teacher ids and -1, and likelihoods [V_s, K], with the models' names beside them
    pairs   {(student id, teacher id): weight}

From .pt, entries without id are dropped, equal ones are added up, and a vocabulary is as large as its tokenizer
(--student-size, --teacher-size) or as the largest id needs. A .pt file does not name its tokenizers: without their
hashes, which xd_tokenizer_describe returns, only programs that expect no hash load the projection. To .pt,
a row begins with its largest weight, the lowest id first among equals, and K is the longest row, at least 2.
Weights are 32-bit floats in both and have the same bits, unless equal entries are added up.

Needs PyTorch; without it, ends with status 77. .pt files are read as data, never as code.
"""

import argparse
import pathlib
import struct
import sys

MAGIC, VERSION, HEADER, MOST_IDS = b"XDPROJ\r\n", 1, 80, 1 << 22


class Problem(Exception):
    pass


def require(condition, message):
    if not condition:
        raise Problem(message)


def crc32c(data):
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


# ---- this library's files: header fields, and one {teacher id: weight} a student id


def read_xdproj(data):
    require(len(data) >= HEADER and data[:8] == MAGIC, "no projection: it begins with other bytes")
    version, crc, students, teachers, entries = struct.unpack_from("<IIQQQ", data, 8)
    require(version == VERSION, f"version {version}, known is {VERSION}")
    require(1 <= students <= MOST_IDS and 1 <= teachers <= MOST_IDS, f"between {students} and {teachers} ids")
    require(len(data) == HEADER + 8 * (students + 1) + 8 * entries,
            f"{len(data)} bytes for {students} student ids and {entries} entries")
    require(crc == crc32c(data[16:]), "the checksum is wrong")
    begin = struct.unpack_from(f"<{students + 1}Q", data, HEADER)
    at = HEADER + 8 * (students + 1)
    ids = struct.unpack_from(f"<{entries}I", data, at)
    weights = struct.unpack_from(f"<{entries}f", data, at + 4 * entries)
    require(begin[0] == 0 and begin[-1] == entries and all(a <= b for a, b in zip(begin, begin[1:])),
            "rows go backwards")
    rows = [dict(zip(ids[a:b], weights[a:b])) for a, b in zip(begin, begin[1:])]
    return rows, teachers, struct.unpack_from("<QQ", data, 40)


def write_xdproj(rows, teachers, hashes, pieces, keep):
    require(1 <= len(rows) <= MOST_IDS and 1 <= teachers <= MOST_IDS, f"between {len(rows)} and {teachers} ids")
    begin, ids, weights = [0], [], []
    for row in rows:
        for teacher in sorted(row):
            ids.append(teacher)
            weights.append(row[teacher])
        begin.append(len(ids))
    body = struct.pack(f"<{len(begin)}Q{len(ids)}I{len(weights)}f", *begin, *ids, *weights)
    behind = struct.pack("<QQQQQIIIId", len(rows), teachers, len(ids), *hashes, pieces, keep, 0, 0, 0.0) + body
    return MAGIC + struct.pack("<II", VERSION, crc32c(behind)) + behind


# ---- the dictionaries of .pt files


def cells_of(dictionary):
    """(student id, teacher id, weight) of every entry with an id, and the number of rows."""
    if "indices" in dictionary:
        indices, likelihoods = dictionary["indices"], dictionary.get("likelihoods")
        require(likelihoods is not None and indices.dim() == 2 and indices.shape == likelihoods.shape,
                "indices and likelihoods are not two tables of one shape")
        pairs = zip(indices.tolist(), likelihoods.float().tolist())
        cells = [(s, t, w) for s, row in enumerate(pairs) for t, w in zip(*row) if t >= 0]
        return cells, indices.shape[0]
    require(dictionary and all(isinstance(key, tuple) and len(key) == 2 for key in dictionary),
            "neither indices and likelihoods nor pairs of ids")
    cells = [(int(s), int(t), float(w)) for (s, t), w in dictionary.items() if t >= 0]
    return cells, 0


def rows_of(cells, count, student_size, teacher_size):
    students = max([student_size, count] + [s + 1 for s, _, _ in cells])
    teachers = max([teacher_size] + [t + 1 for _, t, _ in cells])
    require(students <= MOST_IDS and teachers <= MOST_IDS, f"between {students} and {teachers} ids")
    rows = [{} for _ in range(students)]
    for s, t, weight in cells:
        require(s >= 0 and 0.0 <= weight <= 3e38, f"student id {s} has weight {weight} for teacher id {t}")
        rows[s][t] = rows[s].get(t, 0.0) + weight
    return rows, teachers


def tables_of(rows, columns, torch):
    longest = max([2] + [len(row) for row in rows])
    columns = columns or longest
    indices = torch.full((len(rows), columns), -1, dtype=torch.int64)
    likelihoods = torch.zeros((len(rows), columns), dtype=torch.float32)
    for s, row in enumerate(rows):
        best = sorted(row, key=lambda t: (-row[t], t))[:columns]
        if best:
            indices[s, :len(best)] = torch.tensor(best)
            likelihoods[s, :len(best)] = torch.tensor([row[t] for t in best], dtype=torch.float32)
    return indices, likelihoods


# ---- conversions


def from_pt(args, torch):
    dictionary = torch.load(args.input, map_location="cpu", weights_only=True)
    require(isinstance(dictionary, dict), f"{args.input}: holds no dictionary")
    cells, count = cells_of(dictionary)
    rows, teachers = rows_of(cells, count, args.student_size, args.teacher_size)
    keep = args.keep or min(1024, max([1] + [len(row) for row in rows]))
    require(1 <= keep <= 1024 and 1 <= args.pieces <= 32, f"{keep} entries a row and {args.pieces} pieces")
    data = write_xdproj(rows, teachers, (args.student_hash, args.teacher_hash), args.pieces, keep)
    pathlib.Path(args.output).write_bytes(data)
    return rows, teachers


def to_pt(args, torch):
    rows, teachers, hashes = read_xdproj(pathlib.Path(args.input).read_bytes())
    if args.form == "pairs":
        out = {(s, t): w for s, row in enumerate(rows) for t, w in row.items()}
    else:
        indices, likelihoods = tables_of(rows, args.columns, torch)
        out = {"indices": indices, "likelihoods": likelihoods, "enable_scale_trick": False,
               "student_model_id": args.student_model or f"{hashes[0]:016x}",
               "teacher_model_id": args.teacher_model or f"{hashes[1]:016x}"}
    torch.save(out, args.output)
    return rows, teachers


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--student-size", type=int, default=0)
    parser.add_argument("--teacher-size", type=int, default=0)
    parser.add_argument("--student-hash", type=lambda text: int(text, 16), default=0)
    parser.add_argument("--teacher-hash", type=lambda text: int(text, 16), default=0)
    parser.add_argument("--keep", type=int, default=0)
    parser.add_argument("--pieces", type=int, default=4)
    parser.add_argument("--form", choices=["rows", "pairs"], default="rows")
    parser.add_argument("--columns", type=int, default=0)
    parser.add_argument("--student-model", default="")
    parser.add_argument("--teacher-model", default="")
    return parser.parse_args(argv)


def main(argv):
    args = arguments(argv)
    try:
        import torch
    except ImportError:
        print("needs PyTorch, which this python does not have")
        return 77
    try:
        convert = from_pt if args.input.endswith(".pt") else to_pt
        rows, teachers = convert(args, torch)
    except (Problem, OSError) as problem:
        print(f"projection_pt: {args.input}: {problem}", file=sys.stderr)
        return 1
    entries = sum(len(row) for row in rows)
    print(f"{args.output}: {len(rows)} student ids, {teachers} teacher ids, {entries} entries")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
