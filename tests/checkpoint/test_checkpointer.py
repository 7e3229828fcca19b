"""Saving beside training: what a save is, what training waits for, and what happens when it fails."""

import errno
import math
import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from trainers import Trainer

from mgpu.checkpoint import CheckpointFolder, Found, Manifest
from mgpu.checkpoint.checkpointer import failure
from mgpu.checkpoint.listing import rows
from mgpu.checkpoint.reading import read_metadata
from mgpu.checkpoint.restore import restore
from mgpu.checkpoint.retention import Best
from mgpu.checkpoint.shard import HashedFile
from mgpu.errors import DamagedCheckpoint


def test_stock_torch_reads_a_checkpoint_in_place(trainer):
    one = trainer()
    one.train()
    one.save()
    fresh = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load({"model": fresh.state_dict()}, checkpoint_id=one.folder.path_of(1), no_dist=True)
    for name, parameter in fresh.named_parameters():
        assert torch.equal(parameter, one.model.get_parameter(name))


def test_stock_torch_turns_it_into_one_file_that_plain_torch_loads(trainer, tmp_path):
    """Must show 6; tied weights are there under both names."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    one = trainer(model=model)
    one.train()
    one.save()
    dcp_to_torch_save(one.folder.path_of(1), tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert set(whole["model"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert torch.equal(whole["model"]["1.weight"], model[0].weight)
    moments = one.optimizer.state[model[0].weight]
    assert torch.equal(whole["optimizer"]["0.weight"]["exp_avg_sq"], moments["exp_avg_sq"])
    places = {index.fqn: place for index, place in read_metadata(one.folder.path_of(1)).storage_data.items()}
    assert places["model.1.weight"] == places["model.0.weight"]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64]
)
def test_every_kind_of_tensor_comes_back_with_its_bits(trainer, dtype):
    model = nn.Linear(1, 1)
    base = torch.arange(24).reshape(4, 6).to(dtype)
    model.register_buffer("whole", base)
    model.register_buffer("transposed", base.t())
    model.register_buffer("part", base[1:3, ::2])
    model.register_buffer("scalar", base[1, 1].clone())
    model.register_buffer("empty", torch.zeros(0, 3, dtype=dtype))
    expected = {name: value.clone() for name, value in model.named_buffers()}
    one = trainer(model=model)
    one.save()
    for value in model.buffers():
        value.zero_()
    restore(one.folder.find(), one.state)
    for name, value in model.named_buffers():
        assert value.dtype is dtype
        assert torch.equal(value, expected[name]), name


def test_what_training_does_after_the_call_does_not_reach_the_file(trainer):
    one = trainer(model=nn.Linear(3, 200_000))
    one.train()
    before = one.tensors()
    one.save(wait=False)
    with torch.no_grad():
        one.model.weight.fill_(-1.0)
    assert one.checkpointer.wait().error == ""
    restore(one.folder.find(), one.state)
    for path, tensor in one.tensors().items():
        assert torch.equal(tensor, before[path]), path


def test_two_saves_are_never_in_flight_at_once(trainer):
    one = trainer(keep=2)
    for _ in range(4):
        one.train()
        one.save(wait=False)
    one.checkpointer.wait()
    assert [event["step"] for event in one.events if event["event"] == "saved"] == [1, 2, 3, 4]
    assert one.folder.steps() == [4, 3]
    assert not list(one.folder.path.glob(".*"))


def test_the_layout_follows_a_state_that_changes_shape(trainer):
    """The optimizer has no state before its first step, and a thawed parameter gets some later."""
    one = trainer()
    one.model[1].weight.requires_grad_(False)
    one.save()
    one.train()
    one.save()
    one.model[1].weight.requires_grad_(True)
    one.train()
    one.save()
    counts = [len(Found.at(one.folder.path_of(step)).manifest.files) for step in (0, 1, 2)]
    assert counts == [3, 3, 3]
    expected = one.tensors()
    assert ("optimizer", "1.weight", "exp_avg") in expected
    one.train()
    restore(one.folder.find(2), one.state)
    assert all(torch.equal(tensor, expected[path]) for path, tensor in one.tensors().items())


def test_a_full_disk_costs_the_new_checkpoint_and_never_the_old(trainer, small_disk, tmp_path, monkeypatch):
    """Case F5: keep 1, an 8 MB disk, 5 MB a checkpoint. Told with path, needed and free bytes; then there is room."""
    filler = (small_disk or tmp_path) / "filler"
    if small_disk is None:  # the writer is forked, so it has what is set here
        real = os.fsync

        def full(handle):
            if filler.exists() and ".distcp" in os.readlink(f"/proc/self/fd/{handle}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(handle)

        monkeypatch.setattr(os, "fsync", full)
    model = nn.Linear(1, 300_000)
    path = (small_disk or tmp_path) / "checkpoints"
    one = trainer(path, keep=1, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    one.step = 5
    model(torch.ones(1, 1)).sum().backward()
    one.optimizer.step()
    assert one.save().error == ""
    filler.write_bytes(b"x" * 2_500_000)
    one.step = 10
    outcome = one.save()
    needed = 4 * 4 * 300_000
    assert outcome.error.startswith("rank 0: No space left on device")
    assert "__0_0.distcp" in outcome.error
    assert f"({needed} bytes needed, " in outcome.error and outcome.error.endswith(" free)")
    told = [event for event in one.events if event["event"] in ("save_failed", "note")]
    assert told[0]["step"] == 10 and told[0]["error"] == outcome.error
    assert "step 10 was not saved" in told[1]["text"]
    assert [entry.name for entry in path.iterdir()] == ["step-00000005"]
    assert one.folder.find().step == 5
    error = failure(one.checkpointer)
    assert "step 10 was not saved" in error.message and "newest checkpoint is of step 5" in error.hint
    filler.unlink()
    one.folder.remove(5)
    one.step = 11
    assert one.save().error == ""
    assert failure(one.checkpointer) is None
    assert one.folder.steps() == [11]


def test_a_folder_that_cannot_be_written_is_told(trainer, tmp_path):
    (tmp_path / "checkpoints").write_text("a file in its place")
    one = trainer()
    assert "checkpoints" in one.save().error
    assert "there is no checkpoint of this run" in failure(one.checkpointer).hint


def test_a_writer_that_was_killed_costs_its_save_and_no_more(trainer):
    one = trainer()
    one.save()
    os.kill(one.checkpointer._writer.pid, signal.SIGKILL)
    one.train()
    outcome = one.save()
    assert one.folder.find().step == (0 if outcome.error else 1)
    one.train()
    assert one.save().error == ""
    assert one.folder.find().step == 2
    assert any("was killed by SIGKILL: rank 0" in event.get("text", "") for event in one.events)


def test_the_writer_is_deaf_to_the_signals_that_stop_a_rank(trainer):
    one = trainer()
    pid = one.checkpointer._writer.pid
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(pid, signum)
    assert one.save().error == ""
    assert one.checkpointer._writer.pid == pid


def test_no_snapshot_memory_and_no_writer_outlive_a_killed_rank(trainer):
    """PDEATHSIG: the writer of a process that gets SIGKILL is gone, and memory without a name goes with it."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        one = Trainer(Path("/nonexistent/checkpoints"), model=nn.Linear(10, 10))
        one.checkpointer.prepare(one.state.gather(), torch.device("cpu"))
        os.write(tell, str(one.checkpointer._writer.pid).encode())
        signal.pause()
    writer = int(os.read(ready, 20))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 30
    while (stat := Path(f"/proc/{writer}/stat")).exists():
        if stat.read_text().rpartition(")")[2].split()[0] in "ZX":
            break
        assert time.monotonic() < deadline
        os.sched_yield()
    assert not [name for name in os.listdir("/dev/shm") if "mgpu" in name]


