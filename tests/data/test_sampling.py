import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from mgpu.data.order import EpochOrder
from mgpu.data.sampling import SamplerOrder, ShuffledOrder, why_not_layout_free
from mgpu.errors import DataError

DATA = list(range(50))


def test_blocks_give_the_order_of_the_epoch():
    order = ShuffledOrder(10_000, seed=3)
    expected = EpochOrder(10_000, 3, 1).at(range(10_000)).tolist()
    assert order.samples(1, 0, 10) == expected[:10]
    assert order.samples(1, 4090, 4105) == expected[4090:4105]
    assert order.samples(1, 9990, 10_000) == expected[9990:]
    assert order.samples(1, 5, 7) == expected[5:7]
    assert order.samples(0, 0, 5) == EpochOrder(10_000, 3, 0).at(range(5)).tolist()


def test_a_sampler_gives_the_same_order_to_all_and_another_in_each_epoch():
    first, second = (SamplerOrder(RandomSampler(DATA), seed=1) for _ in range(2))
    torch.manual_seed(99)
    epoch_0 = first.samples(0, 0, 50)
    assert sorted(epoch_0) == DATA
    torch.manual_seed(7)
    assert second.samples(1, 0, 50) != epoch_0
    assert second.samples(0, 10, 20) == epoch_0[10:20]
    assert SamplerOrder(RandomSampler(DATA), seed=2).samples(0, 0, 50) != epoch_0


def test_a_weighted_sampler_is_honoured():
    order = SamplerOrder(WeightedRandomSampler([0.0, 1.0, 0.0, 1.0], num_samples=100), seed=0)
    assert order.n == 100
    assert set(order.samples(0, 0, 100)) == {1, 3}


class Endless:
    def __iter__(self):
        return iter(range(3))


class Liar(Endless):
    def __len__(self):
        return 4


@pytest.mark.parametrize(
    "sampler, reason",
    [
        (DistributedSampler(DATA, num_replicas=2, rank=0), "splits the data over ranks"),
        (BatchSampler(SequentialSampler(DATA), 5, drop_last=False), "batch sampler"),
        (RandomSampler(DATA, generator=torch.Generator().manual_seed(0)), "random numbers of its own"),
        (Endless(), "no length"),
        (Liar(), "length 4 and gave 3"),
        (SequentialSampler([]), "empty"),
        (SequentialSampler(DATA), ""),
        (RandomSampler(DATA), ""),
    ],
)
def test_a_sampler_that_depends_on_the_layout_or_on_chance_is_refused_with_the_reason(sampler, reason):
    found = why_not_layout_free(sampler, seed=0)
    assert reason in found
    assert bool(found) == bool(reason)


def test_a_sampler_that_changes_its_length_is_an_error():
    with pytest.raises(DataError, match="length 4 and gave 3"):
        SamplerOrder(Liar(), 0).samples(0, 0, 1)
