"""The data section of a configuration: files of each source, tokenizer, task, and conversion of text to tokens."""

from __future__ import annotations

import functools
import glob
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.spec.errors import ConfigError
from shardwise.spec.plan import ParallelPlan
from shardwise.train.config.hf import LanguageModel
from shardwise.train.config.sections import DataSection, MixedSection, OneSource, RawConfig, inline
from shardwise.train.data.chat import COMPLETION, PROMPT, TEXT, Chat, column_of
from shardwise.train.data.examples import Texts, prepare
from shardwise.train.data.pairs import Pairs, missing_end
from shardwise.train.data.records import Form, first_row
from shardwise.train.data.source import Source, find_source, mixture_of
from shardwise.train.data.token_files import DataError
from shardwise.train.data.tokenizer import BYTES, FolderTokenizer, Tokenizer, find_tokenizer, has_tokenizer
from shardwise.train.task import ANSWER, CLASS, MASKED, Task


def check_packing(raw: RawConfig, plan: ParallelPlan) -> bool:
    """Return whether several examples share a sample; refuse settings that the model or ``cp`` does not support."""
    data, is_from_hf = raw.config.data, raw.config.model.hf is not None
    for key, setting in (("packing", data.packing), ("separate_documents", data.separate_documents)):
        if setting and not is_from_hf:
            raw.fail("data", key, "the built-in models see all of a sample; leave it out, or name a folder in model.hf")
        elif setting and plan.cp > 1:
            raw.fail("data", key, "cp divides a sample between ranks, and attention there does not stop at documents")
    raw.raise_if_any()
    return is_from_hf and plan.cp == 1 if data.packing is None else data.packing


_SOURCE = ("data", "source")


def sources(
    raw: RawConfig, facts: LanguageModel, say: Callable[[str], None] | None, *, reads: bool
) -> tuple[Source, str | None, int | None, Task]:
    """Return the data of a run as ``_source`` does, for one source or a mixture, including the evaluation data."""
    data = raw.config.data
    defaults = type(data)()
    for key in ("source", *OneSource.model_fields) if data.mix else ():
        if getattr(data, key) != getattr(defaults, key):
            raw.fail("data", key, "data.mix has sources of its own; write it in those entries that it is for")
    names = [each.name or _name_of(each.source) for each in data.mix or ()]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raw.fail("data", "mix", f"two sources are called {twice}; give one of them another name: {{name: ...}}")
    if data.mix and data.streaming:
        message = "it is for one source; take it out, or write token files first (shardwise data tokenize)"
        raw.fail("data", "streaming", message)
    raw.raise_if_any()
    found = [
        _source(raw, each, ("data", "mix", str(number), "source") if data.mix else _SOURCE, facts, say, reads=reads)
        for number, each in enumerate(data.sources)
    ]
    source, tokenizer, end, task = found[0]
    if data.mix:
        source = mixture_of([each[0] for each in found], names, [each.weight for each in data.mix])
        end = next((each[2] for each in found if each[2] is not None), None)  # random tokens have none
    if data.eval_source is not None:
        section = data.model_copy(update={"source": data.eval_source, "max_bytes": None, "streaming": False})
        evaluated = _source(raw, section, ("data", "eval_source"), facts, say, reads=reads)[0]
        source = replace(source, evaluated=evaluated)
    return source, tokenizer, end, task


def _name_of(source: str) -> str:
    """Return the name of a source's file, or of the folder that contains all files of a pattern."""
    plain = [part for part in Path(source).parts if not glob.has_magic(part)]
    return Path(plain[-1]).stem if plain else source


def _source(
    raw: RawConfig,
    section: MixedSection | DataSection,
    at: tuple[str, ...],
    facts: LanguageModel,
    say: Callable[[str], None] | None,
    *,
    reads: bool,
) -> tuple[Source, str | None, int | None, Task]:
    """Return a source's files; its tokenizer's name or ``None``; its end token if documents are separated; the task.

    Text with a folder's tokenizer and rows of data sets become token files, which are written only if ``reads`` is set.
    ``at`` is the source's path in the configuration.
    """
    config, vocab_size, task = raw.config, facts.vocab_size, facts.task
    name = config.data.tokenizer or config.model.hf or BYTES
    has_own = name == BYTES or has_tokenizer(Path(name).expanduser())
    source = find_source("stdlib" if section.source is None else section.source, max_bytes=section.max_bytes)
    end = None
    separates = config.data.separate_documents and source.kind != "random"
    needs = source.kind in {"text", "records"} or separates or (reads and task.name == MASKED)
    if not has_own and (config.data.tokenizer is not None or needs):
        message = f"{name!r} is not a folder with a tokenizer (tokenizer.json, vocab.json, ...); name one, or 'bytes'"
        raw.refuse("data", "tokenizer", message)
    if needs and (name != BYTES or source.kind == "records" or source.content or separates or task.name == MASKED):
        tokenizer = find_tokenizer(name)
        task = _with_tokens(raw, task, tokenizer)
        end = tokenizer.ends[0] if separates and tokenizer.ends else None
        if separates and end is None:
            message = f"the tokenizer {name!r} has no end-of-text token to know documents by"
            raw.refuse("data", "separate_documents", message)
        if tokenizer.vocab_size > vocab_size:
            message = (
                f"the tokenizer of {name} has {tokenizer.vocab_size:,} ids, the model's embedding {vocab_size:,} rows;"
                " use the tokenizer that the model was made for, or a model with as many rows"
            )
            raw.refuse("data", "tokenizer", message)
        if source.kind != "tokens":
            source = _tokenize_source(raw, section, source, tokenizer, task, at=at, say=say, reads=reads)
    if (source.vocab_size or 0) > vocab_size:
        advice = f"set model.vocab_size={source.vocab_size}"
        if config.model.hf:
            advice = "tokenize the text with its tokenizer"
        has = f"its tokens have a vocabulary of {source.vocab_size:,}, the model's has {vocab_size:,}"
        raw.refuse_at(at, f"{has}; {advice}")
    if reads and task.has_pairs and source.kind != "examples":
        raw.refuse_at(at, f"model.hf is trained for {task.name}, which takes rows of a data set")
    return source, name if has_own else None, end, task


