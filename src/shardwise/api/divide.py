"""Divides a model over ``tp``, ``cp`` and ``ep``; parameters on meta get this rank's part of their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from shardwise.comm.axes import Comms
from shardwise.comm.record import RecordComm
from shardwise.context.apply import divide_sequences
from shardwise.engine.build import OwnedParameter
from shardwise.expert.apply import apply_experts, own_experts
from shardwise.expert.layer import Mixture, find_mixtures
from shardwise.features.wrap import assign_parameters
from shardwise.init.materialize import Source, fill_parameters
from shardwise.pipeline.pipelined import Pipelined
from shardwise.spec.plan import ParallelPlan
from shardwise.tensor.agreement import Agreement
from shardwise.tensor.apply import apply_cuts, part_of
from shardwise.tensor.copies import Copies
from shardwise.tensor.cut import ShardingPlan, find_cuts


def divide(
    model: nn.Module,
    plan: ParallelPlan,
    comms: Comms,
    units: Mapping[str, nn.Module],
    *,
    pipelined: Pipelined | None,
    source: Source | None,
) -> list[str]:
    """Leave this rank's parts of parameters in ``model``, in place, with forwards that communicate.

    Args:
        model: The whole model.
        plan: The plan.
        comms: The axes of this rank.
        units: Units of the whole model.
        pipelined: Its stages, none of which has been dropped yet.
        source: The source of values for parameters on meta.

    Returns:
        Lines for a summary.
    """
    notes: list[str] = []
    tp, cuts = comms.tp, None
    if tp is not None:
        cuts = find_cuts(model, plan.tp_plan, tp.size, tp.rank, divides_sequence=plan.sequence_parallel)
    mixtures = find_mixtures(model, plan.ep, units=units) if plan.routes_tokens else []
    if source is not None:
        _fill(model, source, comms, cuts, mixtures, pipelined)
    if tp is not None and cuts is not None:
        apply_cuts(model, cuts, tp)
        if tp.device.type != "meta":
            Agreement(tp).install(model)
            Copies(tp).install(model, divides_sequence=plan.sequence_parallel)
        notes += cuts.notes
    if comms.cp is not None:
        multiple = plan.tp if plan.sequence_parallel else 1
        notes.append(divide_sequences(model, comms.cp, multiple=multiple))
        if pipelined is not None:
            alone = RecordComm("cp", rank=comms.cp.rank, size=comms.cp.size, device="meta")
            divide_sequences(pipelined.sketch, alone, multiple=multiple)
    if mixtures:
        place = (0, 1) if tp is None else (tp.rank, tp.size)
        notes.append(apply_experts(mixtures, comms.ep, plan.expert_capacity, tp=place))
    return notes


def _fill(  # noqa: PLR0917 - all that divides a parameter
    model: nn.Module,
    source: Source,
    comms: Comms,
    cuts: ShardingPlan | None,
    mixtures: Sequence[Mixture],
    pipelined: Pipelined | None,
) -> None:
    """Fill parameters on meta that are about to be cut with this rank's part of their values.

    The engine fills uncut parameters, unit by unit, except under ``tp``, which may change how a module would initialise
    them. Parameters that this rank is going to drop are not filled.
    """
    own = own_experts(mixtures, comms.ep) if comms.ep is not None else {}
    held = None if pipelined is None else pipelined.held_parameters(model)

    def is_cut(parameter: nn.Parameter) -> bool:
        rows = own.get(id(parameter), slice(None))
        is_here = rows is not None and (held is None or id(parameter) in held)
        return is_here and (cuts is not None or rows != slice(None))

    def part(entry: OwnedParameter) -> Tensor:
        (value,) = source.parameters([entry])
        rows = own.get(id(entry.parameter))
        if rows is not None and rows != slice(None):
            value = value[rows].clone()
        return value if cuts is None else part_of(cuts, entry.parameter, value)

    cut = [entry for entry in assign_parameters(model, ())[""] if is_cut(entry.parameter)]
    fill_parameters(lambda entries: map(part, entries), cut, comms.world.device)  # one value is whole at a time
