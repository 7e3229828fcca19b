"""The main job through the real command: layouts agree, stops and resumes are exact, failures name their cause."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest
import torch
from conftest import metrics_of, weights_of

from mgpu.runs import State


def ids_of(folder, name):
    """What each rank's task was given, in the order of the ranks."""
    files = sorted(Path(folder).glob(f"{name}-*.txt"))
    return [int(word) for path in files for word in path.read_text().split()]


def test_layouts_agree_and_every_sample_is_consumed_once_an_epoch(bench):
    """Must show 4, cases D6 and F1: the same steps, rates, losses and weights on 1, 2, 3 and 4 ranks."""
    reference = None
    for world in (1, 2, 3, 4):
        run = bench.train(f"--devices=cpu:{world}", task__args__trace=f"ids{world}", data__workers=world % 2)
        rows, weights = metrics_of(run), weights_of(run)
        assert run.state is State.COMPLETED
        assert sorted(ids_of(bench.folder, f"ids{world}")) == sorted(list(range(24)) * 2)
        assert [row["step"] for row in rows] == list(range(1, 13))
        if reference is None:
            reference = rows, weights
            continue
        assert [row["lr"] for row in rows] == [row["lr"] for row in reference[0]]
        for row, expected in zip(rows, reference[0], strict=True):
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(value, reference[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "signum, code, state",
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "interrupted"), (signal.SIGUSR1, 75, "preempted")],
)
def test_a_stopped_run_continues_to_the_same_bits(bench, signum, code, state):
    """Must show 3, cases A7 and F1: mid-epoch, with loader workers, dropout and random augmentation, on 3 ranks."""
    settings = ["--set=data.workers=1", "--devices=cpu:3", "--set=checkpoint.every=5 steps"]
    whole = bench.train(*settings)
    process = bench.start("train", "toy.yaml", *settings, "--set=task.args.delay=0.05", "--set=task.args.trace=ids")
    assert bench.interrupt(process, step=3, signum=signum, after=1) == code
    run = bench.latest
    stopped = run.last_step
    assert run.state == state
    assert run.exit_code == code
    assert 3 <= stopped < 12
    done = bench.mgpu("resume", "latest", "--set=task.args.delay=0")
    assert done.returncode == 0, done.stderr
    assert sorted(ids_of(bench.folder, "ids")) == sorted(list(range(24)) * 2)
    again = bench.latest
    assert again.id == run.id
    assert [row["step"] for row in metrics_of(again)] == list(range(1, 13))
    assert [row["loss"] for row in metrics_of(again)] == [row["loss"] for row in metrics_of(whole)]
    expected = weights_of(whole)
    for name, value in weights_of(again).items():
        assert torch.equal(value, expected[name]), name


def test_a_second_interrupt_ends_at_once_and_the_next_command_of_a_shell_line_is_not_run(bench):
    process = bench.start("train", "toy.yaml", "--set=task.args.delay=30")
    while not (bench.store.list() and bench.latest.attempts):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    while not any(e["event"] == "stop_asked" for e in bench.latest.events()):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert bench.latest.state is State.INTERRUPTED


@pytest.mark.parametrize(
    "fail, code, what",
    [
        ("raise", 1, "ValueError: bad sample 17"),
        ("exit", 75, "exited with code 75"),
        ("leave", 1, "left early with code 0"),
        ("kill", 137, "was killed by SIGKILL"),
    ],
)
def test_a_failing_rank_is_named_last_and_its_exit_code_passes_through(bench, fail, code, what):
    """Case A6."""
    process = bench.mgpu("train", "toy.yaml", f"--set=task.args.fail={fail}", "--set=task.args.fail_rank=1")
    run = bench.latest
    assert process.returncode == code
    assert run.exit_code == code
    assert run.state is State.FAILED
    report = process.stderr.splitlines()[-6:]
    assert any(line.startswith("cause") and "rank 1" in line and what in line for line in report)
    assert report[-1].startswith("next") and run.id in report[-1]
    assert str(run.log_path(1, 1)) in process.stderr
    if fail == "raise":
        assert any("toy.py:" in line for line in report)
        assert "Traceback" not in process.stderr
    pids = next(event["pids"] for event in run.events() if event["event"] == "attempt_started")
    assert not [pid for pid in pids if _lives(pid)]


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_two_runs_at_once_have_ports_of_their_own_and_a_taken_port_is_refused(bench):
    """Case A1."""
    both = [bench.start("train", "toy.yaml", f"--name=port{i}") for i in range(2)]
    for process in both:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    events = [next(e for e in run.events() if e["event"] == "attempt_started") for run in bench.store.list()]
    assert len({event["master_port"] for event in events}) == 2
    assert [event["world"] for event in events] == [2, 2]
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        refused = bench.mgpu("train", "toy.yaml", f"--set=cluster.port={port}")
    assert refused.returncode == 2
    assert str(port) in refused.stderr
    assert len(bench.store.list()) == 2


