"""Matrices of real machines, with their answers, where a folder of them lies beside the checkout (or in MGPU_TOPO_FILES)."""

import json
import os
from pathlib import Path

import pytest

from mgpu.errors import TopologyError
from mgpu.topology import Topology
from mgpu.topology.cpulist import parse_list
from mgpu.topology.placement import pick

FOLDER = Path(os.environ.get("MGPU_TOPO_FILES", Path(__file__).parents[3] / "shared/topo"))
ANSWERS = json.loads((FOLDER / "answers.json").read_text()) if (FOLDER / "answers.json").is_file() else {}
FILES = {path.name[:3]: path for path in sorted(FOLDER.glob("*.txt")) if path.name[:3] in ANSWERS}
WHOLE = [key for key in FILES if ANSWERS[key].get("complete_gpu_block")]
NO_MATRIX = ("fake", "error", "nvlink", "query", "other-tool", "markdown-table")
REFUSED = [key for key in FILES if ANSWERS[key]["kind"] in NO_MATRIX or ANSWERS[key].get("complete_gpu_block") is False]
READ = [key for key in FILES if ANSWERS[key]["kind"] in ("p2p", "rocm")]


def parse(key):
    return Topology.parse(FILES[key].read_text(errors="replace"))


def cpus(text):
    try:
        return None if text is None else parse_list(text)
    except ValueError:
        return None  # a cell cut in its middle


@pytest.mark.parametrize("key", WHOLE)
def test_a_real_matrix_reads_as_its_answer(key):
    """Must show 1."""
    topology, answer = parse(key), ANSWERS[key]
    assert [list(row) for row in topology.links] == answer["matrix"]
    assert [gpu.numa for gpu in topology.gpus] == answer["numa"]
    assert [gpu.cpus for gpu in topology.gpus] == [cpus(text) for text in answer["cpu"]]


@pytest.mark.parametrize("key", WHOLE)
def test_the_choice_on_a_real_machine_is_one_of_the_best(key):
    topology, answer = parse(key), ANSWERS[key]
    if "best_pairs" in answer:
        pair = pick(topology, 2)
        assert list(pair.gpus) in (answer["best_pairs_same_numa"] or answer["best_pairs"])
        assert pair.weakest == answer["best_pair_class"]
    if "best4" in answer:
        four = pick(topology, 4)
        assert list(four.gpus) in answer["best4"]
        assert four.weakest == answer["best4_ring_class"]
    whole = pick(topology, len(topology.gpus))
    assert whole.weakest == answer.get("ring_all_class", answer.get("best_pair_class"))
    assert sorted(whole.ring) == list(range(len(topology.gpus)))


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_no_whole_matrix_is_refused_with_its_reason(key):
    with pytest.raises(TopologyError) as caught:
        parse(key)
    assert len(caught.value.message) > 15


@pytest.mark.parametrize("key", READ)
def test_other_tables_of_pairs_are_read(key):
    topology = parse(key)
    assert topology.gpus
    assert topology.links or topology.p2p or any(gpu.numa is not None for gpu in topology.gpus)
