"""The package without NumPy and without PyTorch: what it checks when it is imported, errors, arrays, contexts."""

import array
import ctypes
import inspect
import os
import pathlib
import subprocess
import sys
import threading
import unittest

import xdistill
from xdistill import _arrays, _library, api, losses

STUDENT = array.array("f", [0.5, -1.25, 2.0, 0.0, 3.0, 1.0, 1.0, -2.5, 0.75, 0.25])
TEACHER = array.array("f", [1.5, 0.25, 1.0, -1.0, 2.0, -0.5, 2.0, 0.5, 0.0, 1.25])


class Interface:
    """A matrix as NumPy shows it."""

    def __init__(self, numbers, shape, strides=None, typestr="<f4"):
        self.numbers = numbers
        self.__array_interface__ = {"data": (numbers.buffer_info()[0], False), "typestr": typestr, "shape": shape,
                                    "strides": strides, "version": 3}


class Package(unittest.TestCase):
    def test_import_brings_neither_numpy_nor_torch(self):
        code = "import sys, xdistill; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
        said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        self.assertEqual(said.strip(), "[]")

    def test_the_library_lies_beside_the_package(self):
        self.assertEqual(_library.PATH.parent, pathlib.Path(xdistill.__file__).resolve().parent)
        self.assertEqual(_library.lib._name, str(_library.PATH))

    def test_another_version_is_refused_with_both(self):
        with self.assertRaisesRegex(ImportError, r"is version 9\.8\.7, the package is %s" % xdistill.__version__.replace(".", r"\.")):
            _library.compare(90807, [])

    def test_another_size_of_a_struct_is_refused_with_both(self):
        head = (ctypes.c_int64 * 2).in_dll(xdistill.lib, "xdistill_python_facts")
        facts = (ctypes.c_int64 * (2 + head[1])).in_dll(xdistill.lib, "xdistill_python_facts")
        sizes = list(facts[2:])
        _library.compare(head[0], sizes)
        with self.assertRaisesRegex(ImportError, "has %d structs, the package %d" % (len(sizes) - 1, len(sizes))):
            _library.compare(head[0], sizes[1:])
        place = sizes.index(ctypes.sizeof(api.xd_loss_desc))
        sizes[place] += 8
        with self.assertRaisesRegex(ImportError, r"has %d bytes in .* and %d in the package" % (sizes[place], sizes[place] - 8)):
            _library.compare(head[0], sizes)

    def test_structs_enums_and_functions_have_the_header_s_comments(self):
        self.assertIn("Cross entropy with labels", api.xd_loss_desc.__doc__)
        self.assertIn("hard_weight", api.xd_loss_desc.__doc__)
        self.assertIn("Element type", api.xd_dtype.__doc__)
        self.assertIs(api.XD_DTYPE_BF16, api.xd_dtype.XD_DTYPE_BF16)
        self.assertIn("Computes value and gradient of the global loss", xdistill.lib.xd_loss.__doc__)


    def test_a_struct_is_shown_in_one_line(self):
        values = losses.loss(Interface(STUDENT, (2, 5)), Interface(STUDENT, (2, 5)), soft_weight=1.0)
        self.assertEqual(repr(values), "xd_loss_values(loss=0.0, hard=0.0, soft=0.0, counted=2)")
        desc = api.xd_align_side(count=3, mask=ctypes.pointer(ctypes.c_uint8(1)))
        self.assertRegex(repr(desc), r"^xd_align_side\(.*roles=None, mask=Ellipsis, .*count=3\)$")
        self.assertEqual(repr(api.xd_ctx()), "xd_ctx()")


class Errors(unittest.TestCase):
    def test_an_error_has_the_library_s_text_result_and_name(self):
        with self.assertRaises(xdistill.Error) as caught:
            losses.loss(Interface(STUDENT, (2, 5)), soft_weight=1.0)
        self.assertEqual((caught.exception.name, caught.exception.result), ("ERROR_ARGUMENT", api.XD_ERROR_ARGUMENT))
        self.assertIn("neither labels nor a teacher", str(caught.exception))

    def test_a_label_outside_the_vocabulary_is_a_data_error(self):
        with self.assertRaisesRegex(xdistill.Error, "ERROR_DATA"):
            losses.loss(Interface(STUDENT, (2, 5)), labels=array.array("q", [1, 5]), hard_weight=1.0)

    def test_a_choice_that_does_not_exist_is_named(self):
        with self.assertRaisesRegex(ValueError, "divergence is 'l2', expected one of 'kl'"):
            losses.loss(Interface(STUDENT, (2, 5)), Interface(TEACHER, (2, 5)), soft_weight=1.0, divergence="l2")

    def test_a_context_of_too_many_threads_is_an_error(self):
        with self.assertRaisesRegex(xdistill.Error, "ERROR_ARGUMENT"):
            xdistill.Context(threads=5000)


