"""What would run, and what did, beside what was priced.

- `dryrun.py`: the lowered module run for one rank on tensors without memory.
- `live_bytes.py`: what lives meanwhile; `traffic.py`: what is sent; `messages.py`: what was priced, in the same form.

Open to other rooms: `dryrun`, `messages`.
"""
