"""Measuring: BEIR folders, nDCG, reranking runs and the benchmark of the runtime."""
