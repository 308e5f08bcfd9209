"""The optimizer's step inside backward: a group is updated as soon as its gradients are reduced, and these are freed.

The numbers do not change, because an update of a parameter needs only the parameter's gradient, and a unit is reduced
after its last backward. The benefit depends on the optimizer's device:

* On the compute device, gradients exist only in the buffers that are reduced, for one unit at a time.
* On the host (``offload_policy``), a thread updates the group while backward continues with other units. The thread
  waits until the gradients have been copied to host memory, where they stay as without this feature. The end of
  backward waits for the thread; after a backward that raised, the next call does.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise import torch_private
from shardwise.engine.attach import Observer
from shardwise.engine.gradient import read_unused_flags
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.flat_parameters import FlatParameter, group_of, split
from shardwise.engine.storage.ignored import ignored_of
from shardwise.engine.storage.waiting import drop_zeroed
from shardwise.optim.checks import check_optimizer
from shardwise.optim.muon import Muon
from shardwise.spec.errors import StateError

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine
    from shardwise.engine.group import Group
    from shardwise.engine.unit import Unit


def optimizer_in_backward(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Make ``backward()`` update the parameters, unit by unit.

    ::

        optimizer = torch.optim.AdamW(sw.flat_parameters(model), lr=3e-4)
        sw.optimizer_in_backward(model, optimizer)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        for batch in batches:
            model(**batch).loss.backward()  # forward, backward and update
            schedule.step()

    The numbers equal bitwise those of ``optimizer.step()`` after backward. The optimizer works as before: its parameter
    groups may be changed between steps, schedulers work, and ``sw.save`` and ``sw.load`` accept it. ``.grad`` is
    ``None`` after backward, so that ``optimizer.step()`` and ``zero_grad()`` do nothing and may stay in a loop.

    Gradients never exist for the full model. Gradients of offloaded units (``ParallelPlan.offload_policy``) stay in
    host memory as without this call: a thread updates such a unit when its gradients have arrived, while backward
    continues. Backward returns when all updates are done. Hooks on ``optimizer.step()`` run in that thread.

    Functions that need all gradients before the first update are refused from now on: ``sw.clip_grad_norm`` and
    gradient scalers. So is ``sw.gradient_sync(model, False)``, because every backward is a step, unless all trained
    units are on the host. If a backward or an update raises, units that backward has left are updated already.

    Args:
        model: A parallelized model without gradients.
        optimizers: Optimizers that together have every trained parameter once, by name or from ``sw.flat_parameters``.

    Collective:
        None in addition to those of backward.

    Raises:
        StateError: A trained parameter is in no optimizer or in two, there are gradients, or an optimizer cannot work
            on shards; or the model is a pipeline, whose step has a backward for each microbatch.
    """
    engine = engine_of(model, "sw.optimizer_in_backward")
    if engine.comms.pp is not None:
        raise StateError(
            "sw.optimizer_in_backward(): a pipeline's step has a backward for each microbatch, and updates follow the"
            " last.\n  Call optimizer.step() after sw.train_step(), or set pp=1."
        )
    _check(engine, optimizers)
    engine.extras.add(UpdateInBackward(engine, optimizers))
    for group in engine.groups:
        if not group.facts.is_offloaded:
            group.update_facts(updates_in_backward=True)


def optimizers_in_backward(engine: Engine) -> tuple[torch.optim.Optimizer, ...] | None:
    """The optimizers that update the model inside backward; ``None`` if there are none."""
    found = engine.extras.find(UpdateInBackward)
    return None if found is None else found.optimizers


def refuse(engine: Engine, call: str) -> None:
    """Refuse ``call``, which needs all gradients at once, if the model is updated inside backward."""
    if engine.extras.find(UpdateInBackward) is not None:
        raise StateError(
            f"{call} needs the gradients of the whole model, but sw.optimizer_in_backward() updates each unit as soon"
            f" as its own are there.\n  Leave {call} out, or step after backward."
        )


def refuse_sums(engine: Engine, call: str) -> None:
    """Refuse accumulation over several backwards if a trained group is not offloaded, because its buffer is reused."""
    if not all(group.facts.is_offloaded for group in engine.groups if group.wants_gradients):
        refuse(engine, call)


