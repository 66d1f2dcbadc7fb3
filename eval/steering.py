"""Steering instead of instructing: how often answers take a form that was asked for, or steered.

    python -m core_rerank.eval.steering --output FOLDER [--constraint NAME ...]

For each constraint a vector is fitted on 40 prompts, contrast, layer and coefficient are chosen on
10 others, and four conditions are measured on 30 more: nothing, the instruction, steering, both.
Writes ``steering.json``, ``steering.md`` and ``steering.png``; what was measured before is kept.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_rerank.errors import DataError
from core_rerank.steering import SteeringVector, instruction_pairs

from .bench_report import environment
from .files import digest, make_folder, write_whole
from .steering_checks import CONSTRAINTS, SENTENCES_SHOWN, Constraint, is_readable, sentences

if TYPE_CHECKING:
    from hook_runtime.engine import HookLLM
    from hook_runtime.programs import Program

RESULTS = Path(__file__).parent / "results"
PROMPTS = Path(__file__).parent / "steering_prompts.json"
MAX_TOKENS = 64
TRIAL_TOKENS = 48
SHOTS = (7, 19)  # which of the other fitting prompts demonstrate the form, by distance
#: What is tried on the development prompts: layers and coefficients by contrast; None projects.
TRIALS: dict[str, tuple[tuple[int, ...], tuple[float | None, ...]]] = {
    "instruction": ((14,), (0.7, 1.0, 1.4, None)),
    "demonstrations": ((20, 22, 24, 26), (0.5, 0.75, 1.0)),
}
CONDITIONS = ("nothing", "instruction", "steering", "both")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said, the ids it said it in, and whether it was cut off at the limit."""

    text: str
    token_ids: tuple[int, ...]
    cut: bool


