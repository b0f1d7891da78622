"""What a model is and how it is trained: validated settings, and presets of them."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from recprune.types import MAX_SUB_ITEMS, InputError, Json

Architecture = Literal["sasrec", "esasrec", "timed", "continued", "bert4rec"]
EmbeddingKind = Literal["recjpq", "full", "auto"]
Codes = Literal["svd", "random", "learnt"]
Loss = Literal["bce", "gbce", "softmax", "cross_entropy", "digits"]
Negatives = Literal["own", "shared"]
Windows = Literal["last", "random"]
PruningLoss = Literal["agreement", "concentration"]

_MAX_LEARNT = 256  # sub-items of learnt codes: as many as a byte can tell apart


def _described(default: Any, meaning: str, expected: str = "") -> Any:
    """Return a field with what `recprune train --list-settings` says of it.

    What is expected of a choice, or of true and false, is in the field's type already.
    """
    return field(default=default, metadata={"meaning": meaning, "expected": expected})


_COUNT = "1 or more"


@dataclass(frozen=True)
class ModelSettings:
    """The shape of a model."""

    architecture: Architecture = _described("sasrec", "the encoder")
    embedding: EmbeddingKind = _described(
        "recjpq", "items as codes, a vector for each, or learnt codes or vectors by validation"
    )
    width: int = _described(512, "d, of item vectors and sequence embeddings", _COUNT)
    num_blocks: int = _described(2, "attention blocks, one after the other", _COUNT)
    num_heads: int = _described(1, "of each attention; width is a multiple of it", _COUNT)
    length: int = _described(200, "the longest history that is looked at", _COUNT)
    dropout: float = _described(0.2, "share of numbers left out in training", "0 to below 1")
    codes: Codes = _described("svd", "of recjpq: as prepared, drawn anew, or learnt in training")
    num_splits: int = _described(8, "M of learnt codes; others are as prepared", _COUNT)
    num_sub_items: int = _described(256, "B of learnt codes; others are as prepared", "2 to 256")
    inner_share: float = _described(1.0, "of width, inside eSASRec's networks", "more than 0")
    kept_width: int = _described(64, "of keys and values, each, of continued", _COUNT)
    repeats: int = _described(0, "events that a repeat head looks back; 0: none", "0 or more")
    own_scores: float = _described(
        1.0, "share of their scores that own items keep beside that head", "0 to 1"
    )
    activity: bool = _described(False, "that head knows how often anyone had an item lately")
    transitions: int = _described(0, "last items whose successors are boosted", "0 or more")

    def __post_init__(self) -> None:
        _check_choice(self, "architecture", Architecture)
        _check_choice(self, "embedding", EmbeddingKind)
        _check_choice(self, "codes", Codes)
        for name in ("num_splits", "num_sub_items", "width", "num_blocks", "num_heads", "length"):
            _check_count(self, name)
        _check_count(self, "kept_width")
        if not 2 <= self.num_sub_items <= _MAX_LEARNT:
            raise InputError(f"num_sub_items is {self.num_sub_items}, expected 2 to {_MAX_LEARNT}")
        for name in ("repeats", "transitions"):
            _check_count(self, name, least=0)
            if getattr(self, name) and self.architecture == "bert4rec":
                raise InputError(
                    f"{name} needs an encoder that reads in one direction, not bert4rec"
                )
        if self.embedding == "auto" and self.codes != "learnt":
            raise InputError(
                "embedding auto chooses between a full table and learnt codes, but codes is "
                f"{self.codes}: set embedding=recjpq"
            )
        if self.learns_codes and self.width % self.num_splits:
            raise InputError(
                f"width {self.width} is not a multiple of num_splits {self.num_splits}"
            )
        if self.width % self.num_heads:
            raise InputError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")
        if self.inner_share != 1.0 and self.architecture in ("sasrec", "bert4rec"):
            raise InputError(f"inner_share is of eSASRec's networks, not of {self.architecture}")
        _check_number(self, "own_scores")
        if not 0.0 <= self.own_scores <= 1.0:
            raise InputError(f"own_scores is {self.own_scores}, expected 0 to 1")
        if self.own_scores != 1.0 and not self.repeats:
            raise InputError("own_scores needs a repeat head: repeats is 0")
        _check_flag(self, "activity")
        _check_number(self, "dropout")
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"dropout is {self.dropout}, expected 0 to below 1")
        _check_number(self, "inner_share")
        if not self.inner_share > 0.0:
            raise InputError(f"inner_share is {self.inner_share}, expected more than 0")

    @property
    def inner_width(self) -> int:
        """How wide eSASRec's networks are inside."""
        return max(1, round(self.width * self.inner_share))

    @property
    def reaches(self) -> list[int]:
        """How far back each block of `continued` looks: together, as far as a history is long."""
        least, more = divmod(self.length - 1, self.num_blocks)
        return [least + (block < more) for block in range(self.num_blocks)]

    @property
    def knows_activity(self) -> bool:
        """Whether there is a repeat head that knows how often anyone had an item lately."""
        return self.activity and self.repeats > 0

    @property
    def learns_codes(self) -> bool:
        """Whether codes are an output of training."""
        return self.embedding != "full" and self.codes == "learnt"


