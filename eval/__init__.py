"""Measuring: BEIR collections, rerankers side by side, and the benchmarks of the runtime."""

from .beir_folders import find_collection
from .beir_reranker import BeirReranker
from .candidates import Candidates, find_candidates
from .data import Dataset, load_beir, read_qrels
from .harness import evaluate
from .report import Comparison, Cost, Report, SystemReport
from .report_files import write_report
from .system_names import name_systems
from .systems import (
    AttentionSystem,
    CrossEncoderSystem,
    FusedSystem,
    GenerationSystem,
    RankerSystem,
    System,
    attention_system,
)

__all__ = [
    "AttentionSystem",
    "BeirReranker",
    "Candidates",
    "Comparison",
    "Cost",
    "CrossEncoderSystem",
    "Dataset",
    "FusedSystem",
    "GenerationSystem",
    "RankerSystem",
    "Report",
    "System",
    "SystemReport",
    "attention_system",
    "evaluate",
    "find_candidates",
    "find_collection",
    "load_beir",
    "name_systems",
    "read_qrels",
    "write_report",
]
