"""``ShardwiseTrainer`` on two ranks beside ``transformers.Trainer`` in one process, and TRL's trainer by the mixin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import CheckpointError, PlanError
from shardwise.testing import probe, run_on_ranks
from tests.common.ranks import refusal

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # TRL still says gradient_checkpointing
]

#: What one step's log has: loss, norm of gradients, held-out loss.
Log = list[tuple[float | None, ...]]
_COLUMNS = ("loss", "grad_norm", "eval_loss")


def build() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens; of each sample another number of labels counts."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 64, (count, 12), generator=generator)
        self.lengths = torch.randint(3, 12, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.ids[index].clone()
        labels[self.lengths[index] :] = -100
        return {"input_ids": self.ids[index], "labels": labels}


def settings(folder: str, world: int) -> dict[str, Any]:
    """Arguments of a trainer that takes four samples, twice, in a step of the whole world."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": 4 // world,
        "per_device_eval_batch_size": 4 // world,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "logging_steps": 1,
        "save_steps": 3,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
    }


def logged(trainer: Any) -> Log:
    found = [tuple(line.get(name) for name in _COLUMNS) for line in trainer.state.log_history]
    return [line for line in found if any(value is not None for value in line)]


def train(folder: str, world: int, kind: type, resume: str | None = None, **given: Any) -> tuple[Any, Log]:
    from transformers import TrainingArguments

    args = TrainingArguments(
        **settings(folder, world), eval_strategy="steps", eval_steps=3, load_best_model_at_end=True
    )
    trainer = kind(model=build(), args=args, train_dataset=Texts(64, 1), eval_dataset=Texts(11, 2), **given)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, logged(trainer)


def train_on_rank(folder: str, plan: str, resume: str | None = None) -> tuple[Log, dict[str, Tensor], float]:
    from shardwise.integrations.transformers import ShardwiseTrainer

    trainer, log = train(folder, 2, ShardwiseTrainer, resume, plan=plan)
    return log, sw.full_state_dict(trainer.model), trainer.evaluate()["eval_loss"]


def close(found: Log, expected: Log) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert [value is None for value in one] == [value is None for value in other]
        there = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
        assert all(a == pytest.approx(b, rel=1e-5) for a, b in there), (one, other)


def held_out_loss(model: nn.Module) -> float:
    """The mean over all labels of the held-out samples, one by one."""
    total, count = 0.0, 0
    for sample in Texts(11, 2):
        with torch.no_grad():
            loss = model.eval()(input_ids=sample["input_ids"][None], labels=sample["labels"][None]).loss
        number = int(sample["labels"][1:].ne(-100).sum())
        total, count = total + float(loss) * number, count + number
    return total / count


@pytest.mark.parametrize("plan", ["zero3", "ddp"])
def test_losses_weights_and_held_out_losses_are_those_of_the_plain_trainer(tmp_path: Path, plan: str) -> None:
    from transformers import AutoModelForCausalLM, Trainer

    plain, expected = train(str(tmp_path / "plain"), 1, Trainer)
    log, state, best_loss = run_on_ranks(train_on_rank, 2, str(tmp_path / plan), plan, timeout_s=120)[0]
    close([line[:2] for line in log], [line[:2] for line in expected])
    best = min(line[2] for line in log if line[2] is not None)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
    assert best_loss == pytest.approx(best, rel=1e-6)  # the best model was loaded at the end
    for step, held_out in ((3, log[3][2]), (6, log[7][2])):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / plan / f"checkpoint-{step}")
        assert held_out == pytest.approx(held_out_loss(saved), rel=1e-5)
    again = run_on_ranks(
        train_on_rank, 2, str(tmp_path / plan), plan, str(tmp_path / plan / "checkpoint-3"), timeout_s=120
    )[0]  # in the same folder: a checkpoint-6 is there already
    assert again[0][4:] == log[4:]
    assert all(torch.equal(again[1][name], value) for name, value in state.items())


