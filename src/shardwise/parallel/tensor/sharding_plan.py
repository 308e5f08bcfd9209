"""Makes a tensor-parallel plan from a table of styles: the slices and replaced forwards, by names and shapes only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from shardwise.comm.base import Comm
from shardwise.parallel.tensor.dropout import FeatureDropout, HeadDropout, SequenceDropout, has_attention_dropout
from shardwise.parallel.tensor.layer import (
    Column,
    CopiedColumn,
    DenseMixture,
    Experts,
    ReplacedForward,
    Row,
    SharedParameters,
    VocabularyEmbedding,
)
from shardwise.parallel.tensor.linear import is_transposed
from shardwise.parallel.tensor.loss import GPTLoss, VocabularyHead, has_loss
from shardwise.spec.errors import PlanError
from shardwise.spec.slice import Cut, Slice, even_ranges
from shardwise.spec.styles import (
    SEQUENCE_TABLES,
    TABLES,
    Style,
    generalized,
    matches,
    near_even_range,
    parse_style,
    translated,
)

#: Makes the forward that replaces that of a module.
MakeForward = Callable[[nn.Module, str, Comm], ReplacedForward]
#: Begin and end of each part of a dimension that a rank keeps.
Ranges = tuple[tuple[int, int], ...]


@dataclass
class ShardingPlan:
    """The tensor-parallel plan of a model on one rank.

    Attributes:
        model: The model.
        size: Number of ranks of ``tp``.
        rank: This rank on ``tp``.
        slices: The part of each parameter that this rank keeps, by ``id`` of the parameter.
        uses: For each divided parameter, by ``id``, its names by (``id`` of the module, attribute).
        replaced_forwards: By path of a module, a function that makes the forward that replaces the module's.
        attributes: New values of module attributes, by path and name.
        sequence: Paths of modules by style of sequence parallelism.
        notes: Lines for a summary.
    """

    model: nn.Module
    size: int
    rank: int
    slices: dict[int, Slice] = field(default_factory=dict)
    uses: dict[int, dict[tuple[int, str], str]] = field(default_factory=dict)
    replaced_forwards: dict[str, MakeForward] = field(default_factory=dict)
    attributes: dict[tuple[str, str], int] = field(default_factory=dict)
    sequence: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def divides_sequence(self, path: str) -> bool:
        """Whether inputs and outputs of the layer at ``path`` are divided by positions."""
        return self.is_in("sequence_layers", path) and not self.is_in("sequence_whole", path)

    def is_in(self, style: str, path: str) -> bool:
        """Whether the module at ``path``, or an enclosing one, has this style of :attr:`sequence`."""
        return any(path == styled or path.startswith(f"{styled}.") for styled in self.sequence.get(style, ()))

    def shard(self, module: nn.Module, path: str, attribute: str, *cuts: Cut, copy: int = 0, copies: int = 1) -> None:
        """Add the part of a parameter that ``cuts`` describe; refuses different cuts of tied parameters."""
        parameter, name = _parameter(module, attribute), _join(path, attribute)
        if parameter is None:
            return
        part = Slice(tuple(parameter.shape), cuts, copy, copies)
        before = self.slices.setdefault(id(parameter), part)
        uses = self.uses.setdefault(id(parameter), {})
        if before != part:
            raise PlanError(
                f"tensor parallelism: {name!r} and {next(iter(uses.values()))!r} are one parameter, but their styles"
                " cut it in different ways.\n  Give both the same style, or leave both out (tp_plan)."
            )
        uses[id(module), attribute] = name


@dataclass(frozen=True)
class _Site:
    """A module, or a parameter of it, that has a style."""

    module: nn.Module
    path: str
    style: Style
    attribute: str | None = None
    adapted: str | None = None  # path of the adapter layer (peft) that contains this one

    @property
    def owner(self) -> str:
        """Path of the module that contains the layer."""
        return (self.adapted or self.path).rpartition(".")[0]

    @property
    def name(self) -> str:
        return _join(self.path, self.attribute) if self.attribute else self.path


def plan_sharding(
    model: nn.Module, table: Mapping[str, str] | None, size: int, rank: int = 0, *, divides_sequence: bool = False
) -> ShardingPlan:
    """Make the plan of ``rank`` of ``size``; ``table`` is the user's and takes precedence over known tables."""
    plan = ShardingPlan(model, size, rank)
    for site in [*_sites(model, table), *(_sequence_sites(model) if divides_sequence else ())]:
        try:
            _RULES[site.style.name](site, plan)
        except PlanError as error:
            if str(error).startswith("tensor parallelism"):
                raise
            raise PlanError(f"tensor parallelism: {site.name!r} ({site.style}) with tp={size}: {error}") from None
    if not plan.slices:
        raise PlanError(
            f"tensor parallelism: the table of styles cuts nothing of {type(model).__name__}.\n"
            "  Pass tp_plan={pattern: style} with patterns of its modules, or set tp=1."
        )
    if divides_sequence:
        _share_factors(model, plan)
    _check_ties(model, plan)
    _check_positions(model, plan)
    return plan


