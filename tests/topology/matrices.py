"""Machines written as tables, and every way that drivers, terminals and people write them down."""

import re
from dataclasses import dataclass, field

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


@dataclass
class Machine:
    """`links` by pair; `numa` and `cpus` are the cells as printed ('' for an empty one); `nics` are rows of classes."""

    links: list[list[str]]
    numa: list[str] = field(default_factory=list)
    cpus: list[str] = field(default_factory=list)
    nics: dict[str, list[str]] = field(default_factory=dict)
    memory_nodes: list[str] = field(default_factory=list)

    @property
    def count(self):
        return len(self.links)


def matrix(text):
    """`- NV1 SYS / NV1 - ...` as rows, X on the diagonal."""
    return [cells.replace("-", "X").split() for cells in text.split("/")]


def render(
    machine,
    style="tabs",
    affinity=("cpu", "numa", "id"),
    nics_first=False,
    ansi="",
    legend=True,
    merged=(),
    indent="",
    header=True,
):
    """The text of `nvidia-smi topo -m`. `merged` holds (gpu, cell) pairs whose cell is glued to the next one."""
    gpus = [f"GPU{index}" for index in range(machine.count)]
    nics = list(machine.nics)
    titles = {"cpu": "CPU Affinity", "numa": "NUMA Affinity", "id": "GPU NUMA ID"}
    columns = [*nics, *gpus] if nics_first else [*gpus, *nics]
    names = "\t".join([*columns, *(titles[part] for part in affinity)])
    opened, closed = {"": ("", ""), "codes": ("\x1b[4m", "\x1b[0m"), "remains": ("[4m", "[0m")}[ansi]
    lines = [f"\t{opened}{names}{closed}"] if header else []
    for index, label in enumerate(gpus):
        gpu_cells = [f" {cell} " if cell == "X" else cell for cell in machine.links[index]]
        nic_cells = [machine.nics[nic][index] for nic in nics]
        cells = [*nic_cells, *gpu_cells] if nics_first else [*gpu_cells, *nic_cells]
        for place in sorted((cell for gpu, cell in merged if gpu == index and cell + 1 < len(cells)), reverse=True):
            cells[place : place + 2] = [cells[place].strip() + cells[place + 1].strip()]
        ends = {
            "cpu": machine.cpus[index] if machine.cpus else "",
            "numa": machine.numa[index] if machine.numa else "",
            "id": "\t" + (machine.memory_nodes[index] if machine.memory_nodes else "N/A"),
        }
        lines.append("\t".join([label, *cells, *(ends[part] for part in affinity)]))
    for place, nic in enumerate(nics):
        own = [f" {'X'} " if place == other else "SYS" for other in range(len(nics))]
        cells = [*own, *machine.nics[nic]] if nics_first else [*machine.nics[nic], *own]
        lines.append("\t".join([nic, *cells]) + "\t" * len(affinity))
    text = "\n".join(f"{indent}{STYLES[style](line)}" for line in lines) + "\n"
    return text + (LEGEND if legend else "")


STYLES = {
    "tabs": lambda line: line,
    "blanks": lambda line: line.expandtabs(8),
    "padded": lambda line: line.expandtabs(8) + " " * 40,
    "single": lambda line: re.sub(r"\s+", " ", line.replace("Affinity\t", "Affinity ")),
    "narrow": lambda line: "  ".join(
        cell.strip().ljust(4) for cell in line.split("\t") if cell or line.startswith("\t")
    ),
    "bare": lambda line: "\t".join(cell.strip() for cell in line.split("\t")),
}
KEEPS_EMPTY_CELLS = ("tabs", "blanks", "padded", "bare")

DGX1V = Machine(
    matrix(
        "- NV1 NV1 NV2 NV2 SYS SYS SYS / NV1 - NV2 NV1 SYS NV2 SYS SYS / NV1 NV2 - NV2 SYS SYS NV1 SYS /"
        "NV2 NV1 NV2 - SYS SYS SYS NV1 / NV2 SYS SYS SYS - NV1 NV1 NV2 / SYS NV2 SYS SYS NV1 - NV2 NV1 /"
        "SYS SYS NV1 SYS NV1 NV2 - NV2 / SYS SYS SYS NV1 NV2 NV1 NV2 -"
    ),
    numa=["0"] * 4 + ["1"] * 4,
    cpus=["0-19,40-59"] * 4 + ["20-39,60-79"] * 4,
    nics={"mlx5_0": ["PIX", "PIX", "PHB", "PHB"] + ["SYS"] * 4, "mlx5_1": ["SYS"] * 4 + ["PIX", "PIX", "PHB", "PHB"]},
)
BRIDGED = Machine(
    matrix("- SYS SYS SYS / SYS - NV4 PHB / SYS NV4 - PHB / SYS PHB PHB -"),
    numa=["1", "0", "0", "0"],
    cpus=["8-15,24-31", "0-7,16-23", "0-7,16-23", "0-7,16-23"],
)
DESKTOP = Machine(matrix("- PHB / PHB -"), numa=["N/A"] * 2, cpus=["0-23"] * 2)
SINGLE = Machine(matrix("-"), numa=["0"], cpus=["0-11"])
TRAY = Machine(
    matrix("- NV18 NV18 NV18 / NV18 - NV18 NV18 / NV18 NV18 - NV18 / NV18 NV18 NV18 -"),
    numa=["0,3-9,11-17"] * 2 + ["1,19-25,27-33"] * 2,
    cpus=["0-71"] * 2 + ["72-143"] * 2,
    nics={"NIC0": ["SYS"] * 4, "NIC1": ["SYS"] * 4},
    memory_nodes=["2", "10", "18", "26"],
)
CASE = Machine(
    matrix("- NV12 / NV12 -"),
    numa=["0", "N/A"],
    cpus=["0-31,64-95", "0-31,64-95"],
    nics={"NIC0": ["PXB", "SYS"], "NIC1": ["SYS", "PXB"]},
)
MACHINES = {
    "dgx1v": DGX1V, "bridged": BRIDGED, "desktop": DESKTOP, "single": SINGLE, "tray": TRAY, "two-gpus-two-nics": CASE,
}  # fmt: skip