class Arrays(unittest.TestCase):
    def refused(self, kind, text, *arguments, **others):
        with self.assertRaisesRegex(kind, text):
            losses.loss(*arguments, soft_weight=1.0, **others)

    def test_arrays_that_do_not_fit_are_refused_with_the_reason(self):
        teacher, swapped = Interface(TEACHER, (2, 5)), Interface(STUDENT, (2, 5), (4, 8))
        self.refused(ValueError, "rows with gaps between columns", swapped, teacher)
        self.refused(ValueError, "strides that are no whole elements", Interface(STUDENT, (2, 5), (21, 4)), teacher)
        self.refused(TypeError, "type >f4", Interface(STUDENT, (2, 5), None, ">f4"), teacher)
        self.refused(TypeError, "student is a list, not an array", [1.0], teacher)
        self.refused(TypeError, "labels is F32, expected I64 or I32", Interface(STUDENT, (2, 5)), teacher, STUDENT[:2])
        self.refused(ValueError, "labels has 3 elements, expected 2", Interface(STUDENT, (2, 5)), teacher, array.array("q", [1, 2, 3]))
        self.refused(xdistill.Error, "ERROR_DTYPE", Interface(array.array("d", STUDENT), (2, 5), None, "<f8"), teacher)
        with self.assertRaisesRegex(TypeError, "read-only, strided or unknown"):
            xdistill.array(b"bytes")

    def test_an_array_that_is_read_only_is_read_but_not_written(self):
        student, gradient = Interface(STUDENT, (2, 5)), Interface(array.array("f", [7.0] * 10), (2, 5))
        address, _ = gradient.__array_interface__["data"]
        gradient.__array_interface__["data"] = address, True
        self.refused(ValueError, "^gradient is read-only, but would be written$", student, gradient, gradient=gradient)
        self.assertEqual(list(gradient.numbers), [7.0] * 10)
        self.assertGreater(losses.loss(student, gradient, soft_weight=1.0).loss, 0.0)
        self.refused(TypeError, "row_loss is a buffer of format f that is read-only", student, student,
                     row_loss=memoryview(array.array("f", [0.0] * 2)).toreadonly(), reduction="none")

    def test_leading_dimensions_are_equal_but_for_ones(self):
        for shape in ((2, 1, 5), (1, 2, 5)):
            self.assertEqual(losses.loss(Interface(STUDENT, (2, 5)), Interface(STUDENT, shape), soft_weight=1.0).loss, 0.0)
        small = array.array("f", STUDENT[:8])
        self.refused(ValueError, r"^teacher is \[4, 2\], but student \[2, 2, 2\]: their leading dimensions differ$",
                     Interface(small, (2, 2, 2)), Interface(small, (4, 2)))
        self.refused(ValueError, r"gradient is \[4, 2\], but student \[2, 2, 2\]", Interface(small, (2, 2, 2)),
                     Interface(small, (2, 2, 2)), gradient=Interface(small, (4, 2)))
        with self.assertRaisesRegex(ValueError, r"fake is \[2, 4\], but generated \[4, 2\]"):
            losses.vsd_loss(Interface(small, (4, 2)), Interface(small, (4, 2)), Interface(small, (2, 4)))
        with self.assertRaisesRegex(ValueError, r"teacher is \[1, 4, 2\], but student \[2, 2, 2\]"):
            losses.uld_loss(Interface(small, (2, 2, 2)), Interface(small, (1, 4, 2)), array.array("i", [1, 2, 1, 2, 0] * 2),
                            *[array.array("q", [0] * 4)] * 2)

    def test_a_temperature_is_more_than_zero(self):
        for temperature in (0, -1.0, float("nan")):
            self.refused(ValueError, "temperature is .*, expected more than 0", Interface(STUDENT, (2, 5)), Interface(TEACHER, (2, 5)),
                         temperature=temperature)

    def test_no_rows_are_a_loss_of_zero(self):
        empty = Interface(array.array("f"), (0, 5))
        found = losses.loss(empty, empty, array.array("q"), soft_weight=1.0, hard_weight=1.0)
        self.assertEqual((found.loss, found.counted), (0.0, 0))

    def test_an_array_of_a_gpu_is_refused_in_one_sentence(self):
        on_gpu = Interface(STUDENT, (2, 5))
        on_gpu.__cuda_array_interface__ = on_gpu.__dict__.pop("__array_interface__")
        self.refused(ValueError, r"^student is on a GPU, and this build of xdistill computes on CPUs: XDISTILL_CUDA=1 pip install "
                                 r"\./python makes one for both$", on_gpu, on_gpu)

    def test_a_batch_of_sequences_is_their_mean(self):
        size, ids = 2 * 3 * 4, array.array("q", [0, 1, 2, 3, 2, 1])
        student, teacher = [array.array("f", [(seed * i) % 7 / 2 for i in range(size)]) for seed in (3, 5)]
        pieces = array.array("i", [1, 2, 1, 2, 0, 2, 3, 2, 3, 0, 1, 3, 1, 3, 0, 0, 0, 0, 0, 0])
        gradient = array.array("f", [0.0]) * size
        both = losses.uld_loss(Interface(student, (2, 3, 4)), Interface(teacher, (2, 3, 4)), pieces, ids, ids,
                               gradient=Interface(gradient, (2, 3, 4)))
        self.assertGreater(max(map(abs, gradient)), 0.0)
        total = 0.0
        for i in (0, 1):
            part, own = slice(12 * i, 12 * i + 12), array.array("f", [0.0]) * 12
            total += losses.uld_loss(Interface(student[part], (3, 4)), Interface(teacher[part], (3, 4)), pieces[10 * i:10 * i + 10],
                                     ids[3 * i:3 * i + 3], ids[3 * i:3 * i + 3], scale=0.5, gradient=Interface(own, (3, 4))).loss
            self.assertEqual(own, gradient[part])
        self.assertEqual((both.loss, both.chunks), (total, 3))

    def test_functions_have_the_arguments_of_their_tables(self):
        about = inspect.signature(losses.topk_kl_loss)
        self.assertEqual([name for name, one in about.parameters.items() if one.kind != one.KEYWORD_ONLY],
                         ["student", "teacher", "labels", "temperature", "ignore_index", "reduction"])
        self.assertEqual((about.parameters["mode"].default, about.parameters["k"].default), ("tail", None))
        self.assertIn("of the mass outside the k", losses.topk_kl_loss.__doc__)
        with self.assertRaisesRegex(TypeError, r"loss\(\) got an unexpected keyword argument 'tau'"):
            losses.loss(Interface(STUDENT, (2, 5)), tau=1.0)
        with self.assertRaisesRegex(TypeError, r"missing 1 required positional argument: 'teacher'"):
            losses.uld_loss(Interface(STUDENT, (2, 5)), chunks=None, student_ids=None, teacher_ids=None)

    def test_rows_with_a_distance_are_read_in_place(self):
        wide = array.array("f", [*STUDENT[:5], 99.0, *STUDENT[5:], 99.0])
        sliced = Interface(wide, (1, 2, 5), (48, 24, 4))
        expected = losses.loss(Interface(STUDENT, (2, 5)), Interface(TEACHER, (2, 5)), soft_weight=1.0).loss
        self.assertEqual(losses.loss(sliced, Interface(TEACHER, (2, 5)), soft_weight=1.0).loss, expected)
        uneven = Interface(array.array("f", [0.0] * 40), (2, 2, 5), (4 * 17, 20, 4))
        with self.assertRaisesRegex(ValueError, "rows at uneven distances"):
            _arrays.rows(uneven)


