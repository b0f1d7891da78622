"""A recommender as one folder: what is written, and what is checked when it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from recprune.attributes.attributes import Attributes
from recprune.data.identifiers import ExternalIds, ids_from_arrays
from recprune.models.activity import Activity
from recprune.models.boost_heads import check_heads
from recprune.models.foreign_encoder import ForeignEncoder, PaddedForm
from recprune.models.inference import (
    Encoder,
    ExportedEncoder,
    OnnxEncoder,
    TorchEncoder,
)
from recprune.models.settings import Settings
from recprune.models.transitions import SuccessorTable
from recprune.recommender.recommender import EncoderKind, Recommender, item_vectors
from recprune.search.checks import checked_threads
from recprune.search.index import KIND as INDEX_KIND
from recprune.search.index import Index
from recprune.storage import Saved, load_folder, save_folder
from recprune.types import InputError, MissingExtraError, StorageError
from recprune.vectors.rotation import checked_matrix

KIND = "recommender"
_VERSION = 8  # of the format
_UNTURNED = 7  # version in which one is written whose encoder is from elsewhere and turns nothing
_OWN_ENCODER = 6  # version in which one is written that has an encoder of ours
_WITHOUT_ATTRIBUTES = 5  # and that in which it is, if it has no attributes either
_OLDEST = 3  # version that is still read

_TABLE = "encoder_table_"  # begins the names of what the encoder looks up


def save(recommender: Recommender, folder: str | Path) -> None:
    """Write the recommender as a folder, in place of an older one if there is one."""
    exported = recommender.export()
    arrays: dict[str, NDArray[Any]] = {
        "popularity": recommender.popularity,
        "encoder_onnx": np.frombuffer(exported.onnx, np.uint8),
        **{f"{_TABLE}{name}": table for name, table in exported.tables.items()},
        **recommender.item_ids.to_arrays("item_ids"),
        # The vectors of the items are the index's already.
        **{
            f"weights_{name}": array
            for name, array in recommender.weights.items()
            if not name.startswith("embedding.")
        },
    }
    if recommender.heads.transitions is not None:
        arrays |= recommender.heads.transitions.table.to_arrays("successors")
    if recommender.heads.repeats is not None and recommender.heads.repeats.activity is not None:
        arrays["activity"] = recommender.heads.repeats.activity.buckets[-1]
    parts = {"index": recommender.index.parts()}
    version = _WITHOUT_ATTRIBUTES
    if recommender.attributes is not None:
        # Those of items that came later belong to the catalogue that has them.
        parts["attributes"] = recommender.attributes.shortened(len(recommender.item_ids)).parts()
        version = _OWN_ENCODER
    if isinstance(recommender.encoder, ForeignEncoder):
        arrays["encoder_items"] = recommender.encoder.item_numbers
        version = _UNTURNED
        if recommender.encoder.rotation is not None:
            arrays["encoder_rotation"] = recommender.encoder.rotation
            version = _VERSION
    save_folder(folder, Saved(KIND, version, recommender.settings, arrays, parts))


def load(
    folder: str | Path,
    *,
    encoder: EncoderKind,
    threads: int,
    verify: bool,
) -> Recommender:
    """Open a saved recommender: see `Recommender.load`."""
    if encoder not in get_args(EncoderKind):
        expected = ", ".join(get_args(EncoderKind))
        raise InputError(f"encoder is {encoder!r}, expected one of {expected}")
    checked_threads(threads)
    saved = load_folder(folder, kind=KIND, version=_VERSION, oldest=_OLDEST, verify=verify)
    try:
        if saved.version == 3:
            saved = _from_version_3(saved)
        index = Index.from_parts(saved.part("index", str(folder)), str(folder))
        attributes = None
        if "attributes" in saved.parts:
            attributes = Attributes.from_parts(saved.parts["attributes"], str(folder))
    except KeyError as error:
        raise StorageError(f"{folder}: the recommender has no {error.args[0]}") from None
    try:
        return _from_saved(saved, index, attributes, encoder, threads)
    except KeyError as error:
        raise StorageError(f"{folder}: the recommender has no {error.args[0]}") from None
    except (InputError, StorageError) as error:
        raise StorageError(f"{folder}: {error}") from None


def saved_attributes(folder: str | Path) -> tuple[ExternalIds, Attributes] | None:
    """Return the items of a saved recommender and their attributes; None where it has none."""
    saved = load_folder(folder, kind=KIND, version=_VERSION, oldest=_OLDEST)
    if "attributes" not in saved.parts:
        return None
    item_ids = ids_from_arrays(saved.arrays, "item_ids")
    if item_ids is None:
        raise StorageError(f"{folder}: the recommender has no item_ids")
    attributes = Attributes.from_parts(saved.parts["attributes"], str(folder))
    if attributes.num_items != len(item_ids):
        raise StorageError(
            f"{folder}: attributes are of {attributes.num_items} items, the recommender has "
            f"{len(item_ids)}"
        )
    return item_ids, attributes


def _from_saved(
    saved: Saved,
    index: Index,
    attributes: Attributes | None,
    encoder: EncoderKind,
    threads: int,
) -> Recommender:
    """Put together what a folder has; refuse what does not fit the index, or one another."""
    own, arrays = saved.settings, saved.arrays
    item_ids = ids_from_arrays(arrays, "item_ids")
    if item_ids is None:
        raise KeyError("item_ids")
    if len(item_ids) != index.num_items:
        raise StorageError(f"{len(item_ids)} item_ids, the index has {index.num_items} items")
    popularity = arrays["popularity"]
    if popularity.dtype != np.int64 or popularity.shape != (index.num_items,):
        given = f"{popularity.dtype}{list(popularity.shape)}"
        raise StorageError(f"popularity is {given}, expected int64[{index.num_items}]")
    if popularity.min(initial=0) < 0:
        raise StorageError(f"popularity is {popularity.min()} somewhere, expected 0 or more")
    if "encoder" in own:
        foreign = _foreign_encoder(encoder, index, own["encoder"], arrays, threads)
        return Recommender(
            index, foreign, item_ids, popularity, own, {}, foreign.exported, attributes=attributes
        )
    settings = Settings.from_json({part: own[part] for part in ("model", "training")})
    weights = _with_prefix(arrays, "weights_")
    check_heads(weights, settings.model)
    tables = _with_prefix(arrays, _TABLE)
    for prefix, group in (("weights_", weights), (_TABLE, tables)):
        for name, array in group.items():
            if array.dtype != np.float32 or not np.isfinite(array).all():
                raise StorageError(f"{prefix}{name} is not all finite numbers in float32")
    exported = ExportedEncoder(arrays["encoder_onnx"].tobytes(), tables)
    successors = activity = None
    if settings.model.transitions:
        successors = SuccessorTable.from_arrays(arrays, "successors", index.num_items)
    if settings.model.knows_activity:
        activity = Activity.from_array(arrays["activity"], index.num_items)
    if index.width != settings.model.width:
        raise StorageError(
            f"width is {settings.model.width}, the index has vectors of {index.width}"
        )
    chosen = _encoder(encoder, index, settings, weights, exported, threads)
    return Recommender(
        index,
        chosen,
        item_ids,
        popularity,
        own,
        weights,
        lambda: exported,
        successors,
        activity,
        attributes,
    )


def _foreign_encoder(
    kind: EncoderKind,
    index: Index,
    form: Any,
    arrays: Mapping[str, NDArray[Any]],
    threads: int,
) -> ForeignEncoder:
    if kind == "torch":
        raise InputError("the encoder is an ONNX model from elsewhere, which torch does not run")
    numbers = arrays["encoder_items"]
    if numbers.dtype != np.int32 or numbers.shape != (index.num_items,):
        given = f"{numbers.dtype}{list(numbers.shape)}"
        raise StorageError(f"encoder_items is {given}, expected int32[{index.num_items}]")
    if numbers.min(initial=0) < 0:
        raise StorageError(f"encoder_items is {numbers.min()} somewhere, expected 0 or more")
    rotation = arrays.get("encoder_rotation")
    if rotation is not None:
        rotation = checked_matrix(rotation, index.width, "encoder_rotation")
    model, padded = arrays["encoder_onnx"].tobytes(), PaddedForm.from_json(form)
    return ForeignEncoder.of_onnx(model, padded, numbers, index.width, threads, rotation=rotation)


def _from_version_3(saved: Saved) -> Saved:
    """Return a recommender of an older format, whose index had no version of its own, as a new one.

    That index was of version 4.
    """
    arrays = {name: array for name, array in saved.arrays.items() if not name.startswith("index_")}
    index_arrays = _with_prefix(saved.arrays, "index_")
    index = Saved(INDEX_KIND, 4, saved.settings["index"], index_arrays)
    return Saved(KIND, _VERSION, saved.settings["recommender"], arrays, {"index": index})


def _encoder(
    kind: EncoderKind,
    index: Index,
    settings: Settings,
    weights: dict[str, NDArray[Any]],
    exported: ExportedEncoder,
    threads: int,
) -> Encoder:
    if kind != "torch":
        try:
            return OnnxEncoder(
                exported.onnx,
                item_vectors(index, settings.model),
                settings.model.length,
                tables=exported.tables,
                threads=threads,
            )
        except MissingExtraError:
            if kind == "onnx":
                raise
    return _torch_encoder(index, settings, weights)


def _torch_encoder(
    index: Index, settings: Settings, weights: dict[str, NDArray[Any]]
) -> TorchEncoder:
    from recprune.training.checkpoint import model_from_arrays

    embeddings = np.array(index.sub_item_embeddings())
    if settings.model.embedding == "full":
        embedding = {"embedding.item_embeddings": embeddings[0, : index.num_items]}
    else:
        embedding = {"embedding.sub_item_embeddings": embeddings}
    model = model_from_arrays(
        settings, index.item_codes(), index.num_sub_items, weights | embedding
    )
    return TorchEncoder(model, settings.model.length)


def _with_prefix(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
