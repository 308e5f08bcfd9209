"""`shardwise serve` as a program: a client of OpenAI's package streams while others ask, under tp, pp and alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai
import pytest

from shardwise.cli import main
from shardwise.launch.process import parent_of
from shardwise.testing import run_on_ranks
from tests.common.hostile import put_modules
from tests.common.tokenizers import save_tokenizer
from tests.generation.test_generate_command import say

pytestmark = pytest.mark.preload("transformers.models.llama.modeling_llama")

PROMPTS = ["def number", "One hundred and 7", "    return x", "naïve lines", "and more"]
COUNT = 24
SEQ = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama far from uniform, so that no two tokens are near each other."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = save_tokenizer(tmp_path_factory.mktemp("serve") / "tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SEQ, initializer_range=0.5,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    put_modules(folder)
    return folder


@contextlib.contextmanager
def served(folder, *arguments):
    """A server of its own process group, its address, and what it says when it has ended."""
    command = [sys.executable, "-m", "shardwise", "serve", str(folder), "--port=0", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=folder
    )
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    try:
        for line in process.stdout:
            found = re.match(r"serving tiny at (http://127\.0\.0\.[12]:\d+/v1)", line)
            if found:
                yield process, found[1]
                break
        else:
            pytest.fail("the server did not begin")
    finally:
        process.kill()
        process.wait()
        assert not (folder / "ran").exists(), (folder / "ran").read_text()
        process.stdout.close()
        watchdog.cancel()


def client_of(address):
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)


def ask(client, prompt, **options):
    given = {"model": "tiny", "prompt": prompt, "max_tokens": COUNT, "temperature": 0}
    return client.completions.create(**given | options)


@pytest.fixture(scope="module")
def generated(folder):
    """What `shardwise generate` says, alone: tokens and text of each prompt."""
    calls = [[str(folder), f"--prompt={prompt}", f"--max-new-tokens={COUNT}", "--json"] for prompt in PROMPTS]
    printed = run_on_ranks(say, 1, str(folder.parent), calls, timeout_s=120)[0]
    return [json.loads(text) for _, text in printed]


def texts_of_five(client, folder):
    """One prompt streamed while four others are asked for; the texts, and how many pieces the stream had."""
    from shardwise.train.data.tokenizer import FolderTokenizer

    rows = [FolderTokenizer(folder).encode(prompt) for prompt in PROMPTS]
    found = [None] * len(rows)

    def whole(index):
        found[index] = ask(client, rows[index]).choices[0].text

    others = [threading.Thread(target=whole, args=(index,)) for index in range(1, len(rows))]
    pieces = []
    for piece in ask(client, rows[0], stream=True):
        pieces.append(piece.choices[0].text)
        if len(pieces) == 1:
            for other in others:
                other.start()
    for other in others:
        other.join()
    found[0] = "".join(pieces)
    return found, len(pieces)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(("--set=parallel.tp=2",), id="tp"),
        pytest.param(("--set=parallel.pp=2",), id="pp", marks=pytest.mark.long),
        pytest.param(("--host=127.0.0.2", "--max-length=110"), id="one"),
    ],
)
def test_a_client_streams_while_four_others_ask_and_all_get_the_text_of_generate(folder, generated, plan):
    with served(folder, *plan) as (process, address), client_of(address) as client:
        found, num_pieces = texts_of_five(client, folder)
        assert found == [row["text"] for row in generated]
        assert num_pieces > 3
        with pytest.raises(openai.BadRequestError, match="110" if "--max-length=110" in plan else str(SEQ)):
            ask(client, "def", max_tokens=SEQ + 1)
        begun, told = threading.Event(), []

        def stream():
            for piece in ask(client, "def", stream=True, max_tokens=100):
                told.append(piece.choices[0])
                begun.set()

        last = threading.Thread(target=stream)
        last.start()
        assert begun.wait(20)
        process.send_signal(signal.SIGTERM)
        last.join(30)
        assert told[-1].finish_reason in {"stop", "length"}  # an answer under way is completed
        assert process.wait(40) == 0
        if plan[0].startswith("--set"):
            assert "SIGTERM: no more requests are taken, and those under way have 30 s" in process.stdout.read()


def workers(process):
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if parent_of(int(path.name)) == process.pid]


@pytest.mark.slow
def test_a_killed_rank_ends_the_server_with_a_word_and_the_client_s_stream_with_an_error(folder):
    with served(folder, "--set=parallel.tp=2") as (process, address), client_of(address) as client:
        second = next(pid for pid in workers(process) if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(second, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(openai.APIError):
            ask(client, "def", max_tokens=100)
        assert process.wait(40) == 128 + signal.SIGKILL
        assert time.monotonic() - begun < 40
        assert re.search(r"rank 1 \(pid \d+\) killed by SIGKILL", process.stdout.read())


def test_what_can_be_known_beforehand_is_refused_before_any_process_starts(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shardwise.spec.bound._WORK_S", 1.0)
    endless = tmp_path / "endless.jinja"
    endless.write_text("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    for arguments, message in [
        ([str(folder), "--nproc=2"], "2 processes hold 2 copies of the model under tp=1 and pp=1"),
        ([str(folder), "--host=192.0.2.1"], "cannot listen on 192.0.2.1:8000"),
        ([str(folder), "--chat-template=nothing.jinja"], "chat template nothing.jinja: "),
        ([str(folder), f"--chat-template={endless}"], "of one letter it makes no text: it takes more than 1 s"),
        ([str(folder), "--max-length=129"], "the model has 128 positions"),
        ([str(folder), "--average"], "a Hugging Face folder holds no averaged weights"),
        ([str(folder), "--set=optimizer.lr=1"], "Set fields of parallel only"),
    ]:
        assert main(["serve", *arguments]) == 78, arguments
        assert message in capsys.readouterr().err
    assert main(["serve", str(tmp_path)]) == 65
