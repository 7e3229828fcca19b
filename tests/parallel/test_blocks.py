"""Which modules of a model are its blocks, where it is cut, and what is refused."""

import pytest
import torch
from torch import nn

from mgpu.errors import PlanError
from mgpu.parallel._blocks import repeated_blocks
from mgpu.parallel._calls import Call
from mgpu.parallel._cuts import balanced, parts_of, places_to_cut, weights_of
from mgpu.parallel._routes import Uncuttable
from mgpu.parallel._sharded import Sharding
from mgpu.parallel._stages import Cutting, take_away
from mgpu.parallel._tensor_plans import TensorSplit
from mgpu.parallel.model import place
from mgpu.zoo import GPT


class Residual(nn.Module):
    """A stage-wise net as of torchvision: lists of blocks, some with a list inside that is no stack."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)
            self.shortcut = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))

        def forward(self, x):
            return self.conv(x) + self.shortcut(x)

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 2, 1)
        self.layer1 = nn.Sequential(self.Block(), self.Block())
        self.layer2 = nn.Sequential(self.Block(), self.Block())
        self.head = nn.Linear(2, 1)

    def forward(self, x):
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


def test_blocks_are_the_members_of_the_outermost_stacks():
    assert list(repeated_blocks(GPT(layers=3, width=16, heads=2))) == ["layers.0", "layers.1", "layers.2"]
    assert list(repeated_blocks(Residual())) == ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]
    assert repeated_blocks(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))) == {}


def test_layers_of_a_net_without_blocks():
    """As VGG is written: lists of layers, those without weights between them."""
    net = nn.Sequential(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Conv2d(1, 1, 1)), nn.Flatten(), nn.Linear(1, 1))
    assert places_to_cut(net, 3) == ["0.0", "0.2", "2"]


def cut_by_weights(model, stages):
    places = places_to_cut(model, stages)
    costs = [0] * len(places)
    for part in parts_of(model, places[1:]):
        costs[part.stage] += weights_of(part)
    return [places[start] for start in balanced(costs, stages)]


def test_stages_have_equal_weights():
    """A head as dear as two blocks takes a stage with fewer of them."""
    gpt = GPT(layers=4, width=16, heads=2, vocabulary=16, tie=False)
    assert cut_by_weights(gpt, 2) == ["layers.2"]
    block = sum(parameter.numel() for parameter in gpt.layers[0].parameters() if parameter.dim() > 1)
    wide = GPT(layers=4, width=16, heads=2, vocabulary=2 * block // 16, tie=False)
    assert cut_by_weights(wide, 2) == ["layers.3"]


def test_too_few_blocks_for_the_stages():
    with pytest.raises(PlanError, match=r"2 blocks \(layers.0, layers.1\) do not make 3 stages"):
        places_to_cut(GPT(layers=2, width=16, heads=2), 3)


def test_split_points_are_checked():
    with pytest.raises(PlanError, match=r"no module 'layer\.1'") as refused:
        parts_of(GPT(layers=2, width=16, heads=2), ["layer.1"])
    assert refused.value.hint == "did you mean layers.1?"
    with pytest.raises(PlanError, match="out of order"):
        parts_of(Residual(), ["layer2", "layer1"])


def test_parts_are_as_large_as_their_stage_allows():
    parts = parts_of(Residual(), ["layer1.1", "layer2"])
    assert [(part.name, part.stage) for part in parts] == [
        ("stem", 0), ("layer1.0", 0), ("layer1.1", 1), ("layer2", 2), ("head", 2),
    ]  # fmt: skip


@pytest.mark.parametrize("cuts", [["layers.1"], ["layers.0"], ["layers.2", "norm"]])
def test_stages_one_after_the_other_are_the_model(cuts):
    """Each stage on a model of its own, as ranks have it; what they hand over ends in the whole model's output."""
    torch.manual_seed(0)
    whole = GPT(layers=3, width=16, heads=2, context=8, vocabulary=32, tie=False)
    tokens = torch.arange(16).reshape(2, 8)
    given = ()
    for stage in range(len(cuts) + 1):
        model = GPT(layers=3, width=16, heads=2, context=8, vocabulary=32, tie=False)
        model.load_state_dict(whole.state_dict())
        cutting = Cutting(model, parts_of(model, cuts), own=[stage])
        cutting.cut()
        given = cutting.run(stage, given, Call((tokens,), {}))
    torch.testing.assert_close(given, whole(tokens), rtol=0, atol=0)