def gathers_of_an_evaluation(folder: str) -> list[tuple[str, int]]:
    """Gathers of units in an evaluation of several batches, and the units of the model."""
    from transformers import TrainingArguments

    from shardwise.integrations.transformers import ShardwiseTrainer

    trainer = ShardwiseTrainer(
        model=build(), args=TrainingArguments(**settings(folder, 2)), eval_dataset=Texts(11, 2), plan="zero1"
    )
    units = [unit.name for unit in probe(trainer.model).units]
    with sw.record_collectives(trainer.model) as events:
        trainer.evaluate()
    return [(unit, sum(e.kind == "all_gather" and e.unit == unit for e in events)) for unit in units]


def test_an_evaluation_gathers_parameters_once(tmp_path: Path) -> None:
    assert {count for _, count in run_on_ranks(gathers_of_an_evaluation, 2, str(tmp_path))[0]} == {1}


def chats() -> Any:
    from datasets import Dataset

    asked = [f"what is {n}+{n}?" for n in range(48)]
    told = [f"{2 * n}!" * (1 + n % 3) for n in range(48)]
    return Dataset.from_list(
        [
            {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": tell}]}
            for ask, tell in zip(asked, told, strict=True)
        ]
    )


def tune(folder: str, world: int, kind: Any, *, is_adapted: bool, **given: Any) -> Any:
    """Supervised fine-tuning with loss on the assistant's turns."""
    from peft import LoraConfig
    from trl import SFTConfig

    from shardwise.train.data.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = chr(0x100)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
    )
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    args = SFTConfig(**settings(folder, world), bf16=False, assistant_only_loss=True, max_length=64)
    trainer = kind(
        model=build(),
        args=args,
        train_dataset=chats(),
        processing_class=tokenizer,
        peft_config=adapter if is_adapted else None,
        **given,
    )
    trainer.train()
    return trainer


def tune_on_rank(folder: str, is_adapted: bool) -> tuple[Log, dict[str, Tensor]]:
    from trl import SFTTrainer

    from shardwise.integrations.transformers import ShardwiseTrainerMixin

    kind = type("Tuner", (ShardwiseTrainerMixin, SFTTrainer), {})
    trainer = tune(folder, 2, kind, is_adapted=is_adapted, plan="zero3")
    return logged(trainer), sw.full_state_dict(trainer.model)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_trl_fine_tunes_by_the_mixin_with_adapters_too(tmp_path: Path, is_adapted: bool) -> None:
    from peft import PeftModel
    from trl import SFTTrainer

    plain = tune(str(tmp_path / "plain"), 1, SFTTrainer, is_adapted=is_adapted)
    log, state = run_on_ranks(tune_on_rank, 2, str(tmp_path / "shards"), is_adapted, timeout_s=200)[0]
    close(log, logged(plain))
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
    if is_adapted:
        checkpoint = tmp_path / "shards" / "checkpoint-6"
        assert not list((checkpoint / "shardwise").glob("frozen-*"))  # the base would be as large as the model
        loaded = PeftModel.from_pretrained(build(), checkpoint)
        held = {name.replace(".default", ""): value for name, value in loaded.state_dict().items() if "lora" in name}
        assert held
        assert all(torch.equal(value, state[name.replace("_A.", "_A.default.").replace("_B.", "_B.default.")])
                   for name, value in held.items())  # fmt: skip