def test_a_kill_in_mid_write_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    """Case F4: the whole group gets SIGKILL when half of the bytes of step 10 are written."""
    path = tmp_path / "checkpoints"
    half, written = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        whole = HashedFile.write

        def write(self, block):
            if "step-00000010" in str(self._stream.name) and self.size > 5_000:
                self._stream.write(memoryview(block)[: len(block) // 2])
                self._stream.flush()
                os.write(written, b"!")
                signal.pause()
            return whole(self, block)

        monkeypatch.setattr(HashedFile, "write", write)
        one = Trainer(path)
        for one.step in (5, 10):
            one.save()
    assert os.read(half, 1) == b"!"
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    folder = CheckpointFolder(path)
    assert folder.steps() == [5]
    found, warnings = folder.newest()
    assert found.step == 5
    assert warnings == ["step-00000010 is incomplete: its writing was cut off; passed over"]


def test_retention_works_while_saving_and_metrics_are_kept(trainer):
    one = trainer(keep=1)
    for loss in (0.5, 0.2):
        one.train()
        one.save(loss=loss)
    assert one.folder.steps() == [2]
    assert Manifest.read(one.folder.path_of(2)).metrics == {"loss": 0.2}
    removed = [event for event in one.events if event["event"] == "checkpoints_removed"]
    assert [event["steps"] for event in removed] == [[1]]
    order = [event["event"] for event in one.events]
    assert order.index("checkpoints_removed") > order.index("saved")


def test_a_checkpoint_appears_whole(trainer):
    """Whoever looks, at any time, sees only checkpoints that verify."""
    one = trainer(keep=100, model=nn.Linear(3, 100_000))
    folder, seen, stop = CheckpointFolder(one.folder.path), set(), threading.Event()

    def look():
        while not stop.is_set():
            for step in folder.steps():
                if step not in seen:
                    Found.at(folder.path_of(step))
                    seen.add(step)

    looker = threading.Thread(target=look)
    one.train()
    one.save()
    looker.start()
    try:
        for _ in range(5):
            one.train()
            one.save()
    finally:
        stop.set()
        looker.join()
    assert seen <= set(range(1, 7))
    assert folder.steps() == [6, 5, 4, 3, 2, 1]


def test_an_evaluation_after_the_save_is_added_and_decides_which_is_the_best(trainer):
    """Lowest loss 0.2 at step 2; the newest is 4. Step 3 was best-so-far for nobody, so it goes."""
    one = trainer(keep=1, best=Best("loss", "min"))
    for loss in (0.5, 0.2, 0.4, 0.3):
        one.train()
        one.save(wait=False)
        one.checkpointer.measured(one.step, {"loss": loss})
        one.checkpointer.measured(one.step + 7, {"loss": -1.0})  # of no checkpoint
    one.checkpointer.close()
    metrics = {step: Manifest.read(one.folder.path_of(step)).metrics for step in one.folder.steps()}
    assert metrics == {4: {"loss": 0.3}, 2: {"loss": 0.2}}
    assert all(row.health == "verified" for row in rows(one.folder, check=True))
    removed = [step for event in one.events if event["event"] == "checkpoints_removed" for step in event["steps"]]
    assert removed == [1, 3]


def test_an_evaluation_is_added_where_the_writer_was_killed_and_to_what_was_resumed_from(trainer):
    one = trainer()
    one.train()
    one.save()
    os.kill(one.checkpointer._writer.pid, signal.SIGKILL)
    os.waitid(os.P_PID, one.checkpointer._writer.pid, os.WEXITED | os.WNOWAIT)
    one.checkpointer.measured(1, {"loss": float("nan")})
    one.checkpointer.close()
    assert math.isnan(Manifest.read(one.folder.path_of(1)).metrics["loss"])
    other = trainer()
    other.checkpointer.started_from(1)
    other.checkpointer.measured(1, {"loss": 0.5})
    other.checkpointer.close()
    assert Manifest.read(one.folder.path_of(1)).metrics == {"loss": 0.5}


def test_an_evaluation_that_cannot_be_written_is_told_and_costs_nothing(trainer):
    one = trainer()
    one.train()
    one.save()
    (one.folder.path_of(1) / "evaluation.json").mkdir()
    one.checkpointer.measured(1, {"loss": 0.5})
    one.checkpointer.close()
    (note,) = [event["text"] for event in one.events if event["event"] == "note"]
    assert note.startswith("the evaluation of step 1 is not with its checkpoint")


@pytest.mark.parametrize("how", ["flipped", "halved", "no metrics"])
def test_an_evaluation_that_is_not_what_was_written_is_named(trainer, how):
    one = trainer()
    one.train()
    one.save()
    one.checkpointer.measured(1, {"loss": 0.5})
    one.checkpointer.close()
    path = one.folder.path_of(1) / "evaluation.json"
    text = path.read_text()
    changed = {"flipped": text.replace("0.5", "0.4"), "halved": text[:40], "no metrics": "{}"}[how]
    path.write_text(changed)
    with pytest.raises(DamagedCheckpoint, match=r"evaluation\.json"):
        Manifest.read(one.folder.path_of(1))


def test_a_rank_that_has_failed_lingers_until_what_it_saved_is_there(trainer):
    one = trainer(model=nn.Linear(3, 2_000_000))
    one.train()
    one.save(wait=False)
    assert one.folder.steps() == []
    one.checkpointer.linger(60)
    assert one.folder.steps() == [1]
    one.checkpointer._in_flight = None  # its outcome was heard


def test_a_writer_that_does_not_come_along_is_told_and_given_up(trainer):
    """By a rank that has failed meanwhile; by one that goes on, it is waited for."""
    one = trainer()
    one.train()
    one.save()
    writer = one.checkpointer._writer.pid
    os.kill(writer, signal.SIGSTOP)
    one.train()
    one.save(wait=False)
    one.checkpointer.linger(1.5)
    told = [event["text"] for event in one.events if event["event"] == "note"]
    assert told == [
        "rank 0 has failed; the checkpoint of step 2, from before, is still being written",
        "the checkpoint of step 2 was given up: it was not written within 2 s",
    ]
    waker = threading.Timer(6.0, os.kill, (writer, signal.SIGCONT))
    waker.start()
    assert one.checkpointer.wait().step == 2
    waker.join()
    told = [event["text"] for event in one.events if event["event"] == "note"][2:]
    assert told == ["training has waited 5 s for the checkpoint of step 2 to be written"]
