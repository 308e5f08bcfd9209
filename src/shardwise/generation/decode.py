"""Generation: a prompt goes through the model once, then each new token alone, with a cache.

Every rank runs the same loop. Ranks that hold parts of one model (``tp``, ``pp``) have the same rows. Data-parallel
ranks divide the rows, or have different prompts, of any number, and compute the same number of steps.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from shardwise.comm.control import all_gather_json, fail_together, refuse_different
from shardwise.engine.engine import Engine
from shardwise.engine.extensions.pipeline_step import constant_parameters
from shardwise.engine.storage.attachment import attachment_of, engine_of
from shardwise.generation.chunks import Chunk, RowSplit, Settings, Turn, slots
from shardwise.generation.decoder import decoder_of
from shardwise.generation.runner import Runner, Stages, WholeModel
from shardwise.generation.sample import Sampling
from shardwise.parallel.pipeline.pipelined import pipelined_of
from shardwise.spec.errors import ConfigError, RankDisagreement, ShardwiseError, StateError

Prompts = Tensor | Sequence[Sequence[int]]
T = TypeVar("T")


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

    A parallelized model generates under its plan. All ranks must call, with the same ``max_new_tokens``; ranks that
    hold parts of one model (``tp``, ``pp``) with the same arguments. Data-parallel ranks may pass the same prompts,
    each of which one rank then generates, and all get all tokens; or different prompts. Over a pipeline the rows go
    through the stages in as many chunks as the plan has microbatches, so that all stages work concurrently.

    Args:
        model: Our GPT, or a causal language model of transformers; plain or parallelized. In eval mode during the call.
        prompts: Token ids, a tensor (B, T) or a list for each row. Lengths may differ; no row may be empty.
        max_new_tokens: Maximum number of new tokens per row. With the prompt they must fit the model's positions.
        temperature: 0 takes the most likely token; a larger value divides the logits, and tokens are sampled.
        top_k: Sample from this number of the most likely tokens.
        top_p: Sample from the smallest set of most likely tokens with this total probability (after ``top_k``).
        seed: Seed of the sampling. Samples depend only on the seed, the row and the number of the token: with equal
            logits tokens are the same on every rank and layout. ``None`` takes one from torch's generator on rank 0.
        eos: Token id or ids that end a row.

    Returns:
        For each row its new tokens, including the ``eos`` that ended it.

    Collective:
        The collectives of one forward for each new token, and an all-gather of small JSON at the beginning.
        Data-parallel ranks all-gather eight bytes for each new token of a row if they share the rows, and eight bytes
        for each token if they have different rows and ``eos``. With a pipeline messages go from stage to stage, and the
        tokens from the last stage to every rank.

    Raises:
        ConfigError: Prompts or options are invalid, or do not fit the model.
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
    """Generate as :func:`generate`, and yield tokens when they are chosen.

    If several ranks generate, all of them must consume all tokens, or stop after the same one. Until the iterator is
    exhausted or closed (``close()``) the model is in eval mode, and training or an optimizer's step may be refused.

    Yields:
        The next token of each row; ``None`` for rows that have ended.

    Raises:
        ConfigError, StateError, RankDisagreement: As :func:`generate`, before the first token.
    """
    engine = generating_engine(model)
    sampling = functools.partial(Sampling, temperature, top_k, top_p)
    call = made_together(engine, lambda: _Call(model, prompts, max_new_tokens, sampling(), seed, eos, engine))
    call.compare()
    return call.run()


def made_together(engine: Engine | None, make: Callable[[], T]) -> T:
    """Return the result of ``make``. If it raises an error of ours on any rank, every rank raises that error.

    Collective:
        As :func:`fail_together`.
    """
    try:
        result, problem = make(), None
    except ShardwiseError as error:
        if engine is None:
            raise
        result, problem = None, error
    if engine is not None:
        fail_together(engine.comms.world, problem)
    return cast("T", result)


@contextlib.contextmanager
def inference(model: nn.Module, engine: Engine | None, call: str) -> Iterator[None]:
    """Keep the model in eval mode and its parameters constant in this block.

    Collective:
        As :func:`constant_parameters`.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with contextlib.nullcontext() if engine is None else constant_parameters(engine, call):
            yield
    finally:
        for module in training:
            module.training = True


