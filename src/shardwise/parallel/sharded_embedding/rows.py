"""Embeddings whose rows are sharded over all ranks; only rows that are looked up are sent.

This is for a huge table in a model that is otherwise data-parallel, without a parameter server. Every rank stores a
range of the table's rows with their gradients and optimizer state. It requests each row that its batch needs from the
row's owner once, and sends the gradients of these rows back to the owners.

==========  ==============================================  ============================================
forward     the number of ids for each rank                 ``8 (n-1)`` bytes
            the ids                                         8 bytes for each distinct id of another rank
            the requested rows                              a row for each
backward    gradients of the rows that were requested       a row for each distinct id of another rank
==========  ==============================================  ============================================

Sums equal bitwise those of one process that adds up the ranks' gradients in order and divides by their number. If a
table is called several times in a forward, this holds for each call. Rows and gradients are sent in the table's own
dtype; then rows are cast to the compute dtype of the policy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.comm.base import Comm
from shardwise.comm.rows import exchange_counts, exchange_rows
from shardwise.parallel.tensor.apply import copy_part
from shardwise.parallel.tensor.layer import ReplacedForward, single_argument
from shardwise.spec.errors import PlanError
from shardwise.spec.slice import Cut, Slice, set_slice
from shardwise.spec.styles import matches
from shardwise.spec.traffic.rows import row_bounds

#: Sent by a rank in place of its counts if it looks up rows that do not exist.
_OUTSIDE = -1


def find_row_sharded(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Embedding]:
    """Return the embeddings that ``ParallelPlan.row_sharded`` names, by path."""
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
    if type(module).forward is not nn.Embedding.forward or [*dict(module.named_parameters())] != ["weight"]:
        raise PlanError(
            f"row_sharded: {path!r} is a {type(module).__name__} that does more than look up rows of its parameter,"
            " which would be lost.\n"
            "  Use a plain nn.Embedding and do the rest in the module around it, or leave it out of row_sharded."
        )
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


def table_weights(tables: Mapping[str, nn.Embedding]) -> dict[str, nn.Parameter]:
    """Return the parameters of embeddings, by name."""
    return {f"{path}.weight": weight for path, module in tables.items() for weight in module.parameters()}


def shard_rows(
    tables: Mapping[str, nn.Embedding],
    comm: Comm,
    dtypes_of: Callable[[str, nn.Embedding], tuple[torch.dtype, torch.dtype]],
) -> list[str]:
    """Keep only this rank's rows in each embedding, in place, and look up the others through ``comm``. Names stay.

    ``dtypes_of`` returns the dtypes of the stored rows and of the output of an embedding.

    Returns:
        Lines for a summary.
    """
    notes = []
    for path, module in tables.items():
        bounds = row_bounds(module.num_embeddings, comm.size)
        cuts = (Cut(0, ((bounds[comm.rank], bounds[comm.rank + 1]),)),)
        part = Slice(tuple(module.weight.shape), cuts, names=(f"{path}.weight",))
        master, output_dtype = dtypes_of(path, module)
        module.weight.data = copy_part(module.weight.data, part).to(master)
        set_slice(module.weight, part)
        RowShardedEmbedding(module, path, comm, bounds, output_dtype).install()
        shown = f"{bounds[comm.rank]} to {bounds[comm.rank + 1]} of {module.num_embeddings}"
        notes.append(f"{path}: rows spread over {comm.size} ranks, here {shown}; those looked up travel")
    return notes


class RowShardedEmbedding(ReplacedForward):
    """The forward of an embedding of which this rank stores a range of the rows."""

    def __init__(self, module: nn.Module, name: str, comm: Comm, bounds: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(module, name, comm)
        self.bounds = bounds
        self.dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the rows of ids, as ``nn.Embedding``.

        Collective:
            Three all-to-alls over all ranks, and one in backward. All ranks must call it, and run its backward, equally
            often. The bytes are in the table at the top of the file. The host waits for the counts.
        """
        ids, module = single_argument(args, kwargs), self.module
        wanted, inverse = _distinct(ids)
        rows = _Lookup.apply(module.weight, wanted, inverse, _Route(self, wanted, module.padding_idx))
        return rows.to(self.dtype)


