"""Tests of ranks, parity and contracts know the public API alone, but for the parts that a test is about.

They are the proof that a change inside the engine changed nothing, and so must not change with it. What they need to
see of its inside is asked of ``shardwise.testing``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]

#: What any test may import: the package itself, its models, its command, plain data and arithmetic, tools for tests.
PUBLIC = ("shardwise.models", "shardwise.spec", "shardwise.testing")

#: Test files, and the internal modules that they are about (below ``shardwise``; a package stands for all in it).
ABOUT = {
    # launching, rendezvous, transports, stalls
    "ranks/elastic_body.py": "launch",
    "ranks/pipeline_body.py": "launch.exit_codes launch.world pipeline.interpret",
    "ranks/stuck_body.py": "comm launch",
    "ranks/test_communicators.py": "comm",
    "ranks/test_disagreement.py": "comm.stall",
    "ranks/test_dropped_models.py": "comm.gloo",
    "ranks/test_elastic.py": "launch.elastic",
    "ranks/test_gloo.py": "comm",
    "ranks/test_join.py": "launch.world",
    "ranks/test_pipeline_failures.py": "launch.elastic",
    "ranks/test_staged.py": "comm",
    "ranks/test_stuck_devices.py": "launch.elastic comm.stall",
    "ranks/test_transports.py": "comm tensor.linear",
    # checkpoints, the trainer
    "parity/test_precision_overrides.py": "checkpoint",
    "ranks/test_checkpoint.py": "checkpoint comm.axes",
    "ranks/test_frozen_files.py": "checkpoint",
    "ranks/test_pretrained.py": "checkpoint train",
    "ranks/test_train_command.py": "train.folder",
    "ranks/test_train_fp16.py": "checkpoint",
    "ranks/test_train_tokenizer.py": "train.checkpoints train.tokenizer",
    "ranks/test_train_unread.py": "train.loop train.unread",
    # one part of the engine, or a count of what it does
    "contract/test_device_calls.py": "optim.clip",
    "contract/test_host_cost.py": "comm.gloo engine.engine engine.unit",
    "parity/test_fp16.py": "optim.partial optim.scaler",
    "parity/test_precision.py": "features.precision",
    "ranks/test_flat.py": "optim.flat_parameters",
    "ranks/test_in_backward.py": "engine.unit optim.flat_parameters optim.checks engine.engine",
    "ranks/test_profile.py": "engine.hooks",
    # models cut by hand, and the cuts
    "parity/test_tensor.py": "comm.record tensor",
    "ranks/test_logical_state.py": "checkpoint comm.axes api.shard features.ignored",
    "ranks/test_tensor_mistakes.py": "comm.axes tensor.loss",
    # activations of a plain model, attention on meta, choices of tokens, microbatches
    "contract/test_dry_run.py": "measure.meta",
    "contract/test_memory.py": "measure.storage",
    "contract/test_tensor_memory.py": "features.recompute features.wrap measure.meta measure.storage",
    "parity/test_generate.py": "generation.sample",
    "ranks/test_pipeline_steps.py": "pipeline.batch pipeline.pipelined",
    # faults that are injected, and steps that are watched from within
    "contract/test_product_memory.py": "pipeline.interpret",
    "parity/test_context.py": "context",
    "parity/test_experts.py": "expert",
    "parity/test_hybrid.py": "comm forms.inner",
    "parity/test_offload.py": "comm.base forms.host",
    "parity/test_parity.py": "comm engine.group",
    "ranks/test_deferred_weights.py": "pipeline.interpret",
    "ranks/test_expert_parallel.py": "expert.route engine.build",
    "ranks/test_hybrid.py": "checkpoint comm",
    "ranks/test_offload.py": "comm.base engine.engine engine.unit forms.host",
    "ranks/test_pipeline_overlap.py": "comm.debug engine.engine features.pipeline_step pipeline.interpret",
    "ranks/test_pitfalls.py": "engine.engine",
    "ranks/test_slots.py": "engine.build engine.engine",
}


def modules_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of every module of shardwise that a file imports, or names in a string (as for a mock)."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = re.findall(r"^(?:from|import) (shardwise[\w.]*)", node.value, re.MULTILINE)
            names += [node.value] if re.fullmatch(r"shardwise(\.\w+)+", node.value) else []
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "shardwise")


def is_public(name: str) -> bool:
    return name in {"shardwise", "shardwise.cli", "shardwise.cli.main"} or any(
        f"{name}.".startswith(f"{each}.") for each in PUBLIC
    )


def test_tests_look_inside_through_shardwise_testing() -> None:
    wrong, used = [], set()
    for path in sorted(path for folder in ("ranks", "parity", "contract") for path in (TESTS / folder).rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        for line, module in modules_of(path):
            if is_public(module):
                continue
            about = [each for each in ABOUT.get(name, "").split() if f"{module}.".startswith(f"shardwise.{each}.")]
            used |= {(name, each) for each in about}
            wrong += [] if about else [f"tests/{name}:{line} imports {module}"]
    assert not wrong, (
        "tests of ranks, parity and contracts must outlive changes of what is inside:\n  "
        + "\n  ".join(wrong)
        + "\n  Ask shardwise.testing (probe, checks, part_of, ...) instead. Only a test that is about one internal part"
        " imports it, with a line in ABOUT."
    )
    stale = [f"{name}: {each}" for name, about in ABOUT.items() for each in about.split() if (name, each) not in used]
    assert not stale, f"ABOUT has lines that no test needs any more: {stale}"