def _check(engine: Engine, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    if engine.extras.find(UpdateInBackward) is not None:
        raise StateError("the model is updated inside backward already.\n  Call sw.optimizer_in_backward() once.")
    for optimizer in optimizers:
        if isinstance(optimizer, Muon):
            raise StateError(
                "sw.optimizer_in_backward() updates each unit as soon as its gradients are there; sw.Muon exchanges the"
                " matrices of all units at once.\n  Call optimizer.step() after backward."
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise StateError(
                f"{type(optimizer).__name__}.step() needs a closure that computes all gradients anew.\n"
                "  Use an optimizer that takes them as they are."
            )
        check_optimizer(optimizer)
    _check_ignored(engine)
    drop_zeroed(engine)
    listed = [p for optimizer in optimizers for settings in optimizer.param_groups for p in settings["params"]]
    counts = Counter(id(p) for each in listed for p in (each.shards if isinstance(each, FlatParameter) else (each,)))
    for group in engine.groups:
        for spec, piece, shard in zip(group.layout.params, group.pieces, group.shards, strict=True):
            if shard.grad is not None or group.gradient.is_local:
                raise StateError(
                    f"parameter {spec.name!r} has a gradient, which would be lost.\n"
                    "  Call sw.optimizer_in_backward() before the first backward, or after zero_grad()."
                )
            count = counts[id(shard)]
            is_wanted = shard.requires_grad and (piece.numel > 0 or group.facts.flat_kinds is None)
            if count > 1 or (count == 0 and is_wanted):
                raise StateError(
                    f"parameter {spec.name!r} is in {count} of the optimizers given to sw.optimizer_in_backward();"
                    " backward would leave it as it is, or update it twice.\n"
                    "  Give every trained parameter to one optimizer; call requires_grad_(False) on the others."
                )


def _check_ignored(engine: Engine) -> None:
    trained = [name for name, parameter in ignored_of(engine).parameters.items() if parameter.requires_grad]
    if trained and trained[0] in ignored_of(engine).row_sharded:
        raise StateError(
            f"{trained[0]!r}, whose rows are spread (row_sharded), would never be updated: it belongs to no unit that"
            " backward reduces.\n  Leave it out of row_sharded, freeze it, or step after backward."
        )
    if trained:
        raise StateError(
            f"ignored parameter {trained[0]!r} would never be updated: it is not among what backward reduces.\n"
            "  Do not ignore it, freeze it, or step after backward."
        )


class UpdateInBackward(Observer):
    """Updates a group as soon as its gradients are reduced.

    Attributes:
        optimizers: The optimizers that update.
    """

    updates_in_backward = True

    def __init__(self, engine: Engine, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        self.optimizers = optimizers
        self._parts: dict[Group, list[list[nn.Parameter]]] = {}  # by group and parameter group
        self._num_parameters = -1
        self._thread = ThreadPoolExecutor(1, "shardwise-update")  # starts at the first update on the host
        self._on_host: list[Future[None]] = []  # updates on the host in this backward
        self._step_lock = threading.Lock()  # an optimizer steps for one group at a time
        for optimizer in optimizers:
            torch_private.take_scale_as_attribute(optimizer)
        for group in engine.groups:
            if not group.facts.is_offloaded:
                group.gradient.storage.make_temporary()
        engine.extras.host_waits.append(self.wait)
        engine.extras.guards.append(self.refuse_mixed)

    def reduced(self, engine: Engine, unit: Unit, group: Group) -> None:
        """Update the parameters of a group that have a gradient, and free the gradients."""
        if not engine.window.syncs:
            return
        if group.facts.is_offloaded:
            self._on_host.append(self._thread.submit(self._update_on_host, group, torch.get_num_threads()))
        else:
            self._update(group)
            group.gradient.release_storage(engine.gradients)
        engine.mark_updated(unit)

    def backward_ended(self, engine: Engine) -> None:
        """Mark gathered buffers as out of date."""
        if engine.window.syncs:
            engine.invalidate()

    def refuse_mixed(self, engine: Engine, call: str) -> None:  # noqa: ARG002
        """Refuse ``call`` after a backward that raised and had updated some units."""
        self.wait()
        backward = engine.backward
        is_mixed = any(unit.updated_in == backward.generation for unit in engine.units)
        if backward.is_under_way and is_mixed and torch_private.current_backward() == -1:
            engine.recover()

    def wait(self) -> None:
        """Wait for the updates on the host. Raises the first exception of an update."""
        concurrent.futures.wait(self._on_host)
        done, self._on_host = self._on_host, []
        for update in done:
            update.result()

    def _update_on_host(self, group: Group, num_threads: int) -> None:
        """Update a group in the update thread, after its gradients have been copied to host memory.

        The optimizer's kernels use ``num_threads``, because torch keeps that number for each thread.
        """
        try:
            if group.device.type == "cuda":
                torch.cuda.set_device(group.device)  # a new thread's default, GPU 0, would get a context
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
            group.form.wait_for_host()
            read_unused_flags([group.gradient])
            self._update(group)
        finally:
            for shard in group.shards:
                shard.grad = None

    def _update(self, group: Group) -> None:
        """Step the optimizers for the parameters of a group that have a gradient."""
        if all(shard.grad is None for shard in group.shards):
            return
        with self._step_lock:
            flats = [p for part in self._parts_of(group) for p in part if isinstance(p, FlatParameter)]
            if any(flat.is_partial for flat in flats):
                for optimizer in self.optimizers:
                    split(optimizer, lambda flat: flat.group is group and flat.is_partial)
            parts = iter(self._parts_of(group))
            self.is_stepping = True
            try:
                for optimizer in self.optimizers:
                    _step_on(optimizer, parts)
            finally:
                self.is_stepping = False

    def _parts_of(self, group: Group) -> list[list[nn.Parameter]]:
        lists = [settings["params"] for optimizer in self.optimizers for settings in optimizer.param_groups]
        count = sum(map(len, lists))
        if count != self._num_parameters:  # the first step, or a flat parameter was split into names
            self._num_parameters = count
            self._parts.clear()
            for place, params in enumerate(lists):
                for parameter in params:
                    owner = group_of(parameter)
                    if owner is not None:
                        self._parts.setdefault(owner, [[] for _ in lists])[place].append(parameter)
        return self._parts.get(group) or [[] for _ in lists]


def _step_on(optimizer: torch.optim.Optimizer, parts: Iterator[list[nn.Parameter]]) -> None:
    """Step ``optimizer`` as if it had only the parameters in the next ``parts``."""
    all_params = [settings["params"] for settings in optimizer.param_groups]
    try:
        for settings in optimizer.param_groups:
            settings["params"] = next(parts)
        optimizer.step()
    finally:
        for settings, params in zip(optimizer.param_groups, all_params, strict=True):
            settings["params"] = params
