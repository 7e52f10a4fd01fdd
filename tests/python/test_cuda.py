"""Losses on a GPU against those on the CPU. The GPU is the emulation of tests/emu: emulated_nvcc.sh made the package."""

import array
import contextlib
import ctypes
import os
import pathlib
import random
import unittest
import weakref
from unittest import mock

import xdistill
from xdistill import _arrays, losses

try:
    import torch
    import xdistill.torch as xt
except ImportError:
    torch = None

DATA = pathlib.Path(os.environ.get("XD_DATA", pathlib.Path(__file__).resolve().parents[2] / "data"))
TEXT = "In the beginning God created the heaven and the earth."
lib = xdistill.lib
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind


def numbers(count, seed, letter="f"):
    generator = random.Random(seed)
    return array.array(letter, [generator.gauss(0, 2) for _ in range(count)])


class Host:
    """Numbers with a shape, as NumPy shows them."""

    def __init__(self, numbers, *shape):
        self.memory, self.shape = array.array(numbers.typecode, numbers), shape or (len(numbers),)
        self.typestr = {"f": "<f4", "d": "<f8", "q": "<i8", "B": "|u1", "i": "<i4"}[numbers.typecode]
        self.__array_interface__ = self.interface(self.memory.buffer_info()[0])

    def interface(self, address):
        return {"data": (address, False), "typestr": self.typestr, "shape": self.shape, "version": 3}

    def read(self):
        return self.memory


class Gpu(Host):
    """The same in memory of a GPU, as CuPy shows it."""

    def __init__(self, numbers, *shape, stream=None, device=0):
        super().__init__(numbers, *shape)
        del self.__array_interface__
        self.size, self.address = len(self.memory) * self.memory.itemsize, ctypes.c_void_p()
        lib.cudaSetDevice(device)
        assert lib.cudaMalloc(ctypes.byref(self.address), ctypes.c_size_t(self.size)) == 0
        lib.cudaSetDevice(0)
        self.copy(self.address, self.memory.buffer_info()[0], TO_DEVICE)
        self.__cuda_array_interface__ = {**self.interface(self.address.value), "stream": stream}
        weakref.finalize(self, lib.cudaFree, self.address)

    def copy(self, to, source, kind):
        assert lib.cudaMemcpy(ctypes.c_void_p(getattr(to, "value", to)), ctypes.c_void_p(getattr(source, "value", source)),
                              ctypes.c_size_t(self.size), kind) == 0

    def read(self):
        made = array.array(self.memory.typecode, self.memory)
        self.copy(made.buffer_info()[0], self.address, TO_HOST)
        return made


class Case(unittest.TestCase):
    def near(self, mine, others, most=2e-6):
        scale = max(map(abs, others)) or 1.0
        self.assertEqual(len(mine), len(others))
        self.assertLess(max(abs(a - b) for a, b in zip(mine, others)), most * scale)
        self.assertGreater(max(map(abs, others)), 0.0)

    def same(self, function, make, *fields):
        """make(kind) has the arguments, and which of them are written, for Host and for Gpu."""
        found = []
        for kind in (Host, Gpu):
            arguments, written = make(kind)
            values = function(**arguments)
            found.append(([getattr(values, name) for name in ("loss", *fields)], [arguments[name].read() for name in written]))
        (expected, right), (got, mine) = found
        self.near(got, expected)
        for one, other in zip(mine, right):
            self.near(one, other)


