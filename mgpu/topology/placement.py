"""Which GPUs to take, and in what order: free ones first, then the ones that talk best.

Sets are compared by, in this order: fewest busy GPUs; the best weakest link inside the innermost groups of a mesh, if there
is one; the weakest link of the best ring; fewest NUMA nodes; the sum of the ring's links; the sum of all links; what is left
for the next job; the lowest indices. Up to 8 GPUs every set is tried, above a search shows how far it could be from the best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from mgpu.errors import TopologyError
from mgpu.topology import links
from mgpu.topology.ring import EXACT_UP_TO, best_ring, measure, ring_links
from mgpu.topology.scale import Scale
from mgpu.topology.search import search
from mgpu.topology.values import Topology

_MOST_RINGS = 8_000


@dataclass(frozen=True)
class Placement:
    """Chosen GPUs. `positions` (in `Topology.gpus`) and `ring` (indices) are in rank order; `gpus` are the indices, sorted.

    `weakest` is the class of the ring's weakest link and `bandwidth` its estimate in GB/s: None and 0 for a single GPU and
    where links are unknown. `proven` tells that no other choice has a better weakest link; `bound` is then the same class,
    else the best that might exist. `devices` is what CUDA_VISIBLE_DEVICES should be, UUIDs where they are known.
    """

    positions: tuple[int, ...]
    gpus: tuple[int, ...]
    ring: tuple[int, ...]
    weakest: str | None
    bandwidth: float
    proven: bool
    bound: str | None
    devices: tuple[str, ...]
    reason: str


def pick(topology: Topology, count: int, *, inner: int = 1) -> Placement:
    """The best `count` GPUs of a machine. `inner` is the size of the mesh's innermost dimension (tensor parallel, or the
    ranks of one replica): consecutive ranks of each such group get the best links. TopologyError for more than there are."""
    total = len(topology.gpus)
    if not 1 <= count <= total:
        have = f"{total} GPU{'s' * (total != 1)}" + (f" ({topology.trouble})" if topology.trouble else "")
        raise TopologyError(f"{count} GPUs asked for, this machine has {have}")
    if inner < 1 or count % inner:
        raise TopologyError(f"{count} GPUs do not divide into groups of {inner}")
    scale = Scale(topology, inner)
    everyone = tuple(range(total))
    candidates: Iterator[tuple[int, ...]]
    exact = total <= EXACT_UP_TO or math.comb(total, count) * _rings(count) <= _MOST_RINGS
    if exact:
        candidates, bound = itertools.combinations(everyone, count), 0
    else:
        found, bound = search(scale, count)
        candidates = iter(found)
    _, ring, grouped = max(
        ((chosen, best_ring(chosen, scale.strengths), scale.grouped(chosen)) for chosen in candidates),
        key=lambda candidate: scale.key(*candidate),
    )
    order = grouped.order if grouped else ring.order
    return _placement(topology, scale, order, bound, exact)


def _rings(count: int) -> int:
    return max(1, math.factorial(count - 1) // 2)


def _placement(topology: Topology, scale: Scale, order: tuple[int, ...], bound: int, exact: bool) -> Placement:
    hops = ring_links(order)
    slowest = min(hops, key=lambda hop: scale.strengths[hop[0]][hop[1]], default=None)
    kind = topology.link(*slowest) if slowest else None
    weakest = scale.strengths[slowest[0]][slowest[1]] if slowest else 0
    proven = exact or weakest >= bound
    count = len(topology.gpus)
    best_kind = next(
        (topology.link(a, b) for a in range(count) for b in range(a) if scale.strengths[a][b] == bound), kind
    )
    indices = tuple(topology.gpus[place].index for place in order)
    return Placement(
        positions=order,
        gpus=tuple(sorted(indices)),
        ring=indices,
        weakest=links.normal(kind) if kind else None,
        bandwidth=topology.bandwidth(*slowest) if slowest else 0.0,
        proven=proven,
        bound=links.normal(best_kind) if best_kind and not exact else (links.normal(kind) if kind else None),
        devices=tuple(topology.gpus[place].device for place in order),
        reason=_reason(topology, scale, order, kind, weakest, proven),
    )


def _reason(
    topology: Topology, scale: Scale, order: tuple[int, ...], kind: str | None, weakest: int, proven: bool
) -> str:
    """Why these, in one line."""
    parts = []
    if kind:
        rate = topology.rate_text(*min(ring_links(order), key=lambda hop: scale.strengths[hop[0]][hop[1]]))
        parts.append(f"weakest link {kind}" + (f" ({rate})" if rate else ""))
    nodes = {topology.gpus[place].numa for place in order} - {None}
    if nodes:
        parts.append(f"NUMA node{'s' * (len(nodes) > 1)} {', '.join(map(str, sorted(nodes, key=lambda n: n or 0)))}")
    first = tuple(range(len(order)))
    if kind and set(first) != set(order):
        naive = best_ring(first, scale.strengths).weakest
        if naive < weakest:
            slow = min(ring_links(best_ring(first, scale.strengths).order), key=lambda h: scale.strengths[h[0]][h[1]])
            parts.append(f"the first {len(order)} by index would have {topology.link(*slow)}")
    elif kind and len(order) > 3:
        hops = ring_links(first)
        slow = min(hops, key=lambda hop: scale.strengths[hop[0]][hop[1]])
        if scale.strengths[slow[0]][slow[1]] < weakest:
            parts.append(f"index order would have {topology.link(*slow)}")
    busy = [topology.gpus[place].index for place in order if scale.busy[place]]
    idle = sum(not is_busy for is_busy in scale.busy)
    if busy:
        parts.append(f"GPU {', '.join(map(str, busy))} in use already: {idle} GPUs are free")
    elif any(scale.busy):
        parts.append("all free")
    if not proven:
        parts.append("a better set may exist: not every set was tried")
    return "; ".join(parts) or "the links are not known"


def weaker_order(topology: Topology, positions: tuple[int, ...]) -> str:
    """What a better order of the same GPUs would gain, as a sentence; empty where there is none."""
    strengths = Scale(topology, 1).strengths
    given, best = measure(positions, strengths), best_ring(positions, strengths)
    if given.weakest >= best.weakest:
        return ""
    order = list(best.order)
    weak = min(ring_links(positions), key=lambda hop: strengths[hop[0]][hop[1]])
    strong = min(ring_links(best.order), key=lambda hop: strengths[hop[0]][hop[1]])
    return (
        f"this order puts {topology.link(*weak)} on the ring of the ranks; devices: {order} would have "
        f"{topology.link(*strong)}"
    )
