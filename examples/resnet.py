"""ResNet-50 as torchvision builds it (He et al., "Deep Residual Learning for Image Recognition", 2015).

autoparallel plan examples/resnet.py:resnet50 --cluster h100-sxm:1x8 -o strategy.toml
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPANSION = 4  # a bottleneck's output has four times the channels of its middle


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut; the stride is on the 3x3, as in torchvision."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        out = width * EXPANSION
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + shortcut)


class ResNet(nn.Module):
    """Stem, four stages of bottlenecks, pooling and a classifier."""

    def __init__(self, layers: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = width
        stages = []
        for stage, count in enumerate(layers):
            middle = width * 2**stage
            blocks = [Bottleneck(channels, middle, stride=1 if stage == 0 else 2)]
            channels = middle * EXPANSION
            blocks += [Bottleneck(channels, middle) for _ in range(count - 1)]
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits if labels is None else nn.functional.cross_entropy(logits, labels)


def resnet50(
    classes: int = 1000, image_size: int = 224, width: int = 64
) -> tuple[nn.Module, dict[str, Tensor]]:
    """ResNet-50 and two labelled images; with the labels, `forward` returns the loss."""
    return _with_inputs(ResNet((3, 4, 6, 3), width, classes), image_size)


def resnet_small(
    classes: int = 10, image_size: int = 32, width: int = 8
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The same network, small enough for a test on a CPU."""
    return _with_inputs(ResNet((2, 2, 2, 2), width, classes), image_size)


def _with_inputs(model: ResNet, image_size: int) -> tuple[nn.Module, dict[str, Tensor]]:
    images = torch.randn(2, 3, image_size, image_size)
    return model.train(), {"images": images, "labels": torch.zeros(2, dtype=torch.int64)}
