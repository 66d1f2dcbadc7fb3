"""The public names resolve lazily; tests/packaging pins them and what importing costs."""

from __future__ import annotations

import subprocess
import sys

import core_rerank


def test_every_name_is_listed_and_resolves() -> None:
    assert set(dir(core_rerank)) >= set(core_rerank.__all__)
    for name in core_rerank.__all__:
        assert getattr(core_rerank, name) is not None
    assert core_rerank.__version__


def test_the_main_names_need_no_heavy_package() -> None:
    code = (
        "import sys, core_rerank; core_rerank.Reranker; core_rerank.rerank; "
        "heavy = {'torch', 'vllm', 'transformers', 'gguf', 'numpy', 'rich', 'yaml'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
