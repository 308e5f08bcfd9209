"""Generating tokens: a prompt goes through the model once, then each new token by itself, with a cache.

Every rank runs the same loop. Ranks that hold parts of one computation (``tp``) choose the same token from the same
logits; data-parallel ranks may have prompts of their own, as many as they like, and go in step.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.axes import Comms
from shardwise.comm.control import agree, all_gather_json, fail_together
from shardwise.fsdp.attach import attachment_of, runtime_of
from shardwise.models.cache import KeyValueCache
from shardwise.models.transformer import GPT
from shardwise.recipe.sampling import Draws, Sampling
from shardwise.spec.errors import ConfigError, RankDisagreement, ShardwiseError, StateError

Prompts = Tensor | Sequence[Sequence[int]]


def generate(
    model: nn.Module,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    eos: int | Sequence[int] | None = None,
) -> list[list[int]]:
    """Continue prompts token by token.

    A parallelized model generates under its plan. All ranks must call, with the same ``max_new_tokens``; the ranks of
    one ``tp`` group with the same arguments. Data-parallel ranks may pass the same prompts, and get the same tokens, or
    each its own.

    Args:
        model: Our GPT, or a causal language model of transformers; plain or parallelized. Dropout is off meanwhile.
        prompts: Token ids, a tensor (B, T) or a list for each row; lengths may differ, none may be empty.
        max_new_tokens: At most so many for each row; with the longest prompt they must fit the model's positions.
        temperature: 0 takes the likeliest token, more draws: logits are divided by it.
        top_k: Draw among so many of the likeliest.
        top_p: Draw among the fewest likeliest that have this probability together (after ``top_k``).
        seed: Of the draws, which depend on it, the row and the number of the token only: tokens are the same on every
            rank and layout, as far as logits are. ``None`` takes one from torch's generator on the first rank.
        eos: Id, or ids, after which a row ends.

    Returns:
        For each row its new tokens, ``eos`` included where the row ended so.

    Collective:
        Those of one forward for each new token, an all-gather of small JSON at the beginning, and with ``eos`` an
        all-gather of eight bytes per token.

    Raises:
        ConfigError: Prompts or options make no sense, or do not fit the model.
        StateError: The model cannot generate.
        RankDisagreement: Ranks that must be in step were called with different arguments.
    """
    rows: list[list[int]] | None = None
    for column in generate_stream(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eos=eos,
    ):
        rows = [[] for _ in column] if rows is None else rows
        for row, token in zip(rows, column, strict=True):
            if token is not None:
                row.append(token)
    return rows or []


def generate_stream(
    model: nn.Module,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    eos: int | Sequence[int] | None = None,
) -> Iterator[list[int | None]]:
    """:func:`generate`, token by token, as they come.

    Where several ranks generate, each must take all tokens, or all must stop after the same one. Until the iterator is
    exhausted or closed the model is in eval mode.

    Yields:
        The next token of each row; ``None`` for rows that have ended.

    Raises:
        ConfigError, StateError, RankDisagreement: As :func:`generate`, before the first token.
    """
    comms = _comms_of(model)
    problem: ShardwiseError | None = None
    job: _Job | None = None
    try:
        job = _Job(model, prompts, max_new_tokens, Sampling(temperature, top_k, top_p), seed, eos, comms)
    except ShardwiseError as error:
        problem = error
    if comms is None and problem is not None:
        raise problem
    if comms is not None:
        fail_together(comms.world, problem)
    assert job is not None
    job.meet()
    return job.run()


class _Job:
    """One call, checked.

    Raises:
        ConfigError: Prompts or options make no sense, or do not fit the model.
        StateError: The model cannot generate.
    """

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        model: nn.Module,
        prompts: Prompts,
        max_new_tokens: int,
        sampling: Sampling,
        seed: int | None,
        eos: int | Sequence[int] | None,
        comms: Comms | None,
    ) -> None:
        self._model, self._sampling, self._comms = model, sampling, comms
        self._decoder, vocab_size, positions = _decoder_of(model)
        self._rows = rows_of(prompts)
        self._ends = frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)
        check_fit(self._rows, max_new_tokens, vocab_size=vocab_size, positions=positions)
        check_ids(sorted(self._ends), vocab_size, "eos")
        self._max_new_tokens = max_new_tokens
        self._seed = int(torch.randint(1 << 62, ())) if seed is None and sampling.temperature else seed or 0
        self._is_own_seed = seed is None

    def meet(self) -> None:
        """Compare with the other ranks what must be the same, before any of them computes.

        Raises:
            RankDisagreement: It is not; on every rank.
        """
        if self._comms is None or self._comms.world.size == 1:
            return
        said = [self._rows, repr(self._sampling), sorted(self._ends), None if self._is_own_seed else self._seed]
        digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()
        told = all_gather_json(
            self._comms.world,
            {
                "reader": self._comms.control.rank,
                "digest": digest,
                "steps": [self._max_new_tokens, bool(self._ends)],
                "seed": self._seed,
            },
        )
        for rank, other in enumerate(told):
            if other["steps"] != told[0]["steps"]:
                raise RankDisagreement(
                    f"sw.generate: rank 0 has max_new_tokens={told[0]['steps'][0]} and"
                    f" {'an' if told[0]['steps'][1] else 'no'} eos, rank {rank} {other['steps'][0]} and"
                    f" {'an' if other['steps'][1] else 'no'} eos.\n  Pass the same on every rank."
                )
            first = next(rank for rank, each in enumerate(told) if each["reader"] == other["reader"])
            if other["digest"] != told[first]["digest"]:
                raise RankDisagreement(
                    f"sw.generate: ranks {first} and {rank} hold parts of the same model, but were called with"
                    " different prompts or options.\n  Pass the same on all ranks of a tp group."
                )
        if self._is_own_seed:
            self._seed = told[0]["seed"]

    def run(self) -> Iterator[list[int | None]]:
        """The loop."""
        model, device = self._model, self._device()
        longest = max(map(len, self._rows))
        padding = [longest - len(row) for row in self._rows]
        new_BT = torch.tensor([[0] * pad + row for pad, row in zip(padding, self._rows, strict=True)], device=device)
        logits_of = self._decoder(model, longest + self._max_new_tokens - 1, padding)
        draws = Draws(self._seed, len(self._rows))
        is_live = [True] * len(self._rows)
        trained = [module for module in model.modules() if module.training]
        model.eval()
        try:
            for step in range(self._max_new_tokens):
                if step and self._ends and self._have_all_ended(is_live):
                    return
                with torch.no_grad(), _uncompiled():
                    logits_BV = logits_of(new_BT)
                new_BT = self._sampling.choose(logits_BV, draws.next())[:, None]
                tokens = new_BT[:, 0].tolist()
                yield [token if live else None for token, live in zip(tokens, is_live, strict=True)]
                is_live = [live and token not in self._ends for token, live in zip(tokens, is_live, strict=True)]
        finally:
            for module in trained:
                module.training = True

    def _have_all_ended(self, is_live: Sequence[bool]) -> bool:
        """On all ranks: one that has ended goes on with those that have not."""
        if self._comms is None:
            return not any(is_live)
        return not any(agree(self._comms.world, int(any(is_live))))

    def _device(self) -> torch.device:
        if self._comms is not None:
            return self._comms.world.device
        return next(self._model.parameters()).device


def _uncompiled() -> AbstractContextManager[object]:
    """Compiled units run as they were written: shapes change with every token, and each would be compiled anew."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to load it takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def rows_of(prompts: Prompts) -> list[list[int]]:
    """Token ids of each row.

    Raises:
        ConfigError: They are no rows of whole numbers.
    """
    if isinstance(prompts, Tensor):
        if prompts.dim() != 2 or prompts.is_floating_point() or prompts.is_complex():
            raise ConfigError(
                f"prompts have shape {tuple(prompts.shape)} and dtype {prompts.dtype}, expected ids (batch, seq).\n"
                "  Pass token ids, or a list of ids for each row."
            )
        return prompts.tolist()
    rows: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        row = prompt.tolist() if isinstance(prompt, Tensor) else prompt
        if isinstance(row, str) or not isinstance(row, Sequence) or not all(isinstance(token, int) for token in row):
            raise ConfigError(
                f"prompt {number} is {row!r}, expected a list of token ids.\n  Tokenize text before sw.generate()."
            )
        rows.append([*row])
    return rows


