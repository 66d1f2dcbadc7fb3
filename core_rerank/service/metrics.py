"""What Prometheus reads from ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_DOCUMENTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class Metrics:
    """The counters of one service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = "core_rerank_"
        self.requests = Counter(
            f"{name}requests",
            "Requests answered.",
            ("route", "status"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            f"{name}request_seconds",
            "Seconds from a request's first byte to its answer.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.documents = Histogram(
            f"{name}request_documents",
            "Documents of a rerank request.",
            buckets=_DOCUMENTS,
            registry=self.registry,
        )
        self.tokens = Counter(
            f"{name}prompt_tokens", "Tokens of the prompts ranked.", registry=self.registry
        )
        self.truncated = Counter(
            f"{name}truncated_documents", "Documents that were cut.", registry=self.registry
        )
        self.flagged = Counter(
            f"{name}flagged_texts",
            "Documents and data that were flagged as holding orders.",
            ("by",),
            registry=self.registry,
        )
        self.dropped = Counter(
            f"{name}dropped_requests",
            "Requests whose work was dropped or never begun.",
            ("reason",),
            registry=self.registry,
        )

    def watch(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        """A gauge that is read when somebody asks."""
        gauge = Gauge(f"core_rerank_{name}", meaning, registry=self.registry)
        gauge.set_function(read)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)