def _sites(model: nn.Module, table: Mapping[str, str] | None) -> list[_Site]:
    """Find the modules that the user's table matches, and those that known tables match in addition.

    If several patterns match a module, the one with the fewest ``*`` applies, and of these the last.

    In known tables a full name, as in the tables of ``spec.styles``, takes precedence over a pattern.
    """
    modules = dict(model.named_modules())
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    exact_last = dict(sorted((table or {}).items(), key=lambda entry: -entry[0].count("*")))
    sites = {site.name: site for site in _matches(exact_last, modules, names)}
    for pattern in table or ():
        if not any(matches(pattern, name) for name in sites):
            raise PlanError(
                f"tp_plan: {pattern!r} matches nothing in {type(model).__name__}.\n"
                "  Patterns are of names as in model.named_modules(); '*' does not cross a dot."
            )
    known = known_table(model)
    if not known and not sites:
        raise PlanError(
            f"tensor parallelism: no styles are known for {type(model).__name__}.\n"
            "  Pass tp_plan={pattern: style}, for example {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'},"
            " or set tp=1."
        )
    general = {pattern: style for pattern, style in known.items() if "*" in pattern}
    exact = {name: style for name, style in known.items() if name not in general}
    for styles in (exact, general):
        for site in _matches(styles, modules, names):
            sites.setdefault(site.name, site)
    return list(sites.values())


def _sequence_sites(model: nn.Module) -> list[_Site]:
    table: list[tuple[str, str]] = []  # a module may have several of these styles
    for path, module in model.named_modules():
        kind = type(module)
        for pattern, style in SEQUENCE_TABLES.get(f"{kind.__module__}.{kind.__qualname__}", {}).items():
            table.append((_join(path, _counted(module, pattern)) if pattern else path, style))
    if not any(style == "sequence_begin" for _, style in table):
        raise PlanError(
            f"tensor parallelism: sequence_parallel=True is not known for {type(model).__name__}, only for our GPT, and"
            " for GPT-2, BERT, ViT, Llama, Qwen3 and Mixtral of transformers.\n  Set sequence_parallel=False."
        )
    modules = dict(model.named_modules())
    return [site for pattern, style in table for site in _matches({pattern: style}, modules, ())]


def _counted(module: nn.Module, pattern: str) -> str:
    """Replace ``-1`` in ``pattern`` by the index of the last member of that list."""
    head, mark, tail = pattern.partition(".-1")
    return f"{head}.{len(module.get_submodule(head)) - 1}{tail}" if mark else pattern  # type: ignore[arg-type]


def _matches(table: Mapping[str, str], modules: Mapping[str, nn.Module], parameters: Sequence[str]) -> Iterator[_Site]:
    for pattern, text in table.items():
        style = parse_style(text, pattern)
        for path, module in modules.items():
            if matches(pattern, path):
                yield from _inside_adapter(_Site(module, path, style))
        for name in parameters:
            if matches(pattern, name):
                path, _, attribute = name.rpartition(".")
                yield _Site(modules[path], path, style, attribute)


def _inside_adapter(site: _Site) -> list[_Site]:
    """Return the layers that get the style of a layer in a peft adapter.

    In a LoRA these are the base layer, and the factor with its outputs (or, if it is divided by inputs, its inputs).
    The other factor stays replicated.
    """
    side = "lora_A" if site.style.name.startswith("rowwise") else "lora_B"
    factors, base = getattr(site.module, side, None), getattr(site.module, "base_layer", None)
    if base is None or not isinstance(factors, nn.ModuleDict) or _is_dora(site) or site.style.name == "replicate":
        return [site]
    layers = {"base_layer": base} | {f"{side}.{name}": layer for name, layer in factors.items()}
    return [_Site(layer, f"{site.path}.{name}", site.style, None, site.path) for name, layer in layers.items()]


