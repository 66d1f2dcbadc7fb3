"""Runs the notebooks of this repository and keeps what they print: ``python tools/notebooks.py``.

Names of notebooks may be given; without any, all run. What engines and progress bars write to
stderr is left out, so that no path or time of this machine stays.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
CELL_SECONDS = 600
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def execute(path: Path, folder: Path) -> Any:
    """The notebook with its outputs, after a run from top to bottom in ``folder``.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    )
    client.execute(env={**os.environ, **_ENVIRONMENT})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    import nbformat

    known = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=known, help="default: all")
    for name in parser.parse_args(arguments).names or known:
        path = FOLDER / f"{name}.ipynb"
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, Path(folder))
        nbformat.write(notebook, path)
        print(f"{name}: {len(notebook.cells)} cells")


if __name__ == "__main__":
    main()
