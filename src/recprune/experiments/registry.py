"""All experiments, in the order of the report."""

from __future__ import annotations

from recprune.experiments.experiment import Experiment
from recprune.experiments.rq1 import RQ1
from recprune.experiments.scaling import Scaling, Splits

EXPERIMENTS: tuple[Experiment, ...] = (RQ1(), Scaling(), Splits())
