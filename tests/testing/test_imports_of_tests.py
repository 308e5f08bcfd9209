"""Tests that start ranks know the public API alone, but for the parts that a test is about.

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
PUBLIC = ("shardwise.integrations", "shardwise.models", "shardwise.spec", "shardwise.testing")

#: Test files, and the internal modules that they are about (below ``shardwise``; a package stands for all in it).
ABOUT = {
    "comm/test_messages.py": "comm",
    "engine/test_log_once.py": "launch.log_once",
    "engine/test_released_units.py": "engine.engine",
    "engine/test_different_paths.py": "engine.order",
    "engine/test_partial_gradients.py": "engine.storage.attachment engine.storage.part",
    "engine/extensions/test_activation_checkpointing.py": "engine.extensions.selective parallel.context.apply",
    "engine/extensions/test_selective.py": "engine.extensions.selective torch_private",
    # launching, rendezvous, transports, stalls
    "conftest.py": "launch.world",
    "train/test_control.py": "comm.axes launch.environment train.control",
    "launch/elastic_body.py": "launch",
    "parallel/pipeline/pipeline_body.py": "launch.exit_codes launch.world parallel.pipeline.runner",
    "launch/stuck_body.py": "comm launch",
    "comm/test_communicators.py": "comm",
    "engine/test_disagreement.py": "comm.stall",
    "engine/test_dropped_models.py": "comm.gloo",
    "launch/test_elastic.py": "launch.elastic",
    "launch/test_flight_recorder.py": "launch",
    "comm/test_gloo.py": "comm",
    "launch/test_join.py": "launch.world",
    "parallel/pipeline/test_pipeline_failures.py": "launch.elastic",
    "comm/test_staged.py": "comm",
    "launch/test_stuck_devices.py": "launch.elastic comm.stall",
    "comm/test_transports.py": "comm parallel.tensor.linear",
    # checkpoints, the trainer
    "engine/extensions/test_chunked_loss.py": "train.predicted.memory",
    "engine/extensions/test_precision_overrides.py": "checkpoint",
    "checkpoint/test_async_save.py": "checkpoint launch.inject",
    "checkpoint/test_checkpoint.py": "checkpoint comm.axes",
    "checkpoint/test_dcp.py": "checkpoint cli.app comm.dtype weights.state.extents",
    "checkpoint/test_frozen_files.py": "checkpoint",
    "checkpoint/test_storage.py": "checkpoint launch.inject cli.files train.config.sections",
    "train/test_train_lora.py": "checkpoint train.config.sections train.model.lora",
    "train/test_train_uploads.py": "checkpoint launch.inject launch.world train",
    "checkpoint/test_pretrained.py": "checkpoint train",
    "train/train_here.py": "launch.file train.predicted.memory",
    "train/test_train_command.py": "launch.inject train.folder",
    "train/test_train_accumulation.py": "checkpoint",
    "train/test_train_tokenizer.py": "train.checkpoints.checkpoints train.data.tokenizer",
    "train/test_peak.py": "engine.storage.attachment train.config train.predicted",
    "docs/test_migrating.py": "cli.convert.tables",
    "spec/test_shown.py": "planner.explain report.read_run",
    "train/test_spec.py": "train.config train.data launch.world train.parity train.checkpoints.random_state train.spec"
    " train.model.build",
    "train/test_spec_data.py": "train.config train.data",
    "train/test_spec_loaders.py": "train.checkpoints.random_state",
    "train/test_pending_metrics.py": "train.loop train.trainer train.predicted.step train.steps.pending_metrics",
    # one part of the engine, or a count of what it does
    "engine/test_device_calls.py": "optim.clip",
    "engine/test_half_done.py": "engine.attach engine.engine engine.group engine.unit engine.storage.attachment",
    "engine/test_host_cost.py": "comm.gloo engine.engine engine.unit",
    "engine/extensions/test_fp16.py": "engine.storage.part optim.scaler",
    "engine/extensions/test_precision_parity.py": "engine.extensions.precision",
    "engine/extensions/test_activation_offload.py": (
        "engine.extensions.activation_offload engine.storage.attachment measure.storage"
    ),
    "generation/test_continuous.py": "generation",
    "serve/test_serve_command.py": "launch.process train.data.tokenizer",
    "optim/test_flat_ranks.py": "engine.storage.flat_parameters",
    "optim/test_muon.py": "optim.muon torch_private",
    "engine/extensions/test_in_backward_ranks.py": (
        "engine.storage.attachment engine.storage.flat_parameters engine.storage.optimizer engine.engine"
    ),
    "engine/test_profile.py": "engine.hooks",
    # models cut by hand, and the cuts
    "parallel/tensor/test_dropout.py": "comm.record parallel.tensor.dropout",
    "parallel/tensor/test_tensor.py": "comm.record parallel.tensor",
    "weights/state/test_logical_state.py": "api.preparation checkpoint comm.axes api.shard",
    "parallel/tensor/test_tensor_mistakes.py": "comm.axes parallel.tensor.loss",
    # activations of a plain model, attention on meta, choices of tokens, microbatches
    "engine/test_dry_run.py": "measure.meta",
    "engine/test_memory.py": "engine.engine engine.gradient",
    "parallel/tensor/test_tensor_memory.py": (
        "engine.extensions.recompute engine.extensions.wrap engine.storage.attachment measure.meta"
    ),
    "generation/test_generate_command.py": "train.data.tokenizer train.load",
    "generation/test_generate.py": "parallel.context.apply generation.continuous generation.sample",
    "parallel/pipeline/test_pipeline_steps.py": "parallel.pipeline.batch parallel.pipeline.pipelined",
    # faults that are injected, and steps that are watched from within
    "product/test_product_memory.py": "parallel.pipeline.runner",
    "parallel/context/test_context_parity.py": "parallel.context",
    "parallel/experts/test_experts_parity.py": "parallel.experts",
    "engine/test_hybrid_parity.py": "comm engine.storage.inner",
    "engine/storage/test_offload_parity.py": "comm.base engine.storage.host",
    "engine/test_parity.py": "comm engine.group torch_private",
    "parallel/pipeline/test_deferred_weights.py": "parallel.pipeline.runner",
    "parallel/experts/test_expert_parallel.py": "parallel.experts.route engine.build",
    "api/test_export.py": "engine.storage.attachment",
    "api/test_export_peft.py": "api.export_form",
    "api/test_recipe.py": "checkpoint",
    "train/test_offloaded_update.py": "train.model.build train.config",
    "engine/test_hybrid_ranks.py": "comm",
    "engine/storage/test_offload_ranks.py": "engine.storage.attachment engine.storage.host",
    "parallel/pipeline/test_pipeline_overlap.py": (
        "engine.engine engine.extensions.pipeline_step parallel.pipeline.runner"
    ),
    "integrations/test_chat_data.py": "train.data.chat",
    "integrations/test_trl_preference.py": "engine.storage.attachment train.data.tokenizer",
    "integrations/test_transformers_trainer.py": "train.data.tokenizer",
    # what is planned beside what runs
    "measure/test_calibrate.py": "cli.calibrate cost.hardware measure.calibrate",
    "planner/test_measured_memory.py": "cost.workload planner.memory",
    "product/test_product_trace.py": "sim",
    "sim/test_chrome.py": "measure.profile sim",
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
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        if name.startswith(("fuzz/", "gpu/", "replay/")):
            continue
        if "run_on_ranks" not in path.read_text() and name not in ABOUT:
            continue
        for line, module in modules_of(path):
            if is_public(module):
                continue
            about = [each for each in ABOUT.get(name, "").split() if f"{module}.".startswith(f"shardwise.{each}.")]
            used |= {(name, each) for each in about}
            wrong += [] if about else [f"tests/{name}:{line} imports {module}"]
    assert not wrong, (
        "tests that start ranks must outlive changes of what is inside:\n  "
        + "\n  ".join(wrong)
        + "\n  Ask shardwise.testing (probe, checks, part_of, ...) instead. Only a test that is about one internal part"
        " imports it, with a line in ABOUT."
    )
    stale = [f"{name}: {each}" for name, about in ABOUT.items() for each in about.split() if (name, each) not in used]
    assert not stale, f"ABOUT has lines that no test needs any more: {stale}"
