from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg_jax.data.synthetic import Arithmetic
from rpg_jax.data.tokenizer import IncrementalDecoder, load_tokenizer, train_sentencepiece


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "tokenizer.model"
    return train_sentencepiece(["a b  c\nd é中😀", " x\ufffd"], path)


def test_characters_without_a_token_are_named_once_and_bytes_know_all(characters, qwen_like):
    assert characters.unknown("hello d") == "helo"
    assert characters.unknown("a b  c\nd é中😀\ufffd") == ""
    assert qwen_like.unknown("hello 中😀\n") == ""


def test_sentencepiece_gives_each_character_of_the_task_its_own_piece(tmp_path):
    task = Arithmetic(operators="+-*")
    tokenizer = train_sentencepiece(task.texts(), tmp_path / "tokenizer.model")
    for prompt, target in task.examples(task.problems("train", 50)):
        ids = tokenizer.encode(prompt + target)
        assert len(ids) == len(prompt + target) and max(ids) < tokenizer.vocab_size
        assert tokenizer.decode([*ids, tokenizer.eos_id, tokenizer.pad_id]) == prompt + target
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (0, 1, 2)


@pytest.mark.parametrize(
    "texts", [["a" * 5000 + "b"], ["ab", "é" * 2100], ["a\r\nb\r\n"]], ids=["one", "one of two", "Windows"]
)
def test_a_line_has_its_characters_in_the_tokenizer(tmp_path, texts):
    """SentencePiece leaves out lines of more than 4,192 bytes, and a carriage return at the end of a line."""
    tokenizer = train_sentencepiece(texts, tmp_path / "tokenizer.model")
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts


@pytest.mark.parametrize(
    ("text", "named"), [("a\0b", r"'\\x00'"), ("a▁b", "'▁'"), ("▅", "'▅'"), ("\n", "no text"), ("\r", "no text")]
)
def test_a_text_that_no_tokenizer_of_characters_has_is_refused(tmp_path, text, named):
    with pytest.raises(ValueError, match=named):
        train_sentencepiece([text], tmp_path / "tokenizer.model")


def test_sentencepiece_training_is_deterministic_and_reloads(tmp_path):
    for name in ("a", "b"):
        train_sentencepiece(Arithmetic().texts(), tmp_path / name / "tokenizer.model")
    assert (tmp_path / "a/tokenizer.model").read_bytes() == (tmp_path / "b/tokenizer.model").read_bytes()
    assert load_tokenizer(tmp_path / "a").encode("12+34=") == load_tokenizer(tmp_path / "b").encode("12+34=")


def test_an_id_beyond_the_vocabulary_has_no_text(characters, qwen_like):
    for tokenizer in (characters, qwen_like):
        beyond = tokenizer.vocab_size + 5  # a model of another size may draw it
        assert tokenizer.decode([*tokenizer.encode("a b"), beyond]) == "a b" and tokenizer.name(beyond) == ""


def test_white_space_survives(characters, qwen_like):
    text = " a  b\n\nx é😀 "
    assert characters.decode(characters.encode(text)) == text
    assert qwen_like.decode(qwen_like.encode(text)) == text


def test_special_tokens_are_found_and_left_out_of_the_text(qwen_like):
    assert (qwen_like.eos_id, qwen_like.pad_id, qwen_like.stop_token_ids) == (258, 256, (258, 256))
    assert qwen_like.vocab_size == 259
    ids = qwen_like.encode("hi<|im_end|>")
    assert ids[-1] == 258 and qwen_like.decode(ids) == "hi"


def test_the_chat_template_renders_with_and_without_thinking(qwen_like):
    messages = [{"role": "user", "content": "1+1?"}]
    prompt = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert qwen_like.chat(messages) == prompt
    assert qwen_like.chat(messages, thinking=False) == prompt + "<think>\n\n</think>\n\n"


