"""The task that is there already: what it calls the model with, and what it compares."""

import collections

import pytest
import torch
from torch import nn

from mgpu.train import Supervised

LOGITS = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
TARGETS = torch.tensor([0, 1])
LOSS = 0.6931471806 + 0.3132616875  # log 2, and log(1 + 1/e)
Output = collections.namedtuple("Output", "logits hidden")


@pytest.mark.parametrize(
    "output",
    [LOGITS, {"logits": LOGITS, "hidden": torch.ones(3)}, Output(LOGITS, torch.ones(3))],
    ids=["tensor", "mapping", "attribute"],
)
def test_the_logits_of_whatever_a_model_returns_are_compared(output):
    loss, units = Supervised(nn.CrossEntropyLoss()).loss(lambda inputs: output, (torch.zeros(2), TARGETS))
    assert float(loss) == pytest.approx(LOSS)
    assert units == 2


def test_a_mapping_of_inputs_is_given_by_name():
    def model(tokens, scale):
        return tokens * scale

    batch = {"tokens": LOGITS / 2, "scale": 2}, TARGETS
    assert float(Supervised(nn.CrossEntropyLoss()).loss(model, batch)[0]) == pytest.approx(LOSS)


def test_a_model_without_logits_is_told_with_what_it_returns():
    with pytest.raises(TypeError, match="returns out, aux and no logits: write a task of your own"):
        Supervised(nn.CrossEntropyLoss()).loss(lambda x: {"out": x, "aux": x}, (LOGITS, TARGETS))
