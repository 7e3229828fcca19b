"""Whether memory was the reason, by cgroup files of both versions."""

import os

import pytest

from mgpu.launch import memory
from mgpu.launch.memory import Group, explanation, groups_of, refreshed, size_text


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    monkeypatch.setattr(memory, "_KERNEL_LOG", str(tmp_path / "no-kernel-log"))
    return tmp_path


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return str(folder)


def test_version_2_counts_kills_and_tells_the_limit(root):
    path = write(root / "job", memory__events="low 0\noom 1\noom_kill 1\n", memory__max="104857600\n")
    before = refreshed([path])
    assert before == {path: Group(1, 100 << 20)}
    assert explanation(2**30, before, 90 << 20) == ""
    write(root / "job", memory__events="low 0\noom 2\noom_kill 2\n")
    text = explanation(2**30, before, 90 << 20)
    assert text == "out of memory: the kernel killed it with 90.0 MiB in use of the 100.0 MiB that its cgroup may use"


def test_version_1_likewise_and_without_a_limit(root):
    path = write(
        root / "memory" / "job",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        memory__limit_in_bytes="9223372036854771712\n",
    )
    assert refreshed([path]) == {path: Group(3, None)}
    write(root / "memory" / "job", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert explanation(2**30, {path: Group(3, None)}, 1 << 30).endswith("killed it with 1.0 GiB in use")


def test_the_kernels_log_tells_it_by_the_process(root, monkeypatch):
    log = root / "log"
    log.write_text("3,1,1,-;Memory cgroup out of memory: Killed process 4711 (python) total-vm:9kB, anon-rss:2048kB, x")
    monkeypatch.setattr(memory, "_KERNEL_LOG", str(log))
    assert memory.killed_by_kernel(4711) == 2 << 20
    assert memory.killed_by_kernel(471) is None
    assert explanation(4711, {}, 0) == "out of memory: the kernel killed it with 2.0 MiB in use"


def test_what_cannot_be_read_explains_nothing(root):
    assert refreshed([str(root / "gone")]) == {}
    assert groups_of(2**30) == {}
    assert groups_of(os.getpid()) == {}
    assert explanation(2**30, {}, 0) == ""


def test_sizes_read_well():
    assert [size_text(n) for n in (0, 2048, 3 << 19, 5 << 30)] == ["0 B", "2 KiB", "1.5 MiB", "5.0 GiB"]
