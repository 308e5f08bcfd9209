"""``sw.TrainSpec``: the parts of a training run that a user replaces by code, from Python or from a file.

A spec is code and is executed. Nothing else that a run reads is executed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardwise.launch.function import deserialize
from shardwise.spec.errors import ConfigError
from shardwise.spec.text import did_you_mean, printable
from shardwise.train.callback import Callback
from shardwise.train.data.source import is_indexed, is_loader

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

#: Default name of the spec in a file.
USUAL_NAME = "spec"
#: The configuration's value of ``spec`` if the spec was given to ``sw.train``, and the environment variable with the
#: file in which the processes find that spec.
FROM_PYTHON, FILE_VARIABLE = "given to sw.train", "SHARDWISE_SPEC"


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over all samples of all microbatches and ranks, from the sum and the count of one microbatch.

    Attributes:
        total: The sum, without dimensions.
        count: The number of summed elements: tokens, boxes, samples.
    """

    total: Tensor
    count: Tensor | float

    def __post_init__(self) -> None:
        """Refuse the values of each sample in place of their sum."""
        for each in (self.total, self.count):
            if math.prod(shape := getattr(each, "shape", ())) != 1:
                raise ConfigError(
                    f"sw.Mean: expected a sum and a count, got a tensor of shape {list(shape)}.\n"
                    "  Pass sw.Mean(values.sum(), len(values))."
                )


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """Replaces parts of a run by code, in addition to ``run.yaml``. Every field is optional.

    ::

        spec = sw.TrainSpec(model=Towers, data=Pairs(train), eval_data=Pairs(held_out), loss=contrastive)
        sw.train({"parallel": {"strategy": "zero3"}, "train": {"steps": 1000}}, spec, nproc=2)

    Attributes:
        model: Returns the model, or is its class. It is built deferred, so that every rank creates only what it owns.
        data: Training samples. A data set with ``len`` and items (a ``torch.utils.data.Dataset``, a
            ``datasets.Dataset``, a list): read in the same order on any number of ranks, and resumed exactly. Or an
            iterable: every reader takes its share of each global batch; resumed by its ``state_dict`` or by reading up
            to the position. Or a function ``data(reader, readers)`` that returns an iterable of microbatches, such as a
            ``DataLoader``, for one of the ranks that read different samples; resumed in the same way.
        eval_data: Held-out samples, of any of these kinds. ``None``: no evaluation.
        collate: Makes a microbatch from a list of samples: a tensor, or a tuple or dict of tensors.
            ``torch.utils.data.default_collate`` by default.
        forward: ``forward(model, batch)`` returns the output. By default ``model(**batch)`` for a dict,
            ``model(*batch)`` for a tuple, else ``model(batch)``.
        loss: ``loss(output, batch)`` returns the mean of a microbatch, all of which have the same weight; or an
            ``sw.Mean``, for the mean over all microbatches and ranks weighted by its counts. By default
            ``output.loss``, or the output itself.
        optimizer: ``optimizer(groups, lr)`` returns the optimizer; ``groups`` are parameter groups with weight decay
            (two or more dimensions) and without, ``lr`` is ``optimizer.lr``.
        schedule: ``schedule(step, steps)`` returns the factor of the peak rate at ``step``, from 0.
        metrics: By name, ``metric(output, batch)`` returns an ``sw.Mean``; computed at evaluations, recorded as
            ``eval_NAME``.
        callbacks: Objects whose methods are called during the run (``sw.Callback``).
        code: Hash of the spec's file, without its imports. A run is not resumed with different code, unless
            ``checkpoint.allow_other_code`` is set.
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
        """Check the types of all fields.

        Raises:
            ConfigError: Some fields have a wrong type; the message lists them.
        """
        called = {name: part for name in _CALLED if (part := getattr(self, name)) is not None}
        called |= {name: data for name in ("data", "eval_data") if inspect.isfunction(data := getattr(self, name))}
        wrong = [f"{name}{why}" for name, part in called.items() if (why := _wrong_call(part, name))]
        if any(kind.__name__ == "Module" for kind in type(self.model).__mro__):
            wrong.append(f"model={type(self.model).__name__}: it is built already; give its class, or what makes it")
        wrong += [f"{name}{why}" for name in ("data", "eval_data") if (why := _wrong_data(getattr(self, name)))]
        wrong += [
            f"metrics[{name!r}]{why}" for name, value in self.metrics.items() if (why := _wrong_call(value, "metric"))
        ]
        if "loss" in self.metrics:
            wrong.append("metrics['loss']: eval_loss is the held-out loss; name it otherwise")
        wrong += [f"callbacks: {why}" for each in self.callbacks for why in wrong_callback(each)]
        if self.eval_data is not None and self.data is None:
            wrong.append("eval_data without data: samples of both are collated alike; give both")
        if self.collate is not None and is_loader(self.data) and (self.eval_data is None or is_loader(self.eval_data)):
            wrong.append("collate: the loaders of data make batches themselves; give it to them")
        if wrong:
            raise ConfigError("sw.TrainSpec:" + "".join(f"\n  - {each}" for each in wrong))

    @property
    def is_empty(self) -> bool:
        """Whether the spec replaces nothing."""
        parts = [each for name in _PARTS if (each := getattr(self, name)) is not None]
        return not (parts or self.metrics or self.callbacks)


#: Fields that are ``None`` by default.
_PARTS = ("model", "data", "eval_data", "collate", "forward", "loss", "optimizer", "schedule")


#: Parts that are called, with their arguments.
_CALLED = {
    "model": "",
    "collate": "samples",
    "forward": "model, batch",
    "loss": "output, batch",
    "optimizer": "groups, lr",
    "schedule": "step, steps",
}
_ARGUMENTS = {**_CALLED, "metric": "output, batch", "data": "reader, readers", "eval_data": "reader, readers"}


def accepts(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a function can be called with these arguments, as far as its signature says."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a built-in without signature
        return True
    return True


def _wrong_call(value: Any, name: str) -> str:
    """Return the fault of a part that is called, in words; empty if there is none."""
    if not callable(value):
        return f"={_show(value)}: expected something to call"
    arguments = _ARGUMENTS[name]
    if accepts(value, *arguments.split()):
        return ""
    return f"={_show(value)}: it is called {name}({arguments}), but takes {inspect.signature(value)}"


def wrong_callback(each: Any) -> list[str]:
    """Return the faults of a callback in words, among them methods that are never called."""
    if not isinstance(each, Callback):
        return [f"{_show(each)} is not an sw.Callback"]
    kind, called = type(each).__name__, {name: part for name, part in vars(Callback).items() if name.startswith("on_")}
    wrong = [
        f"{kind}.{name} would never be called; rename it (a run calls {', '.join(called)})"
        for name in dir(each)
        if name.startswith("on_") and name not in called
    ]
    for name, plain in called.items():
        arguments = [*inspect.signature(plain).parameters][1:]
        if not accepts(method := getattr(each, name), *arguments):
            wrong.append(
                f"{kind}.{name} is called with ({', '.join(arguments)}), but takes {inspect.signature(method)}"
            )
    return wrong


def _wrong_data(data: Any) -> str:
    """Return the fault of a data set in words; empty if there is none."""
    if data is None or is_indexed(data) or is_loader(data):
        return ""
    if any(kind.__name__ == "DataLoader" for kind in type(data).__mro__):
        return (
            "=DataLoader: it gives batches; give its data set, and its collate_fn as collate, or a function that makes"
            " the loader of a reader: data(reader, readers)"
        )
    if not hasattr(data, "__iter__"):
        return f"={_show(data)}: expected a data set or an iterable"
    if iter(data) is data:
        return f"={_show(data)}: it can be read once, and is read from its beginning several times; give what makes it"
    return ""


def _show(value: Any) -> str:
    return printable(repr(value))[:60]


def load_spec(name: str) -> TrainSpec:
    """Load the spec of a file (``mine.py``, ``mine.py:other``) or of a module (``package.module:name``).

    The attribute, by default ``spec``, is a ``TrainSpec`` or a function that returns one. Imports of a file are also
    searched in the file's folder. Errors of the code itself are passed on.
    """
    if name == FROM_PYTHON:
        raise ConfigError(
            "the run's spec was given to sw.train, and is in no file.\n"
            "  Go on with it there: sw.train(config, spec, run_dir=..., resume=True)."
        )
    where, _, attribute = name.partition(":")
    if not where.strip(". ") or (where.startswith(".") and not where.endswith(".py")):
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
        sys.path.append(str(path.parent))  # last, so that no library is shadowed
    module_spec = importlib.util.spec_from_file_location(key, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[key] = module  # pickled objects, such as samples from workers, need their class
    try:
        module_spec.loader.exec_module(module)
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
            raise  # an import error inside the user's code
        raise ConfigError(
            f"--spec {printable(name)}: there is no module {printable(error.name)!r}.\n"
            "  Name a file (mine.py), or a module that Python finds from here."
        ) from None


def _hash_of(module: ModuleType) -> str:
    file = inspect.getsourcefile(module)
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def spec_from_environment() -> TrainSpec | None:
    """Return the spec that ``sw.train`` left for this process, if it started this process."""
    file = os.environ.get(FILE_VARIABLE)
    return deserialize(Path(file).read_bytes()) if file else None


def with_code(spec: TrainSpec) -> TrainSpec:
    """Return a spec with the hash of the source of its functions and classes, for scripts and notebooks."""
    parts = [getattr(spec, name) for name in _PARTS if not name.endswith("data")]
    parts += [*spec.metrics.values(), *(type(each) for each in spec.callbacks)]
    digest = hashlib.sha256()
    for part in parts:
        try:
            digest.update(inspect.getsource(part).encode())
        except (OSError, TypeError):  # a built-in or a callable object
            digest.update(getattr(part, "__qualname__", type(part).__qualname__).encode())
    return replace(spec, code=digest.hexdigest())
