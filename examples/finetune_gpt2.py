"""Fine-tune GPT-2 on a text, with the means of large runs: bf16, recomputation, accumulation, checkpoints.

    torchrun --nproc-per-node 2 examples/finetune_gpt2.py [--model FOLDER] [--checkpoint PATH]

FOLDER is a Hugging Face folder with a GPT-2 model; without one a small model is drawn. Texts are bytes here.
"""

import argparse
import os
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import shardwise as sw

SEQ, BATCH, MICROBATCHES = 64, 8, 2
DEVICE = torch.device("cpu")
if torch.cuda.is_available():
    DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(DEVICE)


def build(folder: str | None) -> GPT2LMHeadModel:
    if folder is not None:
        return GPT2LMHeadModel.from_pretrained(folder, local_files_only=True)
    torch.manual_seed(0)
    shape = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": SEQ}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, **shape, **quiet))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()

    plan = sw.ParallelPlan(
        strategy="zero3",
        auto_wrap_policy=sw.wrap_by_class({GPT2Block}),
        mp_policy=sw.PrecisionPolicy(param_dtype="auto"),  # bf16 where it is supported; masters stay fp32
        activation_checkpointing="full",
    )
    model = sw.parallelize(build(options.model).to(DEVICE), plan)
    optimizer = torch.optim.AdamW(sw.flat_parameters(model), lr=3e-3)
    is_first = torch.distributed.get_rank() == 0
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()[:65536]))
    generator = torch.Generator().manual_seed(sw.data_parallel_rank(model))  # each rank reads different parts
    for step in range(options.steps):
        starts = torch.randint(0, len(text) - SEQ, (BATCH,), generator=generator)
        tokens = torch.stack([text[start : start + SEQ] for start in starts]).to(DEVICE)
        batch = {"input_ids": tokens, "labels": tokens}
        loss = sw.train_step(model, batch, num_microbatches=MICROBATCHES)  # the mean over all ranks
        sw.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if is_first and step % 8 == 0:
            print(f"step {step:2d}  loss {loss.item():.3f}")
    if options.checkpoint is not None:
        sw.save(options.checkpoint, model, optimizer, state={"step": options.steps})
        if is_first:
            print(f"saved {options.checkpoint}")


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
