"""This machine: CUDA_VISIBLE_DEVICES, and the tools in place of NVML."""

import os
import stat

import pytest
from matrices import BRIDGED, render

from mgpu.topology import Gpu, Topology
from mgpu.topology.detection import detect, visible

GPUS = (
    *(Gpu(index, f"GPU-{index}{index}aa", "", 0) for index in range(4)),
    Gpu(4, "MIG-1", "", 0, parent="GPU-44aa", aliases=("MIG-GPU-44aa/1/0",)),
    Gpu(4, "MIG-2", "", 0, parent="GPU-44aa", aliases=("MIG-GPU-44aa/2/0",)),
)


@pytest.mark.parametrize(
    ("setting", "positions"),
    [
        (None, (0, 1, 2, 3, 4, 5)), ("", ()), ("-1", ()), ("NoDevFiles", ()), ("3,1", (3, 1)), (" 2 , 0", (2, 0)),
        ("0,9,1", (0,)), ("0,0,1", (0,)), ("1,-1,0", (1,)), ("GPU-22aa,GPU-00aa", (2, 0)), ("GPU-3", (3,)), ("GPU-", ()),
        ("MIG-2", (5,)), ("MIG-GPU-44aa/1/0", (4,)), ("4", (4,)), ("GPU-9", ()),
    ],
)  # fmt: skip
def test_what_cuda_visible_devices_allows(setting, positions):
    """NVIDIA's CUDA C++ Programming Guide, appendix on environment variables."""
    assert visible(GPUS, setting) == positions


def fake_tool(folder, name, text, code=0):
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def only_tools(tmp_path, monkeypatch):
    """No NVML library; nvidia-smi is what a test puts into the folder."""
    pynvml = pytest.importorskip("pynvml")
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: (_ for _ in ()).throw(pynvml.NVMLError_LibraryNotFound()))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return tmp_path


def test_nvidia_smi_is_read_where_nvml_cannot_be_loaded(only_tools):
    names = "\n".join(f"GPU {index}: NVIDIA A100 (UUID: GPU-{index}a)" for index in range(4))
    fake_tool(only_tools, "nvidia-smi", names + "\n" + render(BRIDGED))
    topology = detect({"CUDA_VISIBLE_DEVICES": "2,1"})
    assert [gpu.uuid for gpu in topology.gpus] == ["GPU-2a", "GPU-1a"]
    assert topology.links == (("X", "NV4"), ("NV4", "X"))
    assert topology.cpus == tuple(sorted(os.sched_getaffinity(0)))


def test_a_broken_driver_is_passed_on(only_tools):
    fake_tool(only_tools, "nvidia-smi", "Failed to initialize NVML: Driver/library version mismatch", 18)
    topology = detect({})
    assert topology.gpus == ()
    assert "Driver/library version mismatch" in topology.trouble
    assert topology.numa


def test_rocm_smi_is_read_too(only_tools):
    table = "==== Link Type between two GPUs ====\n       GPU0  GPU1\nGPU0   0     XGMI\nGPU1   XGMI  0"
    fake_tool(only_tools, "rocm-smi", table)
    assert detect({}).links == (("X", "XGMI"), ("XGMI", "X"))


def test_without_any_there_is_no_gpu(only_tools):
    topology = Topology.detect({})
    assert (topology.gpus, topology.links) == ((), ())
    assert "no NVIDIA driver" in topology.trouble


def test_all_gpus_hidden_is_told(only_tools):
    fake_tool(only_tools, "nvidia-smi", render(BRIDGED))
    topology = detect({"CUDA_VISIBLE_DEVICES": ""})
    assert topology.gpus == ()
    assert "allows 0 of 4" in topology.trouble