def _with_tokens(raw: RawConfig, task: Task, tokenizer: Tokenizer) -> Task:
    """Return the task with the token ids that it needs from the tokenizer."""
    hf_tokenizer = tokenizer.hf_tokenizer if isinstance(tokenizer, FolderTokenizer) else None
    if task.name == MASKED:
        if hf_tokenizer is None or hf_tokenizer.mask_token_id is None:
            raw.refuse("data", "tokenizer", "it has no token that stands for a hidden one (mask_token)")
        return replace(task, mask=hf_tokenizer.mask_token_id)
    if task.has_pairs and hf_tokenizer is not None:
        return replace(task, pad=hf_tokenizer.pad_token_id or 0)
    return task


def _tokenize_source(
    raw: RawConfig,
    section: MixedSection | DataSection,
    source: Source,
    tokenizer: Tokenizer,
    task: Task,
    *,
    at: tuple[str, ...],
    say: Callable[[str], None] | None,
    reads: bool,
) -> Source:
    """Return text and rows as tokens, or as examples for conversations or pairs; written only if ``reads`` is set."""
    data, streams = raw.config.data, isinstance(section, DataSection) and section.streaming
    key: list[object] = [source.kind, section.column, section.learns, task.name, task.labels, tokenizer.vocab_size]
    if task.name == ANSWER and isinstance(tokenizer, FolderTokenizer):
        key += [end] if (end := missing_end(tokenizer.hf_tokenizer)) is not None else []
    try:
        if section.chat_template is not None:
            key.append(_read_template(section.chat_template))
        form_of = functools.partial(_form, section, source, tokenizer, task)
        if reads and not streams:
            return prepare(source, tokenizer, key, form_of, say)
        form = form_of(first_row(source))
    except ConfigError as error:
        is_column = "column" in str(error).splitlines()[0]
        raw.refuse_at((*at[:-1], "column") if is_column else at, inline(error))
    whole = replace(source, vocab_size=tokenizer.vocab_size, streams=form if reads else None)
    if streams and not isinstance(form, Texts):
        raw.refuse("data", "streaming", "it is for texts; conversations are tokenized before training begins")
    if not reads or data.eval_source is not None:
        return whole
    num_held = max(int(len(source.files) * data.held_out), 1)
    if num_held == len(source.files):
        raise DataError(
            f"{source.name} is one file, and the last files of a stream are held out.\n  Leave data.streaming out,"
            " divide the text into more files, or name data to evaluate on in data.eval_source."
        )
    last = replace(source, files=source.files[-num_held:], lengths=source.lengths[-num_held:])
    files, lengths = source.files[:-num_held], source.lengths[:-num_held]
    return replace(whole, files=files, lengths=lengths, evaluated=prepare(last, tokenizer, key, lambda _: form, say))


def _read_template(name: str) -> str:
    try:
        return Path(name).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template={name}: {error}.\n  Name a file of text.") from None


def _form(section: OneSource, source: Source, tokenizer: Tokenizer, task: Task, first: Mapping[str, Any]) -> Form:
    """Return the form that converts rows like the first one to examples."""
    if source.kind == "text":
        return Texts(tokenizer, None)
    if task.has_pairs and isinstance(tokenizer, FolderTokenizer):
        target, default_column = ("label", TEXT) if task.name == CLASS else (COMPLETION, PROMPT)
        pairs = Pairs(tokenizer.hf_tokenizer, section.column or default_column, target, task.labels)
        pairs.check(list(first), source.name)
        return pairs
    column = column_of(list(first), section.column, source.name)
    if column == TEXT or (column != PROMPT and isinstance(first[column], str)):
        return Texts(tokenizer, column)
    if not isinstance(tokenizer, FolderTokenizer):
        raise ConfigError(
            f"data.source={source.name} holds conversations, which bytes have no form for.\n"
            "  Name a Hugging Face folder in data.tokenizer."
        )
    template = None if section.chat_template is None else _read_template(section.chat_template)
    chat = Chat(tokenizer.hf_tokenizer, column, section.learns, template)
    chat.check()
    return chat
