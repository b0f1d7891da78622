"""What a model is and how it is trained: validated settings, and the paper's three models."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

from recprune.types import InputError, Json

Architecture = Literal["sasrec", "bert4rec"]
EmbeddingKind = Literal["recjpq", "full"]
Codes = Literal["svd", "random", "learnt"]
Loss = Literal["bce", "gbce", "softmax", "cross_entropy"]
Negatives = Literal["own", "shared"]
Windows = Literal["last", "random"]
PruningLoss = Literal["agreement", "concentration"]

_MAX_LEARNT = 256  # sub-items of learnt codes: as many as a byte can tell apart


@dataclass(frozen=True)
class ModelSettings:
    """The shape of a model."""

    architecture: Architecture = "sasrec"
    embedding: EmbeddingKind = "recjpq"
    width: int = 512  # d, of item vectors and sequence embeddings
    num_blocks: int = 2
    num_heads: int = 1
    length: int = 200  # the longest history that is looked at
    dropout: float = 0.2
    codes: Codes = "svd"  # of recjpq: those of the prepared log, drawn anew, or learnt in training
    num_splits: int = 8  # M of learnt codes; others have those of the prepared log
    num_sub_items: int = 256  # B, likewise

    def __post_init__(self) -> None:
        _check_choice(self, "architecture", Architecture)
        _check_choice(self, "embedding", EmbeddingKind)
        _check_choice(self, "codes", Codes)
        for name in ("num_splits", "num_sub_items", "width", "num_blocks", "num_heads", "length"):
            _check_count(self, name)
        if not 2 <= self.num_sub_items <= _MAX_LEARNT:
            raise InputError(f"num_sub_items is {self.num_sub_items}, expected 2 to {_MAX_LEARNT}")
        if self.learns_codes and self.width % self.num_splits:
            raise InputError(
                f"width {self.width} is not a multiple of num_splits {self.num_splits}"
            )
        if self.width % self.num_heads:
            raise InputError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")
        _check_number(self, "dropout")
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"dropout is {self.dropout}, expected 0 to below 1")

    @property
    def learns_codes(self) -> bool:
        """Whether codes are an output of training."""
        return self.embedding == "recjpq" and self.codes == "learnt"


@dataclass(frozen=True)
class TrainingSettings:
    """How a model is trained."""

    loss: Loss = "gbce"
    num_negatives: int = 256  # for every position
    calibration: float = 0.75  # t of gBCE: 0 is plain BCE, 1 fully calibrated
    batch_size: int = 128  # users
    max_epochs: int = 200
    batches_per_epoch: int = 256  # at most; an epoch never shows a user twice
    patience: int = 200  # epochs without a better validation NDCG@10
    learning_rate: float = 0.001
    clip_norm: float = 1.0  # of the gradient; 0: unclipped
    mask_share: float = 0.2  # of a history, for bert4rec
    windows: Windows = "last"  # which part of a history longer than the model looks at
    exclude_seen: bool = False  # from the validation ranking
    pruning_loss: PruningLoss = "agreement"  # what makes a model easier to prune
    pruning_weight: float = 0.0  # of that, beside the loss; 0: without
    negatives: Negatives = "own"  # of every position, or drawn once for a minibatch
    num_in_batch: int = 0  # targets of other positions that join the shared negatives
    logq: bool = False  # correct shared negatives of softmax by how often they are drawn
    full_epochs: int = 20  # before learnt codes are cut from full vectors
    commitment: float = 0.1  # how strongly a vector is drawn to that of its learnt code
    validation_users: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        _check_choice(self, "loss", Loss)
        _check_choice(self, "negatives", Negatives)
        _check_choice(self, "windows", Windows)
        _check_choice(self, "pruning_loss", PruningLoss)
        for name in (
            "num_negatives",
            "batch_size",
            "max_epochs",
            "batches_per_epoch",
            "patience",
            "validation_users",
        ):
            _check_count(self, name)
        for name in ("num_in_batch", "full_epochs"):
            _check_count(self, name, least=0)
        if self.loss == "bce" and self.num_negatives != 1:
            raise InputError(f"loss bce has one negative, num_negatives is {self.num_negatives}")
        if self.negatives == "own" and (self.num_in_batch or self.logq):
            raise InputError("num_in_batch and logq need shared negatives: negatives is own")
        if self.logq and self.loss != "softmax":
            raise InputError(f"logq corrects the loss softmax; loss is {self.loss}")
        for name in (
            "calibration",
            "learning_rate",
            "clip_norm",
            "mask_share",
            "pruning_weight",
            "commitment",
        ):
            _check_number(self, name)
        if not 0.0 <= self.calibration <= 1.0:
            raise InputError(f"calibration is {self.calibration}, expected 0 to 1")
        if not self.learning_rate > 0.0:
            raise InputError(f"learning_rate is {self.learning_rate}, expected more than 0")
        if not self.clip_norm >= 0.0:
            raise InputError(f"clip_norm is {self.clip_norm}, expected 0 (unclipped) or more")
        if not self.pruning_weight >= 0.0:
            raise InputError(f"pruning_weight is {self.pruning_weight}, expected 0 (none) or more")
        if not 0.0 < self.mask_share < 1.0:
            raise InputError(f"mask_share is {self.mask_share}, expected between 0 and 1")
        if not self.commitment >= 0.0:
            raise InputError(f"commitment is {self.commitment}, expected 0 (none) or more")
        for name in ("exclude_seen", "logq"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} is {getattr(self, name)!r}, expected true or false")
        seed = self.seed
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise InputError(f"seed is {seed!r}, expected an integer from 0 to below 2^63")


@dataclass(frozen=True)
class Settings:
    """A model and its training."""

    model: ModelSettings = field(default_factory=ModelSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)

    def __post_init__(self) -> None:
        if self.training.pruning_weight and self.model.embedding != "recjpq":
            raise InputError("pruning_weight needs sub-items: embedding is not recjpq")
        if self.training.pruning_weight and self.model.learns_codes:
            raise InputError("pruning_weight needs codes that stay: codes is learnt")
        if self.model.learns_codes and self.training.full_epochs >= self.training.max_epochs:
            raise InputError(
                f"full_epochs is {self.training.full_epochs}, expected less than max_epochs "
                f"{self.training.max_epochs}: codes are learnt after them"
            )

    def to_json(self) -> Json:
        """Return all settings as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Settings:
        """Return settings from plain values; a name that does not exist is an error."""
        _check_names(cls, values)
        return cls(
            _settings_from(ModelSettings, values.get("model", {})),
            _settings_from(TrainingSettings, values.get("training", {})),
        )

    def with_parts(self, parts: Mapping[str, Any]) -> Settings:
        """Return these settings with those replaced that are given, in their parts."""
        _check_names(Settings, parts)
        for part, kind in (("model", ModelSettings), ("training", TrainingSettings)):
            _check_names(kind, parts.get(part, {}))
        return self.with_values({**parts.get("model", {}), **parts.get("training", {})})

    def with_values(self, values: Mapping[str, Any]) -> Settings:
        """Return these settings with some replaced, given by name alone: names are unique."""
        model, training = asdict(self.model), asdict(self.training)
        for name, value in values.items():
            if name not in model and name not in training:
                raise _unknown(name, [*model, *training])
            (model if name in model else training)[name] = value
        return Settings(ModelSettings(**model), TrainingSettings(**training))