class Losses(Case):
    def test_a_loss_of_rows(self):
        for options in ({}, {"reduction": "sum", "scale": 3.0}, {"divergence": "jsd", "beta": 0.3, "temperature": 2.0}):
            self.same(losses.loss, lambda kind: ({
                "student": kind(numbers(7 * 130, 1), 7, 130), "teacher": kind(numbers(7 * 130, 2), 7, 130),
                "labels": kind(array.array("q", [3, 129, -100, 0, 5, 6, 7])), "mask": kind(array.array("B", [1, 1, 1, 0, 1, 1, 1])),
                "row_weight": kind(array.array("f", [1, 2, 1, 1, 0.5, 1, 1])), "hard_weight": 0.5, "soft_weight": 0.75,
                "gradient": kind(numbers(7 * 130, 3), 7, 130), "row_loss": kind(numbers(7, 4)), **options},
                ("gradient", "row_loss")), "hard", "soft", "counted")

    def test_a_divergence_at_k_columns(self):
        self.same(losses.topk_kl_loss, lambda kind: ({
            "student": kind(numbers(5 * 67, 1), 5, 67), "teacher": kind(numbers(5 * 67, 2), 5, 67), "k": 4,
            "gradient": kind(numbers(5 * 67, 3), 5, 67)}, ("gradient",)), "counted")

    def test_a_head(self):
        self.same(losses.head_loss, lambda kind: ({
            "hidden": kind(numbers(9 * 17, 1), 9, 17), "weight": kind(numbers(65 * 17, 2), 65, 17), "bias": kind(numbers(65, 3)),
            "labels": kind(array.array("q", range(9))), "teacher": kind(numbers(9 * 65, 4), 9, 65), "hard_weight": 1.0,
            "soft_weight": 0.5, "hidden_gradient": kind(numbers(9 * 17, 5), 9, 17),
            "weight_gradient": kind(array.array("f", [0.0]) * (65 * 17), 65, 17), "bias_gradient": kind(array.array("f", [0.0]) * 65)},
            ("hidden_gradient", "weight_gradient", "bias_gradient")), "hard", "soft")

    def test_terms_of_diffusion(self):
        def arrays(kind, *names):
            return {name: kind(numbers(3 * 7, seed), 3, 7) for seed, name in enumerate(names)}

        self.same(losses.vsd_loss, lambda kind: (arrays(kind, "generated", "teacher", "fake", "gradient"), ("gradient",)))
        self.same(losses.denoise_loss, lambda kind: ({
            **arrays(kind, "prediction", "clean", "noise", "gradient"),
            "terms": kind(array.array("d", map(abs, numbers(12, 9, "d"))), 3, 4)}, ("gradient",)))
        self.same(losses.gan_loss, lambda kind: (arrays(kind, "fake", "real", "fake_gradient", "real_gradient"),
                                                 ("fake_gradient", "real_gradient")))


class TwoTokenizers(Case):
    @classmethod
    def setUpClass(cls):
        cls.student, cls.teacher = xdistill.Tokenizer(DATA / "student"), xdistill.Tokenizer(DATA / "teacher")
        cls.tokens = cls.student.encode(TEXT), cls.teacher.encode(TEXT)
        cls.chunks = xdistill.chunks(xdistill.align(*cls.tokens), *map(len, cls.tokens))

    def logits(self, kind):
        mine, other = map(len, self.tokens)
        return {"student": kind(numbers(mine * 1024, 1), mine, 1024), "teacher": kind(numbers(other * 2048, 2), other, 2048),
                "gradient": kind(numbers(mine * 1024, 3), mine, 1024)}

    def test_chunks_by_a_projection(self):
        labels = array.array("q", [*self.tokens[0].ids[1:], -100])
        for kind, options in (("projected", {}), ("gold", {"max_pieces": 4})):
            projection = xdistill.Projection(self.student, self.teacher, **options)
            self.same(losses.xtoken_loss, lambda where: ({
                **self.logits(where), "chunks": self.chunks, "projection": projection, "labels": Host(labels), "columns": 128,
                "tail": 20, "kind": kind}, ("gradient",)), "kd", "ce")

    def test_chunks_without_one(self):
        self.same(losses.uld_loss, lambda kind: ({
            **self.logits(kind), "chunks": self.chunks, "student_ids": array.array("q", self.tokens[0].ids),
            "teacher_ids": array.array("q", self.tokens[1].ids)}, ("gradient",)), "chunks")

    def test_lists_of_them_stay_on_the_cpu(self):
        with self.assertRaisesRegex(ValueError, "student_ids is on a GPU: copy it to the CPU first"):
            losses.uld_loss(**self.logits(Gpu), chunks=self.chunks, student_ids=Gpu(array.array("q", self.tokens[0].ids)),
                            teacher_ids=array.array("q", self.tokens[1].ids))


