"""Selection of the parameters that Muon trains, and of fused ones among them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from shardwise.comm.control import all_gather_json
from shardwise.engine.storage.attachment import attachment_of, engine_of
from shardwise.optim.muon import logical_shape
from shardwise.parallel.experts.layer import STACKED
from shardwise.spec.errors import StateError
from shardwise.spec.styles import TABLES, parse_style

#: Ends of the names of output layers, whose weights have one row for each token or label.
_HEADS = re.compile(
    r"(^|\.)(lm_head|lm_head\.decoder|head|heads\.head|score|classifier|classifier\.out_proj|qa_outputs|output_projection"
    r"|cls\.predictions\.decoder|vocab_projector|embed_out)$|^(fc|output|proj_out)$"
)


def muon_groups(
    model: nn.Module,
    *,
    lr: float = 0.02,
    adamw_lr: float = 3e-4,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    fused: Mapping[str, int | Sequence[int]] | None = None,
    adamw: Sequence[str] = (),
    **settings: Any,
) -> list[dict[str, Any]]:
    """Make parameter groups for :class:`~shardwise.optim.muon.Muon`: hidden matrices to Muon, all others to AdamW.

    AdamW gets embeddings, heads (with one row for each token or label), and parameters that are no matrices, such as
    norms and biases; the latter without weight decay. Each matrix of a known fused projection (query, key and value of
    our GPT, GPT-2 and ``nn.MultiheadAttention``) is orthogonalized separately, and so is each expert in the stacked
    weights of Mixtral and Qwen3-MoE.

    Args:
        model: The model, before or after ``sw.parallelize``.
        lr: Learning rate of Muon.
        adamw_lr: Learning rate of AdamW.
        weight_decay: Weight decay of both.
        betas: ``betas`` of AdamW.
        eps: ``eps`` of AdamW.
        fused: Other fused weights by patterns of their names: the number of equal matrices, or the sizes of the
            matrices, along the dimension of outputs, such as ``{"*.gate_up_proj.weight": 2}``. 1: not fused.
        adamw: Patterns of names of matrices that AdamW trains.
        **settings: Other arguments of Muon, such as ``momentum``, ``ns_steps`` or ``adjust_lr_fn``.

    Returns:
        Groups of the trained parameters, in the order of the model, without groups that are empty on all ranks.

    Collective:
        Under ``pp`` or ``ep``, where ranks have different parameters, an all-gather of JSON. All ranks must call.

    Raises:
        StateError: A pattern names no trained matrix, or a weight cannot be divided as given.
    """
    fused = dict(fused or {})
    stacks = dict(_stacks(model))
    known, outputs = dict(_known_parts(model)) | stacks, dict(_output_dims(model))
    for_adamw = set(_other_parameters(model))
    matrices: dict[tuple[tuple[int, ...], int, bool], list[Tensor]] = {}
    decayed: list[Tensor] = []
    plain: list[Tensor] = []
    used: set[str] = set()
    problems: list[str] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        shape = logical_shape(parameter)
        by_pattern = [pattern for pattern in adamw if fnmatchcase(name, pattern)]
        used.update(by_pattern)
        if len(shape) != (3 if name in stacks else 2) or 0 in shape or id(parameter) in for_adamw or by_pattern:
            (decayed if len(shape) >= 2 else plain).append(parameter)
            continue
        pattern = next((each for each in fused if fnmatchcase(name, each)), None)
        used.update([pattern] if pattern is not None else [])
        dim = outputs.get(name, 0)
        try:
            parts = _sizes(name, shape[-2:][dim], fused[pattern] if pattern is not None else known.get(name, 1))
        except StateError as error:
            problems.append(str(error))
            continue
        matrices.setdefault((parts, dim if parts else 0, name in stacks), []).append(parameter)
    patterns = (*adamw, *fused)
    everyone = _gather_from_all(model, [sorted(matrices), len(decayed), len(plain), sorted(used), problems])
    keys = sorted({(tuple(parts), dim, is_stacked) for of_rank in everyone for parts, dim, is_stacked in of_rank[0]})
    num_decayed, num_plain = (sum(of_rank[place] for of_rank in everyone) for place in (1, 2))
    for problem in (text for of_rank in everyone for text in of_rank[4]):
        raise StateError(problem)
    idle = [rank for rank, of_rank in enumerate(everyone) if not any(of_rank[:3])]
    if idle and len(everyone) > 1:
        raise StateError(
            f"sw.muon_groups: rank {', '.join(map(str, idle))} has no trained parameter, but all ranks take part in the"
            " exchange of matrices.\n  Lower pp, train a parameter of every stage, or use AdamW."
        )
    unused = [pattern for pattern in patterns if not any(pattern in of_rank[3] for of_rank in everyone)]
    if unused:
        raise StateError(
            f"sw.muon_groups: no trained matrix is called {', '.join(map(repr, unused))}.\n"
            "  Patterns match whole names as model.named_parameters() gives them, such as '*.gate_up_proj.weight'."
        )
    muon = {"kind": "muon", "lr": lr, "weight_decay": weight_decay, **settings}
    groups = [
        {"params": matrices.get(key, []), **muon, **dict(zip(("parts", "dim", "is_stacked"), key, strict=True))}
        for key in keys
    ]
    other = {"kind": "adamw", "lr": adamw_lr, "betas": betas, "eps": eps}
    if num_decayed:
        groups.append({"params": decayed, "weight_decay": weight_decay, **other})
    if num_plain:
        groups.append({"params": plain, "weight_decay": 0.0, **other})
    return groups


def _gather_from_all(model: nn.Module, own: list[Any]) -> list[list[Any]]:
    """Exchange the ranks' descriptions of their parameters, which differ only under ``pp`` and ``ep``.

    All ranks need the same groups, because checkpoints refer to the groups of an optimizer by number.
    """
    attachment = attachment_of(model)
    comms = None if attachment is None else engine_of(model, "sw.muon_groups").comms
    if comms is None or (comms.pp is None and comms.ep is None) or comms.world.device.type == "meta":
        return [own]
    return all_gather_json(comms.world, own)


def _other_parameters(model: nn.Module) -> Iterator[int]:
    """Yield the identities of the weights of embeddings and heads.

    Names would not do: the head of a pipeline's last stage may have the name of the embedding to which it is tied. A
    transformers model returns its head by a method; in other models heads are found by their usual names.
    """
    named = getattr(model, "get_output_embeddings", None)
    head = named() if callable(named) else None
    if isinstance(head, nn.Module):
        yield from (id(parameter) for parameter in head.parameters(recurse=False))
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) or type(module).__name__.endswith("Embedding") or _HEADS.search(path):
            yield from (id(parameter) for parameter in module.parameters(recurse=False))


def _stacks(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the names of stacked expert weights, (experts, outputs, inputs), and how many matrices each fuses."""
    for path, module in model.named_modules():
        if any(f"{kind.__module__}.{kind.__qualname__}" in STACKED for kind in type(module).__mro__):
            for name, parameter in module.named_parameters(recurse=False):
                if len(logical_shape(parameter)) == 3:
                    yield f"{path}.{name}".lstrip("."), 2 if name.startswith("gate_up") else 1


def _output_dims(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the names of weights whose dimension of outputs is 1, with that dimension."""
    for path, module in model.named_modules():
        if type(module).__name__ == "Conv1D":
            yield f"{path}.weight", 1


def _known_parts(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the names of known fused weights and their numbers of parts, from the tables of tensor parallelism."""
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            yield f"{path}.in_proj_weight".lstrip("."), 3
        cls = type(module)
        for pattern, text in TABLES.get(f"{cls.__module__}.{cls.__qualname__}", {}).items():
            style = parse_style(text, pattern)
            if style.name == "packed_colwise":
                for inner, _ in module.named_modules():
                    if fnmatchcase(inner, pattern):
                        yield f"{path}.{inner}.weight".lstrip("."), style.count


def _sizes(name: str, size: int, parts: int | Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of the parts of a dimension; empty for one part."""
    if isinstance(parts, int):
        if parts < 1 or size % parts:
            raise StateError(f"sw.muon_groups: {name} has {size} outputs, which are not {parts} equal parts.")
        return () if parts == 1 else (size // parts,) * parts
    if sum(parts) != size:
        raise StateError(f"sw.muon_groups: {name} has {size} outputs, the parts {list(parts)} make {sum(parts)}.")
    return tuple(parts)
