import itertools

from hypothesis import given
from hypothesis import strategies as st

from mgpu.data.position import BatchGrid, Position


@st.composite
def grids(draw, n: int, last: str = "keep") -> BatchGrid:
    micro = draw(st.integers(1, 12))
    return BatchGrid(n=n, size=micro * draw(st.integers(1, 8)), micro=micro, last=last)


def test_batches_of_an_epoch():
    assert BatchGrid(100, 32, 8, "keep").batches_per_epoch == 4
    assert BatchGrid(100, 32, 8, "drop").batches_per_epoch == 3
    assert BatchGrid(96, 32, 8, "keep").batches_per_epoch == BatchGrid(96, 32, 8, "drop").batches_per_epoch == 3
    assert BatchGrid(5, 8, 4, "drop").batches_per_epoch == 0


def test_the_last_window_and_micro_batch_are_shorter():
    grid = BatchGrid(22, 8, 4)
    assert [grid.window(offset) for offset in (0, 8, 16)] == [(0, 8), (8, 16), (16, 22)]
    assert grid.micro_batches(8) == [(8, 12), (12, 16)]
    assert grid.micro_batches(16) == [(16, 20), (20, 22)]


def test_advance_counts_samples_and_batches_and_leaves_steps_to_the_optimizer():
    grid = BatchGrid(22, 8, 4)
    start = Position(epoch=3, offset=8, samples=74, batches=10, step=9)
    middle = Position(epoch=3, offset=16, samples=82, batches=11, step=9)
    assert grid.advance(start) == middle
    assert grid.advance(middle) == Position(epoch=4, offset=0, samples=88, batches=12, step=9)
    assert middle.stepped(10) == Position(epoch=3, offset=16, samples=82, batches=11, step=10)


def test_a_dropped_rest_is_not_counted():
    grid = BatchGrid(22, 8, 4, "drop")
    assert grid.advance(Position(offset=8, samples=8, batches=1)) == Position(epoch=1, samples=16, batches=2)


def test_shares_worked_out_by_hand():
    grid = BatchGrid(100, 8, 2)
    assert grid.shares(5, 3) == [range(0, 2), range(2, 4), range(4, 5)]
    assert grid.shares(6, 3) == [range(0, 2), range(2, 4), range(4, 6)]
    assert grid.shares(1, 3) == [range(0, 1), range(1, 1), range(1, 1)]


@given(count=st.integers(0, 300), replicas=st.integers(1, 70))
def test_shares_cover_everything_once_and_differ_by_at_most_one(count, replicas):
    shares = BatchGrid(1, 1, 1).shares(count, replicas)
    lengths = [len(share) for share in shares]
    assert len(shares) == replicas
    assert list(itertools.chain.from_iterable(shares)) == list(range(count))
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(position=st.builds(Position, *[st.integers(0, 2**62)] * 5))
def test_a_position_survives_json(position):
    assert Position.from_json(position.to_json()) == position


@given(data=st.data(), n=st.integers(1, 300), epochs=st.integers(1, 3))
def test_resumes_on_any_layout_consume_each_sample_once_an_epoch(data, n, epochs):
    """Before every global batch the run may be resumed with another size, micro batch and number of replicas."""
    grid, replicas = data.draw(grids(n)), 1
    position = Position()
    consumed: list[list[int]] = [[] for _ in range(epochs)]
    batches = 0
    while position.epoch < epochs:
        if data.draw(st.booleans()):
            grid, replicas = data.draw(grids(n)), data.draw(st.integers(1, 6))
        ranges = grid.micro_batches(position.offset)
        for share in grid.shares(len(ranges), replicas):
            for index in share:
                consumed[position.epoch].extend(range(*ranges[index]))
        position = grid.advance(position)
        batches += 1
    assert consumed == [list(range(n))] * epochs
    assert position == Position(epoch=epochs, samples=epochs * n, batches=batches)


@given(data=st.data(), n=st.integers(100, 300), last=st.sampled_from(["keep", "drop"]))
def test_an_epoch_has_as_many_batches_as_it_says(data, n, last):
    grid = data.draw(grids(n, last))
    position = Position()
    sizes = []
    while position.epoch == 0:
        start, stop = grid.window(position.offset)
        assert 0 < stop - start <= grid.size
        micro_batches = grid.micro_batches(position.offset)
        assert [begin for begin, _ in micro_batches] == list(range(start, stop, grid.micro))
        assert sum(end - begin for begin, end in micro_batches) == stop - start
        sizes.append(stop - start)
        position = grid.advance(position)
    assert len(sizes) == grid.batches_per_epoch
    assert set(sizes[:-1]) <= {grid.size}
    assert n - sum(sizes) == (n % grid.size if last == "drop" else 0)


@given(st.integers(1, 40), st.integers(1, 12), st.sampled_from(["keep", "drop"]), st.integers(0, 5), st.integers(0, 45))
def test_the_batches_left_are_those_that_come(n, size, last, epoch, offset):
    """From any place, also one that another batch size or more samples have left behind."""
    grid = BatchGrid(n, size, 1, last)
    if grid.batches_per_epoch == 0:
        return
    position = grid.settle(Position(epoch=epoch, offset=offset))
    assert position.epoch == epoch or position.offset == 0
    counted, left = 0, grid.batches_left(position, 6)
    while position.epoch < 6:
        position = grid.advance(position)
        counted += 1
    assert counted == left