def _share_factors(model: nn.Module, plan: ShardingPlan) -> None:
    """Sum the gradients of a LoRA's replicated factors, which each rank uses for some positions, or for some features.

    The other factor gathers the positions of a product as narrow as the adapter's rank, or divides them.
    """
    for path, module in model.named_modules():
        if not plan.divides_sequence(path):
            continue
        is_row = any(f"{path}.lora_A.{name}" in plan.replaced_forwards for name in getattr(module, "lora_A", ()))
        for name in getattr(module, "lora_A", ()):
            plan.replaced_forwards[f"{path}.lora_{'B' if is_row else 'A'}.{name}"] = SharedParameters
            dropout = f"{path}.lora_dropout.{name}"
            has_part = is_row or not plan.is_in("sequence_input", path)
            if has_part and isinstance(model.get_submodule(dropout), nn.Dropout):
                plan.replaced_forwards[dropout] = SequenceDropout


def _is_dora(site: _Site) -> bool:
    return bool(getattr(site.module, "lora_magnitude_vector", ()))


def known_table(model: nn.Module) -> dict[str, str]:
    """Return the known styles for ``model`` and its submodules: our tables take precedence over the model's."""
    table: dict[str, str] = {}
    for path, module in model.named_modules():
        for kind in type(module).__mro__:
            for pattern, style in TABLES.get(f"{kind.__module__}.{kind.__qualname__}", {}).items():
                table.setdefault(_join(path, pattern) if pattern else path, style)
    for path, module in model.named_modules():
        # In transformers 5.10 the table of an instance hides that of its class, and only the latter has the head.
        # Neither has embeddings, so a head that is tied to them stays replicated.
        is_tied = getattr(getattr(module, "config", None), "tie_word_embeddings", False)
        own = [getattr(place, "_tp_plan", None) for place in ((module,) if is_tied else (module, type(module)))]
        for pattern, style in itertools.chain(*(each.items() for each in own if isinstance(each, Mapping))):
            translation = translated(pattern, style)
            if translation == "colwise_gather_output" and "." not in pattern and has_loss(module):
                translation = "vocabulary_head"
            table.setdefault(_join(path, pattern), translation)
    return table


def _check_ties(model: nn.Module, plan: ShardingPlan) -> None:
    for path, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            uses = plan.uses.get(id(parameter))
            if uses is not None and (id(module), attribute) not in uses:
                raise PlanError(
                    f"tensor parallelism: {_join(path, attribute)!r} is tied to {next(iter(uses.values()))!r}, which is"
                    f" cut, but has no style of its own.\n"
                    f"  Give {path!r} a style that cuts it alike, or leave both out (tp_plan)."
                )


def _check_positions(model: nn.Module, plan: ShardingPlan) -> None:
    """Check layers with divided positions: a forward must sum the partial gradients of replicated parameters."""
    for path, module in model.named_modules():
        if not plan.divides_sequence(path):
            continue
        make = plan.replaced_forwards.get(path)
        kind = make.func if isinstance(make, partial) else make
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in plan.slices and kind not in {SharedParameters, Row}:
                raise PlanError(
                    f"tensor parallelism: sequence_parallel=True divides the positions that {_join(path, attribute)!r}"
                    " is used for, but it is left whole (tp_plan).\n"
                    "  Give it a style that cuts it, or set sequence_parallel=False."
                )


# -- one rule for each style


def _linear(site: _Site) -> tuple[int, int]:
    """Return the dimensions of outputs and inputs in a linear layer's weight."""
    weight = _parameter(site.module, "weight")
    if weight is None or weight.dim() != 2 or isinstance(site.module, nn.Embedding):
        raise PlanError(f"a {type(site.module).__name__} is not a linear layer{_advice_on_wrapper(site)}")
    _check_forward(site.module, nn.Linear, "Conv1D")
    return (1, 0) if is_transposed(site.module) else (0, 1)