@dataclass(frozen=True, slots=True)
class Setting:
    """How to steer; ``coefficient`` None brings the projection to the mean one."""

    contrast: str
    layer: int
    coefficient: float | None

    def program(self, vectors: dict[str, SteeringVector]) -> Program:
        vector = vectors[self.contrast].at(self.layer)
        return vector.projected() if self.coefficient is None else vector.scaled(self.coefficient)


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition on the test prompts.

    Attributes:
        followed: share of answers that have the form and are readable.
        interval: Wilson's 95 % interval of it.
        readable: share of answers that are neither empty nor loops.
        perplexity: of all answers' tokens after their plain prompts, by the unsteered model.
        example: the first prompt's answer.
    """

    followed: float
    interval: tuple[float, float]
    readable: float
    perplexity: float
    example: str


def measure(
    llm: HookLLM,
    constraint: Constraint,
    prompts: dict[str, list[str]],
    own: dict[str, list[Answer]],
) -> dict[str, Any]:
    """What ``steering.json`` says of one constraint; ``own``: plain answers by split."""
    vectors = fit_vectors(llm, constraint, prompts["fit"], own["fit"])
    trials = try_settings(llm, constraint, vectors, prompts["development"])
    best = max(trials, key=lambda trial: (trials[trial], -_size(trial)))
    program = best.program(vectors)
    plain = _conversations(prompts["test"], "")
    asked = _conversations(prompts["test"], constraint.instruction)
    steer = [None] * len(asked) + [program] * (len(plain) + len(asked))
    further = answer(llm, [*asked, *plain, *asked], steer, MAX_TOKENS)
    answers = [*own["test"], *further]
    conditions = {}
    for i, name in enumerate(CONDITIONS):
        part = answers[i * len(plain) : (i + 1) * len(plain)]
        conditions[name] = asdict(_judged(llm, constraint, plain, part))
    return {
        "instruction": constraint.instruction,
        "setting": asdict(best),
        "development": [{**asdict(s), "followed": rate} for s, rate in trials.items()],
        "conditions": conditions,
    }


def fit_vectors(
    llm: HookLLM, constraint: Constraint, prompts: Sequence[str], own: Sequence[Answer]
) -> dict[str, SteeringVector]:
    """A vector a contrast: the instruction against none, and demonstrations (see there)."""
    positive, negative = demonstrations(constraint, prompts, own)
    if len(positive) < len(prompts):
        left_out = len(prompts) - len(positive)
        print(f"{left_out} of {len(prompts)} demonstrations left out: an answer was empty")
    return {
        "instruction": SteeringVector.fit(llm, *instruction_pairs(prompts, constraint.instruction)),
        "demonstrations": SteeringVector.fit(llm, positive, negative),
    }


def demonstrations(
    constraint: Constraint, prompts: Sequence[str], own: Sequence[Answer]
) -> tuple[list[Any], list[Any]]:
    """Conversations: each prompt after two answers in the form, and after the same answers as the
    model gave them; those in which an answer is empty are left out."""
    shown = [" ".join(sentences(a.text)[:SENTENCES_SHOWN]) for a in own]
    positive, negative = [], []
    for i, prompt in enumerate(prompts):
        others = [(i + distance) % len(prompts) for distance in SHOTS]
        if not all(shown[k] for k in others):
            continue
        for side, write in ((positive, constraint.rewrite), (negative, str)):
            turns = [(prompts[k], write(shown[k])) for k in others]
            side.append([*_turns(turns), {"role": "user", "content": prompt}])
    return positive, negative


def trial_settings() -> list[Setting]:
    """Those of ``TRIALS``, in the order in which equally good ones are taken."""
    return [
        Setting(contrast, layer, coefficient)
        for contrast, (layers, coefficients) in TRIALS.items()
        for layer in layers
        for coefficient in coefficients
    ]


def try_settings(
    llm: HookLLM,
    constraint: Constraint,
    vectors: dict[str, SteeringVector],
    prompts: Sequence[str],
) -> dict[Setting, float]:
    """How often each setting of ``TRIALS`` has the form followed; all in one engine batch."""
    settings = trial_settings()
    given = [c for _ in settings for c in _conversations(prompts, "")]
    programs = [p for s in settings for p in [s.program(vectors)] * len(prompts)]
    answers = iter(answer(llm, given, programs, TRIAL_TOKENS))
    rates = {}
    for setting in settings:
        part = [next(answers) for _ in prompts]
        rates[setting] = sum(constraint.followed(a.text, a.cut) for a in part) / len(part)
    return rates


def measured_before(
    path: Path, model_id: str, prompts: dict[str, list[str]], again: Sequence[str]
) -> dict[str, Any]:
    """What ``steering.json`` holds, or a new one; ``again``: the constraints to be measured now.

    Raises:
        DataError: what would be kept was measured on another model, other prompts or settings.
    """
    about = {"model": model_id, "prompts_hash": digest(prompts)}
    if not path.exists():
        return {**about, "constraints": {}}
    found = json.loads(path.read_text(encoding="utf-8"))
    for name, value in about.items():
        if found.get(name) != value:
            raise DataError(
                f"{path} has {name} {found.get(name)!r}, and now it is {value!r}: give another "
                "--output, or delete the file."
            )
    tried = [asdict(setting) for setting in trial_settings()]
    for name, one in found["constraints"].items():
        if name not in again and settings_of(one) != tried:
            raise DataError(
                f"{name} in {path} was chosen from {len(settings_of(one))} settings that are not "
                f"the {len(tried)} tried now: measure it again with --constraint {name} too, or "
                "give another --output."
            )
    return found


def settings_of(one: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings that a constraint of ``steering.json`` was chosen from."""
    return [{k: v for k, v in trial.items() if k != "followed"} for trial in one["development"]]


