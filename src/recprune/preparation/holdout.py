"""What a model learns from, and what it is judged by.

`temporal_holdout` is the paper's protocol (section 5.1): one global cut in time, so that nothing
after it is known in training. `leave_one_out` is the older protocol, for comparison with published
figures; it lets one user's past lie in another user's future. `no_holdout` leaves all of the log
to training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from recprune.types import InputError, Int32Array, Int64Array, frozen, random_generator

if TYPE_CHECKING:  # training has targets, but not what a log is read and sorted with
    from recprune.data.interactions import Interactions

DEFAULT_VALIDATION_USERS = 1024
# A user's last item before the cut, the first of the last items at one time, or the first item
# after an earlier cut.
Validation = Literal["last", "sitting", "temporal"]


@dataclass(frozen=True, eq=False)
class Targets:
    """Items to be predicted: for each of some users one item, and the history before it.

    The history of target t is `log.items[starts[t]:ends[t]]`, in the log that was held out from,
    and `log.items[ends[t]]` is the target itself.
    """

    users: Int32Array
    items: Int32Array
    starts: Int64Array
    ends: Int64Array

    def __post_init__(self) -> None:
        for name in ("users", "items", "starts", "ends"):
            frozen(getattr(self, name))

    def __len__(self) -> int:
        return len(self.users)


@dataclass(frozen=True, eq=False)
class Holdout:
    """A log divided into training, validation and test. User and item ids are those of the log."""

    log: Interactions
    train: Interactions  # what a model may learn from: no validation and no test items
    validation: Targets
    test: Targets
    dropped_users: Int32Array  # users without training history: neither trained on nor tested
    cut_time: int | None  # the last time of training, in microseconds; None without a global cut

    def __post_init__(self) -> None:
        frozen(self.dropped_users)

    def history(self, targets: Targets, target: int) -> Int32Array:
        """Return what is known of the user when this target is to be predicted."""
        return self.log.items[targets.starts[target] : targets.ends[target]]


def temporal_holdout(
    log: Interactions,
    *,
    train_fraction: float = 0.9,
    validation_users: int = DEFAULT_VALIDATION_USERS,
    validation: Validation = "last",
    min_history: int = 1,
    seed: int = 0,
) -> Holdout:
    """Cut the log at one moment, so that `train_fraction` of its interactions lie before.

    The cut is the earliest time at which at least that share has happened, and interactions at that
    very time still train: equal times are never torn apart. The test target of a user is the first
    interaction after the cut. For `validation_users` random users (all, if there are fewer with two
    training items) the last training item is taken out as validation target; as it lies before the
    cut, it is part of the history when the test target is predicted. Where items come in sittings
    (a basket, a commit: equal times), that target is an easier question than the test's, which
    begins a new one; with `validation="sitting"` it is the first item of the last sitting, and all
    of that sitting is kept from training. With `validation="temporal"` validation users are asked
    as test users are, at an earlier cut, which divides the training interactions in the same way:
    the target is the first one after that cut, and nothing after it trains. Users with fewer than
    `min_history` interactions before the cut are dropped. Items first seen after the cut stay in
    the catalogue.
    """
    if not 0.0 < train_fraction < 1.0:
        raise InputError(f"train_fraction is {train_fraction}, expected between 0 and 1")
    if validation not in get_args(Validation):
        expected = ", ".join(get_args(Validation))
        raise InputError(f"validation is {validation!r}, expected one of {expected}")
    if min_history < 1:
        raise InputError(f"min_history is {min_history}, expected at least 1")
    if log.num_interactions == 0:
        raise InputError("the log has no interactions to hold out from")
    cut_time = _time_of_share(log.times, train_fraction)
    ends = _ends_before(log, cut_time)
    if validation == "temporal":
        earlier = _time_of_share(log.times[log.times <= cut_time], train_fraction)
        places = _ends_before(log, earlier)
        # As for test users: something must have come after, and enough before.
        asked = (places < ends) & (places - log.offsets[:-1] >= min_history)
        held_out = np.where(asked, places, log.offsets[:-1])
    else:
        held_out = _last_places(log, ends, validation)
    return _hold_out(log, ends, held_out, validation_users, min_history, seed, cut_time)


def leave_one_out(
    log: Interactions, *, validation_users: int = DEFAULT_VALIDATION_USERS, seed: int = 0
) -> Holdout:
    """Test on every user's last interaction; users with only one are dropped.

    For `validation_users` random users the last but one is the validation target.
    """
    ends = np.maximum(log.offsets[1:] - 1, log.offsets[:-1])
    return _hold_out(log, ends, ends - 1, validation_users, 1, seed, None)


def no_holdout(log: Interactions) -> Holdout:
    """Hold out nothing: for the model that is served, once its settings have been judged."""
    return _hold_out(log, log.offsets[1:], log.offsets[1:] - 1, 0, 1, 0, None)


def _hold_out(
    log: Interactions,
    ends: Int64Array,
    held_out: Int64Array,
    validation_users: int,
    min_history: int,
    seed: int,
    cut_time: int | None,
) -> Holdout:
    """Divide the log, given for every user where the history before the test target ends.

    `held_out` says where the validation target of a user would be; not after the start: nowhere.
    """
    if validation_users < 0:
        raise InputError(f"validation_users is {validation_users}, expected 0 or more")
    starts = log.offsets[:-1]
    stops = log.offsets[1:]
    kept = ends - starts >= min_history
    tested = np.flatnonzero(kept & (ends < stops)).astype(np.int32)
    test = Targets(tested, log.items[ends[tested]], starts[tested], ends[tested])

    # A user must keep something to learn from after giving up a validation item.
    able = np.flatnonzero(kept & (held_out > starts)).astype(np.int32)
    chosen = np.sort(random_generator(seed).permutation(able)[: min(validation_users, len(able))])
    places = held_out[chosen]
    validated = Targets(chosen, log.items[places], starts[chosen], places)

    train_ends = np.where(kept, ends, starts)
    train_ends[chosen] = places
    in_training = np.arange(log.num_interactions) < np.repeat(train_ends, log.lengths)
    dropped = np.flatnonzero(~kept).astype(np.int32)
    return Holdout(log, log.select(in_training), validated, test, dropped, cut_time)


def _time_of_share(times: Int64Array, share: float) -> int:
    """Return the earliest time at which at least that share of interactions has happened."""
    # The k-th smallest time with k = ⌈share · n⌉; as a decimal fraction, for 0.55 · 100 is 55.
    place = math.ceil(Fraction(repr(float(share))) * len(times)) - 1
    return int(np.partition(times, place)[place])


def _ends_before(log: Interactions, cut_time: int) -> Int64Array:
    """Return where the part of each history ends that lies before a cut, or at its time."""
    # Within a user times ascend, so that this is a prefix of the history.
    before = np.zeros(log.num_interactions + 1, np.int64)
    np.cumsum(log.times <= cut_time, out=before[1:])
    ends: Int64Array = log.offsets[:-1] + np.diff(before[log.offsets])
    return ends


def _last_places(log: Interactions, ends: Int64Array, validation: Validation) -> Int64Array:
    """Return where the validation target of every user would be; before the start: nowhere."""
    last = ends - 1
    if validation == "last" or not log.num_interactions:
        return last
    begins = np.ones(log.num_interactions, np.bool_)  # of items at one time
    begins[1:] = np.diff(log.times) != 0
    begins[log.offsets[:-1][log.lengths > 0]] = True
    first = np.maximum.accumulate(np.where(begins, np.arange(log.num_interactions), 0))
    found: Int64Array = np.where(last >= log.offsets[:-1], first[np.maximum(last, 0)], last)
    return found
