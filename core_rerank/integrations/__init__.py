"""Adapters to other frameworks, one module each; each needs that framework's extra."""
