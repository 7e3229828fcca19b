"""What is recorded of a run's making, and that recording it never fails."""

import getpass
import json
import os
import socket
import subprocess
import sys
import types
from importlib import metadata

import pytest

from mgpu.runs import Run
from mgpu.runs import provenance as provenance_module
from mgpu.runs.provenance import collect, parse_git_status, write_provenance

STATUS = """\
# branch.oid 1f2e3d
# branch.head main
# branch.upstream origin/main
# branch.ab +1 -0
1 .M N... 100644 100644 100644 aaa bbb src/with blank.py
2 R. N... 100644 100644 100644 aaa bbb R100 new name.py\told name.py
u UU N... 100644 100644 100644 100644 aaa bbb ccc both.py
? notes.txt
"""


@pytest.fixture
def repository(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e@x", *arguments], check=True)

    git("init", "--quiet", "--initial-branch=trunk")
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "a.yaml").write_text("1")
    git("add", ".")
    git("commit", "--quiet", "--message=first")
    return tmp_path


def test_the_machine_and_the_software_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(provenance_module, "_PACKAGES", ("pydantic", "no-such-package"))
    found = collect(["mgpu", "train", "a.yaml"], "a.yaml")
    assert found["command"] == ["mgpu", "train", "a.yaml"]
    assert found["directory"] == str(tmp_path)
    assert (found["host"], found["user"]) == (socket.gethostname(), getpass.getuser())
    assert found["python"]["executable"] == sys.executable
    assert found["packages"]["pydantic"] == metadata.version("pydantic")
    assert found["cpu"]["allowed"] == sorted(os.sched_getaffinity(0))
    with open("/proc/meminfo") as lines:
        kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))
    assert found["cpu"]["memory_bytes"] == kibibytes * 1024
    assert found["git"] == {"spec": None, "directory": None}
    assert found["packages"]["no-such-package"] is None  # an answer, no fault
    assert not [fault for fault in found["not_found"] if not fault.startswith("GPUs: ")]


def test_it_is_written_as_json(tmp_path):
    run = Run(tmp_path)
    write_provenance(run, ["mgpu"], "a.yaml")
    assert json.loads(run.provenance_path.read_text())["command"] == ["mgpu"]


def test_torch_is_described_without_being_imported():
    check = (
        "import sys; from mgpu.runs.provenance import collect; found = collect([], 'a.yaml');"
        "assert found['packages']['torch']; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_the_environment_shows_what_matters_and_no_secret(monkeypatch):
    monkeypatch.setattr(os, "environ", {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "SLURM_JWT_TOKEN": "abc",
        "TORCH_api_key": "abc",
        "HOME": "/root",
        "XCUDA_A": "1",
    })  # fmt: skip
    assert collect([], "a.yaml")["environment"] == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "SLURM_JWT_TOKEN": "(hidden)",
        "TORCH_api_key": "(hidden)",
    }


def test_git_status_is_read_entry_by_entry():
    assert parse_git_status(STATUS) == {
        "commit": "1f2e3d",
        "branch": "main",
        "dirty": True,
        "changed": 3,
        "untracked": 1,
        "changes": [".M src/with blank.py", "R. new name.py", "UU both.py", "?? notes.txt"],
    }


def test_a_head_without_branch_or_commit_is_null():
    found = parse_git_status("# branch.oid (initial)\n# branch.head (detached)\n")
    assert (found["commit"], found["branch"], found["dirty"]) == (None, None, False)


def test_many_changes_are_counted_and_the_first_are_shown():
    found = parse_git_status("".join(f"? {number}\n" for number in range(30)))
    assert (found["untracked"], len(found["changes"])) == (30, 20)


def test_the_spec_and_the_working_directory_each_have_a_git_state(repository, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    found = collect([], str(repository / "specs" / "a.yaml"))["git"]
    head = subprocess.run(["git", "-C", repository, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert found["directory"] is None
    assert (found["spec"]["commit"], found["spec"]["branch"]) == (head.stdout.strip(), "trunk")
    assert (found["spec"]["root"], found["spec"]["dirty"]) == (str(repository), False)
    (repository / "specs" / "a.yaml").write_text("2")
    (repository / "new.py").write_text("")
    monkeypatch.chdir(repository)
    found = collect([], "specs/a.yaml")["git"]
    assert found["spec"] == found["directory"]
    assert found["spec"]["changes"] == [".M specs/a.yaml", "?? new.py"]


def test_one_work_tree_is_asked_once(repository, monkeypatch):
    asked = []
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **rest: asked.append(command) or real(command, **rest))
    monkeypatch.chdir(repository)
    collect([], "specs/a.yaml")
    assert len([command for command in asked if command[0] == "git"]) == 1


def raising(error):
    def call(*_, **__):
        raise error

    return call


@pytest.mark.parametrize(
    "error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 2), subprocess.CalledProcessError(128, "git")]
)
def test_git_that_is_missing_slow_or_unwilling_is_null(repository, monkeypatch, error):
    monkeypatch.setattr(provenance_module.subprocess, "run", raising(error))
    monkeypatch.chdir(repository)
    assert collect([], "specs/a.yaml")["git"] == {"spec": None, "directory": None}


def test_whatever_cannot_be_found_is_null(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", raising(OSError()))
    monkeypatch.setattr(getpass, "getuser", raising(KeyError("uid not found: 1234")))
    monkeypatch.setattr(os, "sched_getaffinity", raising(AttributeError()))
    monkeypatch.setattr(os, "sysconf", raising(ValueError()))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    found = collect(["mgpu"], "a.yaml")
    assert (found["host"], found["user"], found["directory"], found["gpu"]) == (None, None, None, None)
    assert (found["cpu"]["allowed"], found["cpu"]["memory_bytes"]) == (None, None)
    reasons = dict(fault.split(": ", 1) for fault in found["not_found"])
    assert reasons["host"] == "OSError: "
    assert reasons["user"] == "KeyError: 'uid not found: 1234'"
    assert reasons["GPUs"].startswith("ModuleNotFoundError")
    assert {"directory", "allowed CPUs", "memory"} <= set(reasons)


def test_gpus_are_told_by_name_and_driver(monkeypatch):
    fake = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlSystemGetDriverVersion=lambda: "570.1",
        nvmlDeviceGetName=lambda device: [b"NVIDIA A100", "NVIDIA H100"][device],
        nvmlDeviceGetUUID=raising(RuntimeError("not supported")),
        nvmlDeviceGetMemoryInfo=lambda device: types.SimpleNamespace(total=80 << 30),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    found = collect([], "a.yaml")["gpu"]
    assert found["driver"] == "570.1"
    assert [device["name"] for device in found["devices"]] == ["NVIDIA A100", "NVIDIA H100"]
    assert found["devices"][0] == {"name": "NVIDIA A100", "uuid": None, "memory_bytes": 80 << 30}
