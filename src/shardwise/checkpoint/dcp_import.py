"""Imports a folder of ``torch.distributed.checkpoint`` as a checkpoint that ``sw.load`` reads on any layout.

The folder contains a nested state dict, whose paths are joined by dots. Its keys are imported as follows, if ``model``
and ``optimizer`` are the keys of the two state dicts:

=========================================  ==========================================================================
``model.<name>``                           the parameter or buffer of that name
``optimizer.state.<name>.<key>``           the optimizer's state of that parameter, as ``get_optimizer_state_dict`` and
                                           FSDP1's ``optim_state_dict`` name it
``optimizer.param_groups.<number>.<key>``  the settings of a parameter group and the names in it
``optimizer.param_groups.<name>.<key>``    the settings of a parameter, in state dicts with
                                           ``flatten_optimizer_state_dict=True``, as torchtitan's
others                                     part of the result of ``sw.load`` if JSON can represent the value
=========================================  ==========================================================================

A folder consists of the pickle ``.metadata`` and files with the shards of tensors and pickled values. Unpickling
executes code from the files: open only folders from a trusted source.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardwise.checkpoint import plain
from shardwise.checkpoint.one_process import write_from_one_process
from shardwise.checkpoint.storage import deepspeed_advice
from shardwise.comm.dtype import dtype_name, torch_dtype
from shardwise.spec.errors import CheckpointError
from shardwise.spec.extent import Extent
from shardwise.spec.text import printable
from shardwise.weights.state.optimizer import PER_PARAMETER

#: Parts of names that module wrappers add.
_WRAPPERS = re.compile(r"(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_OPTIMIZER = re.compile(r"(?P<prefix>(?:.*?\.)?(?:optimizer|optim)\.)(?:state|param_groups)\.")


class Stored(NamedTuple):
    """Dtype (short name) and shape of a tensor in the folder."""

    dtype: str
    shape: tuple[int, ...]


class DcpFolder:
    """An opened folder.

    Attributes:
        tensors: The tensors by key: the path in the state dict, joined by dots.

    Raises:
        CheckpointError: The folder does not exist or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = FileSystemReader(path)
        with self._reading(".metadata"):
            found = self._reader.read_metadata()
            if not isinstance(found, Metadata):
                raise TypeError(f"it holds a {type(found).__name__}")
        self._metadata = found
        self._reader.set_up_storage_reader(found, is_coordinator=True)
        stored = found.state_dict_metadata
        with self._reading("the dtypes"):
            self.tensors = {
                key: Stored(dtype_name(metadata.properties.dtype), tuple(metadata.size))
                for key, metadata in stored.items()
                if isinstance(metadata, TensorStorageMetadata)
            }
        known = found.planner_data if isinstance(found.planner_data, dict) else {}
        #: For each key, the path in the saved state dict.
        self.paths: dict[str, tuple[str | int, ...]] = {key: tuple(known.get(key, (key,))) for key in stored}

    def read_tensor(self, key: str) -> Tensor:
        """Read a full tensor to the CPU. One of its shards is in memory at the same time."""
        metadata = self._metadata.state_dict_metadata[key]
        assert isinstance(metadata, TensorStorageMetadata)
        return self._read(key, torch.empty(metadata.size, dtype=metadata.properties.dtype))

    def read_value(self, key: str) -> Any:
        """Return the value of ``key``; a tensor without dimensions as a number. Other values are unpickled."""
        if key in self.tensors:
            tensor = self.read_tensor(key)
            return tensor.item() if tensor.dim() == 0 else tensor
        return self._read(key, None)

    def _read(self, key: str, target: Any) -> Any:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        wanted = {key: target}
        with self._reading(repr(key)):
            planner.set_up_planner(wanted, self._metadata, is_coordinator=True)
            plan = planner.finish_plan(planner.create_local_plan())
            self._reader.read_data(plan, planner).wait()
        return wanted[key]

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            name = "Name the folder that dcp.save() was given, with its .metadata and *.distcp files."
            raise CheckpointError(
                f"{self.path} is not a folder of torch.distributed.checkpoint: {Path(str(error.filename)).name} is"
                f" missing.\n  {deepspeed_advice(each.name for each in self.path.glob('*')) or name}"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{self.path}: {what} cannot be read: {error.strerror or error}.") from None
        except Exception as error:  # noqa: BLE001 - a damaged pickle can raise anything
            raise CheckpointError(f"{self.path}: {what} cannot be read: {type(error).__name__}: {error}.") from None


@dataclass(frozen=True)
class Imported:
    """The result of an import."""

    num_tensors: int  # parameters and buffers
    optimizer: str | None  # class of the optimizer, or ``None``
    step: int  # number of updates
    left_out: list[str]  # keys of the folder that were not imported


def import_dcp(
    source: Path,
    target: Path,
    *,
    model_key: str | None = None,
    optimizer_key: str | None = None,
    has_optimizer: bool = True,
    optimizer_class: str | None = None,
    dtype: str | None = None,
    max_file_bytes: float = 4e9,
) -> Imported:
    """Write the model and the optimizer state of ``source`` as the checkpoint ``target``, a tensor at a time.

    Args:
        source: The folder. It is unpickled, which executes code that it names.
        target: A folder that does not exist.
        model_key: Key of the model's state dict in the saved one, such as ``"model"`` or ``"app.model"``; ``""``: the
            top level. ``None``: searched.
        optimizer_key: The same for the optimizer's.
        has_optimizer: Import optimizer state if there is some.
        optimizer_class: Class of the optimizer, if its state does not identify it.
        dtype: Short name of the dtype of the model's floating-point tensors. ``None``: unchanged.
        max_file_bytes: Maximum size of a file. A larger tensor gets its own file.

    Raises:
        CheckpointError: The folder cannot be read, or is ambiguous; the message names the option to set.
        StorageError: Writing failed.
    """
    folder = DcpFolder(source)
    optimizer_keys = _optimizer_keys(folder, optimizer_key, refuses_several=has_optimizer)
    prefix = _model_prefix(folder, optimizer_keys, model_key)
    content = _Content(folder)
    content.add_model({key: key.removeprefix(prefix) for key in _model_keys(folder, prefix, optimizer_keys)})
    if optimizer_keys and has_optimizer:
        content.add_optimizer(optimizer_keys, optimizer_class)
    rest = [key for key in folder.paths if key not in content.imported and key not in optimizer_keys]
    left_out = content.add_rest(rest) + ["optimizer state"] * bool(optimizer_keys and not has_optimizer)
    data: dict[str, Any] = {"state": content.state, "strategy": "torch.distributed.checkpoint", "mesh": None}
    if content.optimizer is not None:
        data["optimizer"] = content.optimizer
    wanted = content.dtypes(dtype)
    extents = [
        Extent(name, found.shape, wanted[name], 0, math.prod(found.shape))
        for name, (_, found) in content.tensors.items()
    ]

    def read(name: str) -> Tensor:
        return folder.read_tensor(content.tensors[name][0]).to(torch_dtype(wanted[name]))

    write_from_one_process(target, extents, read, data, step=content.step, max_file_bytes=max_file_bytes)
    found = None if content.optimizer is None else content.optimizer["class"]
    return Imported(content.num_model, found, content.step, left_out)


def _optimizer_keys(folder: DcpFolder, wanted: str | None, *, refuses_several: bool) -> dict[str, str]:
    """Map the keys of optimizer state and settings to the part after the optimizer's key ``wanted``.

    With ``refuses_several``, several optimizers are refused.
    """
    if wanted is None:
        prefixes = sorted({match["prefix"] for key in folder.paths if (match := _OPTIMIZER.match(key)) is not None})
        if len(prefixes) > 1 and refuses_several:
            raise CheckpointError(
                f"{folder.path} holds the state of several optimizers: {', '.join(prefixes)}.\n"
                "  Name one: --optimizer-key KEY, or leave all out: --no-optimizer."
            )
    else:
        prefixes = [f"{wanted}." if wanted else ""]
    found = {
        key: key.removeprefix(prefix)
        for prefix in prefixes
        for key in folder.paths
        if key.startswith((f"{prefix}state.", f"{prefix}param_groups"))
    }
    if wanted is not None and not found:
        raise CheckpointError(f"{folder.path} holds no optimizer state below {wanted!r}.\n  {_describe(folder)}")
    return found


def _model_prefix(folder: DcpFolder, optimizer_keys: Collection[str], wanted: str | None) -> str:
    """Return the prefix of the model's keys."""
    if wanted is not None:
        prefix = f"{wanted}." if wanted else ""
        if not any(key.startswith(prefix) for key in folder.tensors if key not in optimizer_keys):
            raise CheckpointError(f"{folder.path} holds no tensor below {wanted!r}.\n  {_describe(folder)}")
        return prefix
    above = {folder.paths[key][:-1] for key in folder.tensors if key not in optimizer_keys}
    named = [path for path in above if path and path[-1] == "model"]
    chosen = named or ([()] if () in above else list(above))
    if len(chosen) != 1:
        raise CheckpointError(
            f"{folder.path} does not say which of its tensors are the model's.\n"
            f"  Name where they are: --model-key KEY. {_describe(folder)}"
        )
    return "".join(f"{part}." for part in chosen[0])


def _model_keys(folder: DcpFolder, prefix: str, optimizer_keys: Collection[str]) -> list[str]:
    """Return the keys of the model's tensors. For a model at the top level, nested keys belong to other state dicts."""
    found = [key for key in folder.tensors if key.startswith(prefix) and key not in optimizer_keys]
    return found if prefix else [key for key in found if len(folder.paths[key]) == 1]


def _describe(folder: DcpFolder) -> str:
    """List the top-level keys of the saved state dict."""
    top = list(dict.fromkeys(str(path[0]) for path in folder.paths.values()))
    return f"At the top it has {', '.join(map(printable, top[:8]))}" + (", ..." if len(top) > 8 else "") + "."


@dataclass
class _Content:
    """The content of the new checkpoint."""

    folder: DcpFolder
    #: Key in the folder, dtype and shape of each tensor, by its name in the checkpoint.
    tensors: dict[str, tuple[str, Stored]] = field(default_factory=dict)
    num_model: int = 0  # number of the model's tensors among them
    optimizer: dict[str, Any] | None = None
    state: dict[str, Any] = field(default_factory=dict)  # the result of ``sw.load``
    step: int = 0
    imported: set[str] = field(default_factory=set)  # keys that were imported

    def add_model(self, names: Mapping[str, str]) -> None:
        """Add the model's tensors, given as names in the model by key."""
        for key, wrapped in names.items():
            self._add(_WRAPPERS.sub("", wrapped), key)
        self.num_model = len(self.tensors)

    def dtypes(self, dtype: str | None) -> dict[str, str]:
        """Return the dtype of each tensor; the model's floating-point tensors get ``dtype`` if given."""
        return {
            name: dtype
            if dtype and index < self.num_model and torch_dtype(stored.dtype).is_floating_point
            else stored.dtype
            for index, (name, (_, stored)) in enumerate(self.tensors.items())
        }

    def _add(self, name: str, key: str) -> None:
        if name in self.tensors:
            raise CheckpointError(f"{self.folder.path} holds {printable(name)} twice.\n  Name one: --model-key KEY.")
        self.tensors[name] = key, self.folder.tensors[key]
        self.imported.add(key)

    def add_optimizer(self, names: Mapping[str, str], cls: str | None) -> None:
        """Add the optimizer's state, of class ``cls``; ``names`` maps keys to their part after the optimizer's key."""
        shapes = {name: stored.shape for name, (_, stored) in self.tensors.items()}
        scalars: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        state_keys: set[str] = set()
        for key, rest in names.items():
            if not rest.startswith("state."):
                continue
            name, _, kind = _WRAPPERS.sub("", rest.removeprefix("state.")).rpartition(".")
            if name not in shapes:
                raise self._unknown(name)
            state_keys.add(kind)
            stored = self.folder.tensors.get(key)
            if stored is None or (stored.shape == () and (shapes[name] != () or kind in PER_PARAMETER)):
                value = self._number(key)
                if value is not None:
                    scalars[name][kind] = value
            else:
                self._add(f"optimizer/{name}/{kind}", key)
        groups, members = self._groups({k: rest for k, rest in names.items() if rest.startswith("param_groups")})
        self.optimizer = {
            "class": cls or self._class_of(state_keys, groups),
            "groups": groups,
            "members": members,
            "scalars": dict(scalars),
        }
        self.step = int(max((kept.get("step", 0) for kept in scalars.values()), default=0))

    def _unknown(self, name: str) -> CheckpointError:
        if name.isdecimal():
            return CheckpointError(
                f"{self.folder.path} holds the optimizer's state by number, as optimizer.state_dict() gives it, and not"
                " by the parameters' names.\n"
                "  Save it as torch.distributed.checkpoint.state_dict.get_optimizer_state_dict() gives it, or import"
                " the model alone: --no-optimizer."
            )
        return CheckpointError(
            f"{self.folder.path} holds optimizer state of {printable(name)}, but no such parameter.\n"
            "  Name where the model is: --model-key KEY, or import it alone: --no-optimizer."
        )

    def _number(self, key: str) -> Any:
        value = self.folder.read_value(key)
        if value is not None and not isinstance(value, int | float):
            raise CheckpointError(
                f"{self.folder.path}: {printable(key)} is a {type(value).__name__}, which no checkpoint holds.\n"
                "  Import the model alone: --no-optimizer."
            )
        return value

    def _groups(self, names: Mapping[str, str]) -> tuple[list[dict[str, Any]], list[list[str]]]:
        """Return the settings of each parameter group, and the names in it."""
        is_nested = all("param_groups" in self.folder.paths[key] for key in names)
        groups = self._nested_groups(names) if is_nested else self._flat_groups(names)
        self.imported.update(names)
        members = [[_WRAPPERS.sub("", str(name)) for name in group.pop("params", ())] for group in groups]
        return [{key: _plain(value) for key, value in group.items()} for group in groups], members

    def _nested_groups(self, keys: Iterable[str]) -> list[dict[str, Any]]:
        paths = {key: path[path.index("param_groups") :] for key in keys for path in (self.folder.paths[key],)}
        return unflatten_state_dict({key: self.folder.read_value(key) for key in keys}, paths).get("param_groups", [])

    def _flat_groups(self, names: Mapping[str, str]) -> list[dict[str, Any]]:
        """Group parameters with equal settings, in the order of their first occurrence."""
        settings: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for key, rest in names.items():
            name, _, kind = rest.removeprefix("param_groups.").rpartition(".")
            settings[name][kind] = _plain(self.folder.read_value(key))
        groups: dict[str, dict[str, Any]] = {}
        for name, own_settings in settings.items():
            group = groups.setdefault(repr(sorted(own_settings.items())), {**own_settings, "params": []})
            group["params"].append(name)
        return list(groups.values())

    def _class_of(self, keys: set[str], groups: Iterable[Mapping[str, Any]]) -> str:
        """Return the class of torch's optimizer that has such state and settings."""
        settings = set[str]().union(*groups)
        decouples = {group.get("decoupled_weight_decay") for group in groups}
        if {"exp_avg", "exp_avg_sq"} <= keys and "amsgrad" in settings and decouples <= {True, False}:
            if len(decouples) == 1:
                return "AdamW" if decouples.pop() else "Adam"
        elif keys <= {"momentum_buffer"} and {"nesterov", "dampening"} <= settings:
            return "SGD"
        raise CheckpointError(
            f"{self.folder.path} does not say which optimizer has this state ({', '.join(sorted(keys)) or 'none'}).\n"
            "  Name its class: --optimizer-class AdamW, or import the model alone: --no-optimizer."
        )

    def add_rest(self, keys: Iterable[str]) -> list[str]:
        """Add all other values; return the keys that cannot be imported."""
        left_out = []
        found: dict[str, Any] = {}
        for key in keys:
            if key in self.folder.tensors:
                left_out.append(key)
                continue
            try:
                value = self.folder.read_value(key)
                plain.pack(value)
            except (CheckpointError, ValueError):  # of an unknown class, or not representable in JSON
                left_out.append(key)
            else:
                found[key] = value
        self.state = unflatten_state_dict(found, self.folder.paths)
        return left_out


def _plain(value: Any) -> Any:
    """Return a setting; a number in a tensor becomes a number."""
    return value.item() if hasattr(value, "item") and callable(value.item) else value
