"""What a Hugging Face folder's own configuration says, without transformers and without torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.spec.errors import ShardwiseError
from shardwise.spec.precision import dtype_name

_OWN_LOOP = "`shardwise train` trains causal language models; train it in a loop of your own with sw.parallelize"
#: Model types whose language-modelling head sees the tokens that it is to predict unless ``is_decoder`` is set.
_ENCODERS = {
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}


class NotCausalError(Exception):
    """Why a folder cannot be trained; collected into a ConfigError."""


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """Facts of a causal language model.

    Attributes:
        vocab_size: Number of token ids.
        positions: The longest sequence that it takes; ``None`` where its configuration does not say.
    """

    vocab_size: int
    positions: int | None


def read_language_model(folder: Path) -> LanguageModel:
    """The facts that ``config.json`` of a folder holds.

    Raises:
        NotCausalError: The folder holds no causal language model, or one that needs code of its own.
    """
    path = folder / "config.json"
    try:
        held = json.loads(path.read_text("utf-8"))
    except OSError:
        raise NotCausalError(
            f"no readable {path}; name a folder with a Hugging Face model (nothing is downloaded)"
        ) from None
    except (ValueError, RecursionError):
        raise NotCausalError(f"{path} is not JSON") from None
    if not isinstance(held, dict):
        raise NotCausalError(f"{path} is not a configuration: expected a mapping")
    reason, vocab = _not_causal(held), held.get("vocab_size")
    if reason is None and (isinstance(vocab, bool) or not isinstance(vocab, int) or vocab < 1):
        reason = f"it names no vocab_size: not a language model; {_OWN_LOOP}"
    if reason is None and "auto_map" in held:
        reason = "it has an auto_map: the model needs code of its own, which is never run"
    if reason is not None:
        raise NotCausalError(f"{path}: {reason}")
    positions = held.get("max_position_embeddings", held.get("n_positions"))
    return LanguageModel(held["vocab_size"], positions if isinstance(positions, int) and positions > 0 else None)


def _not_causal(held: dict[str, Any]) -> str | None:
    """Why a folder's configuration is not that of a causal language model; ``None`` where nothing says so."""
    kinds = held.get("architectures")
    name = str(kinds[0]) if isinstance(kinds, list) and kinds else str(held.get("model_type", "the model"))
    if held.get("is_encoder_decoder") is True:
        return f"{name} has an encoder and a decoder; {_OWN_LOOP} (examples/finetune_t5.py)"
    if held.get("model_type") in _ENCODERS and held.get("is_decoder") is not True:
        return (
            f"{name} is an encoder: every position sees the token that it would have to predict; {_OWN_LOOP}, or set"
            " is_decoder: true there to make it causal"
        )
    if re.search("For(?!CausalLM)[A-Z]", name):
        vision = " (examples/finetune_vit.py)" if "Image" in name else ""
        return f"{name} is made for another task; {_OWN_LOOP}{vision}, or export its language model by itself"
    return None


def stored_dtype(folder: Path) -> str | None:
    """The dtype in which a Hugging Face folder stores its weights: its configuration's, else that of its first file.

    Returns:
        The short name; ``None`` where neither says.
    """
    try:
        held = json.loads((folder / "config.json").read_text("utf-8"))
        named = held.get("dtype") or held.get("torch_dtype")
        if isinstance(named, str):
            return dtype_name(named)
        name = "model.safetensors"
        if not (folder / name).is_file():
            name = min(json.loads((folder / f"{name}.index.json").read_text("utf-8"))["weight_map"].values())
        with (folder / Path(name).name).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        stored = [_FLOATING[entry["dtype"]] for entry in header.values() if entry.get("dtype") in _FLOATING]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ShardwiseError):
        return None  # what is wrong with the folder is said where it is read
    return stored[0] if stored else None


#: The floating-point dtypes of safetensors files.
_FLOATING = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}
