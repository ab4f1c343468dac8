"""Text to token ids and back: SentencePiece for procedural tasks, Hugging Face `tokenizer.json` for Qwen."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import sentencepiece
import tokenizers

from rpg_jax import storage
from rpg_jax.data.chat import ChatTemplate
from rpg_jax.storage.files import read_if_there

_REPLACEMENT = "\ufffd"
_FILES = (
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
_RESERVED = f"\0\x1f{_SPACE}\u2585"  # SentencePiece gives these characters no token of their own


class Codec(Protocol):
    """Turns text into token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, without adding any. Where the text spells a special token, as "<|im_end|>",
        a Hugging Face tokenizer gives this token, and a SentencePiece model the tokens of its characters."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, without special tokens and ids that have no token: a model may have more."""
        ...


def check_unicode(text: str, what: str) -> None:
    """Raises ValueError if `text` has half of a character (a lone surrogate). The message calls the text `what`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} has half of a character at {error.start} (a lone surrogate): give Unicode") from None


class Tokenizer(Codec, Protocol):
    """The interface of a tokenizer.

    Attributes:
      vocab_size: number of token ids, special tokens included.
      pad_id: the padding of rows; may be `eos_id`.
      eos_id: the first of `stop_token_ids`.
      bos_id: the token at the beginning of a text; None if there is none. `encode` never adds it.
      stop_token_ids: each of them ends a completion, and remains its last token.
      chat: the chat template; None if the tokenizer has none.
    """

    vocab_size: int
    pad_id: int
    eos_id: int
    bos_id: int | None
    stop_token_ids: tuple[int, ...]
    chat: ChatTemplate | None

    def name(self, token: int) -> str:
        """Returns a token as its vocabulary spells it: "<|im_end|>", or with a space before it "Ġworld" or "▁"; "" for
        an id that has no token."""
        ...

    def unknown(self, text: str) -> str:
        """Returns the distinct characters of `text` that have no token, in order; "" if all have one."""
        ...

    def digest(self) -> str:
        """Returns a SHA-256 in hex of all that encoding, decoding, stop tokens and the chat template depend on."""
        ...

    def save(self, folder: Path) -> None:
        """Makes `folder` and writes the files that `load_tokenizer` and transformers read."""
        ...


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads a tokenizer from a *.json or *.model file, or from a folder: its tokenizer.json, else its tokenizer.model,
    else its first *.model by name. Raises ValueError without such a file, and if its tokenizer's class refuses it."""
    path = Path(path)
    readers = {".json": HuggingFaceTokenizer, ".model": SentencePieceTokenizer}
    for file in (path, path / "tokenizer.json", path / "tokenizer.model", *sorted(path.glob("*.model"))):
        if file.is_file() and file.suffix in readers:
            return readers[file.suffix](file)
    found = sorted(p.name for p in path.iterdir())[:20] if path.is_dir() else "no such folder or file"
    raise ValueError(f"no tokenizer at {path}: expected tokenizer.json or a SentencePiece *.model, found {found}")


def train_sentencepiece(texts: Iterable[str], path: str | os.PathLike[str]) -> SentencePieceTokenizer:
    """Trains a SentencePiece model whose pieces are single characters, writes it to the file `path` and loads it. Ids 0
    to 3 are padding, end of text, beginning of text and unknown; the line break and the characters of `texts` follow.
    The same texts give the same bytes on every machine. Raises ValueError if `texts` have nothing but line breaks, or a
    character that can have no token."""
    lines = "\n".join(texts).split("\n")
    characters = set("".join(lines))
    needed = len(characters) + 4 + 1  # four special pieces, and the line break, which SentencePiece reserves
    if not (others := characters - {"\r"}):
        raise ValueError("no text to train a tokenizer on")
    if lost := sorted(others & {*_RESERVED}):
        raise ValueError(f"no tokenizer of single characters has {lost[0]!r}: leave it out, or set model.tokenizer")
    if "\r" in characters:
        lines.append("\r" + min(others))  # SentencePiece does not see it at the end of a line
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        # It leaves out a line of more than 4,192 bytes.
        sentence_iterator=iter([line[i : i + 1000] for line in lines for i in range(0, len(line), 1000)]),
        model_writer=model,
        model_type="char",
        vocab_size=needed,
        hard_vocab_limit=False,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        user_defined_symbols=["\n"],
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        num_threads=1,
        minloglevel=2,
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.write_atomically(path, model.getvalue())  # other processes of the run read it
    return SentencePieceTokenizer(path)


