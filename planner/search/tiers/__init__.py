"""Embedding tables in tiers: which rows stand where, chosen together with the mesh."""
