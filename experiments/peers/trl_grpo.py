"""GRPO of TRL on the sums of configs/smollm2_135m_sums.py: seconds of each step, accuracy, and peak memory.

    PYTHON experiments/peers/trl_grpo.py FOLDER --steps=8

FOLDER is the model in Hugging Face layout; PYTHON has trl, torch, transformers and datasets. A step has 8 prompts of 8
completions of at most 20 new tokens and one update: float32, AdamW at 3e-5, no KL. --bf16 computes in bfloat16, with
weights in float32. The program takes a GPU where torch finds one. It prints one JSON object a step and one at the end.
The problems, their order and the held-out set are those of `examples/sums.py`, which this program does not import.
"""

import argparse
import json
import re
import resource
import tempfile
import time

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

LARGEST, HELD_OUT = 15, 0.2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problems() -> tuple[list[dict], list[dict]]:
    """Training problems and held-out problems."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    order = np.random.default_rng(0).permutation(len(pairs)).tolist()
    cut = round(HELD_OUT * len(pairs))
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
        for a, b in (pairs[i] for i in order)
    ]
    return rows[cut:], rows[:cut]


def right(completion: str, answer: str) -> float:
    return float(re.findall(r"\d+", completion)[-1:] == [answer])


def reward(completions, answer, **_):
    return [right(c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]


class Clock(TrainerCallback):
    """Prints the seconds between the ends of steps."""

    def on_train_begin(self, *_, **__):
        self.last = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        now = time.perf_counter()
        print(json.dumps({"step": state.global_step, "seconds": round(now - self.last, 2)}), flush=True)
        self.last = now


def accuracy(model, tokenizer, rows: list[dict]) -> float:
    """The share of problems that one sampled completion each solves."""
    tokenizer.padding_side = "left"
    text = [tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True) for r in rows]
    inputs = tokenizer(text, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=20, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(right(text, r["answer"]) for text, r in zip(texts, rows, strict=True)) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32).to(DEVICE)
    train, held_out = problems()
    before = accuracy(model, tokenizer, held_out)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=options.steps, per_device_train_batch_size=64, num_generations=8,
        max_completion_length=20, temperature=1.0, top_k=0, learning_rate=3e-5, lr_scheduler_type="constant",
        beta=0.0, num_iterations=1, bf16=options.bf16, use_cpu=DEVICE == "cpu",
        save_strategy="no", report_to=[], logging_steps=1,
        gradient_checkpointing=False, weight_decay=0.0, max_grad_norm=1.0, disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = GRPOTrainer(model, reward, config, Dataset.from_list(train), processing_class=tokenizer)
    trainer.add_callback(Clock())
    trainer.train()
    peak = torch.cuda.max_memory_allocated() or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    after = accuracy(model.eval(), tokenizer, held_out)
    print(json.dumps({"held_out_before": before, "held_out_after": after, "peak_gib": round(peak / 2**30, 2)}))


if __name__ == "__main__":
    main()
