"""A model under any plan in lm-eval, EleutherAI's evaluation harness.

::

    from lm_eval import simple_evaluate
    from shardwise.integrations.lm_eval import ShardwiseLM

    model = sw.parallelize(model, plan)  # or a plain model
    results = simple_evaluate(ShardwiseLM(model, tokenizer), tasks=["hellaswag"])

Every rank calls ``simple_evaluate`` with the same tasks. lm-eval treats each rank as a single process with all
requests; the ranks divide the requests inside of ``sw.score`` and ``sw.generate``. ``simple_evaluate`` returns the
results on the first rank of each machine, and ``None`` on other ranks.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM  # pyrefly: ignore[missing-import]
from lm_eval.models.utils import (  # pyrefly: ignore[missing-import]
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyrefly: ignore[missing-import]
from torch import nn

import shardwise as sw
from shardwise.generation.decoder import decoder_of
from shardwise.spec.errors import ConfigError

#: Default of the maximum number of positions, as in lm-eval.
_POSITIONS = 2048
#: Supported arguments of generation.
_KNOWN = ("do_sample", "temperature", "top_k", "top_p", "until", "max_gen_toks")


class ShardwiseLM(TemplateLM):
    """A language model for lm-eval.

    Args:
        model: Our GPT, or a causal language model of transformers; plain or parallelized.
        tokenizer: A tokenizer of transformers.
        batch_tokens: Maximum number of tokens of one forward, and of rows that are continued together.
        max_length: Maximum number of tokens of a context with its continuation except the last token; by default the
            model's positions. Longer contexts lose their first tokens, as in lm-eval's own models.
        prefix_token_id: The token before a text without a context; by default the tokenizer's BOS, or its EOS.

    Raises:
        StateError: The model does not predict next tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        batch_tokens: int = 4096,
        max_length: int | None = None,
        prefix_token_id: int | None = None,
    ) -> None:
        super().__init__()
        positions = decoder_of(model, "ShardwiseLM", with_cache=False).positions
        self.model, self.tokenizer = model, tokenizer
        self.max_length = max_length or positions or _POSITIONS
        self.max_gen_toks = 256
        self._batch_tokens = batch_tokens
        prefixes = (prefix_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
        self._prefix = next((token for token in prefixes if token is not None), None)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context.

        Raises:
            ConfigError: The tokenizer has no such token.
        """
        if self._prefix is None:
            raise ConfigError(
                "a text without a context is scored after a token that begins texts, and the tokenizer has neither BOS"
                " nor EOS.\n  Pass ShardwiseLM(..., prefix_token_id=...)."
            )
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, for request caches."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:  # noqa: FBT001, FBT002 - lm-eval's form
        """Return a conversation as text."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_kwargs: Any) -> list[int]:  # noqa: FBT001 - lm-eval's form
        """Return the ids of a text, with the tokenizer's begin-of-text tokens unless the text already has them."""
        begin = None if self._prefix is None else self.tokenizer.decode(self._prefix)
        if add_special_tokens is None and has_bos_prefix(string, begin):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **options)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:  # noqa: FBT001, FBT002 - lm-eval's form
        """Return the log-probability of each full text, computed in windows of ``max_length`` tokens.

        Collective:
            As ``sw.score``.
        """
        del disable_tqdm
        texts = [request.args[0] for request in requests]
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for text in texts
        ]
        found = iter(self._loglikelihood_tokens([(None, *window) for each in windows for window in each]))
        sums = [sum(total for total, _ in itertools.islice(found, len(each))) for each in windows]
        for text, total in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return sums

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_kwargs: Any) -> list[Any]:
        prompts, cut = [], 0
        for _, context, continuation in requests:
            room = max(1, self.max_length + 1 - len(continuation))
            prompts.append(context[-room:])
            cut += len(context) > room
        if cut:
            logging.getLogger(__name__).warning(
                "%d of %d contexts are longer than the model's %d positions with their continuations: their first"
                " tokens are left out",
                cut,
                len(requests),
                self.max_length,
            )
        continuations = [continuation for _, _, continuation in requests]
        scores = sw.score(self.model, prompts, continuations, batch_tokens=self._batch_tokens)
        answers = [(sum(score.logprobs), score.is_greedy) for score in scores]
        for (key, _, _), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:  # noqa: FBT001, FBT002 - lm-eval's form
        """Continue each text until one of its stop sequences.

        Collective:
            As ``sw.generate``.

        Raises:
            ConfigError: A task needs a kind of generation that ``sw.generate`` does not support.
        """
        del disable_tqdm
        answers = [""] * len(requests)
        contexts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        by_length = sorted(range(len(requests)), key=lambda at: (repr(requests[at].args[1]), -len(contexts[at])))
        for _, alike in itertools.groupby(by_length, key=lambda at: repr(requests[at].args[1])):
            remaining = list(alike)
            options = self._options(requests[remaining[0]].args[1])
            room = self.max_length - options["max_new_tokens"]
            while remaining:
                tokens = min(len(contexts[remaining[0]]), room) + options["max_new_tokens"]
                count = max(1, self._batch_tokens // tokens)
                some, remaining = remaining[:count], remaining[count:]
                texts = self._continued([contexts[at][-room:] for at in some], **options)
                for at, text in zip(some, texts, strict=True):
                    answers[at] = text
                    self.cache_hook.add_partial("generate_until", requests[at].args, text)
        return answers

    def _options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return arguments for ``sw.generate_stream``, and ``stops``."""
        options = normalize_gen_kwargs(kwargs, self.max_gen_toks)
        foreign = [key for key, value in options.items() if key not in _KNOWN and value not in (None, False, 1)]
        if foreign:
            raise ConfigError(
                f"a task generates with {', '.join(foreign)}, and sw.generate knows {', '.join(_KNOWN)}.\n"
                "  Take them out of the task's generation_kwargs."
            )
        most = options["max_gen_toks"]
        if most >= self.max_length:
            raise ConfigError(
                f"a task generates max_gen_toks={most} tokens, and there are {self.max_length} positions.\n"
                f"  Set generation_kwargs.max_gen_toks of the task to {self.max_length - 1} or less."
            )
        end = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        temperature = options.get("temperature", 0.0)
        draws = {} if not temperature else {key: options.get(key) for key in ("top_k", "top_p")}
        return {
            "max_new_tokens": most,
            "temperature": temperature,
            "stops": handle_stop_sequences(options.get("until"), eos=end),
            "eos": self.eot_token_id,
            **draws,
        }

    def _continued(self, prompts: list[list[int]], *, stops: list[str], **options: Any) -> list[str]:
        """Return each prompt's continuation as text; the model continues until every row has a stop sequence."""
        rows: list[list[int]] = [[] for _ in prompts]
        has_stopped = [False] * len(prompts)
        stream: Any = sw.generate_stream(self.model, prompts, **options)
        for column in stream:
            for at, token in enumerate(column):
                if token is None or has_stopped[at]:
                    has_stopped[at] = True
                    continue
                rows[at].append(token)
                text = self.tokenizer.decode(rows[at], skip_special_tokens=True)
                has_stopped[at] = any(stop and stop in text for stop in stops)
            if all(has_stopped):
                stream.close()
                break
        texts = [self.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        return [postprocess_generated_text(text, stops, None) for text in texts]
