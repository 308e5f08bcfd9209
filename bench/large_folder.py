"""A folder with a Llama of 325 million parameters that no rank ever holds whole: loaded, trained and exported.

A temporary folder gets the model with random weights, in fp32 and in bf16, in files that are made one after the other
(about 210 MB each), and a small tokenizer. Ranks hold fp32 either way. Four processes with one thread each then

- load it under zero3, train three steps (AdamW, one sequence of 32 tokens per rank) and write it with ``sw.export``;
- load it in torch's three ways into FSDP2: ``from_pretrained`` on every rank and ``fully_shard``; ``from_pretrained``
  on rank 0 and ``set_model_state_dict(broadcast_from_rank0=True)``; DCP's ``HuggingFaceStorageReader``.

Memory is what is resident above what was resident once everything was imported and a tiny folder had been loaded the
same way; every way has processes of its own. Pages of mapped files are told apart, since ranks share them. Times are
taken in one run, the ways in turns, with the files in the page cache. Last, ``shardwise train`` and ``shardwise
export`` do the same from a configuration, and once more with the tiny folder, whose peaks are subtracted.

    python -m bench.large_folder [--parts memory time verbs] [--rounds 3] [--layers 24] [--folder DIR]

Needs the extra shardwise[hf], 10 GB of memory and 10 GB of disk.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

WORLD, STEPS, SEQ_LEN = 4, 3, 32
LAYERS_PER_FILE = 4
SIZES = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
    "num_key_value_heads": 16, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {**SIZES, "hidden_size": 64, "intermediate_size": 128}
OURS = "shardwise"
WHOLE = "FSDP2, from_pretrained on every rank"
SENT = "FSDP2, from_pretrained on rank 0, broadcast"
READER = "FSDP2, DCP HuggingFaceStorageReader"
#: Dtypes of the weights in the files; ranks hold fp32 in any case. The last is trained.
STORED = ("bf16", "fp32")
MB = 1e6


# -- the folder


def make_folder(folder: Path, sizes: dict[str, Any], num_layers: int, dtype: str = "float32") -> int:
    """Random weights, one file at a time, and a tokenizer of bytes; returns the number of parameters."""
    import tokenizers
    import torch
    import transformers as hf
    from safetensors.torch import save_file

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({each: index for index, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = hf.LlamaConfig(**sizes, num_hidden_layers=num_layers, dtype=dtype, bos_token_id=0, eos_token_id=1)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in hf.LlamaForCausalLM(config).state_dict().items()}
    files: dict[int, list[str]] = {}
    for name in shapes:
        parts = name.split(".")
        files.setdefault(int(parts[2]) // LAYERS_PER_FILE + 1 if parts[1] == "layers" else 0, []).append(name)
    generator, weight_map = torch.Generator().manual_seed(0), {}
    for number, names in files.items():
        file_name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        drawn = {name: torch.randn(shapes[name], generator=generator) * 0.02 for name in names}
        save_file(
            {name: (1 + value if value.dim() == 1 else value).to(config.dtype) for name, value in drawn.items()},
            folder / file_name,
            {"format": "pt"},
        )
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    return sum(math.prod(shape) for shape in shapes.values())


# -- ways to load it, on the ranks


def load_ours(folder: Path) -> Any:
    import shardwise as sw

    policy = sw.PrecisionPolicy("bf16", master_dtype="fp32") if folder.name == "bf16" else None
    return sw.from_pretrained(folder, sw.ParallelPlan(strategy="zero3", mp_policy=policy))


def _sharded(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=mesh)
    return model


def load_whole(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return _sharded(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def _on_meta(folder: Path) -> Any:
    """The model in shards without values, but for the buffers that no file holds."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model = _sharded(model)
    model.to_empty(device="cpu")
    rotary = model.model.rotary_emb
    rotary.__init__(model.config)
    return model


def load_sent(folder: Path) -> Any:
    import torch
    from torch import distributed
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from transformers import AutoModelForCausalLM

    state = {}
    if distributed.get_rank() == 0:
        state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    model = _on_meta(folder)
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


def load_by_reader(folder: Path) -> Any:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    model = _on_meta(folder)
    state = model.state_dict()
    checkpoint.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    return model


WAYS: dict[str, Callable[[Path], Any]] = {
    OURS: load_ours,
    WHOLE: load_whole,
    SENT: load_sent,
    READER: load_by_reader,
}


# -- resident memory


