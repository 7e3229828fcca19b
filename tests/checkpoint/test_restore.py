"""Back into a model and its optimizer: by name, exactly, or not at all."""

import pytest
import torch
from torch import nn

from mgpu.checkpoint.restore import read_extra, restore
from mgpu.checkpoint.state import TrainingState
from mgpu.errors import CheckpointError


def saved(trainer, steps=2, **settings):
    one = trainer(**settings)
    one.train(steps)
    assert one.save().error == ""
    return one


def test_model_and_optimizer_come_back_to_the_bit(trainer, tmp_path):
    one = saved(trainer)
    other = trainer(tmp_path / "other")
    with torch.no_grad():
        other.model[0].weight.fill_(7.0)
    assert restore(one.folder.find(), other.state) == []
    assert other.tensors().keys() == one.tensors().keys()
    for path, tensor in other.tensors().items():
        assert torch.equal(tensor, one.tensors()[path]), path
    torch.manual_seed(1)
    one.train(2)
    torch.manual_seed(1)
    other.train(2)
    for path, tensor in other.tensors().items():
        assert torch.equal(tensor, one.tensors()[path]), path


class Pair(nn.Module):
    """Two weights of one element, registered in the order given."""

    def __init__(self, order):
        super().__init__()
        for name in order:
            self.register_parameter(name, nn.Parameter(torch.zeros(1)))

    def forward(self, x):
        return self.a * x + self.b


def test_moments_follow_the_names_and_not_the_order(trainer, tmp_path):
    """Case F11: momentum 1 of a and 5 of b, into a model that has b before a."""
    first, second = Pair("ab"), Pair("ba")
    one = trainer(model=first, optimizer=torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9))
    one.optimizer.state[first.a]["momentum_buffer"] = torch.tensor([1.0])
    one.optimizer.state[first.b]["momentum_buffer"] = torch.tensor([5.0])
    one.save()
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
    restore(one.folder.find(), TrainingState(second, optimizer))
    assert optimizer.state[second.a]["momentum_buffer"].tolist() == [1.0]
    assert optimizer.state[second.b]["momentum_buffer"].tolist() == [5.0]


@pytest.mark.parametrize(
    "model, words",
    [
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), ["1.weight", "(3, 4)", "(2, 4)", "1.bias"]),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double(), ["0.weight", "float64", "float32"]),
        (lambda: nn.Sequential(nn.Linear(3, 4)), ["1.weight of the checkpoint is not in the model"]),
        (
            lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)),
            ["2.weight is not in the checkpoint"],
        ),
    ],
)
def test_another_model_is_refused_with_the_names_and_left_as_it_was(trainer, model, words):
    one, other = saved(trainer), model()
    before = [parameter.clone() for parameter in other.parameters()]
    with pytest.raises(CheckpointError) as caught:
        restore(one.folder.find(), TrainingState(other, torch.optim.AdamW(other.parameters())))
    for word in words:
        assert word in caught.value.message
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


def test_another_optimizer_is_refused(trainer):
    one = saved(trainer)
    with pytest.raises(CheckpointError, match=r"adamw\.AdamW.*sgd\.SGD"):
        restore(one.folder.find(), TrainingState(one.model, torch.optim.SGD(one.model.parameters(), lr=0.1)))


def test_tied_weights_stay_tied_and_other_ties_are_refused(trainer, tmp_path):
    def tied():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    one = saved(trainer, model=tied())
    other = trainer(tmp_path / "other", model=tied())
    restore(one.folder.find(), other.state)
    assert other.model[1].weight is other.model[0].weight
    assert torch.equal(other.model[1].weight, one.model[0].weight)
    loose = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match=r"tie different weights: 1\.weight = 0\.weight"):
        restore(one.folder.find(), TrainingState(loose, torch.optim.AdamW(loose.parameters())))


def test_moments_of_half_precision_weights_keep_their_precision(trainer, tmp_path):
    """torch's own load_state_dict would cast them to the parameter's dtype."""
    one = trainer(model=nn.Linear(3, 2).bfloat16())
    exact = torch.tensor([[1.0009765625, 2, 3], [4, 5, 6]])
    one.optimizer.state[one.model.weight] = {"step": torch.tensor(3.0), "exp_avg": exact, "exp_avg_sq": exact * 2}
    one.save()
    other = trainer(tmp_path / "other", model=nn.Linear(3, 2).bfloat16())
    restore(one.folder.find(), other.state)
    found = other.optimizer.state[other.model.weight]
    assert found["exp_avg"].dtype is torch.float32
    assert torch.equal(found["exp_avg"], exact)
    assert found["step"].item() == 3


def test_a_changed_rate_wins_and_is_told_and_what_steps_changed_comes_back(trainer, tmp_path):
    one = trainer()
    one.train()
    one.optimizer.param_groups[0]["rounds"] = 4
    one.save()
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    other = trainer(tmp_path / "other", model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.3))
    assert restore(one.folder.find(), other.state) == ["lr is 0.3 by the spec, and was 0.1"]
    assert other.optimizer.param_groups[0]["lr"] == 0.3
    assert other.optimizer.param_groups[0]["rounds"] == 4


def test_parameters_that_begin_or_cease_to_train_are_told(trainer):
    one = saved(trainer)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    notes = restore(one.folder.find(), TrainingState(model, optimizer))
    assert notes == ["no longer trained, their optimizer state is dropped: 0.bias, 0.weight"]
    assert set(optimizer.state) == set(model[1].parameters())


def test_extra_state_of_modules_and_of_strategies_comes_back(trainer):
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    one = trainer(model=nn.Sequential(Counting(3, 2)))
    one.model[0].seen = 9
    one.train()
    state = one.state.gather({"rank-0.residual": torch.zeros(3), "rank-1.residual": torch.arange(3.0)})
    one.checkpointer.save(1, state, device=torch.device("cpu"), data={}, position={}, metrics={})
    assert one.checkpointer.wait().error == ""
    one.model[0].seen = 0
    restore(one.folder.find(), one.state)
    assert one.model[0].seen == 9
    found = read_extra(one.folder.find(), "rank-1.")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"residual": [0.0, 1.0, 2.0]}


@pytest.mark.parametrize(
    "before, after, lacking",
    [
        (torch.optim.AdamW, lambda ps: torch.optim.AdamW(ps, amsgrad=True), "max_exp_avg_sq"),
        (torch.optim.RMSprop, lambda ps: torch.optim.RMSprop(ps, centered=True), "grad_avg"),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.5), lambda ps: torch.optim.SGD(ps, lr=0.1), ""),
        (lambda ps: torch.optim.SGD(ps, lr=0.1), lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.5), ""),
        (lambda ps: torch.optim.AdamW(ps, amsgrad=True), torch.optim.AdamW, ""),
        (torch.optim.Adafactor, lambda ps: torch.optim.Adafactor(ps, lr=0.3), ""),
    ],
)
def test_settings_that_need_state_which_was_not_kept_are_refused(trainer, tmp_path, before, after, lacking):
    one = trainer()
    one.optimizer = before(one.model.parameters())
    one.state = TrainingState(one.model, one.optimizer)
    one.train(2)
    one.save()
    other = trainer(tmp_path / "other")
    other.optimizer = after(other.model.parameters())
    other.state = TrainingState(other.model, other.optimizer)
    if lacking:
        with pytest.raises(CheckpointError, match=f"with the settings of the spec needs {lacking} of each parameter"):
            restore(one.folder.find(), other.state)
    else:
        restore(one.folder.find(), other.state)
        other.train()