_T = TypeVar("_T", ModelSettings, TrainingSettings)


def _settings_from(kind: type[_T], values: Mapping[str, Any]) -> _T:
    _check_names(kind, values)
    return kind(**values)


def _check_names(kind: type[Any], values: Mapping[str, Any]) -> None:
    known = [entry.name for entry in fields(kind)]
    for name in values:
        if name not in known:
            raise _unknown(name, known)


def _unknown(name: str, known: list[str], what: str = "setting") -> InputError:
    nearest = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(known)}"
    return InputError(f"unknown {what} {name!r}: {hint}")


def _check_choice(settings: object, name: str, choices: Any) -> None:
    value = getattr(settings, name)
    if value not in get_args(choices):
        raise InputError(f"{name} is {value!r}, expected one of {', '.join(get_args(choices))}")


def _check_count(settings: object, name: str, *, least: int = 1) -> None:
    value = getattr(settings, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        expected = "a positive integer" if least else "0 or a positive integer"
        raise InputError(f"{name} is {value!r}, expected {expected}")


def _check_number(settings: object, name: str) -> None:
    value = getattr(settings, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{name} is {value!r}, expected a number")


# The paper's three models (section 5.2): SASRec's one negative and BCE, gSASRec's 256 and gBCE, and
# the same for BERT4Rec, which then need not rank the whole catalogue at every masked position.
PRESETS = {
    "sasrec": Settings(ModelSettings(), TrainingSettings(loss="bce", num_negatives=1)),
    "gsasrec": Settings(),
    "gbert4rec": Settings(ModelSettings("bert4rec", num_blocks=3, num_heads=4)),
}


def find_preset(name: str) -> Settings:
    if name not in PRESETS:
        raise _unknown(name, list(PRESETS), "preset")
    return PRESETS[name]