def _distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ids, sorted, and the index of each id among them; a dry run assumes that all are distinct."""
    if ids.is_meta:
        return ids.reshape(-1), ids
    return torch.unique(ids, return_inverse=True)


class _Route:
    """The exchange of one call's rows.

    Attributes:
        id_bounds: Offsets, by owner, in this rank's distinct ids, and their number.
        requested_bounds: Offsets, by requesting rank, in the ids that are requested from this rank, and their number.
        rows: The requested ids, as rows of this rank's weight.
        padding: Index among this rank's distinct ids of the padding id, which gets no gradient; -1: none.
    """

    def __init__(self, layer: RowShardedEmbedding, wanted: Tensor, padding: int | None) -> None:
        comm, bounds = layer.comm, layer.bounds
        self.comm, self.name = comm, layer.name
        self.padding = -1
        if padding is not None and not wanted.is_meta:
            self.padding = next(iter((wanted == padding).nonzero().flatten().tolist()), -1)
        if wanted.is_meta:
            self.id_bounds = self.requested_bounds = list(row_bounds(wanted.numel(), comm.size))
        else:
            edges = torch.tensor(bounds, dtype=wanted.dtype, device=wanted.device)
            self.id_bounds = torch.searchsorted(wanted, edges).tolist()
            self.requested_bounds = self._exchange_counts(wanted, bounds[-1])
        self.rows = self.to_owners(wanted) - bounds[comm.rank]

    def _exchange_counts(self, wanted: Tensor, num_rows: int) -> list[int]:
        counts = [stop - start for start, stop in itertools.pairwise(self.id_bounds)]
        is_inside = self.id_bounds[0] == 0 and self.id_bounds[-1] == wanted.numel()
        if not is_inside:
            counts = [_OUTSIDE] * len(counts)  # all ranks raise, because the others would wait for this one
        own_counts = torch.tensor(counts, dtype=torch.int64, device=wanted.device)
        found = exchange_counts(own_counts, self.comm, self.name).flatten().tolist()
        if _OUTSIDE in found:
            requested = f"for {wanted[0].item()} to {wanted[-1].item()}" if not is_inside else "for others"
            ranks = [rank for rank, count in enumerate(found) if count == _OUTSIDE]
            raise IndexError(
                f"{self.name!r} has rows 0 to {num_rows - 1}, but was asked {requested} by rank"
                f" {', '.join(map(str, ranks))}."
            )
        return [0, *itertools.accumulate(found)]

    def to_owners(self, values: Tensor) -> Tensor:
        """Send one value for each row that this rank requested to the row's owner; returns those for its own rows."""
        return exchange_rows(values, self.id_bounds, self.requested_bounds, self.comm, self.name)

    def to_requesters(self, values: Tensor) -> Tensor:
        """Send one value for each requested row back to the requesting rank; returns those for this rank's ids."""
        return exchange_rows(values, self.requested_bounds, self.id_bounds, self.comm, self.name)


class _Lookup(torch.autograd.Function):
    """Looks up rows of all ranks for this rank's ids; in backward, sums gradients of all ranks for this rank's rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, wanted: Tensor, inverse: Tensor, route: _Route) -> Tensor:
        rows = route.to_requesters(weight.index_select(0, route.rows))
        ctx.route, ctx.shape, ctx.num_wanted = route, weight.shape, wanted.numel()
        ctx.save_for_backward(inverse)
        return F.embedding(inverse, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        route: _Route = ctx.route
        # In the order of one process: each rank's ids in batch order, then the ranks in order, then one division.
        own_grads = torch.ops.aten.embedding_dense_backward(grads[0], inverse, ctx.num_wanted, route.padding, False)  # noqa: FBT003
        received = route.to_owners(own_grads)
        total = received.new_zeros(ctx.shape)
        bounds = route.requested_bounds
        for start, stop in itertools.pairwise(bounds):
            total.index_add_(0, route.rows[start:stop], received[start:stop])
        return total.div_(route.comm.size), None, None, None, None
