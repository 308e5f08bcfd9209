"""``transformers.Trainer`` under a plan.

::

    from shardwise.integrations.transformers import ShardwiseTrainer

    trainer = ShardwiseTrainer(model=model, args=args, train_dataset=data, plan=sw.ParallelPlan(strategy="zero3"))
    trainer.train()

To extend another trainer, such as one of TRL, use the mixin: ``class MyTrainer(ShardwiseTrainerMixin, SFTTrainer):
...``. Start the processes by ``torchrun`` or ``accelerate launch``. Checkpoints contain the model as
``from_pretrained`` loads it and, in ``shardwise/``, masters and optimizer state from ``sw.save``: a run continues from
them on any number of ranks and under any strategy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, Trainer
from transformers.trainer import TRAINER_STATE_NAME

import shardwise as sw
from shardwise.api.export import write_weights
from shardwise.engine.storage.attachment import attachment_of, engine_of
from shardwise.integrations.trainer import check_alone, check_axes, check_samples, save_over
from shardwise.spec.errors import PlanError
from shardwise.spec.plan import ParallelPlan

_FOLDER = "shardwise"
_LEFT_OUT = -100  # the label that losses of transformers ignore
_SCHEDULER = "scheduler.pt"

#: Base class of the mixin for type checkers; the trainer's attributes come from the class that it is combined with.
_Any: Any = object


class _Counting(Trainer):
    """The trainer with a loss equal to that of one process; subclasses may compute another loss, or call this one."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        """Compute the loss, without the factor for the number of ranks if it is a mean over this rank's labels.

        The trainer multiplies the loss by the number of ranks for each model whose forward accepts
        ``num_items_in_batch``, because a loss that divides by it is one rank's part of the mean. Losses for
        classification, regression and T5 accept the number and do not use it.
        """
        is_shifted = num_items_in_batch is None or self._loss_shifts_labels  # then the number is used, or missing
        if is_shifted or not self.args.average_tokens_across_devices:
            return super().compute_loss(model, inputs, *args, num_items_in_batch=num_items_in_batch, **kwargs)
        count = torch.as_tensor(num_items_in_batch).as_subclass(_Count)
        count.uses = uses = []
        found = super().compute_loss(model, inputs, *args, num_items_in_batch=count, **kwargs)
        factor = 1 if uses else self.accelerator.num_processes
        return (found[0] / factor, *found[1:]) if isinstance(found, tuple) else found / factor

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; a trainer built on this one then runs its evaluator on every rank, as under FSDP."""
        found = super().evaluation_loop(*args, **kwargs)
        self.is_fsdp_enabled = True  # sentence-transformers' evaluators would call the model on uneven parts of data
        return found


