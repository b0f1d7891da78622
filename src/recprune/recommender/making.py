"""From a log, or from a trained model, to a recommender."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recprune.data.identifiers import (
    CatalogueIds,
    ExternalIds,
    IntegerIds,
    RowNumbers,
    sorted_ids,
)
from recprune.models.foreign_encoder import ForeignEncoder, PaddedForm, PadSide
from recprune.models.inference import ExportedEncoder, TorchEncoder
from recprune.models.settings import Settings, find_preset
from recprune.preparation.prepared import Prepared, prepare
from recprune.recommender.recommender import Recommender
from recprune.search.checks import checked_count
from recprune.search.index import Index
from recprune.types import (
    MAX_SUB_ITEMS,
    Float32Array,
    InputError,
    Int32Array,
    Int64Array,
    InterruptedWorkError,
    Json,
    StorageError,
    type_in_words,
)
from recprune.vectors.vector_index import VectorIndex

if TYPE_CHECKING:
    from recprune.data.content import Content
    from recprune.data.frames import LogSource
    from recprune.data.interactions import Interactions
    from recprune.models.architectures import SequenceModel
    from recprune.models.onnx_export import EncoderPrecision
    from recprune.preparation.holdout import Holdout
    from recprune.training.loop import EpochReport


def fit(
    log: Interactions | LogSource,
    preset: str,
    *,
    num_splits: int,
    num_sub_items: int,
    train_fraction: float,
    content: Content | None,
    epochs_of: str | Path | None,
    device: str,
    out: str | Path | None,
    resume: bool,
    progress: bool,
    max_minutes: float,
    on_epoch: Callable[[EpochReport], None] | None,
    values: Mapping[str, Any],
) -> Recommender:
    """Train a model of a log and return its recommender: see `Recommender.fit`."""
    from recprune.data.interactions import Interactions, read_interactions
    from recprune.preparation.codebook import assign_random, assign_svd
    from recprune.preparation.cold_items import find_cold_items
    from recprune.training.checkpoint import what_is_kept
    from recprune.training.epoch_lines import EpochLines
    from recprune.training.loop import train

    if not max_minutes > 0.0:
        raise InputError(f"max_minutes is {max_minutes}, expected more than 0")
    if not isinstance(log, Interactions):
        log = read_interactions(log)
    whole = train_fraction == 1.0
    values = {**values, **_epochs(values, epochs_of, whole)}
    settings = find_preset(preset).with_values(values)
    if settings.model.learns_codes:
        sizes = {"num_splits": num_splits, "num_sub_items": num_sub_items}
        settings = settings.with_values(sizes)
    if settings.model.embedding == "full":
        _check_full_size(log.num_items)  # before hours of training
    seed = settings.training.seed
    holdout = _hold_out(log, train_fraction, settings)
    if settings.model.learns_codes:  # then those of the prepared log are not looked at
        codebook = assign_random(log.num_items, num_splits=1, num_sub_items=2, seed=seed)
    else:
        codebook = assign_svd(
            holdout.train, num_splits=num_splits, num_sub_items=num_sub_items, seed=seed
        )
    kind = "none" if whole else "temporal"
    cold = None if content is None else find_cold_items(content, holdout.train)
    prepared = prepare(holdout, codebook, {"holdout": kind, "seed": seed}, cold)
    with TemporaryDirectory() as scratch:
        folder = Path(out) if out is not None else Path(scratch)
        max_seconds, validated = 60.0 * max_minutes, len(prepared.validation) > 0
        lines = EpochLines(settings, validated=validated, max_seconds=max_seconds)
        try:
            train(
                prepared,
                settings,
                folder,
                device=device,
                resume=resume,
                max_seconds=max_seconds,
                on_epoch=on_epoch or (lines.epoch if progress else lambda _: None),
                on_steps=lines.steps if progress and on_epoch is None else lambda *_: None,
            )
        except InterruptedWorkError:
            if out is not None:
                raise
            raise InterruptedWorkError("interrupted, and nothing is kept without `out`") from None
        recommender = from_training(prepared, folder)
        kept = what_is_kept(folder, settings, prepared)
    if kept is not None:
        recommender.settings["kept"] = kept
    return recommender


def from_training(
    prepared: Prepared, folder: str | Path, encoder_precision: EncoderPrecision = "float32"
) -> Recommender:
    """Put the best model of a training together: see `Recommender.from_training`."""
    from recprune.training.checkpoint import load_model

    model, settings = load_model(folder, prepared)
    if model.activity is not None:
        model.activity = model.activity.latest()
    return from_model(prepared, model, settings, encoder_precision)


def from_model(
    prepared: Prepared,
    model: SequenceModel,
    settings: Settings,
    encoder_precision: EncoderPrecision = "float32",
) -> Recommender:
    """Put a model together with the catalogue that it was trained on.

    Asked at a moment of the log's past, as in an evaluation, it knows what was known then.
    """
    from recprune.preparation.codebook import code_dtype
    from recprune.training.checkpoint import CODES, SUB_ITEM_EMBEDDINGS, model_arrays

    weights = model_arrays(model)
    codes: NDArray[Any]
    if settings.model.embedding == "recjpq":
        embeddings = weights[SUB_ITEM_EMBEDDINGS]
        codes = weights[CODES].astype(code_dtype(embeddings.shape[1]))
    else:
        # One split in which every item is its own sub-item: the same scores, and no new case.
        codes, embeddings = _own_sub_items(weights["embedding.item_embeddings"])
    index = Index.build(codes, embeddings)
    said = settings.to_json() | {"preparation": prepared.settings}
    if encoder_precision != "float32":  # else a folder is as it was before there was a choice
        said["encoder_precision"] = encoder_precision
    return Recommender(
        index,
        TorchEncoder(model, settings.model.length),
        prepared.item_ids,
        prepared.training_counts(),
        said,
        weights,
        lambda: _export(model, encoder_precision),
        model.successors,
        model.activity,
    )


def from_encoder(
    encoder: str | Path | bytes | Callable[[Int64Array], Any],
    index: Index | VectorIndex,
    item_ids: Any,
    *,
    length: int,
    first_item: int,
    padding: int,
    pad_side: PadSide,
    popularity: Any,
    threads: int,
) -> Recommender:
    """Put an encoder from elsewhere together with its items: see `Recommender.from_encoder`."""
    own_ids, rotation = None, None
    if isinstance(index, VectorIndex):
        own_ids, rotation, index = index.item_ids, index.rotation, index.index
    if not isinstance(index, Index):
        raise InputError(f"index is {type_in_words(index)}, expected an Index or a VectorIndex")
    form = PaddedForm(checked_count(length, "length"), checked_count(padding, "padding"), pad_side)
    count = index.num_items
    if not 0 <= checked_count(first_item, "first_item") <= 2**31 - count:
        raise InputError(f"first_item is {first_item}, expected 0 to {2**31 - count}")
    counts = _checked_popularity(popularity, count)
    ids, order = _ids_in_order(item_ids, own_ids, count)
    numbers = (first_item + order).astype(np.int32)
    chosen = _foreign_encoder(encoder, form, numbers, index.width, threads, rotation)
    is_sorted = own_ids is not None and not isinstance(own_ids, RowNumbers)
    if not is_sorted and (order != np.arange(count)).any():
        bias = index.item_bias
        index = Index.build(
            index.item_codes()[order],
            index.sub_item_embeddings(),
            item_bias=None if bias is None else bias[order],
            layout=index.layout,
            threads=threads,
        )
    settings: Json = {"encoder": form.to_json()}
    return Recommender(index, chosen, ids, counts[order], settings, {}, chosen.exported)


def _ids_in_order(
    given: Any, own: CatalogueIds | None, count: int
) -> tuple[ExternalIds, Int64Array]:
    """Return the ids of an index's items, sorted, and the place of each by the encoder's order.

    That is the order of those that are given; without any, of those that the index has itself.
    """
    if given is None:
        if own is None:
            raise InputError("item_ids are missing: an Index knows items by their rows alone")
        ids = IntegerIds(np.arange(count)) if isinstance(own, RowNumbers) else own
        return ids, np.arange(count)
    ids, order = sorted_ids(given, count, "items in the index")
    if own is not None and not isinstance(own, RowNumbers):
        unknown = own.find_all(ids.take(range(count))) < 0
        if unknown.any():
            item = ids[int(unknown.argmax())]
            raise InputError(f"item_ids has {item!r}, which the index of vectors does not have")
    return ids, order


def _foreign_encoder(
    encoder: Any,
    form: PaddedForm,
    numbers: Int32Array,
    width: int,
    threads: int,
    rotation: Float32Array | None,
) -> ForeignEncoder:
    if callable(encoder):
        return ForeignEncoder(encoder, form, numbers, width, rotation=rotation)
    if isinstance(encoder, bytes):
        return ForeignEncoder.of_onnx(encoder, form, numbers, width, threads, rotation=rotation)
    if not isinstance(encoder, str | Path):
        expected = "an ONNX model, as a path or bytes, or a function"
        given = type_in_words(encoder)
        raise InputError(f"encoder is {given}, expected {expected}")
    try:
        model = Path(encoder).read_bytes()
    except FileNotFoundError:
        raise InputError(f"{encoder}: no such file") from None
    except OSError as error:
        raise InputError(f"{encoder}: cannot be read: {error.strerror}") from None
    try:
        return ForeignEncoder.of_onnx(model, form, numbers, width, threads, rotation=rotation)
    except (InputError, StorageError) as error:
        raise InputError(f"{encoder}: {error}") from None


def _checked_popularity(popularity: Any, count: int) -> Int64Array:
    """Return how many interactions every item has; without any word of it, none."""
    if popularity is None:
        return np.zeros(count, np.int64)
    given = np.asarray(popularity)
    if given.dtype.kind not in "iu" or given.shape != (count,):
        said = f"{given.dtype}{list(given.shape)}"
        raise InputError(f"popularity is {said}, expected integers [{count}]")
    if given.min(initial=0) < 0:
        raise InputError(f"popularity is {given.min()} somewhere, expected 0 or more")
    return given.astype(np.int64)


def _epochs(values: Mapping[str, Any], epochs_of: str | Path | None, whole: bool) -> Json:
    """Return how many epochs to train, where an earlier training says so.

    Refuse to guess where all of the log trains, and no validation users say when to stop.
    """
    if epochs_of is not None:
        from recprune.training.checkpoint import epochs_until_best

        if "max_epochs" in values:
            raise InputError("epochs_of says how long to train, and so does max_epochs: take one")
        return {**epochs_until_best(epochs_of)}
    if whole and "max_epochs" not in values:
        raise InputError(
            "train_fraction is 1.0, which leaves no validation users to say when to stop: give "
            "max_epochs, or epochs_of with the folder of an earlier fit"
        )
    return {}


def _hold_out(log: Interactions, train_fraction: float, settings: Settings) -> Holdout:
    from recprune.preparation.holdout import no_holdout, temporal_holdout

    if train_fraction == 1.0:
        return no_holdout(log)
    return temporal_holdout(
        log,
        train_fraction=train_fraction,
        validation_users=settings.training.validation_users,
        seed=settings.training.seed,
    )


def _export(model: SequenceModel, precision: EncoderPrecision) -> ExportedEncoder:
    from recprune.models.onnx_export import export_encoder

    return export_encoder(model, precision)


def _check_full_size(num_items: int) -> None:
    if num_items > MAX_SUB_ITEMS:
        raise InputError(
            f"{num_items:,} items with a full table; a recommender serves up to {MAX_SUB_ITEMS:,} "
            "of these: use the recjpq embedding"
        )


def _own_sub_items(item_embeddings: Float32Array) -> tuple[NDArray[np.uint16], Float32Array]:
    num_items = len(item_embeddings)
    _check_full_size(num_items)
    # Two rows at least, for an index has no less; a code of its own for every item.
    table = np.zeros((1, max(2, num_items), item_embeddings.shape[1]), np.float32)
    table[0, :num_items] = item_embeddings
    return np.arange(num_items, dtype=np.uint16)[:, None], table
