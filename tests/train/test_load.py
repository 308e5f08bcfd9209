"""What can be asked to continue texts: its name, its chat template, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.launch.world import World
from shardwise.spec.errors import CheckpointError, ConfigError
from shardwise.train.config.resolve import resolve
from shardwise.train.config.sections import read_config
from shardwise.train.data.tokenizer import FolderTokenizer
from shardwise.train.load import TrainedModel, find_model, model_name
from tests.common.tokenizers import save_tokenizer


def test_a_checkpoint_has_the_name_of_its_run():
    assert model_name(Path("runs/demo/checkpoints/step-00000010")) == "demo"
    assert model_name(Path("runs/demo/")) == model_name(Path("models/demo")) == "demo"


def test_a_folder_without_weights_is_refused_and_not_drawn(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has a config.json and no weights"):
        find_model(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"has its weights in pytorch_model\.bin"):
        find_model(tmp_path)


def test_an_adapter_without_its_model_is_refused_with_what_to_name(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is an adapter, without the model below it\.\n.* --merge"):
        find_model(tmp_path)


def test_a_run_whose_model_folder_was_moved_says_where_a_copy_has_to_be(tmp_path, monkeypatch):
    """The verbs that read a run take no model.hf; they said to correct it."""
    (tmp_path / "manifest.json").touch()
    monkeypatch.setattr("shardwise.train.load.saved_config", lambda _path: {"model": {"hf": "models/my llama"}})
    with pytest.raises(
        CheckpointError, match=r"trained from models/my llama, .*\n.* ln -s /path\S+ 'models/my llama'$"
    ):
        find_model(tmp_path)


def test_a_folder_that_cannot_continue_texts_is_not_to_be_exported(tmp_path):
    config = {"is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"], "vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    found = find_model(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot continue texts.\n  Use the folder with transformers"):
        found.check_continues(found.resolve([], 1))


def test_a_mixture_that_continues_texts_takes_no_loss_of_its_routers(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_local_experts": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads, output_router_logits=True)).save_pretrained(tmp_path)
    found = find_model(tmp_path)
    with found.loaded(found.resolve([], 1), World(), is_averaged=False) as model:
        assert model(torch.tensor([[3, 4]])).aux_loss is None
    assert found.resolve(["parallel.pp=2"], 2).plan.pp == 2
    text = {"model": {"hf": str(tmp_path)}, "data": {"source": "random", "seq_len": 4}, "train": {"steps": 1}}
    for key in ("pp", "cp"):  # before any process starts
        raw = read_config(None, [], base={**text, "parallel": {key: 2}}, title="the run")
        with pytest.raises(ConfigError, match=rf"parallel.{key}: .*set {key}: 1, or output_router_logits to false"):
            resolve(raw, 2)


def test_ids_alone_end_at_the_end_tokens_of_the_model_s_folder(tmp_path):
    """Without a tokenizer they ended at max_new_tokens."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert TrainedModel(None, tmp_path, {}).ends(None) == (9,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert TrainedModel(None, tmp_path, {}).ends(None) == (7, 5)
    run = TrainedModel(tmp_path, None, {"hf": str(tmp_path)}, tokens_by=None)
    assert run.ends(None) == (7, 5)
    assert dataclasses.replace(run, tokens_by="bytes").ends(None) == ()
    tokenizer = FolderTokenizer(save_tokenizer(tmp_path / "tokenizer"))
    assert run.ends(tokenizer) == (0, 7, 5)


def test_a_run_s_tokenizer_has_the_chat_template_of_its_training_and_unknown_tokens_have_none(tmp_path):
    folder = save_tokenizer(tmp_path / "model", template="{{ 'the base' }}")
    (tmp_path / "chat.jinja").write_text("{{ 'the training' }}")
    run = TrainedModel(tmp_path, None, {}, tokens_by=str(folder), chat_template=str(tmp_path / "chat.jinja"))
    assert run.hf_tokenizer().chat_template == "{{ 'the training' }}"
    assert dataclasses.replace(run, chat_template=None).hf_tokenizer().chat_template == "{{ 'the base' }}"
    np.save(tmp_path / "ids.npy", np.arange(300, dtype=np.uint16))
    tokens = TrainedModel(tmp_path, None, {}, source=str(tmp_path / "ids.npy"))
    assert tokens.unknown_tokens == "token files, whose text is not known"
    assert not TrainedModel(tmp_path, None, {}, source=__file__).unknown_tokens


@pytest.mark.parametrize(("named", "further"), [([0, 7], (7,)), (9, (9,)), (None, ()), ("x", ()), ([True, 3], (3,))])
def test_what_ends_an_answer_is_the_tokenizer_s_and_the_folder_s(tmp_path, named, further):
    folder = save_tokenizer(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert FolderTokenizer(folder).ends == (0, *further)
    (folder / "generation_config.json").write_text("[")
    assert FolderTokenizer(folder).ends == (0,)
