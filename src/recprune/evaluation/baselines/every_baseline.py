"""All baselines at once, for tables."""

from __future__ import annotations

from recprune.data.interactions import Interactions
from recprune.evaluation.baselines.baseline import Baseline
from recprune.evaluation.baselines.ease import Ease, why_no_ease
from recprune.evaluation.baselines.fitting import FittingUsers
from recprune.evaluation.baselines.ials import ImplicitALS, why_no_ials
from recprune.evaluation.baselines.item_knn import ItemKNN
from recprune.evaluation.baselines.markov_chain import MarkovChain
from recprune.evaluation.baselines.personal_frequency import PersonalFrequency
from recprune.evaluation.baselines.popularity import Popularity
from recprune.evaluation.baselines.recent_items import RecentItems
from recprune.evaluation.baselines.recent_popularity import RecentPopularity, spans_days

_RECENT, _EASE, _IALS = "popularity of the last days", "EASE", "iALS"


def every_baseline(
    train: Interactions,
    *,
    temporal: bool = True,
    exclude_seen: bool = False,
    slow: bool = False,
) -> tuple[Baseline, ...]:
    """Return all baselines, the simplest first.

    The decay of personal frequency, how many days recent popularity looks back, λ of EASE and α of
    iALS are fitted on users of the training log, held out from it in time or by their last item
    (`temporal`), and with or without what they had already (`exclude_seen`), as in the test. Names
    say what was chosen. Some are left out of some logs, those too that would take minutes, unless
    they may be `slow`: `left_out_baselines` says which, and why.
    """
    users = FittingUsers.of(train, temporal=temporal)
    left_out = left_out_baselines(train, slow=slow)
    recent: tuple[Baseline, ...] = ()
    if _RECENT not in left_out:
        recent = (RecentPopularity.fitted(train, users, exclude_seen=exclude_seen),)
    learnt: list[Baseline] = []
    if _EASE not in left_out:
        learnt.append(Ease.fitted(train, users, exclude_seen=exclude_seen))
    if _IALS not in left_out:
        learnt.append(ImplicitALS.fitted(train, users, exclude_seen=exclude_seen))
    return (
        Popularity(train),
        *recent,
        RecentItems(train),
        PersonalFrequency(train),
        PersonalFrequency.fitted(train, users),
        MarkovChain(train),
        ItemKNN(train),
        *learnt,
    )


def left_out_baselines(train: Interactions, *, slow: bool = False) -> dict[str, str]:
    """Return which baselines are left out of a log, each with the reason.

    Popularity of the last days would be popularity where a log lasts no longer than a day.
    """
    short = "the training log has no times, or all of them within a day"
    lasts = None if spans_days(train) else short
    reasons = {_RECENT: lasts, _EASE: why_no_ease(train, slow=slow), _IALS: why_no_ials(train)}
    return {name: why for name, why in reasons.items() if why is not None}
