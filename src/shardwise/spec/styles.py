"""Styles by name pattern that say how tensor parallelism cuts a model's modules, as plain data.

==================================  =================================================================================
style                               what it does to the module or parameter at a pattern
==================================  =================================================================================
``colwise``                         linear layer, output features divided over the ranks
``packed_colwise[:N]``              N fused linear layers of equal size (default 2), output features of each divided
``colwise_heads``                   projection to heads of the enclosing module's ``head_dim``: full heads on each rank
``colwise_kv_heads``                the same for keys or values; if ranks outnumber heads, several ranks have each head
``colwise_gather_output``           linear layer, outputs divided as evenly as possible, then gathered on every rank
``rowwise``                         linear layer, input features divided; outputs are summed, then the bias is added
``rowwise_split_input``             the same if every rank has all features of the input
``embedding_rowwise``               embedding, ids divided as evenly as possible
``divide:NAME[,NAME]``              attributes of the module, such as a number of heads, divided by the number of ranks
``embedding_heads``                 embedding of one number per head, features divided; the output stays divided
``replicated_with_grad_allreduce``  replicated module that sees only a part of the data: its gradients are summed
``moe_tp_experts``                  experts with divided stacked weights: reads all inputs, sums the outputs
``mixture``                         our mixture of cut experts: the outputs of all experts are summed at once
``vocabulary_head``                 as ``colwise_gather_output``; with labels, logits stay divided and only the loss is
                                    computed
``colwise_vocabulary``              output projection, ids divided as evenly as possible; the output stays divided
``vocabulary_loss:NAME``            loss of our GPT, for the divided logits of the output projection NAME
``dropout_features``                ``nn.Dropout`` of divided features
``sequence_begin``                  from the first argument of this module on, activations are divided by positions
``sequence_end``                    the output of this module has all positions again
``sequence_last_norm``              norm of this rank's positions, whose output has all positions again
``sequence_layers``                 inputs and outputs of the layers in this module are divided by positions
``sequence_input``                  part of such a module that gathers its first argument, once for all of its layers
``sequence_whole``                  part of such a module that computes with all positions, on every rank
``sequence_dropout``                ``nn.Dropout`` of activations that are divided by positions
``replicate``                       replicated on every rank
==================================  =================================================================================

In a pattern ``*`` stands for any part of a name without a dot.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.spec.errors import PlanError

#: Styles, and their argument: ``""`` none, ``"count"`` an optional number, ``"names"`` required names.
STYLES = {
    "colwise": "",
    "packed_colwise": "count",
    "colwise_heads": "",
    "colwise_kv_heads": "",
    "colwise_gather_output": "",
    "rowwise": "",
    "rowwise_split_input": "",
    "embedding_rowwise": "",
    "divide": "names",
    "embedding_heads": "",
    "replicated_with_grad_allreduce": "",
    "moe_tp_experts": "",
    "mixture": "",
    "vocabulary_head": "",
    "dropout_features": "",
    "sequence_begin": "",
    "sequence_end": "",
    "sequence_last_norm": "",
    "sequence_layers": "",
    "sequence_input": "",
    "sequence_whole": "",
    "sequence_dropout": "",
    "colwise_vocabulary": "",
    "vocabulary_loss": "names",
    "replicate": "",
}

_T5_EMBEDDINGS = dict.fromkeys(("shared", "encoder.embed_tokens", "decoder.embed_tokens"), "embedding_rowwise")

_BERT_ATTENTION = {
    "{}.self": "divide:num_attention_heads,all_head_size",
    "{}.self.query": "colwise",
    "{}.self.key": "colwise",
    "{}.self.value": "colwise",
    "{}.output.dense": "rowwise",
}

#: Styles by pattern, for each class of models or modules by its qualified name. Patterns are relative to that module
#: (``""`` is the module itself). Other models of transformers have their own ``tp_plan``.
TABLES: dict[str, dict[str, str]] = {
    "shardwise.models.transformer.GPT": {
        "token_embedding": "embedding_rowwise",
        "blocks.*.attention": "divide:num_heads",
        "blocks.*.attention.qkv": "packed_colwise:3",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": "rowwise",
        "blocks.*.mlp.experts.*.up": "colwise",
        "blocks.*.mlp.experts.*.down": "rowwise",
        "lm_head": "colwise_vocabulary",
        "loss": "vocabulary_loss:lm_head",
    },
    "shardwise.models.transformer.MixtureOfExperts": {"": "mixture"},
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": {
        "attn": "divide:num_heads,split_size",
        "attn.c_attn": "packed_colwise:3",
        "attn.c_proj": "rowwise",
        "crossattention": "divide:num_heads,split_size",
        "crossattention.c_attn": "packed_colwise:2",
        "crossattention.q_attn": "colwise",
        "crossattention.c_proj": "rowwise",
        "mlp.c_fc": "colwise",
        "mlp.c_proj": "rowwise",
    },
    "transformers.models.gpt2.modeling_gpt2.GPT2Model": {"wte": "embedding_rowwise"},
    "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel": {"lm_head": "vocabulary_head"},
    "transformers.models.gpt2.modeling_gpt2.GPT2DoubleHeadsModel": {"lm_head": "colwise_gather_output"},
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXModel": {"embed_in": "embedding_rowwise"},
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXForCausalLM": {"lm_head": "vocabulary_head"},
    "transformers.models.gpt_oss.modeling_gpt_oss.GptOssModel": {"embed_tokens": "embedding_rowwise"},
    "transformers.models.gpt_oss.modeling_gpt_oss.GptOssForCausalLM": {"lm_head": "vocabulary_head"},
    "transformers.models.t5.modeling_t5.T5Attention": {
        "": "divide:n_heads,inner_dim",
        "q": "colwise",
        "k": "colwise",
        "v": "colwise",
        "o": "rowwise",
        "relative_attention_bias": "embedding_heads",
    },
    "transformers.models.t5.modeling_t5.T5DenseActDense": {
        "wi": "colwise",
        "dropout": "dropout_features",
        "wo": "rowwise",
    },
    "transformers.models.t5.modeling_t5.T5DenseGatedActDense": {
        "wi_0": "colwise",
        "wi_1": "colwise",
        "dropout": "dropout_features",
        "wo": "rowwise",
    },
    "transformers.models.t5.modeling_t5.T5Model": _T5_EMBEDDINGS,
    "transformers.models.t5.modeling_t5.T5EncoderModel": _T5_EMBEDDINGS,
    "transformers.models.t5.modeling_t5.T5ForConditionalGeneration": {
        **_T5_EMBEDDINGS,
        "lm_head": "colwise_gather_output",
    },
    "transformers.models.bert.modeling_bert.BertLayer": {
        **{name.format("attention"): style for name, style in _BERT_ATTENTION.items()},
        **{name.format("crossattention"): style for name, style in _BERT_ATTENTION.items()},
        "intermediate.dense": "colwise",
        "output.dense": "rowwise",
    },
    "transformers.models.bert.modeling_bert.BertEmbeddings": {"word_embeddings": "embedding_rowwise"},
    "transformers.models.bert.modeling_bert.BertLMPredictionHead": {
        "decoder": "colwise_gather_output",
        "bias": "colwise_vocabulary",
    },
    "transformers.models.vit.modeling_vit.ViTAttention": {
        "": "divide:num_attention_heads",
        "q_proj": "colwise",
        "k_proj": "colwise",
        "v_proj": "colwise",
        "o_proj": "rowwise",
    },
    "transformers.models.cohere.modeling_cohere.CohereAttention": {
        "q_norm.weight": "colwise",  # shape (heads, width of a head); exists only with use_qk_norm
        "k_norm.weight": "colwise",
    },
    "transformers.models.apertus.modeling_apertus.ApertusMLP": {
        "act_fn": "replicated_with_grad_allreduce",  # xIELU learns two slopes that all features share
    },
    "transformers.models.vit.modeling_vit.ViTMLP": {"fc1": "colwise", "fc2": "rowwise"},
    "transformers.models.inkling2.modeling_inkling2.Inkling2Experts": {"gate_up_proj": "packed_colwise"},
    # Its activation keeps the largest of all features.
    "transformers.models.gemma3n.modeling_gemma3n.Gemma3nTextMLP": dict.fromkeys(
        ("gate_proj", "up_proj", "down_proj"), "replicate"
    ),
    # Its mask has a row for every head, of all values: the attention stays whole.
    "transformers.models.doge.modeling_doge.DogeAttention": dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "dt_proj", "o_proj"), "replicate"
    ),
}


_NORM = "replicated_with_grad_allreduce"

_LLAMA_LAYER = {
    "": "sequence_layers",
    "input_layernorm": _NORM,
    "self_attn": "sequence_input",
    "post_attention_layernorm": _NORM,
    "mlp": "sequence_input",
}
_LLAMA_MODEL = {"layers.0": "sequence_begin", "norm": "sequence_last_norm"}

#: Styles added under sequence parallelism: between the first block's input and the output projection (our GPT) or the
#: last norm, activations are divided by positions. In a pattern ``-1`` is the last of a list of modules.
SEQUENCE_TABLES: dict[str, dict[str, str]] = {
    "shardwise.models.transformer.GPT": {
        "blocks.0": "sequence_begin",
        "blocks.*": "sequence_layers",
        "blocks.*.attention_norm": _NORM,
        "blocks.*.mlp_norm": _NORM,
        "blocks.*.mlp.router": _NORM,
        "blocks.*.dropout": "sequence_dropout",
        "final_norm": _NORM,
        "lm_head": "sequence_layers",
    },
    "transformers.models.llama.modeling_llama.LlamaModel": _LLAMA_MODEL,
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer": _LLAMA_LAYER,
    "transformers.models.qwen3.modeling_qwen3.Qwen3Model": _LLAMA_MODEL,
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer": _LLAMA_LAYER,
    "transformers.models.mixtral.modeling_mixtral.MixtralModel": _LLAMA_MODEL,
    "transformers.models.mixtral.modeling_mixtral.MixtralDecoderLayer": _LLAMA_LAYER | {"mlp": "sequence_whole"},
    "transformers.models.gpt2.modeling_gpt2.GPT2Model": {"h.0": "sequence_begin", "ln_f": "sequence_last_norm"},
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": {
        "": "sequence_layers",
        "ln_1": _NORM,
        "attn": "sequence_input",
        "attn.resid_dropout": "sequence_dropout",
        "ln_2": _NORM,
        "mlp": "sequence_input",
        "mlp.dropout": "sequence_dropout",
    },
    "transformers.models.bert.modeling_bert.BertEncoder": {
        "layer.0": "sequence_begin",
        "layer.-1": "sequence_end",
    },
    "transformers.models.bert.modeling_bert.BertLayer": {
        "": "sequence_layers",
        "attention.self": "sequence_input",
        "attention.output.dropout": "sequence_dropout",
        "attention.output.LayerNorm": _NORM,
        "intermediate": "sequence_input",
        "output.dropout": "sequence_dropout",
        "output.LayerNorm": _NORM,
    },
    "transformers.models.vit.modeling_vit.ViTModel": {"layers.0": "sequence_begin", "layernorm": "sequence_last_norm"},
    "transformers.models.vit.modeling_vit.ViTLayer": {
        "": "sequence_layers",
        "layernorm_before": _NORM,
        "attention": "sequence_input",
        "layernorm_after": _NORM,
        "mlp": "sequence_input",
        "dropout": "sequence_dropout",
    },
}


@dataclass(frozen=True, slots=True)
class Style:
    """A style: its name, and the text after the colon."""

    name: str
    argument: str = ""

    @property
    def count(self) -> int:
        """The number of fused layers."""
        return int(self.argument or 2)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of attributes."""
        return tuple(name.strip() for name in self.argument.split(","))

    def __str__(self) -> str:
        return f"{self.name}:{self.argument}" if self.argument else self.name