def status_bytes(*names: str, process: int | str = "self") -> int:
    """The sum of fields of a process's status file."""
    text = Path(f"/proc/{process}/status").read_text("utf-8")
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return sum(1024 * int(fields[name].split()[0]) for name in names)


class Peak:
    """The most memory of this process inside ``with``, above what it had before.

    Attributes:
        resident_bytes: By the kernel's own count; pages of mapped files are in it, which several ranks share.
        own_bytes: Without mapped files; read every 5 ms, so that a shorter peak may be missed.
        left_bytes: Without mapped files, at the end.
    """

    def __enter__(self) -> Self:
        settle()
        self._start = status_bytes("VmRSS"), status_bytes("RssAnon", "RssShmem")
        Path("/proc/self/clear_refs").write_text("5", "utf-8")  # the kernel's peak begins anew
        self._own, self._ends = 0, threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()
        return self

    def _follow(self) -> None:
        while not self._ends.wait(0.005):
            self._own = max(self._own, status_bytes("RssAnon", "RssShmem"))

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self.resident_bytes = status_bytes("VmHWM") - self._start[0]
        self.own_bytes = max(self._own, status_bytes("RssAnon", "RssShmem")) - self._start[1]
        settle()
        self.left_bytes = status_bytes("RssAnon", "RssShmem") - self._start[1]

    def as_dict(self) -> dict[str, int]:
        return {"resident": self.resident_bytes, "own": self.own_bytes, "left": self.left_bytes}


def settle() -> None:
    """Give freed memory back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


# -- on the ranks


def work_memory(folder: Path, way: str) -> dict[str, Any]:
    """Peaks of one way to load, and for ours of training and of the export."""
    found: dict[str, Any] = {}
    WAYS[way](folder / "tiny")  # imports what is imported late
    model = None
    for stored in STORED:
        del model
        with Peak() as peak:
            model = WAYS[way](folder / stored)
        found |= {stored: peak.as_dict(), f"{stored} is same": _is_same(_whole(model), folder / stored)}
    return found | _train_and_export(folder, model) if way == OURS else found


def _whole(model: Any) -> dict[str, Any]:
    """All parameters, on rank 0 at least."""
    import shardwise as sw

    if hasattr(next(model.parameters()), "full_tensor"):
        return {name: value.full_tensor() for name, value in model.named_parameters()}
    return sw.full_state_dict(model)


def _train_and_export(folder: Path, model: Any) -> dict[str, Any]:
    import torch
    from torch import distributed

    import shardwise as sw
    from shardwise.engine.storage.attachment import engine_of

    units: dict[str, int] = {}
    owned = 0
    for group in engine_of(model, "bench").groups:
        size = group.compute_dtype.itemsize
        units[group.unit.name] = units.get(group.unit.name, 0) + size * group.layout.numel
        owned += size * group.master_numel
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-4), []
    generator = torch.Generator().manual_seed(distributed.get_rank())
    start = time.perf_counter()
    with Peak() as train:
        for _ in range(STEPS):
            ids = torch.randint(SIZES["vocab_size"], (1, SEQ_LEN), generator=generator)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    train_s = time.perf_counter() - start
    for name in ("tiny-exported", "exported"):
        if distributed.get_rank() == 0:
            shutil.rmtree(folder / name, ignore_errors=True)
    distributed.barrier()
    sw.export(folder / "tiny-exported", load_ours(folder / "tiny"), folder / "tiny")  # imports what is imported late
    distributed.barrier()
    with Peak() as export:
        start = time.perf_counter()
        sw.export(folder / "exported", model, folder / "fp32", max_shard_bytes=5e8)
        export_s = time.perf_counter() - start
    full = sw.full_state_dict(model)
    found = {"train": train.as_dict(), "export": export.as_dict(), "units": units, "owned": owned, "losses": losses}
    found |= {"train_s": train_s, "export_s": export_s}
    if full:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        exported = AutoModelForCausalLM.from_pretrained(folder / "exported").state_dict()
        AutoTokenizer.from_pretrained(folder / "exported")
        found["is_same"] = exported.keys() == full.keys() and all(map(torch.equal, exported.values(), full.values()))
        found["has_moved"] = not _is_same(full, folder / "fp32")
    return found


def _is_same(state: dict[str, Any], folder: Path) -> bool:
    """Whether tensors are those of a folder's files, bit by bit; a rank that has none says so, too."""
    import torch
    from safetensors.torch import safe_open

    index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    if not state:
        return True
    for file_name in sorted(set(index.values())):
        with safe_open(folder / file_name, "pt") as file:
            if not all(torch.equal(file.get_tensor(name).float(), state[name]) for name in file.keys()):  # noqa: SIM118
                return False
    return state.keys() == index.keys()


