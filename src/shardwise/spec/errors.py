"""The exceptions that shardwise raises.

::

    ShardwiseError
    ├── ConfigError          (ValueError)    a configuration file, key or value
    ├── PlanError            (ValueError)    a plan that cannot be carried out
    │   └── MemoryBudgetError                a plan that does not fit
    ├── MeshError            (ValueError)    axes and world size do not match
    ├── PlacementError       (ValueError)    an unknown strategy or an illegal move between placements
    ├── StateError           (RuntimeError)  a model, unit or optimizer in a state where the call makes no sense
    ├── NonFiniteError       (ArithmeticError)  a loss, gradient, parameter or optimizer state: NaN or infinite
    ├── CommError            (RuntimeError)  communication between ranks
    │   ├── RankDisagreement                 ranks issued different collectives
    │   └── CommTimeout      (TimeoutError)  a peer did not answer in time
    ├── CheckpointError      (RuntimeError)  a checkpoint that is missing, damaged or does not fit
    └── StorageError         (OSError)       a disk or folder that cannot be written: full, read-only, gone

A message names the subject, what was expected, what was found, where, and on a second, indented line what to do next.
"""

from __future__ import annotations

from typing import NoReturn


class ShardwiseError(Exception):
    """Base of every exception that shardwise raises on purpose.

    Attributes:
        exit_code: Exit code of a command-line run that ends with this error (listed in ``docs/troubleshooting.md``).
    """

    exit_code = 1


class ConfigError(ShardwiseError, ValueError):
    """A configuration file, key or value is wrong."""

    exit_code = 78


class PlanError(ShardwiseError, ValueError):
    """A plan cannot be carried out for this model or on this world."""

    exit_code = 78


class MemoryBudgetError(PlanError):
    """A plan needs more memory than the device has."""


class MeshError(ShardwiseError, ValueError):
    """Mesh axes and world size do not match."""

    exit_code = 78


class PlacementError(ShardwiseError, ValueError):
    """An unknown strategy, or a move between placements that the table does not allow."""

    exit_code = 78


class StateError(ShardwiseError, RuntimeError):
    """A call that a model, unit or optimizer does not allow in its present state."""

    exit_code = 78


class CommError(ShardwiseError, RuntimeError):
    """Communication between ranks failed, for example because a peer is gone."""

    exit_code = 81


class RankDisagreement(CommError):  # noqa: N818 - the public name
    """Ranks issued different collectives at the same place of the sequence."""

    exit_code = 83


class CommTimeout(CommError, TimeoutError):  # noqa: N818 - the public name
    """A peer did not take part in a collective within the time limit."""

    exit_code = 82


class NonFiniteError(ShardwiseError, ArithmeticError):
    """A loss, a gradient, a parameter or optimizer state is NaN or infinite."""

    exit_code = 80


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint (or data file) is missing, damaged, or does not fit the model."""

    exit_code = 65


class StorageError(ShardwiseError, OSError):
    """A disk or folder cannot be used: no space, no permission, gone."""

    exit_code = 74


class Uncopyable:
    """Refuses deepcopy and pickling of modules that refer to its object, because they have one rank's shards only."""

    __slots__ = ()

    def __deepcopy__(self, _memo: object) -> NoReturn:
        raise _error("copied")

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise _error("pickled")


def _error(what: str) -> StateError:
    return StateError(
        f"a parallelized module cannot be {what}: it holds only this rank's shards.\n"
        "  Use sw.full_state_dict(model) for the weights (or sw.save for a checkpoint) and build the module anew. An"
        " average of the weights (AveragedModel, ModelEma) is sw.ExponentialMovingAverage(model); its docstring has the"
        " decay for a plain mean, AveragedModel's default."
    )
