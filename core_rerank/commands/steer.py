"""``core-rerank steer``: fit a steering vector, and see what a model says with it and without."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import DEFAULT_MODEL, Dtype, DtypeOption, ModelOption, VerboseOption
from .steering_data import Pairs, instructed, read_lines, read_pairs
from .terminal import (
    CommandError,
    check_output,
    err,
    errors_as_messages,
    out,
    quiet_engine,
    say,
    working,
)

if TYPE_CHECKING:
    from core_rerank.steering import SteeringVector
    from hook_runtime.engine import HookLLM
    from hook_runtime.programs import Program

PICTURE = "separation.png"

steer = typer.Typer(
    help="Steering vectors: what an instruction does inside the model, done without it.",
    no_args_is_help=True,
)


@steer.command("fit")
def fit(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the vector goes.")
    ],
    pairs: Annotated[
        Path | None,
        typer.Option(
            "--pairs",
            metavar="JSONL",
            exists=True,
            dir_okay=False,
            help='Rows {"positive", "negative"}: with the behaviour and without it, each text or '
            "a list of messages.",
        ),
    ] = None,
    instruction: Annotated[
        str | None,
        typer.Option("--instruction", help='Words such as "Answer in one sentence."'),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="TXT",
            exists=True,
            dir_okay=False,
            help="With --instruction: prompts, one a line; 40 are a good number.",
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send texts as they are, not as a user's message.")
    ] = False,
    layer: Annotated[
        int | None,
        typer.Option("--layer", min=0, help="Layer to steer. Default: the best separated one."),
    ] = None,
    coefficient: Annotated[
        float, typer.Option("--coefficient", "-c", help="In program.yaml; 1 is the mean shift.")
    ] = 1.0,
    model: ModelOption = DEFAULT_MODEL,
    dtype: DtypeOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Read pairs of prompts, take the difference of means in every layer, and keep it.

    FOLDER gets the vectors, a config that any engine loads (program.yaml), and a picture of how
    well each layer separates pairs that it was not fitted on.
    """
    with errors_as_messages(verbose):
        from core_rerank.steering import check_layers

        if not math.isfinite(coefficient):
            raise CommandError(f"--coefficient must be a finite number, not {coefficient}.")
        sides = _sides(pairs, instruction, prompts, raw)
        _check_folder(output)
        with _engine(model, dtype, verbose) as llm:
            check_layers("all" if layer is None else [layer], llm.model)
            say(f"Reading {2 * len(sides.positive)} prompts")
            vector = _fitted(llm, sides)
        if layer is not None:
            vector = vector.at(layer)
        written = [str(vector.save(output, coefficient))]
        written += _drawn(vector, output / PICTURE)
        from .steering_tables import layers_table

        out().print(layers_table(vector))
        say(f"written: {', '.join(written)}")


