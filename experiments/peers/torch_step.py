"""The same model and update in PyTorch, for an interpreter that has torch but not this package.

Reads a JSON object (sizes, dtype, threads) from the first line of stdin. For every further line it takes one step and
writes a JSON object: `seconds`, `loss`, `peak_bytes` and, the first time, `first_step_seconds` since the process began.
Attention is torch's `scaled_dot_product_attention`; on a GPU `torch.compile` compiles everything.
"""

import json
import resource
import sys
import time

BEGAN = time.perf_counter()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402


class Attention(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        D, N, K, H = c["embed_dim"], c["num_heads"], c["num_kv_heads"], c["head_dim"]
        bias, eps = c["qkv_bias"], c["rms_norm_eps"]
        self.head_dim = H
        self.norm = torch.nn.RMSNorm(D, eps=eps)
        self.q, self.k, self.v = (torch.nn.Linear(D, heads * H, bias=bias) for heads in (N, K, K))
        self.o = torch.nn.Linear(N * H, D, bias=False)
        self.qk = torch.nn.ModuleList([torch.nn.RMSNorm(H, eps=eps) for _ in range(2)]) if c["qk_norm"] else None

    def forward(self, x, cos, sin):
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.head_dim)) for f in (self.q, self.k, self.v))
        if self.qk is not None:
            q, k = self.qk[0](q), self.qk[1](k)
        q, k = _rotate(q, cos, sin).transpose(1, 2), _rotate(k, cos, sin).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class FeedForward(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        D, hidden = c["embed_dim"], c["hidden_dim"]
        self.norm = torch.nn.RMSNorm(D, eps=c["rms_norm_eps"])
        self.gate, self.up = (torch.nn.Linear(D, hidden, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(hidden, D, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return self.down(F.silu(self.gate(h)) * self.up(h))


class Model(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed = torch.nn.Embedding(c["vocab_size"], c["embed_dim"])
        blocks = [torch.nn.ModuleList([Attention(c), FeedForward(c)]) for _ in range(c["num_layers"])]
        self.blocks = torch.nn.ModuleList(blocks)
        self.norm = torch.nn.RMSNorm(c["embed_dim"], eps=c["rms_norm_eps"])
        self.head = None if c["tie_embeddings"] else torch.nn.Linear(c["embed_dim"], c["vocab_size"], bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                torch.nn.init.normal_(p, std=0.02)

    def forward(self, tokens, completion):
        """Log-probabilities f32[B, C] of the last `completion` tokens; no other position has logits."""
        exact = {"device": tokens.device, "dtype": torch.float32}
        pairs = torch.arange(0, self.c["head_dim"], 2, **exact) / self.c["head_dim"]
        angles = torch.arange(tokens.shape[1], **exact)[:, None] * self.c["rope"]["theta"] ** -pairs
        cos, sin = (f(angles)[None, :, None] for f in (torch.cos, torch.sin))
        x = self.embed(tokens)
        for attention, feed_forward in self.blocks:
            x = x + attention(x, cos, sin)
            x = x + feed_forward(x)
        x = self.norm(x[:, -completion - 1 : -1])
        logits = F.linear(x, self.embed.weight if self.head is None else self.head.weight).float()
        return -F.cross_entropy(logits.transpose(1, 2), tokens[:, -completion:], reduction="none")


def _rotate(x, cos, sin):
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def main():
    asked = json.loads(sys.stdin.readline())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_num_threads(asked["threads"] or torch.get_num_threads())
    model = Model(asked["model"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked["learning_rate"], weight_decay=0.1, fused=True)
    rows, length, completion = asked["rows"], asked["length"], asked["completion"]
    tokens = torch.randint(asked["model"]["vocab_size"], (rows, length), device=device)
    advantages = torch.where(torch.rand(rows, 1, device=device) < 0.5, -1.0, 1.0)
    autocast = torch.autocast(device, torch.bfloat16, enabled=asked["dtype"] == "bfloat16")

    def loss_of(tokens, advantages, behaviour):
        with autocast:
            logprobs = model(tokens, completion)
        ratio = torch.exp(logprobs - behaviour)
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).mean()

    if device == "cuda":
        loss_of = torch.compile(loss_of)
    behaviour = None
    for number, _ in enumerate(sys.stdin):
        if behaviour is None:
            with torch.no_grad(), autocast:
                behaviour = model(tokens, completion)
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(tokens, advantages, behaviour)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        answer = {"loss": loss.item()}
        if device == "cuda":
            torch.cuda.synchronize()
        answer["seconds"] = time.perf_counter() - began
        if number == 0:
            answer["first_step_seconds"] = time.perf_counter() - BEGAN
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer["peak_bytes"] = torch.cuda.max_memory_allocated() if device == "cuda" else peak
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
