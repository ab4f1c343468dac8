"""Decoders in Flax NNX, Qwen first: weights, forward, prefill and decode, and folders in Hugging Face layout."""

from rpg_jax.models.config import DecoderConfig as DecoderConfig
from rpg_jax.models.config import Experts as Experts
from rpg_jax.models.config import Rope as Rope
from rpg_jax.models.config import Yarn as Yarn
from rpg_jax.models.decoder import REMAT as REMAT
from rpg_jax.models.decoder import Decoder as Decoder
from rpg_jax.models.decoder import Params as Params
from rpg_jax.models.decoder import abstract as abstract
from rpg_jax.models.decoder import init as init
from rpg_jax.models.decoder import logical_axes as logical_axes
from rpg_jax.models.hf_config import parse_config as parse_config
from rpg_jax.models.hf_config import read_config as read_config
from rpg_jax.models.hf_config import write_config as write_config
from rpg_jax.models.hf_loading import InHostMemory as InHostMemory
from rpg_jax.models.hf_loading import load as load
from rpg_jax.models.hf_loading import local_folder as local_folder
from rpg_jax.models.hf_loading import read as read
from rpg_jax.models.hf_saving import Saving as Saving
from rpg_jax.models.hf_saving import save as save
from rpg_jax.models.kv_cache import KVCache as KVCache
from rpg_jax.models.lora import Base as Base
from rpg_jax.models.lora import Lora as Lora
from rpg_jax.models.lora import policy_params as policy_params
from rpg_jax.models.sizes import SIZES as SIZES
from rpg_jax.models.sizes import parameter_count as parameter_count
from rpg_jax.models.sizes import size as size
