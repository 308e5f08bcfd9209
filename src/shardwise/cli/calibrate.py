"""``calibrate``: measure this machine for the planner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.output import check_writable, show, write
from shardwise.launch.exit_codes import show_error
from shardwise.spec.errors import ConfigError
from shardwise.spec.text import aligned, printable, size

if TYPE_CHECKING:
    from shardwise.launch.world import World


def calibrate(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="File to write; its name ends in .json.")] = Path("hardware.json"),
    nproc: Annotated[int | None, typer.Option(help="Processes; by default one per GPU, or 2 on CPU.")] = None,
    dtypes: Annotated[
        str | None,
        typer.Option(metavar="a,b", help="Dtypes to measure: fp32, bf16, fp16; by default fp32, on GPUs bf16 too."),
    ] = None,
) -> None:
    """Measure this machine in about a minute: products, attention, element-wise work, the optimizer, and links.

    The written file takes the place of a GPU's name: shardwise plan --gpu FILE, or Cluster(gpu=FILE). Links are
    measured between the ranks of this command: by default one for each GPU, or 2 on a CPU. Start it with torchrun to
    measure several machines, and run nothing else meanwhile.

    Examples:

      shardwise calibrate --out machine.json

      shardwise plan gpt2-xl --gpu machine.json --gpus 2 --seq 256 --global-batch 4 --precision fp32

      torchrun --nnodes 2 --nproc-per-node 8 ... -m shardwise calibrate --out cluster.json
    """
    from shardwise.launch.elastic import launch, num_workers
    from shardwise.launch.exit_codes import run_worker
    from shardwise.launch.world import read_world

    names = None if dtypes is None else [name.strip() for name in dtypes.split(",")]
    unknown = sorted({*(names or ())} - {"fp32", "bf16", "fp16"})
    if unknown:
        raise ConfigError(f"--dtypes: {', '.join(unknown)}; expected some of fp32, bf16, fp16.")
    if out.suffix != ".json":
        raise ConfigError(f"--out {printable(out)}: expected a name that ends in .json, by which plan recognizes it.")
    world = read_world()
    if world.source == "alone":
        check_writable(out)
        raise typer.Exit(launch("shardwise", context.obj, num_workers(nproc)))
    raise typer.Exit(run_worker(lambda: _measure(world, out, names), world, show_error))


def _measure(world: World, out: Path, dtypes: list[str] | None) -> int:
    from shardwise.launch.world import joined_world
    from shardwise.measure.calibrate import calibrate as measure

    with joined_world(world) as device:
        found = measure(device, dtypes=dtypes)
    if world.rank == 0:
        write(out, json.dumps(found, indent=1) + "\n")
        show(_format_table(found, out))
    return 0


def _format_table(found: dict[str, Any], out: Path) -> str:
    rows = [("machine", found["name"])]
    rows += [(f"best product, {dtype}", f"{peak / 1e12:.3f} TFLOP/s") for dtype, peak in found["peaks"].items()]
    rows.append(("memory", f"{size(found['memory_bytes'])} a rank, {size(found['memory_bandwidth'])}/s copied"))
    measured = found["measured"]
    if measured["links"]:
        rows.append(("link", f"{size(found['link_bandwidth'])}/s sent by a rank in an all-gather"))
        first = min(row["seconds"] for row in measured["links"]["all_reduce"])
        rows.append(("latency", f"{first * 1e6:.0f} us for a small all-reduce"))
        rows.append(("shared core", f"{measured['shared']:.0%} of computation and communication that overlap"))
    update = min(measured["optimizers"]["adamw"], key=lambda row: abs(row["numel"] - 1e6))
    rows.append(("adamw", f"{update['numel'] / update['seconds'] / 1e6:.0f} million parameters/s"))
    rows.append(("launch", f"{measured['launch_s'] * 1e6:.1f} us for a small operation"))
    rows.append(("next", f"shardwise plan MODEL --gpu {printable(out)}"))
    return "\n".join(aligned(rows, words=range(2)))
