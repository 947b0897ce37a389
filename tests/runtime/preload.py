"""What each rank of the tests would import anew: the fork server imports it once, for all of them."""

from __future__ import annotations

import gc
from importlib import import_module

ARCHITECTURES = ("bert", "deepseek_v3", "gpt2", "llama", "mixtral", "qwen3", "vit")
MODULES = (
    "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.export", "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes", "networkx", "sympy.combinatorics.named_groups",
    *(f"transformers.models.{name}.modeling_{name}" for name in ARCHITECTURES),
    "autoparallel.api", "autoparallel.runtime.start", "autoparallel.runtime.pipeline.module",
    "tests.runtime.compare", "tests.runtime.pipelines",
)  # fmt: skip

gc.set_threshold(50_000)  # as in tests/conftest.py
for _module in MODULES:
    import_module(_module)
