"""Train a model on text, then fine-tune it on conversations, all of it or a LoRA, with `shardwise train`.

    python examples/finetune_chat.py [--lora] [--nproc 8] [--strategy ddp] [--model FOLDER] [--text FILE] [--chats FILE]

FOLDER is a Hugging Face folder with a causal language model and its tokenizer; without one a small Llama is made and
trained for some seconds. The FILE of chats has JSON lines, {"messages": [{"role": "user", "content": ...}, ...]}.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(folder: Path) -> Path:
    """Write a small Llama with random weights, and a tokenizer of words and marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    held = Tokenizer(models.BPE())
    held.pre_tokenizer, held.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    held.train_from_iterator([text(), *(m["content"] for c in chats() for m in c["messages"])], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=held, eos_token=marks[0])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=400, max_position_embeddings=128, **shape)).save_pretrained(folder)
    return folder


def text() -> str:
    return "".join(f"After {a} comes {b}. Before {b} comes {a}.\n" for a, b in itertools.pairwise(WORDS)) * 100


def chats() -> list[dict]:
    pairs = list(itertools.pairwise(WORDS))
    asked = [(f"What comes after {a}?", b) for a, b in pairs] + [(f"What comes before {b}?", a) for a, b in pairs]
    return [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": f"It is {answer}."}]}
        for ask, answer in asked * 8
    ]


def shardwise(*words: object) -> str:
    """Run a verb, and print and return its output."""
    print("$ shardwise", *words, flush=True)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "shardwise", *map(str, words)], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def train(name: str, folder: Path, model: Path, options: argparse.Namespace, **sections: dict) -> Path:
    """Train some steps and return the folder of the run."""
    config = {
        "name": name,
        "model": {"hf": str(model)},
        "parallel": {"strategy": options.strategy},
        "train": {
            "steps": options.steps,
            "global_batch_size": 8,
            "micro_batch_size": 8 // (options.nproc or torch.cuda.device_count() or 2),
            "eval_every": None,
        },
        "log": {"every": 20},
        **sections,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    run = folder / f"run-{name}"
    processes = [] if options.nproc is None else ["--nproc", options.nproc]
    print(shardwise("train", path, *processes, "--run-dir", run).rstrip().rpartition("\n")[2])
    return run


def answer(what: Path, question: str, model: Path) -> str:
    from transformers import AutoTokenizer

    asked = [{"role": "user", "content": question}]
    prompt = AutoTokenizer.from_pretrained(model).apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    said = shardwise("generate", what, "--prompt", prompt, "--max-new-tokens", 12, "--temperature", 0)
    return said.strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lora", action="store_true", help="fine-tune adapters of rank 16 alone")
    parser.add_argument("--nproc", type=int, help="processes; by default one a GPU, or 2 on CPU")
    parser.add_argument("--strategy", default="zero3")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--chats", type=Path)
    parser.add_argument("--question", default="What comes after seven?")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        model = options.model or make_model(folder / "model")
        corpus, talks = options.text or folder / "corpus.txt", options.chats or folder / "chats.jsonl"
        if options.text is None:
            corpus.write_text(text())
        if options.chats is None:
            talks.write_text("".join(json.dumps(row) + "\n" for row in chats()))
        data = {"source": str(corpus), "seq_len": 64}
        run = train("pretrain", folder, model, options, data=data, optimizer={"lr": 3e-3})
        shardwise("export", run, folder / "pretrained")
        base = folder / "pretrained"
        tuned = {"data": {"source": str(talks), "seq_len": 64}, "optimizer": {"lr": 1e-2 if options.lora else 3e-3}}
        tuned |= {"lora": {"rank": 16}} if options.lora else {}
        run = train("chat", folder, base, options, **tuned)
        shardwise("export", run, folder / "chat", *(["--merge"] if options.lora else []))
        print("before:", answer(base, options.question, model))
        print("after: ", answer(folder / "chat", options.question, model))


if __name__ == "__main__":
    main()
