"""The shape of a model from a name, a file, a file's content, or a configuration object."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardwise.spec.bound import read_json
from shardwise.spec.errors import ConfigError
from shardwise.spec.hf_cache import folder_name, local_folder
from shardwise.spec.shape.families import from_config
from shardwise.spec.shape.gpt import PRESETS, GPTConfig, gpt_shape
from shardwise.spec.shape.model import ModelShape
from shardwise.spec.shape.names import KNOWN, is_known, known_shape
from shardwise.spec.text import did_you_mean


def find_shape(source: object, name: str = "") -> ModelShape:
    """See ``ModelShape.from_config``."""
    if isinstance(source, ModelShape):
        return source
    if isinstance(source, GPTConfig):
        return gpt_shape(source, name or "gpt")
    if isinstance(source, Mapping):
        return from_config(source, name)
    if isinstance(source, Path):
        return _from_path(source, name)
    if isinstance(source, str):
        return _from_word(source, name)
    if callable(to_dict := getattr(source, "to_dict", None)):
        content = to_dict()
        if isinstance(content, Mapping):
            return from_config(content, name)
    raise ConfigError(
        f"ModelShape.from_config: a {type(source).__name__} is not a description of a model.\n"
        "  Give a well-known name, a Hugging Face folder, the path or content of a config.json, a configuration object"
        " of transformers or a GPTConfig; a module goes to sw.trace_model(module, example_batch)."
    )


def _from_word(word: str, name: str) -> ModelShape:
    """Try our GPT's presets, then well-known names, then paths, so that ``gpt2`` is the model that ``train`` builds."""
    preset = word.lower()
    if preset in PRESETS:
        return gpt_shape(PRESETS[preset], name or preset)
    if is_known(word):
        return known_shape(word)
    folder = local_folder(word)
    if folder.exists():
        return _from_path(folder, name)
    names = [*PRESETS, *KNOWN]
    hint = did_you_mean(preset.rpartition("/")[2], names) or f" Known are: {', '.join(dict.fromkeys(names))}."
    raise ConfigError(
        f"model {word!r} is neither a well-known name nor a path that exists.\n"
        f" {hint}\n  For another model give the path of its Hugging Face folder or config.json."
    )


def _from_path(path: Path, name: str) -> ModelShape:
    file = path / "config.json" if path.is_dir() else path
    try:
        content = read_json(file)
    except FileNotFoundError:
        raise ConfigError(
            f"{file} does not exist.\n  Give a Hugging Face folder, which has a config.json, or the path of that file."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}\n  Give the config.json of a model.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds a {type(content).__name__}, expected the fields of a model's configuration.")
    return from_config(content, name or folder_name(file.absolute().parent))
