"""Mixtures of sources: which sample is taken when, computed beside them by sorting, and runs on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.spec.errors import ConfigError
from shardwise.train.checkpoints import random_state
from shardwise.train.checkpoints.checkpoints import check_config
from shardwise.train.config.resolve import RunConfig, data_of, resolve
from shardwise.train.config.sections import read_config
from shardwise.train.data.mixture import MixedSampler, MixedSamples, mixed
from shardwise.train.data.sampler import Permutation
from shardwise.train.data.samples import Part
from shardwise.train.data.token_files import DataError, write_tokens
from shardwise.train.model.build import build_model
from tests.train.chats import all_losses, cache_here, save_chats
from tests.train.train_here import metrics, sets, summary, train_here, train_well

SEQ_LEN, NAMES, WEIGHTS, SEED = 16, ["words", "code"], [0.7, 0.3], 5
STEPS, BATCH = 12, 4
CONFIG = """
model: {preset: gpt-nano, vocab_size: 256, seq_len: 16, dropout: 0.0}
data:
  seq_len: 16
  held_out: 0.2
  mix:
    - {source: words.txt, weight: 0.7}
    - {source: code.tokens, weight: 0.3}
train: {steps: 12, micro_batch_size: 2, global_batch_size: 4, eval_every: 6, eval_batches: 2, seed: 5,
  clip_grad_norm: null}
