"""Which stage holds which element, in which order, and the model that is left on a rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.pipeline.element import Element, lend_zeros, own_forward, sketch
from shardwise.pipeline.trace import StageFlow, Tracer
from shardwise.spec.chain import balance
from shardwise.spec.errors import PlanError


def assign_stages(elements: Sequence[Element], num_stages: int, first_of_stage: Sequence[str] = ()) -> None:
    """Set the stages of every element that has parameters: neighbours in their order."""
    places = [(path, element) for element in elements if element.has_parameters for path in element.paths]
    if first_of_stage:
        starts = [0, *_named(first_of_stage, [path for path, _ in places], num_stages)]
    else:
        costs = [_cost(element) if path == element.name else 0 for path, element in places]
        starts = balance(costs, num_stages)
    for element in elements:
        element.stages = ()
    for stage, (start, stop) in enumerate(zip(starts, [*starts[1:], len(places)], strict=True)):
        for _, element in places[start:stop]:
            if stage not in element.stages:
                element.stages = (*element.stages, stage)


def _named(names: Sequence[str], paths: Sequence[str], num_stages: int) -> list[int]:
    unknown = [name for name in names if name not in paths]
    if unknown:
        shown = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
        raise PlanError(f"no pipeline stage can begin at {unknown[0]!r}.\n  Stages begin at one of: {shown}.")
    starts = [paths.index(name) for name in names]
    if len(names) != num_stages - 1 or sorted(set(starts)) != starts or starts[0] == 0:
        raise PlanError(
            f"{len(names)} names of modules ({', '.join(names)}) do not begin the {num_stages} - 1 stages after the"
            " first.\n  Name the first module of every stage but the first, in the order of the model."
        )
    return starts


def _cost(element: Element) -> int:
    """Multiplications per token, nearly: the number of elements of matrices, without embedding tables."""
    tables = {id(m.weight) for m in element.module.modules() if isinstance(m, nn.Embedding)}
    return sum(p.numel() for p in element.module.parameters() if id(p) not in tables and p.dim() >= 2)


def drop_foreign(model: nn.Module, elements: Iterable[Element], stages: Collection[int]) -> dict[str, tuple[int, ...]]:
    """Replace every element of ``model`` that belongs to other stages only; its parameters go with it.

    A parameter that one of ``stages`` shares with other stages keeps all its names.

    Returns:
        By name the stages, ascending, of every parameter of this rank that several stages hold.
    """
    holders = _holders(model, elements)
    kept = _kept(holders, stages)
    shared = {
        name: tuple(sorted(holders[id(parameter)]))
        for name, parameter in model.named_parameters()
        if id(parameter) in kept and len(holders[id(parameter)]) > 1
    }
    for element in elements:
        if not element.has_parameters or any(stage in stages for stage in element.stages):
            continue
        assert element.sketch is not None
        stand_in = StandIn(element.module, element.sketch, lambda parameter: id(parameter) in kept)
        for path in element.paths:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, stand_in)
        element.module = stand_in
    return shared


def held_parameters(model: nn.Module, elements: Iterable[Element], stages: Collection[int]) -> set[int]:
    """The ``id`` of every parameter of a whole model that ``stages`` hold."""
    return _kept(_holders(model, elements), stages)


def _kept(holders: Mapping[int, set[int]], stages: Collection[int]) -> set[int]:
    return {key for key, held in holders.items() if not held.isdisjoint(stages)}


def _holders(model: nn.Module, elements: Iterable[Element]) -> dict[int, set[int]]:
    """The stages that hold each parameter, by its ``id``. One outside of all elements is on every stage."""
    found: dict[int, set[int]] = {}
    every: set[int] = set()
    for element in elements:
        every.update(element.stages)
        for parameter in element.module.parameters():
            found.setdefault(id(parameter), set()).update(element.stages)
    for parameter in model.parameters():
        found.setdefault(id(parameter), set(every))
    return found


class StandIn(nn.Module):
    """A stand-in for a module of another stage. Its parameters are those that this rank shares with that stage.

    Other attributes (a flag, a size), which the model's forward may read, are those of the module's sketch.
    """

    def __init__(self, module: nn.Module, sketch: nn.Module, keeps: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.training = module.training
        _keep_shared(module, self, keeps)
        self.__dict__["sketch"] = sketch  # no child: its parameters are none of the model's

    def __getattr__(self, name: str) -> Any:
        """An attribute of the sketch."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "sketch" not in self.__dict__:
                raise
            return getattr(self.__dict__["sketch"], name)

    def __getitem__(self, key: Any) -> Any:
        """A member, where the module is a container."""
        return self.__dict__["sketch"][key]

    def extra_repr(self) -> str:
        """The class of the module that it stands in for."""
        return f"{type(self.__dict__['sketch']).__name__} of another pipeline stage"