@pytest.mark.parametrize(
    "setting, words",
    [
        ("model=toy.py:Nett", ["model", "did you mean Net?"]),
        ("model=toys.py:Net", ["model", "toys.py"]),
        ("model=broken.py:Net", ["model", "broken.py", "ZeroDivisionError"]),
        ("data.train.args.path=missing.txt", ["data.train", "missing.txt"]),
        ("data.train.args.nn=1", ["data.train.args.nn", "did you mean n?"]),
        ("optimizer.args.lrr=1", ["optimizer.args.lrr", "did you mean lr?"]),
        ("batch.micro=3", ["batch", "micro 3", "size 4"]),
        ("devices=cpu:5", ["batch.micro", "4 micro batches", "5 replicas"]),
        ("devices=2", ["devices", "0 visible", "cpu:2"]),
        ("parallel.backend=nccl", ["parallel.backend", "nccl"]),
        ("parallel.strategy=dddp", ["parallel.strategy", "did you mean ddp?"]),
        ("parallel.strategy=tensorflow", ["parallel.strategy", "not available yet"]),
        ("cluster.engine=slurm", ["cluster.engine", "not available yet"]),
        ("script.path=missing.py", ["script"]),
    ],
)
def test_what_can_be_known_before_the_start_is_refused_before_the_start(bench, setting, words):
    """Must show 8, case L1: exit 2, the key, what to write instead; no run and no rank is left behind."""
    (bench.folder / "broken.py").write_text("1 / 0\n")
    done = bench.mgpu("train", "toy.yaml", f"--set={setting}", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2, done.stderr
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert bench.store.list() == []


def test_a_fault_in_the_file_is_told_with_its_line(bench):
    text = (
        (bench.folder / "toy.yaml").read_text().replace("toy.py:Data", "{target: toy.py:Data, args: {path: gone.txt}}")
    )
    (bench.folder / "toy.yaml").write_text(text)
    done = bench.mgpu("train", "toy.yaml")
    assert done.returncode == 2
    assert "toy.yaml:3:3: data.train" in done.stderr


def test_auto_trains_on_the_cpu_where_there_is_no_gpu_and_says_so(bench):
    """Case L1 (ii) and (iv): world as asked, and one rank equals plain torch bit for bit (see tests/train)."""
    done = bench.mgpu("train", "toy.yaml", "--devices=auto:2", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "running on CPU" in done.stderr
    assert json.loads(bench.latest.plan_path.read_text())["world"] == 2
    assert done.stdout.strip() == bench.latest.id


def test_a_script_runs_under_the_same_supervision(bench):
    """A torchrun script joins its group through the environment alone."""
    (bench.folder / "job.py").write_text(
        "import sys, torch.distributed as dist, torch\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.tensor([dist.get_rank() + 1.0]); dist.all_reduce(x)\n"
        "print('sum', x.item(), sys.argv[1:], flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    (bench.folder / "job.yaml").write_text("script: {path: job.py, args: [--lr, 0.1]}\ndevices: cpu:3\n")
    done = bench.mgpu("train", "job.yaml")
    assert done.returncode == 0, done.stderr
    assert [bench.latest.log_path(1, rank).read_text() for rank in range(3)] == ["sum 6.0 ['--lr', '0.1']\n"] * 3


def test_resume_refuses_a_complete_run_and_continues_on_other_devices(bench):
    """Case F8: 24 samples, the rest of them on other numbers of ranks, each once."""
    bench.train("--devices=cpu:2", duration="3 steps", task__args__trace="ids")
    refused = bench.mgpu("resume", "latest")
    assert refused.returncode == 2
    assert "complete" in refused.stderr
    for devices, duration in (("cpu:4", "4 steps"), ("cpu:3", "5 steps"), ("cpu:1", "6 steps")):
        done = bench.mgpu("resume", "latest", f"--devices={devices}", f"--set=duration={duration}")
        assert done.returncode == 0, done.stderr
    assert sorted(ids_of(bench.folder, "ids")) == list(range(24))
    whole = bench.train("--devices=cpu:1", duration="6 steps")
    runs = bench.store.list()
    for name, value in weights_of(runs[1]).items():
        torch.testing.assert_close(value, weights_of(whole)[name], rtol=1e-5, atol=1e-6)
    uneven = bench.mgpu("resume", runs[1].id, "--devices=cpu:3", "--set=batch.micro=2", "--set=duration=7 steps")
    assert uneven.returncode == 2
    assert "2 micro batches" in uneven.stderr and "3 replicas" in uneven.stderr


def test_nothing_is_left_of_a_run_whose_front_is_killed(bench):
    """The first half of case A2: front, node, spawner, ranks and loaders are gone, and the run shows lost."""
    process = bench.start("train", "toy.yaml", "--set=task.args.delay=0.2", "--set=data.workers=1")
    while not (bench.store.list() and bench.latest.last_step >= 2):
        assert process.poll() is None
    group = _descendants(process.pid)
    assert len(group) >= 6
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=20)
    for _ in range(500):
        if not any(_lives(pid) for pid in group):
            break
        signal.sigtimedwait([], 0.01)
    assert not [pid for pid in group if _lives(pid)]
    assert bench.latest.state is State.LOST


def _descendants(pid):
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]
