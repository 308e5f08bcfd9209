"""A model repository for Triton: ``NAME/config.pbtxt`` and ``NAME/1``, for its Python or its vLLM backend."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

from shardwise.spec.errors import ConfigError, StorageError
from shardwise.spec.text import printable
from shardwise.train.export import export_trained
from shardwise.train.load import TrainedModel

Backend = Literal["python", "vllm"]

#: Name of the weights of a run, in the same folder as ``model.py`` or ``model.json``.
_WEIGHTS = "model"

_PYTHON = '''"""The model of this repository for Triton's Python backend, whose environment needs shardwise[hf]."""

from shardwise.serve.triton import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''

#: Inputs and outputs are those of the vLLM backend, which defines them itself.
_PYTHON_CONFIG = """name: {name}
backend: "python"
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
input [
  {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }},
  {{ name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }},
  {{ name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [ 1 ] optional: true }}
]
output [
  {{ name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }}
]
# One instance continues all prompts together; several are copies of the model.
instance_group [ {{ count: 1 kind: KIND_AUTO }} ]
parameters {{ key: "model" value {{ string_value: {model} }} }}
parameters {{ key: "max_rows" value {{ string_value: "32" }} }}
parameters {{ key: "max_waiting" value {{ string_value: "128" }} }}
"""

_VLLM_CONFIG = """name: {name}
backend: "vllm"
# vLLM chooses its devices.
instance_group [ {{ count: 1 kind: KIND_MODEL }} ]
"""


def write_repository(
    trained: TrainedModel,
    folder: Path,
    *,
    name: str,
    backend: Backend = "python",
    dtype: str | None = None,
    is_averaged: bool = False,
    max_shard_bytes: float = 5e9,
) -> Path:
    """Write a model into a repository.

    The weights of a run or checkpoint are written into the repository; of a Hugging Face folder only the path.

    Returns:
        The model's folder.

    Raises:
        CheckpointError: A file is damaged.
    """
    if not name or name in {".", ".."} or "/" in name or not name.isprintable():
        raise ConfigError(f"{printable(name)!r} is not a name of a folder.\n  Name the model: --name NAME.")
    place = folder / name
    if place.exists():
        raise ConfigError(f"{printable(place)} exists.\n  Name another repository, or the model: --name NAME.")
    resolved = trained.resolve([], 1)
    trained.check_continues(resolved)
    version = place / "1"
    try:
        version.mkdir(parents=True)
        if trained.folder is None:
            merges = resolved.config.lora.is_used
            options = {"is_averaged": is_averaged, "max_shard_bytes": max_shard_bytes, "merges_adapter": merges}
            export_trained(trained, version / _WEIGHTS, dtype=dtype, **options)
        elsewhere = None if trained.folder is None else str(trained.folder.resolve())
        if backend == "python":
            (version / "model.py").write_text(_PYTHON, "utf-8")
            config = _PYTHON_CONFIG.format(name=_quote(name), model=_quote(elsewhere or _WEIGHTS))
        else:
            engine = {"model": elsewhere or str((version / _WEIGHTS).resolve())}
            (version / "model.json").write_text(json.dumps(engine, indent=2) + "\n", "utf-8")
            config = _VLLM_CONFIG.format(name=_quote(name))
        (place / "config.pbtxt").write_text(config, "utf-8")
    except BaseException as error:
        shutil.rmtree(place, ignore_errors=True)
        if isinstance(error, OSError):
            raise StorageError(f"{printable(place)} cannot be written: {error.strerror}.\n  See to the disk.") from None
        raise
    return place


def _quote(text: str) -> str:
    """Return a quoted string of protobuf's text format, whose escapes for ASCII are the same as JSON's."""
    return json.dumps(text, ensure_ascii=False)
