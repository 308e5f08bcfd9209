"""One rank of a mesh, without values and without peers, whose forward ``spmd_types`` checks.

Every tensor has a type along each axis of the mesh. Declared are those of the batch, of buffers, and of parameters:

===================  ============  ==================================================================================
tensor               axis          type
===================  ============  ==================================================================================
the batch            data          V: ranks read different samples
\\                    cp, tp        R
a parameter          data, cp      R: its gradient is partial, so that the engine must sum it over this axis, once
\\                    ep            V of experts, else R
\\                    tp            V where it is cut, else I: its gradient is whole, and nobody may sum it afterwards
===================  ============  ==================================================================================

The types of everything else are inferred, operation by operation; ``rules`` has those of our autograd functions. In the
end the loss must vary over data alone (every rank's is a term of the mean), and the sums that the engine makes in
backward must be those that the types of the parameters ask for.

What rank numbers choose is a plain number for the library: positions of ``cp`` get their type here. The rows of a table
that is spread over the ranks (``row_sharded``) vary over data, and the engine does not sum their gradients.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from spmd_types import (
    I,
    MeshAxis,
    P,
    R,
    SpmdTypeError,
    V,
    assert_type,
    current_mesh_names,
    get_local_type,
    maybe_get_axis_local_type,
    no_typecheck,
    register_no_typecheck,
    set_current_mesh,
)
from spmd_types.checker import typecheck
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardwise import torch_private
from shardwise.api.parallelize import apply_plan
from shardwise.api.preparation import prepare
from shardwise.comm.axes import DATA_PARALLEL, Comms, open_mesh_comms
from shardwise.comm.record import RecordComm
from shardwise.engine.engine import Engine
from shardwise.engine.storage.attachment import engine_of
from shardwise.measure.meta import build_on_meta, without_values
from shardwise.parallel.context.root import Division
from shardwise.parallel.experts.layer import find_mixtures, own_experts
from shardwise.parallel.pipeline.batch import call_model, forward_loss
from shardwise.parallel.pipeline.pipelined import find_stages, pipelined_of
from shardwise.parallel.pipeline.stage import Stages
from shardwise.parallel.sharded_embedding.rows import _Route
from shardwise.parallel.tensor.sharding_plan import plan_sharding
from shardwise.spec.mesh import Mesh
from shardwise.spec.plan import ParallelPlan
from tests.spmd.rules import is_contracted, mark_cut

#: The engine's part of a forward: it gathers parameters, whose types are declared.
for _method in (Engine.before_forward, Engine.after_forward):
    register_no_typecheck(_method)
#: Exchanges ids, which have no gradient.
register_no_typecheck(_Route.__init__)

DATA = ("dp_replicate", "dp_shard", "ep")
_SUMS = {"reduce_scatter", "all_reduce"}


class WrongTypes(AssertionError):  # noqa: N818 - a finding, as RankFailure is
    """Types and sums do not fit together."""


@dataclass(frozen=True)
class Sum:
    """A sum of gradients.

    Attributes:
        unit: The unit that it serves.
        axis: Its axis.
        size: Ranks that take part.
    """

    unit: str
    axis: str
    size: int


@dataclass
class Checked:
    """What was checked on one rank of each stage.

    Attributes:
        num_typed: Parameters with types.
        sums: Sums of gradients that the engine made.
        num_crossings: Tensors that went from stage to stage with their types.
        loss: Type of the loss by axis.
    """

    num_typed: int = 0
    sums: Counter[Sum] = field(default_factory=Counter)
    num_crossings: int = 0
    loss: dict[str, Any] = field(default_factory=dict)


class _Noting(RecordComm):
    """Notes each sum, with its size."""

    def __init__(self, axis: str, *, seen: list[tuple[str, Sum]], **named: Any) -> None:
        super().__init__(axis, device="meta", **named)
        self._seen = seen

    def _start(self, kind: str, unit: str, *given: Any, **named: Any) -> Any:
        self._seen.append((kind, Sum(unit, self.axis, self.size)))
        return super()._start(kind, unit, *given, **named)


class _Terms(TorchFunctionMode):
    """What the library does not know of plain operations.

    A product with a weight that is cut along the summed dimension is a term of a sum (P), not just different on each
    rank (V). Zeros are a sum of zeros. Attention to keys that vary along ``cp`` would leave out those of other ranks.
    """

    _PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
    _SUMS = (torch.add, torch.Tensor.add, torch.Tensor.__add__)
    _ZEROS = (torch.zeros_like,)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        owner = getattr(func, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            return owner.apply(*args, **kwargs)  # what is given here would go past the library
        if func is F.linear and is_contracted(args[1], 1):
            y = _partial(func(*args[:2]))
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return y if bias is None else y + bias
        if func in self._PRODUCTS and is_contracted(args[1], 0):
            return _partial(func(*args, **kwargs))
        if func is F.scaled_dot_product_attention and maybe_get_axis_local_type(args[1], "cp") is V:
            raise SpmdTypeError("attention to this rank's positions alone: keys vary along cp, no ring passes them on")
        if func in self._SUMS and getattr(args[0], "_is_zero", False):
            with no_typecheck():
                made = func(*args, **kwargs)
            return assert_type(made, get_local_type(args[1]))
        made = func(*args, **kwargs)
        if func in self._ZEROS:
            made._is_zero = True
        return made


def _partial(y: Tensor) -> Tensor:
    return assert_type(y, {"tp": P})


def check(
    build: Callable[[], nn.Module],
    plan: ParallelPlan,
    *,
    world_size: int,
    batch: Any,
    num_microbatches: int = 2,
) -> Checked:
    """Check one rank of each stage of a plan.

    Raises:
        SpmdTypeError: An operation, or a collective, does not take what it gets.
        WrongTypes: The loss, or the sums of gradients, are not what the types ask for.
    """
    mesh = plan.mesh(world_size, world_size)
    found = Checked()
    handed_on: dict[int, list[Any]] = {}
    one_sequence = mock.patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None)
    axes = _axes(mesh)
    with set_current_mesh(axes), _positions_vary(), one_sequence:
        for stage in range(plan.pp):
            rank = stage * (world_size // plan.pp)
            try:
                _check_rank(build, plan, mesh, rank, batch, num_microbatches, found, handed_on)
            except (SpmdTypeError, WrongTypes) as error:
                named = ", ".join(f"{name} is {axis}" for name, axis in axes.items() if axis.size() > 1)
                error.add_note(f"stage {stage + 1} of {plan.pp}; {named}")
                raise
    return found


def _axes(mesh: Mesh) -> dict[str, MeshAxis]:
    """The axes of one pipeline stage, outermost first."""
    if mesh.ep > 1 and mesh.cp not in {1, mesh.ep}:
        raise NotImplementedError("ranks of ep that are some of those of cp")
    is_same = _is_same(mesh)
    sizes = {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard // (1 if is_same else mesh.ep)}
    sizes |= {"ep": 1 if is_same else mesh.ep, "cp": mesh.cp, "tp": mesh.tp}
    axes, stride = {}, 1
    for name, size in reversed(sizes.items()):
        axes[name] = MeshAxis.of(size, stride)
        stride *= size
    return axes | ({"ep": axes["cp"]} if is_same else {})


def _is_same(mesh: Mesh) -> bool:
    """Ranks of ``ep`` are those of ``cp``: neighbours are those that divide a sequence."""
    return mesh.ep == mesh.cp > 1


def _check_rank(  # noqa: PLR0917 - one call
    build: Callable[[], nn.Module],
    plan: ParallelPlan,
    mesh: Mesh,
    rank: int,
    batch: Any,
    num_microbatches: int,
    found: Checked,
    handed_on: dict[int, list[Any]],
) -> None:
    seen: list[tuple[str, Sum]] = []
    model = build_on_meta(build)
    prepared = prepare(model, plan, device=torch.device("meta"))
    declared = Declared(model, plan, mesh, rank)
    comms = _comms(mesh, rank, plan, seen)
    samples = mesh.data_parallel_group(rank)
    control = partial(_Noting, DATA_PARALLEL, seen=seen, rank=samples.index(rank), size=len(samples))
    apply_plan(model, prepared, comms, control)
    engine = engine_of(model, "tests.spmd")
    for group in engine.groups:
        for shard, full in zip(group.shards, group.unsharded, strict=True):
            declared.annotate(shard, shard)
            declared.annotate(shard, full)
            found.num_typed += 1
    for table in prepared.tables.values():
        assert_type(table.weight, R, dict.fromkeys(DATA, V))
    for buffer in model.buffers():
        assert_type(buffer, R)
    inputs = without_values(batch)
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor):
            assert_type(leaf, R, {axis: V for axis in DATA if axis != "ep" or not _is_same(mesh)})
    pipelined = pipelined_of(model)
    if pipelined is None:
        with typecheck(), _Terms():
            loss = forward_loss(model, inputs, loss_fn=None, forward=None)
        _check_loss(loss, found)
        seen.clear()
        torch_private.backward_under_modes([loss])
    else:
        with _typed_stages(found, handed_on):
            pipelined.losses(
                model,
                [inputs] * num_microbatches,
                call_model,
                partial(forward_loss, loss_fn=None, forward=None),
                backward=torch_private.backward_under_modes,
            )
    made = Counter(each for kind, each in seen if kind in _SUMS and each.axis in {"dp_shard", "edp", "dp_replicate"})
    _compare(made, declared.sums(engine, num_backwards=1), "sums of gradients over data-parallel ranks")
    found.sums += made
    if pipelined is not None:
        sent = Counter(each.unit for kind, each in seen if kind == "send" and each.unit.startswith("copies of "))
        _compare(sent, declared.copies(engine), "sums of gradients over pipeline stages")


def _comms(mesh: Mesh, rank: int, plan: ParallelPlan, seen: list[tuple[str, Sum]]) -> Comms:
    def open_axis(axis: str, _purpose: str, ranks: Sequence[int]) -> _Noting:
        return _Noting(axis, seen=seen, rank=ranks.index(rank), size=len(ranks))

    return open_mesh_comms(mesh, rank, open_axis, is_replicated=plan.is_replicated)


class Declared:
    """The types of parameters, from the plan alone: which are cut, which are experts', which several stages hold."""

    def __init__(self, model: nn.Module, plan: ParallelPlan, mesh: Mesh, rank: int) -> None:
        self._mesh = mesh
        self._cut: dict[int, set[int]] = {}
        self._copied: set[int] = set()
        if plan.tp > 1:
            cuts = plan_sharding(model, plan.tp_plan, plan.tp, rank % plan.tp, divides_sequence=plan.sequence_parallel)
            self._cut = {key: {cut.dim for cut in held.cuts} for key, held in cuts.slices.items()}
            self._copied = {key for key, held in cuts.slices.items() if held.copies > 1}
        experts = find_mixtures(model, plan.ep) if plan.ep > 1 else ()
        comm = RecordComm("ep", rank=0, size=plan.ep)
        self._expert = set(own_experts(experts, comm)) if experts else set()
        self._stages: dict[int, set[int]] = {}
        if plan.pipeline_policy is not None:
            modules = find_stages(model, plan.pipeline_policy, plan.pp)
            for each in modules:
                for parameter in each.module.parameters():
                    self._stages.setdefault(id(parameter), set()).add(each.stage)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def types(self, shard: nn.Parameter) -> dict[str, Any]:
        """By axis."""
        found: dict[str, Any] = dict.fromkeys((*DATA, "cp"), R)
        found["tp"] = V if id(shard) in self._cut and id(shard) not in self._copied else I
        if id(shard) in self._expert:
            found |= {"ep": V, "cp": V} if _is_same(self._mesh) else {"ep": V}
        return found

    def annotate(self, shard: nn.Parameter, tensor: Tensor) -> None:
        """Give ``tensor`` the types of a parameter."""
        assert_type(tensor, self.types(shard))
        mark_cut(tensor, set() if id(shard) in self._copied else self._cut.get(id(shard), set()))

    def sums(self, engine: Engine, num_backwards: int) -> Counter[Sum]:
        """The sums that the types ask for: over each axis along which a gradient is partial, once."""
        mesh, wanted = self._mesh, Counter[Sum]()
        for group in engine.groups:
            (is_dense,) = {self.types(shard)["ep"].backward_type() is P for shard in group.shards}
            inside = mesh.dp_shard * mesh.cp // (1 if is_dense else mesh.ep)
            axis = "dp_shard" if is_dense or mesh.ep == 1 else "edp"
            wanted[Sum(group.unit.name, axis, inside)] += num_backwards
            if engine.comms.replicate is not None:
                wanted[Sum(group.unit.name, "dp_replicate", mesh.dp_replicate)] += num_backwards
        return wanted

    def copies(self, engine: Engine) -> Counter[str]:
        """The messages that add up the gradients of parameters that several stages use."""
        wanted = Counter[str]()
        for group in engine.groups:
            for shard, spec in zip(group.shards, group.layout.params, strict=True):
                num_others = len(self._stages.get(id(shard), {0})) - 1
                if num_others and shard.requires_grad:
                    wanted[f"copies of {spec.name}"] += num_others
        return wanted


