"""What importing the packages costs and pulls in, and the names they make public."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("core_rerank", "hook_runtime")
MEASURE = """
import sys, time
started = time.perf_counter()
import {package}
seconds = time.perf_counter() - started
print(seconds, *sorted(name for name in sys.modules if "." not in name))
"""
CORE_RERANK = {
    "AttentionProbe",
    "ClosedError",
    "CoreRerankError",
    "Detection",
    "Document",
    "Guarded",
    "Head",
    "HeadSet",
    "HeadSetError",
    "InjectionDetector",
    "InjectionHeads",
    "MissingDependencyError",
    "ModelError",
    "NotFiniteError",
    "PromptError",
    "RankedDocument",
    "Ranking",
    "Reranker",
    "SteeringVector",
    "TokenScore",
    "__version__",
    "fuse",
    "rerank",
}
HOOK_RUNTIME = {
    "Ablate",
    "AddVector",
    "Analyzed",
    "Analyzer",
    "AsyncCaptureBackend",
    "AsyncHookLLM",
    "AttentionProbe",
    "AttentionTemplate",
    "BridgedHookLLM",
    "Capture",
    "CaptureBackend",
    "CaptureRequest",
    "ClosedError",
    "ConfigError",
    "EngineDeadError",
    "GeneratingBackend",
    "Head",
    "HeadIntervention",
    "HeadOutputProbe",
    "HiddenStateProbe",
    "HookLLM",
    "HookRuntimeError",
    "IncompleteCaptureError",
    "Intervention",
    "ModelInfo",
    "Performed",
    "ProbeError",
    "Probed",
    "Program",
    "ProgramConfig",
    "ProgramError",
    "ProgramInfo",
    "ProjectTo",
    "Reading",
    "ScaleHeads",
    "ShadowMemoryError",
    "StateProbe",
    "States",
    "StreamIntervention",
    "ThreadedHookLLM",
    "TransformersBackend",
    "UnsupportedModelError",
    "UnsupportedVLLMError",
    "Vector",
    "load_config",
    "load_states",
}


def python(program: str, cwd: Path) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_import_is_fast_and_light(package: str, tmp_path: Path) -> None:
    runs = [python(MEASURE.format(package=package), tmp_path).split() for _ in range(3)]
    assert min(float(run[0]) for run in runs) < 0.3
    assert not {"torch", "vllm", "transformers", "faiss", "bm25s"} & set(runs[0])


def test_import_needs_no_extra(tmp_path: Path) -> None:
    extras = ["torch", "vllm", "bm25s", "Stemmer", "pytrec_eval", "llama_index", "fastapi"]
    extras += ["faiss", "sentence_transformers", "pyarrow", "uvicorn", "prometheus_client"]
    extras += ["langchain_core", "haystack", "cohere"]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({extras}))\n"
        "import core_rerank, hook_runtime, core_rerank.cli, core_rerank.retrievers\n"
        "from core_rerank import *\n"
        "from core_rerank.models import known_models\n"
        "print(len(known_models()))"
    )
    assert python(program, tmp_path).split() == ["1"]


@pytest.mark.parametrize(
    ("package", "names"), [("core_rerank", CORE_RERANK), ("hook_runtime", HOOK_RUNTIME)]
)
def test_the_public_names(package: str, names: set[str]) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) == names
    assert all(hasattr(module, name) for name in names)
    with pytest.raises(AttributeError, match="no attribute 'rerankk'"):
        _ = module.rerankk


def imported_modules(path: Path) -> set[str]:
    """The absolute module names a file imports, ``from a import b`` as both a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # Folders of the package are one level deep, so one dot is core_rerank or below it.
            base = node.module or ""
            base = f"core_rerank.{base}".rstrip(".") if node.level else base
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def test_nothing_imports_eval_or_retrievers() -> None:
    """They stand on core_rerank; commands reach them by name, when they run."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for module in imported_modules(path):
                top = ".".join(module.removeprefix("core_rerank.").split(".")[:1])
                assert top not in {"eval", "retrievers"}, f"{path} imports {module}"


def test_eval_names_retrievers_only_as_strings() -> None:
    for path in (ROOT / "eval").rglob("*.py"):
        for module in imported_modules(path):
            assert not module.startswith("core_rerank.retrievers"), f"{path} imports {module}"