class SentencePieceTokenizer(Tokenizer):
    """The tokenizer of a SentencePiece model, without a chat template. The end-of-text piece is the only stop token.
    Raises ValueError if `file` is missing or no such model, or has no padding or end-of-text piece."""

    chat = None

    def __init__(self, file: str | os.PathLike[str]):
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{file} is damaged: it is no SentencePiece model. Copy it again") from error
        self.vocab_size = self._model.get_piece_size()
        self.pad_id, self.eos_id = self._model.pad_id(), self._model.eos_id()
        if min(self.pad_id, self.eos_id) < 0:
            raise ValueError(f"{file} has no padding or end-of-text piece: train it with pad_id and eos_id set")
        self.bos_id = self._model.bos_id() if self._model.bos_id() >= 0 else None
        self.stop_token_ids: tuple[int, ...] = (self.eos_id,)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids if i < self.vocab_size])

    def name(self, token: int) -> str:
        return self._model.id_to_piece(token) if token < self.vocab_size else ""

    def unknown(self, text: str) -> str:
        return "".join(c for c in dict.fromkeys(text) if self._model.unk_id() in self.encode(c))

    def digest(self) -> str:
        """Returns the SHA-256 of the model, in hex."""
        return hashlib.sha256(self._model.serialized_model_proto()).hexdigest()

    def save(self, folder: Path) -> None:
        """Makes `folder` and writes tokenizer.model, tokenizer.json and tokenizer_config.json there. transformers and
        vLLM read them and give the same ids, with one exception: the text of a special piece, such as "</s>", is one
        token there, and single characters here. Raises ValueError if another piece has several characters."""
        model = self._model
        pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
        special = {i for i in range(len(pieces)) if model.is_control(i) or model.is_unknown(i)}
        if longer := [piece for i, piece in enumerate(pieces) if i not in special and len(piece) != 1]:
            raise ValueError(
                f"the tokenizer has pieces of several characters ({longer[0]!r}, …), and only models of single "
                "characters are converted to tokenizer.json: give the export a tokenizer.json of your own, as "
                "model.tokenizer"
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


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer of the tokenizer.json `file`, with the special tokens and the chat template of files beside it.

    tokenizer_config.json names special tokens and a chat template, which chat_template.jinja replaces if it exists.
    generation_config.json names more stop tokens: Qwen's chat models have two. Without a padding token, `pad_id` is
    `eos_id`. Raises ValueError if a file is damaged, names a token that `file` lacks, or no stop token is named.
    """

    def __init__(self, file: str | os.PathLike[str]):
        self._file = file = Path(file)
        try:
            self._model = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises this class
            raise ValueError(f"{file} is damaged: {' '.join(str(error).split())[:200]}. Copy it again") from error
        self._model.no_truncation()  # a file keeps those of the call before it was saved; transformers ignores them
        self._model.no_padding()
        config = read_if_there(file.with_name("tokenizer_config.json"))
        generation = read_if_there(file.with_name("generation_config.json"))
        self.vocab_size = self._model.get_vocab_size(with_added_tokens=True)
        eos = self._special_id(config, "eos_token")
        stops = _stops(generation)
        self.stop_token_ids = tuple(dict.fromkeys(([] if eos is None else [eos]) + stops))
        if not self.stop_token_ids:
            raise ValueError(f"{file.parent} has no end-of-text token in tokenizer_config.json, generation_config.json")
        self.eos_id = self.stop_token_ids[0]
        pad = self._special_id(config, "pad_token")
        self.pad_id = self.eos_id if pad is None else pad
        self.bos_id = self._special_id(config, "bos_token")
        self._unknown_id = self._model.token_to_id(_content(config.get("unk_token")) or "")
        separate = file.with_name("chat_template.jinja")
        template = separate.read_text(encoding="utf-8") if separate.is_file() else config.get("chat_template")
        specials = {k: text for k in ("bos_token", "eos_token", "pad_token") if (text := _content(config.get(k)))}
        try:
            self.chat = ChatTemplate(template, specials) if template else None
        except (ValueError, KeyError, TypeError) as error:
            where = separate if separate.is_file() else file.with_name("tokenizer_config.json")
            raise ValueError(f"{where}: {error}") from error
        self._about = [self._model.to_str(), self.stop_token_ids, template, specials]

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=True)

    def name(self, token: int) -> str:
        return self._model.id_to_token(token) or ""

    def unknown(self, text: str) -> str:
        return "".join(c for c in dict.fromkeys(text) if self.encode(c) in ([], [self._unknown_id]))

    def digest(self) -> str:
        """Returns the SHA-256, in hex, of the model, the stop tokens, the chat template and its special tokens."""
        return hashlib.sha256(json.dumps(self._about, sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Makes `folder` and copies the tokenizer's files to it. generation_config.json there has all stop tokens."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            source = self._file if name == "tokenizer.json" else self._file.with_name(name)
            if source.is_file():
                shutil.copyfile(source, folder / name)
        generation = read_if_there(file := folder / "generation_config.json")
        if not set(self.stop_token_ids) <= set(_stops(generation)):
            generation["eos_token_id"] = [*self.stop_token_ids]
            file.write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")

    def _special_id(self, config: dict[str, Any], name: str) -> int | None:
        token = _content(config.get(name))
        if token is None:
            return None
        token_id = self._model.token_to_id(token)
        if token_id is None:
            raise ValueError(f"tokenizer_config.json names {name} {token!r}, which tokenizer.json does not have")
        return token_id


def _stops(generation: Mapping[str, Any]) -> list[int]:
    """Returns the stop tokens that a generation_config.json names, maybe none. Raises ValueError if one is no id."""
    found = generation.get("eos_token_id")
    stops = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(stop) is int and stop >= 0 for stop in stops):
        raise ValueError(f"generation_config.json is damaged: eos_token_id {found!r} is no id, nor a list of ids")
    return stops


class IncrementalDecoder:
    """Decodes a growing completion piece by piece and never emits part of a character. The pieces and the result of
    `flush`, joined, equal `tokenizer.decode` of all ids. `push` decodes again only the last piece and the ids after
    it, so the cost of a token does not grow with the completion. A run of ids that complete no text is decoded again
    when it is a sixteenth longer: at first at each id, and after 32,000 ids the next text may come 2,000 ids late."""

    def __init__(self, tokenizer: Codec):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._emitted = 0  # ids[:emitted] are out, but stay as context: some decoders look at the previous token
        self._enough = 0  # ids to decode again

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids, and returns the text that they complete; "" while a character is unfinished."""
        self._ids += ids
        text = self._new_text() if len(self._ids) >= self._enough else ""
        if not text or text.endswith(_REPLACEMENT):
            self._enough = max(self._enough, len(self._ids) + (len(self._ids) - self._emitted) // 16)
            return ""
        self._ids, self._emitted, self._enough = self._ids[self._emitted :], len(self._ids) - self._emitted, 0
        return text

    def flush(self) -> str:
        """Returns the rest of the text, with U+FFFD for an unfinished character. The next `push` begins a new text."""
        text = self._new_text()
        self._ids, self._emitted, self._enough = [], 0, 0
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._emitted])
        return self._tokenizer.decode(self._ids)[len(before) :]


def _content(token: Any) -> str | None:
    """Returns the text of a special token in tokenizer_config.json, or None. Raises ValueError if it is no text."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str | None):
        raise ValueError(f"tokenizer_config.json is damaged: the special token {token!r} is no text")
    return text