def _advice_on_wrapper(site: _Site) -> str:
    """Return advice for a module that is no linear layer but may contain some, as a LoRA layer does."""
    inside = {
        f"{site.path}.{name}": layer.weight.shape
        for name, layer in site.module.named_modules()
        if name and isinstance(layer, nn.Linear)
    }
    if nn.utils.parametrize.is_parametrized(site.module):
        return (
            f": a parametrization computes its weight.\n  Leave it whole: tp_plan={{{site.path!r}: 'replicate'}}; a"
            " rowwise layer that reads it then needs 'rowwise_split_input'."
        )
    if _is_dora(site):
        return ": its adapter is a DoRA, which needs norms of the full weight.\n  Set use_dora=False, or tp=1."
    if not inside:
        return ".\n  Give this style to linear layers only."
    wrapped = max(inside.values(), key=lambda shape: shape.numel())
    name = site.style.name
    dim = 1 if name.startswith("rowwise") else 0
    style = "colwise" if "heads" in name else "colwise_gather_output" if name == "vocabulary_head" else str(site.style)
    table = {site.path: "replicate"} | {path: style for path, shape in inside.items() if shape[dim] == wrapped[dim]}
    entries = ", ".join(f"{generalized(path)!r}: {style!r}" for path, style in table.items())
    return f", but has such inside.\n  Take the style from it and give one to those: tp_plan={{{entries}}}."


def _check_forward(module: nn.Module, base: type[nn.Module], name: str) -> None:
    """Refuse a class with a different forward than ``base``, because the replaced forward would ignore it."""
    known = [base.forward, *(kind.forward for kind in type(module).__mro__ if kind.__name__ == name)]
    if type(module).forward not in known or "forward" in module.__dict__:
        raise PlanError(
            f"{type(module).__name__} has a forward of its own, in place of {base.__name__}'s, which would be lost.\n"
            "  Leave it whole (tp_plan={name: 'replicate'}), or set tp=1."
        )


def _check_embedding(module: nn.Module) -> None:
    """Refuse an embedding that does more than look up rows, or scale them."""
    # transformers' classes of this name multiply nn.Embedding's rows by embed_scale.
    scaled = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__.endswith("ScaledWordEmbedding")), "")
    _check_forward(module, nn.Embedding, scaled)


def _features(site: _Site, dim: int) -> int:
    weight = _parameter(site.module, "weight")
    assert weight is not None
    return weight.shape[dim]


def _shard_outputs(site: _Site, plan: ShardingPlan, ranges_of: Callable[[int], Ranges]) -> int:
    """Divide a linear layer, or stacked weights (..., outputs, inputs), by outputs; returns the number of outputs."""
    if site.attribute is not None:
        parameter = _parameter(site.module, site.attribute)
        assert parameter is not None
        dim = max(parameter.dim() - 2, 0)
        plan.shard(site.module, site.path, site.attribute, Cut(dim, ranges_of(parameter.shape[dim])))
        return parameter.shape[dim]
    outputs, _ = _linear(site)
    features = _features(site, outputs)
    ranges = ranges_of(features)
    plan.shard(site.module, site.path, "weight", Cut(outputs, ranges))
    plan.shard(site.module, site.path, "bias", Cut(0, ranges))
    plan.replaced_forwards[site.path] = Column
    return features


def _colwise(site: _Site, plan: ShardingPlan) -> None:
    blocks = site.style.count if site.style.name == "packed_colwise" else 1
    _shard_outputs(site, plan, lambda size: even_ranges(size, plan.size, plan.rank, blocks=blocks))