def tune_prompts_on_rank(folder: str) -> dict[str, Tensor]:
    import peft
    from transformers import TrainingArguments

    from shardwise.integrations.transformers import ShardwiseTrainer

    model = peft.get_peft_model(build(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    args = TrainingArguments(**settings(folder, 2))
    trainer = ShardwiseTrainer(model, args, train_dataset=Texts(8, 1), eval_dataset=Texts(8, 2), plan="zero3")
    trainer.save_model(folder)
    return sw.full_state_dict(model, trainable_only=True)


def test_prompts_that_peft_computes_when_it_saves_are_saved(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (trained,) = run_on_ranks(tune_prompts_on_rank, 2, str(tmp_path), timeout_s=100)[0].values()
    (saved,) = load_file(tmp_path / "adapter_model.safetensors").values()
    assert torch.equal(saved, trained)


def refuse_on_rank(folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    from shardwise.integrations.transformers import ShardwiseTrainer

    args = TrainingArguments(**settings(folder, 2))
    text = refusal(PlanError, ShardwiseTrainer, build(), args, plan=sw.ParallelPlan(tp=2))
    assert "tp=2: ShardwiseTrainer gives every rank different samples" in text
    trainer = ShardwiseTrainer(build(), args, train_dataset=Texts(8, 1))
    unfinished = "its save was not finished: it holds no trainer_state.json"
    assert unfinished in refusal(CheckpointError, trainer.train, resume_from_checkpoint=folder)
    weights = Path(folder) / "weights"
    weights.mkdir(exist_ok=True)
    (weights / "trainer_state.json").touch()
    assert "holds no shardwise/" in refusal(CheckpointError, trainer.train, resume_from_checkpoint=str(weights))
    half = TrainingArguments(**settings(folder, 2), bf16_full_eval=True)
    assert "bf16_full_eval=True: the trainer would convert" in refusal(PlanError, ShardwiseTrainer, build(), half)
    best = TrainingArguments(
        **settings(folder, 2) | {"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "steps"}
    )
    assert "save_only_model=True leaves out shardwise/" in refusal(
        PlanError, ShardwiseTrainer, build(), best, eval_dataset=Texts(8, 1)
    )
    sharded = sw.parallelize(build(), "zero3")
    assert "there is a plan beside it" in refusal(PlanError, ShardwiseTrainer, sharded, args, plan="zero3")
    ShardwiseTrainer(sharded, args, train_dataset=Texts(8, 1)).train()
    assert isinstance(trainer, Trainer)


def test_what_the_trainer_cannot_do_is_refused(tmp_path: Path) -> None:
    run_on_ranks(refuse_on_rank, 2, str(tmp_path), timeout_s=100)


class Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Tokens with one number or one class each, or with other tokens."""

    def __init__(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(1, 64, (16, 6), generator=generator)
        self.labels = {
            "t5": self.ids.flip(1), "regression": torch.randn(16, generator=generator), "classes": self.ids[:, 0] % 2
        }[kind]  # fmt: skip

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def build_of(kind: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    if kind == "t5":
        sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
        return transformers.T5ForConditionalGeneration(config)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    more = {"num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, **more, num_labels=1 if kind == "regression" else 2)
    return transformers.BertForSequenceClassification(config)


def learn(folder: str, world: int, trainer: type, kinds: list[str], **given: Any) -> list[Log]:
    from transformers import TrainingArguments

    found = []
    for kind in kinds:
        args = TrainingArguments(**settings(f"{folder}/{kind}", world) | {"max_steps": 2})
        made = trainer(model=build_of(kind), args=args, train_dataset=Numbers(kind), **given)
        made.train()
        found.append(logged(made))
    return found


def learn_on_rank(folder: str, kinds: list[str]) -> list[Log]:
    from shardwise.integrations.transformers import ShardwiseTrainer

    return learn(folder, 2, ShardwiseTrainer, kinds, plan="zero3")


def test_losses_that_ignore_the_number_of_labels_are_not_multiplied_by_the_ranks(tmp_path: Path) -> None:
    from transformers import Trainer

    kinds = ["t5", "regression", "classes"]
    expected = learn(str(tmp_path / "plain"), 1, Trainer, kinds)
    found = run_on_ranks(learn_on_rank, 2, str(tmp_path / "shards"), kinds, timeout_s=200)[0]
    for one, other in zip(found, expected, strict=True):
        close(one, other)


class Classes(nn.Module):
    """A classifier that accepts the number of labels, as all of transformers do, and does not use it."""

    def forward(self, x: Tensor, labels: Tensor, **_given: Any) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(x, labels), "logits": x}


def test_a_loss_of_ones_own_is_divided_only_where_the_trainer_has_multiplied_it() -> None:
    from types import SimpleNamespace

    from transformers import Trainer

    from shardwise.integrations.transformers import ShardwiseTrainer, ShardwiseTrainerMixin

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_args: Any, **_kwargs: Any) -> Any:
            return nn.functional.cross_entropy(model(**inputs)["logits"], inputs["labels"])

    class Logged(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    inputs = {"x": torch.randn(6, 3), "labels": torch.arange(6) % 3}
    expected = Classes()(**inputs)["loss"]
    mixed = [type("Mixed", (ShardwiseTrainerMixin, kind), {}) for kind in (Own, Logged, Trainer)]
    for kind in (*mixed, ShardwiseTrainer, type("More", (Logged, ShardwiseTrainer), {})):
        trainer = kind.__new__(kind)
        trainer.args = SimpleNamespace(average_tokens_across_devices=True, n_gpu=1)
        trainer.accelerator = SimpleNamespace(num_processes=4)
        trainer.label_smoother = trainer.compute_loss_func = None
        trainer.model_accepts_loss_kwargs, trainer._loss_shifts_labels = True, False
        trainer.get_tp_size = lambda: 1
        loss = trainer.compute_loss(Classes(), dict(inputs), num_items_in_batch=torch.tensor(24))
        torch.testing.assert_close(loss, expected)


def test_the_number_of_labels_is_noted_where_it_stands_in_a_list_or_has_a_name() -> None:
    from shardwise.integrations.transformers import _Count

    for use in (
        lambda count: torch.div(torch.tensor(6.0), other=count),
        lambda count: torch.stack([torch.tensor(6), count]).sum(),
        lambda count: torch.tensor(6.0) / torch.stack([count, count])[0],
    ):
        count = torch.tensor(3).as_subclass(_Count)
        count.uses = []
        assert type(use(count)) is Tensor
        assert len(count.uses) == 1


class Held(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Pictures, sounds or tokens with labels; the last batch of two ranks is short, but for sounds."""

    def __init__(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(3)
        inputs = {"pixel_values": torch.randn(7, 3, 32, 32, generator=generator)}
        self.labels = torch.randint(0, 3, (7, 32, 32), generator=generator)
        self.labels[:4, 8:] = self.labels[4:, :8] = 255
        if kind == "photos":
            self.labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])
        if kind == "sounds":
            inputs = {"input_values": torch.randn(8, 800, generator=generator)}
            self.labels = torch.randint(1, 9, (8, 3), generator=generator)
            self.labels[:4, 1:] = -100
        elif kind == "own":  # the first sample, which fills the last batch, is as the last one
            inputs = {"input_ids": torch.tensor([1, 2, 3, 4, 5, 6, 1])[:, None].expand(7, 6)}
            self.labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])
        ((self.name, self.inputs),) = inputs.items()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {self.name: self.inputs[index], "labels": self.labels[index]}


def build_held(kind: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    if kind in ("pictures", "photos"):
        lists = {"depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "num_attention_heads": [1, 2]}
        more = {"patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [2, 2], "num_labels": 3}
        config = transformers.SegformerConfig(num_encoder_blocks=2, decoder_hidden_size=16, **lists, **more)
        name = "SegformerForSemanticSegmentation" if kind == "pictures" else "SegformerForImageClassification"
        return getattr(transformers, name)(config)
    if kind == "sounds":
        sizes = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        filters = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
        more = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "ctc_loss_reduction": "mean"}
        return transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**sizes, **filters, **more, pad_token_id=0))
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, intermediate_size=32))


