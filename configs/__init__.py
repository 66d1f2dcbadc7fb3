"""Data files that come with core-rerank; installed as ``core_rerank.configs``."""
