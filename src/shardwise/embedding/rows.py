"""Embeddings whose rows are spread over all ranks; of a table only the rows that are looked up travel.

The hybrid of a huge table and a dense part that is trained data-parallel, without a parameter server: every rank holds
a range of the table's rows with their gradients and optimizer state, asks the others for the rows that its batch needs,
each once, and sends the gradients of these rows back to where they live. Every rank is server and client in one.

==========  ==============================================  ============================================
forward     how many ids I ask each rank for                ``8 (n-1)`` bytes
            the ids                                         8 bytes for each different foreign id
            the rows that others asked me for               a row for each
backward    gradients of the rows that I asked for          a row for each different foreign id
==========  ==============================================  ============================================

Sums are those of one process that adds up the ranks' gradients in order and divides by their number, to the last bit;
where a table is called several times in a forward, call by call. Rows and gradients travel in the table's own dtype;
then rows are cast to what the policy computes in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.comm.base import Comm
from shardwise.spec.errors import PlanError
from shardwise.spec.rows import row_bounds
from shardwise.spec.slice import Cut, Slice, set_slice
from shardwise.spec.styles import matches
from shardwise.tensor.apply import take
from shardwise.tensor.layer import Layer, only

#: What a rank tells instead of how many rows it asks for, where it asks for some that there are not.
_OUTSIDE = -1


def find_row_sharded(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Embedding]:
    """The embeddings that ``ParallelPlan.row_sharded`` names, by path.

    Raises:
        PlanError: A pattern matches no module, or one that cannot be spread.
    """
    found: dict[str, nn.Embedding] = {}
    for pattern in patterns:
        chosen = {path: module for path, module in model.named_modules() if path and matches(pattern, path)}
        if not chosen:
            tables = [path for path, module in model.named_modules() if isinstance(module, nn.Embedding)]
            raise PlanError(
                f"row_sharded: {pattern!r} matches no module of {type(model).__name__}.\n"
                f"  Its embeddings: {', '.join(tables[:8]) or 'none'}."
            )
        for path, module in chosen.items():
            found[path] = _checked(model, path, module)
    return found


def _checked(model: nn.Module, path: str, module: nn.Module) -> nn.Embedding:
    if not isinstance(module, nn.Embedding):
        advice = (
            "Use an nn.Embedding, and add up the rows of each bag in forward (docs/migrating.md shows it)"
            if isinstance(module, nn.EmbeddingBag)
            else "Name embeddings only"
        )
        raise PlanError(f"row_sharded: {path!r} is a {type(module).__name__}, not an nn.Embedding.\n  {advice}.")
    for option, value in (("max_norm", module.max_norm), ("scale_grad_by_freq", module.scale_grad_by_freq or None)):
        if value is not None:
            raise PlanError(
                f"row_sharded: {path!r} has {option}={value}, for which a rank would need all ranks' ids.\n"
                f"  Build it without {option}, or leave it out of row_sharded."
            )
    if module.sparse:
        raise PlanError(
            f"row_sharded: {path!r} has sparse=True, but its gradient is a dense one of this rank's rows.\n"
            "  Build it with sparse=False: no gradient of the whole table is ever made."
        )
    for other, owner in model.named_modules():
        if owner is not module and any(p is module.weight for p in owner.parameters(recurse=False)):
            raise PlanError(
                f"row_sharded: the weight of {path!r} is tied to {other!r}, which needs all of its rows.\n"
                "  Untie them, or leave it out of row_sharded."
            )
    return module


def table_weights(tables: dict[str, nn.Embedding]) -> dict[str, nn.Parameter]:
    """Their parameters, by name."""
    return {f"{path}.weight": weight for path, module in tables.items() for weight in module.parameters()}


def spread_rows(
    tables: dict[str, nn.Embedding],
    comm: Comm,
    dtypes_of: Callable[[str, nn.Embedding], tuple[torch.dtype, torch.dtype]],
) -> list[str]:
    """Leave in each embedding this rank's rows, and look the others up through ``comm``. In place; names stay.

    Args:
        tables: By path; whole, the same on every rank.
        comm: Over all ranks that train the model.
        dtypes_of: In which dtypes a table is held, and its rows are handed on.

    Returns:
        What a summary should say.
    """
    notes = []
    for path, module in tables.items():
        bounds = row_bounds(module.num_embeddings, comm.size)
        cuts = (Cut(0, ((bounds[comm.rank], bounds[comm.rank + 1]),)),)
        held = Slice(tuple(module.weight.shape), cuts, names=(f"{path}.weight",))
        master, handed_on = dtypes_of(path, module)
        module.weight.data = take(module.weight.data, held).to(master)
        set_slice(module.weight, held)
        RowShardedEmbedding(module, path, comm, bounds, handed_on).install()
        shown = f"{bounds[comm.rank]} to {bounds[comm.rank + 1]} of {module.num_embeddings}"
        notes.append(f"{path}: rows spread over {comm.size} ranks, here {shown}; those looked up travel")
    return notes


class RowShardedEmbedding(Layer):
    """An embedding of which this rank holds a range of the rows.

    Args:
        module: An ``nn.Embedding`` whose weight is this rank's rows.
        name: Its path.
        comm: Over all ranks that train the model.
        bounds: Where each rank's rows begin, and the end.
        dtype: Of what it returns.
    """

    def __init__(self, module: nn.Module, name: str, comm: Comm, bounds: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(module, name, comm)
        self.bounds = bounds
        self.dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Ids to their rows, as ``nn.Embedding``.

        Collective:
            Three all-to-alls on the axis of all ranks, and one in backward: all ranks must call, and go backward
            through it, equally often. The bytes stand at the top of the file. The host waits for the counts.

        Raises:
            IndexError: A rank asks for rows that there are not; on every rank.
        """
        ids, module = only(args, kwargs), self.module
        wanted, inverse = _distinct(ids)
        rows = _Lookup.apply(module.weight, wanted, inverse, _Route(self, wanted, module.padding_idx))
        return rows.to(self.dtype)


