"""Exact top-K recommendation from catalogues of millions of items, by dynamic pruning."""

from importlib.metadata import version as _version

from recprune.codebook import Codebook, QuantisedItems, assign_pq, assign_random, assign_svd
from recprune.holdout import Holdout, Targets, leave_one_out, temporal_holdout
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
from recprune.results import SearchStats, TopK
from recprune.statistics import Statistics, log_statistics
from recprune.synthetic import (
    PRESETS,
    SyntheticLog,
    SyntheticSettings,
    synthetic_log,
    write_synthetic_log,
)
from recprune.types import (
    BadRows,
    Columns,
    InputError,
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
    "Default",
    "ExternalIds",
    "Holdout",
    "Index",
    "InputError",
    "IntegerIds",
    "Interactions",
    "LeftOut",
    "MissingExtraError",
    "PQTopK",
    "PostingLists",
    "QuantisedItems",
    "RecJPQPrune",
    "RecpruneError",
    "Scan",
    "SearchStats",
    "Statistics",
    "StorageError",
    "StringIds",
    "SyntheticLog",
    "SyntheticSettings",
    "Targets",
    "TopK",
    "assign_pq",
    "assign_random",
    "assign_svd",
    "build_posting_lists",
    "instruction_set",
    "interactions_from_columns",
    "items_sharing_most",
    "leave_one_out",
    "log_statistics",
    "read_interactions",
    "synthetic_log",
    "temporal_holdout",
    "write_synthetic_log",
]

__version__ = _version("recprune")
