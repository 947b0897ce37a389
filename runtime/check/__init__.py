"""What would run, and what did, beside what was priced.

- `dryrun.py`: the lowered module run for one rank on tensors without memory.
- `optimizer_state.py`: what an optimizer keeps.
- `device_kernels.py`, `small_values.py`: its attention and dropout as a GPU runs them, and the numbers that its code looks at.
- `inputs.py`: of how many samples, and where; `halves.py`: backward passes in two halves; `handed.py`: what stages of a
  pipeline hand on.
- `live_bytes.py`: what lives meanwhile, `module_names.py` in which module; `traffic.py`: what is sent; `messages.py`: what was priced, in the same form.

Open to other rooms: `dryrun`, `messages`.
"""
