"""Layers whose parameters no style for linear layers fits: attention of torch's own, stacked experts, packed matrices."""

import pytest
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
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LAYOUTS))
@pytest.mark.parametrize("model", ["Attentive", "Layers"])
def test_attention_trains_as_in_one_process(workshop, model, name):
    """In double precision: losses, norms, evaluation and every parameter."""
    world, parallel = LAYOUTS[name]
    settings = {"model": f"attentive.py:{model}"}
    assert_same(workshop.train(world, parallel=parallel, **settings), workshop.single(**settings), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("first, second", [("2", "4"), ("4", None), (None, "2"), ("sharded", "2"), ("2", "sharded")])
def test_a_checkpoint_holds_the_packed_matrix_as_one_process_does(workshop, first, second):
    settings = {"model": "attentive.py:Attentive"}
    start, end = (LAYOUTS[name] if name else (1, {"strategy": "single"}) for name in (first, second))
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
