"""All baselines at once, for tables."""

from __future__ import annotations

from recprune.data.interactions import Interactions
from recprune.evaluation.baselines.baseline import Baseline
from recprune.evaluation.baselines.fitting import FittingUsers
from recprune.evaluation.baselines.item_knn import ItemKNN
from recprune.evaluation.baselines.markov_chain import MarkovChain
from recprune.evaluation.baselines.personal_frequency import PersonalFrequency
from recprune.evaluation.baselines.popularity import Popularity
from recprune.evaluation.baselines.recent_items import RecentItems
from recprune.evaluation.baselines.recent_popularity import RecentPopularity, spans_days


def every_baseline(
    train: Interactions, *, temporal: bool = True, exclude_seen: bool = False
) -> tuple[Baseline, ...]:
    """Return all baselines, the simplest first.

    The decay of personal frequency, and how many days recent popularity looks back, are fitted on
    users of the training log, held out from it in time or by their last item (`temporal`), and with
    or without what they had already (`exclude_seen`), as in the test. Names say what was chosen.
    Recent popularity is left out where the log lasts no longer than a day: it would be popularity.
    """
    users = FittingUsers.of(train, temporal=temporal)
    recent: tuple[Baseline, ...] = ()
    if spans_days(train):
        recent = (RecentPopularity.fitted(train, users, exclude_seen=exclude_seen),)
    return (
        Popularity(train),
        *recent,
        RecentItems(train),
        PersonalFrequency(train),
        PersonalFrequency.fitted(train, users),
        MarkovChain(train),
        ItemKNN(train),
    )
