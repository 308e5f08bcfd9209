"""What a comparison is asked for: cases, variants of our engine, entrants. Nothing here imports torch.

Every mistake is found here, before a process starts. A variant is a strategy with what else is to differ:
``zero3+flat``, ``zero3+reshard_after_forward=false``. Values are YAML (``zero3+mp_policy={param_dtype: bf16}``); marks
inside of brackets and quotes belong to the value.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import yaml

from shardwise.spec.errors import ConfigError
from shardwise.spec.plan import ParallelPlan, plan_fields
from shardwise.spec.text import did_you_mean, printable
from shardwise.spec.tolerances import check_exact

#: Steps of every engine before the first turn: orders are recorded, buckets rebuilt, optimizer state made.
WARM_UP_STEPS = 3
#: Of tokens and of the initial weights.
SEED = 0


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its batches, and how its steps are timed.

    Attributes:
        name: Name, for people.
        model: Fields of ``GPTConfig``; empty where a configuration says it all.
        seq_len: Tokens per sample.
        batch: Samples per rank and step.
        steps: Steps that an engine makes in one turn.
        statistic: What stands for a turn: ``median`` of its steps, or ``min`` where a step is so short that whatever
            else the machine does would be measured with it.
        config: Path of a run configuration that gives model and data.
    """

    name: str
    seq_len: int
    batch: int
    steps: int
    statistic: str = "median"
    model: Mapping[str, Any] = field(default_factory=dict)
    config: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"model": dict(self.model)}

    def __str__(self) -> str:
        """One line: shape, batch and steps."""
        shape = (
            ", ".join(f"{key} {value}" for key, value in self.model.items())
            or f"configuration {Path(self.config or '').name}"
        )
        return f"{self.name}: {shape}; sequence {self.seq_len}, {self.batch} per rank and step"


def _gpt(layers: int, hidden: int, heads: int, vocab: int, seq_len: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden": hidden,
        "num_heads": heads,
        "vocab_size": vocab,
        "seq_len": seq_len,
        "tied": False,
    }


#: ``host``: the cost of hooks and launches. ``compute``: arithmetic, which all share. ``wide``: communication.
CASES = {
    case.name: case
    for case in (
        Case("host", seq_len=16, batch=1, steps=20, statistic="min", model=_gpt(48, 64, 8, 256, 16)),
        Case("compute", seq_len=256, batch=2, steps=3, model=_gpt(8, 512, 8, 8192, 256)),
        Case("wide", seq_len=64, batch=1, steps=4, model=_gpt(4, 1024, 16, 2048, 64)),
    )
}


_FLAT = "flat"


@dataclass(frozen=True)
class Variant:
    """One way to run our engine.

    Attributes:
        strategy: Preset name or alias.
        is_flat: The optimizer gets ``sw.flat_parameters(model)`` instead of the parameters by name.
        fields: Other fields of the plan.
    """

    strategy: str
    is_flat: bool = False
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def is_threaded(self) -> bool:
        """Whether this is ``data_parallel``, which is one process."""
        return self.applied_to(ParallelPlan()).placements.is_threaded

    def applied_to(self, plan: ParallelPlan) -> ParallelPlan:
        """``plan`` with this strategy and these fields."""
        return dataclasses.replace(plan, strategy=self.strategy, **self.fields)


def split(text: str, mark: str) -> list[str]:
    """Cut ``text`` at every ``mark`` that is in no brackets and in no quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "{[") - (character in "}]")
        if character == mark and depth <= 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def canonical(text: str) -> str:
    """The same variant with the strategy's name in small letters."""
    strategy, *parts = split(text.strip(), "+")
    return "+".join([strategy.strip().lower(), *parts])