@dataclass(frozen=True)
class TrainingSettings:
    """How a model is trained."""

    loss: Loss = _described("gbce", "what is minimised")
    num_negatives: int = _described(256, "for every position; bce has one, digits none", _COUNT)
    calibration: float = _described(0.75, "t of gbce: 0 is BCE, 1 fully calibrated", "0 to 1")
    batch_size: int = _described(128, "users in a step", _COUNT)
    max_epochs: int = _described(200, "after which training ends", _COUNT)
    batches_per_epoch: int = _described(256, "at most; an epoch never shows a user twice", _COUNT)
    patience: int = _described(200, "epochs without a better validation NDCG@10", _COUNT)
    learning_rate: float = _described(0.001, "of Adam", "more than 0")
    clip_norm: float = _described(1.0, "of the gradient; 0: unclipped", "0 or more")
    mask_share: float = _described(0.2, "of a history, for bert4rec", "between 0 and 1")
    windows: Windows = _described("last", "which part of a history longer than length")
    exclude_seen: bool = _described(False, "leave histories out of validation rankings")
    pruning_loss: PruningLoss = _described("agreement", "what makes a model easier to prune")
    pruning_weight: float = _described(0.0, "of that, beside the loss; 0: without", "0 or more")
    negatives: Negatives = _described("own", "of every position, or shared by a minibatch")
    num_in_batch: int = _described(0, "targets that join the shared negatives", "0 or more")
    logq: bool = _described(False, "correct softmax by how often shared negatives are drawn")
    full_epochs: int = _described(20, "at most, until codes are cut from vectors", "0 or more")
    code_epochs: int = _described(20, "in which learnt codes change, then they stay", "0 or more")
    commitment: float = _described(1.0, "pull of a full vector to its learnt code", "0 or more")
    cold_scale: float = _described(1.0, "length of cold items' vectors", "more than 0")
    validation_users: int = _described(1024, "judged after every epoch, at most", _COUNT)
    seed: int = _described(0, "of all chance", "0 to below 2^63")

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
        for name in ("num_in_batch", "full_epochs", "code_epochs"):
            _check_count(self, name, least=0)
        if self.loss == "bce" and self.num_negatives != 1:
            raise InputError(
                f"loss bce has one negative, num_negatives is {self.num_negatives}: set it to 1, "
                "or take loss gbce with calibration=0, which is bce with many"
            )
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
            "cold_scale",
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
        if not self.cold_scale > 0.0:
            raise InputError(f"cold_scale is {self.cold_scale}, expected more than 0")
        for name in ("exclude_seen", "logq"):
            _check_flag(self, name)
        seed = self.seed
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise InputError(f"seed is {seed!r}, expected an integer from 0 to below 2^63")


