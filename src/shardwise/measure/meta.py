"""Models and batches on meta, models cut without peers, and the attention kernels that a device would use."""

from __future__ import annotations

import contextlib
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from shardwise import torch_private
from shardwise.comm.record import RecordComm
from shardwise.parallel.tensor.apply import apply_sharding
from shardwise.parallel.tensor.sharding_plan import plan_sharding
from shardwise.spec.errors import StateError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.text import first_line, printable


def build_on_meta(build_model: Callable[[], nn.Module]) -> nn.Module:
    """Build the model with meta tensors only, even if it names a device. Tied parameters stay tied."""
    with torch.device("meta"), _WithoutDraws():
        model = build_model()
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in torch_private.parameters_of(module).items():
            if parameter is not None and not parameter.is_meta:
                if id(parameter) not in copies:
                    empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                    copies[id(parameter)] = parameter, empty  # the reference keeps the id from being reused
                torch_private.parameters_of(module)[name] = copies[id(parameter)][1]
        for name, buffer in torch_private.buffers_of(module).items():
            if buffer is not None and not buffer.is_meta:
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer, buffer.to("meta")
                torch_private.buffers_of(module)[name] = copies[id(buffer)][1]
    return model


class _WithoutDraws(TorchFunctionMode):
    """Skips random initialization of meta tensors, for which torch would compute shapes in Python."""

    _DRAWS = frozenset(
        {
            *(nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_),
            *(Tensor.normal_, Tensor.uniform_),
        }
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = args[0] if args else (kwargs or {}).get("tensor")
        if func in self._DRAWS and isinstance(drawn, Tensor) and drawn.is_meta:
            return drawn
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def on_meta(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Replace every parameter and buffer of ``model`` by a meta tensor inside a block; afterwards restore them.

    Tied parameters stay tied. Floating-point parameters get ``dtype``; buffers keep theirs.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    copies: dict[int, Any] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor.to("meta")
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        empty = torch.empty(tensor.shape, dtype=wanted, device="meta")
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)

    for module in model.modules():
        for entries in (torch_private.parameters_of(module), torch_private.buffers_of(module)):
            for name, tensor in entries.items():
                if tensor is not None:
                    replaced.append((entries, name, tensor))
                    if id(tensor) not in copies:
                        copies[id(tensor)] = stand_in(tensor)
    try:
        for entries, name, tensor in replaced:
            entries[name] = copies[id(tensor)]
        yield
    finally:
        for entries, name, tensor in replaced:
            entries[name] = tensor


def without_values(batch: Any) -> Any:
    """``batch`` with every tensor on meta."""
    return tree_map(lambda value: value.to("meta") if isinstance(value, Tensor) else value, batch)


def cut_alone(model: nn.Module, plan: ParallelPlan, *, rank: int, device: torch.device) -> None:
    """Cut a plain model as on ``rank`` of ``plan.tp``, without peers: only shapes are right, not values."""
    if plan.tp > 1:
        comm = RecordComm("tp", rank=rank, size=plan.tp, device=device, receives=device.type == "cpu")
        apply_sharding(
            model, plan_sharding(model, plan.tp_plan, plan.tp, rank, divides_sequence=plan.sequence_parallel), comm
        )


def without_values_error(model: nn.Module, error: Exception, call: str) -> StateError:
    """Make the error for a model that ``call`` cannot run without values; it names the model's line that failed."""
    ours = ("torch.", "shardwise.")
    frames = [each for each in traceback.walk_tb(error.__traceback__) if not _module_of(each[0]).startswith(ours)]
    where = ""
    if frames:
        frame, line = frames[-1]
        file = frame.f_code.co_filename
        where = f", in {file}:{line}: {linecache.getline(file, line).strip()}"
    return StateError(
        f"{type(model).__name__} cannot run without values: {first_line(error)}{printable(where)}\n"
        f"  {call} needs a forward and a loss that read no tensor's values (.item(), boolean masks, `if` on a tensor)"
        " and make tensors on their inputs' device."
    )


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def hides_tokens(batch: Any) -> bool:
    """Whether a batch has an attention mask that hides tokens; a mask on meta, without values, is assumed to."""
    if not isinstance(batch, Mapping):
        return False
    masks = [value for name, value in batch.items() if "attention_mask" in str(name) and isinstance(value, Tensor)]
    return any(mask.is_meta or not bool(mask.all()) for mask in masks)


#: Modules of transformers that read values of tensors before they make masks.
_MAKES_MASKS = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")


#: A method of transformers' models that reads ids to warn of padding without a mask.
_WARNS_OF_PADDING = "warn_if_padding_and_no_attention_mask"


def _asker_for_masks() -> str | None:
    """The name of the function in transformers that reads a value for a mask; ``None`` for any other caller."""
    frame = sys._getframe(2)  # noqa: SLF001 - the caller that evaluates ``if tensor``
    while frame is not None and _module_of(frame).startswith(("torch.", "shardwise.")):
        frame = frame.f_back
    if frame is None:
        return None
    name, module = frame.f_code.co_name, _module_of(frame)
    asks = module in _MAKES_MASKS or (name == _WARNS_OF_PADDING and module == "transformers.modeling_utils")
    return name if asks else None


class FusedAttention(torch_private.GroupedProducts):
    """Makes a model on meta use the kernels of attention and dropout and take the branches that it would on the device.

    With meta tensors torch uses the plain formula of attention, which saves the matrix of scores for backward. The
    fused kernels save their inputs, the output and one number per row. A GPU's dropout saves a mask of bytes.

    A model that reads a value of a meta tensor fails, with exceptions. Before transformers makes masks, it reads
    whether sequences are packed (the answer is no) and whether the given mask hides tokens, as ``mask.all()`` does.
    Without a mask some models read whether ids are those of padding (the answer is no).

    Args:
        is_cuda: Use the kernels of a GPU (flash attention in 16 bit, memory-efficient attention otherwise, which also
            accepts masks that need gradients, like T5's, and values narrower than keys, like DeepSeek's) or of the CPU
            (its flash kernel, without dropout).
        hides_tokens: The batch has a mask that hides tokens (:func:`hides_tokens`).
    """

    def __init__(self, *, is_cuda: bool, hides_tokens: bool = False) -> None:
        super().__init__()
        self._hides_tokens = hides_tokens
        self._is_cuda = is_cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads = func in {Tensor.__bool__, Tensor.__contains__} and args[0].is_meta
        if reads and (asker := _asker_for_masks()):
            return asker == "find_packed_sequence_indices" or not (self._hides_tokens or asker == _WARNS_OF_PADDING)
        if func in {Tensor.all, torch.all} and len(args) == 1 and not kwargs and args[0].is_meta:
            return torch.tensor(not self._hides_tokens, device="cpu")
        if func is F.dropout and self._is_cuda:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            output = self._attend(*args, **kwargs)
            if output is not None:
                return output
        if func is F.multi_head_attention_forward:
            with _computed_here(), self:
                return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def _attend(  # noqa: PLR0917 - torch's signature
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's signature
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Tensor | None:
        """The fused kernel's output, or ``None`` if the plain formula would be used."""
        is_even = query.dim() == 4 and query.shape[0] == key.shape[0]
        has_one_width = query.shape[-1] == value.shape[-1]  # the memory-efficient kernel does not need it
        is_refused = not (has_one_width and (attn_mask is None or not attn_mask.requires_grad)) and not self._is_cuda
        if not (query.is_meta and is_even) or is_refused:
            return None
        is_grouped = query.shape[1] != key.shape[1]
        if is_grouped and not (enable_gqa and query.shape[1] % key.shape[1] == 0):
            return None  # the plain formula repeats keys and values, or raises a clear error
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        is_flash = query.dtype in {torch.float16, torch.bfloat16} and attn_mask is None and has_one_width
        if dropout_p if not self._is_cuda else is_grouped and not is_flash:
            return None  # the CPU's kernel has no dropout, the memory-efficient one no grouped queries
        if not self._is_cuda:
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - an operator's name
            return kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
        if is_flash:
            kernel = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001 - an operator's name
            return kernel(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # noqa: FBT003
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention  # noqa: SLF001 - an operator's name
        return kernel(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]  # noqa: FBT003


@contextlib.contextmanager
def _computed_here() -> Iterator[None]:
    """Shows a mode the functions that ``F.multi_head_attention_forward``, of ``nn.MultiheadAttention``, calls.

    torch would pass it to the mode as one function, and compute what it calls without the mode.
    """
    names = vars(F)
    before = names["has_torch_function"]
    names["has_torch_function"] = lambda _tensors: False
    try:
        yield
    finally:
        names["has_torch_function"] = before


def _dropout(
    input: Tensor,  # noqa: A002 - torch's signature
    p: float = 0.5,
    training: bool = True,  # noqa: FBT001, FBT002 - torch's signature
    inplace: bool = False,  # noqa: FBT001, FBT002 - torch's signature
) -> Tensor:
    if not training or p == 0:
        return input
    made = torch.native_dropout(input, p, True)[0]  # noqa: FBT003 - takes no keyword
    return input.copy_(made) if inplace else made