def parse(text: str) -> Variant:
    """The variant that ``NAME[+flat][+FIELD=VALUE]...`` describes; values are written as in a configuration file.

    Raises:
        ConfigError: A part is neither ``flat`` nor a field of the plan, or a value is no YAML.
        PlanError, PlacementError: A value that the plan refuses.
    """
    strategy, *parts = split(text, "+")
    is_flat, fields = False, {}
    for part in parts:
        name, is_field, value = part.partition("=")
        if part == _FLAT:
            is_flat = True
        elif is_field and name in plan_fields() and name != "strategy":
            fields[name] = _value(text, part, value)
        else:
            raise ConfigError(
                f"--strategies {printable(text)}: {printable(repr(part))} is neither 'flat' nor FIELD=VALUE.\n"
                f"  Fields are: {', '.join(plan_fields()[1:])}."
            )
    variant = Variant(strategy, is_flat, fields)
    variant.applied_to(ParallelPlan())
    return variant


def _value(text: str, part: str, value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        reason = printable(str(getattr(error, "problem", None) or error).splitlines()[0])
        raise ConfigError(
            f"--strategies {printable(text)}: the value in {printable(repr(part))} is no YAML: {reason}.\n"
            "  Write it as in a configuration file, for example zero3+mp_policy={param_dtype: bf16}, and in quotes for"
            " the shell."
        ) from None


OURS = "shardwise"
SINGLE = "single"

#: Engines to compare with, and the strategy that each follows.
PEERS = {
    SINGLE: "none",
    "torch-ddp": "ddp",
    "torch-fsdp1": "full_shard",
    "torch-fsdp2": "full_shard",
    "torch-fsdp2-noreshard": "shard_grad_op",
    "torch-zero1": "zero1",
    "deepspeed-1": "zero1",
    "deepspeed-2": "zero2",
    "deepspeed-3": "zero3",
}
#: Names for several engines at once.
_PEER_GROUPS = {"deepspeed": ("deepspeed-1", "deepspeed-2", "deepspeed-3")}
DEFAULT_PEERS = (SINGLE, "torch-ddp", "torch-fsdp1", "torch-fsdp2")
DEFAULT_STRATEGIES = ("zero3",)
DEFAULT_ROUNDS = 5
#: Fields of the plan by which our engine does other work than a peer, though it computes the same.
_OURS_ALONE = (
    "offload_policy",
    "activation_checkpointing",
    "offload_activations",
    "ignored",
    "row_sharded",
    "compile",
    "tp",
    "pp",
    "cp",
    "ep",
    "expert_capacity",
)
#: Steps of the configuration's model per engine and turn.
_CONFIG_STEPS = 5


@dataclass(frozen=True, slots=True)
class Entrant:
    """One engine under one strategy; of ours with what else differs (``bench.compare.request``)."""

    engine: str
    strategy: str

    @property
    def name(self) -> str:
        """What tables call it; a peer's engine says its strategy."""
        return f"{OURS} {self.strategy}" if self.engine == OURS else self.engine

    @property
    def is_threaded(self) -> bool:
        """Whether one process runs a replica for each rank that the others have."""
        return self.engine == OURS and parse(self.strategy).is_threaded


@dataclass(frozen=True, slots=True)
class Request:
    """One case, its entrants, and how often they take turns.

    Attributes:
        case: What is trained.
        entrants: Our strategies first (``data_parallel`` behind the others), then the peers.
        num_ranks: Ranks of every engine but ``single``; replicas of ``data_parallel``.
        rounds: Turns of every engine.
    """

    case: Case
    entrants: tuple[Entrant, ...]
    num_ranks: int
    rounds: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"case": self.case.as_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """What :meth:`as_dict` was made from."""
        entrants = tuple(Entrant(**entrant) for entrant in values["entrants"])
        return cls(Case(**values["case"]), entrants, values["num_ranks"], values["rounds"])

    def size_of(self, entrant: Entrant) -> int:
        """Ranks of an entrant."""
        return 1 if entrant.engine == SINGLE or entrant.is_threaded else self.num_ranks


def turns(num_entrants: int, round_index: int) -> list[int]:
    """In which order the entrants take turns: a later start each round, and every other round backwards.

    So no engine always follows the same one, and a machine that gets slower or faster does so for all.
    """
    start = round_index // 2 % max(num_entrants, 1)
    order = [(start + place) % num_entrants for place in range(num_entrants)]
    return order[::-1] if round_index % 2 else order


def make_requests(
    *,
    cases: Sequence[str] = (),
    config: Path | None = None,
    strategies: Sequence[str] = (),
    peers: Sequence[str] | None = None,
    num_ranks: int,
    rounds: int = DEFAULT_ROUNDS,
    steps: int | None = None,
) -> list[Request]:
    """One request for each case (all of them where neither ``cases`` nor ``config`` is given).

    Raises:
        ConfigError: A name is unknown or a number makes no sense; or the configuration gives our engine other work
            than the peers.
        PlacementError, PlanError, MeshError: A strategy is unknown, or not in this version, or does not fit the ranks.
    """
    if cases and config is not None:
        raise ConfigError("--case and CONFIG exclude each other: each gives model and data.\n  Leave one of them out.")
    for name, value in (("--rounds", rounds), ("--steps", steps)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value}: expected at least 1.\n  Set {name} 1 or more.")
    _check_names("--case", cases, CASES)
    peers = DEFAULT_PEERS if peers is None else [name for peer in peers for name in _PEER_GROUPS.get(peer, (peer,))]
    _check_names("--peers", peers, PEERS)
    _check_installed(peers)
    variants = {name: parse(name) for name in [canonical(text) for text in strategies] or DEFAULT_STRATEGIES}
    plan, chosen = ParallelPlan(), [CASES[name] for name in cases or CASES]
    if config is not None:
        plan, case = _from_config(config, num_ranks)
        chosen = [case]
        _check_fair(config, plan, peers)
    for variant in variants.values():
        size = 1 if variant.is_threaded else num_ranks
        variant.applied_to(plan).mesh(size, size)  # all on this machine
    entrants = sorted((Entrant(OURS, name) for name in variants), key=lambda entrant: entrant.is_threaded)
    entrants += [Entrant(peer, PEERS[peer]) for peer in dict.fromkeys(peers)]
    return [Request(_with_steps(case, steps), tuple(entrants), num_ranks, rounds) for case in chosen]


def _with_steps(case: Case, steps: int | None) -> Case:
    return case if steps is None else replace(case, steps=steps)


def _check_fair(path: Path, plan: ParallelPlan, peers: Sequence[str]) -> None:
    """Refuse to time our engine at other work than the peers."""
    if not peers:
        return
    check_exact(plan, printable(path))
    default = ParallelPlan()
    differing = [name for name in _OURS_ALONE if getattr(plan, name) != getattr(default, name)]
    if not differing:
        return
    raise ConfigError(
        f"{printable(path)}: {', '.join(f'parallel.{name}' for name in differing)} would act on our engine alone; the"
        f" peers ({', '.join(peers)}) train the model as it is.\n"
        f"  Take {'it' if len(differing) == 1 else 'them'} out, or name no peers (--peers ''). What is named with a"
        f" strategy is part of its name in the tables: --strategies 'zero3+{differing[0]}=...'."
    )


def _from_config(path: Path, num_ranks: int) -> tuple[ParallelPlan, Case]:
    from shardwise.train.config.resolve import resolve
    from shardwise.train.config.sections import read_config

    resolved = resolve(read_config(path, []), num_ranks, raises_masters=False)
    resolved.source.check(resolved.vocab_size)
    return resolved.plan, Case(
        resolved.config.name,
        seq_len=resolved.seq_len,
        batch=resolved.batch.micro,
        steps=_CONFIG_STEPS,
        config=str(path.resolve()),
    )


def _check_installed(peers: Sequence[str]) -> None:
    missing = [peer for peer in peers if peer.startswith("deepspeed")]
    if missing and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            f"--peers {', '.join(missing)}: the package deepspeed is not installed.\n"
            "  Install shardwise[peers], or leave them out."
        )


def _check_names(option: str, given: Sequence[str], known: Collection[str]) -> None:
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    raise ConfigError(
        f"{option}: {', '.join(printable(repr(name)) for name in unknown)} {'is' if len(unknown) == 1 else 'are'} not"
        f" known.{did_you_mean(unknown[0], known)}\n  Use one of {', '.join(known)}."
    )
