"""All experiments, in the order of the report."""

from __future__ import annotations

from recprune.experiments.framework.experiment import Experiment
from recprune.experiments.ours.instruction_sets import InstructionSets
from recprune.experiments.ours.other_codes import OtherCodes
from recprune.experiments.ours.peer_table import PeerTable
from recprune.experiments.ours.prunable import Prunable
from recprune.experiments.ours.scaling import Scaling, Splits
from recprune.experiments.ours.shapes import Shapes
from recprune.experiments.ours.unsafe import Unsafe
from recprune.experiments.paper.appendix import Appendix
from recprune.experiments.paper.dataset_table import DatasetTable
from recprune.experiments.paper.difficulty import Difficulty
from recprune.experiments.paper.heat_map import HeatMap
from recprune.experiments.paper.rq1 import RQ1
from recprune.experiments.paper.rq2 import RQ2
from recprune.experiments.paper.rq3 import RQ3

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
    InstructionSets(),
    Shapes(),
    PeerTable(),
    Prunable(),
    OtherCodes(),
)
