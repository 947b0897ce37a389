"""How a run is doing, against its plan and among its ranks.

- `clock.py`: seconds of a step by kind of action, on this rank.
- `record.py`: the record of a run, JSON lines; what `watch` and reports read. Without torch.
- `stragglers.py`: ranks that are slower than their peers, and what they cost. Without torch.
- `collectives.py`: what collectives take, by kind and level of the network.
- `links.py`: what the links between ranks pass.
- `slow_links.py`: those that pass less than they should, and what they cost. Without torch.
- `differences.py`: predicted and measured, in the order of what they cost. Without torch.
- `bandwidths.py`: what collectives reached beside what they were priced at. Without torch.
- `alerts.py`: thresholds with hysteresis, told to a command or a local address. Without torch.
- `outputs.py`: Prometheus text and TensorBoard.
- `monitor.py`: all of these around the steps of a run.

Open to other rooms: `clock`, `record`, `stragglers`, `links`, `slow_links`, `collectives`, `differences`, `bandwidths`, `alerts`, `outputs`, `monitor`.
"""
