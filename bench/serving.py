"""Measure `shardwise serve`: latency and throughput of one process, tp=2 and pp=2 with 1, 8 and 32 requests at a time.

One small Llama with random weights is saved to a folder. For each layout in turn a server is started, as a user would,
and asked over HTTP: every request is a stream of its own, all of a round begin together, and prompts differ in length.
Of each stream the client notes when every token came. Greedy tokens of all layouts are compared. Writes
``bench/results/DATE-serving.md``, where that is there already with -2, -3, ... behind the name.

    python -m bench.serving [--rounds 3] [--tokens 32] [--requests 1 8 32] [--out bench/results]

Needs the extras shardwise[serve,hf]. Takes about five minutes on two cores; nothing else should run meanwhile. The
clients are threads of this process, and take processor time from the servers where there are few cores.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import http.client
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.files import free_stem
from bench.generation import SIZES, save_model

ONE = "one process"
#: Arguments of the server, by layout.
LAYOUTS = {ONE: [], "tp=2": ["--set=parallel.tp=2"], "pp=2": ["--set=parallel.pp=2"]}
#: Tokens of the prompts, in turn.
LENGTHS = (16, 48, 24, 96)
_ADDRESS = re.compile(r"serving bench at http://127\.0\.0\.1:(\d+)/v1")


@dataclass(frozen=True)
class Stream:
    """One answer: its text, and when its tokens came after the round had begun."""

    text: str
    times_s: list[float]


def save_words(folder: Path) -> None:
    """A tokenizer with a word for each id, so that every token is a piece of text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(SIZES["vocab_size"])}, unk_token="w0"))  # noqa: S106 - no password
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


@contextlib.contextmanager
def served(folder: Path, arguments: Sequence[str]) -> Iterator[int]:
    """A server; its port."""
    command = [sys.executable, "-m", "shardwise", "serve", str(folder), "--name=bench", "--port=0", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        port = next((int(found[1]) for line in process.stdout if (found := _ADDRESS.search(line))), None)
        if port is None:
            raise SystemExit(f"{' '.join(command)} ended with code {process.wait()}")
        yield port
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def ask(port: int, prompt: Sequence[int], num_tokens: int, begins: threading.Barrier, found: list[Stream]) -> None:
    """Stream one answer."""
    body = {"model": "bench", "prompt": [*prompt], "max_tokens": num_tokens, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.connect()
    begins.wait()
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text, times = "", []
    for line in answer:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter() - start)
            text += json.loads(line[6:])["choices"][0]["text"]
    connection.close()
    assert answer.status == 200
    found.append(Stream(text, times))


def one_round(port: int, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, list[Stream]]:
    """Ask for all prompts at a time: how long that took, and the answers by text."""
    found: list[Stream] = []
    begins = threading.Barrier(len(prompts) + 1)
    clients = [threading.Thread(target=ask, args=(port, prompt, num_tokens, begins, found)) for prompt in prompts]
    for client in clients:
        client.start()
    begins.wait()
    start = time.perf_counter()
    for client in clients:
        client.join()
    took_s = time.perf_counter() - start
    if len(found) < len(prompts):
        raise SystemExit(f"{len(prompts) - len(found)} of {len(prompts)} requests failed")
    return took_s, found


def row(name: str, rounds: Sequence[tuple[float, list[Stream]]], num_tokens: int) -> str:
    """A line of the table: medians over all streams of all rounds."""
    streams = [stream for _, found in rounds for stream in found]
    first = statistics.median(stream.times_s[0] for stream in streams)
    latest = max(stream.times_s[0] for stream in streams)
    further = statistics.median(
        after - before for stream in streams for before, after in itertools.pairwise(stream.times_s)
    )
    rate = statistics.median(len(found) * num_tokens / took_s for took_s, found in rounds)
    count = len(rounds[0][1])
    return f"| {name} | {count} | {1e3 * first:.0f} | {1e3 * latest:.0f} | {1e3 * further:.1f} | {rate:.0f} |"


def measure(folder: Path, num_rounds: int, num_tokens: int, counts: Sequence[int]) -> list[str]:
    """The lines of the table, and of what the layouts say."""
    draws = random.Random(1)  # noqa: S311 - not a secret
    prompts = [
        [draws.randrange(SIZES["vocab_size"]) for _ in range(LENGTHS[index % len(LENGTHS)])]
        for index in range(max(counts))
    ]
    lines = [
        "| layout | requests at a time | first token, ms | latest first token, ms | each further one, ms | tokens/s |",
        "|---" * 6 + "|",
    ]
    said: dict[str, list[list[str]]] = {}
    for name, arguments in LAYOUTS.items():
        with served(folder, arguments) as port:
            for count in counts:
                one_round(port, prompts[:count], num_tokens)  # the first one prepares what later ones find
                rounds = [one_round(port, prompts[:count], num_tokens) for _ in range(num_rounds)]
                said.setdefault(name, []).extend(sorted(stream.text for stream in found) for _, found in rounds)
                lines.append(row(name, rounds, num_tokens))
                print(lines[-1], flush=True)
    is_same = all(texts == said[ONE] for texts in said.values())
    return [*lines, "", f"Greedy texts of all layouts: {'those of one process' if is_same else 'DIFFER'}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each request")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="at a time")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        save_words(folder)
        lines = measure(folder, given.rounds, given.tokens, given.requests)
    sizes = ", ".join(f"{key} {value}" for key, value in SIZES.items())
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    words = f"--rounds {given.rounds} --tokens {given.tokens} --requests {' '.join(map(str, given.requests))}"
    head = [
        f"# Serving, {today}",
        "",
        f"`python -m bench.serving {words}` on {os.cpu_count()} cores, one thread per process, fp32.",
        f"Llama ({sizes}), random weights; prompts of {', '.join(map(str, LENGTHS))} tokens in turn,",
        f"{given.tokens} new ones each, all streamed. Medians over all requests of all rounds;",
        "the clients are threads of one further process.",
        "",
    ]
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{free_stem(given.out, f'{today}-serving')}.md"
    path.write_text("\n".join([*head, *lines, ""]), "utf-8")
    print(f"{lines[-1]}\nwritten: {path}")


if __name__ == "__main__":
    main()
