"""Writes tests/models/golden/MODEL_lora: an adapter that the library peft made and saved, and the logits with it.

    python tests/models/make_golden_adapters.py qwen3           # with torch, transformers and peft
    python tests/models/make_golden_adapters.py qwen3 --check=FOLDER  # logits of an adapter that this project wrote

With --check, FOLDER has the adapter and logits.npy, this project's logits of the same tokens over the model. It
prints the largest difference. The files in the repository were written with torch 2.13.0, transformers 5.23.0 and
peft 0.21.2; those of llama3 with torch 2.14.1 and transformers 5.24.0.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def base(name: str):
    """The stored model in f32 with eager attention."""
    import torch
    import transformers

    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / name, **how).eval()


def logits(model, name: str) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(np.load(GOLDEN / name / "golden.npz")["tokens"])).logits.numpy()


def write(name: str) -> None:
    import peft
    import torch

    torch.manual_seed(0)
    chosen = peft.LoraConfig(r=2, lora_alpha=3, target_modules=MODULES, init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base(name), chosen).eval()
    folder = GOLDEN / f"{name}_lora"
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    file = folder / "adapter_config.json"
    fields = json.loads(file.read_text(encoding="utf-8")) | {"base_model_name_or_path": name}
    fields["target_modules"] = sorted(fields["target_modules"])  # peft writes a set
    file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (folder / "adapter_model.safetensors").chmod(0o644)
    np.savez_compressed(folder / "golden.npz", logits=logits(model, name), base_logits=logits(base(name), name))


def check(name: str, folder: Path) -> None:
    import peft

    model = peft.PeftModel.from_pretrained(base(name), folder).eval()
    found = logits(model, name)
    print("largest difference of logits:", np.abs(found - np.load(folder / "logits.npy")).max())
    print("the adapter's own effect:", np.abs(found - logits(base(name), name)).max())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a folder of golden/")
    parser.add_argument("--check", type=Path)
    options = parser.parse_args()
    check(options.model, options.check) if options.check else write(options.model)
