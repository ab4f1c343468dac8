"""Losses as functions of arrays: no model, no config, no device.

loss, metrics = rpg(logprobs, behaviour_logprobs, advantages, mask, ref_logprobs=…, divergence="urkl", kl_coef=0.01)

`policy_loss` calls any loss by its name, and returns sum and weight apart for loops with micro-batches.
"""

from rpg_jax.losses.advantages import ADVANTAGES as ADVANTAGES
from rpg_jax.losses.advantages import LEARNED_ADVANTAGES as LEARNED_ADVANTAGES
from rpg_jax.losses.advantages import advantages as advantages
from rpg_jax.losses.advantages import declare_own_advantage as declare_own_advantage
from rpg_jax.losses.advantages import turn_advantages as turn_advantages
from rpg_jax.losses.aggregate import AGGREGATES as AGGREGATES
from rpg_jax.losses.aggregate import Mean as Mean
from rpg_jax.losses.aggregate import aggregate as aggregate
from rpg_jax.losses.calling import cispo as cispo
from rpg_jax.losses.calling import dppo as dppo
from rpg_jax.losses.calling import gmpo as gmpo
from rpg_jax.losses.calling import grpo as grpo
from rpg_jax.losses.calling import gspo as gspo
from rpg_jax.losses.calling import of_arrays as of_arrays
from rpg_jax.losses.calling import opmd as opmd
from rpg_jax.losses.calling import policy_loss as policy_loss
from rpg_jax.losses.calling import ppo as ppo
from rpg_jax.losses.calling import reinforce_pp as reinforce_pp
from rpg_jax.losses.calling import rpg as rpg
from rpg_jax.losses.calling import rpg_completions as rpg_completions
from rpg_jax.losses.calling import sapo as sapo
from rpg_jax.losses.calling import token_loss as token_loss
from rpg_jax.losses.calling import verl_form as verl_form
from rpg_jax.losses.completions import kl_baseline as kl_baseline
from rpg_jax.losses.declaration import LOSSES as LOSSES
from rpg_jax.losses.declaration import Loss as Loss
from rpg_jax.losses.declaration import Range as Range
from rpg_jax.losses.declaration import TokenLoss as TokenLoss
from rpg_jax.losses.declaration import declare_own_loss as declare_own_loss
from rpg_jax.losses.declaration import find_loss as find_loss
from rpg_jax.losses.divergences import DIVERGENCES as DIVERGENCES
from rpg_jax.losses.logprobs import Cut as Cut
from rpg_jax.losses.logprobs import TokenNumbers as TokenNumbers
from rpg_jax.losses.logprobs import token_divergences as token_divergences
from rpg_jax.losses.logprobs import token_logprobs as token_logprobs
from rpg_jax.losses.methods import METHODS as METHODS
from rpg_jax.losses.methods import Method as Method
from rpg_jax.losses.methods import get_method as get_method
from rpg_jax.losses.metrics import Metrics as Metrics
from rpg_jax.losses.metrics import divided as divided
from rpg_jax.losses.metrics import merge as merge
from rpg_jax.losses.sampler_correction import SAMPLER_CORRECTIONS as SAMPLER_CORRECTIONS
from rpg_jax.losses.sampler_correction import carried_ratio as carried_ratio
from rpg_jax.losses.tokens import PrefixKL as PrefixKL
from rpg_jax.losses.tokens import Tokens as Tokens
from rpg_jax.losses.values import explained_variance as explained_variance
from rpg_jax.losses.values import gae as gae
from rpg_jax.losses.values import value_loss as value_loss
from rpg_jax.losses.values import value_metrics as value_metrics
