"""From new tokens to the logits of the next token, with the cached keys and values of earlier tokens, by model type.

Rows of unequal length are padded on the left.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardwise.models.transformer import GPT, KeyValueCache, NoCache, join_columns
from shardwise.parallel.context.apply import CACHE_NAMES
from shardwise.spec.errors import StateError

#: Model types of transformers that count padding as tokens although they accept positions: token windows are counted by
#: column, a convolution reads the padding, or the mask is shifted.
_COUNT_PADDING = frozenset({"deepseek_v4", "git", "recurrent_gemma", "unlimited_ocr_text"})
#: Model types with their own cache class.
_OWN_CACHES = frozenset({"cpmant", "minimax", "xlm"})


class Forward(Protocol):
    """Calls a model, or one pipeline stage of it, for some rows."""

    def call(self, model: nn.Module, new_BT: Tensor) -> Any:
        """Return the model's output for new tokens of every row."""

    def logits(self, output: Any) -> Tensor:
        """Return the logits after the last token, (B, V); without a cache those of the last positions, (B, K, V)."""


class Decoder(Forward, Protocol):
    """Continues some rows with a cache."""

    def join(self, parts: Sequence[tuple[Any, Sequence[int]]], room: int) -> Decoder:
        """Return a decoder for selected rows of several decoders, in order, with room for ``room`` more tokens.

        ``parts`` are decoders with the same layers, each with the rows that are taken from it.
        """

    def check_joins(self) -> None:
        """Refuse models whose rows cannot be joined.

        Raises:
            StateError: The model's cache contains more than keys and values.
        """

    @property
    def is_padded(self) -> bool:
        """Whether some rows are padded."""

    @property
    def room(self) -> int:
        """Number of tokens that still fit into each row."""


#: Makes the object that calls the model: ``make(capacity, padding, layers)`` with the maximum number of columns, the
#: columns of padding of each row, and the indices of the layers that it caches (``None``: all).
MakeForward = Callable[[int, Sequence[int], Collection[int] | None], Forward]
MakeDecoder = Callable[[int, Sequence[int], Collection[int] | None], Decoder]


class Decoding(NamedTuple):
    """The decoding interface of a model."""

    make: MakeDecoder
    #: ``make_once(num_logits)`` makes the object that calls the model once, without a cache, for rows padded on the
    #: right, and returns the logits of the last ``num_logits`` positions.
    make_once: Callable[[int], Forward]
    vocab_size: int
    positions: int | None  # maximum number of positions, if limited
    is_shifted_by_padding: bool = False  # whether padding counts as tokens in spite of a mask


def decoder_of(model: nn.Module, call: str = "sw.generate", *, with_cache: bool = True) -> Decoding:
    """Find the factory of decoders of ``model``, its vocabulary, and its number of positions if that is limited.

    Args:
        model: The model.
        call: The calling function, for messages.
        with_cache: Whether the model must support a cache.
    """
    if isinstance(model, GPT):
        return Decoding(_GptDecoder, _GptForward, model.config.vocab_size, model.config.seq_len)
    config: Any = getattr(model, "config", None)
    names = inspect.signature(type(model).forward).parameters
    if callable(getattr(model, "generate", None)) and config is not None:
        text = config.get_text_config(decoder=True)
        cache = None if text.model_type in _OWN_CACHES else next((name for name in CACHE_NAMES if name in names), None)
        if getattr(config, "is_encoder_decoder", False) or "input_ids" not in names or (with_cache and cache is None):
            raise StateError(
                f"{call} takes decoders{' with a cache of keys and values' * with_cache}, not a"
                f" {type(model).__name__}.\n"
                "  Call model.generate(...), which works on the parallelized model too (but not over a pipeline)."
            )
        if with_cache:
            _check_attention(model, text, call)
        positions = getattr(text, "max_position_embeddings", None)
        counts = "position_ids" not in names and any("PositionalEmbedding" in type(m).__name__ for m in model.modules())
        return Decoding(
            functools.partial(_TransformersDecoder, config, frozenset(names), cache_name=cache or ""),
            functools.partial(_TransformersForward, frozenset(names)),
            text.vocab_size,
            positions if positions and positions > 0 else None,
            counts or text.model_type in _COUNT_PADDING,
        )
    raise StateError(
        f"{call} takes our GPT or a causal language model of transformers, not a {type(model).__name__}.\n"
        "  Build one with sw.models.gpt()."
    )