def hold_out(folder: str, world: int, kind: str, plan: str | None) -> float:
    from transformers import Trainer, TrainingArguments

    from shardwise.integrations.transformers import ShardwiseTrainerMixin

    class Own(Trainer):
        """A loss that takes every label for a class."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_given: Any) -> Any:
            classes = nn.functional.one_hot(inputs["labels"], 3)
            outputs = model(input_ids=inputs["input_ids"])
            loss = -(classes * outputs.logits.log_softmax(-1)).sum(-1).mean()
            return (loss, outputs) if return_outputs else loss

    plain = Own if kind == "own" else Trainer
    chosen = plain if plan is None else type("Sharded", (ShardwiseTrainerMixin, plain), {})
    given = {} if plan is None else {"plan": plan}
    args = TrainingArguments(**settings(folder, world) | {"per_device_eval_batch_size": 8 if plan is None else 2})
    trainer = chosen(model=build_held(kind), args=args, eval_dataset=Held(kind), **given)
    return trainer.evaluate()["eval_loss"]


def hold_out_on_rank(folder: str, kinds: list[str]) -> list[float]:
    return [hold_out(folder, 2, kind, "zero3") for kind in kinds]


@pytest.mark.filterwarnings("ignore")
def test_held_out_losses_that_do_not_leave_out_minus_100_are_right_too(tmp_path: Path) -> None:
    kinds = ["pictures", "photos", "sounds", "own"]
    found = run_on_ranks(hold_out_on_rank, 2, str(tmp_path), kinds, timeout_s=100)[0]
    expected = [hold_out(str(tmp_path), 1, kind, None) for kind in kinds]
    assert found == pytest.approx(expected, rel=1e-5)


def answer(folder: str, world: int, plain: type, **given: Any) -> list[list[int]]:
    """Answers to seven samples that the model generates, and their labels, as metrics see them."""
    from transformers import Seq2SeqTrainingArguments

    found: list[list[int]] = []

    def note(rows: Any) -> dict[str, float]:
        found.extend([*rows.predictions.tolist(), *rows.label_ids.tolist()])
        return {}

    args = Seq2SeqTrainingArguments(**settings(folder, world), predict_with_generate=True, generation_max_length=6)
    data = torch.utils.data.Subset(Numbers("t5"), range(7))
    trainer = plain(model=build_of("t5"), args=args, eval_dataset=data, compute_metrics=note, **given)
    trainer.evaluate()
    return found


def answer_on_rank(folder: str) -> list[list[int]]:
    from transformers import Seq2SeqTrainer

    from shardwise.integrations.transformers import ShardwiseTrainerMixin

    return answer(folder, 2, type("Sharded", (ShardwiseTrainerMixin, Seq2SeqTrainer), {}), plan="zero3")


def test_metrics_of_generated_answers_see_each_sample_once(tmp_path: Path) -> None:
    from transformers import Seq2SeqTrainer

    found = run_on_ranks(answer_on_rank, 2, str(tmp_path), timeout_s=100)[0]
    assert found == answer(str(tmp_path), 1, Seq2SeqTrainer)
    assert len(found) == 14


def begin_on_rank(folder: str) -> list[Log]:
    from transformers import TrainingArguments

    from shardwise.integrations.transformers import ShardwiseTrainer

    args = TrainingArguments(**settings(folder, 2) | {"max_steps": 1})
    found = []
    for given in ({"model": build()}, {"model_init": build}):
        trainer = ShardwiseTrainer(args=args, train_dataset=Texts(8, 1), plan="zero3", **given)
        trainer.train()
        found.append(logged(trainer))
    return found


def test_a_model_that_the_trainer_builds_is_sharded_too(tmp_path: Path) -> None:
    built, given = run_on_ranks(begin_on_rank, 2, str(tmp_path), timeout_s=100)[0]
    assert built == given


class Wrapped(nn.Module):
    """A model of transformers inside a module that is none, as sentence-transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


