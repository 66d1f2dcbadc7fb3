"""Other ways to rerank, behind one call: listwise generation and cross-encoders."""

from .base import Ranker, RankerResult, Task
from .core import CoreRanker
from .cross_encoders import SentenceTransformersRanker, VllmScoreRanker
from .listwise import ListwiseRanker

__all__ = [
    "CoreRanker",
    "ListwiseRanker",
    "Ranker",
    "RankerResult",
    "SentenceTransformersRanker",
    "Task",
    "VllmScoreRanker",
]
