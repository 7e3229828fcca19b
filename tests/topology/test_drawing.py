"""The picture: well-formed, complete, nothing outside its frame."""

import builtins
import xml.etree.ElementTree as ET

import pytest
from matrices import BRIDGED, DGX1V, MACHINES, render

from mgpu.errors import Refusal
from mgpu.topology import NumaNode, Topology
from mgpu.topology.drawing import svg, write_png
from mgpu.topology.layout import lay_out
from mgpu.topology.presets import preset

SVG = "{http://www.w3.org/2000/svg}"
DRAWN = {
    **{name: Topology.parse(render(machine)) for name, machine in MACHINES.items()},
    "dgx-h100": preset("dgx-h100"),
    "dgx-2": preset("dgx-2"),
    "none": Topology((), (0, 1), numa=(NumaNode(0, (0, 1)),), trouble="no <driver> & none"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_the_picture_shows_every_gpu_node_and_nic_inside_its_frame(name):
    topology = DRAWN[name]
    root = ET.fromstring(svg(topology))
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert [word for word in words if word in {f"GPU{gpu.index}" for gpu in topology.gpus}] == [
        f"GPU{gpu.index}" for gpu in topology.gpus
    ]
    assert all(f"NUMA node {gpu.numa}" in words for gpu in topology.gpus if gpu.numa is not None)
    assert all(nic.name in words for nic in topology.nics)
    width, height = float(root.get("width")), float(root.get("height"))
    for box in root.iter(f"{SVG}rect"):
        if not box.get("width").endswith("%"):
            assert float(box.get("x")) >= 0 and float(box.get("x")) + float(box.get("width")) <= width
            assert float(box.get("y")) >= 0 and float(box.get("y")) + float(box.get("height")) <= height
    assert all(0 < float(word.get("y")) <= height for word in root.iter(f"{SVG}text"))


def test_boxes_do_not_overlap():
    for topology in DRAWN.values():
        plan = lay_out(topology)
        boxes = [(x, plan.gpu_top, 96, 58) for x in plan.gpu_x.values()] + [(p.x, p.y, p.width, 20) for p in plan.ports]
        for place, (x, y, width, height) in enumerate(boxes):
            for x2, y2, width2, height2 in boxes[:place]:
                assert x + width <= x2 or x2 + width2 <= x or y + height <= y2 or y2 + height2 <= y


def test_wider_links_have_wider_lines():
    root = ET.fromstring(svg(Topology.parse(render(DGX1V))))
    widths = {float(path.get("stroke-width")) for path in root.iter(f"{SVG}path")}
    assert len(list(root.iter(f"{SVG}path"))) == 16
    assert len(widths) == 2


def test_chosen_gpus_show_their_rank():
    topology = Topology.parse(render(BRIDGED))
    words = [element.text for element in ET.fromstring(svg(topology, (2, 1))).iter(f"{SVG}text")]
    assert words[words.index("GPU2") + 1] == "rank 0"
    assert words[words.index("GPU1") + 1] == "rank 1"


def test_png_without_cairosvg_is_refused(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name == "cairosvg":
            raise ImportError("No module named 'cairosvg'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(Refusal, match="--png needs cairosvg") as caught:
        write_png(svg(DRAWN["none"]), tmp_path / "a.png")
    assert "mgpu-run[plots]" in caught.value.hint
