"""Facts from a Hugging Face folder's configuration, read without importing transformers or torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.spec.bound import MOST_JSON_BYTES, read_json
from shardwise.spec.errors import CheckpointError, ShardwiseError
from shardwise.spec.hf_cache import how_to_fetch
from shardwise.spec.precision import dtype_name
from shardwise.spec.text import printable
from shardwise.train.task import ANSWER, CAUSAL, CLASS, MASKED, Task

OWN_LOOP = (
    "from a folder `shardwise train` trains language models and classifiers of texts; take model.hf out and give this"
    " model, its data and its loss in a spec (--spec mine.py, docs/your-own.md), or train it in a loop of your own with"
    " sw.from_pretrained"
)
#: Model types whose language-modelling head can attend to the tokens that it predicts unless ``is_decoder`` is set.
_ENCODERS = {
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}


#: Weight files in formats that are not read, most common first: pickles, and other frameworks' files.
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.safetensors.index.json")
#: Files with such endings that contain no weights.
_NO_WEIGHTS = {"training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth"}


def check_weights(folder: Path) -> None:
    """Refuse a folder whose weights are in a format that is not read. A folder without any weights is accepted."""
    if any(folder.glob("*.safetensors")):
        return
    others = [
        path.name for kind in _OTHER_WEIGHTS for path in sorted(folder.glob(kind)) if path.name not in _NO_WEIGHTS
    ]
    if not others:
        return
    files = f"{others[0]} and {len(others) - 1} more" if len(others) > 1 else others[0]
    advice = "Convert it where you trust it: load it with transformers and call model.save_pretrained(NEW_FOLDER)"
    if others[0].endswith(".json"):
        advice = "Copy or download the folder again"
    raise CheckpointError(
        f"{printable(folder)} has its weights in {printable(files)}; expected *.safetensors (pickles can run code, and"
        f" are not read).\n  {advice}."
    )


#: Keys for numbers of layers and heads in all families, and the largest number that is accepted.
_COUNTS = {
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"),
    *("num_attention_heads", "num_key_value_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"),
}
_MOST_COUNTED = 10_000


class NotTrainedError(Exception):
    """Raised if a folder's model cannot be trained; collected into a ConfigError."""


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """Facts of a language model."""

    vocab_size: int
    positions: int | None  # maximum sequence length; ``None`` if the configuration does not say
    task: Task = CAUSAL  # the task that it is trained for
    adds_router_loss: bool = False  # ``output_router_logits``: its forward returns values from inside of its blocks


def read_language_model(folder: Path) -> LanguageModel:
    """Read the facts in a folder's ``config.json``; raise a NotTrainedError if the model cannot be trained."""
    config, path = _read(folder), folder / "config.json"
    name = _architecture(config)
    is_text = name.endswith(("ForCausalLM", "ForMaskedLM", "LMHeadModel"))
    if (folder / "preprocessor_config.json").is_file() and not is_text:
        raise NotTrainedError(f"{path}: {name} reads pictures or sounds (preprocessor_config.json); {OWN_LOOP}")
    try:
        task, vocab = _task(config), config.get("vocab_size")
    except NotTrainedError as error:
        raise NotTrainedError(f"{path}: {error}") from None
    if isinstance(vocab, bool) or not isinstance(vocab, int) or vocab < 1:
        raise NotTrainedError(f"{path}: it names no vocab_size: not a language model; {OWN_LOOP}")
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    has_limit = isinstance(positions, int) and positions > 0
    return LanguageModel(vocab, positions if has_limit else None, task, config.get("output_router_logits") is True)


def read_architecture(folder: Path) -> str:
    """Return the name of a model's class from the ``config.json`` of its folder, for any task."""
    return _architecture(_read(folder))


def _read(folder: Path) -> dict[str, Any]:
    check_weights(folder)
    path = folder / "config.json"
    try:
        config = read_json(path)
    except OSError:
        where = "" if path.is_absolute() else f" in the current folder, {Path.cwd()}"
        raise NotTrainedError(
            f"no readable {path}{where}; name a folder with a Hugging Face model ({how_to_fetch(str(folder))})"
        ) from None
    except ValueError as error:
        raise NotTrainedError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise NotTrainedError(f"{path} is not a configuration: expected a mapping")
    if not str(config.get("model_type")).isprintable():
        raise NotTrainedError(f"{path}: model_type is {printable(config['model_type'])!r}, which is not a name")
    if "auto_map" in config:
        raise NotTrainedError(f"{path}: it has an auto_map: the model needs code of its own, which is never run")
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]  # the parts for text and vision
    for key, value in (item for part in parts for item in part.items()):
        if key in _COUNTS and isinstance(value, int) and not 1 <= value <= _MOST_COUNTED:
            raise NotTrainedError(f"{path}: {key} is {value:,}, expected 1 to {_MOST_COUNTED:,}")
    return config


def _architecture(config: dict[str, Any]) -> str:
    kinds = config.get("architectures")
    return str(kinds[0]) if isinstance(kinds, list) and kinds else str(config.get("model_type", "the model"))


def _task(config: dict[str, Any]) -> Task:
    """Return the task of a folder's model, from its configuration."""
    name = _architecture(config)
    if name.endswith("ForSequenceClassification"):
        labels, names = config.get("label2id"), config.get("id2label")
        if not isinstance(labels, dict):  # transformers writes none for two classes without names
            names = names.values() if isinstance(names, dict) else ("LABEL_0", "LABEL_1")
            labels = {str(label): number for number, label in enumerate(names)}
        if len(labels) == 1 or config.get("problem_type") not in {None, "single_label_classification"}:
            what = f"{len(labels)} labels, problem_type {config.get('problem_type')}"
            raise NotTrainedError(f"{name} does not choose one class of several ({what}); {OWN_LOOP}")
        return Task(CLASS, labels)
    other = re.search("For(?!CausalLM|MaskedLM)[A-Z]", name) is not None
    answers = config.get("is_encoder_decoder") is True and "num_mel_bins" not in config  # not speech models
    if answers and (not other or name.endswith("ForConditionalGeneration")):
        return Task(ANSWER)
    if not other and (
        name.endswith("ForMaskedLM") or (config.get("model_type") in _ENCODERS and config.get("is_decoder") is not True)
    ):
        return Task(MASKED)
    if other:
        vision = " (examples/finetune_vit.py)" if "Image" in name else ""
        raise NotTrainedError(f"{name} is made for another task; {OWN_LOOP}{vision}")
    return CAUSAL


def stored_dtype(folder: Path) -> str | None:
    """Return the dtype name of a folder's weights, from its configuration or else from its first file."""
    try:
        config = read_json(folder / "config.json")
        dtype = config.get("dtype") or config.get("torch_dtype")
        if isinstance(dtype, str):
            return dtype_name(dtype)
        name = "model.safetensors"
        if not (folder / name).is_file():
            name = min(read_json(folder / f"{name}.index.json")["weight_map"].values())
        with (folder / Path(name).name).open("rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), MOST_JSON_BYTES)))
        stored = [_FLOATING[entry["dtype"]] for entry in header.values() if entry.get("dtype") in _FLOATING]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ShardwiseError):
        return None  # the error is raised where the folder is loaded
    return stored[0] if stored else None


#: The floating-point dtypes of safetensors files.
_FLOATING = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}
