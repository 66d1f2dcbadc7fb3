"""The parity table: captures of real engines under every condition, against transformers."""
