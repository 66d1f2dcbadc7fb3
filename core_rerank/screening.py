"""Screening documents for planted orders: more heads, at the last token of the ranking prompts.

Attention Tracker's measure (arXiv 2411.00348) inside a ranking prompt: the share of attention that
the prompt's last token pays the documents rather than the instruction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hook_runtime.specs import AttentionProbe, Capture, CaptureRequest

from .injection_heads import InjectionHeads
from .injection_prompt import Heads
from .injection_scoring import focus, suspicion
from .prompt import Prompt

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Screen:
    """How a reranker screens.

    Attributes:
        heads: those found for the task "document", one document a prompt.
        drop: flagged documents are left out of the ranking.
    """

    heads: InjectionHeads
    drop: bool = False

    @property
    def threshold(self) -> float:
        """A document whose score lies above it is flagged."""
        return self.heads.threshold

    def request(self, prompt: Prompt) -> CaptureRequest:
        """What is read beside the ranking's own request for the same prompt."""
        return screening_request(prompt, self.heads.heads)

    def suspicion(self, masses: np.ndarray) -> float:
        """In [0, 1], higher is more suspicious; from one document's masses, float [heads, 2].

        Raises:
            NotFiniteError: see ``focus``.
        """
        return float(suspicion(focus(masses), self.heads.weights, self.heads.intercept))


def screening_request(prompt: Prompt, heads: Heads) -> CaptureRequest:
    """What the last token of the whole prompt pays each document and, last, the instruction.

    Its keys are those of the ranking's request, which ends with the query: an engine with a prefix
    cache computes what comes after, and the last cache block, once more.
    """
    end = len(prompt.token_ids)
    spans = (*prompt.document_spans, prompt.instruction_span)
    probe = AttentionProbe(heads, (end - 1, end), spans, reduction="documents")
    return CaptureRequest(prompt.token_ids, probe)


def document_masses(capture: Capture) -> np.ndarray:
    """A capture of ``screening_request``: float32 [heads, documents, 2], instruction first."""
    import numpy as np

    documents = capture.values[:, :-1]
    told = np.broadcast_to(capture.values[:, -1:], documents.shape)
    return np.stack([told, documents], axis=-1)
