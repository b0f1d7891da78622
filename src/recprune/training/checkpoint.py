"""What a training leaves on disk: the best weights, and all that is needed to go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from recprune.models.activity import measure_activity
from recprune.models.architectures import SequenceModel, build_model, looks_at_times
from recprune.models.boost_heads import check_heads
from recprune.models.learnt_codes import CodeReport
from recprune.models.settings import ModelSettings, Settings
from recprune.models.transitions import count_transitions
from recprune.preparation.prepared import Prepared
from recprune.training.optimiser import Optimiser
from recprune.training.tensors import load_tensors, save_tensors
from recprune.types import MAX_SUB_ITEMS, CodeArray, InputError, StorageError, needs_extra

with needs_extra("train"):
    import torch

MODEL = "model.safetensors"
CHECKPOINT = "checkpoint.safetensors"
EPOCHS = "epochs.jsonl"
SETTINGS = "settings.json"  # to be read by people, and by `--settings`
# Arrays of a model that others look for.
CODES = "embedding.codes"
SUB_ITEM_EMBEDDINGS = "embedding.sub_item_embeddings"


@dataclass
class State:
    """Where a training stands."""

    epoch: int = 0
    batch: int = 0  # of that epoch
    steps: int = 0
    loss_sum: float = 0.0  # of that epoch
    best_ndcg: float = -1.0  # of what was saved
    epochs_without_best: int = 0  # of the stage
    seconds: float = 0.0
    stage: Literal["full", "learning", "last"] = "last"
    stage_began: int = 0  # the epoch
    stage_best: float = -1.0  # NDCG
    code_report: dict[str, Any] | None = None  # of learnt codes that stay


def save_checkpoint(
    path: Path,
    settings: Settings,
    checksum: str,
    model: SequenceModel,
    optimiser: Optimiser,
    state: State,
) -> None:
    """Write weights, optimiser and state, in place of the checkpoint before."""
    tensors = {f"model.{name}": array for name, array in model_arrays(model).items()}
    for name, parameter in model.named_parameters():
        for moment in optimiser.moments(parameter):
            value = optimiser.state[parameter][moment]
            tensors[f"{moment}.{name}"] = value.detach().cpu().numpy()
    metadata = {
        "settings": json.dumps(settings.to_json()),
        "prepared": checksum,
        "state": json.dumps(asdict(state)),
    }
    save_tensors(path, tensors, metadata)


def checkpoint_settings(folder: str | Path) -> Settings:
    """Return the settings of a training that is to go on."""
    path = Path(folder) / CHECKPOINT
    _, metadata = load_tensors(path)
    try:
        return Settings.from_json(json.loads(metadata["settings"]))
    except (KeyError, ValueError) as error:
        raise StorageError(f"{path}: not a whole checkpoint: {error}") from None


def load_checkpoint(
    path: Path,
    settings: Settings,
    checksum: str,
    fit_stage: Callable[[State], tuple[SequenceModel, Optimiser]],
) -> State:
    """Put a checkpoint into a model and its optimiser, which fit its stage; return the state.

    It must be of a training with these settings on this prepared log, whose checksum is given.
    """
    tensors, metadata = load_tensors(path)
    try:
        saved = Settings.from_json(json.loads(metadata["settings"]))
        state = _state(json.loads(metadata["state"]))
        changed = _difference(saved, settings)
        if changed:
            raise InputError(f"{path}: was trained with other settings: {changed}")
        if metadata["prepared"] != checksum:
            raise InputError(f"{path}: was trained on another prepared log")
        weights = {
            name.removeprefix("model."): array
            for name, array in tensors.items()
            if name.startswith("model.")
        }
        model, optimiser = fit_stage(state)
        load_weights(model, weights)
        moments = {name: tensors[name] for name in tensors if not name.startswith("model.")}
        _check_moments(path, model, optimiser, moments)
        for name, parameter in model.named_parameters():
            optimiser.remember(
                parameter,
                {
                    moment: torch.from_numpy(moments[f"{moment}.{name}"])
                    for moment in optimiser.moments(parameter)
                },
            )
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, StorageError) as error:
        raise StorageError(f"{path}: not a whole checkpoint: {error}") from None
    return state


def _check_moments(
    path: Path,
    model: SequenceModel,
    optimiser: Optimiser,
    found: Mapping[str, NDArray[Any]],
) -> None:
    """Refuse what another optimiser remembered: it would go on as no training would have.

    An earlier version moved large tables by Adam, for example.
    """
    expected = {
        f"{moment}.{name}": () if moment == "step" else tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        for moment in optimiser.moments(parameter)
    }
    shapes = {name: array.shape for name, array in found.items()}
    if shapes != expected:
        wrong = [name for name in expected | shapes if expected.get(name) != shapes.get(name)]
        raise InputError(
            f"{path}: was trained by another optimiser: {', '.join(sorted(wrong)[:3])}; "
            "train anew, in another folder"
        )


def _state(values: dict[str, Any]) -> State:
    """Return the state of a checkpoint; one of an earlier version knows no stages."""
    return State(**{"stage_best": values["best_ndcg"], **values})


def training_tensors(
    model: SequenceModel, optimiser: Optimiser, state: State
) -> list[torch.Tensor]:
    """Return the tensors that a broadcast overwrites: weights, buffers and Adam's moments.

    There are moments from the first step on; a worker that has not loaded them makes empty ones.
    """
    tensors = [value.detach() for value in model.state_dict().values()]
    if state.epoch or state.batch:
        for parameter in model.parameters():
            tensors += optimiser.remembered(parameter)
    return tensors


def epochs_until_best(folder: str | Path) -> dict[str, int]:
    """Return the settings that train as long as an earlier training did until it was best.

    Best on its validation users. How long its stages were is part of that, if it had several: with
    no validation users, none would end before its time.
    """
    path = Path(folder) / EPOCHS
    try:
        epochs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        best = [int(entry["epoch"]) for entry in epochs if entry["best"] and entry["ndcg"] > 0]
        stages = [entry.get("stage", "last") for entry in epochs]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{path}: not the epochs of a training: {error}") from None
    if not best:
        raise InputError(
            f"{path}: no epoch found anything for validation users, so that none of them is best"
        )
    lengths = {"full_epochs": stages.count("full"), "code_epochs": stages.count("learning")}
    return {"max_epochs": best[-1]} | (lengths if any(lengths.values()) else {})


def what_is_kept(folder: str | Path, settings: Settings, prepared: Prepared) -> str | None:
    """Say whether a training kept full vectors or learnt codes, and why.

    None where settings did not leave that open.
    """
    if settings.model.embedding != "auto":
        return None
    if not settings.may_keep_table(prepared.num_items):
        return f"learnt codes, as over {MAX_SUB_ITEMS:,} items a full table could not be served"
    best: dict[str, float] = {}  # NDCG@10 of each form
    kept = ""
    lines = (Path(folder) / EPOCHS).read_text(encoding="utf-8").splitlines()
    for entry in map(json.loads, lines):
        form = "the full table" if entry.get("stage") == "full" else "learnt codes"
        best[form] = max(entry["ndcg"], best.get(form, 0.0))
        kept = form if entry["best"] else kept
    if not len(prepared.validation):
        return f"{kept}, as the last epoch had them: no validation users compare forms"
    if len(best) < 2:
        return f"{kept}, as no epoch had another form"
    table, codes = best["the full table"], best["learnt codes"]
    return f"{kept}: NDCG@10 {table:.4f} with a full table, {codes:.4f} with learnt codes"


def save_model(
    folder: Path,
    settings: Settings,
    model: SequenceModel,
    checksum: str,
    ndcg: float,
    codes: CodeReport | None = None,
) -> None:
    """Write the weights alone, codes included, with what they were trained on."""
    metadata = {
        "settings": json.dumps(settings.to_json()),
        "prepared": checksum,
        "validation_ndcg": repr(ndcg),
    }
    if codes is not None:
        metadata["codes"] = json.dumps(asdict(codes))
    save_tensors(folder / MODEL, model_arrays(model), metadata)


def load_code_report(folder: str | Path) -> CodeReport | None:
    """Return how well the learnt codes of a model tell items apart; None if it learnt none."""
    _, metadata = load_tensors(Path(folder) / MODEL)
    return CodeReport(**json.loads(metadata["codes"])) if "codes" in metadata else None


def load_model(folder: str | Path, prepared: Prepared) -> tuple[SequenceModel, Settings]:
    """Return the best model of a training on the given prepared log."""
    path = Path(folder) / MODEL
    if not path.exists() and (Path(folder) / CHECKPOINT).exists():
        raise StorageError(
            f"{folder}: its training has no model yet: recprune train --resume goes on"
        )
    tensors, metadata = load_tensors(path)
    try:
        settings = Settings.from_json(json.loads(metadata["settings"]))
        checksum = metadata["prepared"]
        float(metadata["validation_ndcg"])  # a checkpoint has none
    except (KeyError, ValueError) as error:
        raise StorageError(f"{path}: not a trained model: {error}") from None
    with_times = looks_at_times(settings.model)
    # Trained with content or without: where cold items stand is the model's own.
    if not any(
        checksum == prepared.checksum(with_times=with_times, with_cold=with_cold)
        for with_cold in (True, False)
    ):
        raise InputError(f"{path}: was trained on another prepared log")
    try:
        model = model_from_arrays(settings, prepared.codes, prepared.num_sub_items, tensors)
        check_heads(tensors, settings.model)
    except StorageError as error:
        raise StorageError(f"{path}: {error}") from None
    attach_tables(model, settings.model, prepared)
    return model, settings


def attach_tables(model: SequenceModel, settings: ModelSettings, prepared: Prepared) -> None:
    """Give the heads of a model what they look up: counts of the log that it is trained on."""
    if settings.transitions:
        model.successors = count_transitions(prepared)
    if settings.knows_activity:
        model.activity = measure_activity(prepared)


def model_from_arrays(
    settings: Settings,
    codes: CodeArray,
    num_sub_items: int,
    arrays: Mapping[str, NDArray[Any]],
) -> SequenceModel:
    """Return a model from its arrays; one that was saved without its codes has the given ones."""
    if CODES in arrays:
        codes, num_sub_items = arrays[CODES], arrays[SUB_ITEM_EMBEDDINGS].shape[1]
    model = build_model(settings.model, codes, num_sub_items)
    load_weights(model, arrays)
    return model.eval()


def model_arrays(model: SequenceModel) -> dict[str, NDArray[Any]]:
    return {name: value.detach().cpu().numpy() for name, value in model.state_dict().items()}


def load_weights(model: SequenceModel, arrays: Mapping[str, NDArray[Any]]) -> None:
    if CODES in model.state_dict():  # an earlier version did not save them with the weights
        arrays = {CODES: model_arrays(model)[CODES], **arrays}
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: array.shape for name, array in arrays.items()}
    if expected != found:
        wrong = sorted(name for name in expected | found if expected.get(name) != found.get(name))
        raise StorageError(f"does not fit the model: {', '.join(wrong[:3])}")
    model.load_state_dict(
        {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    )


# How long a training goes on may change between two parts of it.
_MAY_CHANGE = ("max_epochs", "patience")


def _difference(saved: Settings, wanted: Settings) -> str:
    before, after = saved.to_json(), wanted.to_json()
    return ", ".join(
        f"{name} was {before[part][name]!r}, is {after[part][name]!r}"
        for part in before
        for name in before[part]
        if before[part][name] != after[part][name] and name not in _MAY_CHANGE
    )
