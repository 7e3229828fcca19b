import hashlib
import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mgpu.data import order as order_module
from mgpu.data.order import MAXIMUM_LENGTH, EpochOrder

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 10**6)


def by_definition(n: int, seed: int, epoch: int, position: int) -> int:
    """The module's text in plain integers, one position at a time: independent of the vectorised code."""
    a = next(a for a in itertools.count(max(math.isqrt(n) - 2, 0)) if a % 2 == 0 and a and a * a >= n)
    b = next(b for b in itertools.count(n // a) if a * b >= n)
    digest = hashlib.shake_256(f"mgpu order 1 {seed} {epoch}".encode()).digest(96)
    keys = [int.from_bytes(digest[4 * index : 4 * index + 4], "little") for index in range(24)]

    def f(index: int, x: int, size: int) -> int:
        x ^= keys[2 * index]
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = (x + keys[2 * index + 1]) % 2**32
        x = x * 0x846CA68B % 2**32
        x ^= x >> 16
        return x * size >> 32

    value = position
    while True:
        left, right = divmod(value, b)
        for index in range(0, 12, 2):
            left = (left + f(index, right, a)) % a
            right = (right + f(index + 1, left, b)) % b
        value = left * b + right
        if value < n:
            return value


def whole(n: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return EpochOrder(n, seed, epoch).at(np.arange(n))


def chi_square(counts: np.ndarray, expected: float) -> float:
    """Standard deviations by which the chi-square statistic of equally likely cells is above its mean."""
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def test_golden_values_never_change():
    assert whole(1).tolist() == [0]
    assert whole(10).tolist() == [8, 4, 0, 9, 6, 5, 1, 2, 3, 7]
    assert whole(10, 2**63 - 1, 7).tolist() == [8, 4, 3, 0, 1, 7, 6, 9, 5, 2]
    billion = EpochOrder(10**9, 1, 2)
    assert billion.at([0, 1, 10**9 - 1]).tolist() == [871643160, 274765029, 83665562]
    longest = EpochOrder(2**62, 1, 2)
    assert longest.at([0, 1, 2**62 - 1]).tolist() == [301289556928109600, 3617861357487285229, 1375011353954026756]


@given(n=st.integers(1, MAXIMUM_LENGTH), seed=SEEDS, epoch=EPOCHS, drawn=st.lists(st.integers(0), max_size=5))
@example(n=MAXIMUM_LENGTH, seed=0, epoch=0, drawn=[1, 2**61])
@example(n=MAXIMUM_LENGTH - 1, seed=0, epoch=0, drawn=[1, 2**61])
@example(n=2**32 + 1, seed=0, epoch=0, drawn=[2**31, 2**32])
def test_agrees_with_its_definition_and_inverts(n, seed, epoch, drawn):
    positions = np.array([0, n - 1, *(number % n for number in drawn)], np.int64)
    order = EpochOrder(n, seed, epoch)
    ids = order.at(positions)
    assert ids.tolist() == [by_definition(n, seed, epoch, int(position)) for position in positions]
    assert order.inverse(ids).tolist() == positions.tolist()
    assert order.at(order.inverse(positions)).tolist() == positions.tolist()


@given(n=st.integers(1, 3000), seed=SEEDS, epoch=EPOCHS)
def test_is_a_permutation(n, seed, epoch):
    ids = whole(n, seed, epoch)
    assert np.array_equal(np.sort(ids), np.arange(n))
    assert np.array_equal(EpochOrder(n, seed, epoch).inverse(ids), np.arange(n))


def test_every_small_length_is_a_permutation():
    for n in range(1, 600):
        assert np.array_equal(np.sort(whole(n, seed=n)), np.arange(n))


@given(n=st.integers(1, 500), cut=st.integers(1, 60), chunk=st.integers(1, 70))
@settings(max_examples=50)
def test_pieces_and_chunks_do_not_matter(n, cut, chunk):
    expected = whole(n)
    order = EpochOrder(n, 0, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "CHUNK", chunk)
        pieces = [order.at(np.arange(start, min(start + cut, n))) for start in range(0, n, cut)]
    assert np.concatenate(pieces).tolist() == expected.tolist()


def test_shapes_types_and_the_argument_is_left_alone():
    order = EpochOrder(100, 3, 4)
    scalar = order.at(17)
    assert (scalar.shape, scalar.dtype) == ((), np.int64)
    assert int(scalar) == int(whole(100, 3, 4)[17])
    grid = np.arange(12, dtype=np.int32).reshape(3, 4).T
    assert np.array_equal(order.at(grid), whole(100, 3, 4)[grid])
    positions = np.arange(100)
    order.at(positions)
    assert np.array_equal(positions, np.arange(100))
    assert order.at([]).tolist() == []
    assert order.at(np.array([99], np.uint64)).tolist() == [int(whole(100, 3, 4)[99])]


def test_a_pickled_order_is_the_same_order():
    order = EpochOrder(1000, 5, 6)
    order.at(0)
    copy = pickle.loads(pickle.dumps(order))
    assert copy == order
    assert np.array_equal(copy.at(np.arange(1000)), whole(1000, 5, 6))


def test_without_shuffle_every_sample_stands_at_its_own_position():
    order = EpochOrder(50, 1, 2, shuffle=False)
    assert order.at(np.arange(50)).tolist() == list(range(50))
    assert order.inverse(7) == 7


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("value", [-1, 10, [3, 10], 2**63, 1.5, [0.0], True])
def test_what_is_no_position_is_refused(shuffle, value):
    order = EpochOrder(10, 0, 0, shuffle)
    with pytest.raises(ValueError, match=r"outside|integers"):
        order.at(value)
    with pytest.raises(ValueError, match=r"outside|integers"):
        order.inverse(value)


@pytest.mark.parametrize(("n", "seed", "epoch"), [(0, 0, 0), (-1, 0, 0), (2**62 + 1, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_what_is_no_epoch_is_refused(n, seed, epoch):
    with pytest.raises(ValueError, match=r"an epoch has|count from 0"):
        EpochOrder(n, seed, epoch)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_permutations_of_few_samples_are_equally_likely(n):
    draws = 1000 if n < 5 else 4000
    number = {permutation: index for index, permutation in enumerate(itertools.permutations(range(n)))}
    seen = [number[tuple(whole(n, seed).tolist())] for seed in range(draws)]
    assert abs(chi_square(np.bincount(seen, minlength=len(number)), draws / len(number))) < 4


@pytest.mark.parametrize("n", [9, 10, 16, 25, 50])
def test_every_sample_is_equally_likely_at_every_position(n):
    draws = 2000
    ids = np.stack([whole(n, seed=7, epoch=epoch) for epoch in range(draws)])
    counts = np.stack([np.bincount(ids[:, position], minlength=n) for position in range(n)])
    # For permutation matrices, the sum of (counts - expected)^2 / expected times (n - 1) / n is chi-square distributed
    # with (n - 1)^2 degrees of freedom: every row and every column has a given sum.
    freedom = (n - 1) ** 2
    statistic = (((counts - draws / n) ** 2) / (draws / n)).sum() * (n - 1) / n
    assert abs(statistic - freedom) < 4.5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [9, 25, 50])
def test_odd_and_even_permutations_are_equally_likely(n):
    def is_odd(permutation):
        seen, cycles = set(), 0
        for start in range(n):
            cycles += start not in seen
            while start not in seen:
                seen.add(start)
                start = permutation[start]  # noqa: PLW2901
        return (n - cycles) % 2

    odd = sum(is_odd(whole(n, seed).tolist()) for seed in range(600))
    assert abs(odd - 300) < 4 * math.sqrt(150)


N = 1_000_003


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """In standard deviations of two independent sequences."""
    return float(np.corrcoef(first, second)[0, 1]) * math.sqrt(first.size)


def test_position_and_sample_are_not_correlated():
    assert abs(correlation(np.arange(N), whole(N))) < 4.5


def test_the_mean_displacement_is_that_of_a_random_permutation():
    # E|i - p(i)| = (n^2 - 1) / 3n, with a variance of the sum of (n+1)(2n^2+7) / 45 (Spearman's footrule)
    ids = whole(N)
    deviation = math.sqrt((N + 1) * (2 * N**2 + 7) / 45)
    assert abs(np.abs(ids - np.arange(N)).sum() - (N**2 - 1) / 3) < 4.5 * deviation


@pytest.mark.parametrize("distance", [1, 2, 64, 1000, 1001])
def test_neighbours_are_not_correlated(distance):
    """1000 and 1001 are about the width of the Feistel network's halves, where a poor one shows its grid."""
    ids = whole(N)
    assert abs(correlation(ids[:-distance], ids[distance:])) < 4.5
    steps = (ids[distance:] - ids[:-distance]) % N
    assert abs(chi_square(np.bincount(steps * 1000 // N, minlength=1000), steps.size / 1000)) < 4.5


@pytest.mark.parametrize("other", [(0, 1), (1, 0), (2**62, 0)])
def test_other_epochs_and_seeds_are_independent(other):
    first, second = whole(N), whole(N, *other)
    assert abs(correlation(first, second)) < 4.5
    cells = (first * 100 // N) * 100 + second * 100 // N
    assert abs(chi_square(np.bincount(cells, minlength=10000), N / 10000)) < 4.5
    fixed = int((first == second).sum())  # Poisson with mean 1
    assert fixed < 9


def test_seed_and_epoch_do_not_run_into_each_other():
    assert whole(1000, 1, 23).tolist() != whole(1000, 12, 3).tolist()
