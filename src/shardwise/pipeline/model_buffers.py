"""Buffers outside of all elements that the model's own forward writes to: a mean of activations, a count of calls.

Every stage runs the model's forward up to its last element. What is written there from the batch alone, before the
first stage ends, is the same everywhere. Everything else is right on the last stage, which runs the whole forward and
is handed what these values are computed from; the others are given it when state is asked for, and must not compute
with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from shardwise.pipeline.taint import Taint
from shardwise.spec.errors import PlanError

if TYPE_CHECKING:
    from shardwise.pipeline.trace import Call


@dataclass(frozen=True)
class Kept:
    """The mark of a buffer as it was before the forward.

    Attributes:
        name: In the model.
    """

    name: str


class ModelBuffers:
    """Looks at the buffers of a sketch while its forward is followed.

    Args:
        modules: With their names: those outside of all elements.
        marks: Of the values of this forward; every buffer gets one.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], marks: Taint) -> None:
        self._marks = marks
        self._places = [
            (f"{path}.{key}" if path else key, module, key)
            for path, module in modules
            for key, buffer in module.named_buffers(recurse=False)
            if buffer is not None
        ]
        self._saved = {name for name, module, key in self._places if key not in module._non_persistent_buffers_set}  # noqa: SLF001 - torch has no public question for it
        self._shapes = {name: buffer.shape for name, buffer in self._buffers()}
        self._seen = self._versions()
        self._written: dict[str, int] = {}
        for name, buffer in self._buffers():
            marks.add(buffer, {Kept(name)})

    def look(self, num_calls: int) -> None:
        """What has been written to after so many calls of elements."""
        found = self._versions()
        self._written |= {name: num_calls for name, version in found.items() if self._seen.get(name) != version}
        self._seen = found

    @property
    def written(self) -> tuple[str, ...]:
        """The names of those that the forward wrote to."""
        return tuple(sorted(self._written))

    def on_last_stage(self, calls: Sequence[Call], last_call: Sequence[int], num_stages: int) -> tuple[str, ...]:
        """The names of those that the last stage alone has right, and that are saved.

        Raises:
            PlanError: An earlier stage computes with one of them, or it changes its shape.
        """
        buffers = dict(self._buffers())
        found = {
            name
            for name, after in self._written.items()
            if after > last_call[0] + 1 or any(isinstance(mark, tuple) for mark in self._marks.of([buffers[name]]))
        }
        for call in calls:
            if call.leaves is not None and call.stage < num_stages - 1 and not call.state.isdisjoint(found):
                name = min(call.state & found)
                raise PlanError(
                    f"the model's own forward writes to the buffer {name!r}, which the last of {num_stages} pipeline"
                    f" stages has, and computes with it what {call.element.name!r} on stage {call.stage} takes.\n"
                    "  Keep the buffer in the block that computes what is written to it, or set pp=1."
                )
        saved = sorted(found & self._saved)
        for name in saved:
            if buffers[name].shape != self._shapes[name]:
                raise PlanError(
                    f"the model's own forward gives the buffer {name!r} another shape, which only the last of"
                    f" {num_stages} pipeline stages would know.\n"
                    "  Register it with the shape that it will have, make it no buffer, or set pp=1."
                )
        return tuple(saved)

    def _buffers(self) -> list[tuple[str, Tensor]]:
        found = [(name, module._buffers.get(key)) for name, module, key in self._places]  # noqa: SLF001 - by its name
        return [(name, buffer) for name, buffer in found if buffer is not None]

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {name: (id(buffer), buffer._version) for name, buffer in self._buffers()}  # noqa: SLF001


class StageBuffers:
    """Buffers that the model's own forward writes to, once more for each of a rank's stages but the last of them.

    Every stage runs the forward: a count of calls would else be one of all the rank's stages. Within a step they are at
    different microbatches.

    Args:
        held: The stages of the rank.
    """

    def __init__(self, held: Sequence[int]) -> None:
        self._shown = max(held, default=None)
        self._apart: dict[int, dict[str, Tensor]] = {}

    def begin(self) -> None:
        """A step begins: all stages are at the same place."""
        self._apart.clear()

    @contextlib.contextmanager
    def of(self, stage: int, model: nn.Module, names: Iterable[str]) -> Iterator[None]:
        """Have ``model`` hold those of ``stage``."""
        if self._shown is None or stage == self._shown:
            yield
            return
        apart = self._apart.setdefault(stage, {})
        places = [_place(model, name) for name in names]
        shown = [registry[key] for _, registry, key in places]
        for name, registry, key in places:
            buffer = registry[key]
            if buffer is not None:
                registry[key] = apart[name] if name in apart else buffer.clone()
        try:
            yield
        finally:
            for (name, registry, key), buffer in zip(places, shown, strict=True):
                used = registry[key]
                if used is not None:
                    apart[name] = used
                registry[key] = buffer


def _place(model: nn.Module, name: str) -> tuple[str, dict[str, Tensor | None], str]:
    path, _, key = name.rpartition(".")
    return name, model.get_submodule(path)._buffers, key  # noqa: SLF001 - what is put there is of the same kind