class Places(Case):
    def arguments(self, kind=Gpu, **options):
        return {"student": kind(numbers(10, 1), 2, 5, **options), "teacher": kind(numbers(10, 2), 2, 5, **options), "soft_weight": 1.0}

    def test_data_errors_are_those_of_one_call(self):
        for _ in range(2):
            with self.assertRaisesRegex(xdistill.Error, "ERROR_DATA.*label"):
                losses.loss(**self.arguments(), labels=Gpu(array.array("q", [1, 5])))
            self.assertGreater(losses.loss(**self.arguments()).loss, 0.0)
        self.assertEqual(losses.loss(**self.arguments(), labels=Gpu(array.array("q", [-100, -100]))).loss, 0.0)

    def test_arrays_of_two_places_are_refused(self):
        both = {**self.arguments(), "teacher": Host(numbers(10, 2), 2, 5)}
        with self.assertRaisesRegex(ValueError, "teacher is on the CPU, but student on GPU 0"):
            losses.loss(**both)
        with self.assertRaisesRegex(ValueError, "labels is on GPU 0, but student on the CPU"):
            losses.loss(**self.arguments(Host), labels=Gpu(array.array("q", [1, 2])))
        with self.assertRaisesRegex(ValueError, "the context is on the CPU, but student on GPU 0"):
            losses.loss(**self.arguments(), context=xdistill.Context(1))
        with self.assertRaisesRegex(ValueError, "x is on a GPU: copy it to the CPU first"):
            xdistill.save_weights("none", {"x": Gpu(numbers(10, 1))})

    def test_memory_that_is_read_only_is_not_written(self):
        gradient = Gpu(numbers(10, 1), 2, 5)
        gradient.__cuda_array_interface__["data"] = gradient.address.value, True
        with self.assertRaisesRegex(ValueError, "gradient is read-only, but would be written"):
            losses.loss(**self.arguments(), gradient=gradient)

    def test_the_stream_of_the_student_has_the_work(self):
        stream = ctypes.c_void_p()
        self.assertEqual(lib.cudaStreamCreateWithFlags(ctypes.byref(stream), 1), 0)
        expected = losses.loss(**self.arguments()).loss
        self.assertEqual(losses.loss(**self.arguments(stream=stream.value)).loss, expected)
        self.assertEqual(lib.xd_ctx_settings(xdistill.context(device=0).handle).contents.stream, stream.value)
        self.assertEqual(losses.loss(**self.arguments()).loss, expected)
        self.assertIsNone(lib.xd_ctx_settings(xdistill.context(device=0).handle).contents.stream)
        self.assertEqual(lib.cudaStreamDestroy(stream), 0)

    def test_each_gpu_has_a_context(self):
        devices, current = ctypes.c_int(), ctypes.c_int()
        lib.cudaGetDeviceCount(ctypes.byref(devices))
        self.assertGreater(devices.value, 1)
        expected = losses.loss(**self.arguments()).loss
        self.assertEqual(losses.loss(**self.arguments(device=1)).loss, expected)
        self.assertIsNot(xdistill.context(device=1), xdistill.context(device=0))
        lib.cudaGetDevice(ctypes.byref(current))
        self.assertEqual(current.value, 0)
        with self.assertRaisesRegex(ValueError, "teacher is on GPU 0, but student on GPU 1"):
            losses.loss(**{**self.arguments(device=1), "teacher": Gpu(numbers(10, 2), 2, 5)})
        with self.assertRaisesRegex(xdistill.Error, "ERROR_DEVICE: .*GPU 99"):
            xdistill.Context(device=99)

    def test_a_context_is_chosen_and_memory_is_released(self):
        mine = xdistill.Context(invariant=True, device=0)
        xdistill.use(mine)
        self.addCleanup(xdistill.use, None)
        losses.loss(**self.arguments())
        self.assertIs(xdistill.context(device=0), mine)
        self.assertIn("workspace", mine.gpu.taken)
        xdistill.release_memory()
        self.assertNotIn("workspace", mine.gpu.taken)
        losses.loss(**self.arguments())


