"""Problems, tokenizers and the rows that the trainer reads."""

from rpg_jax.data.arithmetic import Arithmetic as Arithmetic
from rpg_jax.data.batching import bucket_length as bucket_length
from rpg_jax.data.batching import micro_batches as micro_batches
from rpg_jax.data.batching import pack_completions as pack_completions
from rpg_jax.data.batching import pad_completions as pad_completions
from rpg_jax.data.batching import pad_supervised as pad_supervised
from rpg_jax.data.prompts import Problem as Problem
from rpg_jax.data.prompts import PromptStream as PromptStream
from rpg_jax.data.prompts import fingerprint as fingerprint
from rpg_jax.data.sources import Report as Report
from rpg_jax.data.sources import load as load
from rpg_jax.data.templates import EncodedPrompts as EncodedPrompts
from rpg_jax.data.templates import encode_prompt as encode_prompt
from rpg_jax.data.templates import encode_prompts as encode_prompts
from rpg_jax.data.tokenizer import Tokenizer as Tokenizer
from rpg_jax.data.tokenizer import load_tokenizer as load_tokenizer
from rpg_jax.data.tokenizer import train_sentencepiece as train_sentencepiece
