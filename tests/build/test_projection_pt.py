#!/usr/bin/env python3
"""tools/projection_pt.py there and back, and the library reads what it writes. Needs PyTorch: 77 without.

    test_projection_pt.py PROGRAM     PROGRAM is load_projection.c, built
"""

import contextlib
import io
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "tools"))
sys.dont_write_bytecode = True
import projection_pt  # noqa: E402

from checking import check, failures


def tool(*args, status=0):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        ended = projection_pt.main([str(arg) for arg in args])
    check(ended == status, f"status {ended} of {args}: {said.getvalue()}")
    return said.getvalue()


def entries(program, path):
    """What the library reads: [sizes and hashes], {(student, teacher): bits of the weight}."""
    done = subprocess.run([program, str(path)], capture_output=True, text=True)
    check(done.returncode == 0, f"the library refuses {path}: {done.stderr}")
    lines = [line.split() for line in done.stdout.splitlines()]
    return lines[0] if lines else [], {(int(s), int(t)): int(w, 16) for s, t, w in lines[1:]}


def bits(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def random_tables(torch, students, teachers, columns):
    indices = torch.full((students, columns), -1, dtype=torch.int64)
    likelihoods = torch.zeros((students, columns))
    for s in range(students):
        ids = random.sample(range(teachers), random.randint(0, columns))
        indices[s, :len(ids)] = torch.tensor(ids, dtype=torch.int64)
        likelihoods[s, :len(ids)] = torch.rand(len(ids))
    return indices, likelihoods


def check_both_forms(torch, program, folder):
    indices, likelihoods = random_tables(torch, 50, 70, 4)
    wanted = {(s, int(t)): bits(float(w)) for s in range(50) for t, w in zip(indices[s], likelihoods[s]) if t >= 0}
    torch.save({"indices": indices, "likelihoods": likelihoods, "model_A_id": "a", "model_B_id": "b"},
               folder / "rows.pt")
    torch.save({(s, t): struct.unpack("<f", struct.pack("<I", w))[0] for (s, t), w in wanted.items()},
               folder / "pairs.pt")
    sizes = ["--student-size", 52, "--teacher-size", 80, "--student-hash", "1f", "--teacher-hash", "abc"]
    for form in "rows", "pairs":
        tool(folder / f"{form}.pt", folder / f"{form}.xdproj", *sizes)
        header, found = entries(program, folder / f"{form}.xdproj")
        check(header == ["52", "80", f"{0x1f:016x}", f"{0xabc:016x}"], f"header {header}")
        check(found == wanted, f"entries of {form}")
        tool(folder / f"{form}.xdproj", folder / "again.pt", "--form", form)
        tool(folder / "again.pt", folder / "again.xdproj", *sizes)
        same = (folder / "again.xdproj").read_bytes() == (folder / f"{form}.xdproj").read_bytes()
        check(same, f"{form} there and back")
    again = torch.load(folder / "again.pt", weights_only=True)
    check({key: bits(w) for key, w in again.items()} == wanted, "the pairs")


def check_order(torch, folder):
    """Largest weight first, the lowest id among equals; short rows end with -1."""
    torch.save({(0, 5): 0.25, (0, 9): 0.5, (0, 2): 0.25, (1, 3): 1.0}, folder / "order.pt")
    tool(folder / "order.pt", folder / "order.xdproj")
    tool(folder / "order.xdproj", folder / "order2.pt")
    out = torch.load(folder / "order2.pt", weights_only=True)
    check(out["indices"].tolist() == [[9, 2, 5], [3, -1, -1]], "the order of ids")
    check(out["likelihoods"].tolist() == [[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]], "the order of weights")
    tool(folder / "order.xdproj", folder / "order2.pt", "--columns", 1)
    check(torch.load(folder / "order2.pt", weights_only=True)["indices"].tolist() == [[9], [3]], "a cut")


def check_sums_and_refusals(torch, program, folder):
    torch.save({"indices": torch.tensor([[3, 3, -1]]), "likelihoods": torch.tensor([[0.5, 0.25, 7.0]])},
               folder / "twice.pt")
    tool(folder / "twice.pt", folder / "twice.xdproj")
    check(entries(program, folder / "twice.xdproj")[1] == {(0, 3): bits(0.75)}, "a sum of equal entries")
    for name, thing in (("shape", {"indices": torch.zeros(2, 2), "likelihoods": torch.zeros(2, 3)}),
                        ("list", [1, 2]), ("empty", {}), ("keys", {"a": 1.0}),
                        ("negative", {(0, 0): -1.0}), ("nan", {(0, 0): float("nan")})):
        torch.save(thing, folder / f"{name}.pt")
        check("projection_pt: " in tool(folder / f"{name}.pt", folder / "no.xdproj", status=1), name)
    data = bytearray((folder / "twice.xdproj").read_bytes())
    data[90] ^= 1
    (folder / "bad.xdproj").write_bytes(data)
    check("checksum" in tool(folder / "bad.xdproj", folder / "no.pt", status=1), "a flipped bit")
    check(not (folder / "no.pt").exists() and not (folder / "no.xdproj").exists(), "nothing is left behind")


def main():
    try:
        import torch
    except ImportError:
        print("needs PyTorch, which this python does not have")
        return 77
    random.seed(5)
    torch.manual_seed(5)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        check_both_forms(torch, sys.argv[1], folder)
        check_order(torch, folder)
        check_sums_and_refusals(torch, sys.argv[1], folder)
    print(f"{len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
