"""Tokenizers, alignment, projections, caches and weights, without PyTorch."""

import array
import os
import pathlib
import pickle
import tempfile
import unittest

import xdistill
from xdistill import api

DATA = pathlib.Path(os.environ.get("XD_DATA", pathlib.Path(__file__).resolve().parents[2] / "data"))
TEXT = "In the beginning God created the heaven and the earth.\n\nAnd the earth was without form, and void."


class Temporary(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    @classmethod
    def setUpClass(cls):
        cls.student, cls.teacher = xdistill.Tokenizer(DATA / "student"), xdistill.Tokenizer(DATA / "teacher" / "tokenizer.json")


class Tokenizers(Temporary):
    def test_a_text_survives_and_spans_cover_it(self):
        for tokenizer, size in ((self.student, 1024), (self.teacher, 2048)):
            made = tokenizer.encode(TEXT)
            self.assertEqual((len(tokenizer), tokenizer.decode(made.ids)), (size, TEXT))
            pieces = [TEXT.encode()[begin:end] for begin, end in zip(made.spans[::2], made.spans[1::2])]
            self.assertEqual(pieces, [tokenizer.token(id) for id in made.ids])
            self.assertEqual(b"".join(pieces), TEXT.encode())

    def test_a_batch_has_the_tokens_of_each_text(self):
        texts = [TEXT, "", "one", "two\0three", TEXT[:40]] * 3
        for threads in (1, 3):
            tokenizer = xdistill.Tokenizer(DATA / "teacher", threads=threads)
            for one, text in zip(tokenizer.encode_batch(texts), texts):
                alone = self.teacher.encode(text)
                self.assertEqual((one.ids, one.spans, one.roles), (alone.ids, alone.spans, None))
        self.assertEqual(self.teacher.encode_batch([]), [])

    def test_a_pickle_opens_the_file_again(self):
        again = pickle.loads(pickle.dumps(xdistill.Tokenizer(os.path.relpath(DATA / "student"), threads=1)))
        self.assertEqual((again.encode(TEXT).ids, again.hash, again.context.threads), (self.student.encode(TEXT).ids, self.student.hash, 1))
        self.assertTrue(os.path.isabs(again.opened[0]))

    def test_tokens_are_shown_and_know_their_text_s_size(self):
        made = self.student.encode("déjà")
        self.assertEqual((made.size, made[:1].size, [one.size for one in self.student.encode_batch(["a", "", "déjà"])]), (6, 6, [1, 0, 6]))
        self.assertEqual(repr(made[:1]), "Encoding(1 tokens of a text of 6 bytes)")
        self.assertRegex(repr(self.student.about), r"^xd_tokenizer_info\(size=1024, .*\)$")
        with self.assertRaisesRegex(TypeError, "slice of step 1, not 0"):
            made[0]

    def test_errors_name_what_is_wrong(self):
        with self.assertRaisesRegex(xdistill.Error, "ERROR_IO"):
            xdistill.Tokenizer(self.folder / "none.json")
        with self.assertRaisesRegex(ValueError, "preset is 'gpt9'"):
            xdistill.Tokenizer(DATA / "student", preset="gpt9")
        with self.assertRaisesRegex(xdistill.Error, "ERROR_DATA"):
            self.student.decode([5000])
        self.assertIsNone(self.student.token(5000))


class Alignments(Temporary):
    def test_chunks_cover_the_same_bytes_and_positions_precede_their_first_token(self):
        a, b = self.student.encode(TEXT), self.teacher.encode(TEXT)
        both = xdistill.align(a, b)
        self.assertGreater(max(chunk[1] - chunk[0] for chunk in both.chunks), 1)
        for begin, end, other_begin, other_end, flags in both.chunks:
            self.assertEqual((a.spans[2 * begin], a.spans[2 * end - 1]), (b.spans[2 * other_begin], b.spans[2 * other_end - 1]))
            self.assertTrue(flags & api.XD_CHUNK_EXACT)
        for first in (True, False):
            made = xdistill.chunks([both, both], len(a) + 3, len(b), first=first)
            one = [-1] * (len(a) + 3)
            for number, (begin, end, *_) in enumerate(both.chunks):
                for token in range(max(begin, 1), begin + 1 if first else end):
                    one[token - 1] = number
            self.assertEqual(list(made.student), one + one)
            self.assertEqual((made.count, sum(made.exact)), (len(both), 2 * len(both)))

    def test_pieces_have_a_position_before_them_and_are_not_cut(self):
        a, b = self.student.encode(TEXT), self.teacher.encode(TEXT)
        both = xdistill.align(a, b)
        made = xdistill.chunks([both, xdistill.align(a[:9], b[:9])], len(a) - 2, len(b))
        rows = [tuple(made.pieces[i:i + 5]) for i in range(0, len(made.pieces), 5)]
        self.assertEqual((len(rows), rows[0]), (2 * len(both), (0, 0, 0, 0, 0)))
        self.assertEqual(rows[1:len(both)], [chunk if chunk[1] <= len(a) - 2 else (0,) * 5 for chunk in both.chunks[1:]])
        self.assertEqual(rows[-1], (0, 0, 0, 0, 0))

    def test_a_masked_token_takes_its_chunk_out(self):
        a, b = self.student.encode(TEXT), self.teacher.encode(TEXT)
        made = xdistill.chunks(xdistill.align(a, b, student_mask=[0] * 2 + [1] * (len(a) - 2)), len(a), len(b))
        self.assertEqual((made.mask[0], made.mask[1], list(made.student)[:2]), (0, 1, [-1, 1]))
        with self.assertRaisesRegex(ValueError, "the mask has 1 elements"):
            xdistill.align(a, b, student_mask=[1])

    def test_what_belongs_to_no_common_text_is_refused(self):
        a, b, other = self.student.encode(TEXT), self.teacher.encode(TEXT), self.teacher.encode(TEXT[:-1])
        self.assertNotEqual(len(a), len(b))
        with self.assertRaisesRegex(ValueError, "^student and teacher are encodings of two texts, of %d and %d bytes$" % (
                len(TEXT), len(TEXT) - 1)):
            xdistill.align(a, other)
        unknown = xdistill.Encoding(other.ids, other.spans)
        self.assertGreater(len(xdistill.align(a, unknown)), 0)
        with self.assertRaisesRegex(TypeError, "teacher is a array, not xdistill's Encoding"):
            xdistill.align(a, b.ids)
        with self.assertRaisesRegex(ValueError, "the lengths are %d and %d, but align had up to %d and %d tokens: the student comes "
                                                "first in both" % (len(a), len(b), len(b), len(a))):
            xdistill.chunks([xdistill.align(b, a), xdistill.align(b[:9], a[:9])], len(a), len(b))
        with self.assertRaisesRegex(TypeError, "one of alignments is a Encoding, not xdistill's Alignment"):
            xdistill.chunks([a], 1, 1)

    def test_alignments_and_chunks_are_shown(self):
        a, b = self.student.encode(TEXT), self.teacher.encode(TEXT)
        both = xdistill.align(a, b)
        self.assertEqual(repr(both), "Alignment(%d chunks of %d and %d tokens)" % (len(both), len(a), len(b)))
        self.assertRegex(repr(both.report), r"^xd_align_report\(chunks=%d, .*\)$" % len(both))
        made = [xdistill.chunks([both, both], len(a), len(b), first=first) for first in (True, False)]
        self.assertEqual(repr(made[0]), "Chunks(up to %d a sequence, at %d student and %d teacher positions, first)" % (
            len(both), 2 * len(a), 2 * len(b)))
        self.assertEqual([one.first for one in made], [True, False])

    def test_a_projection_is_kept_in_a_directory(self):
        made = xdistill.Projection(self.student, self.teacher, directory=self.folder)
        again = xdistill.Projection(self.student, self.teacher, directory=self.folder)
        self.assertEqual((made.student_size, made.teacher_size), (1024, 2048))
        self.assertEqual((made.report.read, again.report.read, again.matrix.entries), (False, True, made.matrix.entries))
        other = xdistill.Projection(self.student, self.teacher, max_pieces=4, k=8)
        self.assertNotEqual(other.matrix.entries, made.matrix.entries)
        with self.assertRaisesRegex(TypeError, "no option kk"):
            xdistill.Projection(self.student, self.teacher, kk=1)


class Caches(Temporary):
    def logits(self, rows):
        class Rows:
            numbers = array.array("f", [((7 * i) % 23) / 4 for i in range(rows * len(self.teacher))])
            __array_interface__ = {"data": (numbers.buffer_info()[0], False), "typestr": "<f4",
                                   "shape": (rows, len(self.teacher)), "version": 3}
        return Rows()

    def test_what_was_written_is_read(self):
        made = self.teacher.encode(TEXT)
        path = self.folder / "teacher.xdcache"
        with xdistill.TeacherCacheWriter(path, len(self.teacher), 8, self.teacher, coding="f32") as writer:
            writer.add(TEXT, made, self.logits(len(made)))
            writer.add(TEXT, made[:5], self.logits(5))
        cache = xdistill.TeacherCache(path)
        self.assertEqual((len(cache), cache.about.documents, cache.about.desc.k), (len(made) + 5, 2, 8))
        self.assertRegex(repr(cache.about), r"^xd_teacher_cache_info\(desc=xd_teacher_cache_desc\(vocabulary=2048, .*, documents=2, .*\)$")
        self.assertEqual((cache.about.desc.teacher_hash, cache.document(1).first), (self.teacher.hash, len(made)))
        places, ids, likely = cache.read(0, len(made))
        self.assertEqual([place.id for place in places], list(made.ids))
        self.assertEqual([place.next for place in places], list(made.ids[1:]) + [-1])
        self.assertEqual((ids.shape, ids[1, 0]), ((len(made), 8), ids.tolist()[1][0]))
        for row, place in zip(likely.tolist(), places):
            self.assertAlmostEqual(sum(row) + place.tail, 1.0, places=12)
        self.assertEqual(len(cache.read(0, 0)[1]), 0)

    def test_drawn_ids_stand_behind_the_likeliest(self):
        made, path = self.teacher.encode(TEXT), self.folder / "teacher.xdcache"
        with xdistill.TeacherCacheWriter(path, len(self.teacher), 4, self.teacher, draws=5, seed=3, coding="f32") as writer:
            writer.add(TEXT, made, self.logits(len(made)))
        cache = xdistill.TeacherCache(path)
        places, ids, likely = cache.read(2, 6)
        self.assertEqual((cache.entries, len(places), ids.shape, likely.shape), (9, 6, (6, 9), (6, 9)))
        for its_ids, its_likely in zip(ids.tolist(), likely.tolist()):
            self.assertAlmostEqual(sum(its_likely), 1.0, places=5)
            self.assertFalse(set(its_ids[:4]) & set(its_ids[4:]))

    def test_an_exception_leaves_no_file(self):
        path = self.folder / "teacher.xdcache"
        with self.assertRaises(ZeroDivisionError):
            with xdistill.TeacherCacheWriter(path, len(self.teacher), 8):
                1 / 0
        with self.assertRaisesRegex(ValueError, "logits have 2 rows for 3 tokens"):
            with xdistill.TeacherCacheWriter(path, len(self.teacher), 8) as writer:
                writer.add(TEXT, self.teacher.encode(TEXT)[:3], self.logits(2))
        for kind, text, encoding in ((ValueError, "the text has 1 bytes, but the encoding is of a text of %d" % len(TEXT),
                                      self.teacher.encode(TEXT)), (TypeError, "encoding is a list", [1])):
            with self.assertRaisesRegex(kind, text), xdistill.TeacherCacheWriter(path, len(self.teacher), 8) as writer:
                writer.add("x", encoding, self.logits(len(encoding)))
        with self.assertRaisesRegex(ValueError, "temperature is 0, expected more than 0"):
            xdistill.TeacherCacheWriter(path, len(self.teacher), 8, temperature=0)
        self.assertEqual(os.listdir(self.folder), [])


class Weights(Temporary):
    def test_a_hugging_face_directory_is_a_mapping_of_names(self):
        weights = xdistill.Weights(DATA / "teacher")
        name = "model.embed_tokens.weight"
        self.assertIn(name, weights)
        self.assertEqual((weights.shape(name), weights.dtype(name), len(weights[name])), ((2048, 256), "BF16", 2048 * 256 * 2))
        with self.assertRaises(KeyError):
            weights["none"]

    def test_what_was_saved_is_read(self):
        numbers, one = array.array("f", [1.0, -2.0, 3.5]), array.array("q", [7])
        for path in (self.folder / "a.safetensors", self.folder):
            xdistill.save_weights(path, {"b": numbers, "a": one}, {"made": "here"})
            weights, out = xdistill.Weights(path), array.array("f", [0.0] * 3)
            self.assertEqual((sorted(weights), weights.metadata("made"), weights.metadata("none")), (["a", "b"], "here", None))
            weights.read_into("b", out)
            self.assertEqual((out, weights.dtype("a"), array.array("q", bytes(weights["a"]))), (numbers, "I64", one))
            with self.assertRaisesRegex(ValueError, r"a is I64 \(1,\); out is F32 \(3,\)"):
                weights.read_into("a", out)
            (self.folder / "a.safetensors").unlink(missing_ok=True)
        with self.assertRaisesRegex(TypeError, "metadata has 'step': 1, and both must be a str"):
            xdistill.save_weights(self.folder / "b.safetensors", {"b": numbers}, {"step": 1})
        with self.assertRaisesRegex(ValueError, "out is read-only, but would be written"):
            class ReadOnly:
                __array_interface__ = {"data": (numbers.buffer_info()[0], True), "typestr": "<f4", "shape": (3,), "version": 3}
            xdistill.Weights(self.folder).read_into("b", ReadOnly())
        with self.assertRaisesRegex(xdistill.Error, "ERROR_ARGUMENT"):
            xdistill.save_weights(self.folder / "b.safetensors", {"": numbers})
        self.assertFalse((self.folder / "b.safetensors").exists())


if __name__ == "__main__":
    unittest.main()
