"""docs/python.md: its code runs, and its tables name every function. The examples run a few steps where transformers is installed."""

import contextlib
import io
import os
import pathlib
import re
import runpy
import sys
import tempfile
import unittest
from unittest import mock

import torch

import xdistill
import xdistill.torch as xt

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text()


class Page(unittest.TestCase):
    def test_every_block_runs(self):
        blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
        self.assertEqual(len(blocks), 5)
        before, space, said = os.getcwd(), {}, io.StringIO()
        self.addCleanup(os.chdir, before)
        with tempfile.TemporaryDirectory() as folder:
            os.symlink(ROOT / "data", os.path.join(folder, "data"))
            os.chdir(folder)
            with contextlib.redirect_stdout(said):
                for block in blocks:
                    exec(compile(block, "docs/python.md", "exec"), space)
            os.chdir(before)
        self.assertTrue(torch.equal(space["copy"], space["weight"]))
        self.assertIsNotNone(space["student"])
        self.assertEqual(said.getvalue().split()[1:], ["2", "32", "XD_DTYPE_BF16", "2"])

    def test_the_tables_name_every_function(self):
        rows = "\n".join(line for line in PAGE.split("\n") if line.startswith("|"))
        for name in xt.__all__ + [one for one in xdistill.__all__ if one not in ("api", "lib", "losses", "array", "Alignment", "Chunks",
                                                                                "Encoding")]:
            self.assertRegex(rows, r"`%s\b" % name)
        for name in re.findall(r"^\| `(\w+)\(", rows, re.M):
            self.assertTrue(hasattr(xt, name) or hasattr(xdistill, name), name)


class Examples(unittest.TestCase):
    def run_example(self, name, steps):
        before, said = os.getcwd(), io.StringIO()
        self.addCleanup(os.chdir, before)
        os.chdir(ROOT)
        with mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"), mock.patch.object(sys, "argv", [name, str(steps)]), \
                contextlib.redirect_stdout(said):
            runpy.run_path(str(ROOT / "examples" / "python" / name), run_name="__main__")
        return said.getvalue()

    @classmethod
    def setUpClass(cls):
        try:
            import accelerate, transformers  # noqa: F401, E401
        except ImportError as error:
            raise unittest.SkipTest("needs transformers and accelerate: %s" % error)

    def test_two_tokenizers(self):
        losses = [float(value) for value in re.findall(r"loss ([\d.]+)", self.run_example("two_tokenizers.py", 11))]
        self.assertEqual(len(losses), 2)
        self.assertLess(losses[1], losses[0] - 0.5)

    def test_the_trainer(self):
        losses = [float(value) for value in re.findall(r"'train_loss': '?([\d.]+)", self.run_example("trainer.py", 3))]
        self.assertEqual(len(losses), 1)
        self.assertTrue(5.0 < losses[0] < 7.7, losses)  # between a trained student and one that knows nothing: ln 2048


if __name__ == "__main__":
    torch.set_num_threads(2)
    unittest.main()
