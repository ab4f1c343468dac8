"""The pages of docs/ that are made from the code: methods.md and configuration.md."""

from collections.abc import Mapping
from typing import Any

from rpg_jax import losses
from rpg_jax.report.markdown import table
from rpg_jax.runs import config_files
from rpg_jax.runs.fields import Field, Section, Unset
from rpg_jax.training.reference_rules import RULES

_SYMBOLS = r"""
A completion's tokens come from the behaviour policy $\pi_\mathrm{old}$; $\pi_\theta$ is trained and
$\pi_\mathrm{ref}$ anchors the KL term. Per token, given its prefix: $w = \pi_\theta/\pi_\mathrm{old}$,
$\rho = \pi_\mathrm{ref}/\pi_\mathrm{old}$ (1 where the reference is the behaviour policy), $r = w/\rho$; $A$ is the
advantage, $\beta$ the KL coefficient, $\mathrm{sg}$ stops the gradient. Losses are minimised.
"""

_CLIP = r"""
With $K$ from the table of divergences, the regularized advantage is $A_\mathrm{reg} = A - \beta K/w$: what a token is
worth once its share of the KL gradient is subtracted. $C$ is $w$ inside the clip range, and outside a bound:
$1+\varepsilon_2$ where $A_\mathrm{reg} \ge 0$ and $w \ge 1+\varepsilon_2$; $1-\varepsilon_1$ where
$A_\mathrm{reg} < 0$ and $w \le 1-\varepsilon_1$; $c$ where $A_\mathrm{reg} < 0$ and $w \ge c$. With clip `dual` such
a token has no gradient; with `truncate` it keeps one, weighted by the bound. With `reward` the sign of $A$ decides $C$,
the loss is $-\mathrm{sg}(C A) x + \beta d$ with $x$ as in the table and $d$ of the divergence, and a token outside a
bound keeps the gradient of $\beta d$ alone. PPO's clip is
$\mathrm{clip}_\mathrm{PPO}(w, A) = \max(-wA, -\mathrm{clip}(w, 1-\varepsilon_1, 1+\varepsilon_2) A)$, and where
$A < 0$ at most $-cA$.
"""

_LEVELS = r"""
The objective is an expectation over completions, and there are two ways to read it. With `loss.level=token` every
gradient is exact *for a token given its prefix*: $\pi_\mathrm{old}$ writes the prefix and what follows, and the token
alone is weighted. With `loss.level=sequence` or `to_go` the gradient is that of whole completions $x$. For completions
of one token the two are the same. For longer ones the token level leaves out the weights of the prefixes and, for
reverse divergences, the KL of the tokens to come. [estimators.md](estimators.md) measures what that costs.

For completions $W = \prod_t w_t$, $r_x = \prod_t r_t$, and $\rho_{\le t}$ is the ratio of a prefix. `sequence` gives
every token the completion's regularized return, for `rkl` with the leave-one-out baseline

$$A_{\mathrm{reg},i} = (R_i - \beta \log r_{x_i}) - \tfrac{1}{G-1} \textstyle\sum_{j \ne i}
(R_j - \beta \log(\pi_\mathrm{old}/\pi_\mathrm{ref})(x_j)).$$

The log-ratio of the completion itself is the present policy's. Those of the others are $\pi_\mathrm{old}$'s: so a group
may be split over micro-batches. `to_go` adds to a token's KL the discounted KL of the tokens to come, $F$.

`loss.weight` chooses $C$. $W$ (`product`) is exact, off-policy too; `to_go` then also needs `loss.trace_cap=inf`. The
other weights are exact on-policy alone. Weight 1 (`none`) is the gradient of
$\tfrac12 \mathrm{Var}_{\pi_\mathrm{old}}[R - \beta \log r_x]$ *if* the baseline is the present policy's, with
$\log r_{x_j}$ in the formula above. The minimiser is then the optimum $\pi^* \propto \pi_\mathrm{ref} \exp(R/\beta)$,
whatever $\pi_\mathrm{old}$ is. With the baseline of $\pi_\mathrm{old}$, which runs have, weight 1 reaches $\pi^*$ only
if $\pi_\mathrm{old}$ follows $\pi_\theta$. Where $\pi_\mathrm{old}$ stays, it ends
[0.193 below the best possible $J$](estimators.md#completions-of-several-tokens-where-does-it-end).

The gradient of completions is more than a loss. A run with `loss.level=sequence` or `to_go` is refused unless it has

- `loss.advantage=leave_one_out`. `group_mean` gives the rewards the factor $(G-1)/G$ and not the KL, so $\beta$ acts as
  $\beta G/(G-1)$. Other advantages give each group a factor of its own;
- `loss.aggregate=sequence_mean_token_sum` or `constant`. Means over tokens weight a completion by its length;
- `dynamic_sampling.enabled=False` and `rewards.overlong_masking=False`. A group or a completion that is dropped takes
  its KL along: where 78 % of the groups are informative, a $\beta$ of 0.1 acts as 0.073;
- `loss.clip=none` with `loss.weight=product`.

The rows `RPG-SEQ-…`, `KL-in-reward` and `Log-variance` have these values. At the level of tokens nothing of this is
refused, because the rows of the paper have group means and dynamic sampling: their $\beta$ acts as another one too.
"""