class _Call:
    """One checked call."""

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        model: nn.Module,
        prompts: Prompts,
        max_new_tokens: int,
        sampling: Sampling,
        seed: int | None,
        eos: int | Sequence[int] | None,
        engine: Engine | None,
    ) -> None:
        self._model, self._engine = model, engine
        decoding = decoder_of(model)
        vocab_size, positions = decoding.vocab_size, decoding.positions
        self._rows = rows_of(prompts)
        if decoding.is_shifted_by_padding and len(lengths := {len(row) for row in self._rows}) > 1:
            raise ConfigError(
                f"prompts have {min(lengths)} to {max(lengths)} tokens, and padding would shift the positions of a"
                f" {type(model).__name__}.\n  Pass prompts of one length in each call."
            )
        self._ends = frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)
        check_fit(self._rows, max_new_tokens, vocab_size=vocab_size, positions=positions)
        check_ids(sorted(self._ends), vocab_size, "eos")
        self._is_own_seed = seed is None
        seed = int(torch.randint(1 << 62, ())) if seed is None and sampling.temperature else seed or 0
        self._settings = Settings(decoding.make, sampling, seed, max_new_tokens)
        self._batches = [{"digest": "", "num_rows": len(self._rows)}]  # by data-parallel rank

    def compare(self) -> None:
        """Compare the arguments with the other ranks' and exchange batch sizes, before any rank computes."""
        if self._engine is None or self._engine.comms.world.size == 1:
            return
        steps = [self._settings.max_new_tokens, bool(self._ends)]
        seed = self._settings.seed
        options = [repr(self._settings.sampling), sorted(self._ends), None if self._is_own_seed else seed]
        refuse_different(
            self._engine.comms.world,
            [tuple(each) for each in all_gather_json(self._engine.comms.world, steps)],
            "sw.generate: the ranks would take different numbers of steps",
            "Pass the same on every rank.",
            show=lambda: f"max_new_tokens={steps[0]} and {'an' if steps[1] else 'no'} eos",
        )
        arguments = {"seed": seed, "num_rows": len(self._rows)}
        self._batches = batches_of_readers(self._engine, [self._rows, *options], arguments, "sw.generate")
        if self._is_own_seed:
            self._settings = self._settings._replace(seed=self._batches[0]["seed"])

    def run(self) -> Iterator[list[int | None]]:
        """Generate with the model in eval mode."""
        with inference(self._model, self._engine, "sw.generate"):
            yield from _Columns(*self._prepare(), self._ends).run(self._settings.max_new_tokens)

    def _prepare(self) -> tuple[RowSplit, list[Chunk], Runner]:
        """Return the rows, divided over ranks and chunks, and the runner that computes them."""
        pipelined, engine = pipelined_of(self._model), self._engine
        comm = None if engine is None or engine.comms.control.size == 1 else engine.comms.control
        device = next(self._model.parameters()).device if engine is None else engine.comms.world.device
        split = RowSplit(
            [batch["num_rows"] for batch in self._batches],
            comm,
            is_divided=len({batch["digest"] for batch in self._batches}) == 1 and len(self._rows) > 1,
            max_chunks=1 if pipelined is None else pipelined.num_microbatches,
        )
        own_rows = [split.own(index) for index in range(split.num_chunks)]
        chunks = [
            Chunk(index, rows, [self._rows[row] for row in rows], self._settings, device)
            for index, rows in enumerate(own_rows)
        ]
        if pipelined is None:
            return split, chunks, WholeModel(self._model, chunks)
        return split, chunks, Stages(self._model, chunks, *pipelined.layout())


class _Columns:
    """New tokens of all rows, column by column, as the chunks pass through the stages of this rank."""

    def __init__(self, split: RowSplit, chunks: Sequence[Chunk], runner: Runner, ends: Collection[int]) -> None:
        self._split, self._chunks, self._runner, self._ends = split, chunks, runner, ends
        self._is_live = [True] * split.num_rows
        self._column: list[int | None] = [None] * split.num_rows

    def run(self, num_steps: int) -> Iterator[list[int | None]]:
        """Yield the columns."""
        chunks, runner = self._chunks, self._runner
        remaining = slots(runner.stages, runner.num_stages, len(chunks), num_steps)
        slot: tuple[Turn, ...] = ()
        try:
            for slot in remaining:
                # A chunk's tokens determine whether it continues. The first stage receives them in this slot. Other
                # ranks already have them, and must know before they receive activations.
                if runner.stages[0] == 0:
                    self._exchange(slot)
                for column in self._begin(slot):
                    yield column
                    if all(chunk.is_over for chunk in chunks):
                        runner.finish()
                        return
                if runner.stages[0] != 0:
                    self._exchange(slot)
                self._compute(slot)
        except GeneratorExit:  # on all ranks
            self._abandon(slot, remaining)
            raise
        for chunk in chunks:
            self._take(chunk, is_last=True)
        runner.finish()
        yield self._full_column()

    def _begin(self, slot: Sequence[Turn]) -> Iterator[list[int | None]]:
        """Take the tokens of chunks that start their next step; yield the column when it is complete."""
        for step, index, stage in slot:
            if step and stage == self._runner.stages[0]:
                self._take(self._chunks[index])
                if index == len(self._chunks) - 1:
                    yield self._full_column()

    def _abandon(self, slot: tuple[Turn, ...], remaining: Iterator[tuple[Turn, ...]]) -> None:
        """Finish the step that all chunks except the last have started, although the caller wants no more tokens."""
        first, last = self._runner.stages[0], len(self._chunks) - 1
        step = next(turn.step for turn in slot if turn.stage == first)
        for each in itertools.chain([slot], remaining):
            turns = [turn for turn in each if turn.step == step and turn.chunk < last]
            if each is not slot or first:
                self._exchange(turns)
            self._compute(turns)
        for chunk in self._chunks[:-1]:
            if not chunk.is_over:
                self._runner.take(chunk)
        self._runner.finish()

    def _exchange(self, turns: Sequence[Turn]) -> None:
        found = [(self._chunks[turn.chunk], turn.stage) for turn in turns]
        self._runner.exchange([(chunk, stage) for chunk, stage in found if not chunk.is_over])

    def _compute(self, turns: Sequence[Turn]) -> None:
        for _, index, stage in turns:
            chunk = self._chunks[index]
            if not chunk.is_over and stage < self._runner.num_stages:
                self._runner.compute(chunk, stage)

    def _take(self, chunk: Chunk, *, is_last: bool = False) -> None:
        """Store the newest tokens of a chunk in the column, and determine whether the chunk continues."""
        if chunk.is_over:
            return
        tokens = self._runner.take(chunk)[: chunk.num_rows]
        for row, token in self._split.exchange(chunk.index, tokens).items():
            if self._is_live[row]:
                self._column[row] = token
                self._is_live[row] = token not in self._ends
        chunk.is_over = bool(self._ends) and not is_last and self._split.is_over(chunk.index, self._is_live)

    def _full_column(self) -> list[int | None]:
        column = self._column
        self._column = [None for _ in column]
        return column


