"""The order in which a model's forward calls its elements, where that can be known before there is a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.pipeline.element import Element, lend_zeros, own_forward, sketch
from shardwise.pipeline.split import device_of
from shardwise.pipeline.trace import StageFlow, Tracer


def in_order_of_calls(model: nn.Module, elements: Sequence[Element]) -> list[Element]:
    """``elements``, which are in the order of registration, in that of the first call of each.

    Models of transformers bring inputs (``dummy_inputs``) with which their forward can be followed on a sketch. What it
    does not call stays behind what it is registered behind. Other models, and those whose forward does not take these
    inputs, keep their order.
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
