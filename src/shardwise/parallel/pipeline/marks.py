"""Data-flow marks: every operation copies the marks of its arguments to its results.

They say from which activations a value was computed. The autograd graph does not say this for detached, compared or
rounded values. Marks belong to the memory of a tensor, so that views, detached tensors and tensors written in place
have them. They are needed for models that compute between their blocks: the residual sum and the mask of transformers'
GPT-2 and T5, the masks of Mask2Former.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.spec.errors import PlanError

#: Operations whose results depend on the shapes of their arguments, not on their values.
_SHAPES_ALONE = frozenset(
    f"aten::{name}"
    for name in (
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
    )
)
#: Methods that pass values to Python without a dispatched operation.
_READERS = frozenset({Tensor.tolist, Tensor.numpy})


class FlowMarks:
    """Propagates marks inside :meth:`propagate`.

    Args:
        read_error: Makes the error for a read of values with the given marks in Python (``.item()``, ``if x.any():``).
        meta_error: Makes the error for the use of an unmarked tensor on ``meta``; ``None``: such tensors are allowed,
            as in a dry run.
    """

    def __init__(
        self, read_error: Callable[[set[Any]], Exception], meta_error: Callable[[], Exception] | None = None
    ) -> None:
        self._read_error, self._meta_error = read_error, meta_error
        self._found: dict[int, tuple[StorageWeakRef | Tensor, set[Any]]] = {}
        self.is_paused = False

    @contextlib.contextmanager
    def propagate(self) -> Iterator[None]:
        """Propagate marks through every operation inside."""
        with _Operations(self), _Reads(self):
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Propagate no marks inside."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def add(self, tensor: Tensor, marks: Iterable[Any]) -> None:
        """Mark a tensor, and all tensors that share its memory."""
        key, holder = _memory(tensor)
        self._found.setdefault(key, (holder, set()))[1].update(marks)

    def of(self, values: Iterable[Any]) -> set[Any]:
        """Return the marks of the tensors among ``values``."""
        found: set[Any] = set()
        for value in values:
            if not isinstance(value, Tensor):
                continue
            marks = self._found.get(_memory(value)[0])
            if marks is not None:
                found |= marks[1]
            elif value.is_meta and self._meta_error is not None:
                raise self._meta_error()
        return found

    def check_read(self, values: Iterable[Any]) -> None:
        """Raise if ``values``, which Python is about to read, have marks."""
        if marks := self.of(values):
            raise self._read_error(marks)

    def copy_marks(self, arguments: Sequence[Any], result: Any) -> None:
        """Copy the marks of ``arguments`` to ``result``, which was computed from them."""
        marks = self.of(arguments)
        if not marks:
            return
        made = [leaf for leaf in tree_leaves(result) if leaf is not None]
        tensors = [leaf for leaf in made if isinstance(leaf, Tensor)]
        if made and not tensors:
            raise self._read_error(marks)
        for tensor in tensors:
            self.add(tensor, marks)


class _Operations(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, marks: FlowMarks) -> None:
        super().__init__()
        self._marks = marks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if "single memory location" not in str(error):
                raise
            raise PlanError(
                f"the model's own forward writes to a weight ({func}), but a pipeline stage has only the weights of its"
                " own modules.\n  Switch this off (of RWKV: model.config.rescale_every = 0), or set pp=1."
            ) from None
        schema = getattr(func, "_schema", None)
        if self._marks.is_paused or (schema is not None and schema.name in _SHAPES_ALONE):
            return result
        arguments = tree_leaves((args, kwargs))
        self._marks.copy_marks(arguments, result)
        if schema is not None and schema.is_mutable:  # an argument that is written to need not be returned
            by_name = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **kwargs}
            written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            self._marks.copy_marks(arguments, [by_name[name] for name in written if name in by_name])
        return result


class _Reads(TorchFunctionMode):
    def __init__(self, marks: FlowMarks) -> None:
        super().__init__()
        self._marks = marks

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READERS and not self._marks.is_paused:
            self._marks.check_read(args)
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> tuple[int, StorageWeakRef | Tensor]:
    """Return a number for a tensor's memory, and an object that keeps the number from being reused."""
    if tensor.layout is torch.strided:
        with contextlib.suppress(NotImplementedError):
            storage = StorageWeakRef(tensor.untyped_storage())
            return storage.cdata, storage
    return id(tensor), tensor
