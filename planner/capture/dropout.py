"""What a model drops in training."""

from __future__ import annotations

from torch import nn

_KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def largest_dropout(module: nn.Module) -> float:
    """The largest share that its modules drop as they are now."""
    return max((m.p for m in module.modules() if isinstance(m, _KINDS) and m.training), default=0.0)
