"""The run's state in a checkpoint apart from tensors, checked before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from shardwise.api.saved_optimizer import SavedOptimizer, changed_settings, describe_changes, read_optimizer
from shardwise.checkpoint import plain
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.spec.errors import CheckpointError, ConfigError
from shardwise.spec.text import printable
from shardwise.train.config.sections import Config
from shardwise.train.model.build import peak_lr
from shardwise.train.spec import TrainSpec

_Model = TypeVar("_Model", bound=BaseModel)
_Natural = Annotated[int, Field(ge=0, lt=2**60)]
#: Optimizer settings that the configuration does not determine: the rate, which is compared with the schedule's, and
#: settings that follow from the device.
NOT_OF_THE_RUN = {"lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
#: Fields of a sampler's position: of samples by index, of a stream of texts, and of a user's iterable or loader.
_IN_STREAM = ("epoch", "place", "row", "taken", "num_files")
_IN_ORDER = {"seed", "position", "num_samples"}
_PLACES = (_IN_ORDER, _IN_ORDER | {*_IN_STREAM}, _IN_ORDER | {"own"})


#: Prefixes of field names in errors of parts that are validated alone.
_PARTS = {"SavedScaler": "scaler.", "Config": "config."}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Progressed(BaseModel):
    """The progress of a run."""

    model_config = ConfigDict(extra="forbid", strict=True)

    step: _Natural
    tokens: _Natural
    first_loss: float | None
    final_loss: float | None
    eval_loss_first: float | None
    eval_loss_final: float | None
    best: float | None = None  # the best value of ``checkpoint.best`` so far
    best_step: _Natural = 0
    num_worse: _Natural = 0  # evaluations since the best one

    @classmethod
    def none(cls) -> Self:
        """Return the progress of a run without steps."""
        return cls(step=0, tokens=0, first_loss=None, final_loss=None, eval_loss_first=None, eval_loss_final=None)


class SavedSampler(_Strict):
    """The position in the data: samples consumed, the window of a stream, and the state of a user's data (``own``)."""

    seed: int
    position: _Natural | None = None
    num_samples: _Natural | None = None
    epoch: _Natural | None = None
    place: _Natural | None = None
    row: _Natural | None = None
    taken: _Natural | None = None
    num_files: _Natural | None = None
    own: Any = None


class SavedScaler(_Strict):
    """Loss scaling of fp16, as ``torch.amp.GradScaler`` saves it."""

    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    growth_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    backoff_factor: Annotated[float, Field(gt=0, lt=1)]
    growth_interval: Annotated[int, Field(ge=1, lt=2**60)]
    growth_tracker: _Natural = Field(alias="_growth_tracker")


class SavedRun(_Strict):
    """The state of a run that ``shardwise train`` saved."""

    step: _Natural  # steps made when it was saved
    run_id: str
    progress: Progressed  # counts and losses
    sampler: SavedSampler  # position in the data
    scaler: dict[str, Any] = Field(default_factory=dict)  # loss scaling (``SavedScaler``); empty without fp16
    config: dict[str, Any]  # the configuration, which is compared with the current one
    data: Annotated[str, Field(max_length=1024)]  # hash of the data
    strategy: str = ""  # the strategy's name
    mesh: dict[str, _Natural] = Field(default_factory=dict)  # ranks along each axis
    base: str | None = None  # hash of the weights below the run's adapters
    code: Annotated[str, Field(max_length=1024)] = ""  # hash of the spec's code; empty without a spec


def check_state(
    path: Path,
    batch: int,
    groups: list[dict[str, Any]],
    overridden: Iterable[str] = (),
    *,
    spec: TrainSpec | None = None,
    allows_other_code: bool = False,
    are_restored: bool = False,
) -> None:
    """Check that a checkpoint's state is consistent, and matches the configured optimizer.

    Args:
        path: The checkpoint.
        batch: Samples of a step.
        groups: The optimizer's groups on this rank.
        overridden: Keys given by ``--set``; settings of the optimizer among them may differ.
        spec: The parts that a user's code replaces.
        allows_other_code: Whether the spec's code may have changed.
        are_restored: Whether the load restores the settings of the optimizer's groups.
    """
    checkpoint = open_checkpoint(path)
    state = checkpoint.data.get("state")
    if not isinstance(state, dict) or not isinstance(state.get("progress"), dict):
        raise CheckpointError(
            f"{printable(path)} was not saved by `shardwise train`: it has no step or progress.\n"
            "  Load it with sw.load()."
        )
    saved = _validate(path, SavedRun, state)
    if saved.scaler:
        _validate(path, SavedScaler, saved.scaler)
    config = check_sections(path, saved.config)
    wrong = _contradictions(saved, checkpoint.manifest, batch)
    if wrong:
        raise _refusal(path, wrong)
    if spec is not None and spec.code != saved.code and not allows_other_code:
        raise CheckpointError(
            f"checkpoint {printable(path)} was saved by a run whose spec was other code (its hash has changed).\n"
            "  Go on with the code that the run began with, or allow it: --set checkpoint.allow_other_code=true."
        )
    optimizer = read_optimizer(path, checkpoint.data.get("optimizer"))
    if len(optimizer.groups) == len(groups) and not are_restored:  # otherwise the load checks them
        _check_settings(path, optimizer, groups, {key.removeprefix("optimizer.") for key in overridden})
    if spec is not None and (spec.schedule is not None or spec.optimizer is not None):
        return  # the configuration does not determine its rates
    ratio = config.schedule.ratio(saved.step - 1, config.train.steps)
    rates = [(each.get("lr"), peak_lr(config.optimizer, each) * ratio) for each in optimizer.groups]
    odd = [(found, lr) for found, lr in rates if not _is_near(found, lr)]
    if odd and saved.step:
        found, lr = odd[0]
        raise _refusal(
            path, [f"optimizer.lr: {found}, expected {lr:g}, as its configuration has for step {saved.step}"]
        )


