"""Forwards that replace those of modules whose work is divided over the ranks of ``tp``.

Shape suffixes: ``B`` batch, ``T`` sequence, ``C`` hidden, ``E`` experts.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.parallel.tensor.linear import ColumnPlan, GradStore, column_linear, is_transposed, linear_of
from shardwise.parallel.tensor.mappings import (
    copy_part_to_tp,
    copy_to_tp,
    gather_from_seq,
    gather_from_tp,
    reduce_from_tp,
    reduce_scatter_to_seq,
    scatter_to_tp,
)
from shardwise.spec.replacement import Replacement


class ReplacedForward(Replacement, ABC):
    """Base class of forwards that communicate, installed on a module in place of its class's forward.

    It reads parameters from the module at each call, because between steps the module has different objects
    (``engine.unit``).
    """

    comm: Any

    def __init__(self, module: nn.Module, name: str, comm: Comm | None) -> None:
        super().__init__(module)
        self.name = name
        self.comm = comm

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's output."""


def single_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the single argument of a layer, passed by position or by any name."""
    (argument,) = (*args, *kwargs.values())
    return argument


class SharedInput:
    """Calls :func:`copy_to_tp` once for all column-parallel layers that get one tensor in one call of their parent.

    Query, key and value projections read one input, so their three input gradients are added first and then summed over
    the ranks, in one all-reduce. Outside of a call of the parent nothing is shared.
    """

    def __init__(self, parent: nn.Module, collective: Callable[[Tensor, Comm, str], Tensor] = copy_to_tp) -> None:
        self._is_in_parent = False
        self._collective = collective
        self._results: list[tuple[Tensor, bool, Tensor]] = []
        parent.register_forward_pre_hook(self._enter)
        parent.register_forward_hook(self._leave, always_call=True)

    def _enter(self, _module: nn.Module, _args: object) -> None:
        self._results.clear()  # an interrupted call has not cleared it
        self._is_in_parent = True

    def _leave(self, _module: nn.Module, _args: object, _output: object) -> None:
        self._is_in_parent = False
        self._results.clear()

    def __call__(self, x: Tensor, comm: Comm, unit: str) -> Tensor:
        """Return ``x`` for a part of the computation, as :func:`copy_to_tp`; the same tensor for the same ``x``."""
        has_grad = torch.is_grad_enabled()
        for seen, had_grad, shared in self._results:
            if seen is x and had_grad == has_grad:
                return shared
        shared = self._collective(x, comm, unit)
        if self._is_in_parent:
            self._results.append((x, has_grad, shared))
        return shared


class Column(ReplacedForward):
    """A linear layer that computes this rank's features. Weight (features, inputs), or (inputs, features) as Conv1D.

    Attributes:
        shared: Function that is applied to an input that several layers read; ``None``: it reads the input alone.
        plan: The computation and communication.
        skips_communication: Whether the enclosing :class:`DenseMixture` communicates for it.
    """

    skips_communication = False

    def __init__(self, module: nn.Module, name: str, comm: Comm, *, sizes: Sequence[int] | None = None) -> None:
        super().__init__(module, name, comm)
        self.shared: Callable[[Tensor, Comm, str], Tensor] | None = None
        self.plan = ColumnPlan(comm, name, is_transposed(module))
        self._sizes = sizes
        self._linear = linear_of(module)

    def defer_weight_grads(self, store: GradStore) -> None:
        """Make ``store`` compute the gradients of weight and bias; nothing overlaps with the input's all-reduce."""
        self._linear = partial(store.linear, is_transposed=self.plan.is_transposed)
        if self.shared is None:
            self.shared = gather_from_seq if self.plan.divides_sequence else copy_to_tp

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Map (..., inputs), replicated, to (..., this rank's features), or with gathered output to all features."""
        x, module = single_argument(args, kwargs), self.module
        if self.skips_communication:
            return self._linear(x, module.weight, module.bias)
        if self.shared is None:
            y = column_linear(x, module.weight, module.bias, self.plan)
        else:
            y = self._linear(self.shared(x, self.comm, self.name), module.weight, module.bias)
        return y if self._sizes is None else gather_from_tp(y, self._sizes, self.comm, self.name)


class CopiedColumn(ReplacedForward):
    """A projection to one head of which several ranks have copies: its gradients are summed over these ranks.

    Attributes:
        shared: Function that is applied to its input.
    """

    def __init__(self, module: nn.Module, name: str, comm: Comm, *, place: tuple[int, int, int]) -> None:
        super().__init__(module, name, comm)
        self.shared: Callable[[Tensor, Comm, str], Tensor] = copy_to_tp
        self._place = place
        self._linear = linear_of(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Map (..., inputs), replicated, to (..., features of the head)."""
        x, module = single_argument(args, kwargs), self.module
        weight = copy_part_to_tp(module.weight, self._place, self.comm, self.name)
        bias = module.bias
        if bias is not None:
            bias = copy_part_to_tp(bias, (0, *self._place[1:]), self.comm, self.name)
        return self._linear(self.shared(x, self.comm, self.name), weight, bias)


class Row(ReplacedForward):
    """A linear layer that reads this rank's features and sums over the ranks; the bias is added after the sum.

    Attributes:
        divides_sequence: Whether the output has only this rank's positions of the sum.
        skips_communication: Whether the enclosing :class:`DenseMixture` sums and adds the bias for it.
    """

    divides_sequence = False
    skips_communication = False

    def __init__(self, module: nn.Module, name: str, comm: Comm, *, sizes: Sequence[int] | None = None) -> None:
        super().__init__(module, name, comm)
        self._sizes = sizes
        self._linear = linear_of(module)
        self._add: Callable[[Tensor, Tensor], Tensor] | None = None  # adds a bias whose gradient is deferred

    def defer_weight_grads(self, store: GradStore) -> None:
        """Make ``store`` compute the gradients, except that of a bias whose gradient needs communication."""
        self._linear = partial(store.linear, is_transposed=is_transposed(self.module))
        self._add = None if self.divides_sequence else store.add

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Map (..., this rank's features) to (..., outputs), replicated."""
        x, module = single_argument(args, kwargs), self.module
        if self._sizes is not None:
            x = scatter_to_tp(x, self._sizes, self.comm, self.name)
        term = self._linear(x, module.weight, None)
        if self.skips_communication:
            return term
        if self.divides_sequence:
            return reduce_scatter_to_seq(term, self.comm, self.name, module.bias)
        if self._add is None or module.bias is None:
            return reduce_from_tp(term, self.comm, self.name, module.bias)
        return self._add(reduce_from_tp(term, self.comm, self.name), module.bias)


class SharedParameters(ReplacedForward):
    """A replicated module that each rank uses with different features: the gradients of its parameters are summed.

    Attributes:
        watch: Called with each parameter's name and the tensor with which the module is about to compute. The gradient
            of that tensor is this rank's term of the sum.
    """

    watch: Callable[[str, Tensor], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the class's forward with shared parameters."""
        module = self.module
        parameters = module._parameters  # noqa: SLF001 - replaced for the call, as torch's functional_call does
        before = dict(parameters)
        try:
            for name, parameter in before.items():
                if parameter is not None:
                    parameters[name] = copy_to_tp(parameter, self.comm, self.name)
                    if self.watch is not None:
                        self.watch(name, parameters[name])
            return type(module).forward(module, *args, **kwargs)
        finally:
            parameters.update(before)


class Experts(ReplacedForward):
    """Experts in stacked weights of which each rank stores a part.

    Attributes:
        inner: Computes with this rank's part in place of the class's forward, if ranks of ``ep`` divide the experts.
    """

    inner: Callable[..., Tensor] | None = None

    def __call__(self, states: Tensor, chosen: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map (tokens, width), (tokens, choices) and (tokens, choices), replicated, to (tokens, width), replicated."""
        module = self.module
        states, weights = copy_to_tp(states, self.comm, self.name), copy_to_tp(weights, self.comm, self.name)
        compute = self.inner or partial(type(module).forward, module)
        return reduce_from_tp(compute(states, chosen, weights, *args, **kwargs), self.comm, self.name)


class DenseMixture(ReplacedForward):
    """Our mixture of experts, with every expert divided over the ranks: the sum over all experts is reduced once.

    Attributes:
        divides_sequence: Whether input and output have only this rank's positions.
    """

    divides_sequence = False

    def __call__(self, x_BTC: Tensor) -> Tensor:
        """Map (B, T, C), replicated, to (B, T, C), replicated.

        Collective:
            One all-reduce on ``tp``, and two in backward: of the gradients of the input and of the routing weights.
            With positions divided, two all-gathers and a reduce-scatter, and in backward the opposite, after an
            all-reduce of the gradients of the experts' biases.
        """
        module, where = self.module, (self.comm, self.name)
        ups = [expert.up.__dict__.get("forward") for expert in module.experts]
        downs = [expert.down.__dict__.get("forward") for expert in module.experts]
        if not all(isinstance(up, Column) and isinstance(down, Row) for up, down in zip(ups, downs, strict=True)):
            return type(module).forward(module, x_BTC)  # the user's table leaves experts replicated
        own_BTE = module.weigh(x_BTC)
        enter = gather_from_seq if self.divides_sequence else copy_to_tp
        x_BTC, weight_BTE = enter(x_BTC, *where), enter(own_BTE, *where)
        with _without_communication([*ups, *downs]):
            y_BTC = module.mix(x_BTC, weight_BTE)
        biases = [expert.down.bias for expert in module.experts]
        if biases[0] is None:
            return reduce_scatter_to_seq(y_BTC, *where) if self.divides_sequence else reduce_from_tp(y_BTC, *where)
        bias_EC = torch.stack(biases)
        if self.divides_sequence:
            after_BTC = own_BTE @ copy_to_tp(bias_EC, *where)
            return reduce_scatter_to_seq(y_BTC, *where) + after_BTC
        after_BTC = own_BTE @ bias_EC
        return reduce_from_tp(y_BTC, *where) + after_BTC


@contextlib.contextmanager
def _without_communication(layers: Iterable[Any]) -> Iterator[None]:
    """Disable the layers' communication, so that they return their term; a recomputation stops before the sum."""
    for layer in layers:
        layer.skips_communication = True
    try:
        yield
    finally:
        for layer in layers:
            layer.skips_communication = False


class VocabularyEmbedding(ReplacedForward):
    """An embedding of which this rank stores the rows of some ids; an all-reduce adds the rows of other ranks."""

    def __init__(self, module: nn.Module, name: str, comm: Comm, *, start: int, stop: int) -> None:
        super().__init__(module, name, comm)
        self._start, self._stop = start, stop

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Map ids to their rows."""
        ids, module = single_argument(args, kwargs), self.module
        check_ids(ids, module.num_embeddings, f"{self.name!r}: an id")
        is_foreign = (ids < self._start) | (ids >= self._stop)
        local = (ids - self._start).masked_fill(is_foreign, 0)
        padding = module.padding_idx
        try:
            if padding is not None:
                # Row 0 replaces ids of other ranks. Their outputs are masked, so they have no gradient.
                module.padding_idx = padding - self._start if self._start <= padding < self._stop else None
            rows = type(module).forward(module, local)
        finally:
            module.padding_idx = padding
        return reduce_from_tp(rows.masked_fill(is_foreign.unsqueeze(-1), 0), self.comm, self.name)


def check_ids(ids: Tensor, count: int, what: str, *, ignored: int | None = None) -> None:
    """Refuse ids that no rank stores, which would silently become zero rows and logits."""
    if ids.device.type == "meta":
        return
    is_wrong = (ids < 0) | (ids >= count)
    if ignored is not None:
        is_wrong &= ids != ignored
    if ids.device.type != "cpu":
        torch._assert_async(~is_wrong.any())  # noqa: SLF001 - the only assertion without a wait for the device
    elif is_wrong.any():
        found = int(ids[is_wrong][0])
        raise IndexError(f"{what} is {found}, expected 0 to {count - 1}.\n  Check the tokenizer against the model.")
