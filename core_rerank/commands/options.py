"""Command-line options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from core_rerank.heads import Window
from core_rerank.reranker import DEFAULT_MODEL

__all__ = [
    "DEFAULT_MODEL",
    "Backend",
    "BackendOption",
    "DetectionWindowOption",
    "Dtype",
    "DtypeOption",
    "HeadsOption",
    "ModelOption",
    "Strategy",
    "StrategyOption",
    "VerboseOption",
    "WindowOption",
    "window_value",
]


class Backend(StrEnum):
    """What runs the model."""

    VLLM = "vllm"
    TRANSFORMERS = "transformers"


class Dtype(StrEnum):
    """Number format of weights and activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Strategy(StrEnum):
    """How attention becomes a score."""

    CORE = "core"
    ICR = "icr"
    QR = "qr"


def parse_window(value: str) -> str:
    """``all`` or a whole number from 1, as text (see ``window_value``)."""
    if value == "all" or (value.isdecimal() and int(value) > 0):
        return value
    raise typer.BadParameter(f"{value!r} is neither 'all' nor a whole number from 1.")


def check_model(value: str) -> str:
    """Refuse what can name no model; an alias is fetched only when it is needed."""
    from core_rerank.embedded import EMBEDDED_MODELS
    from core_rerank.errors import ModelError
    from core_rerank.models import resolve_model

    if value not in EMBEDDED_MODELS:
        try:
            resolve_model(value)
        except ModelError as error:
            raise typer.BadParameter(str(error)) from None
    return value


def window_value(value: str) -> Window:
    """What ``Reranker(window=...)`` takes."""
    return "all" if value == "all" else int(value)


ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        callback=check_model,
        help="Alias (see `models`), Hugging Face id or local folder.",
    ),
]
BackendOption = Annotated[
    Backend, typer.Option("--backend", help="vllm, or transformers where vLLM does not install.")
]
_WINDOW_HELP = "Documents in one prompt: 1 (pointwise), N, or all."
WindowOption = Annotated[
    str | None,
    typer.Option(
        "--window",
        metavar="N|all",
        callback=lambda value: None if value is None else parse_window(value),
        help=f"{_WINDOW_HELP} Default: what the model's head set recommends.",
    ),
]
DetectionWindowOption = Annotated[
    str, typer.Option("--window", metavar="N|all", callback=parse_window, help=_WINDOW_HELP)
]
HeadsOption = Annotated[
    Path | None,
    typer.Option(
        "--heads-config",
        metavar="YAML",
        exists=True,
        dir_okay=False,
        help="A head set, as detect-heads writes it. Default: the packaged one of the model.",
    ),
]
ScreenHeadsOption = Annotated[
    Path | None,
    typer.Option(
        "--screen-heads",
        metavar="YAML",
        exists=True,
        dir_okay=False,
        help="Heads that --screen reads. Default: the packaged ones of the model.",
    ),
]
StrategyOption = Annotated[Strategy, typer.Option("--strategy", help="Which paper's scoring.")]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option("--dtype", help="Default: the backend's own; float32 is the exact one."),
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show the engine's log, and tracebacks.")
]
