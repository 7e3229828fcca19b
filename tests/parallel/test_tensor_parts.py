"""Layers whose parameters no style for linear layers fits: attention of torch's own, stacked experts, packed matrices."""

import pytest
import torch
from attentive import Mixture
from shop import assert_same, make_workshop  # noqa: F401
from torch import nn

from mgpu.errors import PlanError
from mgpu.parallel._tensor_plans import TensorSplit

LAYOUTS = {
    "2": (2, {"strategy": "tensor"}),
    "4": (4, {"strategy": "tensor"}),
    "sharded": (4, {"strategy": "hybrid", "shard": 2, "tensor": 2}),
    "replicated": (4, {"strategy": "tensor", "replicate": 2}),
    "staged": (4, {"strategy": "hybrid", "pipeline": 2, "tensor": 2}),
}
CUTS = {"Attentive": "masked", "Layers": "encoder.layers.1"}


def layout_of(name, model):
    """World size and `parallel`; a pipeline is cut where this model can be."""
    world, parallel = LAYOUTS[name] if name else (1, {"strategy": "single"})
    return world, {**parallel, "split": [CUTS[model]]} if "pipeline" in parallel else parallel


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LAYOUTS))
@pytest.mark.parametrize("model", ["Attentive", "Layers"])
def test_attention_trains_as_in_one_process(workshop, model, name):
    """In double precision: losses, norms, evaluation and every parameter."""
    world, parallel = layout_of(name, model)
    settings = {"model": f"attentive.py:{model}"}
    assert_same(workshop.train(world, parallel=parallel, **settings), workshop.single(**settings), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("first, second", [
    ("2", "4"), ("4", None), (None, "2"), ("sharded", "2"), ("2", "sharded"), ("staged", None), (None, "staged"),
])  # fmt: skip
def test_a_checkpoint_holds_the_packed_matrix_as_one_process_does(workshop, first, second):
    settings = {"model": "attentive.py:Attentive"}
    start, end = (layout_of(name, "Attentive") for name in (first, second))
    run = workshop.train(start[0], parallel=start[1], duration="3 steps", **settings).run
    trained = workshop.resume(run, end[0], parallel=end[1], duration="5 steps")
    assert_same(trained, workshop.single(**settings), 1e-9, evaluations=False)


@pytest.mark.slow
def test_a_run_starts_from_the_weights_of_another(workshop):
    settings = {"model": "attentive.py:Attentive"}
    source = workshop.single(**settings).run
    trained, expected = (
        workshop.train(world, parallel=parallel, init_from=source.id, **settings)
        for world, parallel in (LAYOUTS["2"], (1, {"strategy": "single"}))
    )
    assert_same(trained, expected, 1e-9)


@pytest.mark.slow
def test_dropout_inside_attention_is_of_training_only(workshop):
    """Of everything, so that what is left does not depend on the masks drawn: the biases of the outputs."""
    settings = {"model": {"target": "attentive.py:Attentive", "args": {"dropout": 1.0}}}
    trained, expected = workshop.train(2, parallel={"strategy": "tensor"}, **settings), workshop.single(**settings)
    assert_same(trained, expected, 1e-9)
    assert trained.losses != workshop.single(model="attentive.py:Attentive").losses


@pytest.mark.slow
def test_logits_of_parts_of_the_sequence_stay_split(workshop):
    settings = {"model__args": {"double": True}}
    parallel = {"strategy": "tensor", "sequence": True, "loss_parallel": True}
    assert_same(workshop.train(2, parallel=parallel, **settings), workshop.single(**settings), 1e-9)


MIXTURE = {
    "experts": "experts", "experts.up": "packed_rowwise", "experts.bias": "packed_rowwise", "experts.down": "colwise",
    "gained": "local", "gained.gains": "colwise", "gained.into": "colwise", "gained.out": "rowwise",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2", "4", "sharded"])
def test_experts_and_parameters_of_heads_by_a_plan_of_ones_own(workshop, name):
    world, parallel = LAYOUTS[name]
    settings = {"model": "attentive.py:Mixture"}
    trained = workshop.train(world, parallel={**parallel, "plan": MIXTURE}, **settings)
    assert_same(trained, workshop.single(**settings), 1e-9)


def test_experts_with_a_parameter_that_is_not_split_are_refused():
    plan = {pattern: style for pattern, style in MIXTURE.items() if pattern != "experts.bias"}
    with pytest.raises(
        PlanError, match="experts has the style experts, whose outputs are added up, but bias is not split"
    ):
        TensorSplit(plan).check(Mixture(), 2)
    TensorSplit(MIXTURE).check(Mixture(), 4)
    with pytest.raises(PlanError, match=r"experts.up has 16 in dimension 2, .* two matrices and the tensor degree 16"):
        TensorSplit(MIXTURE).check(Mixture(), 16)


def test_torchs_own_layers_need_no_plan():
    styles = TensorSplit().styles(nn.Transformer(16, 4, num_encoder_layers=1, num_decoder_layers=1, batch_first=True))
    assert styles == {
        "encoder.layers.0.self_attn": "attention", "encoder.layers.0.linear1": "colwise",
        "encoder.layers.0.linear2": "rowwise", "decoder.layers.0.self_attn": "attention",
        "decoder.layers.0.multihead_attn": "attention", "decoder.layers.0.linear1": "colwise",
        "decoder.layers.0.linear2": "rowwise",
    }  # fmt: skip


class OwnWay(nn.MultiheadAttention):
    """Attention of somebody's own, in the clothes of torch's."""

    def forward(self, x):
        return x, None


class Gated(nn.TransformerEncoderLayer):
    """Half of what its first layer makes gates the other half: no columns of it can be used alone."""

    def _ff_block(self, x):
        gate, up = self.linear1(x).chunk(2, dim=-1)
        return self.linear2((gate.sigmoid() * up).repeat(1, 1, 2))


def test_a_class_with_methods_of_its_own_is_not_taken_for_torchs():
    model = nn.Sequential(OwnWay(16, 4), Gated(16, 4, 32))
    assert TensorSplit().styles(model) == {"1.self_attn": "attention"}
    with pytest.raises(
        PlanError, match="0 is a OwnWay, with methods of its own, and the style attention splits torch's"
    ):
        TensorSplit({"0": "attention"}).check(model, 2)


def test_what_is_split_how_is_told_by_style():
    told = TensorSplit().describe(nn.ModuleDict({"layers": nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4), 3, enable_nested_tensor=False
    )}))  # fmt: skip
    assert told.splitlines() == [
        "attention: layers.layers.*.self_attn (3)",
        "colwise: layers.layers.*.linear1 (3)",
        "rowwise: layers.layers.*.linear2 (3)",
    ]
    assert TensorSplit(MIXTURE).describe(Mixture()).splitlines()[-1] == "packed_rowwise: experts.up, experts.bias"