class Contexts(unittest.TestCase):
    def test_a_thread_has_its_own_context_with_the_same_results(self):
        found = []

        def work():
            found.append((xdistill.context(), losses.loss(Interface(STUDENT, (2, 5)), Interface(TEACHER, (2, 5)), soft_weight=1.0).loss))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        work()
        self.assertEqual(len({id(one) for one, _ in found}), 5)
        self.assertEqual(len({value for _, value in found}), 1)

    def test_the_workspace_grows_and_is_kept(self):
        ctx = xdistill.Context(threads=1)
        small, large = [Interface(array.array("f", [0.0]) * (n * 5), (n, 5)) for n in (2, 2000)]
        losses.loss(large, large, soft_weight=1.0, context=ctx)
        memory = ctx.memory
        self.assertGreater(len(memory), 0)
        losses.loss(small, small, soft_weight=1.0, context=ctx)
        losses.loss(large, large, soft_weight=1.0, context=ctx)
        self.assertIs(ctx.memory, memory)

    def test_a_forked_process_has_its_own_workspace(self):
        ctx = xdistill.Context(threads=1)
        large = Interface(array.array("f", [0.0]) * 10000, (2000, 5))
        losses.loss(large, large, soft_weight=1.0, context=ctx)
        ctx.memory[:4] = b"mine"
        child = os.fork()
        if not child:
            ctx.memory[:4] = b"fork"
            os._exit(0)
        os.waitpid(child, 0)
        self.assertEqual(ctx.memory[:4], b"mine")

    def test_use_sets_this_thread_s_context(self):
        mine = xdistill.Context(threads=1, invariant=True)
        xdistill.use(mine)
        self.addCleanup(xdistill.use, None)
        self.assertIs(xdistill.context(), mine)
        self.assertIs(_library.context(threads=3), mine)  # as xdistill.torch asks
        xdistill.use(None)
        self.assertEqual(_library.context(threads=3).threads, 3)
        self.assertEqual(_library.context(threads=2).threads, 2)
        self.assertEqual(xdistill.lib.xd_ctx_settings(mine.handle).contents.reduction, api.XD_REDUCTION_INVARIANT)


if __name__ == "__main__":
    unittest.main()