def _keep_shared(module: nn.Module, stand_in: nn.Module, keeps: Callable[[Tensor], bool]) -> None:
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if keeps(parameter):
            stand_in.register_parameter(name, parameter)
    for name, child in module.named_children():
        if any(keeps(parameter) for parameter in child.parameters()):
            below = nn.Module()
            _keep_shared(child, below, keeps)
            stand_in.register_module(name, below)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def in_order_of_calls(model: nn.Module, elements: Sequence[Element]) -> list[Element]:
    """``elements``, which are in the order of registration, in the order of their first calls.

    OPT of transformers needs this, as it registers its last norm first. Models of transformers bring inputs
    (``dummy_inputs``) with which their forward is traced on a sketch. An element that is not called stays behind the
    one registered before it. Other models, and models whose forward does not take these inputs, keep their order.
    """
    inputs = getattr(model, "dummy_inputs", None)
    if not isinstance(inputs, Mapping):
        return list(elements)
    try:
        calls = _followed(model, elements, inputs).calls
    except Exception:  # noqa: BLE001 - these inputs are not meant for every model of the library
        return list(elements)
    first: dict[str, int] = {}
    for number, call in enumerate(calls):
        first.setdefault(call.element.name, number)
    places, place = [], -1
    for element in elements:
        place = first.get(element.name, place)
        places.append(place)
    return [element for _, element in sorted(zip(places, elements, strict=True), key=lambda pair: pair[0])]


def _followed(model: nn.Module, elements: Sequence[Element], inputs: Mapping[str, Any]) -> StageFlow:
    device = torch.device("cpu") if device_of(model).type == "meta" else device_of(model)
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    token = 3 if padding != 3 else 4  # any but padding, of which the model would warn
    batch = {
        name: torch.full_like(ids, token, device=device) for name, ids in inputs.items() if isinstance(ids, Tensor)
    }
    try:
        return _traced(model, elements, batch, device, writes_in_place=False)
    except RuntimeError:  # what takes no memory cannot be written to
        return _traced(model, elements, batch, device, writes_in_place=True)


def _traced(
    model: nn.Module, elements: Sequence[Element], batch: Mapping[str, Tensor], device: torch.device, **options: bool
) -> StageFlow:
    drawn = [Element(element.paths, element.module, stages=(0,)) for element in elements]
    copied = sketch(model, drawn).eval()
    tracer = Tracer(drawn, device, **options)
    for element in drawn:
        assert element.sketch is not None
        element.sketched = own_forward(element.sketch)
        element.sketch.__dict__["forward"] = _sending(tracer, element, element.sketch)
    lend_zeros(copied, drawn, device)
    with torch.random.fork_rng(devices=[] if device.type != "cuda" else [device]), torch.enable_grad():
        return tracer.run(lambda: copied(**batch), copied, 1)


def _sending(tracer: Tracer, element: Element, module: nn.Module) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return tracer.call(element, args, kwargs)

    forward.__dict__["__signature__"] = inspect.signature(module.forward)
    return forward
