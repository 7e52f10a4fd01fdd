"""Distils a teacher into a student whose tokenizer differs: both are models of transformers.

    python3 examples/python/two_tokenizers.py [STEPS]      from the root; needs torch and transformers
"""

import sys

import torch
import transformers

import xdistill
import xdistill.torch as xt

TOKENIZERS = xdistill.Tokenizer("data/student"), xdistill.Tokenizer("data/teacher")


def batch_of(texts):
    """Ids of both sides [texts, tokens], the student's labels, and the chunks of both."""
    pairs = [tuple(tokenizer.encode(text) for tokenizer in TOKENIZERS) for text in texts]
    lengths = [max(len(pair[side]) for pair in pairs) for side in (0, 1)]
    ids = [torch.full((len(texts), length), -100) for length in lengths]
    for row, pair in enumerate(pairs):
        for side in (0, 1):
            ids[side][row, :len(pair[side])] = torch.tensor(pair[side].ids)
    chunks = xdistill.chunks([xdistill.align(*pair) for pair in pairs], *lengths)
    return ids[0].clamp(min=0), ids[1].clamp(min=0), xt.next_labels(ids[0]), chunks


def main(steps):
    torch.manual_seed(1)
    teacher = transformers.AutoModelForCausalLM.from_pretrained("data/teacher", dtype=torch.float32).eval()
    student = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(TOKENIZERS[0]), hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=True))
    projection = xdistill.Projection(*TOKENIZERS)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    verses = [line for line in open("data/kjv_student.txt").read().split("\n") if len(line) > 20]
    for step in range(steps):
        student_ids, teacher_ids, labels, chunks = batch_of(verses[8 * step:8 * step + 8])
        with torch.no_grad():
            teacher_logits = teacher(input_ids=teacher_ids).logits
        logits = student(input_ids=student_ids).logits
        loss = xt.xtoken_loss(logits, teacher_logits, chunks, projection, labels, ce_weight=0.5, inplace=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            print("step %3d  loss %.3f" % (step, loss.item()))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
