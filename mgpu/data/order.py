"""The order in which an epoch visits its samples, computed position by position: any length, no list.

The order is a permutation of [0, n) that nobody stores: a cipher on [0, n) (a Feistel network over Z_a x Z_b, with cycle
walking), keyed by the seed and the epoch. Generalised Feistel and cycle walking: Black and Rogaway, "Ciphers with
Arbitrary Finite Domains" (CT-RSA 2002); the round function is the `lowbias32` hash of Chris Wellons with key words
added, its values brought to [0, a) by Lemire's multiply-shift. It mixes well; it is no cryptography.

The exact definition, which is part of every checkpoint and never changes (all numbers are unsigned, `^` is xor):

1. a is the smallest even number with a * a >= n, b = ceil(n / a): the domain a * b exceeds n by less than a, so for large n
   hardly any position walks. (a is even because with a and b odd, every Feistel permutation would be an even one.)
2. Key words: k[0], ..., k[23] are the first 24 little-endian 32-bit words of SHAKE-256 over the ASCII text
   `mgpu order 1 SEED EPOCH`, the two numbers in decimal.
3. Round i, on 32-bit words modulo 2**32:
   f(i, x) = y * size >> 32, in 64 bits, where y comes from x by
   `x ^= k[2i]; x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x += k[2i + 1]; x *= 0x846ca68b; x ^= x >> 16`.
4. E(p): left, right = divmod(p, b); for i = 0, ..., 11: if i is even, left = (left + f(i, right)) mod a with size a, else
   right = (right + f(i, left)) mod b with size b. The value is left * b + right.
5. The sample at position p is the first of E(p), E(E(p)), ... that is below n.

Twelve rounds: with ideal round functions the permutations of n = 3 and n = 4 are uniform to 0.03 % (worked out exactly).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAXIMUM_LENGTH = 2**62
"""Longest epoch: both halves of a position still fit a 32-bit word with one bit to spare for the addition."""

ROUNDS = 12
MULTIPLIERS = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
CHUNK = 32768
"""Positions worked on at a time: few enough for the second-level cache (under 1 MB), enough to hide the cost of a NumPy call."""

Words = NDArray[np.uint32]
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class EpochOrder:
    """Which sample stands at each position of an epoch of `n` samples (1 <= n <= 2**62).

    The same (n, seed, epoch) gives the same order on every machine and in every version: see the module's text. Without
    `shuffle`, sample k stands at position k.
    """

    n: int
    seed: int
    epoch: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAXIMUM_LENGTH:
            raise ValueError(f"an epoch has from 1 to 2**62 samples, not {self.n}")
        if self.seed < 0 or self.epoch < 0:
            raise ValueError(f"seed and epoch count from 0, not {self.seed} and {self.epoch}")

    def at(self, positions: ArrayLike) -> Positions:
        """The sample ids at `positions` (integers of any shape), as int64 in that shape.

        Raises ValueError for a position outside [0, n).
        """
        return self._map(positions, inverse=False)

    def inverse(self, ids: ArrayLike) -> Positions:
        """The positions at which the samples `ids` stand: `inverse(at(p)) == p`. Raises ValueError outside [0, n)."""
        return self._map(ids, inverse=True)

    @cached_property
    def _network(self) -> Feistel:
        return Feistel(self.n, self.seed, self.epoch)

    def _map(self, values: ArrayLike, inverse: bool) -> Positions:
        given = np.asarray(values)
        if given.size == 0:
            return np.empty(given.shape, np.int64)
        if not np.issubdtype(given.dtype, np.integer):
            raise ValueError(f"positions and sample ids are integers, not {given.dtype}")
        if given.min() < 0 or given.max() >= self.n:
            raise ValueError(f"outside [0, {self.n}): values from {given.min()} to {given.max()}")
        result = np.array(given, np.int64, order="C")  # a copy, mapped in place
        if self.shuffle:
            flat = result.reshape(-1)
            for start in range(0, flat.size, CHUNK):
                self._walk(flat[start : start + CHUNK], inverse)
        return result

    def _walk(self, chunk: Positions, inverse: bool) -> None:
        """Map `chunk` in place, each value again and again until it is below n: those that are go no further."""
        apply = self._network.decrypt if inverse else self._network.encrypt
        apply(chunk)
        outside = np.flatnonzero(chunk >= self.n)
        while outside.size:
            walking = chunk[outside]
            apply(walking)
            chunk[outside] = walking
            outside = outside[walking >= self.n]


class Feistel:
    """The permutation E of [0, a * b) defined at the top of this module, and its inverse."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        left = math.isqrt(n - 1) + 1
        self.left = left + left % 2
        self.right = -(-n // self.left)
        digest = hashlib.shake_256(f"mgpu order 1 {seed} {epoch}".encode("ascii")).digest(8 * ROUNDS)
        self._keys = np.frombuffer(digest, "<u4").astype(np.uint32).reshape(ROUNDS, 2)

    def encrypt(self, values: Positions) -> None:
        """Replace `values` by E(values)."""
        left, right = self._split(values)
        scratch = Scratch(values.size)
        for index in range(ROUNDS):
            target, source, size = (left, right, self.left) if index % 2 == 0 else (right, left, self.right)
            np.add(target, self._round(index, source, size, scratch), out=target)
            # target - size wraps round to a huge number unless target >= size: the minimum is target mod size
            np.minimum(target, np.subtract(target, np.uint32(size), out=scratch.shifted), out=target)
        self._join(left, right, values)

    def decrypt(self, values: Positions) -> None:
        """Replace `values` by the values that E takes to them."""
        left, right = self._split(values)
        scratch = Scratch(values.size)
        for index in reversed(range(ROUNDS)):
            target, source, size = (left, right, self.left) if index % 2 == 0 else (right, left, self.right)
            np.subtract(target, self._round(index, source, size, scratch), out=target)
            # a negative difference has wrapped round to a huge number, which adding size brings back
            np.minimum(target, np.add(target, np.uint32(size), out=scratch.shifted), out=target)
        self._join(left, right, values)

    def _round(self, index: int, source: Words, size: int, scratch: Scratch) -> Words:
        """f(index, source) in [0, size), in one of the scratch arrays."""
        word, shifted, product = scratch.word, scratch.shifted, scratch.product
        first_key, second_key = self._keys[index]
        np.bitwise_xor(source, first_key, out=word)
        word ^= np.right_shift(word, 16, out=shifted)
        word *= MULTIPLIERS[0]
        word ^= np.right_shift(word, 15, out=shifted)
        word += second_key
        word *= MULTIPLIERS[1]
        word ^= np.right_shift(word, 16, out=shifted)
        product[...] = word
        product *= np.uint64(size)
        product >>= np.uint64(32)
        word[...] = product
        return word

    def _split(self, values: Positions) -> tuple[Words, Words]:
        quotient = values // self.right
        return quotient.astype(np.uint32), (values - quotient * self.right).astype(np.uint32)

    def _join(self, left: Words, right: Words, values: Positions) -> None:
        values[...] = left
        values *= self.right
        values += right


class Scratch:
    """The arrays that the rounds over one chunk write into, allocated once."""

    def __init__(self, size: int) -> None:
        self.word = np.empty(size, np.uint32)
        self.shifted = np.empty(size, np.uint32)
        self.product = np.empty(size, np.uint64)
