"""From `devices:` to the GPUs, the order and the CPUs of the ranks."""

import pytest

from mgpu.errors import PlanError
from mgpu.plan import Plan, make_plan
from mgpu.plan.devices import binding_text, choose_devices
from mgpu.spec import load_spec
from mgpu.spec.values import DeviceRequest
from mgpu.topology import Gpu, Topology

GIB = 1024**3


def machine(indices, links=None, numa=None, cpus=None, **change):
    gpus = tuple(
        Gpu(
            index, f"GPU-{index}", "NVIDIA A100", 80 * GIB,
            numa=numa[place] if numa else None, cpus=cpus[place] if cpus else None,
            **{name: values[place] for name, values in change.items()},
        )
        for place, index in enumerate(indices)
    )  # fmt: skip
    return Topology(gpus, tuple(range(8)), links=tuple(tuple(row.split()) for row in links) if links else ())


def names(devices, topology, useful=None, **options):
    return choose_devices(DeviceRequest.parse(devices), topology, useful, **options).names


def test_case_j2_indices_count_the_visible_gpus():
    visible = machine((4, 5, 6, 7))
    assert names(2, visible) == ("GPU-4", "GPU-5")
    assert names([1, 3], visible) == ("GPU-5", "GPU-7")
    with pytest.raises(PlanError, match="index 5 of 4 visible"):
        names([5], visible)
    assert names(2, machine(range(4))) == ("GPU-0", "GPU-1")


ODD = ["X SYS SYS", "SYS X NV4", "SYS NV4 X"]


def test_a_number_takes_the_gpus_that_talk_best_a_list_is_taken_as_written():
    """The spirit of J3: order and choice follow the links, never the index; ranks get UUIDs."""
    topology = machine(range(3), ODD)
    chosen = choose_devices(DeviceRequest.parse(2), topology, None)
    assert chosen.names == ("GPU-1", "GPU-2")
    assert "weakest link NV4" in chosen.placement and "the first 2 by index would have SYS" in chosen.placement
    assert names([0, 2], topology) == ("GPU-0", "GPU-2")
    assert names([2, 0], topology) == ("GPU-2", "GPU-0")


def test_a_list_in_a_weak_order_gets_a_note():
    ring = ["X NV1 SYS NV1", "NV1 X NV1 SYS", "SYS NV1 X NV1", "NV1 SYS NV1 X"]
    chosen = choose_devices(DeviceRequest.parse([0, 2, 1, 3]), machine(range(4), ring), None)
    assert chosen.names == ("GPU-0", "GPU-2", "GPU-1", "GPU-3")
    assert any("devices: [0, 1, 2, 3] would have NV1" in note for note in chosen.notes)


def test_auto_takes_all_that_the_batch_keeps_busy():
    assert names("auto", machine(range(3), ODD)) == ("GPU-0", "GPU-1", "GPU-2")
    chosen = choose_devices(DeviceRequest.parse("auto"), machine(range(3), ODD), 2)
    assert chosen.names == ("GPU-1", "GPU-2")
    assert "2 of 3 visible GPUs" in chosen.notes[0]


def test_busy_gpus_come_last_and_are_told():
    topology = machine(range(3), processes=(2, 0, 0))
    assert names(2, topology) == ("GPU-1", "GPU-2")
    assert any(
        "in use already: GPU0 (2 processes" in note
        for note in choose_devices(DeviceRequest.parse(3), topology, None).notes
    )


def test_replicas_of_several_ranks_get_the_best_links():
    crossed = ["X SYS NV4 SYS", "SYS X SYS NV4", "NV4 SYS X SYS", "SYS NV4 SYS X"]
    order = names(4, machine(range(4), crossed), inner=lambda world: 2)
    assert {frozenset(order[:2]), frozenset(order[2:])} == {
        frozenset(("GPU-0", "GPU-2")),
        frozenset(("GPU-1", "GPU-3")),
    }


def test_mig_instances_serve_one_rank():
    topology = machine((0, 0), parent=("GPU-a", "GPU-a"))
    assert names(1, topology) == ("GPU-0",)
    with pytest.raises(PlanError, match="2 GPUs asked for, 0 visible that are whole"):
        names(2, topology)
    with pytest.raises(PlanError, match="one rank"):
        names([0, 1], topology)


def test_without_gpus():
    assert names("auto", Topology((), (0, 1, 2))) == ("cpu", "cpu")
    assert names("cpu:3", machine(range(2))) == ("cpu",) * 3
    with pytest.raises(PlanError, match=r"4 GPUs asked for, 0 visible \(the NVIDIA driver does not work\)"):
        names(4, Topology((), (0,), trouble="the NVIDIA driver does not work"))
    with pytest.raises(PlanError, match="3 GPUs asked for, 2 visible"):
        names(3, machine(range(2)))


@pytest.fixture
def spec(bench):
    return load_spec(bench.folder / "toy.yaml", ["devices=2"]).spec


def test_the_plan_carries_placement_and_binding(spec):
    near = ((0, 1, 2, 3), (4, 5, 6, 7), (4, 5, 6, 7))
    plan = make_plan(spec, machine(range(3), ODD, numa=(0, 1, 1), cpus=near))
    assert plan.devices == ("GPU-1", "GPU-2")
    assert plan.cpus == ((4, 5), (6, 7))
    assert plan.threads == 2
    shown = dict(plan.explain())
    assert shown["binding"] == "rank 0: CPUs 4-5; rank 1: CPUs 6-7"
    assert shown["placement"].startswith("GPU 1, 2: weakest link NV4")
    assert Plan.from_json(plan.to_json()) == plan
    environ = plan.env(1)
    assert environ["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_plan_on_cpus_binds_nothing(spec):
    plan = make_plan(spec.model_copy(update={"devices": DeviceRequest.parse("cpu:2")}), Topology((), (0, 1)))
    assert (plan.cpus, plan.placement) == ((), "")
    assert not {"placement", "binding"} & dict(plan.explain()).keys()


def test_binding_text():
    assert binding_text([(0, 1, 4), ()]) == "rank 0: CPUs 0-1,4; rank 1: not bound"
