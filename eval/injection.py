"""Measures injection detection: how well scores tell attacks, per data set and left one out.

    python -m core_rerank.eval.injection --find A.jsonl B.jsonl --measure C.jsonl D.jsonl \\
        --store DIR --output DIR

Attention is read once a file and kept in --store (a file there is taken as it is), so that the rest
takes seconds. Heads are found by both methods on all of --find, and without the data sets of the
measured one's family ("left out"; a family is what precedes the first "_" of a name). The
thresholds are those of 1 % and 5 % false positives on the benign texts of --find, held out. Two
controls need no model: the length of the data in tokens, and a list of keywords. Writes
injection.json, injection.md and, with matplotlib and a measured file of both kinds, injection.svg.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from core_rerank.injection_data import DEFAULT_INSTRUCTION, LabelledText, load_labelled_texts
from core_rerank.injection_finding import (
    DEFAULT_HEADS,
    METHODS,
    Evidence,
    Method,
    find_heads,
    held_out_scores,
)
from core_rerank.injection_measuring import (
    InjectionAttention,
    Wanted,
    data_hash,
    load_measured,
    measure_injection,
    measuring_options,
)
from core_rerank.injection_scoring import threshold_for
from core_rerank.pictures import can_draw, save_figure

from .files import make_folder, write_whole

if TYPE_CHECKING:
    import numpy as np

RATES = (0.01, 0.05)
# Words of the direct attacks that are best known, in the languages of the deepset data.
KEYWORDS = re.compile(
    r"\b(ignore|ignorier\w*|forget|vergiss\w*|disregard|override|bypass|previous|above|vorherige\w*"
    r"|instructions?|anweisung\w*|prompts?|system|jailbreak|pretend|act as|you are now|reveal)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class LabelledScores:
    """What one system says of one data set.

    Attributes:
        system: "k-sigma", "signed", with ", left out", or a control.
        data: the measured set.
        thresholds: by false-positive rate on the benign texts of the sets heads were found on;
            empty where nothing was set.
    """

    system: str
    data: str
    scores: np.ndarray
    attack: np.ndarray
    thresholds: dict[float, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of the table; None where a data set has benign texts or attacks only.

    Attributes:
        tpr: by rate, of the data set's own ROC curve: the attacks found where so many of its own
            benign texts are flagged.
        caught, alarms: by rate, the attacks and benign texts flagged at the threshold that was
            set elsewhere.
    """

    system: str
    data: str
    benign: int
    attacks: int
    auroc: float | None
    auprc: float | None
    tpr: dict[float, float] | None
    caught: dict[float, float] | None
    alarms: dict[float, float] | None


def measure(given: LabelledScores) -> Measured:
    """The figures of one system on one data set, by scikit-learn."""
    import numpy as np
    from sklearn import metrics

    scores, attack = given.scores, given.attack
    both = bool(attack.any() and not attack.all())
    tpr = None
    if both:
        false, true, _ = metrics.roc_curve(attack, scores, drop_intermediate=False)
        tpr = {rate: float(true[false <= rate].max()) for rate in RATES}

    def flagged(which: np.ndarray) -> dict[float, float] | None:
        if not which.any():
            return None
        return {rate: float(np.mean(scores[which] > t)) for rate, t in given.thresholds.items()}

    return Measured(
        system=given.system,
        data=given.data,
        benign=int((~attack).sum()),
        attacks=int(attack.sum()),
        auroc=float(metrics.roc_auc_score(attack, scores)) if both else None,
        auprc=float(metrics.average_precision_score(attack, scores)) if both else None,
        tpr=tpr,
        caught=flagged(attack),
        alarms=flagged(~attack),
    )


def family(name: str) -> str:
    """Data sets of one family are never used to find heads for each other when left out."""
    return name.partition("_")[0]


def score_sets(
    find: Sequence[InjectionAttention],
    to_measure: Sequence[InjectionAttention],
    texts: dict[str, list[LabelledText]],
    count: int,
) -> list[LabelledScores]:
    """Every system on every data set of ``to_measure``."""
    scored = []
    for one in to_measure:
        name = one.measurement.data
        others = [a for a in find if family(a.measurement.data) != family(name)]
        for method in METHODS:
            scored.append(_by_heads(method, method, find, one, count))
            if others and len(others) < len(find):
                scored.append(_by_heads(method, f"{method}, left out", others, one, count))
        for control, score in CONTROLS.items():
            scored.append(_by_control(control, score, find, one, texts))
    return scored


def _by_heads(
    method: Method,
    system: str,
    find: Sequence[InjectionAttention],
    one: InjectionAttention,
    count: int,
) -> LabelledScores:
    num_heads = one.measurement.model.num_heads
    evidence = Evidence.of([(a.drawn(), a.attack, a.groups) for a in find], num_heads)
    found = find_heads(evidence, method, count=count)
    calm = held_out_scores(evidence, method, count=count)[~evidence.attack]
    return LabelledScores(
        system,
        one.measurement.data,
        found.scores(one.drawn(), num_heads),
        one.attack,
        {rate: threshold_for(calm, rate) for rate in RATES},
    )


Control = Callable[[InjectionAttention, list[LabelledText]], "np.ndarray"]


def _length(one: InjectionAttention, _: list[LabelledText]) -> np.ndarray:
    return one.tokens.astype(float)


def _keywords(_: InjectionAttention, texts: list[LabelledText]) -> np.ndarray:
    import numpy as np

    return np.array([len(KEYWORDS.findall(text.text)) for text in texts], float)


