"""Save a recommender of a preset with random weights, as wide and as large as a real one.

    python benchmarks/end_to_end_model.py FOLDER [--preset NAME] [--workload WORKLOAD] [--items N]

Run by its path, so that the Python of another checkout makes a folder of its own format.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from recprune import Index, Recommender
from recprune.data.identifiers import IntegerIds
from recprune.models.architectures import build_model
from recprune.models.embedding import RecJPQEmbedding
from recprune.models.inference import TorchEncoder
from recprune.models.onnx_export import export_encoder
from recprune.models.settings import PRESETS
from recprune.training.checkpoint import model_arrays

_SPLITS, _SUB_ITEMS = 8, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workload", type=Path, help="codes, sub-item and sequence embeddings")
    parser.add_argument("--items", type=int, default=930_528, help="where no workload is given")
    parser.add_argument("--encoder-precision", help="of a version that has a choice")
    parser.add_argument("--preset", default="gsasrec", choices=PRESETS)
    parsed = parser.parse_args()
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    settings = PRESETS[parsed.preset]
    if parsed.workload is None:
        codes = rng.integers(0, _SUB_ITEMS, (parsed.items, _SPLITS), np.uint8)
    else:
        codes = np.load(parsed.workload / "codes.npy")
    model = build_model(settings.model, codes, _SUB_ITEMS).eval()
    embedding = model.embedding
    assert isinstance(embedding, RecJPQEmbedding)
    if parsed.workload is not None:
        # Sequence embeddings as large and as spread as those of the trained model are about as
        # hard to search for.
        users = np.load(parsed.workload / "sequence_embeddings.npy")
        sub_items = np.load(parsed.workload / "sub_item_embeddings.npy")
        with torch.no_grad():
            embedding.sub_item_embeddings.copy_(torch.from_numpy(sub_items))
            model.norm.weight.copy_(torch.from_numpy(users.std(axis=0)))
            model.norm.bias.copy_(torch.from_numpy(users.mean(axis=0)))
    recommender = Recommender(
        Index.build(codes, embedding.sub_item_embeddings.detach().numpy(), threads=2),
        TorchEncoder(model, settings.model.length),
        IntegerIds(np.arange(len(codes))),
        rng.integers(0, 1000, len(codes)),
        settings.to_json() | {"preparation": {}},
        model_arrays(model),
        lambda: export_encoder(model, *filter(None, [parsed.encoder_precision])),
    )
    recommender.save(parsed.folder)


if __name__ == "__main__":
    main()