@pytest.mark.filterwarnings("ignore:Do not use the `random` module")  # threads of earlier tests use it
@given(st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_incremental_decoding_equals_decoding_at_once(characters, qwen_like, data):
    tokenizer = data.draw(st.sampled_from([characters, qwen_like]))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    ids += [data.draw(st.sampled_from([tokenizer.eos_id, tokenizer.encode("é")[-1]]))] * data.draw(st.integers(0, 60))
    ids += tokenizer.encode(data.draw(st.text("aé中😀\ufffd ", max_size=8)))
    decoder, pieces = IncrementalDecoder(tokenizer), []
    while ids_left := ids[sum(len(chunk) for chunk, _ in pieces) :]:
        chunk = ids_left[: data.draw(st.integers(1, 4))]
        pieces.append((chunk, decoder.push(chunk)))
    assert not any(text.endswith("\ufffd") for _, text in pieces)
    assert "".join(text for _, text in pieces) + decoder.flush() == tokenizer.decode(ids)


def test_incremental_decoding_waits_for_the_whole_character(qwen_like):
    decoder = IncrementalDecoder(qwen_like)
    assert [decoder.push([i]) for i in qwen_like.encode("a😀b")] == ["a", "", "", "", "😀", "b"]


@pytest.mark.parametrize("text", ["<|im_end|>", "é"], ids=["a special token", "a byte of no character"])
def test_a_long_run_of_ids_without_text_is_decoded_a_few_times(qwen_like, text):
    class Counted:
        def decode(self, ids):
            decoded.append(len(ids))
            return qwen_like.decode(ids)

    decoded, token = [], qwen_like.encode(text)[-1]
    decoder = IncrementalDecoder(Counted())
    assert {decoder.push([token]) for _ in range(4000)} == {""} and sum(decoded) < 40 * 4000
    assert decoder.flush() == qwen_like.decode([token] * 4000)


def test_a_folder_without_a_tokenizer_says_what_is_there(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match="notes.txt"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_a_sentencepiece_model_cut_short_is_named(tmp_path, share):
    file = tmp_path / "tokenizer.model"
    train_sentencepiece(["1+2=3", "40"], file)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"tokenizer\.model (is damaged|has no padding)"):
        load_tokenizer(file)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"version": "1.0"}'])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_damaged_file_of_a_hugging_face_tokenizer_is_named(tmp_path, name, content):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}', encoding="utf-8")
    load_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content)
    if name == "generation_config.json" and content.startswith(b"{") and content != b"{":
        return  # another object of the program, which names no token
    with pytest.raises(ValueError, match=rf"{name} is damaged|has no end-of-text token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *(("tokenizer_config.json", {"eos_token": token}) for token in (5, ["<eos>"], {"content": 5})),
        ("tokenizer_config.json", {"eos_token": "<eos>", "unk_token": 5}),
        *(("generation_config.json", {"eos_token_id": stop}) for stop in ("<eos>", ["<eos>"], [1.5], -1, {"a": 1})),
    ],
)
def test_a_special_token_that_is_no_token_is_named(tmp_path, name, fields):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}', encoding="utf-8")
    (tmp_path / name).write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{name} is damaged: .*(no text|no id)"):
        load_tokenizer(tmp_path)


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet="0123456789+=yes\n \u2581\u00e9", max_size=12))
def test_the_files_for_transformers_have_the_same_ids_and_text(converted, text):
    own, written = converted
    ids = own.encode(text)
    assert written.encode(text) == ids
    if not own.unknown(text):  # SentencePiece prints an unknown character, transformers leaves it out
        assert written.decode(ids) == own.decode(ids)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A SentencePiece tokenizer, and what is read from the files that it saves."""
    folder = tmp_path_factory.mktemp("converted")
    own = train_sentencepiece(["17+25= 42\nyes"], folder / "own.model")
    own.save(folder / "saved")
    written = load_tokenizer(folder / "saved")
    for name in ("vocab_size", "pad_id", "eos_id", "bos_id", "stop_token_ids"):
        assert getattr(written, name) == getattr(own, name), name
    return own, written


def test_a_tokenizer_of_hugging_face_is_saved_as_its_files(qwen_like, tmp_path):
    qwen_like.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").digest() == qwen_like.digest()


def test_a_tokenizer_in_a_file_of_another_name_is_saved_as_tokenizer_json(qwen_like, tmp_path):
    qwen_like.save(tmp_path / "own")
    (tmp_path / "own" / "tokenizer.json").rename(tmp_path / "own" / "mine.json")
    load_tokenizer(tmp_path / "own" / "mine.json").save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").digest() == qwen_like.digest()


@pytest.mark.parametrize("stops", [None, 0, [0], [0, 1]])
def test_a_stop_token_that_the_generation_config_lacks_is_in_the_saved_one(tmp_path, stops):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    (own := tmp_path / "own").mkdir()
    model.save(str(own / "tokenizer.json"))
    (own / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}', encoding="utf-8")
    (own / "generation_config.json").write_text(json.dumps({"top_k": 5, "eos_token_id": stops}), encoding="utf-8")
    load_tokenizer(own).save(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text(encoding="utf-8"))
    assert saved["top_k"] == 5 and set(saved["eos_token_id"]) == {1, *([] if stops is None else {0})}


def test_what_somebody_cut_and_padded_before_saving_is_neither_cut_nor_padded(qwen_like, tmp_path):
    qwen_like.save(tmp_path)
    model = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    model.enable_truncation(3)
    model.enable_padding(length=8)
    model.save(str(tmp_path / "tokenizer.json"))
    text = "a long text of many tokens"
    assert load_tokenizer(tmp_path).encode(text) == qwen_like.encode(text) and len(qwen_like.encode(text)) > 8
    assert load_tokenizer(tmp_path).encode("a") == qwen_like.encode("a")
