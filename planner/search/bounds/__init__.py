"""What each part of the space can at best reach: prices per block, and true lower bounds made of them.

- `prices.py`: one block of the chain under a strategy: seconds, bytes, numbers, as `score` has them; `tables.py`: the
  same as columns, a row for each setting; `settings.py`: of the settings that are asked for; `communication.py`: what
  variants communicate, in columns, by the rates of `exchanges.py`, once for each of the `placements.py`;
  `exchanged.py`: of layer groups and the whole model.
- `outer.py`: the space joined with its prices, and the bounds of shapes and variants:
- `variants.py`: of shapes, of variants as a whole ("shared"), and rank by rank ("divided");
- `rows.py`: variants with all that these are made of; `messages.py`: what stages send each other;
- `ranks.py`: how many blocks a rank can hold in a given time and memory, with `flight.py`: micro-batches in flight, and `ends.py`:
  what it has to do when it has computed all; `hosts.py`: what they keep on hosts;
- `families.py`: the least that variants communicate which differ in nothing else, so that they are bounded as one;
- `far.py`: what blocks take whose parallelism is not between neighbours;
- `paths.py`: variants of one schedule by its paths; `held.py`: and by what its moments hold;
- `pace.py`: what unlike devices together can do.
"""