def check_sections(path: Path, config: Mapping[str, Any]) -> Config:
    """Validate the configuration in a checkpoint, or some sections of it."""
    return _validate(path, Config, config)


def _validate(path: Path, kind: type[_Model], value: Any) -> _Model:
    try:
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        items, of = error.errors(include_url=False)[:5], _PARTS.get(error.title, "")
        raise _refusal(path, [f"{of}{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in items]) from None


def _contradictions(saved: SavedRun, manifest: Manifest, batch: int) -> list[str]:
    wrong = []
    if not saved.step == saved.progress.step == manifest.step:
        steps = f"state {saved.step}, progress {saved.progress.step}, manifest {manifest.step}"
        wrong.append(f"step: {steps}; expected three times the same")
    if saved.run_id != manifest.run_id:
        wrong.append(f"run_id: state {saved.run_id}, manifest {manifest.run_id}; expected twice the same")
    sampler = saved.sampler.model_dump(exclude_none=True)
    if set(sampler) not in _PLACES:
        wrong.append(f"sampler: it gives {_names(sampler)}, expected {' or '.join(map(_names, _PLACES))}")
    position = saved.sampler.position
    if position is not None and position != saved.step * batch:
        wrong.append(f"sampler.position: {position}, expected {saved.step * batch} = step {saved.step} x batch {batch}")
    return wrong


def _check_settings(path: Path, optimizer: SavedOptimizer, groups: list[dict[str, Any]], overridden: set[str]) -> None:
    changed = changed_settings(path, optimizer.groups, groups)
    changed = [each for each in changed if each[0].rpartition(".")[2] not in NOT_OF_THE_RUN | overridden]
    if changed:
        raise CheckpointError(
            f"checkpoint {printable(path)} was saved with other settings of the optimizer than the configuration"
            f" has:\n{describe_changes(changed)}\n"
            "  It was changed by hand, or its configuration was. Resume from another checkpoint."
        )


def _names(keys: Iterable[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"


def _is_near(value: Any, expected: float) -> bool:
    """Return whether a rate is the expected one; some optimizers store rates in fp32."""
    return isinstance(value, int | float) and math.isclose(value, expected, rel_tol=1e-6)


def _refusal(path: Path, lines: list[str]) -> CheckpointError:
    listed = "".join(f"\n  - {printable(line)}" for line in lines)
    return CheckpointError(
        f"checkpoint {printable(path)}: what it says of its run cannot be right:{listed}\n"
        "  Another version of shardwise wrote it, or it was changed by hand or damaged. Resume with that version, or"
        " from another checkpoint."
    )


def pack_state(state: Any, what: str) -> Any:
    """Return a state as JSON, which ``plain.unpack`` reads; raise a ConfigError if that is not possible."""
    try:
        return plain.pack(state, "it")
    except ValueError as error:
        raise ConfigError(
            f"{what}: state_dict() cannot be kept: {error}.\n  Wrap it: return plain values from state_dict()."
        ) from None


def of_reader(states: list[Any], reader: int, readers: int, what: str, instead: str) -> Any:
    """Return a reader's state from the list of all readers' states; raise if the number of readers differs.

    ``what`` names the owner of the states in the error, with a place for their number; ``instead`` is an alternative
    for which the number of readers does not matter.
    """
    if len(states) != readers:
        raise CheckpointError(
            f"the place of {what.format(len(states))}, and this run has {readers}.\n"
            f"  Continue on as many, or {instead}, which has one place for any number."
        )
    return states[reader]
