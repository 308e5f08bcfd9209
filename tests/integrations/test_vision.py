"""The page's spec for pictures beside text: a small LLaVA with its processor, on two ranks and on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.train.data.tokenizer import byte_tokenizer
from tests.train.train_here import losses, summary

pytestmark = pytest.mark.integrations

PAGE = Path(__file__).parents[2] / "docs" / "your-own.md"


def make_folder(folder: Path) -> None:
    """Weights and processor, as ``from_pretrained`` finds them, and rows of which every third one has a picture."""
    from PIL import Image
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"], "pad_token": "<pad>"})
    pictures = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    LlavaProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(folder / "llava")
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = LlamaConfig(
        vocab_size=258, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=257, image_seq_length=4)
    LlavaForConditionalGeneration(config).save_pretrained(folder / "llava")
    rows = []
    for index in range(24):
        has_picture = index % 3 == 0
        if has_picture:
            Image.new("RGB", (20, 20), (10 * index, 255 - 10 * index, 99)).save(folder / f"{index}.png")
        told = f"<image> number {index}" if has_picture else f"no picture, {index * index}"
        rows.append({"text": told, "image": f"{folder}/{index}.png" if has_picture else None})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def held_out_loss(folder: Path) -> float:
    """The mean over all targets of all rows, by transformers alone, one row at a time."""
    from PIL import Image
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    model, processor = (
        kind.from_pretrained(folder / "llava") for kind in (LlavaForConditionalGeneration, AutoProcessor)
    )
    total = count = 0.0
    for line in (folder / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        pictures = [Image.open(row["image"])] if row["image"] else None
        batch = processor(text=[row["text"]], images=pictures, return_tensors="pt")
        ids = batch["input_ids"]
        with torch.no_grad():
            logits = model.eval()(**batch).logits[0, :-1]
        is_target = ids[0, 1:] != processor.image_token_id
        total += float(torch.nn.functional.cross_entropy(logits[is_target], ids[0, 1:][is_target], reduction="sum"))
        count += int(is_target.sum())
    return total / count


def test_the_page_s_spec_gives_one_process_s_numbers_on_two_ranks(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (code,) = [part for part in PAGE.read_text().split("```python\n")[1:] if part.startswith("# pictures.py")]
    code = code.split("```")[0].replace('"models/llava", "rows.jsonl"', f'"{tmp_path}/llava", "{tmp_path}/rows.jsonl"')
    (tmp_path / "pictures.py").write_text(code.replace("data=rows", "data=rows, eval_data=rows"))
    batch, rate = "train: {steps: 5, micro_batch_size: 1, global_batch_size: 4, eval_every: 5", "optimizer: {lr: 0.01}"
    (tmp_path / "run.yaml").write_text(f"{batch}, eval_batches: 24}}\n{rate}\n")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    found = {}
    for world, strategy in ((1, "ddp"), (2, "zero3"), (2, "ddp")):
        name = f"{strategy}-{world}"
        words = ["run.yaml", "--spec", "pictures.py", "--nproc", str(world), "--run-dir", name]
        subprocess.run(
            [sys.executable, "-m", "shardwise", "train", *words, "--set", f"parallel.strategy={strategy}"],
            cwd=tmp_path, env=environment, check=True, timeout=150,
        )  # fmt: skip
        found[name] = losses(tmp_path / name), summary(tmp_path / name)
    words = ["parity", "run.yaml", "--spec", "pictures.py", "--nproc", "2"]
    refused = subprocess.run(
        [sys.executable, "-m", "shardwise", *words],
        cwd=tmp_path, env=environment, check=False, timeout=150, capture_output=True, text=True,
    )  # fmt: skip
    assert "of 2 samples, which cannot be cut by samples" in refused.stdout + refused.stderr
    first = found["ddp-1"]
    assert len(first[0]) == 5
    assert first[1]["eval_loss_first"] == pytest.approx(held_out_loss(tmp_path), rel=1e-5)
    for told, held in found.values():
        assert told == pytest.approx(first[0], rel=1e-5)
        assert held["eval_loss_final"] == pytest.approx(first[1]["eval_loss_final"], rel=1e-5)