def _check_attention(model: nn.Module, text: Any, call: str) -> None:
    """Refuse a model without any attention, because transformers counts the tokens so far in a layer of attention."""
    from transformers.cache_utils import CacheLayerMixin, DynamicCache  # pyrefly: ignore[missing-import]

    layers = DynamicCache(config=text).layers
    if layers and not any(isinstance(layer, CacheLayerMixin) for layer in layers):
        raise StateError(
            f"{call} continues models with at least one layer of attention, and this {type(model).__name__} has"
            f" {len(layers)} layers without it, whose cache transformers does not support either.\n"
            "  Call model.generate(..., use_cache=False), which works on the parallelized model too (but not over a"
            " pipeline)."
        )


class _GptDecoder:
    """A decoder of our GPT."""

    def __init__(self, capacity: int, padding: Sequence[int], _layers: Collection[int] | None) -> None:
        self.cache = KeyValueCache(capacity, padding)  # layers of other stages stay empty

    def call(self, model: nn.Module, new_BT: Tensor) -> Any:
        return model(new_BT, cache=self.cache)

    def logits(self, output: Any) -> Tensor:
        return output[:, -1]

    def join(self, parts: Sequence[tuple[Any, Sequence[int]]], room: int) -> Decoder:
        joined = _GptDecoder(0, (), None)
        joined.cache = KeyValueCache.join([(part.cache, rows) for part, rows in parts], room)
        return joined

    def check_joins(self) -> None:
        pass

    @property
    def is_padded(self) -> bool:
        return self.cache.is_padded

    @property
    def room(self) -> int:
        return self.cache.room


class _TransformersDecoder:
    """A decoder of a causal language model of transformers; its cache is allocated at full size at once."""

    def __init__(
        self,
        config: Any,
        accepted: Collection[str],
        capacity: int,
        padding: Sequence[int],
        layers: Collection[int] | None,
        *,
        cache_name: str,
    ) -> None:
        self._make = functools.partial(_TransformersDecoder, config, accepted, cache_name=cache_name)
        self._layers = layers
        self.cache, self._other_layers = _cache(config, capacity, layers)
        self._capacity = capacity
        self.padding = tuple(padding)
        self._padding_B1 = torch.tensor(padding)[:, None] if any(padding) else None
        self._mask_BK: Tensor | None = None
        self.length = 0
        self._options = {cache_name: self.cache, "use_cache": True, **_options(accepted, 1)}
        self._takes_positions = "position_ids" in accepted

    def call(self, model: nn.Module, new_BT: Tensor) -> Any:
        T, device = new_BT.shape[1], new_BT.device
        if self._other_layers is not None:
            self._other_layers.set_length(self.length)
        self.length += T
        columns_T = torch.arange(self.length - T, self.length, device=device)
        positions, mask = columns_T[None], None
        if self._padding_B1 is not None:
            if self._mask_BK is None:
                self._padding_B1 = self._padding_B1.to(device)
                self._mask_BK = (torch.arange(self._capacity, device=device) >= self._padding_B1).long()
            mask = self._mask_BK[:, : self.length]
            positions = (columns_T - self._padding_B1).clamp_(min=0)
        options = dict(self._options, input_ids=new_BT, attention_mask=mask)
        if self._takes_positions:
            options["position_ids"] = positions
        output = model(**options)
        if self._layers is not None and not self._layers and any(map(_is_filled, self.cache.layers)):
            raise StateError(
                f"the layers that {type(model).__name__} caches on a pipeline stage are not known: its attention has"
                " neither layer_idx nor layer_id.\n  Set pp=1."
            )
        return output

    def logits(self, output: Any) -> Tensor:
        return output.logits[:, -1]

    def join(self, parts: Sequence[tuple[Any, Sequence[int]]], room: int) -> Decoder:
        columns = [[part.length - part.padding[row] for row in rows] for part, rows in parts]
        length = max(map(max, columns))
        joined = self._make(length + room, [length - own for each in columns for own in each], self._layers)
        joined.length = length
        indices = range(len(joined.cache.layers)) if self._layers is None else sorted(self._layers)
        for index in indices:
            _join_layer(joined.cache.layers[index], [(part.cache.layers[index], rows) for part, rows in parts], length)
        return joined

    def check_joins(self) -> None:
        from transformers.cache_utils import DynamicSlidingWindowLayer  # pyrefly: ignore[missing-import]

        for layer in self.cache.layers:
            if type(layer) not in {_roomy_layer(), DynamicSlidingWindowLayer}:
                raise StateError(
                    f"rows of this model cannot join others on their way: its cache has a {type(layer).__name__}, which"
                    " keeps more than keys and values.\n  Use sw.generate or `shardwise generate`, whose rows begin"
                    " together."
                )

    @property
    def is_padded(self) -> bool:
        return any(self.padding)

    @property
    def room(self) -> int:
        return self._capacity - self.length


