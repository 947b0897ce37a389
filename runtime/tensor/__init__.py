"""Tensor and sequence parallelism: parameters become DTensors as `[[tensor]]` rules say.

- `rules.py`: the rules applied to the user's modules, and layouts fixed at their boundaries by `layout_hooks.py`.
- `functions.py`: functions that DTensor's own rules do not run well; `dtensor_rules.py`: rules that torch lacks.
- `plain_blocks.py`: blocks that run on plain shares, without DTensor's dispatch; `islands.py`: modules that may,
  whatever stands around them.
- `fused_parts.py`: projections that hold several parts in one dim; `cross_entropy.py`: the loss on sharded classes;
  `vocabulary.py`: an embedding on its share of the rows.
- `shares.py`: this rank's share of a DTensor, and back; `questions.py`: small questions about what may be a DTensor.

Open to other rooms: `rules`, `functions`, `dtensor_rules`, `plain_blocks`, `cross_entropy`, `questions`, `vocabulary`.
"""