def _compare(made: Counter[Any], wanted: Counter[Any], what: str) -> None:
    missing, doubled = wanted - made, made - wanted
    if missing or doubled:
        raise WrongTypes(f"{what}: missing {dict(missing)}, made without need {dict(doubled)}")


def _check_loss(loss: Tensor, found: Checked) -> None:
    """Of the ranks that read the same samples all must have the same loss; each sample's is counted once."""
    held = get_local_type(loss)
    wanted = _loss_types()
    if held != wanted:
        raise WrongTypes(f"the loss is {held}, expected {wanted}")
    found.loss = {repr(axis): kind for axis, kind in held.items()}


def _loss_types() -> dict[Any, Any]:
    names = current_mesh_names() or {}
    wanted = {axis: I for name, axis in names.items() if name not in DATA}
    return {axis: V for name, axis in names.items() if name in DATA and axis not in wanted} | wanted


@contextlib.contextmanager
def _typed_stages(found: Checked, handed_on: dict[int, list[Any]]) -> Iterator[None]:
    """Check passes of stages; what a stage receives has the types with which the one before has sent it."""
    run = Stages.run

    def typed(self: Stages, stage: int, flow: Any, received: Mapping[Any, Tensor], forward: Callable[[], Any]) -> Any:
        for tensor, held in zip(received.values(), handed_on.get(stage - 1, ()), strict=True):
            assert_type(tensor, held)
            found.num_crossings += 1
        with typecheck(), _Terms():
            made = run(self, stage, flow, received, forward)
        if stage == self.num_stages - 1:
            _check_loss(made, found)
        else:
            handed_on[stage] = [dict(get_local_type(tensor)) for tensor in made]
        return made

    with mock.patch.object(Stages, "run", typed):
        yield


@contextlib.contextmanager
def _positions_vary() -> Iterator[None]:
    """Positions that a rank of ``cp`` computes: which ones depends on the rank."""
    make = Division.__init__

    def make_typed(self: Division, *given: Any, **named: Any) -> None:
        with no_typecheck():
            make(self, *given, **named)
        for tensor in (self.positions_T, self._is_padding_T):
            assert_type(tensor, R, {"cp": V})

    with mock.patch.object(Division, "__init__", make_typed):
        yield
