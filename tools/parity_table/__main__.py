"""Entry point: ``python tools/parity_table``, from a checkout, with nothing installed but vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _use_checkout() -> None:
    """Import the checkout's packages, the tests' helpers and this folder as ``parity_table``."""
    sys.path[:1] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]


if __name__ == "__main__":
    _use_checkout()
    from parity_table.cli import main

    sys.exit(main(ROOT))
