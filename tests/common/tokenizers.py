"""Small tokenizers and models of Hugging Face's kinds, made on the spot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Lines of code and of prose, indented and not, with letters of more than one byte.
TEXT = "".join(
    f"def number_{i}(x):\n    return x + {i}\n\n\nOne hundred and {i} naïve lines, \t tabs\n  and more  \n"
    for i in range(60)
)


#: How many chat models write a conversation; answers are not marked.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: The same, with marks around what the assistant says.
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>\n"
    "{% endgeneration %}{% else %}{{ m.content }}<end>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tokenizer(folder: Path, *, vocab_size: int = 300, template: str | None = None, **marks: str) -> Path:
    """A byte-level BPE of ``vocab_size`` ids, trained on :data:`TEXT`, with a chat template where one is given.

    ``marks`` are more special tokens, such as ``mask_token="<mask>"``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    held = Tokenizer(models.BPE())
    held.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    held.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<end>", *marks.values()], initial_alphabet=alphabet
    )
    held.train_from_iterator([TEXT], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=held, eos_token="<end>", **marks)
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    return folder


def save_model(folder: Path, *, vocab_size: int, seq_len: int = 64, num_layers: int = 2) -> Path:
    """A small Llama with drawn weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=seq_len,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def ids_of(source: Any, tokenizer: Any) -> Iterator[Any]:
    """The ids of text, document by document or in parts."""
    from shardwise.train.data.examples import Texts, read_examples

    return (example.ids for example in read_examples(source, Texts(tokenizer, None)))
