"""What of other people's models the product captures, plans and runs.

- `models.py`: which models there are (every architecture of transformers; torchvision, timm and diffusers where they are
  installed: `libraries.py`), and small ones of the same code.
- `steps.py`: what is asked of a model, `defaults.py` whether it runs with its own defaults at all, `eager.py` what torch says of it, `ranks.py` what two processes make of it.
- `work.py`: one model in a process of its own, with a time limit.
- `report.py`: the table of `docs/coverage.md`.
"""
