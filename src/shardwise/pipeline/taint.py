"""Which values were computed from which: marks on tensors, handed on by every operation.

Autograd alone does not tell: what is detached, compared or rounded has no graph, and is computed from something all the
same. Marks lie on the memory of tensors, so that views, detached ones and what was written in place carry them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.overrides import _get_current_function_mode as newest_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode as newest_dispatch
from torch.utils._pytree import tree_leaves

#: What these return has no values of what they take.
_SHAPES_ALONE = frozenset(
    f"aten::{name}"
    for name in (
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
    )
)
#: These give values to Python without an operation.
_READING = frozenset({Tensor.tolist, Tensor.numpy})


class Taint:
    """Follows marks while it is entered.

    Args:
        foreign: The mark of tensors on ``meta`` that have none, where those are not to be computed with.

    Attributes:
        read: Marks of what Python has looked at (``.item()``, ``if``): everything since may depend on it.
    """

    def __init__(self, foreign: Hashable | None = None) -> None:
        self.read: set[Hashable] = set()
        self._foreign = foreign
        self._found: dict[int, tuple[StorageWeakRef | Tensor, set[Hashable]]] = {}
        self._modes: tuple[_Operations, _Reads] | None = None
        self._depth = 0  # how often it is set aside

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Every operation inside hands marks on."""
        self._modes = operations, reads = _Operations(self), _Reads(self)
        try:
            with operations, reads:
                yield
        finally:
            self._modes = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Operations inside hand on nothing."""
        self._depth += 1
        try:
            with contextlib.ExitStack() as stack:
                # Off the stack, as compiled modules run uncompiled under a mode; below another mode they pass on.
                for mode, newest in zip(self._modes or (), (newest_dispatch(), newest_function()), strict=False):
                    if mode is newest:
                        mode.__exit__(None, None, None)
                        stack.callback(mode.__enter__)
                yield
        finally:
            self._depth -= 1

    @property
    def is_aside(self) -> bool:
        """Operations hand on nothing now."""
        return self._depth > 0

    def add(self, tensor: Tensor, marks: Iterable[Hashable]) -> None:
        """Mark a tensor, and all that share its memory."""
        key, holder = _memory(tensor)
        self._found.setdefault(key, (holder, set()))[1].update(marks)

    def of(self, values: Iterable[Any]) -> set[Hashable]:
        """The marks of the tensors among ``values``."""
        found: set[Hashable] = set()
        for value in values:
            if not isinstance(value, Tensor):
                continue
            marks = self._found.get(_memory(value)[0])
            if marks is not None:
                found |= marks[1]
            elif value.is_meta and self._foreign is not None:
                found.add(self._foreign)
        return found

    def after(self, arguments: Sequence[Any], result: Any) -> None:
        """``result`` has been computed from ``arguments``."""
        marks = self.of(arguments)
        if not marks:
            return
        made = [leaf for leaf in tree_leaves(result) if leaf is not None]
        tensors = [leaf for leaf in made if isinstance(leaf, Tensor)]
        if made and not tensors:
            self.read |= marks
        for tensor in tensors:
            self.add(tensor, marks)


class _Operations(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, marks: Taint) -> None:
        super().__init__()
        self._marks = marks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = getattr(func, "_schema", None)
        if self._marks.is_aside or (schema is not None and schema.name in _SHAPES_ALONE):
            return result
        arguments = tree_leaves((args, kwargs))
        self._marks.after(arguments, result)
        if schema is not None and schema.is_mutable:  # what is written to need not be returned
            given = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **kwargs}
            written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            self._marks.after(arguments, [given[name] for name in written if name in given])
        return result


class _Reads(TorchFunctionMode):
    def __init__(self, marks: Taint) -> None:
        super().__init__()
        self._marks = marks

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READING and not self._marks.is_aside:
            self._marks.read |= self._marks.of(args)
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> tuple[int, StorageWeakRef | Tensor]:
    """What stands for a tensor's memory, and what keeps the number from being used again."""
    if tensor.layout is torch.strided:
        with contextlib.suppress(NotImplementedError):
            held = StorageWeakRef(tensor.untyped_storage())
            return held.cdata, held
    return id(tensor), tensor
