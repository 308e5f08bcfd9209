"""Which options combine, for docs/support.md and bench/results/support.md (``python -m bench.support_table``).

Every pair is tried in a dry run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import shardwise as sw
from shardwise.models import gpt
from shardwise.planner.legal import SUPPORT
from shardwise.spec.errors import ShardwiseError

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
REFUSED = Path(__file__).parent / "results" / "support.md"
STRATEGIES = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3", "hsdp")
WORLD = 8


class Option(NamedTuple):
    """What is written for it, the plan's fields, and what is done to the optimizer."""

    written: str
    fields: Mapping[str, Any]
    optimizer: Callable[[nn.Module, list[nn.Parameter]], torch.optim.Optimizer] | None = None


def in_backward(model: nn.Module, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    adamw = torch.optim.AdamW(parameters)
    sw.optimizer_in_backward(model, adamw)
    return adamw


OPTIONS = (
    Option("tp", {"tp": 2}),
    Option("tp, sequence_parallel", {"tp": 2, "sequence_parallel": True}),
    Option("pp", {"pp": 2}),
    Option("cp", {"cp": 2}),
    Option("ep", {"ep": 2}),
    Option("dp_replicate", {"dp_replicate": 2}),
    Option('mp_policy="bf16"', {"mp_policy": "bf16"}),
    Option('mp_policy="fp16"', {"mp_policy": "fp16"}),
    Option('activation_checkpointing="full"', {"activation_checkpointing": "full"}),
    Option('activation_checkpointing="selective"', {"activation_checkpointing": "selective"}),
    Option("offload_activations", {"offload_activations": True}),
    Option('offload_policy="cpu"', {"offload_policy": "cpu"}),
    Option('quantize_frozen="int8"', {"quantize_frozen": "int8"}),
    Option('quantized_gather="int8"', {"quantized_gather": "int8"}),
    Option('quantized_reduce="int8"', {"quantized_reduce": "int8"}),
    Option('granularity="tensor"', {"granularity": "tensor"}),
    Option("row_sharded", {"row_sharded": ["token_embedding"]}),
    Option("reshard_after_forward=2", {"reshard_after_forward": 2}),
    Option('accumulation="defer_replicate"', {"accumulation": "defer_replicate", "dp_replicate": 2}),
    Option("compile", {"compile": True}),
    Option("sw.optimizer_in_backward", {}, in_backward),
    Option("sw.flat_parameters", {}, lambda model, _: torch.optim.AdamW(sw.flat_parameters(model))),
    Option("sw.Muon", {}, lambda model, _: sw.Muon(sw.muon_groups(model, lr=0.02, adamw_lr=3e-4))),
)


def refusal(strategy: str, *options: Option) -> str | None:
    """The first line of the error, or ``None`` where steps run."""
    fields = {name: value for option in options for name, value in option.fields.items()}
    made = [option.optimizer for option in options if option.optimizer is not None]
    built: list[nn.Module] = []

    def build() -> nn.Module:
        num_experts = 4 if "ep" in fields else 0
        model = gpt("gpt-nano", num_layers=4, hidden=64, vocab_size=256, tied=False, num_experts=num_experts)
        if "quantize_frozen" in fields:
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.weight.requires_grad = False
        built.append(model)
        return model

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        given = list(parameters)
        return made[-1](built[-1], given) if made else torch.optim.AdamW(given)

    tokens_BT = torch.empty(2, 16, dtype=torch.int64, device="meta")
    try:
        plan = sw.ParallelPlan(strategy=strategy, **fields)
        sw.dry_run(
            build,
            plan,
            world_size=WORLD,
            batch=(tokens_BT, tokens_BT),
            optimizer=optimizer,
            backend="nccl",
            ranks_per_machine=4,
        )
    except ShardwiseError as error:
        return str(error).partition("\n")[0]
    return None


def pairs() -> Iterator[tuple[Option, Option]]:
    """Pairs of options that are not two values of one field, nor two optimizers."""
    for one, other in itertools.combinations(OPTIONS, 2):
        if not (one.fields.keys() & other.fields.keys()) and not (one.optimizer and other.optimizer):
            yield one, other


def by_strategy() -> dict[tuple[str, str], str]:
    """Refused: strategy and option."""
    tried = itertools.product(STRATEGIES, OPTIONS)
    return {(strategy, one.written): why for strategy, one in tried if (why := refusal(strategy, one)) is not None}


def by_pair() -> dict[tuple[str, str], str]:
    """Refused under ``zero3``: two options of which each alone is not."""
    return {(one.written, other.written): why for one, other in pairs() if (why := refusal("zero3", one, other))}


def accepted(refused: Collection[tuple[str, str]]) -> str:
    """Each option under each strategy, without those that are ``refused``."""
    lines = [f"| option | {' | '.join(f'`{name}`' for name in STRATEGIES)} |", "|---" * (1 + len(STRATEGIES)) + "|"]
    for option in OPTIONS:
        cells = ["no" if (name, option.written) in refused else "yes" for name in STRATEGIES]
        lines.append(f"| `{option.written}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def messages(refused: Mapping[tuple[str, str], str], together: Mapping[tuple[str, str], str]) -> str:
    """What is refused under a strategy, and with another option, with the error's first line."""
    lines = ["| option | with | message |", "|---|---|---|"]
    lines += [f"| `{one}` | `{name}` | {why} |" for (name, one), why in refused.items()]
    lines += [f"| `{one}` | `{other}` | {why} |" for (one, other), why in together.items()]
    return "\n".join(lines) + "\n"


def families() -> str:
    """Which degrees each family of models takes."""
    lines = ["| family | `tp` | `sequence_parallel` | `cp` | `pp` | `ep` |", "|---|---|---|---|---|---|"]
    for name, support in SUPPORT.items():
        cells = ["yes" if value else "" for value in dataclasses.astuple(support)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    refused = by_strategy()
    made = (
        (PAGE, "families", families()),
        (PAGE, "support_table", accepted(refused)),
        (REFUSED, "refused", messages(refused, by_pair())),
    )
    for page, name, table in made:
        before, start, rest = page.read_text("utf-8").partition(
            f"<!-- {name}: made by python -m bench.support_table -->\n"
        )
        after = rest.partition(f"<!-- end of {name} -->")[2]
        page.write_text(f"{before}{start}\n{table}\n<!-- end of {name} -->{after}", "utf-8")


if __name__ == "__main__":
    main()
