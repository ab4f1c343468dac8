"""The same model and update in PyTorch, run by an interpreter that has torch and nothing of ours.

Reads one JSON object (sizes, dtype, seed) on the first line of stdin; then, for every further line, takes one step and
answers one JSON object: `seconds`, `loss`, `peak_bytes` and, the first time, `first_step_seconds` since the process
began. Attention is torch's own `scaled_dot_product_attention`; on a GPU everything is compiled by `torch.compile`.
"""

import json
import resource
import sys
import time

BEGAN = time.perf_counter()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402


class Block(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        D, N, K, H = c["embed_dim"], c["num_heads"], c["num_kv_heads"], c["head_dim"]
        self.heads, self.kv_heads, self.head_dim = N, K, H
        linear = torch.nn.Linear
        bias = c["attention_bias"]
        self.q, self.k, self.v = linear(D, N * H, bias=bias), linear(D, K * H, bias=bias), linear(D, K * H, bias=bias)
        self.o = linear(N * H, D, bias=False)
        self.gate, self.up = linear(D, c["hidden_dim"], bias=False), linear(D, c["hidden_dim"], bias=False)
        self.down = linear(c["hidden_dim"], D, bias=False)
        norm = torch.nn.RMSNorm
        self.norm, self.mlp_norm = norm(D, eps=c["rms_norm_eps"]), norm(D, eps=c["rms_norm_eps"])
        self.qk = torch.nn.ModuleList([norm(H, eps=c["rms_norm_eps"]) for _ in range(2)]) if c["qk_norm"] else None

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        h = self.norm(x)
        q = self.q(h).view(B, T, self.heads, self.head_dim)
        k, v = (f(h).view(B, T, self.kv_heads, self.head_dim) for f in (self.k, self.v))
        if self.qk is not None:
            q, k = self.qk[0](q), self.qk[1](k)
        q, k = _rotate(q, cos, sin).transpose(1, 2), _rotate(k, cos, sin).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        x = x + self.o(out.transpose(1, 2).reshape(B, T, -1))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed = torch.nn.Embedding(c["vocab_size"], c["embed_dim"])
        self.blocks = torch.nn.ModuleList([Block(c) for _ in range(c["num_layers"])])
        self.norm = torch.nn.RMSNorm(c["embed_dim"], eps=c["rms_norm_eps"])
        self.head = None if c["tie_embeddings"] else torch.nn.Linear(c["embed_dim"], c["vocab_size"], bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                torch.nn.init.normal_(p, std=0.02)

    def forward(self, tokens, completion):
        """Log-probabilities f32[B, C] of the last `completion` tokens; no other position has logits."""
        angles = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)[:, None] * _frequencies(
            self.c, tokens.device
        )
        cos, sin = (f(angles)[None, :, None] for f in (torch.cos, torch.sin))
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x[:, -completion - 1 : -1])
        logits = F.linear(x, self.embed.weight if self.head is None else self.head.weight).float()
        return -F.cross_entropy(logits.transpose(1, 2), tokens[:, -completion:], reduction="none")


def _frequencies(c, device):
    pairs = torch.arange(0, c["head_dim"], 2, device=device, dtype=torch.float32) / c["head_dim"]
    return c["rope_theta"] ** -pairs


def _rotate(x, cos, sin):
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def main():
    asked = json.loads(sys.stdin.readline())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    if asked["threads"]:
        torch.set_num_threads(asked["threads"])
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
