"""Lowers a strategy to torch modules and collectives, and runs it."""
