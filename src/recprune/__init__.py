"""Exact top-K recommendation from catalogues of millions of items, by dynamic pruning."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from recprune import types as _types

if TYPE_CHECKING:
    from recprune.baselines import ItemKNN, MarkovChain, Popularity, RecentItems, every_baseline
    from recprune.codebook import Codebook, QuantisedItems, assign_pq, assign_random, assign_svd
    from recprune.evaluate import Comparison, Evaluation, RankedUsers, compare
    from recprune.holdout import Holdout, leave_one_out, temporal_holdout
    from recprune.identifiers import ExternalIds, IntegerIds, StringIds
    from recprune.index import Index, instruction_set
    from recprune.interactions import (
        Interactions,
        LeftOut,
        interactions_from_columns,
        read_interactions,
    )
    from recprune.methods import METHODS, Auto, Cells, Default, PQTopK, RecJPQPrune, Scan
    from recprune.posting_lists import PostingLists, build_posting_lists, items_sharing_most
    from recprune.prepared import Prepared, prepare
    from recprune.recommender import Recommendations, Recommender
    from recprune.results import SearchStats, TopK
    from recprune.settings import ModelSettings, Settings, TrainingSettings
    from recprune.shards.answers import ShardedTopK
    from recprune.shards.folder import ShardLostError, write_shards
    from recprune.shards.sharded_index import ShardedIndex
    from recprune.statistics import Statistics, log_statistics
    from recprune.synthetic import (
        PRESETS,
        SyntheticLog,
        SyntheticSettings,
        synthetic_log,
        write_synthetic_log,
    )
    from recprune.targets import Targets
    from recprune.training import train
    from recprune.types import (
        BadRows,
        Columns,
        InputError,
        InterruptedWorkError,
        MissingExtraError,
        RecpruneError,
        StorageError,
    )

__all__ = [
    "METHODS",
    "PRESETS",
    "Auto",
    "BadRows",
    "Cells",
    "Codebook",
    "Columns",
    "Comparison",
    "Default",
    "Evaluation",
    "ExternalIds",
    "Holdout",
    "Index",
    "InputError",
    "IntegerIds",
    "Interactions",
    "InterruptedWorkError",
    "ItemKNN",
    "LeftOut",
    "MarkovChain",
    "MissingExtraError",
    "ModelSettings",
    "PQTopK",
    "Popularity",
    "PostingLists",
    "Prepared",
    "QuantisedItems",
    "RankedUsers",
    "RecJPQPrune",
    "RecentItems",
    "Recommendations",
    "Recommender",
    "RecpruneError",
    "Scan",
    "SearchStats",
    "Settings",
    "ShardLostError",
    "ShardedIndex",
    "ShardedTopK",
    "Statistics",
    "StorageError",
    "StringIds",
    "SyntheticLog",
    "SyntheticSettings",
    "Targets",
    "TopK",
    "TrainingSettings",
    "assign_pq",
    "assign_random",
    "assign_svd",
    "build_posting_lists",
    "compare",
    "every_baseline",
    "instruction_set",
    "interactions_from_columns",
    "items_sharing_most",
    "leave_one_out",
    "log_statistics",
    "prepare",
    "read_interactions",
    "synthetic_log",
    "temporal_holdout",
    "train",
    "write_shards",
    "write_synthetic_log",
]

__version__ = _types.VERSION

# Where they live. A room is entered when something in it is first asked for: training runs where
# the compiled search is missing, and a search never waits for what it does not need.
_HOMES = {
    "Auto": "methods",
    "BadRows": "types",
    "Cells": "methods",
    "Codebook": "codebook",
    "Columns": "types",
    "Comparison": "evaluate",
    "Default": "methods",
    "Evaluation": "evaluate",
    "ExternalIds": "identifiers",
    "Holdout": "holdout",
    "Index": "index",
    "InputError": "types",
    "IntegerIds": "identifiers",
    "Interactions": "interactions",
    "InterruptedWorkError": "types",
    "ItemKNN": "baselines",
    "LeftOut": "interactions",
    "METHODS": "methods",
    "MarkovChain": "baselines",
    "MissingExtraError": "types",
    "ModelSettings": "settings",
    "PQTopK": "methods",
    "PRESETS": "synthetic",
    "Popularity": "baselines",
    "PostingLists": "posting_lists",
    "Prepared": "prepared",
    "QuantisedItems": "codebook",
    "RankedUsers": "evaluate",
    "RecJPQPrune": "methods",
    "RecentItems": "baselines",
    "Recommendations": "recommender",
    "Recommender": "recommender",
    "RecpruneError": "types",
    "Scan": "methods",
    "SearchStats": "results",
    "Settings": "settings",
    "ShardLostError": "shards.folder",
    "ShardedIndex": "shards.sharded_index",
    "ShardedTopK": "shards.answers",
    "Statistics": "statistics",
    "StorageError": "types",
    "StringIds": "identifiers",
    "SyntheticLog": "synthetic",
    "SyntheticSettings": "synthetic",
    "Targets": "targets",
    "TopK": "results",
    "TrainingSettings": "settings",
    "assign_pq": "codebook",
    "assign_random": "codebook",
    "assign_svd": "codebook",
    "build_posting_lists": "posting_lists",
    "compare": "evaluate",
    "every_baseline": "baselines",
    "instruction_set": "index",
    "interactions_from_columns": "interactions",
    "items_sharing_most": "posting_lists",
    "leave_one_out": "holdout",
    "log_statistics": "statistics",
    "prepare": "prepared",
    "read_interactions": "interactions",
    "synthetic_log": "synthetic",
    "temporal_holdout": "holdout",
    "train": "training",
    "write_shards": "shards.folder",
    "write_synthetic_log": "synthetic",
}


if not TYPE_CHECKING:  # a checker knows the names from above, and which ones do not exist

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_import_module(f"recprune.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
