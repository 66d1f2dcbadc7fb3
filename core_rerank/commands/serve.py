"""``core-rerank serve``: the HTTP service, on one engine whose callers share its batches."""

from __future__ import annotations

import logging
import socket
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core_rerank.service.settings import DEFAULT_PORT, ServiceSettings, check_binding

from .engine import starting
from .options import (
    DEFAULT_MODEL,
    Backend,
    BackendOption,
    DtypeOption,
    HeadsOption,
    ModelOption,
    ScreenHeadsOption,
    Strategy,
    StrategyOption,
    WindowOption,
    window_value,
)
from .terminal import CommandError, errors_as_messages, say

if TYPE_CHECKING:
    from core_rerank.injection_heads import InjectionHeads

_DEFAULTS = ServiceSettings()


def serve(
    model: ModelOption = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = DEFAULT_PORT,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, help="API keys, one a line; any one is ok."
        ),
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option(
            "--allow-unauthenticated",
            help="Without a key, let everybody in: listen anywhere, under any name.",
        ),
    ] = False,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="A further name that requests may call the model by. Repeatable."),
    ] = None,
    window: WindowOption = None,
    strategy: StrategyOption = Strategy.CORE,
    heads_config: HeadsOption = None,
    max_tokens_per_doc: Annotated[
        int | None, typer.Option(min=1, help="Longer documents are cut. Default: 512.")
    ] = None,
    backend: BackendOption = Backend.VLLM,
    dtype: DtypeOption = None,
    max_model_len: Annotated[int | None, typer.Option(min=64, help="Longest prompt.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs a model is cut over.")] = 1,
    data_parallel_size: Annotated[int, typer.Option(min=1, help="Engines side by side.")] = 1,
    distributed_executor_backend: Annotated[
        str | None, typer.Option(help="vLLM's, such as mp or ray.")
    ] = None,
    screen: Annotated[
        bool,
        typer.Option(
            "--screen",
            help="Let requests have documents scored for orders planted in them (their field "
            "screen: flag or drop).",
        ),
    ] = False,
    screen_heads: ScreenHeadsOption = None,
    detect: Annotated[
        bool,
        typer.Option(
            "--detect",
            help="Answer /v1/detect: does data hold orders? Loads the layers that its heads need.",
        ),
    ] = False,
    detect_heads: Annotated[
        Path | None,
        typer.Option(
            "--detect-heads",
            metavar="YAML",
            exists=True,
            dir_okay=False,
            help="Heads that --detect reads. Default: the packaged ones of the model.",
        ),
    ] = None,
    openai: Annotated[
        bool,
        typer.Option(
            "--openai",
            help="Answer /v1/chat/completions, /v1/completions and /v1/models too. Loads all "
            "layers, which makes ranking slower where the heads need only the first ones.",
        ),
    ] = False,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Tokens, one a line; any one lets programs be loaded (/v1/programs). "
            "Needs --openai.",
        ),
    ] = None,
    max_documents: Annotated[
        int, typer.Option(min=1, help="Documents of one request.")
    ] = _DEFAULTS.max_documents,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Size of a request in MiB.")] = 16,
    max_running: Annotated[
        int | None,
        typer.Option(min=1, help="Requests in the engine. Default: 32 with vllm, else 1."),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Requests that wait; more get 429.")
    ] = _DEFAULTS.max_waiting,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds a request may take, waiting included.")
    ] = _DEFAULTS.timeout_s,
    drain: Annotated[
        float, typer.Option(min=0.001, help="Seconds that requests get to end after a signal.")
    ] = _DEFAULTS.drain_s,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the engine's log, requests, tracebacks.")
    ] = False,
) -> None:
    """Answer rerank requests over HTTP, as Cohere, Jina, TEI and vLLM do.

    With --openai the same engine generates too, for OpenAI's clients.

    Ends with 0 after SIGTERM or Ctrl-C once the requests it took are answered, and with 3 when the
    engine is gone.
    """
    with errors_as_messages(verbose):
        settings = ServiceSettings(
            served_names=(model, *(served_model_name or ())),
            api_keys=_read_keys(api_key_file),
            max_documents=max_documents,
            max_body_bytes=max_body_mb << 20,
            max_running=max_running,
            max_waiting=max_waiting,
            timeout_s=timeout,
            drain_s=drain,
            openai=openai,
            admin_tokens=_read_keys(admin_token_file),
        )
        check_binding(host, settings, allow_unauthenticated)
        options = _given(
            config=heads_config,
            window=window_value(window) if window else None,
            strategy=strategy.value,
            max_tokens_per_doc=max_tokens_per_doc,
            dtype=dtype.value if dtype else None,
            max_model_len=max_model_len,
        )
        if openai and backend is not Backend.VLLM:
            raise CommandError("--openai needs vLLM: leave it out, or use --backend vllm.")
        if openai:
            options["layers"] = None
        if admin_token_file is not None:
            options["programs"] = True
        if backend is Backend.VLLM:
            options |= _given(
                tensor_parallel_size=tensor_parallel_size if tensor_parallel_size > 1 else None,
                data_parallel_size=data_parallel_size if data_parallel_size > 1 else None,
                distributed_executor_backend=distributed_executor_backend,
            )
        elif tensor_parallel_size > 1 or data_parallel_size > 1 or distributed_executor_backend:
            raise CommandError(
                "--tensor-parallel-size, --data-parallel-size and --distributed-executor-backend "
                "are vLLM's: leave them out, or use --backend vllm."
            )
        options |= _screening(screen, screen_heads)
        if detect_heads is not None and not detect:
            raise CommandError("--detect-heads has an effect with --detect only.")
        with closing(_bound(host, port)) as bound:
            detector = _detector_heads(model, detect_heads) if detect else None
            code = _serve(
                model, backend, options, detector, bound, settings, allow_unauthenticated, verbose
            )
    if code:
        raise typer.Exit(code)