def answer(llm: HookLLM, conversations: Sequence[Any], steer: Any, max_tokens: int) -> list[Answer]:
    """Greedy answers, in one engine batch."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    outputs = llm.chat(list(conversations), params, steer=steer, use_tqdm=True)
    found = []
    for output in outputs:
        (done,) = output.outputs
        found.append(Answer(done.text, tuple(done.token_ids), done.finish_reason == "length"))
    return found


def perplexity(llm: HookLLM, conversations: Sequence[Any], answers: Sequence[Answer]) -> float:
    """Of all the answers' tokens, each after its conversation, by the model as it is."""
    from vllm import SamplingParams

    from hook_runtime.program_work import chat_prompt

    starts, prompts = [], []
    for conversation, one in zip(conversations, answers, strict=True):
        ids = chat_prompt(conversation, llm.tokenizer, {})["prompt_token_ids"]
        starts.append(len(ids))
        prompts.append({"prompt_token_ids": [*ids, *one.token_ids]})
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    logs = []
    for start, output in zip(starts, llm.generate(prompts, params), strict=True):
        places = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        logs += [known[token].logprob for token, known in list(places)[start:]]
    return math.exp(-sum(logs) / len(logs)) if logs else math.nan


def wilson(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share."""
    share, square = successes / count, z * z / count
    middle = share + square / 2
    spread = z * math.sqrt(share * (1 - share) / count + square / (4 * count))
    low, high = (middle - spread) / (1 + square), (middle + spread) / (1 + square)
    return max(0.0, low), min(1.0, high)


def _judged(
    llm: HookLLM, constraint: Constraint, plain: Sequence[Any], answers: Sequence[Answer]
) -> Condition:
    followed = sum(constraint.followed(a.text, a.cut) for a in answers)
    return Condition(
        followed / len(answers),
        wilson(followed, len(answers)),
        sum(is_readable(a.text) for a in answers) / len(answers),
        perplexity(llm, plain, answers),
        answers[0].text,
    )


def _size(setting: Setting) -> float:
    """The gentler of equally good settings is taken."""
    return 1.0 if setting.coefficient is None else setting.coefficient


def _conversations(prompts: Sequence[str], instruction: str) -> list[list[dict[str, str]]]:
    return [_turns([(f"{prompt} {instruction}".strip(), None)]) for prompt in prompts]


def _turns(turns: Sequence[tuple[str, str | None]]) -> list[dict[str, str]]:
    found = []
    for question, reply in turns:
        found.append({"role": "user", "content": question})
        if reply is not None:
            found.append({"role": "assistant", "content": reply})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    from core_rerank.backends import name_model, open_backend

    from .steering_report import draw, markdown

    names = [constraint.name for constraint in CONSTRAINTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=RESULTS, help="default: eval/results")
    parser.add_argument("--constraint", action="append", choices=names, help="default: all")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    given = parser.parse_args(arguments)
    make_folder(given.output)
    path = given.output / "steering.json"
    prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))
    resolved = name_model(given.model, "vllm")
    again = given.constraint or names
    found = measured_before(path, resolved.model_id, prompts, again)
    engine = {"enforce_eager": True, "dtype": "float32", "max_model_len": 1024}
    opened = open_backend("vllm", resolved, None, engine)
    try:
        llm: Any = opened.backend
        plain = [*prompts["fit"], *prompts["test"]]
        answers = answer(llm, _conversations(plain, ""), None, MAX_TOKENS)
        count = len(prompts["fit"])
        own = {"fit": answers[:count], "test": answers[count:]}
        for constraint in CONSTRAINTS:
            if constraint.name not in again:
                continue
            print(constraint.name, flush=True)
            found["constraints"][constraint.name] = measure(llm, constraint, prompts, own)
            found["prompts"] = {split: len(texts) for split, texts in prompts.items()}
            found["environment"] = environment()
            write_whole(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
            write_whole(given.output / "steering.md", markdown(found))
            draw(found, given.output / "steering.png")
    finally:
        opened.close()
    print(markdown(found))


if __name__ == "__main__":
    main()