@steer.command("run")
def run(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", exists=True, file_okay=False, help="What `steer fit` wrote."
        ),
    ],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="May be repeated.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="TXT", exists=True, dir_okay=False, help="Prompts, one a line."
        ),
    ] = None,
    coefficient: Annotated[
        list[float] | None,
        typer.Option("--coefficient", "-c", help="May be repeated. [default: 1]"),
    ] = None,
    project: Annotated[
        bool,
        typer.Option("--project", help="Bring the projection to that seen with the instruction."),
    ] = False,
    layer: Annotated[
        int | None, typer.Option("--layer", min=0, help="Default: the one that fit chose.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Length of an answer.")
    ] = 64,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send prompts as they are, not as a user's message.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Default: the one that it was fitted on.")
    ] = None,
    dtype: DtypeOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Show answers without and with a steering vector, side by side; greedy, so repeatable."""
    with errors_as_messages(verbose):
        from core_rerank.steering import SteeringVector

        vector = SteeringVector.load(folder)
        if layer is not None:
            vector = vector.at(layer)
        given = [*(prompt or []), *(read_lines(prompts) if prompts else [])]
        if not given:
            raise CommandError("nothing to answer: give --prompt TEXT or --prompts FILE.")
        programs = _programs(vector, coefficient, project)
        with _engine(model or _runnable(vector.model), dtype, verbose) as llm:
            say(f"Answering {len(given)} prompts {len(programs)} times")
            answers = _answers(llm, given, programs, max_tokens, raw)
            ran = llm.model.name
        _print(vector, ran, given, answers, as_json)


def _check_folder(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise CommandError(f"cannot write {output}: it is a file; name a folder.")
    if not output.exists():
        check_output(output)


def _sides(pairs: Path | None, instruction: str | None, prompts: Path | None, raw: bool) -> Pairs:
    if pairs is not None and (instruction is not None or prompts is not None):
        raise CommandError("give --pairs, or --instruction with --prompts, not both.")
    if pairs is not None:
        return read_pairs(pairs, raw)
    if instruction is None or prompts is None:
        raise CommandError(
            "give --pairs JSONL, or --instruction TEXT and --prompts TXT to pair each prompt with "
            "itself and the instruction."
        )
    return instructed(read_lines(prompts), instruction, raw)


@contextmanager
def _engine(model: str, dtype: Dtype | None, verbose: bool) -> Iterator[HookLLM]:
    """Eager: for so few prompts compiling would take longer than it saves."""
    from core_rerank.backends import name_model, open_backend

    options = {"enforce_eager": True, **({"dtype": dtype.value} if dtype else {})}
    with quiet_engine(verbose):
        resolved = name_model(model, "vllm")
        with working(f"Starting {model} on vllm"):
            opened = open_backend("vllm", resolved, None, options)
        try:
            yield opened.backend  # type: ignore[misc]
        finally:
            opened.close()


def _fitted(llm: HookLLM, sides: Pairs) -> SteeringVector:
    from core_rerank.steering import SteeringVector

    return SteeringVector.fit(llm, sides.positive, sides.negative, progress=err().is_terminal)


def _drawn(vector: SteeringVector, path: Path) -> list[str]:
    from core_rerank.pictures import can_draw
    from core_rerank.steering_picture import draw_separation

    if not can_draw():
        say("no picture: it needs matplotlib, pip install 'core-rerank[plots]'", "yellow")
        return []
    draw_separation(vector, path)
    return [str(path)]


def _runnable(model_id: str) -> str:
    """The alias of an embedded model, which needs no network; other ids as they are."""
    from core_rerank.embedded import EMBEDDED_MODELS

    known = {model.model_id: alias for alias, model in EMBEDDED_MODELS.items()}
    return known.get(model_id, model_id)


def _programs(
    vector: SteeringVector, coefficients: list[float] | None, project: bool
) -> dict[str, Program | None]:
    """What to answer under, by its column's name."""
    found: dict[str, Program | None] = {"without": None}
    for value in coefficients or ([] if project else [1.0]):
        found[f"coefficient {value:g}"] = vector.scaled(value)
    if project:
        found["projected"] = vector.projected()
    return found


def _answers(
    llm: HookLLM,
    prompts: list[str],
    programs: dict[str, Program | None],
    max_tokens: int,
    raw: bool,
) -> dict[str, list[str]]:
    """By column, an answer a prompt; all in one engine batch."""
    from hook_runtime import compat

    given = [prompt for _ in programs for prompt in prompts]
    steering = [program for program in programs.values() for _ in prompts]
    how: dict[str, Any] = {"steer": steering, "use_tqdm": err().is_terminal}
    params = compat.symbol("vllm", "SamplingParams")(max_tokens=max_tokens, temperature=0.0)
    if raw:
        outputs = llm.generate(given, params, **how)
    else:
        messages = [[{"role": "user", "content": prompt}] for prompt in given]
        outputs = llm.chat(messages, params, **how)
    texts = iter([output.outputs[0].text for output in outputs])
    return {name: [next(texts) for _ in prompts] for name in programs}


def _print(
    vector: SteeringVector,
    model: str,
    prompts: list[str],
    answers: dict[str, list[str]],
    as_json: bool,
) -> None:
    """``model`` is the one that answered, which need not be the vector's."""
    if as_json:
        rows = [
            {"prompt": prompt, "answers": {name: texts[i] for name, texts in answers.items()}}
            for i, prompt in enumerate(prompts)
        ]
        found = {"model": model, "layer": vector.layer, "prompts": rows}
        typer.echo(json.dumps(found, ensure_ascii=False))
        return
    from .steering_tables import answers_table

    out().print(answers_table(vector, model, prompts, answers))
