"""Every strategy trains as one process does: same samples, losses, norms, evaluation and weights; and goes on from any
other's checkpoint."""

import pytest
from shop import assert_same, make_workshop  # noqa: F401

from mgpu.data.order import EpochOrder
from mgpu.plugins import plugin_names

pytestmark = pytest.mark.slow

LAYOUTS = {
    "ddp": (2, {}),
    "ddp-3": (3, {"bucket_mb": 0.001}),
    "ddp-plain-gradients": (2, {"gradient_as_bucket_view": False}),
    "fsdp": (2, {}),
    "fsdp-4": (4, {"reshard_after_forward": False}),
    "fsdp-hsdp": (4, {"replicate": 2, "wrap": ["Attention", "Mlp"]}),
    "fsdp-meta": (2, {"meta": True, "wrap": 1000}),
    "tensor": (2, {}),
    "tensor-sequence": (2, {"sequence": True}),
    "tensor-loss": (4, {"loss_parallel": True, "replicate": 2}),
    "pipeline": (2, {}),
    "pipeline-split": (3, {"schedule": "gpipe", "split": ["layers.1", "layers.2"]}),
    "pipeline-replicate": (4, {"replicate": 2}),
    "hybrid-shard-tensor": (4, {"shard": "auto", "tensor": 2}),
    "hybrid-shard-pipeline": (4, {"shard": 2, "pipeline": "auto", "schedule": "interleaved"}),
    "hybrid-pipeline-tensor": (4, {"pipeline": 2, "tensor": 2}),
    "hybrid-replicate-tensor": (4, {"replicate": 2, "tensor": 2}),
    "dp": (2, {}),
    "model": (2, {}),
    "single": (1, {}),
    "acme": (2, {}),  # of another package: acme_strategy.py, found by its entry point
}
LAYOUTS.update({name: (2, {}) for name in plugin_names("mgpu.parallel") if name not in LAYOUTS and name != "hybrid"})


@pytest.fixture(params=list(LAYOUTS))
def layout(request):
    """World size and `parallel` of a layout."""
    world, options = LAYOUTS[request.param]
    return world, {"strategy": request.param.partition("-")[0], **options}


def ids_read(folder, ranks):
    return [[int(line) for line in (folder / f"trace-{rank}.txt").read_text().split()] for rank in ranks]


def test_five_steps_are_those_of_one_process(workshop, layout, tmp_path):
    """Double precision, tied weights, four micro batches a step and a smaller last one, clipping, unequal token counts."""
    world, parallel = layout
    settings = {"model__args": {"double": True}}
    traced = {**settings, "data__train__args": {"trace": str(tmp_path / "trace")}}
    trained = workshop.train(world, parallel=parallel, **traced)
    assert_same(trained, workshop.single(**settings), 1e-9)
    plan = trained.plan
    peers = plan["world"] // plan["replicas"]
    read = ids_read(tmp_path, range(plan["world"]))
    assert all(read[rank] == read[rank - rank % peers] for rank in range(plan["world"]))
    order = [int(sample) for epoch, count in ((0, 22), (1, 16)) for sample in EpochOrder(22, 0, epoch).at(range(count))]
    assert sorted(sample for ids in read[::peers] for sample in ids) == sorted(order)


def test_one_micro_batch_a_replica_frozen_parameters_and_single_precision(workshop, layout):
    world, parallel = layout
    frozen = {"frozen": ["layers.1", "positions"], "tie": False}
    if "pipeline" in parallel or parallel["strategy"] == "pipeline":
        parallel = {**parallel, "schedule": "gpipe"}
    settings = {"model__args": frozen, "batch": {"size": 8, "micro": 2}, "optimizer__args": {"lr": 1e-3}}
    _, replicas = workshop.replicas(world, parallel)
    settings["batch"] = {"size": 12, "micro": 12 // replicas}
    trained = workshop.train(world, parallel=parallel, **settings)
    assert_same(trained, workshop.single(**settings), 1e-5)


def test_three_micro_batches_a_replica(workshop, layout):
    world, parallel = layout
    _, replicas = workshop.replicas(world, parallel)
    settings = {
        "model__args": {"double": True},
        "batch": {"size": 6 * replicas, "micro": 2},
        "data__train__args": {"n": 40},
    }
    if "pipeline" in parallel and parallel.get("schedule") == "interleaved":
        settings["batch"]["size"] = 8 * replicas
    trained = workshop.train(world, parallel=parallel, duration="3 steps", **settings)
    assert_same(trained, workshop.single(duration="3 steps", **settings), 1e-9)


def test_a_checkpoint_goes_on_in_the_same_layout_and_from_and_to_one_process(workshop, layout):
    world, parallel = layout
    settings = {"model__args": {"double": True}}
    whole = workshop.single(**settings)
    for first, second in (((world, parallel), (world, parallel)), ((world, parallel), None), (None, (world, parallel))):
        start, end = (where or (1, {"strategy": "single"}) for where in (first, second))
        run = workshop.train(start[0], parallel=start[1], duration="3 steps", **settings).run
        trained = workshop.resume(run, end[0], parallel=end[1], duration="5 steps")
        assert_same(trained, whole, 1e-9, evaluations=False)