optimizer: {name: sgd, lr: 0.1, momentum: 0.0, weight_decay: 0.0}
schedule: {name: constant}
checkpoint: {every: 6, keep: 10}
"""

CHATS = """
model: {hf: llama}
data: {seq_len: 160, held_out: 0.4, mix: [{source: chat.jsonl, learns: all}, {source: text.txt}]}
train: {steps: 4, micro_batch_size: 1, global_batch_size: 4, eval_every: 4, eval_batches: 1}
optimizer: {lr: 3e-3}
schedule: {name: constant}
checkpoint: {final: false}
"""


def due(weights: list[float], count: int) -> list[tuple[int, int]]:
    """The first ``count`` samples of a mixture, source and number in it: in order of (number + 1/2) / weight."""
    exact = [Fraction(str(weight)) for weight in weights]
    every = [((number + Fraction(1, 2)) / w, s, number) for s, w in enumerate(exact) for number in range(count)]
    return [(source, number) for _, source, number in sorted(every)[:count]]


def drawn(weights: list[float], sizes: list[int], seed: int, count: int) -> list[tuple[int, int]]:
    """The same, where each source is taken in its own order and begins again when all its samples were taken."""
    return [
        (source, Permutation(sizes[source], seed=seed + source, epoch=number // sizes[source])[number % sizes[source]])
        for source, number in due(weights, count)
    ]


def mixture(weights: list[float], sizes: list[int], *, is_held_out: bool = False) -> MixedSamples:
    """Sources of ``sizes`` samples of two tokens, which say of which source and sample they are."""
    tokens = [np.stack([np.full(size, 200 + s), np.arange(size)], 1).ravel() for s, size in enumerate(sizes)]
    parts = [Part([np.append(each, 0)], 0, len(each) + 1, 2) for each in tokens]
    return mixed(parts, [str(s) for s in range(len(sizes))], weights, 2, is_held_out=is_held_out)


def read(samples: MixedSamples, indices: list[int]) -> list[tuple[int, int]]:
    return [(int(source) - 200, int(number)) for source, number in samples.rows(indices).inputs]


weights = st.lists(st.sampled_from([0.05, 0.1, 0.3, 0.7, 1.0, 2.0, 3.0, 1e-3, 12.5]), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(weights, st.lists(st.integers(1, 9), min_size=4, max_size=4), st.integers(0, 2**40), st.integers(0, 60))
def test_samples_come_in_the_order_in_which_they_are_due(
    weights: list[float], sizes: list[int], seed: int, start: int
) -> None:
    samples = mixture(weights, sizes[: len(weights)])
    expected = drawn(weights, sizes, seed, start + 40)
    whole = MixedSampler(samples.num_samples, seed, 8, 5, 0, 1, samples=samples)
    whole.position = start
    assert read(samples, list(itertools.chain(*whole.next_step()))) == expected[start:]
    ranks = [MixedSampler(samples.num_samples, seed, 4, 5, rank, 2, start, samples=samples) for rank in range(2)]
    assert [read(samples, list(itertools.chain(*rank.next_step()))) for rank in ranks] == [
        expected[start : start + 20],
        expected[start + 20 :],
    ]
    assert read(samples, [whole.sample(place) for place in (start, start + 39, start)]) == [
        expected[place] for place in (start, -1, start)
    ]


@settings(max_examples=25, deadline=None)
@given(weights, st.integers(1, 120))
def test_shares_are_exact_wherever_the_sequence_is_stopped(weights: list[float], position: int) -> None:
    samples = mixture(weights, [3] * len(weights))
    sampler = MixedSampler(samples.num_samples, 0, 1, 1, 0, 1, samples=samples)
    taken = [source for source, _ in read(samples, [sampler.sample(place) for place in range(position)])]
    bounds = [((taken.count(s) - 0.5) / w, (taken.count(s) + 0.5) / w) for s, w in enumerate(weights)]
    assert max(low for low, _ in bounds) <= min(high for _, high in bounds) * (1 + 1e-12)


def test_far_positions_cost_no_more_than_near_ones() -> None:
    samples = mixture([0.123456789, 0.3, 7.0], [5, 6, 7])
    sampler = MixedSampler(samples.num_samples, 1, 4, 1, 0, 1, 10**15, samples=samples)
    assert len(sampler.next_step()[0]) == 4


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=3))
def test_held_out_are_as_many_samples_as_there_are_in_proportion_spread_over_each_source(sizes: list[int]) -> None:
    weights = [0.5, 0.25, 0.125][: len(sizes)]
    samples = mixture(weights, sizes, is_held_out=True)
    missing = min((size + 0.5) / weight for size, weight in zip(sizes, weights, strict=True))
    counts = [sum((number + 0.5) / weight < missing for number in range(50)) for weight in weights]
    assert list(samples.counts) == counts
    expected = [(s, k * sizes[s] // count) for s, count in enumerate(counts) for k in range(count)]
    assert [read(samples, [index])[0] for index in range(samples.num_samples)] == expected


# --- runs -------------------------------------------------------------------------------------------------------------


def cut(ids: np.ndarray) -> np.ndarray:
    return np.stack([ids[at : at + SEQ_LEN + 1] for at in range(0, len(ids) - SEQ_LEN, SEQ_LEN)])


def sources(folder: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Writes text and a token file; returns the samples of their training parts, 100 and 5, and held-out ones."""
    generator = np.random.default_rng(0)
    words, code = generator.integers(97, 123, 2001), generator.integers(48, 58, 102)
    (folder / "words.txt").write_bytes(words.astype(np.uint8).tobytes())
    write_tokens(folder / "code.tokens", [code], vocab_size=256)
    ends = [len(ids) - int(len(ids) * 0.2) for ids in (words, code)]
    train = [cut(ids[:end]) for ids, end in zip((words, code), ends, strict=True)]
    assert [len(each) for each in train] == [100, 5]
    return train, [cut(ids[end:]) for ids, end in zip((words, code), ends, strict=True)]


def model_of(folder: Path) -> torch.nn.Module:
    """The model of the run, as it begins."""
    (folder / "run.yaml").write_text(CONFIG)
    random_state.seed_all(SEED)
    return build_model(resolve(read_config(folder / "run.yaml"), 1), torch.device("cpu"))


def loss_of(model: torch.nn.Module, rows: np.ndarray) -> torch.Tensor:
    tokens = torch.from_numpy(rows.astype(np.int64))
    return model(tokens[:, :-1], tokens[:, 1:])


def plain(model: torch.nn.Module, rows: list[np.ndarray], samples: list[tuple[int, int]]) -> list[float]:
    """The losses of plain gradient descent over these samples, in one process."""
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, np.stack([rows[s][number] for s, number in samples[step * BATCH :][:BATCH]]))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.sub_(0.1 * grad)
        losses.append(loss.item())
    return losses