CONTROLS: dict[str, Control] = {"length alone": _length, "keywords alone": _keywords}


def _by_control(
    system: str,
    control: Control,
    find: Sequence[InjectionAttention],
    one: InjectionAttention,
    texts: dict[str, list[LabelledText]],
) -> LabelledScores:
    import numpy as np

    calm = np.concatenate([control(a, texts[a.measurement.data])[~a.attack] for a in find])
    return LabelledScores(
        system,
        one.measurement.data,
        control(one, texts[one.measurement.data]),
        one.attack,
        {rate: threshold_for(calm, rate) for rate in RATES},
    )


def table(rows: Sequence[Measured]) -> str:
    """The rows in Markdown, one data set after the other."""
    head = ["data (benign / attacks)", "system", "AUROC", "AUPRC"]
    head += [f"TPR at {rate:.0%} FPR" for rate in RATES]
    fixed = [r for r in RATES if any(row.alarms and r in row.alarms for row in rows)]
    head += [f"{rate:.0%} threshold: attacks / benign flagged" for rate in fixed]
    lines = [" | ".join(["", *head, ""]).strip(), "|---" * len(head) + "|"]
    for row in rows:
        cells = [f"{row.data} ({row.benign} / {row.attacks})", row.system]
        cells += [_figure(row.auroc), _figure(row.auprc)]
        cells += [_figure(_at(row.tpr, rate)) for rate in RATES]
        cells += [
            f"{_figure(_at(row.caught, rate))} / {_figure(_at(row.alarms, rate))}" for rate in fixed
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _at(values: dict[float, float] | None, rate: float) -> float | None:
    return None if values is None else values.get(rate)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}".lstrip("0") or "0"


def draw(scored: Sequence[LabelledScores], path: Path, bins: int = 8) -> bool:
    """Reliability: the share of attacks among texts of equal scores, against their mean score.

    One panel a data set that has both kinds; a dot is an eighth of its texts. On the diagonal a
    score is the chance of an attack. False, and no file, without matplotlib or such a data set.
    """
    import numpy as np

    drawn = [s for s in scored if s.system in METHODS and s.attack.any() and not s.attack.all()]
    names = list(dict.fromkeys(s.data for s in drawn))
    if not names or not can_draw():
        return False
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 10}):
        figure = Figure(figsize=(3.6 * len(names), 3.8), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            for one in (s for s in drawn if s.data == name):
                parts = np.array_split(np.argsort(one.scores, kind="stable"), bins)
                shares = [one.attack[part].mean() for part in parts]
                axes.plot([one.scores[p].mean() for p in parts], shares, "o-", label=one.system)
            axes.plot([0, 1], [0, 1], ":", color="#777777")
            axes.set(title=name, xlabel="mean score", xlim=(0, 1), ylim=(-0.02, 1.02))
            axes.legend(fontsize=8)
        figure.axes[0].set_ylabel("share of attacks")
        save_figure(figure, path)
    return True


def _attention(
    files: Sequence[Path],
    texts: dict[str, list[LabelledText]],
    given: argparse.Namespace,
) -> list[InjectionAttention]:
    """Of each file: from the store, or measured into it by one engine."""
    from core_rerank.backends import name_model, open_backend
    from core_rerank.commands.terminal import counting

    places = [given.store / f"{file.stem}.safetensors" for file in files]
    missing = [(f, p) for f, p in zip(files, places, strict=True) if not p.is_file()]
    resolved = name_model(given.model, given.backend)
    if missing:
        make_folder(given.store)
        options = measuring_options(given.backend)
        opened = open_backend(given.backend, resolved, None, options)
        try:
            for file, place in missing:
                with counting(file.name) as on_progress:
                    measure_injection(
                        opened.backend,
                        texts[file.stem],
                        instruction=given.instruction,
                        model=opened.model,
                        data=file.stem,
                        on_progress=on_progress,
                    ).save(place)
        finally:
            opened.close()
    return [
        load_measured(
            place,
            Wanted(resolved.model_id, given.backend, data_hash(texts[f.stem]), given.instruction),
        )
        for f, place in zip(files, places, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, find, measure, write."""
    parser = argparse.ArgumentParser(
        prog="python -m core_rerank.eval.injection",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--find", type=Path, nargs="+", required=True, metavar="JSONL")
    parser.add_argument("--measure", type=Path, nargs="+", required=True, metavar="JSONL")
    parser.add_argument("--store", type=Path, required=True, metavar="DIR")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--backend", default="vllm", choices=["vllm", "transformers"])
    parser.add_argument("--instruction", default=DEFAULT_INSTRUCTION)
    parser.add_argument("--top", type=int, default=DEFAULT_HEADS, help="heads, at most")
    given = parser.parse_args(arguments)
    files = [*given.find, *given.measure]
    texts = {file.stem: load_labelled_texts(file) for file in files}
    if len(texts) < len(files):
        parser.error("two files have the same name: rename one")
    attention = _attention(files, texts, given)
    count = len(given.find)
    scored = score_sets(attention[:count], attention[count:], texts, given.top)
    rows = [measure(one) for one in scored]
    make_folder(given.output)
    settings = {"find": [f.stem for f in given.find], "top": given.top}
    about = [asdict(a.measurement) for a in attention]
    report = {"settings": settings, "rows": [asdict(row) for row in rows], "measured": about}
    write_whole(given.output / "injection.json", f"{json.dumps(report, indent=1)}\n")
    write_whole(given.output / "injection.md", table(rows))
    print(table(rows), end="")
    draw(scored, given.output / "injection.svg")


if __name__ == "__main__":
    main()
