"""Facts about an optimizer: its engines, and the granularity at which its parameters may be sharded."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from shardwise.engine.storage.attachment import engine_of_unit
from shardwise.engine.storage.flat_parameters import FlatParameter, group_of
from shardwise.spec.granularity import ELEMENT, TENSOR, Granularity, block, resolve_granularity

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

#: Identity and length of each list of parameters of an optimizer.
Content = tuple[tuple[int, int], ...]

#: The part of a parameter that each optimizer needs undivided on one rank. Classes of other packages are given by name,
#: so that nothing is imported for them.
_NEEDS: dict[type | str, Granularity] = {
    torch.optim.Adam: ELEMENT,
    torch.optim.AdamW: ELEMENT,
    torch.optim.SGD: ELEMENT,
    torch.optim.Adagrad: ELEMENT,
    torch.optim.RMSprop: ELEMENT,
    torch.optim.Adadelta: ELEMENT,
    torch.optim.Adamax: ELEMENT,
    torch.optim.NAdam: ELEMENT,
    torch.optim.RAdam: ELEMENT,
    torch.optim.ASGD: ELEMENT,
    torch.optim.Rprop: ELEMENT,
    torch.optim.Muon: TENSOR,  # orthogonalizes each matrix
    "shardwise.optim.muon.Muon": ELEMENT,  # gathers each matrix on one rank itself
    torch.optim.Adafactor: TENSOR,  # the step's size depends on norms of the full parameter and of its update
    "transformers.optimization.Adafactor": TENSOR,
    "schedulefree.adamw_schedulefree.AdamWScheduleFree": ELEMENT,
    "schedulefree.sgd_schedulefree.SGDScheduleFree": ELEMENT,
    "schedulefree.radam_schedulefree.RAdamScheduleFree": ELEMENT,
}

#: Optimizers with one scale for each ``block_size`` elements of their state.
_BLOCKWISE = frozenset({"torchao.optim.adam.Adam8bit", "torchao.optim.adam.AdamW8bit"})

#: Cache of :func:`engines_of` and :func:`shards_of`, with the content for which it is valid.
_engines: weakref.WeakKeyDictionary[
    torch.optim.Optimizer, tuple[Content, list[weakref.ref[Engine]], frozenset[int]]
] = weakref.WeakKeyDictionary()


def declare_granularity(
    cls: type[torch.optim.Optimizer], granularity: str | Granularity | tuple[str, int]
) -> type[torch.optim.Optimizer]:
    """Declare that ``cls`` updates each part of a parameter (row, block, tensor) from gradients of that part alone.

    Optimizers of this class are then accepted under plans whose granularity never divides such a part.

    Args:
        cls: An optimizer class.
        granularity: ``"row"``, ``sw.block(n)`` or ``"tensor"``.

    Returns:
        ``cls``.

    Raises:
        TypeError: ``cls`` is not a class.
        PlanError: There is no such granularity.
    """
    if not isinstance(cls, type):
        raise TypeError(f"an optimizer class is expected, got {cls!r}.")
    _NEEDS[cls] = resolve_granularity(granularity)
    return cls


def declare_elementwise(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Declare that ``cls`` updates each element from gradients of that element alone. Usable as a class decorator.

    Optimizers of this class are then accepted on all shards. Returns ``cls``.

    Raises:
        TypeError: ``cls`` is not a class.
    """
    return declare_granularity(cls, ELEMENT)


def needed_by(optimizer: torch.optim.Optimizer) -> Granularity | None:
    """The granularity that an optimizer needs; ``None`` if it is unknown."""
    cls = type(optimizer)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name in _BLOCKWISE:
        return block(optimizer.__dict__["block_size"])
    return _NEEDS.get(cls) or _NEEDS.get(name) or _needed_by_bitsandbytes(optimizer, name)


def _needed_by_bitsandbytes(optimizer: torch.optim.Optimizer, name: str) -> Granularity | None:
    """The granularity of bitsandbytes optimizers: 32-bit state is element-wise unless updates are scaled by norms."""
    settings = vars(optimizer).get("args")
    if not name.startswith("bitsandbytes.optim.") or settings is None:
        return None
    if getattr(settings, "max_unorm", 0) > 0 or getattr(settings, "percentile_clipping", 100) < 100:
        return TENSOR
    return ELEMENT if bits_of(optimizer) == 32 else None


def bits_of(optimizer: torch.optim.Optimizer) -> int:
    """Bits of each value of a bitsandbytes optimizer's state; 32 for other optimizers."""
    return int(getattr(vars(optimizer).get("args"), "optim_bits", 32))


def content_of(optimizer: torch.optim.Optimizer) -> Content:
    """Return the content of an optimizer, which shows whether its parameters have changed."""
    return tuple((id(params), len(params)) for params in (settings["params"] for settings in optimizer.param_groups))


def engines_of(optimizer: torch.optim.Optimizer) -> list[Engine]:
    """The engines whose parameters this optimizer updates, in the order of its parameters."""
    lists = [settings["params"] for settings in optimizer.param_groups]
    content = content_of(optimizer)
    known = _engines.get(optimizer)
    if known is not None and known[0] == content:
        engines = [reference() for reference in known[1]]
        if all(engine is not None and engine_of_unit(engine.units[0]) is engine for engine in engines):
            return [engine for engine in engines if engine is not None]
    every = [parameter for params in lists for parameter in params]
    owners = dict.fromkeys(group_of(parameter) for parameter in every)
    found = (engine_of_unit(owner.unit) for owner in owners if owner is not None)
    distinct = list(dict.fromkeys(engine for engine in found if engine is not None))
    # A flat parameter has only the shards of which this rank owns elements. Add the others, so that ranks agree.
    flats = [group_of(parameter) for parameter in every if isinstance(parameter, FlatParameter)]
    shards = {id(shard) for flat in flats if flat is not None for shard in flat.shards} | {id(p) for p in every}
    _engines[optimizer] = content, [weakref.ref(engine) for engine in distinct], frozenset(shards)
    return distinct


def shards_of(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Identities of the parameters that this optimizer updates, including those in flat parameters."""
    engines_of(optimizer)
    return _engines[optimizer][2]
