"""Generates the same completions by Hugging Face's `generate`, in an interpreter that has torch and transformers.

The first line of stdin is one JSON object with the sizes. For every further line this program generates once and prints
one JSON object: `seconds` and `tokens`. Weights are random, on a GPU where torch finds one. The key-value cache is on.
Sampling has temperature 1, without top-k or top-p.
"""

import json
import sys
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def main():
    asked = json.loads(sys.stdin.readline())
    torch.set_num_threads(asked["threads"] or torch.get_num_threads())
    torch.manual_seed(0)
    m = asked["model"]
    config = Qwen3Config(
        vocab_size=m["vocab_size"],
        hidden_size=m["embed_dim"],
        intermediate_size=m["hidden_dim"],
        num_hidden_layers=m["num_layers"],
        num_attention_heads=m["num_heads"],
        num_key_value_heads=m["num_kv_heads"],
        head_dim=m["head_dim"],
        tie_word_embeddings=m["tie_embeddings"],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    where = ("cuda" if torch.cuda.is_available() else "cpu", getattr(torch, asked["dtype"]))
    model = Qwen3ForCausalLM(config).train(False).to(*where)
    prompts = torch.randint(1, m["vocab_size"], (asked["prompts"], asked["prompt_tokens"]), device=model.device)
    rows = prompts.repeat_interleave(asked["group_size"], 0)
    exactly = dict.fromkeys(("min_new_tokens", "max_new_tokens"), asked["new_tokens"])
    for _ in sys.stdin:
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                **exactly,
            )
        seconds, tokens = time.perf_counter() - began, (out.shape[1] - rows.shape[1]) * rows.shape[0]
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


main()
