"""What is saved, and under which names."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from mgpu.checkpoint.state import TrainingState, checked_plain, model_tensors, plain_name
from mgpu.errors import CheckpointError


class Compiled(nn.Module):
    """Names things as torch.compile does."""

    def __init__(self, inner):
        super().__init__()
        self._orig_mod = inner


class Inner(nn.Module):
    """A user may call a part of a model `module`: that name stays."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def test_names_of_wrappers_never_reach_a_file():
    model = nn.DataParallel(nn.Sequential(Compiled(Inner()), checkpoint_wrapper(nn.Linear(2, 2))))
    tensors, tied, others = model_tensors(model)
    assert set(tensors) == {"0.module.weight", "0.module.bias", "0.count", "1.weight", "1.bias"}
    assert (tied, others) == ({}, {})
    assert plain_name(model, "module.0._orig_mod.module") == "0.module"


def test_buffers_come_from_the_first_rank_and_tied_weights_are_saved_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1)).gather()
    assert state.tied == {("model", "2.weight"): ("model", "0.weight")}
    assert ("model", "2.weight") not in state.tensors
    assert state.from_first == {
        ("model", f"1.{name}") for name in ("running_mean", "running_var", "num_batches_tracked")
    }


def test_the_optimizer_is_saved_by_parameter_name():
    model = nn.Linear(2, 1)
    frozen = model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([model.weight], lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["note"] = 3
    state = TrainingState(model, optimizer).gather({"residual": torch.ones(2)})
    assert frozen.grad is None
    optimizer_paths = {path for path in state.tensors if path[0] != "model"}
    assert optimizer_paths == {("optimizer", "weight", "momentum_buffer"), ("extra", "residual")}
    assert state.plain["optimizer"]["state"] == {"weight": {"note": 3}}
    assert state.plain["optimizer"]["groups"][0]["parameters"] == ["weight"]


def test_what_steps_changed_in_a_group_is_told_from_what_the_spec_says():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.5, 0.6))
    optimizer.param_groups[0]["initial_lr"] = 0.1
    state = TrainingState(model, optimizer)
    optimizer.param_groups[0].update(lr=0.05, rounds=7)
    (group,) = state.gather().plain["optimizer"]["groups"]
    assert group["changed"] == {"rounds": 7}
    assert group["built"]["betas"] == [0.5, 0.6]
    assert group["built"]["initial_lr"] == 0.1


def test_what_a_checkpoint_cannot_hold_is_refused_at_once_and_named():
    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"seen": {1, 2}}

    model = nn.Sequential(Odd(1, 1))
    with pytest.raises(CheckpointError, match=r"0\._extra_state of the model is a set"):
        TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert checked_plain((1, None, {"a": "b"}), "it") == [1, None, {"a": "b"}]


def test_a_parameter_that_is_not_the_models_is_refused():
    model, stray = nn.Linear(1, 1), nn.Parameter(torch.zeros(4))
    state = TrainingState(model, torch.optim.SGD([*model.parameters(), stray], lr=0.1))
    with pytest.raises(CheckpointError, match=r"shape \(4,\)"):
        state.group_names()