@dataclass(frozen=True)
class Settings:
    """A model and its training."""

    model: ModelSettings = field(default_factory=ModelSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)

    def __post_init__(self) -> None:
        if self.training.pruning_weight and self.model.embedding == "full":
            raise InputError("pruning_weight needs sub-items: embedding is full")
        if self.model.repeats and self.training.exclude_seen:
            raise InputError("repeats boosts what exclude_seen leaves out: choose one of them")
        if self.training.pruning_weight and self.model.learns_codes:
            raise InputError("pruning_weight needs codes that stay: codes is learnt")
        if self.training.loss == "digits":
            self._check_digits()
        if self.model.learns_codes and self.model.embedding != "auto":
            self.check_cut()

    def check_cut(self) -> None:
        """Refuse a training that would end before there are codes to be saved."""
        if self.training.full_epochs >= self.training.max_epochs:
            raise InputError(
                f"full_epochs is {self.training.full_epochs}, expected less than max_epochs "
                f"{self.training.max_epochs}: codes are learnt after them"
            )

    def _check_digits(self) -> None:
        """Refuse what a loss of sub-items alone cannot train."""
        if self.model.embedding == "full":
            raise InputError("loss digits needs sub-items: embedding is full")
        if self.model.learns_codes:
            raise InputError("loss digits needs codes that stay: codes is learnt")
        if self.training.negatives == "shared":
            raise InputError("loss digits has no negatives that positions could share")
        for head in ("repeats", "transitions"):
            if getattr(self.model, head):
                raise InputError(f"loss digits compares no items: {head} needs another loss")

    def may_keep_table(self, num_items: int) -> bool:
        """Whether full vectors may turn out to be better than codes learnt from them."""
        return self.model.embedding == "auto" and num_items <= MAX_SUB_ITEMS

    def as_table(self) -> Settings:
        """Return the settings of a model that keeps its full vectors."""
        return replace(self, model=replace(self.model, embedding="full"))

    def as_codes(self) -> Settings:
        """Return the settings of a model that has codes, where these had to turn out better."""
        if self.model.embedding != "auto":
            return self
        # Vectors that got no better were cut before their epochs were over.
        full_epochs = min(self.training.full_epochs, self.training.max_epochs - 1)
        return Settings(
            replace(self.model, embedding="recjpq"), replace(self.training, full_epochs=full_epochs)
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


@dataclass(frozen=True)
class SettingDescription:
    """What there is to know about one setting."""

    name: str
    value: Any  # of the settings that were asked
    expected: str
    meaning: str


def describe_settings(settings: Settings) -> list[SettingDescription]:
    """Describe every setting, in the order of the model and of its training."""
    described = []
    for part in (settings.model, settings.training):
        kinds = get_type_hints(type(part))
        for entry in fields(part):
            choices = get_args(kinds[entry.name])
            if kinds[entry.name] is bool:
                choices = ("true", "false")
            expected = ", ".join(choices) or entry.metadata["expected"]
            value, meaning = getattr(part, entry.name), entry.metadata["meaning"]
            described.append(SettingDescription(entry.name, value, expected, meaning))
    return described


_T = TypeVar("_T", ModelSettings, TrainingSettings)


def _settings_from(kind: type[_T], values: Mapping[str, Any]) -> _T:
    _check_names(kind, values)
    return kind(**values)


def _check_names(kind: type[Any], values: Mapping[str, Any]) -> None:
    if not isinstance(values, Mapping):
        raise InputError(f"{kind.__name__} are {values!r:.80}, expected names and values")
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


def _check_flag(settings: object, name: str) -> None:
    value = getattr(settings, name)
    if not isinstance(value, bool):
        raise InputError(f"{name} is {value!r}, expected true or false")


def _check_number(settings: object, name: str) -> None:
    value = getattr(settings, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Not by isfinite: it cannot look at an integer beyond what a float holds.
    if not is_number or not abs(value) <= sys.float_info.max:
        raise InputError(f"{name} is {value!r}, expected a number")


# eSASRec's loss: a softmax over shared negatives, corrected.
_CORRECTED_SOFTMAX = TrainingSettings(
    loss="softmax", negatives="shared", num_negatives=1024, num_in_batch=1024, logq=True
)

# The paper's three models (section 5.2): SASRec's one negative and BCE, gSASRec's 256 and gBCE, and
# the same for BERT4Rec, which then need not rank the whole catalogue at every masked position.
PRESETS = {
    "sasrec": Settings(ModelSettings(), TrainingSettings(loss="bce", num_negatives=1)),
    "gsasrec": Settings(),
    "gbert4rec": Settings(ModelSettings("bert4rec", num_blocks=3, num_heads=4)),
    # Not the paper's: eSASRec and its loss, and the same with an encoder that reads times.
    # Encoding with networks as wide as the model would take up to 3.2 times as long as SASRec's.
    "esasrec": Settings(ModelSettings("esasrec", inner_share=0.25), _CORRECTED_SOFTMAX),
    "timed": Settings(ModelSettings("timed"), _CORRECTED_SOFTMAX),
    # eSASRec whose attention can be continued, a position for an event: docs/models.md.
    "continued": Settings(
        ModelSettings("continued", num_heads=2, inner_share=0.25), _CORRECTED_SOFTMAX
    ),
    # For logs in which people repeat themselves, or one item leads to the next: docs/models.md.
    "recommended": Settings(
        ModelSettings(
            "timed",
            embedding="auto",
            codes="learnt",
            width=128,
            num_heads=2,
            length=100,
            dropout=0.3,
            repeats=300,
            activity=True,
            transitions=1,
        ),
        TrainingSettings(
            loss="softmax",
            negatives="shared",
            num_negatives=1024,
            windows="random",
            full_epochs=10,
        ),
    ),
    # RPG's: all digits of a code at once. It wants codes that mean something (`recprune recode`).
    "generative": Settings(ModelSettings(), TrainingSettings(loss="digits", learning_rate=0.002)),
}


DEFAULT_PRESET = "recommended"


def find_preset(name: str) -> Settings:
    if name not in PRESETS:
        raise _unknown(name, list(PRESETS), "preset")
    return PRESETS[name]