def test_a_model_that_never_calls_the_next_stage_is_told():
    class Early(Residual):
        def forward(self, x):
            return self.layer1(self.stem(x))

    model = Early()
    cutting = Cutting(model, parts_of(model, ["layer2"]), own=[0])
    cutting.cut()
    with pytest.raises(Uncuttable, match="no module of stage 1 was called"):
        cutting.run(0, (), Call((torch.zeros(1, 2, 4, 4),), {}))


def test_a_module_of_another_rank_has_no_parameters():
    norm = nn.BatchNorm1d(3)
    take_away(norm)
    assert list(norm.parameters()) == []
    assert norm.state_dict() == {}


def test_layers_on_several_devices_of_one_process():
    """The second device here has no memory, so that the output tells that activations moved."""
    model = GPT(layers=2, width=16, heads=2, context=8, tie=False)
    place(model, parts_of(model, ["layers.1"]), [torch.device("cpu"), torch.device("meta")])
    assert model.layers[0].mlp.up.weight.device.type == "cpu"
    assert model.layers[1].mlp.up.weight.device.type == "meta"
    seen = []
    model.layers[1].register_forward_hook(lambda module, args, output: seen.append((args[0].device.type, output.shape)))
    way_back = []

    class Homeward(torch.Tensor):
        """Values of a device that has none cannot come back; where they are asked to is noted."""

        def to(self, device):
            way_back.append((self.device.type, device.type))
            return torch.zeros(self.shape)

    model.register_forward_hook(lambda module, args, output: output.as_subclass(Homeward), prepend=True)
    assert model(torch.zeros(1, 8, dtype=torch.int64)).device.type == "cpu"
    assert seen == [("meta", (1, 8, 16))]
    assert way_back == [("meta", "cpu")]


@pytest.mark.parametrize("wrap, units", [("auto", 3), (("Attention", "Mlp"), 6), (3000, 3), (600, 9)])
def test_what_is_gathered_at_a_time(wrap, units):
    """A block of width 16 has 3072 matrix weights and 64 of norms: 1024 in attention, and
    twice 1024 in the feed-forward part."""
    assert len(Sharding(wrap).units(GPT(layers=3, width=16, heads=2, context=8, vocabulary=16))) == units


def test_a_class_that_the_model_does_not_have():
    with pytest.raises(PlanError, match="the model has no Layr") as refused:
        Sharding(("Layr",)).units(GPT(layers=2, width=16, heads=2))
    assert "Layer" in refused.value.hint


def test_tensor_plans_are_checked():
    gpt = GPT(layers=2, width=48, heads=3, vocabulary=258)
    with pytest.raises(PlanError, match=r"3 heads of layers.0.attention do not divide by the tensor degree 2"):
        TensorSplit().check(gpt, 2)
    TensorSplit().check(gpt, 3)
    with pytest.raises(PlanError, match=r"no module is named 'layers\.\*\.mlp\.upp'"):
        TensorSplit({"layers.*.mlp.upp": "colwise"}).check(gpt, 3)
    with pytest.raises(PlanError, match="no tensor-parallel plan is known for Residual"):
        TensorSplit().check(Residual(), 2)
    with pytest.raises(PlanError, match="2 outputs, which do not divide by the tensor degree 4"):
        TensorSplit({"stem": "colwise"}).check(Residual(), 4)