_GRPO = r"""
GRPO's KL term is $\beta k_3$ at $\pi_\mathrm{ref}/\pi_\theta$, as published. With `loss.kl_weighting=importance` it is
$\beta w k_3 = \beta (w \log r - w + \rho)$, whose gradient has the mean
$\beta \nabla \mathrm{KL}(\pi_\theta\Vert\pi_\mathrm{ref})$. With `loss.kl_clamp=10` it is
$\beta \min(1/r - 1 + \log r, 10)$, without a gradient beyond 10. `GRPO` is the row of the paper's recipes: it has this
bound and the mean over tokens. `GRPO-DeepSeekMath` is GRPO as first published: no bound, and the mean over sequences.
"""

_ADVANTAGES = r"""
The rewards $R_i$ of a prompt's $G$ completions give an advantage to each completion, `gae` to each token. A
conversation with an environment is one completion, and the tokens that the environment wrote count nowhere. With
`loss.credit=turn` each turn $t$ has its own advantage: $R_{i,t} = \sum_{j \ge t} r_{i,j}$, what it and later turns
were paid, takes the place of $R_i$ and is compared with the $R_{\cdot,t}$ of the group's completions that have a turn
$t$. A turn that no other completion has is compared with the last turns of the longest others.
"""

_INTRODUCTION = """
Set a field with `--config.NAME=VALUE` on any command that takes `--config`. An experiment's file in `configs/` states
only its differences from these defaults. *method*: the row of [methods.md](methods.md) that `config.method` names sets
the field. *unset*: the field is off, or derived as its text says; the type of its values is in brackets.
"""

_SAMPLER = r"""
Tokens come from $\pi_\mathrm{s}$, the policy in the rollout engine's numerics; a loss takes them for tokens of
$\pi_\mathrm{old}$. `loss.sampler_correction` multiplies a token's whole loss by a constant weight: a function of
$u = \pi_\mathrm{old}/\pi_\mathrm{s}$, of its product $u_x$ over the completion, or of its geometric mean $\bar u$.
$[\cdot]$ is 1 where the condition holds, else 0. The bounds $l$ and $h$ are `loss.sampler_low` and `loss.sampler_high`.

[Sampling ahead](running.md#sampling-ahead-of-training) draws tokens from a $\pi_\mathrm{s}$ of earlier weights. With a
correction that has $u$ or $u_x$ as a factor, $\pi_\mathrm{old}$ then is the policy at the beginning of the step. With
the others, and without a correction, it is $\pi_\mathrm{s}$ itself.
"""

# The symbols of the hyperparameters that the column "clip" shows.
_SHOWN = {"clip": "", "clip_low": "ε₁ ", "clip_high": "ε₂ ", "clip_dual": "c "}
_SHOWN |= {"mask_threshold": "δ ", "tau_positive": "τ₊ ", "tau_negative": "τ₋ ", "sampler_correction": "sampler: "}

