"""Values and gradients of xdistill.torch against PyTorch's autograd in float64."""

import os
import pathlib
import tempfile
import unittest

import torch
import torch.nn.functional as F

import xdistill
import xdistill.torch as xt

DATA = pathlib.Path(os.environ.get("XD_DATA", pathlib.Path(__file__).resolve().parents[2] / "data"))
SHAPES = [((1, 2), 1), ((3, 5), 2), ((7, 130), 3), ((2, 9, 67), 4), ((4, 3, 1031), 5)]


def counted_mean(rows, labels, ignore_index=-100, denominator=None):
    """The mean over rows whose label is not ignore_index."""
    if labels is None:
        return rows.mean() if denominator is None else rows.sum() / denominator
    counts = labels != ignore_index
    return torch.where(counts, rows, rows * 0).sum() / (denominator or max(int(counts.sum()), 1))


def divergence(student, teacher, kind, tau=1.0, beta=0.0):
    s, t = F.log_softmax(student / tau, -1), F.log_softmax(teacher / tau, -1)
    if kind == "kl":
        return (t.exp() * (t - s)).sum(-1) * tau * tau
    if kind == "reverse_kl":
        return (s.exp() * (s - t)).sum(-1) * tau * tau
    if kind == "soft_ce":
        return -(t.exp() * s).sum(-1)
    if kind == "cosine":
        return 1 - F.cosine_similarity(student, teacher, -1)
    m = (beta * t.exp() + (1 - beta) * s.exp()).log()
    return beta * (t.exp() * (t - m)).sum(-1) + (1 - beta) * (s.exp() * (s - m)).sum(-1)


