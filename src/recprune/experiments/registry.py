"""All experiments, in the order of the report."""

from __future__ import annotations

from recprune.experiments.appendix import Appendix
from recprune.experiments.dataset_table import DatasetTable
from recprune.experiments.difficulty import Difficulty
from recprune.experiments.experiment import Experiment
from recprune.experiments.heat_map import HeatMap
from recprune.experiments.peer_table import PeerTable
from recprune.experiments.prunable import Prunable
from recprune.experiments.rq1 import RQ1
from recprune.experiments.rq2 import RQ2
from recprune.experiments.rq3 import RQ3
from recprune.experiments.scaling import Scaling, Splits
from recprune.experiments.unsafe import Unsafe

EXPERIMENTS: tuple[Experiment, ...] = (
    DatasetTable(),
    Appendix(),
    RQ1(),
    RQ2(),
    RQ3(),
    HeatMap(),
    Difficulty(),
    Unsafe(),
    Scaling(),
    Splits(),
    PeerTable(),
    Prunable(),
)
