"""The commands of ``core-rerank``, one file each; ``core_rerank.cli`` puts them together."""