def _colwise_heads(site: _Site, plan: ShardingPlan, *, is_shared: bool = False) -> None:
    """Divide by heads; with fewer key-value heads than ranks, several ranks have copies of a head."""
    outputs, _ = _linear(site)
    features, parent = _features(site, outputs), site.owner
    width = getattr(plan.model.get_submodule(parent), "head_dim", None)
    if not isinstance(width, int) or features % width:
        raise PlanError(f"{parent!r} does not tell the width of its heads (head_dim).\n  Use colwise (tp_plan).")
    _drop_own_heads(plan.model.get_submodule(parent), parent, plan)
    heads, size = features // width, plan.size
    if heads % size == 0:
        _colwise(site, plan)
        return
    if not (is_shared and size % heads == 0):
        advice = "a divisor of it, or a multiple of it" if is_shared else "a divisor of it"
        raise PlanError(
            f"{heads} heads of {width} cannot be divided: {heads} / {size} = {heads / size:.4g}.\n  Set tp to {advice}."
        )
    copies = size // heads
    head = plan.rank // copies
    ranges = ((head * width, (head + 1) * width),)
    for attribute, dim in (("weight", outputs), ("bias", 0)):
        plan.shard(site.module, site.path, attribute, Cut(dim, ranges), copy=plan.rank % copies, copies=copies)
    plan.replaced_forwards[site.path] = partial(CopiedColumn, place=(outputs, features, head * width))
    groups = getattr(plan.model.get_submodule(parent), "num_key_value_groups", None)
    if isinstance(groups, int):
        plan.attributes[parent, "num_key_value_groups"] = groups // copies


def _embedding_heads(site: _Site, plan: ShardingPlan) -> None:
    weight = _parameter(site.module, "weight")
    if not isinstance(site.module, nn.Embedding) or weight is None:
        raise PlanError(f"a {type(site.module).__name__} is not an nn.Embedding.\n  Leave it out (tp_plan).")
    _check_embedding(site.module)
    plan.shard(site.module, site.path, "weight", Cut(1, even_ranges(weight.shape[1], plan.size, plan.rank)))


def _colwise_vocabulary(site: _Site, plan: ShardingPlan) -> tuple[int, ...]:
    """Divide a projection to vocabulary ids by ids; returns the number of ids by rank."""

    def own(size: int) -> Ranges:
        _near_even_sizes(size, plan.size)  # refuses fewer than ranks
        return (near_even_range(size, plan.size, plan.rank),)

    return _near_even_sizes(_shard_outputs(site, plan, own), plan.size)


def _colwise_gather_output(site: _Site, plan: ShardingPlan) -> None:
    plan.notes.append(f"output of {site.path!r}: gathered, whole on every rank of tp")
    plan.replaced_forwards[site.path] = partial(Column, sizes=_colwise_vocabulary(site, plan))


def _vocabulary_head(site: _Site, plan: ShardingPlan) -> None:
    plan.notes.append(
        f"output of {site.path!r}: with labels each rank has its part, and .logits is None; else gathered"
    )
    plan.replaced_forwards[site.path] = partial(VocabularyHead, sizes=_colwise_vocabulary(site, plan))


def _vocabulary_loss(site: _Site, plan: ShardingPlan) -> None:
    head = _join(site.path.rpartition(".")[0], site.style.argument)
    plan.notes.append(f"output of {head!r}: with targets each rank has its part; else gathered")
    found = [mark for parameter, mark in plan.slices.items() if _join(head, "weight") in plan.uses[parameter].values()]
    if not found:
        raise PlanError(f"{head!r} is not divided by its ids.\n  Give it the style colwise_vocabulary, before this.")
    plan.replaced_forwards[site.path] = partial(GPTLoss, sizes=_near_even_sizes(found[0].shape[0], plan.size))