class Case(unittest.TestCase):
    def tensors(self, shape, seed, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        student, teacher = [(torch.randn(shape, generator=generator) * 2).to(dtype) for _ in range(2)]
        labels = torch.randint(0, shape[-1], shape[:-1], generator=generator)
        labels.view(-1)[::3] = -100
        if labels.numel() == 1:
            labels.fill_(1)
        return student.requires_grad_(), teacher, labels

    def same(self, ours, theirs, *inputs, tolerance=2e-5):
        """Both functions of the inputs: values and gradients; theirs gets them in float64."""
        doubles = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
        value, expected = ours(*inputs), theirs(*doubles)
        self.assertEqual((value.dtype, value.shape), (torch.float32, expected.shape))
        torch.testing.assert_close(value.double(), expected.detach(), rtol=tolerance, atol=tolerance)
        upward = torch.linspace(0.5, 1.5, value.numel()).view(value.shape)
        wanted = [x for x in inputs if x.requires_grad]
        got = torch.autograd.grad(value, wanted, upward)
        right = torch.autograd.grad(expected, [x for x in doubles if x.requires_grad], upward.double())
        for x, mine, good in zip(wanted, got, right):
            self.assertEqual((mine.dtype, mine.shape), (x.dtype, x.shape))
            torch.testing.assert_close(mine.double(), good, rtol=tolerance, atol=tolerance * float(good.abs().max().clamp(min=1e-3)))


class OneVocabulary(Case):
    def test_cross_entropy(self):
        for shape, seed in SHAPES:
            student, _, labels = self.tensors(shape, seed)
            for options in ({}, {"label_smoothing": 0.25}, {"reduction": "sum"}):
                self.same(lambda x: xt.cross_entropy(x, labels, **options),
                          lambda x: F.cross_entropy(x.flatten(0, -2), labels.flatten(), **options), student)

    def test_divergences_with_temperature_and_labels(self):
        for shape, seed in SHAPES:
            student, teacher, labels = self.tensors(shape, seed)
            for tau in (1.0, 2.5):
                for function, kind in ((xt.kl_loss, "kl"), (xt.reverse_kl_loss, "reverse_kl")):
                    self.same(lambda x: function(x, teacher, labels, temperature=tau),
                              lambda x: counted_mean(divergence(x, teacher.double(), kind, tau), labels), student)
                for beta in (0.1, 0.5):
                    self.same(lambda x: xt.jsd_loss(x, teacher, labels, tau, beta=beta),
                              lambda x: counted_mean(divergence(x, teacher.double(), "jsd", tau, beta), labels), student)
            self.same(lambda x: xt.kl_loss(x, teacher), lambda x: divergence(x, teacher.double(), "kl").mean(), student)

    def test_other_divergences(self):
        student, teacher, labels = self.tensors((7, 130), 3)
        for kind in ("soft_ce", "cosine"):
            self.same(lambda x: xt.loss(x, teacher, labels, soft_weight=1.0, divergence=kind),
                      lambda x: counted_mean(divergence(x, teacher.double(), kind), labels), student)

    def test_hard_and_soft_together(self):
        student, teacher, labels = self.tensors((2, 9, 67), 6)

        def theirs(x):
            hard = F.cross_entropy(x.flatten(0, 1), labels.flatten())
            return 0.3 * hard + 0.7 * counted_mean(divergence(x, teacher.double(), "kl", 2.0), labels)

        self.same(lambda x: xt.kl_loss(x, teacher, labels, 2.0, hard_weight=0.3, soft_weight=0.7), theirs, student)

    def test_reductions_masks_and_another_ignore_index(self):
        student, teacher, labels = self.tensors((2, 9, 67), 7)
        other = torch.where(labels == -100, 5, labels)
        rows = lambda x: divergence(x, teacher.double(), "kl")  # noqa: E731
        self.same(lambda x: xt.kl_loss(x, teacher, labels, reduction="none"), lambda x: rows(x) * (labels != -100), student)
        self.same(lambda x: xt.kl_loss(x, teacher, labels, reduction="sum"), lambda x: counted_mean(rows(x), labels, denominator=1),
                  student)
        self.same(lambda x: xt.kl_loss(x, teacher, labels, denominator=37), lambda x: counted_mean(rows(x), labels, denominator=37),
                  student)
        self.same(lambda x: xt.kl_loss(x, teacher, other, ignore_index=5), lambda x: counted_mean(rows(x), other, 5), student)
        self.same(lambda x: xt.kl_loss(x, teacher, mask=labels != -100), lambda x: counted_mean(rows(x), labels), student)
        self.same(lambda x: xt.kl_loss(x, teacher, labels.int()), lambda x: counted_mean(rows(x), labels), student)
        with self.assertRaisesRegex(ValueError, "reduction is 'batchmean'"):
            xt.kl_loss(student, teacher, reduction="batchmean")

    def test_nothing_counted_is_zero(self):
        student, teacher, labels = self.tensors((3, 5), 8)
        value = xt.kl_loss(student, teacher, torch.full_like(labels, -100))
        value.backward()
        self.assertEqual((value.item(), float(student.grad.abs().max())), (0.0, 0.0))

    def test_padding_columns_take_no_part(self):
        student, teacher, labels = self.tensors((7, 130), 9)
        self.same(lambda x: xt.kl_loss(x, teacher, labels.clamp(max=99), vocabulary=100),
                  lambda x: counted_mean(divergence(x[:, :100], teacher[:, :100].double(), "kl"), labels), student)

    def test_bf16(self):
        student, teacher, labels = self.tensors((4, 3, 1031), 10, torch.bfloat16)
        self.same(lambda x: xt.kl_loss(x, teacher, labels), lambda x: counted_mean(divergence(x, teacher.double(), "kl"), labels),
                  student, tolerance=5e-3)

    def test_top_k(self):
        student, teacher, labels = self.tensors((7, 130), 11)
        full = F.log_softmax(teacher, -1)
        values, ids = full.topk(8)

        def tails(x, mode):
            s, t = F.log_softmax(x, -1).gather(-1, ids), values.double()
            if mode == "renormalise":
                s, t = s - s.logsumexp(-1, True), t - t.logsumexp(-1, True)
            elif mode == "tail":
                s, t = [torch.cat([y, (1 - y.exp().sum(-1, True)).log()], -1) for y in (s, t)]
            return counted_mean((t.exp() * (t - s)).sum(-1), labels)

        for mode in ("tail", "renormalise", "truncate"):
            self.same(lambda x: xt.topk_kl_loss(x, labels=labels, ids=ids, log_probs=values, mode=mode), lambda x: tails(x, mode),
                      student, tolerance=1e-4)
            self.same(lambda x: xt.topk_kl_loss(x, teacher, labels, ids=ids.int(), k=8, mode=mode), lambda x: tails(x, mode),
                      student, tolerance=1e-4)
        own = student.topk(8)[1]
        self.assertAlmostEqual(xt.topk_kl_loss(student, teacher, labels, k=8).item(),
                               xt.topk_kl_loss(student, teacher, labels, ids=own).item(), places=6)


class Heads(Case):
    def test_a_head_is_a_linear_layer_and_the_loss(self):
        for rows, wide, size, seed in ((1, 3, 2, 1), (9, 17, 65, 2), (5, 8, 130, 3)):
            generator = torch.Generator().manual_seed(seed)
            hidden, weight, bias, teacher = [torch.randn(shape, generator=generator) for shape in
                                             ((rows, wide), (size, wide), (size,), (rows, size))]
            labels = torch.randint(0, size, (rows,), generator=generator)
            inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
            self.same(lambda h, w, b: xt.head_loss(h, w, b, labels, hard_weight=1.0),
                      lambda h, w, b: F.cross_entropy(F.linear(h, w, b), labels), *inputs)
            self.same(lambda h, w: xt.head_loss(h, w, None, labels, teacher=teacher, hard_weight=0.5, soft_weight=2.0,
                                                temperature=2.0, reduction="sum"),
                      lambda h, w: 0.5 * F.cross_entropy(F.linear(h, w), labels, reduction="sum") + 2.0 * counted_mean(
                          divergence(F.linear(h, w), teacher.double(), "kl", 2.0), labels, denominator=1), *inputs[:2])

    def test_a_teacher_s_head_of_another_width(self):
        generator = torch.Generator().manual_seed(4)
        hidden, weight, high, wide = [torch.randn(shape, generator=generator) for shape in ((6, 5), (33, 5), (6, 11), (33, 11))]
        self.same(lambda h: xt.head_loss(h, weight, teacher_hidden=high, teacher_weight=wide, soft_weight=1.0),
                  lambda h: divergence(h @ weight.double().T, (high @ wide.T).double(), "kl").mean(), hidden.requires_grad_(),
                  tolerance=1e-4)
        with self.assertRaisesRegex(ValueError, "expected 'mean' or 'sum'"):
            xt.head_loss(hidden, weight, reduction="none")


class TwoTokenizers(Case):
    TEXTS = ["In the beginning God created the heaven and the earth.", "And God said, Let there be light: and there was light."]

    @classmethod
    def setUpClass(cls):
        cls.student, cls.teacher = xdistill.Tokenizer(DATA / "student"), xdistill.Tokenizer(DATA / "teacher")
        cls.projection = xdistill.Projection(cls.student, cls.teacher)

    def batch(self, first):
        pairs = [(self.student.encode(text), self.teacher.encode(text)) for text in self.TEXTS]
        lengths = [max(len(pair[side]) for pair in pairs) + side for side in (0, 1)]
        chunks = xdistill.chunks([xdistill.align(*pair) for pair in pairs], *lengths, first=first)
        ids = [torch.tensor([list(pair[side].ids) + [-100] * (lengths[side] - len(pair[side])) for pair in pairs]) for side in (0, 1)]
        generator = torch.Generator().manual_seed(12)
        logits = [torch.randn(2, length, size, generator=generator) for length, size in zip(lengths, (1024, 2048))]
        return chunks.tensors(), [xt.next_labels(one) for one in ids], logits

    def matrix(self):
        """The projection as a dense matrix."""
        from_, dense = self.projection.matrix, torch.zeros(1024, 2048, dtype=torch.float64)
        for row in range(1024):
            for entry in range(from_.row_begin[row], from_.row_begin[row + 1]):
                dense[row, from_.teacher_id[entry]] = from_.weight[entry]
        return dense

    def test_projected(self):
        for first in (True, False):
            chunks, labels, (student, teacher) = self.batch(first)
            matrix, tau = self.matrix(), 2.0

            def theirs(x):
                distances = []
                for b in range(2):
                    for c in range(chunks.count):
                        mine, other = [side.view(2, -1)[b] == c for side in (chunks.student, chunks.teacher)]
                        if not mine.any() or not other.any():
                            continue
                        q = F.softmax(x[b][mine] / tau, -1).mean(0) @ matrix
                        a = F.log_softmax(teacher[b][other].double() / tau, -1).mean(0)
                        a, q = a - a.logsumexp(0), q / q.sum()
                        distances.append(torch.where(q > 0, a.exp() * (a - q.clamp(min=1e-300).log()), 0).sum())
                ce = F.cross_entropy(x.flatten(0, 1), labels[0].flatten())
                return tau * tau * torch.stack(distances).mean() + 0.1 * ce

            columns = int((matrix.sum(0) > 0).sum())
            if columns < 2048:
                teacher[..., matrix.sum(0) == 0] = -1e4  # a teacher's token that no student token means has no probability
            self.same(lambda x: xt.xtoken_loss(x, teacher, chunks, self.projection, labels[0], temperature=tau), theirs,
                      student.requires_grad_(), tolerance=1e-4)

    def test_likelihood(self):
        chunks, labels, (student, teacher) = self.batch(False)

        def theirs(x):
            sums = []
            for logits, which, side in ((x, labels[0], chunks.student), (teacher.double(), labels[1], chunks.teacher)):
                own = F.log_softmax(logits, -1).gather(-1, which.clamp(min=0)[..., None])[..., 0].flatten()
                number = side.view(2, -1) + torch.tensor([[0], [chunks.count]])
                number = torch.where(side.view(2, -1) >= 0, number, 2 * chunks.count).flatten()
                sums.append((torch.zeros(2 * chunks.count + 1, dtype=torch.float64).index_add(0, number, own),
                             torch.zeros(2 * chunks.count + 1).index_add(0, number, torch.ones(len(number)))))
            both = (sums[0][1] > 0) & (sums[1][1] > 0)
            both[-1] = False
            return ((sums[0][0] - sums[1][0]) ** 2)[both].mean()

        self.same(lambda x: xt.xtoken_loss(x, teacher, chunks, None, labels[0], kind="likelihood", teacher_labels=labels[1],
                                           ce_weight=0.0), theirs, student.requires_grad_(), tolerance=1e-4)

    def test_gold(self):
        projection = xdistill.Projection(self.student, self.teacher, max_pieces=4)
        chunks, labels, (student, teacher) = self.batch(True)
        pairs = projection.exact_map()
        mine, other = [torch.tensor(side[:pairs.pairs]) for side in (pairs.student, pairs.teacher)]
        rest = [torch.tensor(pairs.student_rest[:pairs.student_rest_count]), torch.tensor(pairs.teacher_rest[:pairs.teacher_rest_count])]
        self.assertGreater(len(mine), 900)
        self.assertEqual([self.student.token(i) for i in mine], [self.teacher.token(i) for i in other])

        def theirs(x):
            distances = []
            for b in range(2):
                for c in range(chunks.count):
                    a, u = [side.view(2, -1)[b] == c for side in (chunks.student, chunks.teacher)]
                    if a.any() and u.any():
                        alpha, beta = F.log_softmax(x[b][a], -1).mean(0), F.log_softmax(teacher[b][u].double(), -1).mean(0)
                        tails = [y[ids].exp().sort(descending=True)[0][:20] for y, ids in zip((alpha, beta), rest)]
                        distances.append((beta[other].exp() * (beta[other] - alpha[mine])).sum() + (tails[0] - tails[1]).abs().sum())
            return torch.stack(distances).mean()

        self.same(lambda x: xt.xtoken_loss(x, teacher, chunks, projection, kind="gold", tail=20), theirs, student.requires_grad_(),
                  tolerance=1e-4)

    def test_universal_logit_distillation(self):
        chunks, labels, (student, teacher) = self.batch(True)
        ids = [torch.cat([torch.zeros(2, 1, dtype=torch.int64), one[:, :-1]], 1).clamp(min=0) for one in labels]
        for b, text in enumerate(self.TEXTS):  # next_labels moved them: back, with the first
            ids[0][b, 0], ids[1][b, 0] = self.student.encode(text).ids[0], self.teacher.encode(text).ids[0]
        tau = 1.5

        def side(logits, ids, begin, end):
            made = F.softmax(logits[end - 2] / tau, -1)
            for token in range(begin, end - 1):
                made = made * F.softmax(logits[token - 1] / tau, -1)[ids[token]].clamp(min=1e-8)
            return made.sort(descending=True)[0]

        def theirs(x):
            total = 0
            for b in range(2):
                pieces = [piece for piece in chunks.pieces.view(2, -1, 5)[b].tolist() if piece[1]]
                self.assertTrue(any(end - begin > 1 for begin, end, *_ in pieces))
                for begin, end, other_begin, other_end, _ in pieces:
                    p = F.pad(side(x[b], ids[0][b], begin, end), (0, 1024))
                    total = total + (p - side(teacher[b].double(), ids[1][b], other_begin, other_end)).abs().sum() / len(pieces) / 2
            return total

        self.same(lambda x: xt.uld_loss(x, teacher, chunks, *ids, temperature=tau), theirs, student.requires_grad_(), tolerance=1e-4)

    def test_both_keep_the_graph_of_torch_compile(self):
        chunks, labels, (student, teacher) = self.batch(True)
        ids, x = [one.clamp(min=0) for one in labels], student.requires_grad_()

        def loss(x):
            return xt.xtoken_loss(x * 2, teacher, chunks, self.projection, labels[0]) + xt.uld_loss(x, teacher, chunks, *ids)

        expected = torch.autograd.grad(loss(x), x)[0]
        torch._dynamo.reset()
        got, = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
        torch.testing.assert_close(got, expected)

    def test_cached(self):
        text = self.TEXTS[0]
        tokens = self.teacher.encode(text)
        logits = torch.randn(len(tokens), 2048, generator=torch.Generator().manual_seed(16)) * 2
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = os.path.join(folder.name, "cache")
        with xdistill.TeacherCacheWriter(path, 2048, 12, self.teacher, coding="f32") as writer:
            writer.add(text, tokens, logits)
        cache = xdistill.TeacherCache(path)
        chunks = xdistill.chunks(xdistill.align(tokens, tokens), len(tokens), len(tokens)).tensors()
        values, ids = F.log_softmax(logits.double(), -1).topk(12)
        student = torch.randn(len(tokens), 2048, generator=torch.Generator().manual_seed(17)).requires_grad_()

        def theirs(x):
            s, t = F.log_softmax(x, -1).gather(-1, ids), values
            s, t = [torch.cat([y, (1 - y.exp().sum(-1, True)).log()], -1) for y in (s, t)]
            return (t.exp() * (t - s)).sum(-1)[:-1].mean()

        self.same(lambda x: xt.xtoken_loss(x, None, chunks, kind="cached", cache=cache, cache_positions=torch.arange(len(tokens))),
                  theirs, student, tolerance=1e-4)

    def test_objects_of_another_kind_are_refused(self):
        chunks, labels, (student, teacher) = self.batch(True)
        for kind, text, objects, options in (
                (ValueError, "kind 'likelihood' needs all positions: make the chunks with first=False", (chunks, None, labels[0]),
                 {"kind": "likelihood", "teacher_labels": labels[1]}),
                (TypeError, "kind 'cached' needs cache and cache_positions", (chunks, self.projection), {"kind": "cached"}),
                (TypeError, "chunks is a Tensor, not xdistill's Chunks", (chunks.student, self.projection), {}),
                (TypeError, "projection is a Tokenizer, not xdistill's Projection", (chunks, self.student), {}),
                (TypeError, "cache is a str, not xdistill's TeacherCache", (chunks, self.projection), {"cache": "cache"})):
            with self.assertRaisesRegex(kind, text):
                xt.xtoken_loss(student, teacher, *objects, **options)
        with self.assertRaisesRegex(TypeError, "chunks is a list, not a tensor"):
            xt.uld_loss(student, teacher, [1], *labels)

    def test_chunks_of_other_lengths_are_refused(self):
        chunks, labels, (student, teacher) = self.batch(True)
        with self.assertRaisesRegex(ValueError, "student chunks has %d elements, expected %d" % (
                chunks.student.numel(), chunks.student.numel() - 2)):
            xt.xtoken_loss(student[:, :-1], teacher, chunks, self.projection)


class Diffusion(Case):
    def test_matching_term(self):
        generator = torch.Generator().manual_seed(13)
        x, teacher, fake = [torch.randn(3, 2, 5, generator=generator) for _ in range(3)]
        for normaliser, extra in (("mean", 1e-6), ("original", 0.0), ("none", None)):
            d = (x - teacher).double().abs().mean((1, 2), keepdim=True)
            g = (fake - teacher).double() / (1.0 if extra is None else d + extra)
            self.same(lambda x: xt.vsd_loss(x, teacher, fake, normaliser=normaliser, weight=0.5),
                      lambda x: 0.5 * 0.5 * ((x - (x.detach() - g)) ** 2).mean(), x.requires_grad_())

    def test_denoising_term(self):
        generator = torch.Generator().manual_seed(14)
        p, clean, noise = [torch.randn(3, 7, generator=generator) for _ in range(3)]
        terms = torch.rand(3, 4, generator=generator, dtype=torch.float64) + 0.5
        a, b, c, w = [terms[:, i:i + 1] for i in range(4)]
        self.same(lambda p: xt.denoise_loss(p, clean, noise, terms), lambda p: (w * (a * p + b * clean + c * noise) ** 2).mean(),
                  p.requires_grad_())

    def test_adversarial_terms(self):
        generator = torch.Generator().manual_seed(15)
        fake, real = [torch.randn(5, 3, generator=generator).requires_grad_() for _ in range(2)]
        self.same(lambda x: xt.gan_loss(x), lambda x: F.softplus(-x).mean(), fake)
        self.same(lambda x: xt.gan_loss(x, kind="hinge"), lambda x: -x.mean(), fake)
        self.same(lambda x, y: xt.gan_loss(x, y), lambda x, y: (F.softplus(x) + F.softplus(-y)).mean(), fake, real)
        self.same(lambda x, y: xt.gan_loss(x, y, kind="hinge"), lambda x, y: (F.relu(1 + x) + F.relu(1 - y)).mean(), fake, real)


if __name__ == "__main__":
    torch.set_num_threads(2)
    unittest.main()
