"""A stream is cut into the same global batches whatever replicas and workers read it."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from mgpu.data.feed import Agreement, SplitFeed, StreamFeed
from mgpu.data.loading import make_stream_loader
from mgpu.data.position import BatchGrid, Position
from mgpu.data.streams import EvaluationStream, OwnStream, WholeStream
from mgpu.errors import DataError


class Numbers(IterableDataset):
    """0, 1, ..., each with a random number; a naive one that splits itself over workers if it is told of any."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        info = get_worker_info()
        for number in range(info.id if info else 0, self.count, info.num_workers if info else 1):
            yield number, int(np.random.randint(10**9))


class Skipping(Numbers):
    first = 0

    def skip(self, count):
        skipped = Skipping(self.count)
        skipped.first = self.first + count
        return skipped

    def __iter__(self):
        for number in range(self.first, self.count):
            yield number, int(np.random.randint(10**9))


def agreement(replica, replicas):
    """For reading one replica's part alone: no peers are asked."""
    return Agreement(replica, replicas, 1, torch.device("cpu"))


def consumed(samples, grid, replicas, epochs, start=None, workers=0):
    """Per global batch: its micro batches in order, each a list of (number, drawn)."""
    feeds = []
    for replica in range(replicas):
        whole = WholeStream(samples, 5, grid, start or Position(), replica, replicas, list)
        loader = make_stream_loader(whole, workers=workers, start="fork", pin=False)
        feed = StreamFeed(loader, grid, start or Position(), epochs, agreement(replica, replicas))
        feeds.append([(turn, list(turn.micro_batches)) for turn in feed.turns()])
    batches = []
    for turns in zip(*feeds, strict=True):
        assert len({(turn.position, turn.after, turn.counts) for turn, _ in turns}) == 1
        pairs = list(itertools.chain.from_iterable(micro for _, micro in turns))
        assert [index for index, _ in pairs] == list(range(sum(turns[0][0].counts)))
        batches.append([batch for _, batch in pairs])
    return batches, feeds[0][-1][0].after


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 60), micro=st.integers(1, 4), parts=st.integers(1, 5), replicas=st.integers(1, 5),
    last=st.sampled_from(["keep", "drop"]), kind=st.sampled_from([Numbers, Skipping]),
)  # fmt: skip
def test_every_sample_once_an_epoch_in_the_batches_of_one_process(count, micro, parts, replicas, last, kind):
    grid = BatchGrid(0, micro * parts, micro, last)
    if last == "drop" and count < grid.size:
        with pytest.raises(DataError, match="fewer samples"):
            consumed(kind(count), grid, 1, 2)
        return
    alone, after = consumed(kind(count), grid, 1, 2)
    spread, _ = consumed(kind(count), grid, replicas, 2)
    assert spread == alone
    whole = count - count % grid.size if last == "drop" else count
    numbers = [number for batch in alone for micro_batch in batch for number, _ in micro_batch]
    assert numbers == list(range(whole)) * 2
    assert after == Position(epoch=2, offset=0, samples=2 * whole, batches=len(alone))
    middle = consumed(kind(count), grid, replicas, 1)[0]
    assert alone[: len(middle)] == middle


@pytest.mark.parametrize("kind", [Numbers, Skipping])
def test_a_resume_in_the_middle_of_an_epoch_goes_on_with_the_next_sample(kind):
    grid = BatchGrid(0, 8, 2)
    whole, _ = consumed(kind(30), grid, 1, 2)
    rest, _ = consumed(kind(30), grid, 3, 2, start=Position(epoch=0, offset=16, samples=16, batches=2, step=2))
    assert rest == whole[2:]


def test_loader_workers_change_nothing():
    """Two workers, each told of none: the data set would split itself otherwise."""
    grid = BatchGrid(0, 6, 2)
    assert consumed(Numbers(32), grid, 2, 2, workers=2)[0] == consumed(Numbers(32), grid, 1, 2)[0]


def test_draws_differ_between_samples_and_epochs():
    batches, _ = consumed(Numbers(16), BatchGrid(0, 4, 2), 1, 2)
    drawn = [value for batch in batches for micro in batch for _, value in micro]
    assert len(set(drawn)) == 32


def test_evaluation_reads_every_sample_once():
    for replicas in (1, 2, 4):
        seen = []
        for replica in range(replicas):
            stream = EvaluationStream(Numbers(10), 0, 3, replica, replicas, list)
            seen.extend(number for batch in stream for number, _ in batch)
        assert sorted(seen) == list(range(10))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_split_stream_alone_trains_on_all_it_has_and_resumes_by_its_parts(workers):
    grid = BatchGrid(0, 6, 2)

    def turns(start):
        own = OwnStream(Numbers(16), 0, 2, 0, lambda samples: torch.tensor([number for number, _ in samples]))
        loader = make_stream_loader(own, workers=workers, start="fork", pin=False)
        feed = SplitFeed(own, loader, grid, start, 2, "use_all", agreement(0, 1), lambda text: None)
        return [(turn, [batch.tolist() for _, batch in turn.micro_batches]) for turn in feed.turns()]

    found = turns(Position())
    epochs = [[], []]
    for turn, batches in found:
        epochs[turn.position.epoch].extend(itertools.chain.from_iterable(batches))
    assert [sorted(epoch) for epoch in epochs] == [list(range(16))] * 2
    assert [turn.counts for turn, _ in found] == [(3,), (3,), (2,)] * 2
    assert turns(found[1][0].position)[0][1] == found[1][1]


def test_a_split_stream_cannot_go_on_with_other_replicas_in_the_middle_of_an_epoch():
    own = OwnStream(Numbers(16), 0, 2, 0, list)
    loader = make_stream_loader(own, workers=0, start="fork", pin=False)
    with pytest.raises(DataError, match="over 2 replicas"):
        SplitFeed(
            own, loader, BatchGrid(0, 4, 2), Position(parts=(1, 1)), 1, "error", agreement(0, 1), lambda text: None
        )
