"""Weights come from a folder, the hub or a bucket; an address that fails gives an error of one line with the fix."""

import huggingface_hub
import pytest

from rpg_jax import models
from tests.fake_gcs import FakeGcs


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Replaces the hub's client; a list of the calls that it received."""
    asked = []

    def snapshot_download(repository, **options):
        asked.append((repository, options))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_local_folder_is_itself_even_where_the_hub_might_have_its_name(hub, tmp_path, monkeypatch):
    (tmp_path / "exported" / "qwen").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert str(models.local_folder("exported/qwen")) == "exported/qwen"
    assert str(models.local_folder("/models/none")) == "/models/none", "whoever reads it says what is missing"
    assert not hub


def test_a_model_that_comes_with_the_code_is_found_from_any_folder(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = models.local_folder("configs/chains_start")
    assert (shipped / "model.safetensors").stat().st_size < 300_000 and not hub
    (tmp_path / "configs/chains_start").mkdir(parents=True)
    assert str(models.local_folder("configs/chains_start")) == "configs/chains_start", "the user's own comes first"
    assert models.local_folder("configs/none") == tmp_path / "snapshot", "a name on the hub"


def test_the_hub_is_asked_for_safetensors_and_never_for_pickles(hub, tmp_path):
    assert models.local_folder("Qwen/Qwen3-4B") == tmp_path / "snapshot"
    models.local_folder("Qwen/Qwen3-4B", weights=False)
    (name, whole), (_, described) = hub
    assert name == "Qwen/Qwen3-4B" and "*.safetensors" in whole["allow_patterns"]
    assert set(whole["allow_patterns"]) - set(described["allow_patterns"]) == {"*.safetensors"}
    files = ["config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", "model.safetensors"]
    pickles = ["pytorch_model.bin", "model.pt", "original/consolidated.safetensors"]
    chosen = huggingface_hub.utils.filter_repo_objects(files + pickles, **whole)
    assert list(chosen) == files


def test_without_a_network_the_message_says_how_to_fetch(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ValueError, match=r"no route to host\. .*hf download Qwen/Qwen3-4B --local-dir qwen3-4b$"):
        models.local_folder("Qwen/Qwen3-4B")


def test_another_kind_of_address_is_refused():
    with pytest.raises(ValueError, match="'s3://bucket/qwen' is no local folder"):
        models.local_folder("s3://bucket/qwen")


@pytest.mark.slow  # imports gcsfs
def test_a_bucket_is_copied_once_and_again_where_it_has_changed(monkeypatch, tmp_path):
    pytest.importorskip("gcsfs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with FakeGcs("bucket") as gcs:
        for name, value in gcs.environment.items():
            monkeypatch.setenv(name, value)
        for name in ("config.json", "model.safetensors", "pytorch_model.bin", "old/config.json"):
            gcs.put(f"qwen/{name}", name.encode())
        described = models.local_folder("gs://bucket/qwen", weights=False)
        assert [p.name for p in described.glob("[!.]*")] == ["config.json"]
        folder = models.local_folder("gs://bucket/qwen/")
        assert folder == described == tmp_path / "rpg_jax" / "bucket" / "qwen"
        assert sorted(p.name for p in folder.glob("[!.]*")) == ["config.json", "model.safetensors"]
        before = (folder / "model.safetensors").stat().st_ino
        gcs.put("qwen/config.json", b"one that is longer")
        models.local_folder("gs://bucket/qwen")
        assert (folder / "config.json").read_text(encoding="utf-8") == "one that is longer"
        assert (folder / "model.safetensors").stat().st_ino == before, "unchanged, not copied again"
        del gcs.objects["qwen/model.safetensors"]
        gcs.put("qwen/model-00001-of-00001.safetensors", b"a")
        found = models.local_folder("gs://bucket/qwen")
        names = ["config.json", "model-00001-of-00001.safetensors"]
        assert sorted(p.name for p in found.glob("[!.]*")) == names, "what is gone there would win here"
        gcs.put("pickled/pytorch_model.bin", b"")
        with pytest.raises(ValueError, match=r"gs://bucket/pickled has no file \*\.json or .*\*\.safetensors"):
            models.local_folder("gs://bucket/pickled")
        with pytest.raises(ValueError, match="cannot read gs://bucket/none: "):
            models.local_folder("gs://bucket/none")