def _rowwise(site: _Site, plan: ShardingPlan, *, splits: bool = False) -> None:
    if site.attribute is not None:
        parameter = _parameter(site.module, site.attribute)
        assert parameter is not None
        dim = parameter.dim() - 1
        plan.shard(
            site.module, site.path, site.attribute, Cut(dim, even_ranges(parameter.shape[dim], plan.size, plan.rank))
        )
        return
    _, inputs = _linear(site)
    features = _features(site, inputs)
    plan.shard(site.module, site.path, "weight", Cut(inputs, even_ranges(features, plan.size, plan.rank)))
    plan.replaced_forwards[site.path] = partial(Row, sizes=(features // plan.size,) * plan.size if splits else None)


def _embedding_rowwise(site: _Site, plan: ShardingPlan) -> None:
    module = site.module
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.sparse:
        raise PlanError(
            "only an nn.Embedding without max_norm and sparse gradients can be cut by its ids.\n"
            "  Leave it out (tp_plan)."
        )
    if module.scale_grad_by_freq:
        raise PlanError(
            "an embedding with scale_grad_by_freq counts ids that other ranks hold.\n  Leave it out (tp_plan)."
        )
    _check_embedding(module)
    _near_even_sizes(module.num_embeddings, plan.size)
    start, stop = near_even_range(module.num_embeddings, plan.size, plan.rank)
    plan.shard(module, site.path, "weight", Cut(0, ((start, stop),)))
    plan.replaced_forwards[site.path] = partial(VocabularyEmbedding, start=start, stop=stop)


def _divide(site: _Site, plan: ShardingPlan) -> None:
    for name in site.style.names:
        value = getattr(site.module, name, None)
        if isinstance(value, bool) or not isinstance(value, int):
            raise PlanError(f"{type(site.module).__name__} has no number {name!r} to divide.\n  Name one that it has.")
        if value % plan.size:
            divisors = ", ".join(str(degree) for degree in range(1, value + 1) if value % degree == 0)
            raise PlanError(
                f"{name}={value} is not divisible: {value} / {plan.size} = {value / plan.size:.4g}.\n"
                f"  Set tp to one of {divisors}."
            )
        plan.attributes[site.path, name] = value // plan.size
    _drop_own_heads(site.module, site.path, plan)


def _drop_own_heads(attention: nn.Module, path: str, plan: ShardingPlan) -> None:
    if has_attention_dropout(attention):
        plan.replaced_forwards[path] = HeadDropout


def _dropout_features(site: _Site, plan: ShardingPlan) -> None:
    if not isinstance(site.module, nn.Dropout):
        raise PlanError(f"a {type(site.module).__name__} is not an nn.Dropout.\n  Leave it out (tp_plan).")
    plan.replaced_forwards[site.path] = FeatureDropout


def _sequence(site: _Site, plan: ShardingPlan) -> None:
    if hasattr(site.module, "crossattention"):
        raise PlanError("sequence_parallel=True does not go with cross-attention.\n  Set sequence_parallel=False.")
    plan.sequence.setdefault(site.style.name, []).append(site.path)


def _sequence_last_norm(site: _Site, plan: ShardingPlan) -> None:
    plan.sequence.setdefault("sequence_end", []).append(site.path)
    plan.replaced_forwards[site.path] = SharedParameters


def _replaced_by(kind: MakeForward) -> Callable[[_Site, ShardingPlan], None]:
    """Make the rule of a style that only replaces a module's forward."""

    def replace(site: _Site, plan: ShardingPlan) -> None:
        plan.replaced_forwards[site.path] = kind

    return replace


_RULES: dict[str, Callable[[_Site, ShardingPlan], Any]] = {
    "colwise": _colwise,
    "packed_colwise": _colwise,
    "colwise_heads": _colwise_heads,
    "colwise_kv_heads": partial(_colwise_heads, is_shared=True),
    "colwise_gather_output": _colwise_gather_output,
    "vocabulary_head": _vocabulary_head,
    "embedding_heads": _embedding_heads,
    "replicated_with_grad_allreduce": _replaced_by(SharedParameters),
    "moe_tp_experts": _replaced_by(Experts),
    "mixture": _replaced_by(DenseMixture),
    "colwise_vocabulary": _colwise_vocabulary,
    "vocabulary_loss": _vocabulary_loss,
    "rowwise": _rowwise,
    "rowwise_split_input": partial(_rowwise, splits=True),
    "embedding_rowwise": _embedding_rowwise,
    "divide": _divide,
    "dropout_features": _dropout_features,
    "sequence_begin": _sequence,
    "sequence_end": _sequence,
    "sequence_last_norm": _sequence_last_norm,
    "sequence_layers": _sequence,
    "sequence_input": _sequence,
    "sequence_whole": _sequence,
    "sequence_dropout": _replaced_by(SequenceDropout),
    "replicate": lambda _site, _plan: None,
}


def _near_even_sizes(size: int, parts: int) -> tuple[int, ...]:
    if size < parts:
        raise PlanError(f"its {size} ids are fewer than the {parts} ranks of tp.\n  Set tp to {size} or less.")
    edges = [near_even_range(size, parts, part) for part in range(parts)]
    return tuple(stop - start for start, stop in edges)


def _parameter(module: nn.Module, attribute: str) -> nn.Parameter | None:
    return dict(module.named_parameters(recurse=False, remove_duplicate=False)).get(attribute)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
