"""Train one small model of every architecture of transformers beside one process: ``bench/results/architectures.md``.

    python -m bench.architectures [--only MODEL_TYPE]...

Nothing is written for a single architecture: a model is what its class makes of its own default configuration, with
every size replaced by a small one. What then cannot be built, or does not run in one plain process, is listed as such.
Takes about half an hour on two cores. With ``--only`` the lines are printed, not written.
"""

from __future__ import annotations

import argparse
import collections
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.testing import RankFailure, run_on_ranks
from tests.common.families import numbers
from tests.common.oracle import compare_each

TARGET = Path("bench/results/architectures.md")
KINDS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "causal language models",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "encoders with decoders",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "masked language models",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "image classifiers",
}
PLANS: dict[str, dict[str, Any]] = {"zero3": {}, "selective": {"activation_checkpointing": "selective"}}
STEPS = 3
VOCAB = 97
MOST_PARAMETERS = 30_000_000

#: Names of sizes in configurations, by the small value that they get.
SIZES = {
    VOCAB: "vocab_size vocab_size_per_layer_input",
    64: "max_position_embeddings n_positions max_source_positions max_target_positions",
    40: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner d_inner",
    32: "hidden_size d_model n_embd dim emb_dim embedding_size word_embed_proj_dim d_embed lru_width image_size",
    24: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    16: "q_lora_rank kv_lora_rank qk_head_dim bottleneck_size mamba_d_head mamba_head_dim index_head_dim",
    8: "d_kv d_head head_dim attention_head_size qk_rope_head_dim qk_nope_head_dim v_head_dim patch_size num_buckets"
    " rotary_dim hidden_size_per_layer_input mamba_d_state state_size ssm_state_size",
    5: "num_labels",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts"
    " num_local_experts n_routed_experts moe_num_experts sliding_window attention_window num_codebooks conv_kernel"
    " chunk_size mamba_chunk_size time_step_rank mamba_n_heads mamba_num_heads index_n_heads index_topk",
    3: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers"
    " num_encoder_layers eos_token_id sep_token_id",
    2: "num_key_value_heads num_experts_per_tok moe_topk moe_k bos_token_id cls_token_id decoder_start_token_id expand",
    1: "n_group topk_group first_k_dense_replace n_groups mamba_n_groups pad_token_id",
    0: "num_kv_shared_layers",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}


def architectures() -> Iterator[tuple[str, str, str]]:
    """Kind, model type and class of each."""
    from transformers.models.auto import modeling_auto

    for mapping, kind in KINDS.items():
        seen: set[str] = set()
        for model_type, names in getattr(modeling_auto, mapping).items():
            name = names if isinstance(names, str) else names[0]
            if name not in seen:
                seen.add(name)
                yield kind, model_type, name


def build(name: str) -> nn.Module:
    """A small model of the class, with the same weights each time."""
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, name)
    config = cls.config_class()
    _shrink(config)
    return cls(config).train()


def _shrink(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if hasattr(value, "model_type"):  # the configuration of a part
            _shrink(value)
        elif name in SMALL and (type(value) is int or name == "pad_token_id"):
            setattr(config, name, SMALL[name])
        elif name in {"layer_types", "mlp_layer_types"} and isinstance(value, list):
            setattr(config, name, [*dict.fromkeys(value), *value][:3])
    if getattr(config, "kv_lora_rank", None):
        config.num_key_value_heads, config.head_dim = 4, 8
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = SMALL["decoder_start_token_id"]
    if hasattr(config, "use_cache"):
        config.use_cache = False


def loss(kind: str, model: nn.Module, rank: int, step: int) -> Tensor:
    """Of the model on a rank's samples of a step."""
    ids, labels = (
        torch.randint(5, VOCAB, (2, 8), generator=torch.Generator().manual_seed(1000 * salt + 10 * step + rank))
        for salt in range(2)
    )
    if kind == "image classifiers":
        return model(pixel_values=numbers(rank, step, 2, 3, 32, 32), labels=labels[:, 0] % 2).loss
    output = model(input_ids=ids, labels=labels)
    found = output.loss if output.loss is not None else output.logits.float().pow(2).mean()
    return found.mean()


def train(kind: str, name: str, plan: dict[str, Any]) -> None:
    """On a rank: train it beside one plain process, to the last bit."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    compare_each(functools.partial(build, name), functools.partial(loss, kind), ["zero3"], steps=STEPS, **plan)


def outcome(kind: str, name: str, plan: str) -> str:
    """``bitwise``, or what happened in place of it."""
    try:
        model = build(name)
        if sum(parameter.numel() for parameter in model.parameters()) > MOST_PARAMETERS:
            return "not run: a size has another name"
        loss(kind, model, 0, 0).backward()
    except Exception as error:  # noqa: BLE001 - whatever a class of others raises
        return f"not run: one process raises {type(error).__name__}"
    try:
        run_on_ranks(train, 2, kind, name, PLANS[plan], timeout_s=120.0)
    except RankFailure as failure:
        return failure.causes[failure.rank].splitlines()[0].partition(" {")[0].replace("|", "/")[:300]
    return "bitwise"


INTRO = """\
# Architectures

One small model of each architecture of transformers {version}, built by its class from its default configuration with
every size replaced by a small one, trained for {steps} steps of AdamW on two ranks under `zero3` beside one plain
process. **Bitwise**: no loss, gradient, parameter or optimizer state differed in any bit. `selective` is `zero3` with
`activation_checkpointing="selective"`. Nothing is written for a single architecture, so some do not run at these
sizes, in one process either. XLM and Flaubert keep keys and values in training, which a recomputed module is not given:
their attention then adds up in another order. Made by `python -m bench.architectures`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="this model type only; may be repeated")
    only = parser.parse_args().only
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for kind, model_type, name in architectures():
        for plan in PLANS if only is None or model_type in only else ():
            result = outcome(kind, name, plan)
            print(f"{name}, {plan}: {result}", file=sys.stderr, flush=True)
            found.setdefault((kind, plan), collections.defaultdict(list))[result].append(name)
    lines = ["| models | plan | bitwise | otherwise | not run |", "|---|---|---|---|---|"]
    details = ["", "## Otherwise, and not run", ""]
    for (kind, plan), results in found.items():
        skipped = {result: names for result, names in results.items() if result.startswith("not run")}
        others = {result: names for result, names in results.items() if result not in {"bitwise", *skipped}}
        counts = [sum(map(len, each.values())) for each in (others, skipped)]
        lines.append(f"| {kind} | {plan} | {len(results['bitwise'])} | {counts[0]} | {counts[1]} |")
        shown = others if plan != "zero3" else others | skipped
        details += [f"- {kind}, {plan}: {', '.join(f'`{name}`' for name in names)}: {r}" for r, names in shown.items()]
    text = "\n".join([INTRO.format(version=metadata.version("transformers"), steps=STEPS), *lines, *details]) + "\n"
    print(text) if only else TARGET.write_text(text)


if __name__ == "__main__":
    main()
