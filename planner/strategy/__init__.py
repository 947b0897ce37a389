"""The strategy: its types, its file, and whether it can run at all."""