def check_fit(rows: Sequence[Sequence[int]], max_new_tokens: int, *, vocab_size: int, positions: int | None) -> None:
    """Refuse what the model cannot take.

    Args:
        rows: Token ids of each prompt.
        max_new_tokens: How many are to follow.
        vocab_size: Of the model.
        positions: The longest sequence of the model; ``None``: it has no limit.

    Raises:
        ConfigError: There is no prompt, one is empty or too long, or has an id that the model has no embedding for.
    """
    if isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens}: expected at least 1.\n  Set it to 1 or more.")
    if not rows:
        raise ConfigError("there are no prompts.\n  Pass at least one.")
    for number, row in enumerate(rows):
        if not row:
            raise ConfigError(f"prompt {number} is empty.\n  Begin with at least one token.")
        if positions is not None and len(row) > positions:
            raise ConfigError(
                f"prompt {number} has {len(row)} tokens, the model {positions} positions.\n  Shorten the prompt."
            )
        check_ids(row, vocab_size, f"prompt {number}")
    longest = max(map(len, rows))
    if positions is not None and longest + max_new_tokens - 1 > positions:
        raise ConfigError(
            f"{longest} tokens of prompt and max_new_tokens={max_new_tokens}, of which the last needs no position, take"
            f" {longest + max_new_tokens - 1} positions; the model has {positions}.\n"
            f"  Set max_new_tokens to {positions - longest + 1} or less, or shorten the prompt."
        )


