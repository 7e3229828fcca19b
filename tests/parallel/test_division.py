"""Where `auto` cuts: hand-worked costs, every division tried, and what is told and kept."""

import itertools
import json

import pytest
import torch
from torch import nn

from mgpu.errors import PlanError
from mgpu.parallel import _timing
from mgpu.parallel._cuts import balanced, parts_of, places_to_cut
from mgpu.parallel._division import divide, measures_of
from mgpu.parallel._memory import bytes_of, state_share
from mgpu.parallel._survey import Unknown, survey
from mgpu.parallel._timing import seconds_of
from mgpu.parallel.base import Context
from mgpu.train import Supervised
from mgpu.zoo import GPT


class Pyramid(nn.Module):
    """Convolutions of equal weights on images that every second block halves: equal weights, unlike work."""

    class Block(nn.Module):
        def __init__(self, channels, halve):
            super().__init__()
            self.mix = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False))
            self.halve = halve

        def forward(self, x):
            x = torch.relu(self.mix(x))
            return nn.functional.max_pool2d(x, 2) if self.halve else x

    def __init__(self, blocks=8, channels=4):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 1, bias=False)
        self.blocks = nn.ModuleList(self.Block(channels, i % 2 == 1) for i in range(blocks))
        self.head = nn.Linear(channels, 2, bias=False)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Looped(nn.Module):
    """Equal blocks; the first is called four times."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))

    def forward(self, x):
        for _ in range(3):
            x = self.blocks[0](x)
        for block in self.blocks:
            x = block(x)
        return x


class Reading(Looped):
    def forward(self, x):
        return super().forward(x) if float(x.sum()) > 0 else x


class Score(Supervised):
    def __init__(self):
        super().__init__(nn.CrossEntropyLoss())


IMAGES = torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64)
ROWS = torch.ones(5, 8), torch.zeros(5, dtype=torch.int64)


def context(batch=None, optimizer=torch.optim.AdamW, **settings):
    return Context(
        rank=0, world=1, replica=0, replicas=1, device=torch.device("cpu"), example=lambda: batch,
        optimizer=lambda parameters: optimizer(parameters, lr=0.1), **settings,
    )  # fmt: skip


def cheapest(costs, stages):
    """The least cost that the dearest stage of any division has."""
    return min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *starts, len(costs))))
        for starts in itertools.combinations(range(1, len(costs)), stages - 1)
    )


@pytest.mark.parametrize("seed", range(30))
def test_no_division_has_a_cheaper_dearest_stage(seed):
    draw = torch.Generator().manual_seed(seed)
    costs = torch.randint(0, 9, (9,), generator=draw).tolist()
    stages = 2 + seed % 5
    bounds = (0, *balanced(costs, stages), 9)
    assert len(bounds) == stages + 1 and all(a < b for a, b in itertools.pairwise(bounds))
    assert max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds)) == cheapest(costs, stages)


def test_of_equally_good_divisions_the_most_even_and_then_the_first():
    assert balanced([1, 1, 1, 1, 9], 3) == [2, 4]
    assert balanced([1, 1, 1], 2) == [1]


def survey_of(model, batch, task=None, **settings):
    parts = parts_of(model, places_to_cut(model, 2)[1:])
    return survey(model, parts, task or Score(), batch, context(batch, **settings))


def pyramid_work(passes=3):
    """Operations of each block for two images: 2 x 9 x 4 x 4 a place, forward, and backward to images and kernels."""
    sides = [32, 32, 16, 16, 8, 8, 4, 4]
    blocks = [passes * 2 * 9 * 4 * 4 * 2 * side * side for side in sides]
    stem, head = 2 * (2 * 3 * 4 * 2 * 32 * 32), 3 * (2 * 4 * 2 * 2)  # no gradient of the images
    return [stem + blocks[0], *blocks[1:-1], blocks[-1] + head]


def test_operations_of_a_model_are_those_worked_out_by_hand():
    assert survey_of(Pyramid(), IMAGES).work == pyramid_work()


def test_recomputed_blocks_run_once_more():
    found = survey_of(Pyramid(), IMAGES, activation_checkpointing="full").work
    assert found[1:-1] == pyramid_work(passes=4)[1:-1]


def test_what_is_frozen_costs_less():
    """Blocks 0 and 1 and all before them are frozen: forward only; block 2 needs no gradient of what it is given."""
    model = Pyramid()
    for frozen in (model.stem, model.blocks[0], model.blocks[1]):
        frozen.requires_grad_(False)
    forward = pyramid_work(passes=1)
    found = survey_of(model, IMAGES).work
    assert found[1] == forward[1]
    assert found[2] == 2 * forward[2]
    assert found[3:7] == [3 * cost for cost in forward[3:7]]


def test_attention_and_recurrent_layers_count():
    """GPT: 12 x 16 x 16 weights a layer and 8 tokens, and two products of 8 x 8 x 16 in attention; the head 16 x 32."""
    gpt = GPT(layers=2, width=16, heads=2, context=8, vocabulary=32)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    layer, head = 2 * 12 * 16 * 16 * 8 + 2 * 2 * 8 * 8 * 16, 2 * 16 * 32 * 8
    task = Supervised(nn.CrossEntropyLoss(), unit="token")
    assert survey_of(gpt, (tokens, tokens), task).work == [3 * layer, 3 * (layer + head)]

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.LSTM(8, 8, num_layers=2), nn.LSTM(8, 8)])

        def forward(self, x):
            return self.layers[1](self.layers[0](x)[0])[0].mean(0)

    batch = torch.zeros(6, 3, 8), torch.zeros(3, dtype=torch.int64)
    one = 2 * 6 * 3 * (4 * 8 * 8 + 4 * 8 * 8)
    assert survey_of(Recurrent(), batch).work == [2 * 2 * one, 3 * one]


def test_equal_weights_and_unlike_work_are_cut_as_the_work_is():
    """By weights 2 + 2 + 2 + 2 blocks; by work 1 + 1 + 1 + 5, as trying all divisions says."""
    work = pyramid_work()
    found = divide(Pyramid(), 4, ("flops",), Score(), context(IMAGES))
    places = [int(name.removeprefix("blocks.")) for name in found.cuts]
    assert places == [1, 2, 3]
    bounds = [0, *places, 8]
    assert max(sum(work[a:b]) for a, b in itertools.pairwise(bounds)) == cheapest(work, 4)
    shares = [f"{sum(work[a:b]) / sum(work):.0%}" for a, b in itertools.pairwise(bounds)]
    assert found.note == (
        f"split by floating-point operations of a micro batch: stage 0: blocks.0, {shares[0]}; "
        f"stage 1: blocks.1, {shares[1]}; stage 2: blocks.2, {shares[2]}; "
        f"stage 3: blocks.3 to blocks.7, {shares[3]}"
    )
    assert divide(Pyramid(), 4, ("weights",), Score(), context()).cuts == ("blocks.2", "blocks.4", "blocks.6")


def test_a_block_that_is_called_four_times_counts_four_times():
    """Its first call has no gradient of its input: 11 passes, not 12, and 11 + 3 | 12 is better than 11 | 15."""
    assert survey_of(Looped(), ROWS).work == [11 * 640, *[3 * 640] * 5]
    assert divide(Looped(), 2, ("flops",), Score(), context(ROWS)).cuts == ("blocks.2",)
    assert divide(Looped(), 2, ("weights",), Score(), context()).cuts == ("blocks.3",)


def test_activations_are_the_bytes_kept_for_backward():
    """Linear layers without bias keep their inputs alone, 5 x 8 floats a call; the loss what softmax made, and targets."""
    kept = survey_of(Looped(), ROWS).activations
    assert kept[:5] == [4 * 160, 160, 160, 160, 160]
    assert 320 <= kept[5] <= 320 + 5 * 8 + 8


def test_full_checkpointing_keeps_what_blocks_are_given():
    batch = IMAGES
    kept = survey_of(Pyramid(), batch, activation_checkpointing="full").activations
    assert kept[1:6] == [2 * 4 * side * side * 4 for side in (32, 16, 16, 8, 8)]


@pytest.mark.parametrize("optimizer, share", [
    (torch.optim.AdamW, 2.0), (torch.optim.SGD, 0.0), (lambda values, lr: torch.optim.SGD(values, lr=lr, momentum=0.9), 1.0),
])  # fmt: skip
def test_state_of_an_optimizer(optimizer, share):
    assert state_share(context(optimizer=optimizer)) == share


def test_a_tied_weight_lies_where_its_first_module_does():
    gpt = GPT(layers=2, width=16, heads=2, context=8, vocabulary=32)
    gpt.layers[1].requires_grad_(False)
    layer = 4 * sum(parameter.numel() for parameter in gpt.layers[0].parameters())
    tables = 4 * (32 * 16 + 8 * 16)
    norm = 4 * sum(parameter.numel() for parameter in gpt.norm.parameters())
    parts = parts_of(gpt, ["layers.1"])
    assert bytes_of(gpt, parts, context()) == [4 * (layer + tables), layer + 4 * norm]


def test_large_activations_at_the_start_weigh_more_than_weights_at_the_end():
    """Equal weights, and activations that shrink by four with every second block: memory cuts early, weights in the middle."""
    model = Pyramid()
    memory = divide(model, 2, ("memory", "weights"), Score(), context(IMAGES), what="device")
    assert memory.cuts == ("blocks.1",) and "device 1: blocks.1 to blocks.7" in memory.note
    assert divide(model, 2, ("weights",), Score(), context(), what="device").cuts == ("blocks.4",)


def test_time_is_that_of_each_part(monkeypatch):
    """With a clock that only the second block's pass moves, all time is the second block's; alike blocks are timed once."""
    model = Looped()
    now, runs = [0.0], []

    def slow(module, args):
        runs.append(module)
        now[0] += 2.0

    model.blocks[1].register_forward_pre_hook(slow)
    monkeypatch.setattr(_timing.time, "perf_counter", lambda: now[0])
    parts = parts_of(model, places_to_cut(model, 2)[1:])
    found = survey(model, parts, Score(), ROWS, context(ROWS))
    runs.clear()
    model.blocks[1].extra_repr = lambda: "slow"
    assert seconds_of(model, parts, found, Score(), ROWS, context()) == [0, 2, 0, 0, 0, 0]
    assert len(runs) == 1 + _timing.REPEATS


def test_a_cache_that_blocks_fill_is_as_it_was_before_each():
    """Every block adds its keys to a list that it is called with: block i sees those of the i blocks before it, each time."""

    class Caching(Looped):
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Sequential(nn.Linear(8, 8))

            def forward(self, x, cache):
                cache.keys.append(self.inner(x))
                seen.append((len(cache.keys), {type(key) for key in cache.keys}))
                return torch.stack(cache.keys).sum(0)

        class Cache:
            def __init__(self):
                self.keys = []

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(self.Block() for _ in range(3))

        def forward(self, x):
            cache = self.Cache()
            for block in self.blocks:
                x = block(x, cache)
            return x

    seen = []
    model = Caching()
    parts = parts_of(model, places_to_cut(model, 2)[1:])
    found = survey(model, parts, Score(), ROWS, context(ROWS))
    seen.clear()
    assert all(seconds > 0 for seconds in seconds_of(model, parts, found, Score(), ROWS, context()))
    tries = 1 + _timing.REPEATS
    assert seen == [(index, {torch.Tensor}) for index in (1, 2, 3) for _ in range(tries)]


def test_measuring_changes_neither_the_model_nor_random_numbers():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(inplace=True)) for _ in range(3))
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    for measure in ("time", "flops", "memory"):
        divide(model, 2, (measure,), Score(), context(ROWS))
    assert torch.equal(torch.rand(4), expected)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_cannot_be_measured_is_told():
    with pytest.raises(Unknown, match="DataDependentOutputException"):
        survey_of(Reading(), ROWS)
    found = divide(Reading(), 2, ("time", "flops", "weights"), Score(), context(ROWS))
    assert found.cuts == ("blocks.3",)
    assert found.note.startswith("split by number of weights (measured time of a micro batch unknown: ")
    found = divide(Looped(), 2, ("flops", "weights"), Score(), context(None))
    assert "there is no micro batch to try" in found.note
    with pytest.raises(
        PlanError, match=r"split: flops cannot cut this model: .* DataDependentOutputException"
    ) as refused:
        divide(Reading(), 2, ("flops",), Score(), context(ROWS))
    assert refused.value.hint == "write split: weights"


def test_a_later_attempt_cuts_in_the_same_places(tmp_path):
    """Even where it would cut elsewhere by itself; another number of stages is cut anew."""
    first = divide(Looped(), 2, ("flops",), Score(), context(ROWS, folder=tmp_path))
    kept = json.loads((tmp_path / "split.json").read_text())
    kept["cuts"] = ["blocks.5"]
    (tmp_path / "split.json").write_text(json.dumps(kept))
    second = divide(Looped(), 2, ("flops",), Score(), context(ROWS, folder=tmp_path))
    assert (first.cuts, second.cuts) == (("blocks.2",), ("blocks.5",))
    assert second.note.endswith("(as in the attempt before)")
    assert divide(Looped(), 3, ("flops",), Score(), context(ROWS, folder=tmp_path)).cuts == ("blocks.1", "blocks.3")


def test_auto_is_time_on_accelerators_and_operations_on_cpus():
    assert measures_of("auto", "cuda") == ("time", "flops", "weights")
    assert measures_of("auto", "cpu") == ("flops", "weights")
    assert measures_of("time", "cpu") == ("time",)