def evaluate_wrapped_on_rank(folder: str) -> tuple[dict[str, Tensor], list[bool]]:
    from transformers import Trainer, TrainingArguments

    from shardwise.integrations.transformers import ShardwiseTrainerMixin

    is_on_every_rank = []

    class Evaluating(Trainer):
        """As the trainers of sentence-transformers: parts of the data on the ranks, unless FSDP shards the model."""

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            found = super().evaluation_loop(*args, **kwargs)
            is_on_every_rank.append(self.is_fsdp_enabled)
            return found

    class Sharded(ShardwiseTrainerMixin, Evaluating):
        pass

    args = TrainingArguments(**settings(folder, 2), eval_strategy="steps", eval_steps=3, load_best_model_at_end=True)
    trainer = Sharded(model=Wrapped(), args=args, train_dataset=Texts(64, 1), eval_dataset=Texts(8, 2), plan="zero3")
    trainer.train()
    return sw.full_state_dict(trainer.model), [*is_on_every_rank, trainer.is_fsdp_enabled]


def test_a_model_that_is_not_of_transformers_is_saved_as_the_trainer_saves_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state, is_on_every_rank = run_on_ranks(evaluate_wrapped_on_rank, 2, str(tmp_path), timeout_s=100)[0]
    saved = [load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors") for step in (3, 6)]
    assert any(all(torch.equal(each[name], value) for name, value in state.items()) for each in saved)
    assert is_on_every_rank == [True, True, False]
