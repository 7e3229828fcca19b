"""State that is spread over ranks: saved by two gloo ranks in one layout, restored in another, on two and on one.

One pair of processes does all of it; each test below looks at one part of what they left.
"""

import datetime
import os
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mgpu.checkpoint import CheckpointFolder, Retention
from mgpu.checkpoint.checkpointer import Checkpointer
from mgpu.checkpoint.layout import joined, local_items, shared_out
from mgpu.checkpoint.publish import Publisher
from mgpu.checkpoint.restore import restore
from mgpu.checkpoint.state import State, TrainingState
from mgpu.checkpoint.weights import load_weights

CPU = torch.device("cpu")
pytestmark = pytest.mark.slow


def make_model(parts=("0", "1", "2")):
    """Layers of 5, 3 and 1 rows: none divides by two, and the last leaves a rank without any. Batch norm has buffers."""
    torch.manual_seed(0)
    layers = OrderedDict(
        [("0", nn.Linear(4, 5)), ("1", nn.Linear(5, 3)), ("2", nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))]
    )
    return nn.Sequential(OrderedDict((name, layer) for name, layer in layers.items() if name in parts))  # fmt: skip


class Training:
    def __init__(self, model, is_whole=True):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.state = TrainingState(model, self.optimizer, is_whole=is_whole)

    def step(self, inputs=4):
        torch.manual_seed(1)
        self.model(torch.randn(6, inputs)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self):
        tensors = {joined(path): tensor for path, tensor in self.state.gather().tensors.items()}
        return {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
            for name, tensor in tensors.items()
        }


def shard_each(model):
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def work(rank, folder, port):
    """What each of the two ranks does."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def store():
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(minutes=2))

    def save(name, training):
        checkpointer = checkpointers[name]
        checkpointer.save(1, training.state.gather(), device=CPU, data={}, position={}, metrics={})
        outcome = checkpointer.wait()
        assert outcome.error == "", outcome
        checkpointer.close()
        if rank == 0:
            torch.save(training.whole() if name != "stages" else {}, folder / f"{name}.pt")
        elif name == "sharded":
            training.whole()

    # As in a rank: the writers are forked before there is a process group.
    checkpointers = {
        name: Checkpointer(
            Publisher(CheckpointFolder(folder / name), Retention(), lambda kind, **values: None),
            rank=rank, world=2, token="1", connect=lambda name=name: dist.PrefixStore(name, store()),
        )
        for name in ("sharded", "replicated", "stages")
    }  # fmt: skip
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store()), rank=rank, world_size=2)
    sharded = Training(shard_each(make_model()))
    sharded.step()
    save("sharded", sharded)
    expected = sharded.whole()

    resharded = Training(fully_shard(make_model()))  # one group in place of four
    restore(CheckpointFolder(folder / "sharded").find(), resharded.state)
    check_equal(resharded.whole(), expected)
    assert isinstance(resharded.optimizer.state[resharded.model[0].weight]["exp_avg"], DTensor)

    replicated = Training(make_model())
    restore(CheckpointFolder(folder / "sharded").find(), replicated.state)
    check_equal(replicated.whole(), expected)
    replicated.model[2][0].running_mean.fill_(float(rank + 1))  # buffers of rank 0 are those that count
    save("replicated", replicated)
    again = Training(shard_each(make_model()))
    restore(CheckpointFolder(folder / "replicated").find(), again.state)
    assert again.whole()["model.2.0.running_mean"].tolist() == [1.0, 1.0, 1.0]

    # As pipeline stages: rank 0 has the first layer, rank 1 the others; names are those of the whole model.
    stage = Training(make_model(("0",) if rank == 0 else ("1", "2")), is_whole=False)
    stage.step(inputs=4 if rank == 0 else 5)
    stage.optimizer.state[next(stage.model.parameters())]["note"] = rank
    save("stages", stage)
    other = Training(make_model(("0", "1") if rank == 0 else ("2",)), is_whole=False)
    assert restore(CheckpointFolder(folder / "stages").find(), other.state) == []

    fresh = fully_shard(make_model())
    load_weights(CheckpointFolder(folder / "replicated").find(), fresh)
    check_equal(
        {name: tensor for name, tensor in Training(fresh).whole().items() if name.startswith("model.0")},
        {name: tensor for name, tensor in expected.items() if name.startswith("model.0")},
    )
    dist.barrier()
    dist.destroy_process_group()


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(work, (path, server.port), nprocs=2)
    return path


@pytest.mark.parametrize("name", ["sharded", "replicated"])
def test_one_rank_restores_what_two_have_saved(folder, name):
    one = Training(make_model())
    restore(CheckpointFolder(folder / name).find(), one.state)
    check_equal(one.whole(), torch.load(folder / f"{name}.pt", weights_only=True))


def test_two_fsdp_ranks_did_the_steps_of_one(folder):
    one = Training(make_model())
    one.step()
    for name, tensor in torch.load(folder / "sharded.pt", weights_only=True).items():
        if not name.startswith("model.2.0"):  # both ranks saw all samples, so the mean gradient is that of one
            torch.testing.assert_close(tensor, one.whole()[name], rtol=1e-4, atol=1e-5)


def test_stages_add_up_to_the_whole_model(folder):
    found = CheckpointFolder(folder / "stages").find()
    one = Training(make_model())
    assert restore(found, one.state) == []
    first = Training(make_model(("0",)))
    first.step()
    for name, tensor in first.whole().items():
        assert torch.equal(one.whole()[name], tensor), name
    notes = {name: values["note"] for name, values in found.data["optimizer"]["state"].items()}
    assert notes == {"0.weight": 0, "1.weight": 1}
    assert sorted(found.data["optimizer"]["groups"][0]["parameters"]) == sorted(
        n for n, _ in one.model.named_parameters()
    )


@pytest.mark.parametrize("name", ["sharded", "replicated", "stages"])
def test_both_ranks_write(folder, name: str):
    files = CheckpointFolder(folder / name).find().manifest.files
    assert {"__0_0.distcp", "__1_0.distcp"} <= set(files)


def test_replicated_tensors_are_shared_out_evenly_and_each_written_once():
    state = State({("model", f"w{i}"): torch.zeros(size) for i, size in enumerate((8, 6, 5, 3))})
    items = local_items(state)
    plans = shared_out([SavePlan(items), SavePlan(items)], from_first={"model.w3"})
    names = [[item.index.fqn for item in plan.items] for plan in plans]
    # w3 is rank 0's; the others go, in order, to the rank with less to write: 8 | 6, then 5 to the rank of 6.
    assert names == [["model.w0", "model.w3"], ["model.w1", "model.w2"]]
