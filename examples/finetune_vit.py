"""Fine-tune a vision transformer's head and last blocks: frozen parameters cost no gradients and no optimizer state.

    torchrun --nproc-per-node 2 examples/finetune_vit.py [--model FOLDER]

FOLDER is a Hugging Face folder with a ViT for image classification; without one a small model is drawn. The pictures
are drawn as well: a bright square in one of four corners.
"""

import argparse
import os

import torch
from transformers import ViTConfig, ViTForImageClassification

import shardwise as sw

SIDE = 32
DEVICE = torch.device("cpu")
if torch.cuda.is_available():
    DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(DEVICE)


def build(folder: str | None) -> ViTForImageClassification:
    if folder is not None:
        return ViTForImageClassification.from_pretrained(folder, local_files_only=True)
    torch.manual_seed(0)
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=SIDE, patch_size=8, num_labels=4, **shape))


def pictures(count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    labels = torch.randint(0, 4, (count,), generator=generator)
    images = torch.randn(count, 3, SIDE, SIDE, generator=generator) * 0.1
    half = SIDE // 2
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 2.0
    return {"pixel_values": images.to(DEVICE), "labels": labels.to(DEVICE)}


def show_accuracy(when: str, model: torch.nn.Module, generator: torch.Generator) -> None:
    model.eval()
    with torch.no_grad():
        batch = pictures(64, generator)
        right = (model(pixel_values=batch["pixel_values"]).logits.argmax(1) == batch["labels"]).float().mean()
    model.train()
    if torch.distributed.get_rank() == 0:
        print(f"{when}: accuracy on new pictures {right.item():.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--strategy", default="zero3")
    options = parser.parse_args()

    plain = build(options.model).to(DEVICE)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_("embeddings" not in name and "layer.0." not in name)
    model = sw.parallelize(
        plain, sw.ParallelPlan(strategy=options.strategy, auto_wrap_policy=sw.wrap_by_class({"ViTLayer"}))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    is_first = torch.distributed.get_rank() == 0
    generator = torch.Generator().manual_seed(sw.data_parallel_rank(model))  # each rank draws different pictures
    show_accuracy("before", model, generator)
    for step in range(options.steps):
        loss = model(**pictures(16, generator)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_first and step % 20 == 0:
            print(f"step {step:2d}  loss {loss.item():.3f}")
    show_accuracy("after", model, generator)


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
