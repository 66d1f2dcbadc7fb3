"""``core-rerank detect-heads --task injection``: find the heads that attacks draw away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from core_rerank.injection_data import DEFAULT_INSTRUCTION
from core_rerank.injection_finding import DEFAULT_HEADS, DEFAULT_K
from core_rerank.injection_measuring import InjectionAttention

from .options import DEFAULT_MODEL as DEFAULT_MODEL
from .options import Backend, BackendOption, ModelOption, VerboseOption
from .terminal import (
    CommandError,
    check_output,
    counting,
    errors_as_messages,
    out,
    quiet_engine,
    say,
    working,
)

if TYPE_CHECKING:
    from core_rerank.injection_data import LabelledText
    from core_rerank.injection_heads import InjectionHeads


class TaskName(StrEnum):
    """What heads are found for."""

    RANKING = "ranking"
    INJECTION = "injection"


class InjectionMethodName(StrEnum):
    """How heads are chosen."""

    K_SIGMA = "k-sigma"
    SIGNED = "signed"


TaskOption = Annotated[
    TaskName,
    typer.Option(
        "--task",
        help="ranking, or injection: heads that tell attacks, with options of its own "
        "(`detect-heads --task injection --help`).",
    ),
]


def detect_injection_heads(
    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            metavar="JSONL",
            help="Labelled texts, rows with text, label (1 an attack) and, if wanted, instruction "
            "and context_id; may be repeated.",
        ),
    ],
    task: TaskOption = TaskName.INJECTION,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="YAML", help="The heads to write.")
    ] = Path("injection.yaml"),
    benign: Annotated[
        list[Path] | None,
        typer.Option(
            "--benign",
            metavar="JSONL",
            help="Your own benign texts, to set the threshold by; rows with label 1 are left out. "
            "Default: the benign texts of --data, scored by heads found without them.",
        ),
    ] = None,
    fpr: Annotated[
        float,
        typer.Option("--fpr", help="Share of benign texts that may be flagged, such as 0.01."),
    ] = 0.01,
    method: Annotated[
        InjectionMethodName,
        typer.Option(
            "--method",
            help="k-sigma: Attention Tracker's rule, a plain mean; signed: sparse weights of "
            "either sign.",
        ),
    ] = InjectionMethodName.K_SIGMA,
    k: Annotated[
        float | None,
        typer.Option(
            "--k-sigma",
            help="Deviations between attacks and benign texts, with --method k-sigma only. "
            f"[default: {DEFAULT_K:g}]",
        ),
    ] = None,
    top: Annotated[
        int,
        typer.Option(
            "--top", min=1, help="signed: at most so many heads; k-sigma: where none passes."
        ),
    ] = DEFAULT_HEADS,
    max_layers: Annotated[
        int | None,
        typer.Option("--max-layers", min=1, help="Look at the first so many layers only."),
    ] = None,
    instruction: Annotated[
        str, typer.Option("--instruction", help="The task of texts that have none of their own.")
    ] = DEFAULT_INSTRUCTION,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Take so many texts of each file, by --seed."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of --limit.")] = 0,
    model: ModelOption = DEFAULT_MODEL,
    backend: BackendOption = Backend.VLLM,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store",
            metavar="DIR",
            help="Where measured attention is kept, a file for each of --data and --benign, and "
            "taken from if it fits. Default: the output, ending in .store.",
        ),
    ] = None,
    notes: Annotated[str, typer.Option("--notes", help="Text to keep with the heads.")] = "",
    verbose: VerboseOption = False,
) -> None:
    """Find the heads whose attention attacks draw from the instruction, and set a threshold."""
    with errors_as_messages(verbose):
        if not 0 <= fpr < 1:
            raise CommandError(f"--fpr must be a share from 0 to below 1, not {fpr}.")
        if k is not None and method is InjectionMethodName.SIGNED:
            raise CommandError("--k-sigma is of --method k-sigma only: leave one of them out.")
        files = [*data, *(benign or [])]
        _check_names(files)
        check_output(output)
        source = _Source(
            model, backend.value, instruction, limit, seed, store or output.with_suffix(".store")
        )
        attention = source.measured(files, verbose)
        from core_rerank.injection_choice import InjectionSelection, choose_injection_heads

        selection = InjectionSelection(
            method.value, top, DEFAULT_K if k is None else k, max_layers, fpr
        )
        with working("Choosing heads"):
            chosen = choose_injection_heads(
                attention[: len(data)], attention[len(data) :], selection
            )
        _aliased(chosen.heads, notes).to_yaml(output)
        for line in chosen.lines():
            out().print(line, soft_wrap=True, markup=False)
        say(f"written: {output}; what was measured is in {source.store}")


def _check_names(files: Sequence[Path]) -> None:
    """The store and the results know files by name, so equal names would overwrite each other."""
    names = Counter(file.stem for file in files)
    for name, count in names.items():
        if count > 1:
            alike = ", ".join(str(file) for file in files if file.stem == name)
            raise CommandError(
                f"{count} files of --data and --benign are called {name!r} ({alike}): rename one, "
                "or give it once."
            )


@dataclass(frozen=True, slots=True)
class _Source:
    """What to measure with what: the command's options, unread."""

    model: str
    backend: str
    instruction: str
    limit: int | None
    seed: int
    store: Path

    def measured(self, files: Sequence[Path], verbose: bool) -> list[InjectionAttention]:
        """Attention for each file; an engine starts only if a file of the store is missing."""
        from core_rerank.injection_data import sampled

        texts = [sampled(_read(file), self.limit, self.seed) for file in files]
        kept = [self._kept(file, rows) for file, rows in zip(files, texts, strict=True)]
        missing = [i for i, one in enumerate(kept) if one is None]
        if missing:
            self.store.mkdir(parents=True, exist_ok=True)
            for i, one in zip(missing, self._measure(files, texts, missing, verbose), strict=True):
                kept[i] = one
        return [one for one in kept if one is not None]

    def _place(self, file: Path) -> Path:
        return self.store / f"{file.stem}.safetensors"

    def _kept(self, file: Path, texts: list[LabelledText]) -> InjectionAttention | None:
        from core_rerank.injection_measuring import Wanted, data_hash, load_measured
        from core_rerank.models import resolve_model

        if not self._place(file).is_file():
            return None
        wanted = Wanted(
            model=resolve_model(self.model).model_id,
            backend=self.backend,
            data_hash=data_hash(texts),
            instruction=self.instruction,
        )
        return load_measured(self._place(file), wanted)

    def _measure(
        self,
        files: Sequence[Path],
        texts: Sequence[list[LabelledText]],
        missing: Sequence[int],
        verbose: bool,
    ) -> list[InjectionAttention]:
        from core_rerank.backends import name_model, open_backend
        from core_rerank.injection_measuring import measure_injection, measuring_options

        measured = []
        with quiet_engine(verbose):
            resolved = name_model(self.model, self.backend)
            with working(f"Starting {self.model} on {self.backend}"):
                options = measuring_options(self.backend)
                opened = open_backend(self.backend, resolved, None, options)
            try:
                for i in missing:
                    with counting(f"Reading attention, {files[i].name}") as on_progress:
                        one = measure_injection(
                            opened.backend,
                            texts[i],
                            instruction=self.instruction,
                            model=opened.model,
                            data=files[i].stem,
                            on_progress=on_progress,
                        )
                    one.save(self._place(files[i]))
                    measured.append(one)
            finally:
                opened.backend.close()
        return measured


def _read(file: Path) -> list[LabelledText]:
    from core_rerank.injection_data import load_labelled_texts

    return load_labelled_texts(file)


def _aliased(heads: InjectionHeads, notes: str) -> InjectionHeads:
    from core_rerank.models import known_models

    aliases = tuple(known.alias for known in known_models() if known.model_id == heads.model)
    return heads.model_copy(update={"aliases": aliases, "notes": notes})