def test_a_run_trains_as_a_plain_loop_and_resumes_in_the_middle_on_another_world_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, (words, code) = sources(tmp_path)
    monkeypatch.chdir(tmp_path)
    samples = drawn(WEIGHTS, [100, 5], SEED, STEPS * BATCH)
    assert [source for source, _ in samples].count(1) > 10  # the second source is in its third epoch
    train_well(tmp_path, 2, ("--run-dir", "two"), ("--run-dir", "half", *sets("train.steps=6")), config=CONFIG)
    text, _ = train_well(tmp_path, 1, ("--run-dir", "one"), ("--run-dir", "half", "--resume"), config=CONFIG)
    assert "data words (0.7), code (0.3): 2,103 tokens in 2 files" in text
    expected = plain(model_of(tmp_path), rows, samples)
    one, two, half = (metrics(tmp_path / name) for name in ("one", "two", "half"))
    for lines in (one, two, half):
        assert [line["loss"] for line in lines] == pytest.approx(expected, rel=1e-6)
        for line in lines:
            taken = [source for source, _ in samples[(line["step"] - 1) * BATCH :][:BATCH]]
            shares = {name: taken.count(source) / BATCH for source, name in enumerate(NAMES)}
            assert {name: line[f"share_{name}"] for name in NAMES} == shares
    values = [[(line["loss"], line["grad_norm"]) for line in lines] for lines in (one, two, half)]
    assert values[2] == values[1][:6] + values[0][6:]  # ranks add losses up in another order, parameters are the same
    held_out = np.stack([*words[[0, 8, 16]], code[0]])  # of 24 and 1 samples, as many as there are in proportion
    assert summary(tmp_path / "one")["eval_loss_first"] == pytest.approx(
        loss_of(model_of(tmp_path), held_out).item(), rel=1e-6
    )


@pytest.mark.preload("transformers.models.llama.modeling_llama", "datasets")
def test_conversations_and_texts_share_a_batch_and_keep_their_own_positions_and_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    pytest.importorskip("datasets", reason="the hf extra is not installed")
    save_chats(tmp_path)
    (tmp_path / "text.txt").write_text("One hundred and seven is a number. " * 200)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "run.yaml").write_text(CHATS)
    alone = [
        data_of(resolve(read_config("run.yaml", ["data.mix=null", *more]), 1)).train
        for more in (["data.source=chat.jsonl", "data.learns=all"], ["data.source=text.txt"])
    ]
    both = data_of(resolve(read_config("run.yaml"), 1)).train
    assert isinstance(both, MixedSamples)
    first = both.begin(1)
    rows, chats, texts = both.rows([1, first + 2]), alone[0].rows([1]), alone[1].rows([2])
    for name in ("inputs", "targets"):
        assert (getattr(rows, name) == np.concatenate([getattr(chats, name), getattr(texts, name)])).all()
    assert rows.positions is not None
    assert (rows.positions == np.stack([chats.positions[0], np.arange(160)])).all()
    assert (rows.positions[0] == 0).sum() > 1  # several conversations
    assert both.num_targets([1, first + 2, first]) == alone[0].num_targets([1]) + 2 * 160
    one = train_here(tmp_path, 1, ("--run-dir", "one"), config=CHATS, before=cache_here)
    two = train_here(tmp_path, 2, ("--run-dir", "two"), config=CHATS, before=cache_here)
    assert [code for code, _ in one + two] == [0, 0], two
    plain, spread = all_losses(tmp_path, "one", "two")
    assert spread == pytest.approx(plain, rel=2e-5)
    assert "conversations in" in one[0][1]
    assert metrics(tmp_path / "two")[0]["share_chat"] == 0.5


