#!/usr/bin/env python3
"""The binding that tools/api.py writes, used: layouts, one loss with its gradient, and an error's message.

XD_LIBRARY is a shared library of the header; without it one is compiled by $CC.
"""

import ctypes
import importlib.util
import json
import math
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
STUDENT = [[0.5, -1.25, 2.0, 0.0, 3.0], [1.0, 1.0, -2.5, 0.75, 0.25], [4.0, -3.0, 0.5, 1.5, -0.5]]
TEACHER = [[1.5, 0.25, 1.0, -1.0, 2.0], [-0.5, 2.0, 0.5, 0.0, 1.25], [0.0, 0.0, 1.0, 0.0, 0.0]]
LABELS = [4, 1, 0]
MASK = [1, 1, 0]  # the last position does not count
HARD, SOFT, TAU = 0.75, 0.5, 2.0


def softmax(row):
    powers = [math.exp(x - max(row)) for x in row]
    return [power / sum(powers) for power in powers]


def expected():
    """The loss and its gradient by their formulas: means over counted rows of HARD CE + SOFT TAU^2 KL(teacher || student)."""
    loss, gradient, counted = 0.0, [], sum(MASK)
    for x, y, label, mask in zip(STUDENT, TEACHER, LABELS, MASK):
        p, s, t = softmax(x), softmax([v / TAU for v in x]), softmax([v / TAU for v in y])
        hard = -math.log(p[label])
        soft = sum(b * math.log(b / a) for a, b in zip(s, t))
        loss += mask * (HARD * hard + SOFT * TAU * TAU * soft) / counted
        gradient += [mask * (HARD * (p[c] - (c == label)) + SOFT * TAU * (s[c] - t[c])) / counted for c in range(len(x))]
    return loss, gradient


