"""What a plan tells, and what it refuses with the numbers and the reason. No torch is needed for any of it."""

import json

import pytest

from mgpu.errors import PlanError, Refusal
from mgpu.plan import Plan, make_plan
from mgpu.spec import load_spec
from mgpu.topology import Topology

SPEC = """\
model: {target: mgpu.zoo:GPT, args: {layers: 4, width: 96, heads: 6}}
data: {train: mgpu.zoo:PythonSource}
task: mgpu.zoo:NextByte
optimizer: {target: torch.optim:AdamW, args: {lr: 1e-3}}
batch: {size: 16, micro: 2}
duration: 5 steps
"""
HOST = Topology.detect()


@pytest.fixture
def plan_of(tmp_path):
    (tmp_path / "spec.yaml").write_text(SPEC)

    def plan(devices, **settings):
        sets = [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in settings.items()]
        return make_plan(load_spec(tmp_path / "spec.yaml", [f"devices=cpu:{devices}", *sets]).spec, HOST)

    return plan


@pytest.mark.parametrize("devices, parallel, mesh, replicas", [
    (4, {"strategy": "ddp"}, {"replicate": 4}, 4),
    (4, {"strategy": "fsdp"}, {"shard": 4}, 4),
    (4, {"strategy": "fsdp", "replicate": 2}, {"replicate": 2, "shard": 2}, 4),
    (4, {"strategy": "pipeline"}, {"pipeline": 4}, 1),
    (6, {"strategy": "tensor", "replicate": 3}, {"replicate": 3, "tensor": 2}, 3),
    (8, {"strategy": "hybrid", "shard": 2, "pipeline": "auto", "tensor": 2},
     {"shard": 2, "pipeline": 2, "tensor": 2}, 2),
    (1, {"strategy": "fsdp"}, {"replicate": 1}, 1),
])  # fmt: skip
def test_the_mesh_of_a_strategy(plan_of, devices, parallel, mesh, replicas):
    plan = plan_of(devices, parallel=parallel)
    assert plan.mesh == mesh
    assert plan.replicas == replicas
    assert sum(plan.counts) == 8
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize("strategy", ["dp", "model"])
def test_one_process_drives_several_devices(plan_of, strategy):
    plan = plan_of(3, parallel={"strategy": strategy})
    assert (plan.world, plan.replicas, len(plan.devices)) == (1, 1, 3)
    assert any("CPU" in note for note in plan.notes)


def test_the_bubble_of_a_pipeline_is_told(plan_of):
    """1F1B with p = 4 stages and m = 8 micro batches: (p - 1) / (m + p - 1) = 3 / 11."""
    plan = plan_of(4, parallel={"strategy": "pipeline"})
    assert any("27%" in note for note in plan.notes)
    assert ("mesh", "pipeline 2 x tensor 2") in plan_of(
        4, parallel={"strategy": "hybrid", "pipeline": 2, "tensor": 2}
    ).explain()


@pytest.mark.parametrize("devices, settings, told", [
    # Case G5: each with the two numbers and the rule
    (2, {"parallel": {"strategy": "pipeline"}, "batch": {"size": 2, "micro": 2}},
     "1f1b needs at least as many micro batches a step as stages: 1 for 2 stages"),
    (2, {"parallel": {"strategy": "pipeline"}, "batch": {"size": 3, "micro": 2}}, "size 3 is not a multiple of micro 2"),
    (4, {"parallel": {"strategy": "tensor"}}, "6 heads do not divide by the tensor degree 4"),
    (8, {"parallel": {"strategy": "hybrid", "shard": 3, "tensor": 2}},
     "replicate 1 x shard 3 x pipeline 1 x tensor 2 = 6 ranks, the devices are 8"),
    # what does not compose
    (4, {"parallel": {"strategy": "hybrid", "shard": "auto", "tensor": "auto"}}, "one degree may be auto"),
    (4, {"parallel": {"strategy": "hybrid", "context": 2}}, "context parallelism is not supported"),
    (4, {"parallel": {"strategy": "hybrid", "tensor": 0}}, "a degree is at least 1"),
    (2, {"parallel": {"strategy": "fsdp", "offload": True}}, "the devices are CPUs"),
    (3, {"parallel": {"strategy": "fsdp", "replicate": 2}}, "3 devices do not divide into 2 groups"),
    (2, {"parallel": {"strategy": "pipeline", "schedule": "zbv"}, "compile": True}, "compile does not compose"),
    (2, {"parallel": {"strategy": "pipeline", "schedule": "zero-bubble"}, "activation_checkpointing": "full"},
     "goes backward twice"),
    (2, {"parallel": {"strategy": "pipeline", "split": ["layers.1", "layers.2"]}}, "2 split points make 3 stages"),
    (2, {"parallel": {"strategy": "dp"}, "compile": True}, "compile does not compose with dp"),
    (2, {"parallel": {"strategy": "ddp", "static_graph": True}}, "static_graph does not compose with 4 micro batches"),
    (2, {"parallel": {"strategy": "tensor"}, "precision": "fp16"}, "fp16 does not compose with tensor"),
    (2, {"parallel": {"strategy": "ddp", "colour": 1}}, "colour"),
    (2, {"parallel": {"strategy": "hybird"}}, "unknown strategy"),
])  # fmt: skip
def test_what_does_not_compose_is_refused_with_the_reason(plan_of, devices, settings, told):
    with pytest.raises(Refusal) as refused:
        plan_of(devices, **settings)
    assert told in "\n".join(refused.value.lines()) + str(refused.value)


def test_uneven_rounds_are_refused_with_a_number_that_fits(plan_of):
    """Interleaving needs rounds of equal length: 7 micro batches on 3 ranks make 2 rounds of 3.5."""
    with pytest.raises(PlanError, match="7 do not divide by 2 rounds of 3 ranks") as refused:
        plan_of(3, parallel={"strategy": "pipeline", "schedule": "interleaved"}, batch={"size": 14, "micro": 2})
    assert refused.value.hint.startswith("8 micro batches")


@pytest.mark.parametrize("name, words", [
    ("consol", "unknown logger 'consol'"), ("tensorboard", "not available yet"), ("mine.py:Logger", "not available yet"),
])  # fmt: skip
def test_a_logger_that_nothing_would_answer_to_is_refused(plan_of, name, words):
    with pytest.raises(PlanError, match=words) as refused:
        plan_of(1, parallel={"strategy": "single"}, loggers=["console", name])
    assert refused.value.key == ("loggers", 1)
