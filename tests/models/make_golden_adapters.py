"""Writes tests/models/golden/qwen3_lora: an adapter that the library peft made and saved, and the logits with it.

    python tests/models/make_golden_adapters.py                 # with torch, transformers and peft
    python tests/models/make_golden_adapters.py --check=FOLDER  # logits of an adapter that this project wrote

With --check, FOLDER has the adapter and logits.npy, this project's logits of the same tokens over the model qwen3. It
prints the largest difference. The files in the repository were written with torch 2.13.0, transformers 5.23.0 and
peft 0.21.2.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def base():
    """The stored model in f32 with eager attention."""
    import torch
    import transformers

    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / "qwen3", **how).eval()


def logits(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(np.load(GOLDEN / "qwen3" / "golden.npz")["tokens"])).logits.numpy()


def write() -> None:
    import peft
    import torch

    torch.manual_seed(0)
    chosen = peft.LoraConfig(r=2, lora_alpha=3, target_modules=MODULES, init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base(), chosen).eval()
    folder = GOLDEN / "qwen3_lora"
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    file = folder / "adapter_config.json"
    fields = json.loads(file.read_text()) | {"base_model_name_or_path": "qwen3"}
    fields["target_modules"] = sorted(fields["target_modules"])  # peft writes a set
    file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    (folder / "adapter_model.safetensors").chmod(0o644)
    np.savez_compressed(folder / "golden.npz", logits=logits(model), base_logits=logits(base()))


def check(folder: Path) -> None:
    import peft

    model = peft.PeftModel.from_pretrained(base(), folder).eval()
    found = logits(model)
    print("largest difference of logits:", np.abs(found - np.load(folder / "logits.npy")).max())
    print("the adapter's own effect:", np.abs(found - logits(base())).max())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", type=Path)
    folder = parser.parse_args().check
    check(folder) if folder else write()
