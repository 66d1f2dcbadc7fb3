"""The picture of a detection: what it shows, both formats, the same each time."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from core_rerank.errors import MissingDependencyError
from core_rerank.head_attention import HeadAttention, Measurement, QueryAttention
from core_rerank.head_detection import Detection, Selection, find_heads
from core_rerank.head_methods import Method
from core_rerank.head_picture import draw_detection
from core_rerank.pictures import check_picture
from hook_runtime.specs import Head, ModelInfo

pytest.importorskip("matplotlib")


def detection(
    method: Method = "core", count: int = 3, layers: int = 12, heads: int = 9
) -> Detection:
    generator = np.random.default_rng(0)
    model = ModelInfo("org/a-model", None, layers, layers, heads, 512, "float32", "cpu", "made")
    ids = tuple(f"q{i}" for i in range(30))
    about = Measurement(model, "toy", "0", ids, 1, "query", 1, True, 512, 0, "0", {})
    positive = np.arange(6) == 0
    measured = []
    for _ in ids:
        query = generator.random((6, layers, heads), dtype=np.float32)
        query[0, 7, 2] += 1
        measured.append(QueryAttention(query, query * 0, np.full(6, 9, np.int32), positive))
    attention = HeadAttention.of(measured, 6, about)
    return find_heads(attention, Selection(count=count, method=method, temperature=0.1))


@pytest.mark.parametrize("method", ["core", "qr", "ndcg", "weighted", "signed"])
def test_an_svg_names_axes_method_model_and_the_quality_by_number(
    method: Method, tmp_path: Path
) -> None:
    found = detection(method)
    assert found.heads[0] == Head(7, 2)
    path = tmp_path / "heads.svg"
    draw_detection(found, path)
    svg = path.read_text()
    written = re.findall(r"<!-- (.*?) -->", svg)
    for words in (
        "layer",
        "head",
        "nDCG@10",
        "number of heads k",
        "org/a-model",
        f"{len(found.heads)} heads by {method}, 30 queries of toy, pointwise",
        "all heads",
        f"{found.held_out[4].ndcg_at_10:.3f}",
    ):
        assert words in written
    assert svg.count("stroke: #e8000b") >= len(found.heads)
    assert [file.name for file in tmp_path.iterdir()] == ["heads.svg"]


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_same_detection_gives_the_same_file(ending: str, tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.{ending}"
        draw_detection(detection(), path)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]


@pytest.mark.parametrize(("layers", "heads"), [(8, 3), (80, 64)])
def test_any_shape_of_model_gives_a_picture_of_sane_size(
    layers: int, heads: int, tmp_path: Path
) -> None:
    draw_detection(detection(count=20, layers=layers, heads=heads), tmp_path / "heads.PNG")
    header = (tmp_path / "heads.PNG").read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", header[16:24])
    assert 900 < width < 2400
    assert 600 < height < 1600


def test_other_endings_are_refused() -> None:
    for name in ("heads.pdf", "heads"):
        with pytest.raises(ValueError, match=r"must end in \.png or \.svg, not heads"):
            check_picture(name)


def test_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("core_rerank.pictures.find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'core-rerank\[plots\]'"):
        draw_detection(detection(), tmp_path / "heads.svg")
    assert not list(tmp_path.iterdir())


def test_matplotlib_is_imported_only_to_draw() -> None:
    program = (
        "import sys, core_rerank.cli, core_rerank.head_picture\n"
        "assert not {'matplotlib', 'torch', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
