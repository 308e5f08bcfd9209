"""The order of samples: a permutation for each epoch, divided into global batches, divided over ranks.

The order of samples is one endless sequence of *global positions* 0, 1, 2, ... Position ``p`` belongs to epoch ``p //
num_samples`` and reads sample ``permutation(seed, epoch)[p % num_samples]``. A step with a global batch of ``B``
samples takes the next ``B`` positions, for any number of ranks. So with a constant global batch every world size sees
the same sequence of global batches, and the number of positions taken is the only state. Batches may span two epochs:
no sample is dropped.

With several sources each has its own permutations, and ``mixture`` chooses the source of a position.

Inside a global batch the order is rank-major. With ``R`` data-parallel ranks and ``A`` microbatches of ``M`` samples::

    offset of sample j of microbatch m of rank r  =  (r * A + m) * M + j

so rank ``r`` reads one contiguous range of ``A * M`` positions.

Permutations are never materialized: a keyed Feistel network on ``2k`` bits is applied until the value is below
``num_samples`` (fewer than four rounds on average, because the domain is less than four times as large; Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). About 10 microseconds and no memory per sample.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from shardwise.spec.errors import CheckpointError, ConfigError

#: A global position, and the sample that is read there.
Draw = tuple[int, int]

_MASK = (1 << 64) - 1
_ROUNDS = 6


def _mix(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014): 64 bits in, 64 well-mixed bits out."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mix_seed(seed: int, position: int) -> int:
    """Return a seed of 63 bits for a sample's random numbers, from a run's seed and the sample's position."""
    return _mix(_mix(seed & _MASK) + position) >> 1


class Permutation:
    """A bijection of ``range(size)`` that depends only on ``seed`` and ``epoch``."""

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        if size < 1:
            raise ConfigError(f"a permutation of {size} samples.\n  Give it at least one.")
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._low = (1 << self._half) - 1
        key = _mix(_mix(seed & _MASK) + epoch)
        self._keys = [_mix(key + round_) for round_ in range(_ROUNDS)]

    def __len__(self) -> int:
        """Number of samples."""
        return self.size

    def __getitem__(self, index: int) -> int:
        """Return the sample at place ``index`` of this epoch."""
        if not 0 <= index < self.size:
            raise IndexError(index)
        value = self._round_trip(index)
        while value >= self.size:
            value = self._round_trip(value)
        return value

    def _round_trip(self, value: int) -> int:
        left, right = value >> self._half, value & self._low
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._low)
        return (left << self._half) | right


_permutation = functools.lru_cache(64)(Permutation)


def permute(position: int, num_samples: int, seed: int) -> int:
    """Return the sample at a position of an endless sequence of epochs."""
    epoch, index = divmod(position, num_samples)
    return _permutation(num_samples, seed=seed, epoch=epoch)[index]


