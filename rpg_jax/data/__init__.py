"""Problems, tokenizers and the rows that the trainer reads."""

from rpg_jax.data.groups import Group as Group
from rpg_jax.data.groups import unscored as unscored
from rpg_jax.data.packing import RolloutBatch as RolloutBatch
from rpg_jax.data.packing import RowShape as RowShape
from rpg_jax.data.packing import pack as pack
from rpg_jax.data.packing import rows_needed as rows_needed
from rpg_jax.data.prompts import Problem as Problem
from rpg_jax.data.prompts import PromptStream as PromptStream
from rpg_jax.data.prompts import encode_prompt as encode_prompt
from rpg_jax.data.prompts import filter_length as filter_length
from rpg_jax.data.prompts import fingerprint as fingerprint
from rpg_jax.data.sources import file_rows as file_rows
from rpg_jax.data.sources import load as load
from rpg_jax.data.synthetic import Arithmetic as Arithmetic
from rpg_jax.data.synthetic import Chains as Chains
from rpg_jax.data.tokenizer import Tokenizer as Tokenizer
from rpg_jax.data.tokenizer import load_tokenizer as load_tokenizer
from rpg_jax.data.tokenizer import train_sentencepiece as train_sentencepiece