class ShardwiseTrainerMixin(_Any):
    """Makes a trainer based on ``transformers.Trainer`` train under a plan.

    Args:
        plan: The plan; by default zero3 over all ranks. Plans that divide the computation of a sample (``tp``, ``pp``,
            ``cp``) are refused, because the trainer gives every rank different samples. Leave it out for a model that
            is parallelized already, such as one of ``sw.from_pretrained``.
        *args: The trainer's arguments.
        **kwargs: The trainer's arguments.

    Raises:
        PlanError: The plan or the trainer's arguments are not supported.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Insert :class:`_Counting` directly before ``Trainer``, behind classes that compute a loss themselves."""
        super().__init_subclass__(**kwargs)
        if not issubclass(cls, _Counting):
            cls.__bases__ = (*(each for each in cls.__bases__ if each is not Trainer), _Counting)

    def __init__(self, *args: Any, plan: ParallelPlan | str | None = None, **kwargs: Any) -> None:
        if not hasattr(Trainer, "_defer_fsdp_gradient_reduction"):
            raise PlanError(
                f"transformers {transformers.__version__}: its Trainer has no hook for deferred reductions.\n"
                "  Install transformers 5.23 or newer (the extra shardwise[integrations])."
            )
        self._counted: Tensor | None = None  # during an evaluation: sum of held-out losses, and number of their labels
        self._plan: ParallelPlan | None = None  # plan of models that model_init builds from now on
        super().__init__(*args, **kwargs)
        _check(self.args)
        resolved, came_in_shards = ParallelPlan(), attachment_of(self.model) is not None
        if not came_in_shards:
            resolved = ParallelPlan(strategy=plan) if isinstance(plan, str) else plan or ParallelPlan()
            check_samples(resolved, "ShardwiseTrainer")
            sw.parallelize(self.model.to(self.args.device), resolved)
            self._plan = resolved
        elif plan is not None:
            raise PlanError("the model is parallelized already, and there is a plan beside it.\n  Leave out plan=.")
        check_axes(self.model, "ShardwiseTrainer")
        reference = getattr(self, "ref_model", None)  # TRL's, which sync_ref_model averages shard by shard
        if isinstance(reference, nn.Module) and attachment_of(reference) is None and reference is not self.model:
            if came_in_shards and getattr(self.args, "sync_ref_model", False):
                raise PlanError(
                    "sync_ref_model=True averages shards, and ref_model is whole where the model came in shards.\n"
                    "  Pass ref_model=sw.from_pretrained(folder, plan) too, or a whole model and plan=."
                )
            sw.parallelize(reference.to(self.args.device), resolved)
        # Makes the trainer accept models that it must neither wrap nor move.
        self.is_distributed_loading_by_transformers = True
        self.place_model_on_device = False

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Build a model as the trainer, which builds one at its creation and another one when training begins."""
        model = super().call_model_init(trial)
        return model if self._plan is None else sw.parallelize(model.to(self.args.device), self._plan)

    # -- where the trainer would move, wrap or reduce

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing, because sharding moves the model."""

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Do nothing, because parallelize compared the parameters, and the engine reduces their gradients."""

    @contextlib.contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        with sw.gradient_sync(self.model, is_enabled=False):
            yield

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:  # noqa: ARG002
        return sw.clip_grad_norm(self.model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return sw.clip_grad_norm(self.model, float("inf")) if grad_norm is None else grad_norm

    # -- held-out losses: the mean over all labels, instead of the trainer's mean of the batches' means

    def evaluation_loop(
        self, dataloader: Any, description: str, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> Any:
        """Evaluate as the trainer, but return the loss of one process over the whole data set."""
        counted = self._counted = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        if self.gather_function == self.accelerator.gather:  # Seq2SeqTrainer's, which keeps samples that only pad
            self.gather_function = self.accelerator.gather_for_metrics
        try:
            with engine_of(self.model, "ShardwiseTrainer").evaluating():
                found = super().evaluation_loop(
                    dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs
                )
        finally:
            self._counted, self.is_fsdp_enabled = None, False
        loss, count = self.accelerator.reduce(counted).tolist()
        if count and f"{metric_key_prefix}_loss" in found.metrics:
            found.metrics[f"{metric_key_prefix}_loss"] = loss / count
        return found

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Predict as the trainer, and count the labels over which the loss is averaged."""
        labels: Any = inputs.get(self.label_names[0]) if len(self.label_names) == 1 else None
        left_out = self._left_out(labels)
        if self._counted is None or labels is None or left_out is None:
            return super().prediction_step(model, inputs, *args, **kwargs)
        labels = labels.clone()
        labels[self._num_real(len(labels)) :] = left_out
        found = super().prediction_step(model, {**inputs, self.label_names[0]: labels}, *args, **kwargs)
        count = int((labels[..., 1:] if self._loss_shifts_labels else labels).ne(left_out).sum())
        if found[0] is not None and count:
            self._counted += torch.stack([found[0].double() * count, found[0].new_tensor(count).double()])
        return found

    def _left_out(self, labels: Any) -> int | None:
        """Return the label that the loss ignores; ``None`` if the loss may not be a mean over the other labels."""
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return None
        if any(type(module).__name__.endswith("ForCTC") for module in self.model.modules()):
            return None
        # A user's loss for classes may ignore no label; data of tokens have ignored labels.
        (owner, *_) = (kind for kind in type(self).__mro__ if "compute_loss" in vars(kind))
        if labels.ndim == 1 and (owner is not _Counting or self.compute_loss_func is not None):
            return None
        if labels.ndim == 3:  # classes of an image's pixels
            return getattr(getattr(self.model, "config", None), "semantic_loss_ignore_index", _LEFT_OUT)
        return _LEFT_OUT

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Count the labels of a training step. Evaluation losses are means over this rank's labels."""
        count = super()._get_num_items_in_batch(batch_samples, device) if self._counted is None else None
        # The trainer's count is a float, which a plan's 16-bit inputs would round beyond 256 labels.
        return count.round().long() if isinstance(count, Tensor) else count

    def _num_real(self, batch_size: int) -> int:
        """Return the samples of this rank's batch, without those that only pad the last batch of all ranks."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return batch_size
        return min(max(state.remainder - self.args.process_index * batch_size, 0), batch_size)

    # -- checkpoints

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model as ``from_pretrained`` loads it. All ranks must call."""
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        if not isinstance(self.model, PreTrainedModel) and not hasattr(self.model, "peft_config"):
            with sw.full_parameters(self.model):
                if self.args.should_save:
                    super()._save(str(folder), state_dict)
            return
        if state_dict is None and not hasattr(self.model, "peft_config"):
            write_weights(folder, self.model)
        else:
            full = sw.full_state_dict(self.model, trainable_only=True) if state_dict is None else state_dict
            encoder = getattr(self.model, "prompt_encoder", None)  # peft computes the prompts that it saves
            with contextlib.nullcontext() if encoder is None else sw.full_parameters(encoder), torch.no_grad():
                if self.args.should_save:
                    self.model.save_pretrained(folder, state_dict=full)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        is_adapted = hasattr(self.model, "peft_config")  # its frozen base is loaded by the script
        save_over(Path(output_dir) / _FOLDER, self.model, _bare(self.optimizer), frozen=not is_adapted)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:  # noqa: ARG002
        sw.load(_states(resume_from_checkpoint), self.model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            sw.load(_states(checkpoint), self.model, _bare(self.optimizer))
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))

    def _load_best_model(self) -> None:
        sw.load(_states(str(self.state.best_model_checkpoint)), self.model)