def batches_of_readers(engine: Engine, batch: Any, arguments: dict[str, Any], call: str) -> list[dict[str, Any]]:
    """Return the ``arguments`` of each data-parallel rank, and compare a digest of its ``batch`` over its ranks.

    Collective:
        An all-gather of small JSON over all ranks.
    """
    digest = hashlib.sha256(json.dumps(batch).encode()).hexdigest()
    every = all_gather_json(engine.comms.world, {**arguments, "reader": engine.comms.control.rank, "digest": digest})
    firsts: dict[int, int] = {}
    for rank, other in enumerate(every):
        first = firsts.setdefault(other["reader"], rank)
        if other["digest"] != every[first]["digest"]:
            raise RankDisagreement(
                f"{call}: ranks {first} and {rank} hold parts of the same model, but were called with"
                " different prompts or options.\n  Pass the same on all ranks of a tp and pp group."
            )
    return [every[firsts[reader]] for reader in sorted(firsts)]


def rows_of(prompts: Prompts, what: str = "prompt", call: str = "sw.generate") -> list[list[int]]:
    """Return the token ids of each row."""
    if isinstance(prompts, Tensor):
        if prompts.dim() != 2 or prompts.is_floating_point() or prompts.is_complex():
            raise ConfigError(
                f"{what}s have shape {tuple(prompts.shape)} and dtype {prompts.dtype}, expected ids (batch, seq).\n"
                "  Pass token ids, or a list of ids for each row."
            )
        return prompts.tolist()
    rows: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        row = prompt.tolist() if isinstance(prompt, Tensor) else prompt
        if isinstance(row, str) or not isinstance(row, Sequence) or not all(isinstance(token, int) for token in row):
            raise ConfigError(
                f"{what} {number} is {row!r}, expected a list of token ids.\n  Tokenize text before {call}()."
            )
        rows.append([*row])
    return rows


def check_fit(rows: Sequence[Sequence[int]], max_new_tokens: int, *, vocab_size: int, positions: int | None) -> None:
    """Refuse prompts and lengths that do not fit the model."""
    if isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens}: expected at least 1.\n  Set it to 1 or more.")
    if not rows:
        raise ConfigError("there are no prompts.\n  Pass at least one.")
    for number, row in enumerate(rows):
        if not row:
            raise ConfigError(f"prompt {number} is empty.\n  Begin with at least one token.")
        if positions is not None and len(row) > positions:
            raise ConfigError(
                f"prompt {number} has {len(row)} tokens, and there are {positions} positions.\n  Shorten the prompt."
            )
        check_ids(row, vocab_size, f"prompt {number}")
    longest = max(map(len, rows))
    if positions is not None and longest + max_new_tokens - 1 > positions:
        raise ConfigError(
            f"{longest} tokens of prompt and max_new_tokens={max_new_tokens}, of which the last needs no position, take"
            f" {longest + max_new_tokens - 1} positions, and there are {positions}.\n"
            f"  Set max_new_tokens to {positions - longest + 1} or less, or shorten the prompt."
        )


def check_ids(ids: Sequence[int], vocab_size: int, where: str) -> None:
    """Refuse ids that are not in the vocabulary."""
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"{where}: token {index} is {token}, the model knows 0 to {vocab_size - 1}.\n"
                "  Use the tokenizer that the model was trained with."
            )


def generating_engine(model: nn.Module, call: str = "sw.generate") -> Engine | None:
    """Return the engine of a parallelized model that can generate; ``None`` for a plain model."""
    if attachment_of(model) is None:
        return None
    engine = engine_of(model, call, on_shards=False)
    if engine.placements.is_threaded:
        raise StateError(f"{call}: replicas in one process have no cache each.\n  Use strategy='ddp'.")
    if any(getattr(module.__dict__.get("forward"), "divides_sequence", False) for module in model.modules()):
        raise StateError(
            f"{call}: sequence_parallel=True divides positions over tp, and of the last positions alone logits are"
            " made.\n  Load the checkpoint under a plan without it: checkpoints load under any plan."
        )
    return engine