class _GptForward:
    """A single forward of our GPT."""

    def __init__(self, num_logits: int) -> None:
        self._cache = NoCache(num_logits)

    def call(self, model: nn.Module, new_BT: Tensor) -> Any:
        return model(new_BT, cache=self._cache)

    def logits(self, output: Any) -> Tensor:
        return output


class _TransformersForward:
    """A single forward of a causal language model of transformers."""

    def __init__(self, accepted: Collection[str], num_logits: int) -> None:
        self._num_logits = num_logits
        self._options = {"use_cache": False, **_options(accepted, num_logits)}

    def call(self, model: nn.Module, new_BT: Tensor) -> Any:
        return model(input_ids=new_BT, **self._options)

    def logits(self, output: Any) -> Tensor:
        return output.logits[:, -self._num_logits :]


def _options(accepted: Collection[str], num_logits: int) -> dict[str, Any]:
    """Return arguments for a forward that computes only the last logits, without the loss that balances experts."""
    options = {"logits_to_keep": num_logits, "output_router_logits": False}
    return {"return_dict": True} | {name: value for name, value in options.items() if name in accepted}


def _is_filled(layer: Any) -> bool:
    return getattr(layer, "is_initialized", False)


def _cache(config: Any, capacity: int, layers: Collection[int] | None) -> tuple[Any, Any]:
    """Make a cache of transformers for ``layers``, and the layer that stands for the others if no other one can.

    The model asks some layer, often the first, for the number of cached tokens. A layer that is not cached here is
    replaced by a cached layer of the same type, or another one with attention, which answers the question. If no layer
    with attention is cached here, a layer without contents does.
    """
    from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer  # pyrefly: ignore[missing-import]

    cache: Any = DynamicCache(config=config.get_text_config(decoder=True))
    indices = range(len(cache.layers)) if layers is None else sorted(layers)
    for index in indices:
        if type(cache.layers[index]) is DynamicLayer:
            cache.layers[index] = _roomy_layer()(capacity)
    by_type = {type(cache.layers[index]): cache.layers[index] for index in reversed(indices)}
    with_attention = [layer for layer in by_type.values() if isinstance(layer, CacheLayerMixin)]
    some = with_attention[-1] if with_attention else _roomy_layer()(0)
    for index in set(range(len(cache.layers))).difference(indices):
        kind = _roomy_layer() if type(cache.layers[index]) is DynamicLayer else type(cache.layers[index])
        if kind in by_type or issubclass(kind, CacheLayerMixin):
            cache.layers[index] = by_type.get(kind, some)
    return cache, None if with_attention else some


def _join_layer(target: Any, parts: Sequence[tuple[Any, Sequence[int]]], length: int) -> None:
    """Fill a new layer of a cache with selected rows of other layers, ``length`` columns in total."""
    from transformers.cache_utils import DynamicSlidingWindowLayer  # pyrefly: ignore[missing-import]

    first = parts[0][0]
    if not first.is_initialized:  # it uses the keys and values of another layer
        return
    target.lazy_initialization(first.keys, first.values)
    is_sliding = type(first) is DynamicSlidingWindowLayer
    num_columns = min(length, first.sliding_window - 1) if is_sliding else length
    room = 0 if is_sliding else target.capacity - length
    keys = join_columns([(part.keys, rows) for part, rows in parts], num_columns, room)
    values = join_columns([(part.values, rows) for part, rows in parts], num_columns, room)
    if is_sliding:
        target.keys, target.values, target.cumulative_length = keys, values, length
    else:
        target.fill(keys, values, length)


@functools.cache
def _roomy_layer() -> Any:
    """Return a cache layer class that allocates its full size at once, so that only new tokens are copied."""
    from transformers.cache_utils import DynamicLayer  # pyrefly: ignore[missing-import]

    class RoomyLayer(DynamicLayer):
        def __init__(self, capacity: int) -> None:
            super().__init__()
            self.capacity, self._length = capacity, 0

        def get_seq_length(self) -> int:
            return self._length

        def set_length(self, length: int) -> None:
            self._length = length

        def fill(self, keys: Tensor, values: Tensor, length: int) -> None:
            self._room, self._length = (keys, values), length
            self.keys, self.values = (room[:, :, :length] for room in self._room)

        def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                self._room = tuple(
                    new.new_empty(*new.shape[:2], self.capacity, new.shape[3]) for new in (key_states, value_states)
                )
            start, self._length = self._length, self._length + key_states.shape[2]
            for room, new in zip(self._room, (key_states, value_states), strict=True):
                room[:, :, start : self._length] = new
            self.keys, self.values = (room[:, :, : self._length] for room in self._room)
            return self.keys, self.values

    return RoomyLayer
