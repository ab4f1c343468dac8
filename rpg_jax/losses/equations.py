"""The losses, advantages and aggregates in LaTeX, under the names that `METHODS` and configs use: what docs/methods.md
prints. Symbols: w = π_θ/π_old, ρ = π_ref/π_old, r = w/ρ, A the advantage, R rewards, sg stops the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# divergence: (D, d(w, ρ), K = ∂d/∂log w), as in `divergences`.
DIVERGENCES: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "fkl": (
            r"\mathrm{KL}(\pi_\mathrm{ref}\Vert\pi_\theta)",
            r"\rho \log(\rho / w)",
            r"-\rho",
        ),
        "ufkl": (
            r"\mathrm{UKL}(\pi_\mathrm{ref}\Vert\pi_\theta)",
            r"\rho \log(\rho / w) - \rho + w",
            r"w - \rho",
        ),
        "rkl": (
            r"\mathrm{KL}(\pi_\theta\Vert\pi_\mathrm{ref})",
            r"w \log r",
            r"w (\log r + 1)",
        ),
        "urkl": (
            r"\mathrm{UKL}(\pi_\theta\Vert\pi_\mathrm{ref})",
            r"w \log r - w + \rho",
            r"w \log r",
        ),
        "js": (
            r"\tfrac12(\mathrm{rkl} + \mathrm{fkl})",
            r"\tfrac12 (w - \rho) \log r",
            r"\tfrac12 (w (\log r + 1) - \rho)",
        ),
        "ujs": (
            r"\tfrac12(\mathrm{urkl} + \mathrm{ufkl})",
            r"\tfrac12 (w - \rho) \log r",
            r"\tfrac12 (w (\log r + 1) - \rho)",
        ),
    }
)

# estimator of `rpg`: the clipped loss of a token; without a clip C = w, and the first has the gradient of -wA + βd.
REGULARIZED: Mapping[str, str] = MappingProxyType(
    {
        "differentiable": r"-\mathrm{sg}(C A_\mathrm{reg}) \pi_\theta / \mathrm{sg}(\pi_\theta)",
        "reinforce": r"-\mathrm{sg}(C A_\mathrm{reg}) \log\pi_\theta",
    }
)

_PPO = r"\mathrm{clip}_\mathrm{PPO}(w, A)"
# name of `LOSSES` but "rpg": the loss of a token.
BASELINES: Mapping[str, str] = MappingProxyType(
    {
        "ppo": _PPO,
        "grpo": _PPO + r" + \beta (1/r - 1 + \log r)",
        "reinforce_pp": _PPO + r" + \beta \log r",
        "gspo": r"\mathrm{clip}_\mathrm{PPO}(s, A), \quad s = \exp(\tfrac1T \textstyle\sum_t \log w_t)",
        "cispo": r"-\mathrm{sg}(\min(w, 1+\varepsilon_2)) A \log\pi_\theta",
    }
)

ADVANTAGES: Mapping[str, str] = MappingProxyType(
    {
        "group_mean": r"R_i - \tfrac1G \textstyle\sum_j R_j",
        "batch_mean": r"R_i - \mathrm{mean}_\mathrm{batch}(R)",
        "group_standardised": r"(R_i - \mathrm{mean}_\mathrm{group}(R)) / (\mathrm{std}_\mathrm{group}(R) + 10^{-6})",
        "leave_one_out": r"R_i - \tfrac{1}{G-1} \textstyle\sum_{j \ne i} R_j",
        "whitened_returns": r"\mathrm{whiten}_\mathrm{tokens}(R_i)",
        "whitened_group_mean": r"\mathrm{whiten}_\mathrm{tokens}(R_i - \mathrm{mean}_\mathrm{group}(R))",
        "gae": r"\textstyle\sum_k (\gamma\lambda)^k \delta_{t+k}, \quad \delta_t = R_t + \gamma V_{t+1} - V_t",
    }
)

AGGREGATES: Mapping[str, str] = MappingProxyType(
    {
        "token_mean": r"\textstyle\sum_{i,t} \ell_{i,t} / \sum_i T_i",
        "sequence_mean_token_sum": r"\tfrac1N \textstyle\sum_i \sum_t \ell_{i,t}",
        "sequence_mean_token_mean": r"\tfrac1N \textstyle\sum_i \tfrac{1}{T_i} \sum_t \ell_{i,t}",
        "constant": r"\tfrac{1}{N L} \textstyle\sum_i \sum_t \ell_{i,t}",
    }
)
