"""Text that is tokenized on the way: every sample once an epoch, the same order on any ranks, little done before."""

from __future__ import annotations

import collections
import json
import os
import time
from pathlib import Path

import pytest

from shardwise.spec.errors import CheckpointError, ConfigError
from shardwise.train.config.resolve import RunConfig, data_of, resolve
from shardwise.train.config.sections import read_config
from shardwise.train.data import stream as module
from shardwise.train.data.stream import StreamSampler, stream_of
from shardwise.train.data.token_files import DataError
from tests.common.tokenizers import TEMPLATE, TEXT, save_model, save_tokenizer
from tests.train.train_here import losses, sets, train_here

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("datasets", reason="the data extra is not installed")
pytestmark = pytest.mark.preload("transformers.models.llama.modeling_llama", "datasets")

CONFIG = """
model: {hf: llama}
data: {source: texts, seq_len: 16, streaming: true}
train: {steps: 40, micro_batch_size: 2, global_batch_size: 8, eval_every: 20, eval_batches: 1}
checkpoint: {every: 20}
schedule: {name: constant}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    save_model(save_tokenizer(tmp_path / "llama", template=TEMPLATE), vocab_size=300)
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text(TEXT[600 * number : 600 * (number + 1)])
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def small_chunks() -> None:
    os.environ["XDG_CACHE_HOME"] = str(Path.cwd() / "cache")
    module.CHUNK_BYTES = 1500


def run(*settings: str) -> RunConfig:
    return resolve(read_config("run.yaml", settings), 1)


def made(folder: Path) -> int:
    return len(list((folder / "cache" / "shardwise" / "tokens").glob("*/tokens")))


def test_an_epoch_has_every_sample_once_and_the_order_is_that_of_any_world(folder: Path) -> None:
    stream = stream_of(data_of(run()).train)
    assert stream is not None
    assert len(stream.chunks) == 3  # of two files each; the last two are held out
    counts = [stream.part(chunk).num_samples for chunk in range(3)]
    total = sum(counts)
    alone = StreamSampler(stream, 5, 1, 1, 0, 1)
    seen = [alone.next_step()[0][0] for _ in range(2 * total)]
    first, second = collections.Counter(seen[:total]), collections.Counter(seen[total:])
    assert first == second
    assert set(first.values()) == {1}
    assert sum(index >> 40 == 1 for index in first) == counts[1]
    assert seen[:total] != seen[total:]
    ranks = [StreamSampler(stream, 5, 2, 2, rank, 3) for rank in range(3)]
    together = []
    for _ in range(total // 12):
        assert list(ranks[0].whole_step()) == seen[len(together) : len(together) + 12]
        together += [index for rank in ranks for micro in rank.next_step() for index in micro]
    assert together == seen[: len(together)]
    later = StreamSampler(stream, 5, 1, 1, 0, 1)
    later.load_state(ranks[1].state())
    assert later.next_step()[0][0] == seen[len(together)]
    with pytest.raises(CheckpointError, match="seed=5, this run has 6"):
        StreamSampler(stream, 6, 1, 1, 0, 1).load_state(later.state())


def test_little_is_tokenized_before_training_and_the_next_chunk_while_one_is_trained_on(folder: Path) -> None:
    data = data_of(run())
    stream = stream_of(data.train)
    assert stream is not None
    before = made(folder)
    assert before <= 2  # the first chunk, by which the size is checked, and what is held out
    sampler = StreamSampler(stream, 0, 1, 1, 0, 1)
    sampler.next_step()
    deadline = time.monotonic() + 60
    while made(folder) <= before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert made(folder) > before


def test_what_cannot_be_streamed_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="1 files of 607 bytes together make one chunk"):
        run("data.source=texts/0.txt")
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 3
    Path("chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="conversations are tokenized before training"):
        run("data.source=chat.jsonl")
    assert not run("data.streaming=false").source.streams


def test_a_streamed_run_goes_on_at_the_sample_on_another_number_of_ranks(folder: Path) -> None:
    whole = train_here(folder, 1, ("--run-dir", "whole"), config=CONFIG, before=small_chunks)
    begun = train_here(folder, 2, ("--run-dir", "half", *sets("train.steps=20")), config=CONFIG, before=small_chunks)
    again = train_here(folder, 1, ("--run-dir", "half", "--resume"), config=CONFIG, before=small_chunks)
    assert [code for code, _ in whole + begun + again] == [0, 0, 0], again
    assert losses(folder / "half") == pytest.approx(losses(folder / "whole"), rel=2e-5)
    assert "bytes in 8 files, tokenized on the way" in whole[0][1]


def test_all_of_a_stream_is_trained_on_where_there_is_other_data_to_evaluate_on(folder: Path) -> None:
    (folder / "held.txt").write_text(TEXT[:900])
    usual, apart = data_of(run()), data_of(run("data.eval_source=held.txt"))
    whole = data_of(run("data.source=held.txt", "data.streaming=false", "data.held_out=0.2")).train
    ends = [len(stream.chunks) for data in (usual, apart) if (stream := stream_of(data.train)) is not None]
    assert ends[1] == ends[0] + 1
    assert (apart.held_out.rows([0, 3]).inputs == whole.rows([0, 3]).inputs).all()
    with pytest.raises(ConfigError, match=r"the number of samples of texts is not known beforehand; set train.steps"):
        run("train.epochs=1")
    assert run("train.steps=3").schedule.steps == 3
