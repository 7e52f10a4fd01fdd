"""How gradients travel: in place, scaled once, no second derivative, torch.compile without graph breaks, tensors that do not fit."""

import inspect
import sys
import threading
import unittest
import weakref

import torch
import torch.nn.functional as F

import xdistill
import xdistill.torch as xt


def made(*shape, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    return tensors[0].requires_grad_(), tensors[1], torch.randint(0, shape[-1], shape[:-1], generator=generator)


class Steps(unittest.TestCase):
    def test_in_place_the_gradient_takes_the_memory_of_the_logits(self):
        x, y, labels = made(6, 33)
        expected, = torch.autograd.grad(xt.kl_loss(x * 2, y, labels) * 3, x)
        logits, seen = x * 2, []
        logits.register_hook(lambda g: seen.append(g.data_ptr()))
        (xt.kl_loss(logits, y, labels, inplace=True) * 3).backward()
        self.assertEqual(seen, [logits.data_ptr()])
        torch.testing.assert_close(x.grad, expected)

    def test_in_place_of_top_k_and_of_a_slice(self):
        x, y, labels = made(6, 40)
        for slow, fast in ((lambda z: xt.topk_kl_loss(z, y, labels, k=5), lambda z: xt.topk_kl_loss(z, y, labels, k=5, inplace=True)),
                           (lambda z: xt.kl_loss(z[2:], y[2:]), lambda z: xt.kl_loss(z[2:], y[2:], inplace=True)),
                           (lambda z: xt.kl_loss(z[:, :33], y[:, :33]), lambda z: xt.kl_loss(z[:, :33], y[:, :33], inplace=True)),
                           (lambda z: xt.kl_loss(z.T, y.T), lambda z: xt.kl_loss(z.T, y.T, inplace=True))):
            expected, = torch.autograd.grad(slow(x * 2), x)
            got, = torch.autograd.grad(fast(x * 2), x)
            torch.testing.assert_close(got, expected)

    def test_in_place_logits_that_others_need_are_found(self):
        x, y, labels = made(6, 33)
        logits = x * 2
        loss = (logits * logits).sum() + xt.kl_loss(logits, y, labels, inplace=True)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            loss.backward()
        with self.assertRaisesRegex(ValueError, "would overwrite a leaf"):
            xt.kl_loss(x, y, labels, inplace=True)
        with self.assertRaisesRegex(ValueError, "or a view of one"):
            xt.kl_loss(x.view(3, 2, 33)[1:], y.view(3, 2, 33)[1:], inplace=True)
        with torch.no_grad():
            before = logits.clone()
            xt.kl_loss(logits, y, labels, inplace=True)
            self.assertTrue(torch.equal(logits, before))

    def test_a_factor_of_one_copies_nothing_and_another_multiplies_once(self):
        x, y, labels = made(6, 33)
        expected, = torch.autograd.grad(xt.kl_loss(x, y, labels), x)
        for factor in (1.0, 0.25, -2.0, 0.0):
            got, = torch.autograd.grad(xt.kl_loss(x, y, labels) * factor, x)
            torch.testing.assert_close(got, expected * factor)

    def test_a_graph_that_is_kept_gives_the_same_gradients_again(self):
        x, y, labels = made(6, 33)
        expected, = torch.autograd.grad(xt.kl_loss(x, y, labels), x)
        loss, results, factors = xt.kl_loss(x, y, labels), [], (4.0, 1.0, 0.0, 4.0, -0.5)
        for number, factor in enumerate(factors):
            results += torch.autograd.grad(loss * factor, x, retain_graph=number < len(factors) - 1)
        for factor, result in zip(factors, results):  # earlier results are the caller's: they have not changed
            torch.testing.assert_close(result, expected * factor)

    def test_saved_tensors_may_be_moved(self):
        x, y, labels = made(6, 33)
        expected, = torch.autograd.grad(xt.kl_loss(x, y, labels), x)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            loss = xt.kl_loss(x, y, labels)
        for factor in (2.0, 2.0, 0.5):
            got, = torch.autograd.grad(loss * factor, x, retain_graph=True)
            torch.testing.assert_close(got, expected * factor)

    def test_losses_of_two_calls_add_up(self):
        x, y, labels = made(6, 33)
        (xt.kl_loss(x, y, labels) + 2 * xt.cross_entropy(x, labels)).backward()
        z = x.detach().requires_grad_()
        (xt.kl_loss(z, y, labels, soft_weight=1.0, hard_weight=2.0)).backward()
        torch.testing.assert_close(x.grad, z.grad)

    def test_a_second_derivative_raises(self):
        x, y, labels = made(6, 33)
        hidden, weight, _ = made(6, 9)
        for loss, wanted in ((xt.kl_loss(x, y, labels), x), (xt.kl_loss(x * 1, y, labels, inplace=True), x),
                             (xt.head_loss(hidden, weight, None, labels % 6, hard_weight=1.0), hidden)):
            gradient, = torch.autograd.grad(loss, wanted, create_graph=True)
            with self.assertRaisesRegex(RuntimeError, "no second derivative"):
                gradient.square().sum().backward()
        for inplace in (False, True):
            for function in (torch.autograd.functional.hvp, torch.autograd.functional.vhp, torch.autograd.functional.jvp):
                with self.assertRaisesRegex(RuntimeError, "no second derivative"):
                    function(lambda z: xt.kl_loss(z * 1, y, labels, inplace=inplace), x.detach(), y)

    def test_a_loss_does_not_keep_the_logits(self):
        x, y, labels = made(6, 33)
        logits = x * 2
        loss, kept = xt.kl_loss(logits, y, labels), weakref.ref(logits)
        del logits
        self.assertIsNone(kept())
        loss.backward()

    def test_forward_mode_raises(self):
        x, y, labels = made(6, 33)
        for function in (lambda z: xt.kl_loss(z, y, labels), lambda z: xt.kl_loss(y, z, labels)):
            with self.assertRaisesRegex(RuntimeError, "no forward mode, which (student|teacher) has a tangent for"):
                torch.func.jvp(function, (x.detach(),), (y,))
        with self.assertRaises(RuntimeError):
            torch.func.grad(lambda z: xt.kl_loss(z, y, labels))(x.detach())

    def test_teachers_are_constants_and_no_gradient_is_made_without_need(self):
        x, y, labels = made(6, 33)
        y.requires_grad_()
        xt.kl_loss(x, y, labels).backward()
        self.assertIsNone(y.grad)
        settings = (0.0, 1.0, 1.0, "kl", 0.0, None, 0.0, -100, 0.0, None, None, "mean", None)
        value, gradient = torch.ops.xdistill.loss(x.detach(), y.detach(), None, *settings, want_student=False)
        self.assertEqual((gradient.numel(), value.requires_grad), (0, False))
        self.assertFalse(xt.kl_loss(x.detach(), y).requires_grad)

    def test_memory_of_large_gradients_is_used_again(self):
        x, y, labels = made(64, 8192)
        xdistill.release_memory()
        one, = torch.autograd.grad(xt.kl_loss(x, y, labels), x)
        kept, places = one.clone(), {one.data_ptr()}
        two, = torch.autograd.grad(xt.cross_entropy(x, labels), x)
        places.add(two.data_ptr())
        self.assertEqual((len(places), torch.equal(one, kept)), (2, True))
        del one, two
        three, = torch.autograd.grad(xt.kl_loss(x, y, labels), x)
        self.assertIn(three.data_ptr(), places)
        self.assertTrue(torch.equal(three, kept))
        xdistill.release_memory()
        self.assertTrue(torch.equal(three, kept))
        self.assertIsNone(xdistill.context().memory)

    def test_logits_need_no_shift(self):
        x, y, ids = made(2, 7, 33)
        shifted = F.cross_entropy(x[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten())
        self.assertAlmostEqual(xt.cross_entropy(x, xt.next_labels(ids)).item(), shifted.item(), places=5)

    def test_threads_of_python_compute_apart(self):
        x, y, labels = made(64, 257)
        expected, = torch.autograd.grad(xt.kl_loss(x, y, labels), x)
        results = []

        def work():
            for _ in range(20):
                results.extend(torch.autograd.grad(xt.kl_loss(x, y, labels), x))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(results), 60)
        self.assertTrue(all(torch.equal(result, expected) for result in results))


class Tensors(unittest.TestCase):
    def test_strided_tensors_are_copied(self):
        x, y, labels = made(4, 6, 33)
        expected, = torch.autograd.grad(xt.kl_loss(x, y, labels), x)
        odd = torch.randn(6, 4, 66).transpose(0, 1)[..., ::2].detach()
        odd.copy_(x.detach())
        got, = torch.autograd.grad(xt.kl_loss(odd.requires_grad_(), y, labels.T.contiguous().T), odd)
        torch.testing.assert_close(got, expected)

    def test_wrong_tensors_are_errors(self):
        x, y, labels = made(6, 33)
        with self.assertRaisesRegex(xdistill.Error, "ERROR_DTYPE"):
            xt.kl_loss(x.double(), y.double(), labels)
        with self.assertRaisesRegex(TypeError, "labels is F32, expected I64 or I32"):
            xt.kl_loss(x, y, labels.float())
        with self.assertRaisesRegex(ValueError, "labels has 5 elements, expected 6"):
            xt.kl_loss(x, y, labels[:5])
        with self.assertRaisesRegex(ValueError, r"teacher is \[5, 33\], but student \[6, 33\]: their leading dimensions differ"):
            xt.kl_loss(x, y[:5], labels)
        with self.assertRaisesRegex(xdistill.Error, "ERROR_DATA"):
            xt.cross_entropy(x, labels + 33)
        with self.assertRaisesRegex(xdistill.Error, "ERROR_DATA"):
            xt.kl_loss(x + float("nan"), y, labels)
        with self.assertRaisesRegex(ValueError, r"teacher is \[2, 3, 33\], but student \[3, 2, 33\]"):
            xt.kl_loss(x.view(3, 2, 33), y.view(2, 3, 33))
        with self.assertRaisesRegex(ValueError, "temperature is 0, expected more than 0"):
            xt.topk_kl_loss(x, y, k=3, temperature=0)
        freed = torch.randn(6, 33)
        freed.untyped_storage().resize_(0)
        with self.assertRaisesRegex(ValueError, "teacher has no memory: its storage was freed"):
            xt.kl_loss(x, freed)
        with self.assertRaisesRegex(ValueError, "is on the device meta"):
            xdistill.array(torch.empty(3, device="meta"), "student")

    def test_what_is_no_tensor_is_named(self):
        class Output:
            logits = torch.zeros(6, 33)

        x, y, labels = made(6, 33)
        for text, arguments in (("teacher is a ndarray, not a tensor$", (x, y.numpy())),
                                ("student is a Output, not a tensor: pass its .logits$", (Output(), y)),
                                ("student is a NoneType, not a tensor$", (None, y)),
                                ("labels is a float, not a tensor$", (x, y, 2.0))):
            with self.assertRaisesRegex(TypeError, text):
                xt.kl_loss(*arguments)

    def test_tensors_of_two_devices_are_refused_also_without_their_numbers(self):
        x, y, labels = made(6, 33)
        for call in (lambda x, y: xt.kl_loss(x, y.to("meta"), labels), lambda x, y: xt.kl_loss(x * 1, y.to("meta"), labels, inplace=True),
                     lambda x, y: torch.ops.xdistill.vsd_loss(x.detach(), y.to("meta"), y, "mean", False, None, None, 1.0, 0.0, False)):
            with self.assertRaisesRegex(ValueError, "^teacher is on meta, but (student|generated) on cpu$"):
                call(x, y)
        with self.assertRaisesRegex(ValueError, "^labels is on meta, but student on cpu$"):
            xt.kl_loss(x, y, labels.to("meta"))
        value = xt.kl_loss(x.to("meta"), y.to("meta"), labels.to("meta"))
        self.assertEqual((value.device.type, value.shape), ("meta", ()))
        with self.assertRaisesRegex(Exception, "teacher is on meta, but student on cpu"):
            torch.compile(lambda x, y: xt.kl_loss(x, y), backend="aot_eager")(x, y.to("meta"))

    def test_no_rows_are_a_loss_of_zero(self):
        x, y, labels = made(6, 33)
        for loss in (xt.kl_loss(x[:0], y[:0], labels[:0], hard_weight=1.0), xt.kl_loss((x * 1)[:0], y[:0], inplace=True),
                     xt.topk_kl_loss(x[:0], y[:0], k=3),
                     xt.head_loss(x[:0], torch.randn(9, 33), labels=labels[:0], hard_weight=1.0)):
            loss.backward()
            self.assertEqual(loss.item(), 0.0)
        self.assertEqual(float(x.grad.abs().max()), 0.0)

    def test_weights_of_terms_are_told(self):
        x, y, labels = made(6, 33)
        with self.assertRaisesRegex(xdistill.Error, "no term of the loss has a weight"):
            xt.head_loss(x, torch.randn(33, 33), teacher=y)
        self.assertEqual(inspect.signature(xt.kl_loss).parameters["soft_weight"].default, 1.0)

    def test_a_tensor_of_a_gpu_is_refused_in_one_sentence(self):
        class OnGpu:
            def __dlpack_device__(self):
                return 2, 0

            def __dlpack__(self):
                raise AssertionError("not read")

        with self.assertRaisesRegex(ValueError, r"^student is on a GPU, and this build of xdistill computes on CPUs: XDISTILL_CUDA=1 "
                                                r"pip install \./python makes one for both$"):
            xdistill.losses.loss(OnGpu(), soft_weight=1.0)

    def test_dlpack_and_numpy(self):
        class Capsule:
            def __init__(self, x):
                self.x = x

            def __dlpack__(self):
                return self.x.__dlpack__()

            def __dlpack_device__(self):
                return self.x.__dlpack_device__()

        class Copy(Capsule):
            """Its capsule alone holds the memory."""

            def __dlpack__(self):
                return self.x.clone().__dlpack__()

        for dtype in (torch.float32, torch.bfloat16):
            x, y, labels = made(6, 33, dtype=dtype)
            x, gradient = x.detach(), torch.zeros(6, 33, dtype=dtype)
            expected = xdistill.losses.loss(x, y, labels, soft_weight=1.0, gradient=gradient).loss
            out = torch.zeros(6, 33, dtype=dtype)
            got = xdistill.losses.loss(Capsule(x), Capsule(y), Capsule(labels), soft_weight=1.0, gradient=Capsule(out)).loss
            self.assertEqual(got, expected)
            self.assertTrue(torch.equal(out, gradient))
            got = xdistill.losses.loss(Copy(x), Copy(y), labels=Copy(labels), mask=Copy(torch.ones(6, dtype=torch.uint8)), soft_weight=1.0)
            self.assertEqual(got.loss, expected)
        self.assertAlmostEqual(xdistill.losses.loss(x.float().numpy(), y.float().numpy(), labels.numpy(), soft_weight=1.0).loss,
                               expected, places=6)
        with self.assertRaisesRegex(TypeError, "DLPack"):
            xdistill.array(Capsule(torch.zeros(3, dtype=torch.complex64)))


class Compiled(unittest.TestCase):
    def same(self, function, *inputs):
        """fullgraph: an operation that breaks the graph is an error."""
        torch._dynamo.reset()
        wanted = [x for x in inputs if x.requires_grad]
        expected = function(*inputs)
        right = torch.autograd.grad(expected, wanted)
        got = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
        torch.testing.assert_close(got, expected)
        for mine, good in zip(torch.autograd.grad(got, wanted), right):
            torch.testing.assert_close(mine, good)

    def test_a_loss_keeps_the_graph(self):
        x, y, labels = made(6, 33)
        self.same(lambda x: xt.kl_loss(x * 2, y, labels, temperature=2.0, hard_weight=0.5) * 3, x)
        self.same(lambda x: xt.kl_loss(x * 2, y, labels, reduction="none").square().sum(), x)
        self.same(lambda x: xt.kl_loss(x * 2, y, labels, inplace=True) / 4, x)
        self.same(lambda x: xt.topk_kl_loss(x * 2, y, labels, k=3), x)

    def test_sizes_may_change(self):
        function = torch.compile(lambda x, y, labels: xt.kl_loss(x * 2, y, labels, denominator=float(3)), fullgraph=True,
                                 backend="aot_eager", dynamic=True)
        for rows in (6, 9, 13):
            x, y, labels = made(rows, 33)
            got, = torch.autograd.grad(function(x, y, labels), x)
            expected, = torch.autograd.grad(xt.kl_loss(x * 2, y, labels, denominator=3), x)
            torch.testing.assert_close(got, expected)

    def test_a_head_and_terms_of_diffusion_keep_the_graph(self):
        hidden, weight, _ = made(6, 9)
        labels = torch.arange(6)
        self.same(lambda h, w: xt.head_loss(h * 2, w, None, labels, hard_weight=1.0), hidden, weight.requires_grad_())
        self.same(lambda x: xt.vsd_loss(x * 2, weight.detach(), weight.detach() * 2) + xt.gan_loss(x), hidden)

    def test_the_ops_pass_pytorch_s_own_checks(self):
        x, y, labels = made(6, 33)
        settings = (0.5, 1.0, 1.0, "kl", 0.0, None, 0.0, -100, 0.0, None, None, "mean", None)
        torch.library.opcheck(torch.ops.xdistill.loss.default, (x, y, labels, *settings, True))


if __name__ == "__main__":
    torch.set_num_threads(2)
    unittest.main(argv=sys.argv)