# --- configurations ---------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with both sources."""
    sources(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resolved(folder: Path, data: str, *overrides: str, train: str = "steps: 2") -> RunConfig:
    """A run of two ranks, with a global batch of 4 samples of 16 tokens, in the current folder."""
    lines = f"model: {{preset: gpt-nano, vocab_size: 256}}\ndata: {data}\ntrain: {{micro_batch_size: 2, {train}}}\n"
    (folder / "run.yaml").write_text(lines)
    return resolve(read_config(folder / "run.yaml", ["data.seq_len=16", *overrides]), 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{mix: []}", r"run.yaml:2: data.mix: expected .*at least 1 item"),
        ("{mix: [words.txt]}", r"run.yaml:2: data.mix.0: expected the fields of a source, got 'words.txt'"),
        ("{mix: [{weight: 2}]}", r"run.yaml:2: data.mix.0.source: it has no source; name one"),
        (
            "{mix: [{source: words.txt}, {source: code.tokens, wieght: 2, weight: 0}]}",
            r"2 mistakes(?s:.*)mix.1.weight: expected greater than 0, got '0'(?s:.*)mix.1.wieght: .*'weight'",
        ),
        ("{mix: [{source: words.txt}], source: words.txt}", r"data.source: data.mix has sources of its own"),
        ("{mix: [{source: words.txt}], max_bytes: 5}", r"data.max_bytes: data.mix has sources of its own; write it in"),
        ("{mix: [{source: words.txt}], streaming: true}", r"data.streaming: it is for one source; take it out"),
        ("{mix: [{source: words.txt}, {source: ./words.txt}]}", r"data.mix: two sources are called words; give one"),
        ("{mix: [{source: words.txt}, {source: none.txt}]}", r"none.txt: no such file or folder"),
        ("{mix: [{source: words.txt}, {source: short.txt}]}", r"short.txt: 3 tokens leave 0 samples of 16 .*; 1 is"),
        (
            "{source: words.txt, eval_source: short.txt}",
            r"short.txt: 3 tokens leave 0 samples of 16 for the held-out part",
        ),
        (
            "{mix: [{source: words.txt}, {source: code.tokens}], held_out: 0.1}",
            r"code \(0.5\): .* leave 2 samples of 16 for the held-out part; 4 (?s:.*) data.eval_source",
        ),
    ],
)
def test_mixtures_that_cannot_be_are_refused_where_they_are_written(here: Path, data: str, message: str) -> None:
    (here / "short.txt").write_text("abc")
    with pytest.raises((ConfigError, DataError), match=message):
        resolved(here, data)


def test_a_resolved_mixture_reads_back_and_is_not_resumed_with_other_weights_or_other_data(here: Path) -> None:
    (here / "web").mkdir()
    (here / "web" / "a.txt").write_text("some text " * 100)
    data = "{mix: [{source: words.txt, name: w, weight: 3}, {source: code.tokens}], held_out: 0.2}"
    run = resolved(here, data)
    (here / "again.yaml").write_text(run.config.to_yaml())
    again = resolve(read_config("again.yaml", ["name=run"]), 2)
    assert again.config == run.config
    before = run.source.fingerprint()
    assert again.source.fingerprint() == before
    assert [name for _, name, _ in run.source.parts] == ["w", "code"]
    globbed = resolved(here, data.replace("words.txt, name: w", f"{here}/web/*.txt"))
    assert [name for _, name, _ in globbed.source.parts] == ["web", "code"]
    other = resolved(here, data.replace("3", "2"))
    with pytest.raises(ConfigError, match=r"data\.mix"):
        check_config(run.config.model_dump(mode="json"), other.config)
    (here / "scratch").mkdir()
    (here / "scratch" / "words.txt").write_bytes((here / "words.txt").read_bytes())
    moved = resolved(here, data.replace("words.txt", "scratch/words.txt"))
    assert moved.source.fingerprint() == before
    assert check_config(run.config.model_dump(mode="json"), moved.config) == [
        "data.mix.0.source: words.txt -> scratch/words.txt"
    ]
    (here / "words.txt").write_text("x" * 2001)
    assert run.source.fingerprint() != before
    write_tokens(here / "code.tokens", [np.full(102, 256)], vocab_size=257, should_replace=True)
    with pytest.raises(ConfigError, match=r"data.mix.1.source: its tokens have a vocabulary of 257"):
        resolved(here, data)


def test_a_source_that_is_laid_over_a_mixture_takes_its_place(here: Path) -> None:
    mix = "{mix: [{source: words.txt}, {source: code.tokens}], held_out: 0.2}"
    alone = resolved(here, mix, "data.source=words.txt")
    assert (alone.source.name, alone.config.data.mix) == ("words.txt", None)
    (here / "base.yaml").write_text("data: {source: words.txt, held_out: 0.2}\ntrain: {steps: 7}\n")
    (here / "over.yaml").write_text(f"extends: base.yaml\ndata: {mix}\ntrain: {{epochs: 2}}\n")
    config = read_config("over.yaml").config
    assert (config.data.source, config.train.epochs) == (None, 2)
    assert [each.source for each in config.data.sources] == ["words.txt", "code.tokens"]


