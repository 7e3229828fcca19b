import random
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from mgpu.data.seeding import micro_batch_seed, sample_seed, seed_everything, weights_seed


@pytest.fixture(autouse=True)
def global_generators():
    """Leave the process's generators as they were."""
    python, numpy, tensor = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(tensor)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand((), dtype=torch.float64))


def test_golden_values_never_change():
    """A resumed run draws what the interrupted one would have drawn, also under a newer version."""
    assert sample_seed(0, 0, 0) == 16321491304643971414
    assert sample_seed(2**63 - 1, 5, 10**9) == 16759137656407722462
    assert micro_batch_seed(1, 2, 3) == 18283258009843326564
    assert weights_seed(7) == 16753576447339095367


def test_seeds_differ_by_purpose_and_by_every_argument():
    arguments = [(seed, first, second) for seed in range(12) for first in range(12) for second in range(12)]
    seeds = [purpose(*numbers) for purpose in (sample_seed, micro_batch_seed) for numbers in arguments]
    seeds += [weights_seed(seed) for seed in range(12)]
    assert len(set(seeds)) == 2 * 12**3 + 12
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("purpose", [sample_seed, micro_batch_seed])
@pytest.mark.parametrize("argument", [0, 1, 2])
def test_one_bit_of_an_argument_changes_half_of_the_seed(purpose, argument):
    changed = []
    for trial in range(40):
        numbers = [trial, trial * 7, trial * 1009]
        for bit in range(0, 40, 3):
            other = list(numbers)
            other[argument] ^= 1 << bit
            changed.append((purpose(*numbers) ^ purpose(*other)).bit_count())
    deviation = (64 * 0.25 / len(changed)) ** 0.5
    assert abs(sum(changed) / len(changed) - 32) < 4.5 * deviation


def test_every_bit_of_consecutive_seeds_is_fair():
    seeds = np.array([sample_seed(0, 0, index) for index in range(10000)], np.uint64)
    ones = np.unpackbits(seeds.view(np.uint8).reshape(-1, 8), axis=1).sum(axis=0, dtype=np.int64)
    assert np.abs(ones - 5000).max() < 4.5 * 50


def test_seeding_repeats_the_draws_of_all_three_generators():
    seed_everything(11)
    first = draws()
    seed_everything(2**64 - 1)
    other = draws()
    seed_everything(11)
    assert draws() == first
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_each_generator_is_seeded_as_its_library_documents_it():
    value = 2**63 + 2**40 + 5
    seed_everything(value)
    assert random.random() == random.Random(value).random()
    assert np.random.random() == np.random.RandomState(5).random_sample()
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(value))
    assert torch.initial_seed() == value


class RecordingGenerator:
    def __init__(self) -> None:
        self.seeds: list[int] = []

    def manual_seed(self, value: int) -> None:
        self.seeds.append(value)


@pytest.mark.parametrize(("initialized", "seeds"), [(True, [[], [9]]), (False, [[], []])])
def test_only_the_current_gpu_of_a_process_that_uses_one_is_seeded(monkeypatch, initialized, seeds):
    cpu, gpus = RecordingGenerator(), (RecordingGenerator(), RecordingGenerator())
    cuda = types.SimpleNamespace(is_initialized=lambda: initialized, current_device=lambda: 1, default_generators=gpus)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(default_generator=cpu, cuda=cuda))
    seed_everything(9)
    assert cpu.seeds == [9]
    assert [gpu.seeds for gpu in gpus] == seeds


def test_works_without_torch_and_does_not_import_it():
    code = """
import random, sys
sys.modules["torch"] = None  # any import of torch would fail
from mgpu.data.seeding import sample_seed, seed_everything
import mgpu.data.order, mgpu.data.position
seed_everything(sample_seed(1, 2, 3))
print(random.random())
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert float(finished.stdout) == random.Random(sample_seed(1, 2, 3)).random()