class Ctypes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        build = pathlib.Path(folder.name)
        subprocess.run([sys.executable, str(ROOT / "tools" / "api.py"), "--build", str(build)], check=True)
        library = os.environ.get("XD_LIBRARY")
        if not library:
            library = build / "libxdistill.so"
            subprocess.run([*shlex.split(os.environ.get("CC", "cc")), "-std=c99", "-O0", "-fPIC", "-shared", "-I", str(ROOT),
                            str(ROOT / "tests" / "build" / "implementation.c"), "-o", str(library), "-lm", "-lpthread"],
                           check=True)
        specification = importlib.util.spec_from_file_location("xdistill_ctypes", build / "xdistill_ctypes.py")
        cls.binding = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(cls.binding)
        cls.api = json.loads((build / "api.json").read_text())
        cls.xd = cls.binding.load(str(library))

    def setUp(self):
        self.ctx, self.vocab = ctypes.POINTER(self.binding.xd_ctx)(), ctypes.POINTER(self.binding.xd_vocab)()
        self.call("xd_ctx_create", None, ctypes.byref(self.ctx))
        self.addCleanup(self.xd.xd_ctx_destroy, self.ctx)
        desc = self.binding.xd_vocab_desc(size=len(STUDENT[0]))
        self.call("xd_vocab_create", self.ctx, ctypes.byref(desc), ctypes.byref(self.vocab))
        self.addCleanup(self.xd.xd_vocab_destroy, self.vocab)

    def call(self, name, *arguments):
        self.assertEqual(self.xd.xd_result_name(getattr(self.xd, name)(*arguments)), b"OK")

    def rows(self, values, dtype):
        rows = self.binding.xd_rows()
        rows.data, rows.dtype = ctypes.cast(values, ctypes.c_void_p), dtype
        rows.rows, rows.cols = len(STUDENT), len(STUDENT[0])
        return rows

    def loss_desc(self):
        """A desc of all inputs; the arrays stay in self.arrays, since the desc holds their addresses only."""
        b = self.binding
        floats, self.arrays = ctypes.c_float * (len(STUDENT) * len(STUDENT[0])), []
        for values in (sum(STUDENT, []), sum(TEACHER, []), [math.nan] * len(sum(STUDENT, []))):
            self.arrays.append(floats(*values))
        labels, mask = (ctypes.c_int32 * len(LABELS))(*LABELS), (ctypes.c_uint8 * len(MASK))(*MASK)
        student, teacher, gradient = (self.rows(array, b.XD_DTYPE_F32) for array in self.arrays)
        self.arrays += [labels, mask]
        ids = b.xd_ids(ctypes.cast(labels, ctypes.c_void_p), b.XD_DTYPE_I32)
        common = b.xd_loss_common(gradient=gradient, labels=ids, mask=mask)
        return b.xd_loss_desc(student=student, teacher=teacher, vocab=self.vocab, hard_weight=HARD, soft_weight=SOFT,
                              temperature=TAU, divergence=b.XD_KL_FORWARD, common=common)

    def test_every_structure_has_the_size_and_the_offsets_of_the_compiler(self):
        names = [struct["name"] for struct in self.api["structs"]]
        self.assertIn("xd_loss_desc", names)
        for struct in self.api["structs"]:
            made = getattr(self.binding, struct["name"])
            self.assertEqual(ctypes.sizeof(made), struct["size"], struct["name"])
            self.assertEqual(len(made._fields_), len(struct["fields"]), struct["name"])
            for field, (name, _) in zip(struct["fields"], made._fields_):
                place = getattr(made, name)
                self.assertEqual((name.rstrip("_"), place.offset, place.size),
                                 (field["name"], field["offset"], field["size"]), struct["name"])

    def test_every_function_is_in_the_library_but_those_of_the_cuda_unit(self):
        self.assertGreater(len(self.binding.FUNCTIONS), 100)
        self.assertEqual([name for name in self.xd.absent if not name.startswith("xd_cuda_")], [])

    def test_enumerators_of_enums_with_and_without_a_name_are_numbers(self):
        for enum in self.api["enums"]:
            for value in enum["values"]:
                self.assertEqual(getattr(self.binding, value["name"]), value["value"])
        for dtype, name in ((self.binding.XD_DTYPE_BF16, b"BF16"), (self.binding.XD_DTYPE_U64, b"U64")):
            self.assertEqual(self.xd.xd_dtype_name(dtype), name)

    def test_enums_are_enums_and_comments_are_docstrings(self):
        b = self.binding
        self.assertIs(b.XD_DTYPE_BF16, b.xd_dtype.XD_DTYPE_BF16)
        self.assertEqual(b.xd_dtype(b.XD_DTYPE_BF16).name, "XD_DTYPE_BF16")
        for table in ("structs", "enums"):
            for one in self.api[table]:
                if one["name"]:
                    comments = [one["comment"]] + [member["comment"] for member in one.get("fields", one.get("values"))]
                    said = getattr(b, one["name"]).__doc__.split()
                    for comment in comments:
                        words = comment.split()
                        self.assertTrue(any(said[at:at + len(words)] == words for at in range(len(said))), (one["name"], comment))
        self.assertIn("Computes value and gradient of the global loss", self.xd.xd_loss.__doc__)

    def test_a_loss_and_its_gradient_are_those_of_the_formulas(self):
        desc, values = self.loss_desc(), self.binding.xd_loss_values()
        self.call("xd_loss", self.ctx, ctypes.byref(desc), ctypes.byref(values))
        loss, gradient = expected()
        self.assertEqual(values.counted, sum(MASK))
        self.assertAlmostEqual(values.loss, loss, delta=1e-5)
        self.assertEqual(len(self.arrays[2]), len(gradient))
        for got, want in zip(self.arrays[2], gradient):
            self.assertAlmostEqual(got, want, delta=1e-6)

    def test_a_wrong_dtype_is_an_error_with_its_message(self):
        desc, values = self.loss_desc(), self.binding.xd_loss_values(loss=7.0)
        desc.student.dtype = self.binding.XD_DTYPE_I32
        result = self.xd.xd_loss(self.ctx, ctypes.byref(desc), ctypes.byref(values))
        self.assertEqual(result, self.binding.XD_ERROR_DTYPE)
        error = self.xd.xd_last_error(self.ctx).contents
        self.assertEqual(error.result, self.binding.XD_ERROR_DTYPE)
        self.assertIn(b"I32", error.message)
        self.assertTrue(error.file.endswith((b".c", b".h")) and error.line > 0)
        self.assertEqual(values.loss, 7.0)  # outputs are untouched

    def test_a_callback_of_python_is_called_by_the_library(self):
        b, lines = self.binding, []
        logger = b.xd_logger()
        logger.write = dict(b.xd_logger._fields_)["write"](lambda user, level, line: lines.append((level, line)))
        ctx = ctypes.POINTER(b.xd_ctx)()
        self.call("xd_ctx_create", ctypes.byref(b.xd_ctx_desc(logger=logger, log_level=b.XD_LOG_TRACE)), ctypes.byref(ctx))
        self.addCleanup(self.xd.xd_ctx_destroy, ctx)
        self.xd.xd_log(ctx, b.XD_LOG_WARN, b"%s", b"said by Python")
        self.assertEqual([level for level, line in lines if line.endswith(b"said by Python")], [b.XD_LOG_WARN])


if __name__ == "__main__":
    unittest.main()