@pytest.mark.parametrize(
    "data",
    [
        "{source: words.txt}",
        "{mix: [{source: words.txt}, {source: code.tokens}]}",
    ],
)
def test_all_of_a_source_is_trained_on_where_there_is_other_data_to_evaluate_on(
    here: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    (here / "held.txt").write_text("held out " * 20)  # 180 bytes: 11 samples
    run = resolved(here, f"{data[:-1]}, eval_source: held.txt}}")
    found = data_of(run)
    assert found.train.num_samples == (125 + 6 if "mix" in data else 125)
    assert found.held_out.num_samples == 11
    assert bytes(found.held_out.rows([10]).inputs[0].astype(np.uint8)) == (b"held out " * 20)[160:176]
    before = run.source.fingerprint()
    (here / "held.txt").write_text("held.out " * 20)
    assert run.source.fingerprint() != before
    (here / "held.txt").write_bytes(b"\xff" * 180)
    with pytest.raises(DataError, match=r"held.txt:1: byte 0xff is not UTF-8"):
        run.source.check(256)


def test_epochs_make_steps(here: Path) -> None:
    words, held = "{source: words.txt, held_out: 0.2}", "{mix: [{source: words.txt}, {source: code.tokens}]"
    for data, epochs, steps in (
        (words, "1", 25),  # 100 samples in batches of 4
        (words, "0.1", 3),
        (words, "2.03", 51),
        (f"{held}, eval_source: words.txt}}", "2", 66),  # of 125 + 6 samples
    ):
        run = resolved(here, data, train=f"epochs: {epochs}")
        assert run.config.train.steps == steps
        assert run.config.train.epochs == float(epochs)
        (here / "again.yaml").write_text(run.config.to_yaml())
        assert resolve(read_config("again.yaml", ["name=run"]), 2).config == run.config
    run = resolved(here, words, train="epochs: 1, steps: 25")
    assert resolved(here, words, "train.steps=7", train="epochs: 1, steps: 25").config.train.steps == 7
    assert resolved(here, words, "train.steps=7", train="epochs: 1, steps: 25").config.train.epochs is None
    assert resolved(here, words, "train.epochs=2", train="steps: 7").config.train.steps == 50
    longer = resolved(here, words, "train.epochs=2", train="epochs: 1, steps: 25")
    told = check_config(run.config.model_dump(mode="json"), longer.config)
    assert [line.partition(" (")[0] for line in told] == ["train.steps: 25 -> 50", "train.epochs: 1.0 -> 2.0"]


@pytest.mark.parametrize(
    ("data", "train", "message"),
    [
        (
            "{source: words.txt, held_out: 0.2}",
            "epochs: 1, steps: 9",
            r"1 epochs of 100 samples are 25 steps of 4",
        ),
        ("{source: random}", "epochs: 1", r"the number of samples of random is not known .*; set train.steps instead"),
        ("{mix: [{source: random}, {source: words.txt}]}", "epochs: 1", r"is not known beforehand; set train.steps"),
        ("{source: words.txt}", "epochs: 0", r"train.epochs: expected greater than 0"),
    ],
)
def test_epochs_of_unknown_length_or_beside_other_steps_are_refused(
    here: Path, data: str, train: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(here, data, train=train)
    advice = train.replace("epochs: 1, ", "").replace("epochs: 1", "steps: 9").replace("epochs: 0", "epochs: 1")
    assert resolved(here, data, train=advice).config.train.steps in {9, 30}


def test_a_schedule_is_checked_with_the_steps_of_the_epochs(here: Path) -> None:
    words = "{source: words.txt, held_out: 0.2}"
    assert resolved(here, words, "schedule.warmup_steps=1100", train="epochs: 50").config.train.steps == 1250
    with pytest.raises(ConfigError, match=r"26 warm-up steps do not fit in train.steps=25"):
        resolved(here, words, "schedule.warmup_steps=26", train="epochs: 1")


def test_epochs_of_a_user_s_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw = read_config(None, base={"train": {"epochs": 3, "global_batch_size": 4, "micro_batch_size": 1}}, title="x")
    assert resolve(raw, 2, spec=sw.TrainSpec(data=range(10))).config.train.steps == 8

    class Endless:
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    with pytest.raises(ConfigError, match=r"the number of samples of Endless is not known"):
        resolve(raw, 2, spec=sw.TrainSpec(data=Endless()))
