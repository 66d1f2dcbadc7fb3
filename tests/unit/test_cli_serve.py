"""``core-rerank serve`` with the transformers backend, in a process of its own."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from services import DOCUMENTS, QUERY
from typer.testing import CliRunner

from core_rerank.cli import app
from core_rerank.injection_heads import find_injection_heads


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments])


def test_it_serves_drains_and_ends_with_0(smollm2_dir: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\n\nsecond\n")
    command = [sys.executable, "-m", "core_rerank.cli", "serve", "--port", "0", "-v"]
    command += ["--backend", "transformers", "--api-key-file", str(keys)]
    command += ["--served-model-name", "rerank-v3.5", "--max-tokens-per-doc", "64"]
    command += ["--screen", "--detect"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    detects = find_injection_heads("HuggingFaceTB/SmolLM2-135M-Instruct", "instruction")
    assert detects is not None
    said = ""
    while not (found := re.search(r"Serving \S+ on (\S+)", said)):
        line = process.stderr.readline()
        assert line, said
        said += line
    body = {"model": "rerank-v3.5", "query": QUERY, "documents": DOCUMENTS[:2]}
    headers = {"Authorization": "Bearer second"}
    answer = httpx.post(f"{found[1]}/v2/rerank", json=body, headers=headers, timeout=60)
    assert answer.json()["results"][0]["index"] == 1
    screened = httpx.post(
        f"{found[1]}/v1/rerank", json={**body, "screen": "flag"}, headers=headers, timeout=60
    )
    assert all(0 < result["injection"] < 1 for result in screened.json()["results"])
    mail = {"instruction": "Summarize the mail.", "data": ["Dear all, good night."]}
    read = httpx.post(f"{found[1]}/v1/detect", json=mail, headers=headers, timeout=60)
    assert set(read.json()["results"][0]["focus_by_head"]) == {str(h) for h in detects.heads}
    process.send_signal(signal.SIGTERM)
    out, rest = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == ""
    assert rest.endswith("Stopped.\n")
    assert re.search(rf"{answer.headers['x-request-id']} POST /v2/rerank 200 \d+ ms", rest)
    assert "tides" not in rest.lower()


def test_beyond_this_machine_it_needs_a_key() -> None:
    refused = run("--host", "0.0.0.0")
    assert refused.exit_code == 2
    assert "--allow-unauthenticated" in refused.stderr


def test_a_port_in_use_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run("--port", str(port))
    assert refused.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port} (" in refused.stderr
    assert "in use" in refused.stderr
    assert "give another --port or --host" in refused.stderr


def test_a_host_that_is_not_ours_is_said() -> None:
    refused = run("--host", "no-such-host.invalid", "--allow-unauthenticated", "--port", "0")
    assert refused.exit_code == 2
    assert "cannot listen on no-such-host.invalid:0 (" in refused.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--backend", "transformers", "--data-parallel-size", "2"], "or use --backend vllm"),
        (["--max-documents", "0"], "max-documents"),
        (["--api-key-file", "{empty}"], "holds no key"),
        (["--openai", "--backend", "transformers"], "--openai needs vLLM"),
        (["--admin-token-file", "{short}", "--openai"], "at least 16 characters"),
        (["--admin-token-file", "{long}"], "need openai"),
        (["--timeout", "nan"], "timeout"),
        (["--screen-heads", "{long}"], "with --screen only"),
        (["--detect-heads", "{long}"], "with --detect only"),
        (["--detect", "--detect-heads", "{long}"], "must hold keys and values"),
        (["--detect", "--model", "test/unknown-model"], "no injection heads are known for"),
        (["--screen", "--strategy", "icr", "--window", "all"], "give window=1"),
    ],
)
def test_wrong_options_are_named(options: list[str], told: str, tmp_path: Path) -> None:
    files = {"empty": "\n", "short": "abc\n", "long": "a-long-enough-token\n"}
    paths = {name: tmp_path / name for name in files}
    for name, text in files.items():
        paths[name].write_text(text)
    refused = run(*(option.format(**paths) for option in options))
    assert refused.exit_code == 2
    assert told in refused.stderr
