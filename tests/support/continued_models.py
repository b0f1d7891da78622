"""Models whose encoders can be continued, with weights that matter, and their slow twins."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from recprune import assign_random
from recprune.models.architectures import build_model
from recprune.models.continuation import Continuation
from recprune.models.inference import ItemVectors, OnnxEncoder, TorchEncoder
from recprune.models.onnx_export import export_encoder
from recprune.models.settings import ModelSettings

NUM_ITEMS = 60


class ContinuedModel:
    """A model of random weights: continued, and its whole window by torch and by ONNX Runtime."""

    def __init__(self, embedding: str = "recjpq", seed: int = 0, **values: Any) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.settings = ModelSettings(
            "continued",
            embedding,  # type: ignore[arg-type]
            **({"width": 16, "length": 12, "num_heads": 2, "kept_width": 4} | values),
        )
        codes = assign_random(NUM_ITEMS, num_splits=4, num_sub_items=8, seed=seed).codes
        model = build_model(self.settings, codes, 8)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                scale = 0.1 if "norm" in name else 0.25
                parameter.add_(scale * torch.randn(parameter.shape))
        arrays = {name: value.detach().numpy() for name, value in model.named_parameters()}
        if embedding == "full":
            self.vectors = ItemVectors.from_table(arrays["embedding.item_embeddings"])
        else:
            self.vectors = ItemVectors.from_codes(codes, arrays["embedding.sub_item_embeddings"])
        self.weights = {
            name: array for name, array in arrays.items() if not name.startswith("embedding.")
        }
        length = self.settings.length
        self.torch = TorchEncoder(model, length)
        self.onnx = OnnxEncoder(export_encoder(model).onnx, self.vectors, length)
        self.continuation = Continuation(self.weights, self.settings, self.vectors)

    def check(self, embedding: Any, history: list[int]) -> None:
        """Hold φ of a history against that of its whole window."""
        items = np.array(history, np.int32)
        for encoder in (self.torch, self.onnx):
            whole = encoder.encode([items])[0]
            assert np.abs(embedding - whole).max() <= 1e-5 * np.abs(whole).max()