def parse_style(text: object, where: str) -> Style:
    """Parse a style such as ``packed_colwise:3``; ``where`` is the pattern, for messages.

    Raises:
        PlanError: There is no such style, or its argument is missing or wrong.
    """
    name, _, argument = str(text).partition(":")
    takes = STYLES.get(name) if isinstance(text, str) else None
    if takes is None:
        raise PlanError(
            f"tensor parallelism: {where!r} has the style {text!r}, which is not known.\n  Use one of"
            f" {', '.join(STYLES)} (tp_plan={{pattern: style}})."
        )
    is_right = {
        "": not argument,
        "count": not argument or (argument.isdigit() and int(argument) > 0),
        "names": bool(re.fullmatch(r"\w+(\s*,\s*\w+)*", argument)),
    }[takes]
    if not is_right:
        meant = {"": name, "count": f"{name}:3", "names": f"{name}:num_heads"}[takes]
        raise PlanError(
            f"tensor parallelism: {where!r} has the style {text!r}, whose argument is not right.\n"
            f"  Write for example {meant!r}."
        )
    return Style(name, argument)


def parse_table(table: object) -> dict[str, str] | None:
    """Check ``ParallelPlan.tp_plan`` and return it; ``None`` means the table of the model's class.

    Raises:
        PlanError: The value is not a mapping from patterns to styles.
    """
    if table is None:
        return None
    if not isinstance(table, Mapping) or not table or not all(isinstance(key, str) and key for key in table):
        raise PlanError(
            f"tp_plan={table!r}: expected a mapping from name patterns to styles.\n"
            "  Write for example {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}, or leave it out."
        )
    for pattern, style in table.items():
        parse_style(style, pattern)
    return dict(table)


def translated(pattern: str, style: str) -> str:
    """The style for an entry of a transformers model's ``tp_plan``, which ignores heads when it cuts projections."""
    name = pattern.rpartition(".")[2]
    if style == "colwise" and name in {"q_proj", "k_proj", "v_proj"}:
        return "colwise_heads" if name == "q_proj" else "colwise_kv_heads"
    same = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input", "local_params": "replicate"}
    return same.get(style, style)


def matches(pattern: str, name: str) -> bool:
    """Whether the pattern matches the name of a module or parameter."""
    return _expression(pattern).fullmatch(name) is not None


@functools.lru_cache(maxsize=4096)  # every pattern is compared with every module of every stage
def _expression(pattern: str) -> re.Pattern[str]:
    parts = [re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split(".")]
    return re.compile(r"\.".join(parts))


def generalized(name: str) -> str:
    """The pattern that matches a module or parameter in all blocks: indices become ``*``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def near_even_range(size: int, parts: int, part: int) -> tuple[int, int]:
    """The range of rank ``part`` if a dimension is cut into ``parts`` parts as evenly as possible."""
    return part * size // parts, (part + 1) * size // parts
