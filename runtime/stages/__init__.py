"""A module cut into pipeline stages that run the user's own submodules.

- `cut.py`: the stages; `split.py`: which stage computes which node, and what stages hand on.
- `outer_graph.py`: the module's graph with its submodules called whole; `opaque.py`: how they are hidden from
  `torch.export`; `known_values.py`: control flow of what is traced between them;
  `export_inputs.py`: what that is given; `vmapped.py`: what runs under `torch.vmap` there; `modes.py`: what runs under
  `torch.no_grad()` or `torch.autocast()`.
- `alike.py`: which stages are alike, so that a dry run needs one of each kind.

Open to other rooms: `cut`, `alike`.
"""
