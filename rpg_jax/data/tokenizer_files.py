"""A tokenizer as the files that transformers and vLLM read with it: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import sentencepiece
import tokenizers

KEPT = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.model",
)
"""The files of a tokenizer in Hugging Face layout; generation_config.json names its stop tokens."""
_SPACE = "\u2581"  # SentencePiece's own sign for a space


def copy(source: Path, target: Path) -> None:
    """Copies the tokenizer's files from one folder to another, which is made."""
    target.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def write(model: sentencepiece.SentencePieceProcessor, folder: Path) -> None:
    """Writes a SentencePiece model of single characters as tokenizer.model, tokenizer.json and tokenizer_config.json.

    The ids are the same, except that the text of a special piece, "</s>" for instance, is this piece in transformers,
    and single characters here.

    Raises:
      ValueError: a piece has several characters: such a model has merges or a normalisation, which are not converted.
    """
    pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
    special = {i for i in range(len(pieces)) if model.is_control(i) or model.is_unknown(i)}
    if longer := [piece for i, piece in enumerate(pieces) if i not in special and len(piece) != 1]:
        raise ValueError(
            f"the tokenizer has pieces of several characters ({longer[0]!r}, …), and only models of single characters "
            "are converted to tokenizer.json: give the export a tokenizer.json of your own, as model.tokenizer"
        )
    converted = tokenizers.Tokenizer(tokenizers.models.Unigram([(piece, 0.0) for piece in pieces], model.unk_id()))
    converted.normalizer = tokenizers.normalizers.Replace(" ", _SPACE)
    converted.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace(_SPACE, " "), tokenizers.decoders.Fuse()]
    )
    converted.add_special_tokens(
        [tokenizers.AddedToken(pieces[i], special=True, normalized=False) for i in sorted(special)]
    )
    named = {"pad": model.pad_id(), "eos": model.eos_id(), "bos": model.bos_id(), "unk": model.unk_id()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": pieces[i] for name, i in named.items() if i >= 0},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model.serialized_model_proto())
    converted.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
