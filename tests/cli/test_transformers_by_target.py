"""A user's Llama: a spec, a file with data and a task, and one word of the command changed."""

import pytest
from conftest import metrics_of

SPEC = """\
model:
  target: transformers:LlamaForCausalLM
  args:
    config:
      target: transformers:LlamaConfig
      args: {vocab_size: 32, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
             num_key_value_heads: 2, tie_word_embeddings: true, attn_implementation: eager}
data:
  train: sentences.py:Sentences
  eval: {target: sentences.py:Sentences, args: {count: 5}}
task: sentences.py:NextWord
metrics: {right: sentences.py:Right}
optimizer: {target: torch.optim:AdamW, args: {lr: 1e-3}}
batch: {size: 8, micro: 2}
duration: 3 steps
clip_norm: 1.0
devices: cpu:2
parallel: {strategy: ddp}
"""

SENTENCES = """\
import torch
from torch.nn import functional


class Sentences:
    def __init__(self, count=21):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        tokens = torch.randint(0, 32, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens[:-1], "attention_mask": (torch.arange(8) < 8 - index % 3).long(), "labels": tokens[1:]}


class NextWord:
    def loss(self, model, batch):
        return self.evaluate(model, batch)[:2]

    def evaluate(self, model, batch):
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        kept = batch["attention_mask"].bool()
        logits, labels = output.logits[kept], batch["labels"][kept]
        return functional.cross_entropy(logits, labels, reduction="sum"), kept.sum(), logits, labels


class Right:
    def __init__(self):
        self.reset()

    def reset(self):
        self.right, self.seen = 0, 0

    def update(self, predictions, targets):
        self.right += int((predictions.argmax(1) == targets).sum())
        self.seen += len(targets)

    def compute(self):
        return self.right / self.seen
"""


@pytest.mark.slow
def test_a_llama_trains_alike_by_every_strategy(bench):
    """Three steps with padded sentences and a tied embedding, an evaluation with a metric, as one process does them."""
    (bench.folder / "llama.yaml").write_text(SPEC)
    (bench.folder / "sentences.py").write_text(SENTENCES)
    expected = None
    for strategy, devices in (("single", 1), ("ddp", 2), ("fsdp", 2), ("pipeline", 2), ("tensor", 2)):
        done = bench.mgpu("train", "llama.yaml", f"--set=parallel.strategy={strategy}", f"--devices=cpu:{devices}")
        assert done.returncode == 0, f"{strategy}: {done.stderr}"
        losses = [row["loss"] for row in metrics_of(bench.latest)]
        evaluated = [event for event in bench.latest.events() if event["event"] == "evaluated"][-1]
        seen = [*losses, evaluated["loss"], evaluated["right"]]
        expected = expected or seen
        assert seen == pytest.approx(expected, rel=1e-5), strategy