def _bound(host: str, port: int) -> socket.socket:
    """Before the model is loaded: a port in use should not take minutes to be told."""
    from core_rerank.service import listen

    try:
        return listen(host, port)
    except OSError as error:
        raise CommandError(
            f"cannot listen on {host}:{port} ({error}): give another --port or --host."
        ) from error


def _screening(screen: bool, heads: Path | None) -> dict[str, Any]:
    if heads is not None and not screen:
        raise CommandError("--screen-heads has an effect with --screen only.")
    return _given(screen=True, screen_heads=heads) if screen else {}


def _detector_heads(model: str, file: Path | None) -> InjectionHeads:
    from core_rerank.injection_heads import InjectionHeads, find_injection_heads
    from core_rerank.models import resolve_model

    if file is not None:
        return InjectionHeads.from_yaml(file)
    model_id = resolve_model(model).model_id
    found = find_injection_heads(model_id, "instruction")
    if found is None:
        raise CommandError(
            f"no injection heads are known for {model_id}: find some with `core-rerank "
            "detect-heads --task injection` and give their file with --detect-heads."
        )
    return found


def _serve(
    model: str,
    backend: Backend,
    options: dict[str, Any],
    detector_heads: InjectionHeads | None,
    bound: socket.socket,
    settings: ServiceSettings,
    any_host: bool,
    verbose: bool,
) -> int:
    from core_rerank.injection import InjectionDetector
    from core_rerank.service import Service

    host, port = bound.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def tell() -> None:
        say(f"Serving {model} on {address}")

    name = "vllm-async" if backend is Backend.VLLM else backend.value
    if detector_heads is not None:
        options = {**options, "extra_heads": detector_heads.heads}
    with starting(model, name, options, verbose) as reranker:
        if verbose:
            _log_requests()
        detector = detector_heads and InjectionDetector(reranker.backend, detector_heads)
        service = Service(
            reranker, bound, settings, detector=detector, any_host=any_host, started=tell
        )
        code = service.run()
        say("Stopped: the engine is gone." if code else "Stopped.")
    return code


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _read_keys(file: Path | None) -> tuple[str, ...]:
    if file is None:
        return ()
    keys = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    keys = tuple(key for key in keys if key)
    if not keys:
        raise CommandError(f"{file} holds no key: write one a line.")
    return keys


def _log_requests() -> None:
    logger = logging.getLogger("core_rerank.service")
    logger.setLevel(logging.INFO)
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: record.levelno < logging.WARNING)  # those are said already
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
