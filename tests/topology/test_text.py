"""The text of nvidia-smi: every way of writing one machine reads back the same; anything else is a TopologyError."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrices import (
    BRIDGED,
    CASE,
    DESKTOP,
    DGX1V,
    KEEPS_EMPTY_CELLS,
    LEGEND,
    MACHINES,
    SINGLE,
    STYLES,
    TRAY,
    Machine,
    render,
)

from mgpu.errors import TopologyError
from mgpu.topology import Topology
from mgpu.topology.cpulist import parse_list


def first_node(cell):
    return int(re.match(r"\d+", cell)[0]) if cell[:1].isdigit() else None


def assert_same(topology, machine, affinity=("cpu", "numa", "id")):
    assert [list(row) for row in topology.links] == machine.links
    assert [list(nic.links) for nic in topology.nics] == list(machine.nics.values())
    if "numa" in affinity:
        assert [gpu.numa for gpu in topology.gpus] == [first_node(cell) for cell in machine.numa]
    if "cpu" in affinity:
        assert [gpu.cpus for gpu in topology.gpus] == [None if c == "N/A" else parse_list(c) for c in machine.cpus]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("options", [
    {}, {"nics_first": True}, {"ansi": "codes"}, {"ansi": "remains"}, {"legend": False}, {"indent": "        "},
    {"indent": "# "}, {"affinity": ("cpu", "numa")}, {"affinity": ("cpu",)}, {"affinity": ()},
], ids=str)  # fmt: skip
def test_every_way_of_writing_a_machine_reads_back_the_same(name, style, options):
    machine = MACHINES[name]
    topology = Topology.parse(render(machine, style, **options))
    assert_same(topology, machine, options.get("affinity", ("cpu", "numa", "id")))


lists = st.sampled_from(["0-15", "0-31,64-95", "16-31", "48-63,176-191", "7", "0,2,4,6", "64-127,192-254", "N/A"])
kinds = st.sampled_from(["SYS", "NODE", "PHB", "PXB", "PIX", "NV1", "NV2", "NV4", "NV12", "NV18"])


@st.composite
def machines(draw):
    count = draw(st.integers(1, 16))
    links = [["X"] * count for _ in range(count)]
    for row in range(count):
        for column in range(row):
            links[row][column] = links[column][row] = draw(kinds)
    return Machine(
        links,
        numa=[draw(st.sampled_from(["0", "1", "8", "N/A", "0,3-9", "12"])) for _ in range(count)],
        cpus=[draw(lists) for _ in range(count)],
        nics={f"NIC{place}": [draw(kinds) for _ in range(count)] for place in range(draw(st.integers(0, 4)))},
    )


@settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
@given(
    machine=machines(),
    style=st.sampled_from(list(STYLES)),
    affinity=st.sampled_from([(), ("cpu",), ("cpu", "numa"), ("cpu", "numa", "id")]),
    nics_first=st.booleans(),
    ansi=st.sampled_from(["", "codes", "remains"]),
    indent=st.sampled_from(["", "    ", "# ", "> "]),
    merged=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 19)), max_size=4, unique=True),
    empty=st.sets(st.integers(0, 15), max_size=4),
)
def test_a_random_machine_reads_back_the_same(machine, style, affinity, nics_first, ansi, indent, merged, empty):
    """Must show 2."""
    if style in KEEPS_EMPTY_CELLS:
        machine.cpus = ["" if place in empty else cell for place, cell in enumerate(machine.cpus)]
    if style in {"blanks", "padded"}:
        merged = []  # a glued cell of 8 letters and more shifts the tab stops behind it: then only words can tell
    apart = [pair for pair in merged if (pair[0], pair[1] - 1) not in merged]
    text = render(machine, style, affinity, nics_first, ansi, merged=apart, indent=indent)
    assert_same(Topology.parse(text), machine, affinity)


def test_missing_affinities_are_told_from_hidden_ones():
    """An empty cell is a cpuset that hides the CPUs; no column at all, or N/A, is unknown."""
    hidden = Machine(DESKTOP.links, numa=["0", "1"], cpus=["", "1"])
    for style in KEEPS_EMPTY_CELLS:
        assert [gpu.cpus for gpu in Topology.parse(render(hidden, style)).gpus] == [(), (1,)]
        assert [gpu.numa for gpu in Topology.parse(render(hidden, style)).gpus] == [0, 1]
    assert [gpu.cpus for gpu in Topology.parse(render(DESKTOP, affinity=())).gpus] == [None, None]
    nothing = Machine(DESKTOP.links, numa=["", ""], cpus=["", ""])
    assert [(gpu.cpus, gpu.numa) for gpu in Topology.parse(render(nothing)).gpus] == [((), None)] * 2
    shifted = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-11\t\tN/A\t\tN/A\n"
    assert Topology.parse(shifted).gpus[0].cpus == tuple(range(12))


def test_case_j4():
    topology = Topology.parse(render(CASE, "blanks", ansi="codes"))
    assert len(topology.gpus[0].cpus) == 64
    assert [gpu.numa for gpu in topology.gpus] == [0, None]
    assert topology.links == (("X", "NV12"), ("NV12", "X"))
    assert [nic.name for nic in topology.nics] == ["NIC0", "NIC1"]
    assert [nic.name for nic in topology.near(1)] == ["NIC1"]


def test_a_memory_only_node_is_kept_apart_from_the_node_of_the_cpus():
    topology = Topology.parse(render(TRAY, "blanks"))
    assert [gpu.memory_node for gpu in topology.gpus] == [2, 10, 18, 26]
    assert [(node.id, len(node.cpus)) for node in topology.numa] == [
        (0, 72),
        (1, 72),
        (2, 0),
        (10, 0),
        (18, 0),
        (26, 0),
    ]


def test_nic_names_come_from_the_header_or_the_nic_legend():
    assert [nic.name for nic in Topology.parse(render(DGX1V)).nics] == ["mlx5_0", "mlx5_1"]
    told = render(CASE) + "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: rocep4s0f1\n"
    assert [nic.name for nic in Topology.parse(told).nics] == ["mlx5_0", "rocep4s0f1"]


def test_headers_that_lost_a_tab_or_themselves():
    lines = render(DGX1V, legend=False).splitlines()
    glued = "\n".join([lines[0].strip().replace("\tCPU", " CPU").replace("\tNUMA", " NUMA"), *lines[1:]])
    assert_same(Topology.parse(glued), DGX1V)
    assert_same(Topology.parse(lines[0].replace("mlx5_0\t", "mlx5_0") + "\n" + "\n".join(lines[1:])), DGX1V)
    assert_same(Topology.parse(render(SINGLE, header=False, legend=False)), SINGLE)
    assert_same(Topology.parse(render(BRIDGED, header=False, legend=False)), BRIDGED)


def test_a_row_wrapped_by_the_terminal_is_joined():
    lines = render(DGX1V, "blanks", legend=False).splitlines()
    wrapped = "\n".join(f"{line[:88].rstrip()}\n{line[88:].strip()}" for line in lines[:9])
    assert_same(Topology.parse(wrapped), DGX1V)


@pytest.mark.parametrize("prefix", ["0: ", "[1,0]<stdout>:", "node-17: "])
def test_what_launchers_put_before_each_line_is_skipped(prefix):
    text = "\n".join(prefix + line for line in render(BRIDGED, legend=False).splitlines())
    assert_same(Topology.parse(text), BRIDGED)


def test_line_ends_and_odd_blanks():
    assert_same(Topology.parse(render(BRIDGED).replace("\n", "\r\n")), BRIDGED)
    assert_same(Topology.parse("\ufeff" + render(BRIDGED, "blanks").replace(" ", "\u00a0")), BRIDGED)


def test_inside_a_report_names_and_rates_are_found():
    report = (
        "index, name, memory.total [MiB]\n0, NVIDIA RTX A6000, 49140 MiB\n1, NVIDIA RTX A6000, 49140 MiB\n"
        + render(DESKTOP)
        + "\nGPU 0: NVIDIA RTX A6000 (UUID: GPU-aaaa)\n\t Link 0: 14.062 GB/s\nGPU 1: NVIDIA RTX A6000 (UUID: GPU-bbbb)\n"
    )
    topology = Topology.parse(report)
    assert [gpu.name for gpu in topology.gpus] == ["NVIDIA RTX A6000"] * 2
    assert [gpu.uuid for gpu in topology.gpus] == ["GPU-aaaa", "GPU-bbbb"]
    assert topology.gpus[0].memory == 49140 * 1024 * 1024
    assert topology.per_link == 14.062


def p2p(count, states):
    """`nvidia-smi topo -p2p r`: rows start with a blank and end in a tab; states by pair, OK where not given."""
    names = [f"GPU{index}" for index in range(count)]
    lines = [" \t" + "\t".join(names) + "\t"]
    for row, name in enumerate(names):
        cells = ["X" if row == column else states.get(frozenset((row, column)), "OK") for column in range(count)]
        lines.append(f" {name}\t" + "\t".join(cells) + "\t")
    return "\n".join(lines) + "\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n"


def test_a_matrix_of_peer_access_is_joined_or_stands_alone():
    states = {frozenset((0, 1)): "GNS", frozenset((2, 3)): "CNS"}
    both = Topology.parse(render(BRIDGED) + "\n" + p2p(4, states))
    assert both.p2p[0] == ("X", "GNS", "OK", "OK")
    assert both.refused(2, 3) and not both.refused(0, 2)
    assert_same(both, BRIDGED)
    alone = Topology.parse(p2p(4, states).expandtabs(8))
    assert alone.links == () and alone.p2p == both.p2p
    other_machine = Topology.parse(render(BRIDGED) + "\n" + p2p(2, {}))
    assert other_machine.p2p == ()


def test_of_two_matrices_the_first_whole_one_counts():
    text = render(BRIDGED) + "\nhost2\n" + render(DESKTOP)
    assert_same(Topology.parse(text), BRIDGED)
    assert "first of 2" in Topology.parse(text).notes[0]
    cut = "\n".join(render(BRIDGED).splitlines()[:2]) + "\n\n" + render(DESKTOP)
    assert_same(Topology.parse(cut), DESKTOP)


def test_cut_rows_are_filled_from_their_mirror_image():
    lines = render(DGX1V, legend=False).splitlines()
    last = lines[8][: lines[8].index("X")].rstrip()
    topology = Topology.parse("\n".join([*lines[:8], last]))
    assert [list(row) for row in topology.links] == DGX1V.links
    assert topology.gpus[7].cpus is None and topology.gpus[7].numa is None
    assert topology.gpus[6].numa == 1


def test_an_incomplete_matrix_is_refused_and_says_what_is_missing():
    lines = render(DGX1V, legend=False).splitlines()
    with pytest.raises(
        TopologyError, match=r"incomplete matrix of 8 GPUs: 1 links are missing \(GPU6-GPU7\); no row of GPU6, GPU7"
    ):
        Topology.parse("\n".join(lines[:7]))
    with pytest.raises(TopologyError, match=r"incomplete matrix of 4 GPUs.*no row of GPU0, GPU1"):
        Topology.parse("\n".join(render(BRIDGED, legend=False).splitlines()[3:]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("PHB", "24.31"), "'24.31' is no link class"),
        (("\tPHB", "\tFOO"), "'FOO' is no link class"),
        (("CPU Affinity", "CPU"), "no column of nvidia-smi is called 'CPU'"),
        (("GPU1\tPHB\t X ", "GPU1\t X \tPHB"), "the X do not form a diagonal"),
        (("GPU1\tPHB\t X ", "GPU1\t X \t X "), "row GPU1 has 2 X"),
        ((" X ", "PIX"), "no row has the X"),
        (("0-23", "23-0"), "row GPU0, CPU affinity: '23-0': 23-0 is no range"),
        (("0-23", "some"), "row GPU0: 'some' is no affinity"),
        (("GPU1\tPHB", "GPU999\tPHB"), "no machine has 1000 GPUs"),
        (("\nLegend", "\nCPU\tPHB\tPHB\t X \nLegend"), "prints no row called CPU"),
    ],
)
def test_what_nvidia_smi_never_prints_is_refused(change, words):
    with pytest.raises(TopologyError, match=re.escape(words)):
        Topology.parse(render(DESKTOP).replace(*change))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the text is empty"),
        ("Failed to initialize NVML: Driver/library version mismatch\n", "Driver/library version mismatch"),
        ("bash: line 1: nvidia-smi: command not found\n", "nvidia-smi said: bash: line 1"),
        ("GPU 0: NVIDIA H100 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n", "nvidia-smi nvlink -s"),
        ("GPU 0: NVIDIA H100 (UUID: GPU-1)\n", "nvidia-smi -L"),
        ("The GPUs that have an affinity with CPU 48 are:\n0, 1\n", "nvidia-smi topo -c"),
        ("0, NVIDIA A100, 81920 MiB, 8.0\n", "a query"),
        ("| | GPU0 | GPU1 |\n|---|---|---|\n| GPU0 | X | NV4 |\n| GPU1 | NV4 | X |\n", "drawn borders"),
        ("nothing\n" * 9, "no GPU matrix in these 9 lines"),
    ],
)
def test_texts_without_a_matrix_say_what_they_are(text, words):
    with pytest.raises(TopologyError, match=re.escape(words)):
        Topology.parse(text)


def test_classes_of_other_vendors_are_kept():
    text = render(Machine([["X", "IX4"], ["IX4", "X"]]), affinity=())
    assert Topology.parse(text).links[0][1] == "IX4"
    own = render(Machine([["X", "QQ"], ["QQ", "X"]]), affinity=()).replace("  PIX", "  QQ   = Two cables\n  PIX")
    topology = Topology.parse(own)
    assert topology.links[0][1] == "QQ"
    assert any("unknown link class QQ" in note for note in topology.notes)


def test_notes_on_what_the_text_leaves_out():
    no_fabric = LEGEND.replace("  NV#  = Connection traversing a bonded set of # NVLinks\n", "")
    topology = Topology.parse(render(DESKTOP, legend=False) + no_fabric)
    assert any("PCI-only matrix" in note for note in topology.notes)
    assert Topology.parse(render(DESKTOP)).notes == ()
    uneven = render(DESKTOP).replace("GPU1\tPHB", "GPU1\tSYS")
    topology = Topology.parse(uneven)
    assert any("one way" in note for note in topology.notes)
    assert topology.link(0, 1) == topology.link(1, 0) == "SYS"
