"""Exact top-K recommendation from catalogues of millions of items, by dynamic pruning.

Data moves in one direction: data → preparation → models, training → recommender → search; beside
that stand evaluation, shards, batch, serve and experiments. ARCHITECTURE.md has a section for each.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from recprune import types as _types

if TYPE_CHECKING:
    from recprune.attributes.attributes import Attributes
    from recprune.data.content import Content, read_content
    from recprune.data.identifiers import ExternalIds, IntegerIds, StringIds
    from recprune.data.interactions import (
        BadRows,
        Interactions,
        LeftOut,
        interactions_from_columns,
        read_interactions,
    )
    from recprune.data.statistics import Statistics, log_statistics
    from recprune.data.synthetic import (
        PRESETS,
        SyntheticLog,
        SyntheticSettings,
        synthetic_log,
        write_synthetic_log,
    )
    from recprune.evaluation.baselines.every_baseline import every_baseline
    from recprune.evaluation.baselines.item_knn import ItemKNN
    from recprune.evaluation.baselines.markov_chain import MarkovChain
    from recprune.evaluation.baselines.personal_frequency import PersonalFrequency
    from recprune.evaluation.baselines.popularity import Popularity
    from recprune.evaluation.baselines.recent_items import RecentItems
    from recprune.evaluation.baselines.recent_popularity import RecentPopularity
    from recprune.evaluation.comparison import Comparison, compare
    from recprune.evaluation.evaluation import Evaluation
    from recprune.evaluation.metrics import RankedUsers
    from recprune.live.live_index import LiveIndex
    from recprune.live.snapshot import LiveSnapshot
    from recprune.live.snapshot_ids import SnapshotIds
    from recprune.models.embedding import RecJPQEmbedding
    from recprune.models.settings import ModelSettings, Settings, TrainingSettings
    from recprune.preparation.codebook import (
        Codebook,
        QuantisedItems,
        assign_pq,
        assign_random,
        assign_svd,
    )
    from recprune.preparation.cold_items import ColdItems, find_cold_items
    from recprune.preparation.holdout import (
        Holdout,
        Targets,
        leave_one_out,
        no_holdout,
        temporal_holdout,
    )
    from recprune.preparation.prepared import Prepared, prepare
    from recprune.recommender.newcomers.fold_in import FoldedItems, fold_in
    from recprune.recommender.recommender import Recommendations, Recommender
    from recprune.recommender.refreshing import Refreshed, refresh
    from recprune.recommender.similar import SimilarItems
    from recprune.search.index import Index, instruction_set
    from recprune.search.methods import METHODS, Auto, Cells, Default, PQTopK, RecJPQPrune, Scan
    from recprune.search.posting_lists import PostingLists, build_posting_lists, items_sharing_most
    from recprune.search.top_k import SearchStats, TopK
    from recprune.shards.answers import ShardedTopK
    from recprune.shards.folder import ShardLostError, write_shards
    from recprune.shards.sharded_index import ShardedIndex
    from recprune.training.loop import train
    from recprune.types import (
        Columns,
        InputError,
        InterruptedWorkError,
        MissingExtraError,
        RecpruneError,
        StorageError,
    )
    from recprune.vectors.vector_index import VectorIndex

__all__ = [
    "METHODS",
    "PRESETS",
    "Attributes",
    "Auto",
    "BadRows",
    "Cells",
    "Codebook",
    "ColdItems",
    "Columns",
    "Comparison",
    "Content",
    "Default",
    "Evaluation",
    "ExternalIds",
    "FoldedItems",
    "Holdout",
    "Index",
    "InputError",
    "IntegerIds",
    "Interactions",
    "InterruptedWorkError",
    "ItemKNN",
    "LeftOut",
    "LiveIndex",
    "LiveSnapshot",
    "MarkovChain",
    "MissingExtraError",
    "ModelSettings",
    "PQTopK",
    "PersonalFrequency",
    "Popularity",
    "PostingLists",
    "Prepared",
    "QuantisedItems",
    "RankedUsers",
    "RecJPQEmbedding",
    "RecJPQPrune",
    "RecentItems",
    "RecentPopularity",
    "Recommendations",
    "Recommender",
    "RecpruneError",
    "Refreshed",
    "Scan",
    "SearchStats",
    "Settings",
    "ShardLostError",
    "ShardedIndex",
    "ShardedTopK",
    "SimilarItems",
    "SnapshotIds",
    "Statistics",
    "StorageError",
    "StringIds",
    "SyntheticLog",
    "SyntheticSettings",
    "Targets",
    "TopK",
    "TrainingSettings",
    "VectorIndex",
    "assign_pq",
    "assign_random",
    "assign_svd",
    "build_posting_lists",
    "compare",
    "every_baseline",
    "find_cold_items",
    "fold_in",
    "instruction_set",
    "interactions_from_columns",
    "items_sharing_most",
    "leave_one_out",
    "log_statistics",
    "no_holdout",
    "prepare",
    "read_content",
    "read_interactions",
    "refresh",
    "synthetic_log",
    "temporal_holdout",
    "train",
    "write_shards",
    "write_synthetic_log",
]

__version__ = _types.VERSION

# Where they live. A module is imported when something in it is first asked for: training runs where
# the compiled search is missing, and a search never waits for what it does not need.
_HOMES = {
    "Attributes": "attributes.attributes",
    "Auto": "search.methods",
    "BadRows": "data.interactions",
    "Cells": "search.methods",
    "Codebook": "preparation.codebook",
    "ColdItems": "preparation.cold_items",
    "Columns": "types",
    "Comparison": "evaluation.comparison",
    "Content": "data.content",
    "Default": "search.methods",
    "Evaluation": "evaluation.evaluation",
    "ExternalIds": "data.identifiers",
    "FoldedItems": "recommender.newcomers.fold_in",
    "Holdout": "preparation.holdout",
    "Index": "search.index",
    "InputError": "types",
    "IntegerIds": "data.identifiers",
    "Interactions": "data.interactions",
    "InterruptedWorkError": "types",
    "ItemKNN": "evaluation.baselines.item_knn",
    "LeftOut": "data.interactions",
    "LiveIndex": "live.live_index",
    "LiveSnapshot": "live.snapshot",
    "METHODS": "search.methods",
    "MarkovChain": "evaluation.baselines.markov_chain",
    "MissingExtraError": "types",
    "ModelSettings": "models.settings",
    "PQTopK": "search.methods",
    "PRESETS": "data.synthetic",
    "PersonalFrequency": "evaluation.baselines.personal_frequency",
    "Popularity": "evaluation.baselines.popularity",
    "PostingLists": "search.posting_lists",
    "Prepared": "preparation.prepared",
    "QuantisedItems": "preparation.codebook",
    "RankedUsers": "evaluation.metrics",
    "RecJPQEmbedding": "models.embedding",
    "RecJPQPrune": "search.methods",
    "RecentItems": "evaluation.baselines.recent_items",
    "RecentPopularity": "evaluation.baselines.recent_popularity",
    "Recommendations": "recommender.recommender",
    "Recommender": "recommender.recommender",
    "RecpruneError": "types",
    "Refreshed": "recommender.refreshing",
    "Scan": "search.methods",
    "SearchStats": "search.top_k",
    "Settings": "models.settings",
    "ShardLostError": "shards.folder",
    "ShardedIndex": "shards.sharded_index",
    "ShardedTopK": "shards.answers",
    "SimilarItems": "recommender.similar",
    "SnapshotIds": "live.snapshot_ids",
    "Statistics": "data.statistics",
    "StorageError": "types",
    "StringIds": "data.identifiers",
    "SyntheticLog": "data.synthetic",
    "SyntheticSettings": "data.synthetic",
    "Targets": "preparation.holdout",
    "TopK": "search.top_k",
    "TrainingSettings": "models.settings",
    "VectorIndex": "vectors.vector_index",
    "assign_pq": "preparation.codebook",
    "assign_random": "preparation.codebook",
    "assign_svd": "preparation.codebook",
    "build_posting_lists": "search.posting_lists",
    "compare": "evaluation.comparison",
    "every_baseline": "evaluation.baselines.every_baseline",
    "find_cold_items": "preparation.cold_items",
    "fold_in": "recommender.newcomers.fold_in",
    "instruction_set": "search.index",
    "interactions_from_columns": "data.interactions",
    "items_sharing_most": "search.posting_lists",
    "leave_one_out": "preparation.holdout",
    "log_statistics": "data.statistics",
    "no_holdout": "preparation.holdout",
    "prepare": "preparation.prepared",
    "read_content": "data.content",
    "read_interactions": "data.interactions",
    "refresh": "recommender.refreshing",
    "synthetic_log": "data.synthetic",
    "temporal_holdout": "preparation.holdout",
    "train": "training.loop",
    "write_shards": "shards.folder",
    "write_synthetic_log": "data.synthetic",
}


if not TYPE_CHECKING:  # a checker knows the names from above, and which ones do not exist

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_import_module(f"recprune.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