@unittest.skipUnless(torch, "needs PyTorch")
class Tensors(Case):
    """PyTorch has no GPU here. Its tensors over the emulation's memory are taken for a GPU's, and new ones are made there."""

    def setUp(self):
        def device(x):
            number = lib.xdistill_python_device(x.data_ptr())
            return number if number >= 0 else None

        def empty(like, dtype=None):
            made = torch.empty(like.shape, dtype=dtype or like.dtype)
            return made if device(like) is None else self.there(made)

        patches = contextlib.ExitStack()
        self.addCleanup(patches.close)
        for place, name, other in ((_arrays, "torch_device", device), (_arrays, "torch_stream", lambda device: None), (xt, "empty", empty)):
            patches.enter_context(mock.patch.object(place, name, other))

    def there(self, x):
        kept = Gpu(array.array("B", bytes(x.numel() * x.element_size())))
        buffer = (ctypes.c_char * kept.size).from_address(kept.address.value)
        buffer.kept = kept
        return torch.frombuffer(buffer, dtype=x.dtype).view(x.shape).copy_(x.detach())

    def check(self, function, *inputs, tolerance=2e-6):
        expected, got = [[x.detach().requires_grad_(x.is_floating_point()) for x in map(place, inputs)]
                         for place in (torch.clone, self.there)]
        values = [function(*one) for one in (expected, got)]
        self.assertIsNotNone(_arrays.torch_device(got[0]))
        torch.testing.assert_close(values[1], values[0], rtol=tolerance, atol=tolerance)
        gradients = [torch.autograd.grad(value * 0.5, one[:1]) for value, one in zip(values, (expected, got))]
        torch.testing.assert_close(gradients[1], gradients[0], rtol=tolerance, atol=tolerance)

    def test_values_and_gradients_are_those_of_the_cpu(self):
        torch.manual_seed(1)
        x, y, labels = torch.randn(6, 33), torch.randn(6, 33), torch.arange(6)
        self.check(lambda x, y, labels: xt.kl_loss(x, y, labels, 2.0, hard_weight=0.5), x, y, labels)
        self.check(lambda x, y: xt.topk_kl_loss(x, y, k=5), x, y)
        self.check(lambda x, w, labels: xt.head_loss(x, w, None, labels, hard_weight=1.0), x, torch.randn(9, 33), labels)
        self.check(lambda x: xt.gan_loss(x), x)
        self.check(lambda x, y, labels: xt.kl_loss(x, y, labels), x.bfloat16(), y.bfloat16(), labels, tolerance=1e-2)

    def test_losses_of_two_tokenizers_have_lists_on_the_cpu(self):
        student, teacher = [xdistill.Tokenizer(DATA / one) for one in ("student", "teacher")]
        mine, other = student.encode(TEXT), teacher.encode(TEXT)
        chunks = xdistill.chunks(xdistill.align(mine, other), len(mine), len(other))
        projection = xdistill.Projection(student, teacher)
        labels = xt.next_labels(torch.tensor(mine.ids))
        torch.manual_seed(2)
        self.check(lambda x, y, labels: xt.xtoken_loss(x, y, chunks, projection, labels.clone(), columns=128),
                   torch.randn(len(mine), 1024), torch.randn(len(other), 2048), labels)


if __name__ == "__main__":
    unittest.main()