def check_ids(ids: Sequence[int], vocab_size: int, where: str) -> None:
    """Refuse ids that the model does not know.

    Raises:
        ConfigError: There are some.
    """
    for place, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"{where}: token {place} is {token}, the model knows 0 to {vocab_size - 1}.\n"
                "  Use the tokenizer that the model was trained with."
            )


class _OwnDecoder:
    """Our GPT: from new tokens (B, T) to the logits after the last of them, (B, V).

    Args:
        model: The model.
        capacity: Columns at most.
        padding: Columns of padding before each row.
    """

    def __init__(self, model: nn.Module, capacity: int, padding: Sequence[int]) -> None:
        self._model = model
        self._cache = KeyValueCache(capacity, padding)

    def __call__(self, new_BT: Tensor) -> Tensor:
        return self._model(new_BT, cache=self._cache)[:, -1]


class _TransformersDecoder:
    """A causal language model of transformers, with the cache that it makes itself. As :class:`_OwnDecoder`."""

    def __init__(self, model: nn.Module, capacity: int, padding: Sequence[int]) -> None:
        del capacity
        self._model = model
        self._padding = tuple(padding)
        self._past: Any = None
        self._length = 0
        self._options: dict[str, Any] = {"use_cache": True, "return_dict": True}
        self._names = inspect.signature(type(model).forward).parameters
        if "logits_to_keep" in self._names:
            self._options["logits_to_keep"] = 1

    def __call__(self, new_BT: Tensor) -> Tensor:
        T, device = new_BT.shape[1], new_BT.device
        self._length += T
        padding_B1 = torch.tensor(self._padding, device=device)[:, None]
        mask_BK = (torch.arange(self._length, device=device) >= padding_B1).long()
        options = {"attention_mask": mask_BK, "past_key_values": self._past, **self._options}
        if "position_ids" in self._names:
            options["position_ids"] = (mask_BK.cumsum(dim=-1) - 1).clamp_(min=0)[:, -T:]
        output = self._model(input_ids=new_BT, **options)
        self._past = output.past_key_values
        return output.logits[:, -1]


_Decoder = Callable[[nn.Module, int, Sequence[int]], Callable[[Tensor], Tensor]]


def _decoder_of(model: nn.Module) -> tuple[_Decoder, int, int | None]:
    """What goes on from token to token; the vocabulary, and the positions where they are known.

    Raises:
        StateError: It does not generate here.
    """
    if isinstance(model, GPT):
        return _OwnDecoder, model.config.vocab_size, model.config.seq_len
    config: Any = getattr(model, "config", None)
    known = inspect.signature(type(model).forward).parameters
    if callable(getattr(model, "generate", None)) and config is not None:
        if getattr(config, "is_encoder_decoder", False) or not {"input_ids", "past_key_values"} <= set(known):
            raise StateError(
                f"sw.generate takes decoders with a cache of keys and values, not a {type(model).__name__}.\n"
                "  Call model.generate(...), which works on the parallelized model too."
            )
        positions = getattr(config, "max_position_embeddings", None)
        return _TransformersDecoder, config.vocab_size, positions if positions and positions > 0 else None
    raise StateError(
        f"sw.generate takes our GPT or a causal language model of transformers, not a {type(model).__name__}.\n"
        "  Build one with sw.models.gpt()."
    )


def _comms_of(model: nn.Module) -> Comms | None:
    """Of a parallelized model; ``None`` for a plain one.

    Raises:
        StateError, PlanError: Under its plan it cannot generate.
    """
    if attachment_of(model) is None:
        return None
    runtime = runtime_of(model, "sw.generate", on_shards=False)
    if runtime.row.is_threaded:
        raise StateError("sw.generate: replicas in one process have no cache each.\n  Use strategy='ddp'.")
    if runtime.comms.pp is not None:
        raise StateError(
            f"sw.generate does not run over a pipeline yet (pp={runtime.comms.pp.size}).\n"
            "  Load the checkpoint under tp or zero3, with pp=1: checkpoints load under any plan."
        )
    return runtime.comms
