"""The first micro batch can be seen beforehand, and is not lost by that."""

import pytest
import torch
from torch.utils.data import IterableDataset

from mgpu.data.feed import Agreement, IndexedFeed, SplitFeed, StreamFeed
from mgpu.data.loading import Course, make_loader, make_stream_loader
from mgpu.data.position import BatchGrid, Position
from mgpu.data.sampling import ShuffledOrder
from mgpu.data.streams import OwnStream, WholeStream

GRID = BatchGrid(8, 4, 2)


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Squares:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index * index


def feed_of(kind, epochs=1):
    peers = Agreement(0, 1, 1, torch.device("cpu"))
    if kind == "indexed":
        course = Course(GRID, ShuffledOrder(8, 0), Position(), 0, 1, epochs)
        loader = make_loader(Squares(), course, 0, workers=0, start="fork", collate=list, pin=False)
        return IndexedFeed(course, loader)
    if kind == "whole":
        whole = WholeStream(Numbers(), 0, GRID, Position(), 0, 1, list)
        return StreamFeed(
            make_stream_loader(whole, workers=0, start="fork", pin=False), GRID, Position(), epochs, peers
        )
    own = OwnStream(Numbers(), 0, 2, 0, list)
    loader = make_stream_loader(own, workers=0, start="fork", pin=False)
    return SplitFeed(own, loader, GRID, Position(), epochs, "use_all", peers, lambda text: None)


def batches_of(feed):
    return [[batch for _, batch in turn.micro_batches] for turn in feed.turns()]


@pytest.mark.parametrize("kind", ["indexed", "whole", "split"])
def test_the_first_micro_batch_is_seen_and_still_comes(kind):
    expected = batches_of(feed_of(kind))
    assert [len(batches) for batches in expected] == [2, 2]
    feed = feed_of(kind)
    assert feed.first() == expected[0][0]
    assert feed.first() == expected[0][0]
    assert batches_of(feed) == expected


def test_a_feed_without_a_batch_has_no_first():
    assert feed_of("indexed", epochs=0).first() is None
