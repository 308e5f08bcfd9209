"""The parts of a training run that a user replaces by code: ``sw.TrainSpec``, from Python or from a file.

A spec is code: it does whatever its author wrote. Nothing else that a run reads is executed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardwise.launch.function import unpacked
from shardwise.spec.errors import ConfigError
from shardwise.spec.text import did_you_mean, printable
from shardwise.train.callback import Callback
from shardwise.train.data.source import is_indexed, is_loader

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

#: What a file's spec is called where the name is not said.
USUAL_NAME = "spec"
#: What a run's configuration says of a spec that was given to ``sw.train``, which its processes find in a file that
#: this variable names.
FROM_PYTHON, FILE_VARIABLE = "given to sw.train", "SHARDWISE_SPEC"


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over all samples of all microbatches and ranks, from the sum and the count of one microbatch.

    Attributes:
        total: The sum, without dimensions.
        count: What it is the sum of: tokens, boxes, samples.
    """

    total: Tensor
    count: Tensor | float


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """Replacements for the parts that ``run.yaml`` has names for. Every field is optional.

    ::

        spec = sw.TrainSpec(model=Towers, data=Pairs(train), eval_data=Pairs(held_out), loss=contrastive)
        sw.train({"parallel": {"strategy": "zero3"}, "train": {"steps": 1000}}, spec, nproc=2)

    Attributes:
        model: Returns the model, or is its class; built deferred, so that every rank makes only what it owns.
        data: Samples to train on: a data set with ``len`` and items (a ``torch.utils.data.Dataset``, a
            ``datasets.Dataset``, a list), in one order on every world and resumed at the sample; an iterable, of which
            every reader takes its share of each global batch, resumed by its ``state_dict`` or by reading up to the
            place; or a function ``data(reader, readers)``, which returns an iterable of microbatches, such as a
            ``DataLoader``, for one of the ranks that read different samples, resumed in the same way.
        eval_data: Held-out samples, of any of these kinds. Without them nothing is evaluated.
        collate: Makes a microbatch of a list of samples: a tensor, or a tuple or dict of tensors.
            ``torch.utils.data.default_collate`` by default.
        forward: ``forward(model, batch)`` gives the output. By default a dict is called ``model(**batch)``, a tuple
            ``model(*batch)``, anything else ``model(batch)``.
        loss: ``loss(output, batch)`` gives the mean of a microbatch, which counts as much as any other, or an
            ``sw.Mean``: the mean over all microbatches and ranks by what they count. By default ``output.loss``, or the
            output itself.
        optimizer: ``optimizer(groups, lr)`` gives the optimizer; ``groups`` are parameter groups with weight decay
            (two or more dimensions) and without, ``lr`` is ``optimizer.lr``.
        schedule: ``schedule(step, steps)`` gives the factor of the peak rate at ``step``, from 0.
        metrics: By name ``metric(output, batch)``, an ``sw.Mean``; taken at evaluations, recorded as ``eval_NAME``.
        callbacks: Told what happens (``sw.Callback``).
        code: Hash of the file that the spec comes from. A run that was begun with other code is not resumed, unless
            ``checkpoint.allow_other_code`` says so. What the file imports is not compared.
    """

    model: Callable[[], nn.Module] | None = None
    data: Any = None
    eval_data: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    forward: Callable[[nn.Module, Any], Any] | None = None
    loss: Callable[[Any, Any], Tensor | Mean] | None = None
    optimizer: Callable[[list[dict[str, Any]], float], Optimizer] | None = None
    schedule: Callable[[int, int], float] | None = None
    metrics: Mapping[str, Callable[[Any, Any], Mean]] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    code: str = ""

    def __post_init__(self) -> None:
        """Refuse what is of another kind, by field.

        Raises:
            ConfigError: A field cannot be what it is for.
        """
        called = ("model", "collate", "forward", "loss", "optimizer", "schedule")
        wrong = [
            f"{name}={_shown(value)}: expected something to call"
            for name in called
            if (value := getattr(self, name)) is not None and not callable(value)
        ]
        wrong += [f"{name}{why}" for name in ("data", "eval_data") if (why := _wrong_data(getattr(self, name)))]
        wrong += [
            f"metrics[{name!r}]: expected something to call"
            for name, value in self.metrics.items()
            if not callable(value)
        ]
        if "loss" in self.metrics:
            wrong.append("metrics['loss']: eval_loss is the held-out loss; name it otherwise")
        wrong += [
            f"callbacks: {_shown(each)} is no sw.Callback" for each in self.callbacks if not isinstance(each, Callback)
        ]
        if self.eval_data is not None and self.data is None:
            wrong.append("eval_data without data: samples of both are collated alike; give both")
        if self.collate is not None and is_loader(self.data) and (self.eval_data is None or is_loader(self.eval_data)):
            wrong.append("collate: the loaders of data make batches themselves; give it to them")
        if wrong:
            raise ConfigError("sw.TrainSpec:" + "".join(f"\n  - {each}" for each in wrong))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is replaced."""
        given = [each for name in _PARTS if (each := getattr(self, name)) is not None]
        return not (given or self.metrics or self.callbacks)


#: Fields that are ``None`` where they are not given.
_PARTS = ("model", "data", "eval_data", "collate", "forward", "loss", "optimizer", "schedule")


def _wrong_data(data: Any) -> str:
    """The fault of samples; empty if there is none."""
    if data is None or is_indexed(data) or is_loader(data):
        return ""
    if any(kind.__name__ == "DataLoader" for kind in type(data).__mro__):
        return (
            "=DataLoader: it gives batches; give its data set, and its collate_fn as collate, or a function that makes"
            " the loader of a reader: data(reader, readers)"
        )
    if not hasattr(data, "__iter__"):
        return f"={_shown(data)}: expected a data set or an iterable"
    if iter(data) is data:
        return f"={_shown(data)}: it can be read once, and is read from its beginning several times; give what makes it"
    return ""


def _shown(value: Any) -> str:
    return printable(repr(value))[:60]


def load_spec(name: str) -> TrainSpec:
    """The spec of a file (``mine.py``, ``mine.py:other``) or of a module (``package.module:name``).

    It is what is called ``spec`` there, or as the name says: a ``TrainSpec``, or a function that returns one. The
    folder of a file is where its own imports are looked for, too. Errors of the code itself are passed on.
    """
    if name == FROM_PYTHON:
        raise ConfigError(
            "the run's spec was given to sw.train, and is in no file.\n"
            "  Go on with it there: sw.train(config, spec, run_dir=..., resume=True)."
        )
    where, _, attribute = name.partition(":")
    if not where.strip(". "):
        raise ConfigError(f"--spec {printable(name)}: expected a file (mine.py) or a module (package.module:NAME).")
    module = _of_file(Path(where).expanduser()) if where.endswith(".py") else _of_module(where)
    attribute = attribute or USUAL_NAME
    found = getattr(module, attribute, None)
    if found is None and not hasattr(module, attribute):
        hint = did_you_mean(attribute, [key for key in vars(module) if not key.startswith("_")])
        raise ConfigError(
            f"--spec {printable(name)}: there is no {printable(attribute)!r} in it.{hint}\n"
            "  Assign one: spec = sw.TrainSpec(...), or name it: --spec mine.py:NAME."
        )
    if not isinstance(found, TrainSpec) and callable(found) and not isinstance(found, type):
        found = found()
    if not isinstance(found, TrainSpec):
        raise ConfigError(
            f"--spec {printable(name)}: {printable(attribute)} is a {type(found).__name__}, expected an sw.TrainSpec or"
            " a function that returns one."
        )
    return replace(found, code=_hash_of(module))


def _of_file(path: Path) -> ModuleType:
    if not path.is_file():
        where = "" if path.is_absolute() else f" in {printable(Path.cwd())}"
        raise ConfigError(
            f"--spec {printable(path)}: there is no such file{where}.\n  Name one, or a module: package.module."
        )
    path = path.resolve()
    key = f"shardwise_spec_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if key in sys.modules:
        return sys.modules[key]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: nothing there may stand in for a library
    made = importlib.util.spec_from_file_location(key, path)
    assert made is not None
    assert made.loader is not None
    module = importlib.util.module_from_spec(made)
    sys.modules[key] = module  # what is pickled, such as samples from workers, finds its class
    try:
        made.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
    return module


def _of_module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # of the code itself
        raise ConfigError(
            f"--spec {printable(name)}: there is no module {printable(error.name)!r}.\n"
            "  Name a file (mine.py), or a module that Python finds from here."
        ) from None


def _hash_of(module: ModuleType) -> str:
    file = inspect.getsourcefile(module)
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def given_spec() -> TrainSpec | None:
    """The spec that ``sw.train`` has left for this process, if it has started it."""
    file = os.environ.get(FILE_VARIABLE)
    return unpacked(Path(file).read_bytes()) if file else None


def with_code(spec: TrainSpec) -> TrainSpec:
    """A spec of a script or a notebook with the hash of the source of its functions and classes."""
    parts = [getattr(spec, name) for name in _PARTS if not name.endswith("data")]
    parts += [*spec.metrics.values(), *(type(each) for each in spec.callbacks)]
    digest = hashlib.sha256()
    for part in parts:
        try:
            digest.update(inspect.getsource(part).encode())
        except (OSError, TypeError):  # of a built-in, or an object that can be called
            digest.update(getattr(part, "__qualname__", type(part).__qualname__).encode())
    return replace(spec, code=digest.hexdigest())
