"""`mgpu topo` as a user and a script run it."""

import json
import os
import stat
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

BRIDGED = """\
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tSYS\tSYS\tSYS\t8-15,24-31\t1\t\tN/A
GPU1\tSYS\t X \tNV4\tPIX\t0-7,16-23\t0\t\tN/A
GPU2\tSYS\tNV4\t X \tPHB\t0-7,16-23\tN/A\t\tN/A
NIC0\tSYS\tPIX\tPHB\t X \t\t\t
"""
WITHOUT_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('torch', 'numpy'):
            raise ImportError(name + ' is blocked in this test')
sys.meta_path.insert(0, Block())
from mgpu.cli.app import main
main()
"""


def topo(*arguments, text=None, **environment):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "topo", *map(str, arguments)], input=text, text=True, capture_output=True,
        check=False, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "machine.txt"
    path.write_text(BRIDGED)
    return path


@pytest.fixture
def bare(tmp_path):
    """An environment whose PATH has no vendor's tool, and a function that puts one there."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def install(name, script):
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    environ = {"PATH": f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin", "CUDA_VISIBLE_DEVICES": "0,1,2"}
    return environ, install


def test_json_of_a_file_and_of_standard_input(file):
    from_file = json.loads(topo("--file", file, "--json").stdout)
    from_input = json.loads(topo("--file", "-", "--json", text=BRIDGED).stdout)
    assert from_file == from_input
    assert [gpu["index"] for gpu in from_file["gpus"]] == [0, 1, 2]
    assert [gpu["numa"] for gpu in from_file["gpus"]] == [1, 0, None]
    assert from_file["gpus"][1]["cpus"] == [*range(8), *range(16, 24)]
    assert from_file["gpus"][1]["nics"] == ["NIC0"]
    assert from_file["links"] == [["X", "SYS", "SYS"], ["SYS", "X", "NV4"], ["SYS", "NV4", "X"]]
    assert from_file["bandwidth"][1][2] == 100
    assert "pick" not in from_file


def test_pick_prints_the_setting_for_scripts_and_the_reason_for_people(file):
    done = topo("--file", file, "--pick", 2)
    assert done.stdout == "CUDA_VISIBLE_DEVICES=1,2 CUDA_DEVICE_ORDER=PCI_BUS_ID\n"
    assert "ring   1-2" in done.stderr
    assert "the first 2 by index would have SYS" in done.stderr
    assert "rank 0  GPU1  CPUs" in done.stderr
    picked = json.loads(topo("--file", file, "--pick", 2, "--json").stdout)["pick"]
    assert (picked["gpus"], picked["ring"], picked["weakest"]) == ([1, 2], [1, 2], "NV4")
    assert picked["cuda_visible_devices"] == "1,2"
    assert len(picked["cpus"]) == 2


def test_the_report_shows_matrix_legend_nodes_and_warnings(file):
    done = topo("--file", file, NO_COLOR="1")
    lines = done.stdout.splitlines()
    assert next(line.split() for line in lines if line.startswith("GPU1")) == ["GPU1", "SYS", "X", "NV4"]
    assert any(line.split()[:2] == ["NV4", "4"] for line in lines)
    assert "NUMA node 0" in lines and "NUMA node 1" in lines
    assert any(line.startswith("NIC0") and "GPU1 (PIX)" in line for line in lines)
    assert any(line.startswith("! GPU0 off the fabric") for line in lines)
    assert "\x1b[" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text", "words"),
    [
        (["--file", "-"], "Failed to initialize NVML: Unknown Error\n", "Failed to initialize NVML: Unknown Error"),
        (["--file", "-"], BRIDGED.replace("NV4", "24.3"), "'24.3' is no link class"),
        (["--file", "-"], "\n".join(BRIDGED.splitlines()[:2]), "incomplete matrix of 3 GPUs"),
        (["--file", "nowhere.txt"], None, "nowhere.txt cannot be read: No such file or directory"),
        (["--file", "-", "--pick", "4"], BRIDGED, "4 GPUs asked for, this machine has 3 GPUs"),
        (["--on", "dgx-h10"], None, "did you mean dgx-h100?"),
        (["--on", "dgx-h100", "--file", "-"], BRIDGED, "both name a machine"),
        (["--on", "dgx-h100", "--svg", "no/such/folder.svg"], None, "no/such/folder.svg cannot be written"),
    ],
)
def test_refusals_end_with_2_and_say_why(arguments, text, words):
    done = topo(*arguments, text=text)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr and "Traceback" not in done.stderr


def test_text_of_powershell(file):
    file.write_bytes(BRIDGED.encode("utf-16"))
    assert len(json.loads(topo("--file", file, "--json").stdout)["gpus"]) == 3


def test_a_machine_without_gpus(bare):
    """Must show 4. (Where this runs on a machine with NVML, there are GPUs to see.)"""
    environ, _ = bare
    shown, data = topo(**environ), topo("--json", **environ)
    assert (shown.returncode, data.returncode) == (0, 0)
    value = json.loads(data.stdout)
    assert value["cpus"] == sorted(os.sched_getaffinity(0))
    assert value["numa"]
    if not value["gpus"]:
        assert value["message"].startswith("no GPU: ")
        assert value["message"] in shown.stdout
        assert "NUMA node 0: CPUs" in shown.stdout


def test_a_broken_driver_is_passed_on(bare):
    environ, install = bare
    install("nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    value = json.loads(topo("--json", **environ).stdout)
    if not value["gpus"]:
        assert "mismatch" in value["message"] or "NVIDIA driver" in value["message"]


def test_pictures(file, tmp_path):
    picture = tmp_path / "machine.svg"
    assert topo("--file", file, "--pick", 2, "--svg", picture).returncode == 0
    words = [element.text for element in ET.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert {"GPU0", "GPU1", "GPU2", "NV4", "rank 0", "rank 1"} <= set(words)


def test_presets_are_listed_and_shown():
    assert "aws:p5.48xlarge" in topo("--on", "list").stdout.split()
    value = json.loads(topo("--on", "dgx-h100", "--json", "--pick", 4).stdout)
    assert (value["pick"]["gpus"], value["pick"]["weakest"]) == ([0, 1, 2, 3], "NV18")
    assert len(value["nics"]) == 8


def test_help_shows_an_example():
    assert "mgpu topo --pick 4" in topo("--help", COLUMNS="200").stdout.split("Example:")[1]