_COLUMNS = ("method", "loss of a token", "advantage", "aggregate", "clip", "β", "reference", "dynamic sampling")
_MORE = ("overlong shaping", "learning rate", "source")


def methods_page() -> str:
    """methods.md without its title: every row of `losses.METHODS`, and the equations of its names."""
    references = ((f"`{name}`", rule.meaning) for name, rule in RULES.items())
    divergences = (
        (f"`{name}`", f"${d.objective}$", f"${d.value}$", f"${d.weight}$") for name, d in losses.DIVERGENCES.items()
    )
    parts = [
        _SYMBOLS,
        table((*_COLUMNS, *_MORE), map(_row, losses.METHODS.items())),
        "`config.method` sets the fields to the values of its row. A field set by hand wins over the row. The learning "
        "rates are for pretrained models; the configs of small models set their own.",
        _GRPO,
        "## References",
        r"The policy $\pi_\mathrm{ref}$; K is `reference.every`, κ is `reference.kl_threshold`.",
        table(("name", "policy"), references),
        "## Divergences",
        r"The mean of $d$ under $\pi_\mathrm{old}$ is $D$, and the mean of $K \nabla\log\pi_\theta$ is $\nabla D$.",
        table(("name", "divergence", "$d$", "$K = \\partial d / \\partial \\log w$"), divergences),
        "## Clips",
        _CLIP,
        "## Tokens and completions",
        _LEVELS,
        "## Advantages",
        _ADVANTAGES,
        _equations({**losses.ADVANTAGES, **losses.LEARNED_ADVANTAGES}),
        "## Aggregates",
        r"$N$ completions have $T_i$ trained tokens with losses $\ell_{i,t}$; $L$ is `loss.constant_length`.",
        _equations(losses.AGGREGATES),
        "## Sampler corrections",
        _SAMPLER,
        _equations(losses.SAMPLER_CORRECTIONS),
    ]
    return "\n\n".join(part.strip() for part in parts)


def configuration_page() -> str:
    """configuration.md without its title: every config field with its default, its unit and its meaning."""
    sections = config_files.declared().sections()
    return "\n\n".join([_INTRODUCTION.strip(), *(_section(name, section) for name, section in sections)])


def _row(named: tuple[str, losses.Method]) -> tuple[str, ...]:
    name, method = named
    loss = losses.LOSSES[method.loss].latex(**method.hyperparameters)
    kl_coef = method.hyperparameters.get("kl_coef")
    names = (f"`{name}`", f"${loss}$", f"`{method.advantage}`", f"`{method.aggregate}`", _clip(method))
    beta = "–" if kl_coef is None else f"{kl_coef:g}"
    switches = ("yes" if on else "no" for on in (method.dynamic_sampling, method.overlong_shaping))
    rate = f"{method.learning_rate:g}".replace("e-0", "e-")
    return *names, beta, f"`{method.reference}`", *switches, rate, method.source


def _clip(method: losses.Method) -> str:
    """The clip range, for example "dual, ε₁ 0.2, ε₂ 0.28, c 10"."""
    values, words = method.hyperparameters, []
    for key, symbol in _SHOWN.items():
        if key in values:
            words.append(f"{symbol}{values[key]:{'' if isinstance(values[key], str) else 'g'}}")
    return ", ".join(words)


def _equations(rows: Mapping[str, Any]) -> str:
    return table(("name", "formula"), ((f"`{name}`", f"${row.equation}$") for name, row in rows.items()))


def _section(name: str, section: Section) -> str:
    rows = [
        (f"`{name}.{key}`" if name else f"`{key}`", _default(field), field.unit, field.text)
        for key, field in section.entries.items()
        if isinstance(field, Field)
    ]
    title = f"`{name}`" if name else "The run"
    return f"## {title}\n\n{section.meaning}\n\n{table(('field', 'default', 'unit', 'meaning'), rows)}"


def _default(field: Field) -> str:
    if isinstance(field.default, Unset):
        word, _, kind = field.initial.partition(" ")
        return f"*{word}* {kind}"
    return f"`{field.initial}`"