def _distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The different ids in order, and of each id its place among them; in a dry run no two ids are alike."""
    if ids.is_meta:
        return ids.reshape(-1), ids
    return torch.unique(ids, return_inverse=True)


class _Route:
    """Where the rows of one call lie: how many are asked of each rank, and for which rows each rank has asked here.

    Attributes:
        cuts: Of the different ids of this rank, by the rank that holds their rows.
        asked_cuts: Of the ids that the ranks ask this one for, by who asks.
        rows: Those ids, as rows of this rank's weight.
        padding: Which of this rank's different ids gets no gradient; -1 for none.
    """

    def __init__(self, layer: RowShardedEmbedding, wanted: Tensor, padding: int | None) -> None:
        comm, bounds = layer.comm, layer.bounds
        self.comm, self.name = comm, layer.name
        self.padding = -1
        if padding is not None and not wanted.is_meta:
            self.padding = next(iter((wanted == padding).nonzero().flatten().tolist()), -1)
        if wanted.is_meta:
            self.cuts = self.asked_cuts = list(row_bounds(wanted.numel(), comm.size))
        else:
            edges = torch.tensor(bounds, dtype=wanted.dtype, device=wanted.device)
            self.cuts = torch.searchsorted(wanted, edges).tolist()
            self.asked_cuts = self._exchange_counts(wanted, bounds[-1])
        start = bounds[comm.rank]
        self.rows = self.to_owners(wanted) - start

    def _exchange_counts(self, wanted: Tensor, num_rows: int) -> list[int]:
        counts = [stop - start for start, stop in itertools.pairwise(self.cuts)]
        is_inside = self.cuts[0] == 0 and self.cuts[-1] == wanted.numel()
        if not is_inside:
            counts = [_OUTSIDE] * len(counts)  # the others would wait for this rank: all of them raise
        mine = torch.tensor(counts, dtype=torch.int64, device=wanted.device)
        theirs = mine.clone()
        self.comm.all_to_all(mine, theirs, unit=self.name).wait()
        told = theirs.tolist()
        told[self.comm.rank] = counts[self.comm.rank]
        if _OUTSIDE in told:
            asked = f"for {wanted[0].item()} to {wanted[-1].item()}" if not is_inside else "for others"
            who = [rank for rank, count in enumerate(told) if count == _OUTSIDE]
            raise IndexError(
                f"{self.name!r} has rows 0 to {num_rows - 1}, but was asked {asked} by rank {', '.join(map(str, who))}."
            )
        return [0, *itertools.accumulate(told)]

    def to_owners(self, values: Tensor) -> Tensor:
        """What I have for each row that I asked for, to its owner; returns what others have for mine, in rank order."""
        return self._send(values, self.cuts, self.asked_cuts)

    def to_askers(self, values: Tensor) -> Tensor:
        """The way back."""
        return self._send(values, self.asked_cuts, self.cuts)

    def _send(self, values: Tensor, cuts: list[int], out_cuts: list[int]) -> Tensor:
        width = values.shape[1] if values.dim() > 1 else 1
        out = values.new_empty((out_cuts[-1], *values.shape[1:]))
        rank = self.comm.rank
        out[out_cuts[rank] : out_cuts[rank + 1]] = values[cuts[rank] : cuts[rank + 1]]
        if self.comm.size > 1:
            self.comm.all_to_all(
                values.contiguous().view(-1),
                out.view(-1),
                unit=self.name,
                cuts=[cut * width for cut in cuts],
                out_cuts=[cut * width for cut in out_cuts],
            ).wait()
        return out


class _Lookup(torch.autograd.Function):
    """Rows of all ranks for this rank's ids; backward: gradients of this rank's rows from all ranks' ids."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, wanted: Tensor, inverse: Tensor, route: _Route) -> Tensor:
        rows = route.to_askers(weight.index_select(0, route.rows))
        ctx.route, ctx.shape, ctx.num_wanted = route, weight.shape, wanted.numel()
        ctx.save_for_backward(inverse)
        return F.embedding(inverse, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        route: _Route = ctx.route
        # As one process adds: a rank's ids in the order of its batch, then the ranks in order, then one division.
        mine = torch.ops.aten.embedding_dense_backward(grads[0], inverse, ctx.num_wanted, route.padding, False)  # noqa: FBT003
        given = route.to_owners(mine)
        total = given.new_zeros(ctx.shape)
        cuts = route.asked_cuts
        for start, stop in itertools.pairwise(cuts):
            total.index_add_(0, route.rows[start:stop], given[start:stop])
        return total.div_(route.comm.size), None, None, None, None
