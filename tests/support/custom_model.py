"""A model with code of its own, as on the Hub."""

from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel


class CustomConfig(PretrainedConfig):
    model_type = "custom-of-tests"

    def __init__(self, width: int = 8, **more: Any) -> None:
        self.width = width
        super().__init__(**more)


class CustomModel(PreTrainedModel):
    config_class = CustomConfig

    def __init__(self, config: CustomConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(3))
        self.post_init()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


CustomConfig.register_for_auto_class()
CustomModel.register_for_auto_class("AutoModel")
