"""The trainer: model, data, objective and optimizer of a configuration or a spec, and the training steps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import plain
from shardwise.engine.storage.attachment import engine_of
from shardwise.launch import inject
from shardwise.optim.scaler import needs_scaler
from shardwise.spec.errors import ConfigError
from shardwise.spec.hf_cache import hub_name
from shardwise.spec.run_files import MODEL, SAMPLES
from shardwise.spec.text import printable
from shardwise.train import folder
from shardwise.train.checkpoints import random_state
from shardwise.train.checkpoints.checkpoints import check_config, mesh_changes, saved_config
from shardwise.train.checkpoints.saved_state import NOT_OF_THE_RUN, check_state, of_reader, pack_state
from shardwise.train.config.resolve import RunConfig, data_of
from shardwise.train.data.mixture import MixedSampler, MixedSamples
from shardwise.train.data.packing import PackedRows
from shardwise.train.data.pairs import PairRows
from shardwise.train.data.sampler import Sampler
from shardwise.train.data.source import is_indexed
from shardwise.train.data.stream import ENDLESS, IterableSampler
from shardwise.train.data.token_files import DataError
from shardwise.train.data.tokenizer import BYTES, find_tokenizer
from shardwise.train.data.user_data import LoaderSampler, UserBatches, UserSamples
from shardwise.train.evaluation import Evaluation
from shardwise.train.log.report import Report, owned_units
from shardwise.train.loop import Loop, Parts
from shardwise.train.microbatches import Microbatches
from shardwise.train.model.build import (
    build_optimizer,
    defer_model,
    nothing_to_train,
    objective_of,
    parameter_groups,
    set_lr,
)
from shardwise.train.model.lora import check_base, fingerprint
from shardwise.train.parity import parity_line
from shardwise.train.predicted.memory import least_checkpoint_bytes, predict, tensor_bytes
from shardwise.train.predicted.step import describe, mfu_of_step, predict_step
from shardwise.train.spec import Mean
from shardwise.train.steps.pending_metrics import StepTime
from shardwise.train.steps.update import Update, with_true_gradient
from shardwise.train.worker import Session


class Trainer:
    """The parts of ``shardwise train``, and its steps. Created once per process."""

    def __init__(self, resolved: RunConfig, session: Session, *, profiled: range = range(0)) -> None:
        self.resolved, self.control, self.device = resolved, session.control, session.device
        control, device, directory = session.control, session.device, session.directory
        self.config = config = resolved.config
        batch = resolved.batch
        self.data = data_of(resolved)
        reader, train = resolved.mesh.data_parallel_rank(control.rank), self.data.train
        share = batch.micro, batch.accumulation, reader, batch.data_parallel_size
        if isinstance(items := getattr(getattr(train, "unmasked", train), "data", None), IterableSampler):
            self.sampler: Sampler = items.for_reader(*share)
        elif isinstance(train, MixedSamples):
            self.sampler = MixedSampler(train.num_samples, config.train.seed, *share, samples=train)
        else:
            self.sampler = Sampler(train.num_samples, config.train.seed, *share)
        held_out: Any = self.data.held_out
        if isinstance(held_out, UserBatches) and config.train.eval_every is not None:
            most = config.train.eval_batches * batch.accumulation
            held_out = held_out.store_first(share, most, lambda number: min(control.all_json(number)))
        foreign_bytes = 0 if resolved.spec.data is None else tensor_bytes(device)
        self.model, self.optimizer = self._build()
        is_scaled = any(control.all_json(needs_scaler(self.model)))  # a single stage may use fp16
        scaler = sw.GradScaler(device.type, enabled=is_scaled)
        if scaler.is_enabled() and config.optimizer.in_backward:
            raise ConfigError(
                "optimizer.in_backward=true, but the model is in fp16: its scaled gradients are looked at before the"
                " update.\n  Set parallel.mp_policy: {param_dtype: bf16, master_dtype: fp32}, or in_backward=false."
            )
        if config.optimizer.in_backward and config.train.non_finite == "skip":
            raise ConfigError(
                "optimizer.in_backward=true updates before the gradients of all parameters are known, so that"
                " train.non_finite=skip cannot leave an update out.\n  Set one of them to its default."
            )
        decay = config.train.ema_decay
        average = None if decay is None else sw.ExponentialMovingAverage(self.model, decay)
        parts = Parts(
            self.model,
            [self.optimizer],
            scaler,
            average,
            reader,
            seed=config.train.seed,
            saves_frozen=self._base is None,
            kept_settings=self._kept_settings,
        )
        self._rates: list[float] = []  # the groups' learning rates as the last step has set them, for callbacks
        self._trained = {id(parameter) for parameter in self.model.parameters() if parameter.requires_grad}
        if config.checkpoint.final or config.checkpoint.every is not None:
            num_bytes = least_checkpoint_bytes(resolved, self.model, self.optimizer)
            control.on_first(lambda: folder.check_room(directory, num_bytes))
        self.loop = Loop(
            self,
            parts,
            self._report(directory, average),
            config,
            session,
            profiled=profiled,
            callbacks=resolved.spec.callbacks,
            foreign_bytes=foreign_bytes,
        )
        self._has_means: bool | None = None  # whether the spec's loss returns sw.Mean; known in the first step
        stops = config.train.non_finite == "stop"
        self.update = Update(self.model, self.optimizer, max_norm=config.train.clip_grad_norm, stops=stops)
        self.microbatches = Microbatches(batch, device)
        self._user_batches: Iterator[Any] | None = None  # microbatches of a user's data set, set in the first step
        self.evaluation = Evaluation(
            resolved, self.model, held_out, reader, self.microbatches, control, self.loop.must_stop
        )

    def _build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        random_state.seed_all(self.config.train.seed)
        model, weights = defer_model(self.resolved, self.device)
        model.train()
        model = sw.parallelize(model, self.resolved.plan, init=weights)
        groups = parameter_groups(self.config.optimizer, model)
        num_trained = sum(len(group["params"]) for group in groups)
        idle = [rank for rank, count in enumerate(self.control.all_json(num_trained)) if count == 0]
        if idle:
            raise nothing_to_train(f"rank {', '.join(map(str, idle))}")
        optimizer = build_optimizer(self.config.optimizer, groups, self.resolved.spec.optimizer)
        if self.config.optimizer.in_backward:
            sw.optimizer_in_backward(model, optimizer)
        return model, optimizer

    def _report(self, directory: Path, average: sw.ExponentialMovingAverage | None) -> Report:
        resolved, control, config, batch = self.resolved, self.control, self.config, self.resolved.batch
        model, step = str(sw.summary(self.model)), predict_step(resolved, self.device, control.size)
        may_read_ahead = is_indexed(resolved.spec.data) and not config.data.workers
        return Report(
            directory,
            self.device,
            config=resolved.to_yaml(),
            plan={
                "world_size": control.size,
                "mesh": resolved.mesh.sizes,
                "parallel": config.parallel.model_dump(mode="json"),
                "batch": {"micro": batch.micro, "accumulation": batch.accumulation, "global": batch.total},
            },
            model=model,
            lines=self._lines(directory, model),
            predicted=describe(resolved, self.device.type, step),
            predicted_bytes=predict(resolved, self.model, self.optimizer, average, control=control, device=self.device),
            units=owned_units(self.model, resolved.mesh, control),
            predicted_step=step,
            mfu_of_step=mfu_of_step(resolved, self.model, self.device, control.size),
            data_advice="; data.workers=4 reads ahead" if may_read_ahead else "",
        )

    def _lines(self, directory: Path, model: str) -> list[str]:
        """Return the first lines of a run's output: model, ranks and data."""
        resolved, config, mesh, source = self.resolved, self.config, self.resolved.mesh, self.resolved.source
        kind = "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        name = config.model.preset or hub_name(Path(config.model.hf or "")) or config.model.hf
        if resolved.spec.model is not None:
            name = getattr(resolved.spec.model, "__name__", "the spec's model")
        axes = f" on {mesh}" if mesh.ep > 1 or mesh.dp_shard != mesh.world_size else ""
        lines = [
            f"run {printable(directory)}: {name} on {self.control.size} x {kind}, {config.parallel.strategy}{axes}",
            f"model {model.splitlines()[0]}; more in {printable(directory / MODEL)}",
        ]
        if source.kind == "given":
            count = "an iterable" if (num := self.data.train.num_samples) >= ENDLESS else f"{num:,} samples"
            lines.append(f"data {printable(source.name)}: {count}")
        else:
            tokens = source.amount if source.files else "random tokens"
            seq_len, longer = resolved.seq_len, resolved.positions or 0
            more = f" (data.seq_len; the model takes up to {longer:,})" if longer > seq_len else ""
            lines.append(f"data {printable(source.name)}: {tokens}; samples of {seq_len:,} tokens{more}")
            if source.evaluated is not None:
                count = self.data.held_out.num_samples
                lines.append(f"evaluated on {printable(source.evaluated.name)}: {count:,} samples")
        lines.append(str(resolved.batch))
        if (stored := resolved.raised_from) is not None:
            lines.append(
                f"weights are stored in {stored}: the optimizer updates fp32 masters"
                f" (parallel.mp_policy.master_dtype; {stored} there keeps 16 bit)"
            )
        parts = self.data.train.parts if isinstance(self.data.train, MixedSamples) else [self.data.train]
        lines += [str(part) for part in parts if isinstance(part, (PackedRows, PairRows))]
        return lines

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self, *, is_demo: bool) -> int:
        """Train to the end, or until a request to stop."""
        self.fingerprint = self.control.on_first(self.resolved.source.fingerprint)
        with self.loop.running():
            for step in self.loop.steps():
                self._step(step)
        code = self.loop.outcome.exit_code
        if code == 0:
            parity = [parity_line(self.resolved, self.data, self.device)] if is_demo else []
            self.loop.conclude(*parity)
        return code

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints in addition to tensors. Exchanges small JSON with an adapter or loaders."""
        sampler = pack_state(self.sampler.state(), "TrainSpec(data=...)")
        if isinstance(self.sampler, LoaderSampler):
            by_reader = dict(self.control.all_json([self.sampler.data_parallel_rank, sampler["own"]]))
            sampler["own"] = [by_reader[reader] for reader in range(self.sampler.data_parallel_size)]
        state = {
            "sampler": plain.unpack(sampler),
            "config": self.config.model_dump(mode="json"),
            "data": self.fingerprint,
            "strategy": str(self.config.parallel.strategy),
            "mesh": self.resolved.mesh.sizes,
            "code": self.resolved.spec.code,
        }
        if self._base is not None:
            state["base"] = self.control.on_first(lambda: fingerprint(self._base))
        return state

    def check(self, path: Path) -> list[str]:
        """Refuse a checkpoint with an unfit configuration or state; return the differences. Exchanges small JSON."""
        overridden = self.resolved.overridden
        changes = self.control.on_first(lambda: check_config(saved_config(path), self.config, overridden))
        batch, groups = self.resolved.batch.total, self.optimizer.param_groups
        spec, allows = self.resolved.spec, self.config.checkpoint.allow_other_code
        are_restored = self._kept_settings is not None
        self.control.on_first(
            lambda: check_state(
                path, batch, groups, overridden, spec=spec, allows_other_code=allows, are_restored=are_restored
            )
        )
        return changes

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Restore the position in the data, and check the base of an adapter. Exchanges small JSON."""
        if self._base is not None:
            self.control.on_first(lambda: check_base(self._base, state.get("base")))
        if state["data"] != self.fingerprint:
            raise DataError(
                f"{self.resolved.source.name}: the data is not what the run began with (its hash has changed).\n"
                "  Restore the data, or start a new run."
            )
        sampler, readers = dict(state["sampler"]), self.sampler.data_parallel_size
        if isinstance(self.sampler, LoaderSampler):
            what, instead = "TrainSpec(data=...) was that of each of {} readers", "give a data set with len and items"
            sampler["own"] = of_reader(sampler["own"], self.sampler.data_parallel_rank, readers, what, instead)
        self.sampler.load_state(sampler)
        return mesh_changes(state.get("mesh") or {}, self.resolved.mesh.sizes)

    def evaluate(self) -> dict[str, float] | None:
        """Evaluate and print the held-out loss and metrics, as ``Evaluation.values``."""
        found = self.evaluation.values()
        if found is not None:
            more = "".join(
                f", {name.removeprefix('eval_')} {value:.4f}" for name, value in found.items() if name != "eval_loss"
            )
            step = self.loop.done.step
            self.loop.progress.say(
                f"step {step}  held-out loss {found['eval_loss']:.4f}{more} ({self.evaluation.num_samples} samples)"
            )
            if self.config.train.sample_prompts:
                self._show_samples(step)
        return found

    def _show_samples(self, step: int) -> None:
        """Continue the prompts of the configuration, print the texts, and append them to samples.jsonl.

        Collective:
            Those of ``sw.generate``. All ranks must call.
        """
        prompts = self.config.train.sample_prompts
        tokenizer = find_tokenizer(self.config.data.tokenizer or BYTES)
        rows = [tokenizer.encode(prompt) for prompt in prompts]
        continuations = sw.generate(self.model, rows, max_new_tokens=self.config.train.sample_tokens)
        self.model.train()
        if not self.control.is_first:
            return
        with (self.loop.directory / SAMPLES).open("a") as file:
            for prompt, ids in zip(prompts, continuations, strict=True):
                text = tokenizer.decode(ids)
                self.loop.progress.say(f"  {printable(prompt)} ... {printable(text)}")
                file.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")

    @property
    def _base(self) -> Path | None:
        """Folder of the frozen weights below the run's adapters, which checkpoints leave out."""
        folder = self.config.model.hf
        return Path(folder).expanduser() if self.config.lora.is_used and folder is not None else None

    @property
    def _kept_settings(self) -> set[str] | None:
        """Settings of the optimizer's groups that a resume does not restore; ``None`` if it restores none.

        A spec's optimizer may count in its groups, and a callback may change them: all others are restored.
        """
        if self.resolved.spec.optimizer is None and not self.resolved.spec.callbacks:
            return None
        return NOT_OF_THE_RUN | {key.removeprefix("optimizer.") for key in self.resolved.overridden}

    def _refuse_changes(self) -> None:
        """Refuse a callback's changes that would have no effect: of learning rates, and of what is trained."""
        groups = self.optimizer.param_groups
        for before, now in zip(self._rates, groups, strict=False):  # a callback may have added a group
            if now["lr"] != before:
                raise ConfigError(
                    f"a callback has changed a learning rate from {before:g} to {float(now['lr']):g}, and each step"
                    " sets it by the schedule.\n"
                    "  Give TrainSpec(schedule=...), or write a loop of your own with sw.Run(..., scheduler=...)."
                )
        given = (each for group in groups for each in group["params"])
        known = self._trained | {id(parameter) for each in given for parameter in getattr(each, "shards", (each,))}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise ConfigError(
                    f"a callback has set requires_grad of {name!r}, which was frozen when the optimizer was made: it"
                    " would never be updated.\n"
                    "  Write a loop of your own with sw.Run, whose optimizer has all parameters."
                )

    # --- a step ------------------------------------------------------------------------------------------------------

    def _step(self, step: int) -> None:
        """Make step number ``step``, from 0. Its results stay on the device.

        Collective:
            Those of the model and its optimizer; with a user's loss one all-reduce of 16 bytes.
        """
        loop, batch, scaler, config = self.loop, self.resolved.batch, self.loop.parts.scaler, self.config
        ratio = self.resolved.ratio(step)
        if self.resolved.spec.callbacks:
            self._refuse_changes()
        set_lr(self.optimizer, config.optimizer, ratio)  # before backward, which may already update
        if self.resolved.spec.callbacks:
            self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        scale = scaler.get_scale() if scaler.is_enabled() else None
        loop.fault_at("before_backward", step + 1)
        if self._user_batches is None and isinstance(part := self.data.train, UserSamples):
            self._user_batches = part.microbatches(self.sampler.upcoming(), self.device)
        global_batch = self.sampler.global_batch()
        samples = self.sampler.next_step()
        loss = self._forward_backward(samples, global_batch)
        every = config.train.check_replicas_every
        if every is not None and (step + 1) % every == 0:
            loop.check_replicas(step + 1, after_backward=True)
        inject.at("before_update", step + 1, loop.gradients)
        update = None if config.optimizer.in_backward else StepTime(self.device)
        with loop.trace.optimizer(step + 1):
            norm, is_skipped = (None, False) if update is None else self.update.make(scaler)
        if update is not None:
            update.stop()
        if loop.parts.average is not None:
            loop.parts.average.update()
        loop.store(
            loss=loss,
            num_losses=batch.accumulation,
            norm=norm,
            is_skipped=is_skipped,
            update=update,
            lr=float(self.optimizer.param_groups[0]["lr"]),
            scale=scale,
            data_s=self.microbatches.data_s,
            samples=samples,
            tokens=batch.total * self.resolved.seq_len,
            values=part.shares(list(chain(*samples))) if isinstance(part := self.data.train, MixedSamples) else {},
        )

    def _forward_backward(self, samples: Sequence[Sequence[int]], global_batch: Iterable[int]) -> Tensor | None:
        """Run forward and backward; return the sum of this rank's losses, on the device, or ``None`` if there is none.

        Afterwards the gradients are ready, or the parameters updated (in backward). ``global_batch`` are the samples of
        all ranks.
        """
        losses: list[Tensor] = []
        counts: list[Tensor | float] = []
        objective = objective_of(self.resolved)

        def loss_fn(output: Any, batch: Any) -> Tensor:
            found = objective.loss_fn(output, batch)
            if isinstance(found, Mean):
                counts.append(found.count)
                found = found.total
            return with_true_gradient(found)

        self.microbatches.data_s = 0.0
        sw.train_step(
            self.model,
            self._microbatches(samples, global_batch),
            loss_fn,
            self.resolved.batch.accumulation,
            scaler=self.loop.parts.scaler,
            forward=objective.forward,
            losses=losses,
        )
        loss = sum(losses, torch.zeros((), device=self.device)) if losses else None
        if self.resolved.spec.loss is not None and self._has_means is None:
            self._has_means = any(self.control.all_json(bool(counts)))
        if not self._has_means:
            return loss
        factor = self._factor(counts, has_loss=bool(losses))
        factors = {factor.device: factor}
        for parameter in self.model.parameters():
            if (grad := parameter.grad) is not None:  # an fp32 tensor without dimensions does not change the dtype
                grad.mul_(factors.setdefault(grad.device, factor.to(grad.device)))
        return None if loss is None else loss * factor

    def _microbatches(self, samples: Sequence[Sequence[int]], global_batch: Iterable[int]) -> Iterator[Any]:
        if self._user_batches is not None:
            return self.microbatches.timed(islice(self._user_batches, len(samples)))
        return self.microbatches.read(self.data.train, samples, global_batch, self.resolved.batch.total)

    def _factor(self, counts: Sequence[Tensor | float], *, has_loss: bool) -> Tensor:
        """Return the factor from the mean of sums over microbatches and ranks to the mean by their counts, or 1.

        Copies of a loss, on ranks of ``tp`` and ``cp``, multiply both sums.

        Collective:
            One all-reduce of 16 bytes over all ranks, for which the host does not wait.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        sums[1] = float(has_loss)
        for count in counts:
            sums[0] += count
        engine_of(self.model, "train").comms.world.all_reduce(sums, unit="loss").wait()
        factor = sums[1] * self.resolved.batch.accumulation / sums[0]
        return torch.where(sums[0] > 0, factor, torch.ones_like(factor)).float()
