"""Values for parameters and buffers, share by share.

- `materialise.py`: modules on the meta device made real.
- `weights.py`: safetensors files, each rank reading its own slices.
- `checkpoint_chunks.py`: where a share lies in the whole tensor, for `torch.distributed.checkpoint`.

Open to other rooms: `materialise`, `weights`, `checkpoint_chunks`.
"""
