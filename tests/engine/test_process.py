"""How an engine starts: guarded scripts, notebooks' event loops, users' own worker extensions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("vllm", reason="needs vLLM: pip install 'core-rerank[cpu]'")

ROOT = Path(__file__).parents[2]

UNGUARDED = """
from hook_runtime import HookLLM
HookLLM({model!r}, layers=2, enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=1 << 27)
"""

IN_A_LOOP = """
import asyncio, sys
sys.path.insert(0, {folder!r})
import numpy as np
from hook_runtime import AttentionProbe, CaptureRequest, HookLLM

async def main():
    with HookLLM({model!r}, layers=2, enforce_eager=True, max_model_len=256,
                 kv_cache_memory_bytes=1 << 27,
                 worker_extension_cls="user_extension.Fitting") as llm:
        probe = AttentionProbe(["1-0"], (6, 9), [(0, 5)])
        (capture,) = llm.capture([CaptureRequest(tuple(range(20, 30)), probe)])
        assert capture.values.shape == (1, 5) and np.isfinite(capture.values).all()
        print("GREETING", llm.llm.collective_rpc("greet", args=("you",)))

if __name__ == "__main__":
    asyncio.run(main())
"""


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    path_entries = [str(ROOT / "tests"), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in path_entries if p)}
    return subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )


def test_a_script_without_the_main_guard_is_told_how_to_fix_it(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    done = run(UNGUARDED.format(model=str(smollm2_dir)), tmp_path)
    assert done.returncode != 0
    assert "if __name__ == '__main__':" in done.stderr
    assert "script.py, line 3" in done.stderr


def test_a_running_event_loop_and_a_users_own_extension(smollm2_dir: Path, tmp_path: Path) -> None:
    script = IN_A_LOOP.format(model=str(smollm2_dir), folder=str(ROOT / "tests"))
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "GREETING ['hello you from rank 0']" in done.stdout


WITH_NUMBA = """
import numba
from hook_runtime import AttentionProbe, CaptureRequest, HookLLM

if __name__ == "__main__":
    with HookLLM({model!r}, layers=2, enforce_eager=True, max_model_len=256,
                 kv_cache_memory_bytes=1 << 27) as llm:
        probe = AttentionProbe(["1-0"], (6, 9), [(0, 5)])
        (capture,) = llm.capture([CaptureRequest(tuple(range(20, 30)), probe)])
        print("CAPTURED", capture.values.shape)
"""


def test_a_script_that_imports_numba_before_anything_else(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    """As bm25s does: vLLM's processes import it too, and vLLM 0.32 trips over an object in it."""
    pytest.importorskip("numba")
    done = run(WITH_NUMBA.format(model=str(smollm2_dir)), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "CAPTURED (1, 5)" in done.stdout


INTERRUPTED = """
import os, signal, threading, time
from hook_runtime import AttentionProbe, CaptureRequest, HookLLM

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    with HookLLM({model!r}, enforce_eager=True, max_model_len=1024,
                 kv_cache_memory_bytes=1 << 27) as llm:
        probe = AttentionProbe(["1-0"], (900, 910), [(0, 800)])
        requests = [CaptureRequest(tuple(range(i, i + 1000)), probe) for i in range(300)]
        threading.Timer(5, lambda: os.killpg(0, signal.SIGINT)).start()
        started = time.monotonic()
        try:
            llm.capture(requests)
        except KeyboardInterrupt:
            print("INTERRUPTED", time.monotonic() - started < 60, flush=True)
"""


def test_control_c_in_a_terminal_ends_the_process(smollm2_dir: Path, tmp_path: Path) -> None:
    """A terminal interrupts the engine's processes as well: nothing may wait for their answer."""
    done = run(INTERRUPTED.format(model=str(smollm2_dir)), tmp_path)
    assert "INTERRUPTED True" in done.stdout, done.stderr[-3000:]