class ShardwiseTrainer(ShardwiseTrainerMixin, Trainer):
    """``transformers.Trainer`` with ``plan=``."""


#: Functions that read a number from a tensor.
_READS = {Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__index__}


class _Count(Tensor):
    """A number of labels that records in ``uses`` when a value is computed from it."""

    uses: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        counts = [each for each in tensors if isinstance(each, cls)]
        if not counts:
            return found
        if len(counts) < len(tensors) or func in _READS:
            counts[0].uses.append(getattr(func, "__name__", ""))
            return found.as_subclass(Tensor) if isinstance(found, Tensor) else found
        if isinstance(found, cls):
            found.uses = counts[0].uses
        return found


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _states(checkpoint: str) -> Path:
    folder = Path(checkpoint) / _FOLDER
    if not (folder.parent / TRAINER_STATE_NAME).is_file():
        raise sw.CheckpointError(
            f"{checkpoint} is not a checkpoint, or its save was not finished: it holds no {TRAINER_STATE_NAME}, which"
            " is written last.\n  Resume from an earlier checkpoint-*, or remove this folder:"
            " resume_from_checkpoint=True then finds the one before."
        )
    if not folder.is_dir():
        raise sw.CheckpointError(
            f"{checkpoint} holds no {_FOLDER}/: it was saved by another trainer, or with save_only_model.\n"
            "  Load its weights with from_pretrained and start a new run."
        )
    return folder


def _check(args: Any) -> None:
    check_alone("ShardwiseTrainer")
    if args.save_only_model and args.load_best_model_at_end:
        raise PlanError(
            f"save_only_model=True leaves out {_FOLDER}/, from which load_best_model_at_end=True would load.\n"
            "  Leave one of them out."
        )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            raise PlanError(
                f"{name}=True: the trainer would convert the model, which is in shards, when training has ended.\n"
                '  Leave it out, and use a plan with mp_policy="bf16" to evaluate in 16 bit.'
            )
    if args.fp16:
        raise PlanError(
            "fp16=True: the trainer's loss scaler would skip a step on one rank alone.\n"
            '  Use bf16=True, or a plan with mp_policy="bf16".'
        )