def work_time(folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds of every way, in turns, once each has imported what it imports late."""
    from torch import distributed

    found: dict[str, dict[str, list[float]]] = {stored: {way: [] for way in WAYS} for stored in STORED}
    for load in WAYS.values():
        load(folder / "tiny")
    for _ in range(rounds):
        for stored, times in found.items():
            for way, load in WAYS.items():
                settle()
                distributed.barrier()
                start = time.perf_counter()
                model = load(folder / stored)
                distributed.barrier()
                times[way].append(time.perf_counter() - start)
                del model
    return found


def work(folder: Path, part: str, rounds: int) -> None:
    """Take part as a rank; what it found goes to a file."""
    import torch
    from torch import distributed

    import shardwise.api.parallelize  # noqa: F401

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    _use_late_code()
    found = work_time(folder, rounds) if part == "time" else work_memory(folder, part)
    (folder / f"found-{distributed.get_rank()}.json").write_text(json.dumps(found), "utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


def _use_late_code() -> None:
    """Train a few numbers: kernels' libraries and the optimizer's imports come at first use."""
    import torch

    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters())
    torch.nn.functional.cross_entropy(layer(torch.ones(2, 8)), torch.zeros(2, 8)).backward()
    optimizer.step()


# -- outside


def launch(folder: Path, part: str, rounds: int) -> list[dict[str, Any]]:
    """Run :func:`work` on all ranks; returns what each found."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORLD}", f"--master-port={port}"]
    command += ["-m", "bench.large_folder", "--work", str(folder), "--as", part, "--rounds", str(rounds)]
    subprocess.run(command, check=True, env=_environment(), timeout=600)
    return [json.loads((folder / f"found-{rank}.json").read_text("utf-8")) for rank in range(WORLD)]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def report_memory(folder: Path, numel: int) -> None:
    """Print the peaks of all ways."""
    found = {way: launch(folder, way, 0) for way in WAYS}
    ours = found[OURS]
    model_bytes, largest = 4 * numel, max(ours[0]["units"].values())
    print(f"\n{numel:,} parameters in fp32: {model_bytes / MB:.0f} MB; with gradients and AdamW's state"
          f" {4 * model_bytes / MB:.0f} MB, a rank's share {model_bytes / MB:.0f} MB.")  # fmt: skip
    print(f"A rank owns {ours[0]['owned'] / MB:.0f} MB of parameters; the largest unit has {largest / MB:.1f} MB.")
    print(f"Losses of rank 0: {', '.join(f'{loss:.3f}' for loss in ours[0]['losses'])};"
          f" {ours[0]['train_s']:.0f} s of training, {ours[0]['export_s']:.1f} s of export.")  # fmt: skip
    verdict = "equal to sw.full_state_dict bit by bit" if ours[0]["is_same"] else "NOT EQUAL to sw.full_state_dict"
    print(f"The exported folder, loaded by transformers: {verdict}; moved from the start: {ours[0]['has_moved']}.\n")
    print("| peak of a rank, MB above before the phase | " + " | ".join(f"rank {rank}" for rank in range(WORLD)) + " |")
    print("|---" * (1 + WORLD) + "|")
    for stored in STORED:
        for way in WAYS:
            is_same = all(rank[f"{stored} is same"] for rank in found[way])
            _print_row(f"load {stored}: {way}{'' if is_same else ' (WRONG VALUES)'}", [r[stored] for r in found[way]])
    for phase in ("train", "export"):
        _print_row(f"{phase}: {OURS}", [rank[phase] for rank in ours])


def _print_row(title: str, ranks: list[dict[str, int]]) -> None:
    cells = [f"{rank['own'] / MB:.0f} ({rank['resident'] / MB:.0f}), then {rank['left'] / MB:.0f}" for rank in ranks]
    print(f"| {title} | {' | '.join(cells)} |", flush=True)


