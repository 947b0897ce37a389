"""What one accelerator tells: kernels and training steps drawn at random, predicted before they are measured.

    python -m benchmarks.one_device draw --seed 1 --cases 24 -o FOLDER        # models, strategies, graphs; no accelerator needed
    python -m benchmarks.one_device measure FOLDER -o steps.jsonl             # on the accelerator
    python -m benchmarks.one_device kernels --seed 1 -o kernels.csv           # on the accelerator
    python -m benchmarks.one_device same-numbers                              # on the accelerator
    python -m benchmarks.one_device compare FOLDER steps.jsonl [--device h100-sxm] [--rows]

- `cases`: draws a model that one device can train, and a complete strategy that the runtime runs there.
- `steps`: runs a case by `auto_parallelize`, and by plain PyTorch where that can say the same.
- `kernels`: draws kernels of every family that the cost model prices, and times them.
- `same_numbers`: losses by strategies of every kind, against plain PyTorch there.
- `compare`: step time and memory, predicted and measured.
"""