@pytest.mark.parametrize("option, message", [
    ("sequence", "no layer that works on a part of the sequence"), ("loss_parallel", "there are no logits to leave split"),
])  # fmt: skip
def test_an_option_that_would_change_nothing_is_refused(option, message):
    model = nn.Sequential(nn.MultiheadAttention(12, 6))
    with pytest.raises(PlanError, match=message) as refused:
        TensorSplit(**{option: True}).check(model, 2)
    assert refused.value.key == ("parallel", option)


def test_a_parameter_packed_along_its_columns_is_sharded_by_rows():
    """Ten rows make five shards; the twelve columns that the other cut leaves for them do not."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.linear = nn.Parameter(torch.empty(10, 12)), nn.Linear(2, 10)

    TensorSplit({"up": "packed_rowwise", "linear": "colwise"}).check(Packed(), 2, 5)
    with pytest.raises(PlanError, match=r"up .* it has 12 columns, which do not divide by the 5 shards"):
        TensorSplit({"up": "packed_colwise", "linear": "colwise"}).check(Packed(), 5, 5)


@pytest.mark.parametrize("plan, degree, shards, message", [
    ("auto", 4, 1, r"6 heads of 0 do not divide by the tensor degree 4"),
    ({"1": "attention"}, 2, 1, r"1 is a Linear, and the style attention splits torch's nn.MultiheadAttention"),
    ({"0": "attention"}, 3, 5, r"0.in_proj_weight .* it has 12 columns, which do not divide by the 5 shards"),
    ({"1": "packed_colwise"}, 4, 1, r"1 has 12 outputs, which do not divide by two matrices and the tensor degree 4"),
    ({"1": "packed_colwise"}, 2, 2, r"1.bias .* it has no columns for the 2 shards"),
    ({"1.weight": "attention"}, 2, 1, r"no module is named '1.weight'"),
])  # fmt: skip
def test_a_plan_that_cannot_be_is_refused(plan, degree, shards, message):
    model = nn.Sequential(nn.MultiheadAttention(12, 6), nn.Linear(12, 12))
    with pytest.raises(PlanError, match=message):
        TensorSplit(plan).check(model, degree, shards)
    TensorSplit({"0": "attention", "1": "packed_colwise"}).check(model, 6)
    TensorSplit({"0": "attention"}).check(model, 3, 4)