@dataclass(slots=True)
class Sampler:
    """The samples of one rank, step by step."""

    num_samples: int  # samples in an epoch
    seed: int
    micro_batch_size: int
    accumulation: int
    data_parallel_rank: int  # this rank among those that read different samples
    data_parallel_size: int  # number of ranks that read different samples
    position: int = 0  # global positions consumed so far, by all ranks together

    @property
    def global_batch_size(self) -> int:
        """Number of samples per step over all ranks."""
        return self.micro_batch_size * self.accumulation * self.data_parallel_size

    def sample(self, position: int) -> int:
        """Return the sample at a global position."""
        return permute(position, self.num_samples, self.seed)

    def global_batch(self) -> Iterator[int]:
        """Return the samples of the next global batch, of all ranks."""
        return (self.sample(position) for position in range(self.position, self.position + self.global_batch_size))

    def next_step(self) -> list[list[int]]:
        """Return this rank's samples of the next global batch, one list per microbatch, and advance past that batch."""
        per_rank = self.micro_batch_size * self.accumulation
        start = self.position + self.data_parallel_rank * per_rank
        samples = [self.sample(position) for position in range(start, start + per_rank)]
        self.position += self.global_batch_size
        size = self.micro_batch_size
        return [samples[m * size : (m + 1) * size] for m in range(self.accumulation)]

    def upcoming(self) -> Iterator[list[Draw]]:
        """Return this rank's microbatches from the next step on, without end and without advancing."""
        return _without_end(dataclasses.replace(self))

    def state(self) -> dict[str, int]:
        """Return the state for a checkpoint."""
        return {"position": self.position, "seed": self.seed, "num_samples": self.num_samples}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, on any number of ranks; refuse the state of other data or another seed."""
        _check_same(state, self)
        self.position = natural(state, "position")


def _without_end(sampler: Sampler) -> Iterator[list[Draw]]:
    while True:
        first = sampler.position + sampler.data_parallel_rank * sampler.micro_batch_size * sampler.accumulation
        for samples in sampler.next_step():
            yield list(enumerate(samples, first))
            first += sampler.micro_batch_size


class DistributedSampler:
    """Yield the samples of a data set that this rank reads, for ``DataLoader(data, batch_size, sampler=...)``.

    Every sample is read once in an epoch, by one rank: none is repeated, and none is left out without ``drop_last``.
    The order of an epoch depends only on ``seed`` and the epoch. Rank ``r`` of ``n`` takes places ``r, r + n, r + 2n,
    ...`` of it, so that for one global batch size the global batches are the same on any number of ranks, and a run may
    continue on a different number. ::

        sampler = sw.DistributedSampler(data, model=model)
        loader = DataLoader(data, batch_size=8, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                ...

    If the number of samples is not a multiple of the ranks, the first ranks have one sample more than the others: train
    over ``sw.join(model, loader)``, or set ``drop_last=True``.

    Args:
        data: A data set with a length, or the number of samples.
        model: A parallelized model, whose ``sw.data_parallel_rank`` and ``sw.data_parallel_size`` are used. They differ
            from rank and world size under ``tp``, ``cp`` and ``pp``.
        num_replicas: Without ``model``: how many ranks read different samples. ``None``: the ranks of
            ``torch.distributed``, or one.
        rank: Without ``model``: this rank, below ``num_replicas``.
        shuffle: ``False``: use the data set's order in every epoch.
        seed: Seed of the orders.
        drop_last: Leave out the remainder, fewer samples than there are ranks; with ``shuffle`` different ones in each
            epoch.

    Raises:
        ConfigError: There are no samples, or ``rank`` is not below ``num_replicas``.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        model: Any = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.num_samples = data if isinstance(data, int) else len(data)
        self.rank, self.num_replicas = _place_of(model, rank, num_replicas)
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self._start = 0  # places of this epoch that all ranks together consumed before the resume
        self._num_given = 0  # samples given by the current iterator of this rank
        if self.num_samples < 1 or not 0 <= self.rank < self.num_replicas:
            raise ConfigError(
                f"DistributedSampler of {self.num_samples} samples for rank {self.rank} of {self.num_replicas}.\n"
                "  Give it at least one sample, and ranks from 0 to num_replicas - 1."
            )

    def __len__(self) -> int:
        """Return the number of samples that this rank has left in this epoch."""
        return len(self._positions)

    @property
    def _positions(self) -> range:
        end = self.num_samples
        if self.drop_last:
            end -= (end - self._start) % self.num_replicas
        return range(self._start + self.rank, end, self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples of the epoch, from the loaded position."""
        order = Permutation(self.num_samples, seed=self.seed, epoch=self.epoch) if self.shuffle else None
        self._num_given = 0
        for position in self._positions:
            self._num_given += 1
            yield position if order is None else order[position]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and with it the order; if the epoch changes, it starts at its first sample."""
        if epoch != self.epoch:
            self.epoch, self._start, self._num_given = epoch, 0, 0

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the position in the epoch, for any number of ranks.

        With ``DataLoader(num_workers=...)`` the iterator is ahead of training, because workers read in advance. Pass
        the number of samples that training has consumed::

            for step, batch in enumerate(loader, start=1):
                ...
                state = sampler.state_dict(consumed=step * batch_size * sw.data_parallel_size(model))

        Args:
            consumed: Samples that all ranks together have trained with since the epoch began, or since
                :meth:`load_state_dict` in a resumed epoch. The last batch of an epoch may count as a full one.
                ``None``: the samples that the iterator has given.

        Raises:
            ConfigError: ``consumed`` is negative, more than this sampler has given, or not the same number of samples
                on every rank.
        """
        unread, size = self._positions, self.num_replicas
        num_left = len(unread) * size if self.drop_last else self.num_samples - self._start
        num_given = self._num_given * size
        if consumed is None:
            consumed = num_given
        else:
            is_whole = self._num_given == len(unread)  # the last batch may be smaller, by an unknown number
            if consumed < 0 or (consumed > num_given and not is_whole) or (consumed % size and consumed < num_left):
                raise ConfigError(
                    f"DistributedSampler.state_dict(consumed={consumed}): expected the samples that all {size} ranks"
                    f" together have trained with since this epoch began or was resumed, a multiple of {size}, and at"
                    f" most the {min(num_given, num_left)} that this sampler has given.\n"
                    "  Call state_dict(consumed=step * batch_size * sw.data_parallel_size(model)), where step counts"
                    " the batches of this loop over the loader."
                )
        position = self._start + min(consumed, num_left)
        return {"epoch": self.epoch, "position": position, "seed": self.seed, "num_samples": self.num_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, on any number of ranks; the next iteration starts there.

        Raises:
            CheckpointError: The state belongs to other data or another seed, or has no valid position.
        """
        _check_same(state, self)
        epoch, position = natural(state, "epoch"), natural(state, "position")
        if position > self.num_samples:
            raise CheckpointError(
                f"the checkpoint's sampler has position={position}, and an epoch has {self.num_samples} samples.\n"
                "  Continue from another checkpoint."
            )
        self.epoch, self._start, self._num_given = epoch, position, 0


def _check_same(state: Mapping[str, Any], sampler: Sampler | DistributedSampler) -> None:
    """Refuse the state of a sampler with other data or another seed."""
    for key in ("seed", "num_samples"):
        if state.get(key) != getattr(sampler, key):
            raise CheckpointError(
                f"the checkpoint's sampler has {key}={state.get(key)!r}, this run has {getattr(sampler, key)}.\n"
                "  Resume with the data and the seed that the run began with."
            )


def natural(state: Mapping[str, Any], key: str) -> int:
    """Return a count of a sampler's state, or raise if it is not a natural number."""
    value = state.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError(f"the checkpoint's sampler has {key}={value!r}.\n  Continue from another checkpoint.")
    return value


def _place_of(model: Any, rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    """Return this rank's share of the samples, and the number of shares."""
    if (rank is None) != (num_replicas is None) or (model is not None and rank is not None):
        raise ConfigError(
            "DistributedSampler: rank and num_replicas are given together, or a model, which knows both.\n"
            "  Pass model=model, or both numbers."
        )
    if rank is not None and num_replicas is not None:
        return rank, num_replicas
    if model is not None:
        from shardwise.api.model import data_parallel_rank, data_parallel_size

        return data_parallel_rank(model), data_parallel_size(model)
    from torch import distributed as dist

    is_there = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if is_there else (0, 1)