def report_time(folder: Path, rounds: int) -> None:
    """Print the times of all ways."""
    times = launch(folder, "time", rounds)[0]
    print("\n| files | way | seconds, median | each round | over ours |\n|---|---|---|---|---|")
    for stored, by_way in times.items():
        for way, each in by_way.items():
            ratio = statistics.median(theirs / ours for theirs, ours in zip(each, by_way[OURS], strict=True))
            shown = ", ".join(f"{seconds:.2f}" for seconds in each)
            print(f"| {stored} | {way} | {statistics.median(each):.2f} | {shown} | {ratio:.2f} |")


CONFIG = """
model: {{hf: {folder}}}
data: {{source: stdlib, max_bytes: 100000, seq_len: 32}}
train: {{steps: 2, micro_batch_size: 1, eval_every: null}}
parallel: {{strategy: zero3}}
log: {{tensorboard: false}}
"""


class Follower:
    """The most memory that was resident in the processes below this one, by what ``name_of`` calls them."""

    def __init__(self, mark: str) -> None:
        self.peaks: dict[str, int] = {}
        self._mark, self._ends = mark, threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        while not self._ends.wait(0.1):
            for entry in Path("/proc").iterdir():
                if entry.name.isdecimal():
                    with contextlib.suppress(OSError, KeyError):  # it has ended
                        self._see(entry)

    def _see(self, entry: Path) -> None:
        environ = (entry / "environ").read_bytes()
        if f"BENCH_LARGE_FOLDER={self._mark}".encode() not in environ:
            return
        rank = next((each[5:].decode() for each in environ.split(b"\0") if each.startswith(b"RANK=")), "launcher")
        peak = status_bytes("VmHWM", process=entry.name)
        self.peaks[rank] = max(self.peaks.get(rank, 0), peak)

    def stop(self) -> dict[str, int]:
        self._ends.set()
        self._thread.join()
        return dict(sorted(self.peaks.items()))


def report_verbs(folder: Path) -> None:
    """Print the peaks of the verbs, beside those for the tiny folder."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for name in ("tiny", "fp32"):
        config, run = folder / f"{name}.yaml", folder / f"run-{name}"
        config.write_text(CONFIG.format(folder=folder / name), "utf-8")
        verbs = {
            "train": ["train", str(config), "--nproc", str(WORLD), "--run-dir", str(run)],
            "export": ["export", str(run), str(folder / f"out-{name}")],
        }
        for verb, words in verbs.items():
            mark = f"{name}-{verb}-{os.getpid()}"
            process = subprocess.Popen(
                [sys.executable, "-m", "shardwise", *words],
                env=_environment() | {"BENCH_LARGE_FOLDER": mark},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            follower, start = Follower(mark), time.perf_counter()
            said, _ = process.communicate()
            found.setdefault(verb, {})[name] = follower.stop()
            if process.returncode or name == "fp32":
                print(said, f"({verb}: {time.perf_counter() - start:.0f} s)", flush=True)
            if process.returncode:
                sys.exit(f"shardwise {verb} ended with {process.returncode}")
        shutil.rmtree(run)
        shutil.rmtree(folder / f"out-{name}")
    print("\n| verb | process | peak, MB above that with the tiny folder |\n|---|---|---|")
    for verb, each in found.items():
        for process, peak in each["fp32"].items():
            title = f"rank {process}" if process.isdecimal() else "the verb's own process"
            print(f"| {verb} | {title} | {(peak - each['tiny'][process]) / MB:.0f} of {peak / MB:.0f} |")


@contextlib.contextmanager
def folders(kept: Path | None, num_layers: int) -> Iterator[tuple[Path, int]]:
    """A folder with the models, and the number of parameters; it is removed unless it is to be kept."""
    with contextlib.nullcontext(kept) if kept else tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not (folder / "numel.json").is_file():
            make_folder(folder / "tiny", TINY, 2)
            make_folder(folder / "bf16", SIZES, num_layers, "bfloat16")
            numel = make_folder(folder / "fp32", SIZES, num_layers)
            (folder / "numel.json").write_text(json.dumps(numel), "utf-8")
        yield folder, json.loads((folder / "numel.json").read_text("utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["memory", "time", "verbs"], default=["memory", "time", "verbs"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--folder", type=Path, help="keep the models here, and use those that are here")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--as", dest="part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.part, given.rounds)
        return
    with folders(given.folder, given.layers) as (folder, numel):
        if "memory" in given.parts:
            report_memory(folder, numel)
        if "time" in given.parts:
            report_time(folder, given.rounds)
        if "verbs" in given.parts:
            report_verbs(folder)


if __name__ == "__main__":
    main()
