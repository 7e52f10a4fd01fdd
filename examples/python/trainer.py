"""A Trainer of Hugging Face that distils a small model from a large one of the same vocabulary.

    python3 examples/python/trainer.py [STEPS]      from the root; needs torch, transformers, accelerate
"""

import sys
import tempfile

import torch
import transformers

import xdistill.torch as xt


class DistillTrainer(transformers.Trainer):
    def __init__(self, *arguments, teacher, temperature=2.0, alpha=0.5, **others):
        super().__init__(*arguments, **others)
        self.teacher, self.temperature, self.alpha = teacher.eval(), temperature, alpha

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = xt.next_labels(inputs["labels"])
        outputs = model(input_ids=inputs["input_ids"])
        with torch.no_grad():
            teacher = self.teacher(input_ids=inputs["input_ids"]).logits
        loss = xt.kl_loss(outputs.logits, teacher, labels, self.temperature, hard_weight=1 - self.alpha, soft_weight=self.alpha,
                          denominator=float(num_items_in_batch or 0), inplace=not return_outputs)
        return (loss, outputs) if return_outputs else loss


if __name__ == "__main__":
    teacher = transformers.AutoModelForCausalLM.from_pretrained("data/teacher", dtype=torch.float32)
    student = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=2048, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=True))
    tokenizer = transformers.AutoTokenizer.from_pretrained("data/teacher")
    ids = torch.tensor(tokenizer(open("data/kjv_student.txt").read()[:200000])["input_ids"])
    rows = [{"input_ids": row, "labels": row} for row in ids[:len(ids) // 64 * 64].view(-1, 64)]
    settings = transformers.TrainingArguments(
        tempfile.mkdtemp(), max_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 60, per_device_train_batch_size=8,
        learning_rate=3e-3, logging_steps=10, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True)
    DistillTrainer(student, settings, train_dataset=rows, teacher=teacher).train()
