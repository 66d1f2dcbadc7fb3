"""The public surface: names, and an import that is light."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import core_rerank

PUBLIC = {
    "AttentionProbe",
    "ClosedError",
    "CoreRerankError",
    "Document",
    "Head",
    "HeadSet",
    "HeadSetError",
    "MissingDependencyError",
    "ModelError",
    "NotFiniteError",
    "PromptError",
    "RankedDocument",
    "Ranking",
    "Reranker",
    "TokenScore",
    "__version__",
    "rerank",
}


def test_the_surface_is_pinned() -> None:
    assert set(core_rerank.__all__) == PUBLIC
    assert set(dir(core_rerank)) >= PUBLIC
    for name in PUBLIC:
        assert getattr(core_rerank, name) is not None
    assert core_rerank.__version__


def test_other_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        core_rerank.nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_the_import_needs_no_heavy_package() -> None:
    code = (
        "import sys, core_rerank; core_rerank.Reranker; core_rerank.rerank; "
        "heavy = {'torch', 'vllm', 'transformers', 'gguf', 'numpy', 'rich', 'yaml'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_the_import_is_quick() -> None:
    def seconds(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    added = min(seconds("import core_rerank") - seconds("pass") for _ in range(3))
    assert added < 0.3
