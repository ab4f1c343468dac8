"""Tests run on eight virtual CPU devices, so that every sharding is exercised without an accelerator."""

import collections
import gc
import json
import os
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = os.environ.get("RPG_TEST_PLATFORM", "cpu")
# Most of the suite's time is compilation, so programs are not optimised, but for those of a few whole runs.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_cpu_parallel_codegen_split_count=1",  # gradients compile in two thirds of the time
        # Small programs compile in half to a quarter of the time; jaxlib 0.12 ends at an option that it does not know.
        "--xla_cpu_use_fusion_emitters=false" if metadata.version("jaxlib").startswith("0.10.") else "",
    )
)
# XLA has as many threads as CPU devices. Two collectives that wait for each other need more: docs/log, 2026-11-26.
os.environ.setdefault("NPROC", "24")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # names of source lines take a quarter of lowering

import jax
from jax.experimental.compilation_cache import compilation_cache

from rpg_jax.runs import cli

cli.keep_pages()
gc.set_threshold(50_000)  # at 700 a tenth of the time goes to a search for garbage, of which tracing leaves little


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One worker more than CPUs: tests wait for processes, ports and deadlines."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cpus + 1


@pytest.hookimpl(trylast=True)  # after tests were deselected
def pytest_collection_modifyitems(items):
    """Puts files of whole runs first, then those with the most slow tests, so that no worker ends with a long file."""
    slow, tests = collections.Counter(), collections.Counter()
    for item in items:
        tests[item.path] += 1
        slow[item.path] += item.get_closest_marker("slow") is not None
    items.sort(key=lambda i: (i.path.parent.name != "end_to_end", -slow[i.path], -tests[i.path], str(i.path)))


def pytest_collection_finish():
    gc.freeze()  # modules stay


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder for the compiled programs of all processes that tests start, whichever worker starts them.

    RPG_TEST_SHARED names one that stays: a single test of a whole run then takes seconds instead of minutes.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "shared"
    folder = Path(os.environ.get("RPG_TEST_SHARED", folder))
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def compiled_once(shared):
    """Workers, and the processes that they start, keep compiled programs in one folder."""
    options = {"jax_compilation_cache_dir": str(shared / "cache"), "jax_persistent_cache_min_compile_time_secs": 0}
    for name, value in options.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # modules may have compiled something


@pytest.fixture(autouse=True)
def compiled_anew(request):
    """Programs for slices are not kept: jax 0.12 warns that it cannot load them where there is no TPU."""
    if request.node.get_closest_marker("tpu_compile") is None:
        yield
        return
    for kept in (False, True):
        jax.config.update("jax_enable_compilation_cache", kept)
        compilation_cache.reset_cache()
        if not kept:
            yield


@pytest.fixture(scope="session")
def warm(shared):
    """The same folder, with a warm start of tests/end_to_end/micro.py in `warm_starts`."""
    from tests.end_to_end import whole_runs  # tests/test_extending.py copies this file without it

    return whole_runs.with_warm_start(shared)


TEMPLATE = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if not enable_thinking %}<think>

</think>

{% endif %}
{%- endif %}"""


@pytest.fixture(scope="session")
def qwen_like(tmp_path_factory):
    """A byte-level tokenizer.json with Qwen's special tokens and files, without merges, and a template of its form."""
    import tokenizers

    from rpg_jax.data import load_tokenizer

    folder = tmp_path_factory.mktemp("qwen")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    model.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 256]}), encoding="utf-8")
    return load_tokenizer(folder)


@pytest.fixture
def popen():
    """subprocess.Popen; what it started ends with the test, however the test ends."""
    started = []

    def popen(*arguments, **options):
        started.append(subprocess.Popen(*arguments, **options))
        return started[-1]

    yield popen
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def x64():
    """Float64 for one test."""
    with jax.enable_x64(True):
        yield
