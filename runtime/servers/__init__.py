"""Rows of embedding tables that are not on every device: on other ranks in turn, or with parameter servers.

- `tiering.py`: a module's tables put where a strategy has them. `tables.py`: all tables of one model: looked up, updated, counted; what a step does of them. `embedding.py`: the module that
  stands for `nn.Embedding`; `foresight.py`: which rows the tables of a micro-batch will ask for, so that one exchange serves all.
- `store.py`: what keeps cold rows, and asks for it: `across.py` the ranks themselves, `client.py` servers.
- `server.py`: a server; `launch.py` starts one a node. `wire.py`: calls between workers and servers, and how long they may take.
- `held.py`: the rows of one part of a table with their optimizer state; `tiered_rows.py`: in memory or on disk;
  `rows_optimizer.py`: torch's optimizers on some rows.
- `dealing.py`: which server has which part, by size and by traffic, in pairs, when servers come and go.
- `whole.py`: whole tables, for checkpoints.

Servers are no ranks of torch.distributed. Three processes were tried, one of which is killed, and a fourth that comes later (torch
2.13). By `torch.distributed.rpc`, and by messages of a Gloo group, calls of the dead one fail at once and the others' go on. But
after a death nobody joins rpc any more (every member, the dead one too, would have to answer: "wait timeout, keys:
Token_for_w3_join"), and a process group takes no newcomer at all. Connections of Python's own take both.

Open to other rooms: `tiering`, `whole`, `launch`.
"""
