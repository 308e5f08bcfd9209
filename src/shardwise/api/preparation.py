"""The modules and parameters that a plan selects in the whole model, found before ranks communicate or change it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.engine.build import OwnedParameter
from shardwise.engine.extensions import activation_offload, recompute
from shardwise.engine.extensions.chunked_loss import check_chunked
from shardwise.engine.extensions.precision import Policies
from shardwise.engine.extensions.safety import parametrized_in_forward
from shardwise.engine.extensions.wrap import assign_parameters, find_units, refuse_scripted
from shardwise.engine.storage.attachment import attachment_of
from shardwise.engine.storage.host import refuse_no_offload
from shardwise.engine.storage.ignored import Ignored, find_ignored
from shardwise.engine.storage.packed import is_quantizable
from shardwise.parallel.context.apply import check_model
from shardwise.parallel.experts.layer import Mixture, find_mixtures
from shardwise.parallel.pipeline.pipelined import find_stages
from shardwise.parallel.pipeline.stage_module import StageModule
from shardwise.parallel.sharded_embedding.rows import find_row_sharded, table_weights
from shardwise.parallel.tensor.sharding_plan import plan_sharding
from shardwise.spec.errors import PlanError, StateError
from shardwise.spec.plan import ParallelPlan, check_plan


@dataclass(frozen=True)
class Preparation:
    """The modules and parameters of one model that a plan treats differently.

    Attributes:
        plan: The plan.
        device: The device on which this rank computes.
        units: The units below the root that have parameters which the engine shards, by path.
        owned: The parameters that each unit of the whole model owns, including ignored ones, by the unit's path; the
            root's is ``""``.
        ignored: Parameters and buffers that are not sharded.
        policies: Precision policies by module.
        recomputed: Modules whose forward is recomputed in backward, by path.
        offloaded: Modules whose saved activations are kept on the host, by path.
        tables: Embeddings whose rows are sharded over the ranks, by path.
        mixtures: Mixtures whose experts are divided over ranks.
        stage_modules: With ``pp``: the modules of which stages consist.
    """

    plan: ParallelPlan
    device: torch.device
    units: Mapping[str, nn.Module]
    owned: Mapping[str, Sequence[OwnedParameter]]
    ignored: Ignored
    policies: Policies
    recomputed: Mapping[str, nn.Module]
    offloaded: Mapping[str, nn.Module]
    tables: Mapping[str, nn.Embedding]
    mixtures: Sequence[Mixture]
    stage_modules: Sequence[StageModule]

    def restricted_to(self, model: nn.Module) -> Preparation:
        """Return the preparation of the part of the model that a pipeline keeps on this rank."""
        modules = set(map(id, model.modules()))
        selected = [
            {path: module for path, module in found.items() if id(module) in modules}
            for found in (self.units, self.recomputed, self.offloaded, self.tables)
        ]
        units, recomputed, offloaded, tables = selected
        return replace(
            self,
            ignored=self.ignored.inside(model),
            units=units,
            recomputed=recomputed,
            offloaded=offloaded,
            tables=tables,
        )

    @property
    def unsharded(self) -> Ignored:
        """Parameters that the engine does not shard: ignored ones, and embeddings whose rows are sharded."""
        return self.ignored.with_row_sharded(table_weights(self.tables))


def prepare(model: nn.Module, plan: ParallelPlan, *, device: torch.device | None = None) -> Preparation:
    """Find the modules and parameters that ``plan`` selects in ``model``. Changes nothing and does not communicate.

    Args:
        model: The whole model.
        plan: The plan.
        device: The device on which this rank computes; ``None``: the model's device.

    Raises:
        PlanError: The plan does not fit the model.
        StateError: The model, or a part of it, is parallelized already.
    """
    check_fresh(model)
    check_plan(plan)
    ignored, tables = find_ignored(model, plan.ignored), find_row_sharded(model, plan.row_sharded)
    alone = ignored.with_row_sharded(table_weights(tables))
    units = alone.without(find_units(model, plan.wrap_policy))
    recomputed = recompute.find(model, units, plan.recompute)
    offloaded = activation_offload.find(model, units, plan.activation_offload, recomputed)
    check_chunked(model, plan)
    if (plan.tp > 1 or plan.routes_tokens) and (adapted := sorted(parametrized_in_forward(model))):
        raise PlanError(
            f"peft adapts {adapted[0]!r} as a tensor, by a product as large as all of it, and tp and ep keep a part"
            " of it on each rank.\n  Adapt linear layers alone (lora.rank in place of lora.adapter, or"
            " target_modules=['q_proj', 'v_proj'] in peft's LoraConfig), or set tp=1 and ep=1."
        )
    if plan.tp > 1:
        plan_sharding(model, plan.tp_plan, plan.tp, divides_sequence=plan.sequence_parallel)
    if plan.cp > 1:
        check_model(model)
    policy = plan.pipeline_policy
    stage_modules = [] if policy is None else find_stages(model, policy, plan.pp)
    mixtures = find_mixtures(model, plan.ep, units=units) if plan.routes_tokens else []
    for mixture in mixtures:
        if any(parameter in ignored for parameter in mixture.module.parameters()):
            raise PlanError(
                f"ep={plan.ep}: experts of {mixture.path!r} are ignored, so nobody would add up their gradients.\n"
                "  Leave them out of ignored, or set ep=1 and move tokens by yourself."
            )
    device = device or _device(model, ignored)
    policies = Policies(model, plan.precision, device)
    owned = assign_parameters(model, units)
    _check_uses(plan, [entry for entries in owned.values() for entry in entries if entry.parameter not in alone])
    return Preparation(
        plan, device, units, owned, ignored, policies, recomputed, offloaded, tables, mixtures, stage_modules
    )


def _check_uses(plan: ParallelPlan, owned: Sequence[OwnedParameter]) -> None:
    """Refuse offloading or quantization of which the whole model has no use; a single pipeline stage may have none."""
    if plan.offload is not None:
        refuse_no_offload([entry.parameter for entry in owned], plan.placements, plan.offload)
    form = plan.quantization.frozen
    if form != "none" and not any(is_quantizable(entry.parameter, entry.uses, form) for entry in owned):
        raise PlanError(
            f"quantize_frozen={form!r}, but the model has no frozen weight of a linear layer that would become"
            " smaller.\n  Freeze weights first (requires_grad_(False)), or leave quantize_frozen out."
        )


def check_fresh(model: nn.Module) -> None:
    """Refuse a model that is parallelized already, is a module of torch.jit, or has parameters without a shape.

    Raises:
        StateError: The model or a part of it is parallelized or compiled by torch.jit, or a parameter has no shape.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise StateError(
                f"parameter {name!r} of {type(model).__name__} has no shape before the first forward.\n"
                "  Call the model once with a batch (under torch.no_grad()) before sw.parallelize()."
            )
    for path, module in model.named_modules():
        refuse_scripted(module, path)
        if attachment_of(module) is not None:
            place = f" (its {path!r})" if path else ""
            raise StateError(
                f"{type(model).__name__}{place} is parallelized already.\n"
                "  Call sw.parallelize once, on the whole model; to change the plan, build the model again."
            )


def _device(model: nn.Module, ignored: Ignored) -> torch.device:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    devices = {t.device for name, t in tensors.items() if not (t.is_meta or name in ignored.names)}
    if len(devices) > 1:
        raise PlanError(
            f"the model's tensors lie on several devices: {', '.join(sorted(map(str, devices)))}.\n"
            "  Move the model to this rank's device before sw.parallelize()."
        )
    if devices:
        return devices.pop()
    return torch.device("cpu") if not torch.cuda.is_available() else torch.device("cuda", torch.cuda.current_device())
