"""Figures that the paper published, to stand beside ours: the only ones typed in by hand.

Petrov, Macdonald and Tonellotto, "Efficient Recommendation with Millions of Items by Dynamic
Pruning of Sub-Item Embeddings", SIGIR 2025.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "Petrov, Macdonald and Tonellotto, SIGIR 2025"
MACHINE = "TensorFlow on an AMD Ryzen 5950x"


@dataclass(frozen=True)
class ScoringTimes:
    """Median milliseconds of scoring, K = 10 (Table 2)."""

    log: str
    model: str
    default: float
    pqtopk: float
    recjpqprune: float


@dataclass(frozen=True)
class ModelFigures:
    """A model of the appendix (Table 3)."""

    log: str
    model: str
    ndcg: float
    phi_ms: float
    megabytes: int


SCORING_TIMES = (
    ScoringTimes("Gowalla", "sasrecjpq", 123.61, 10.19, 3.50),
    ScoringTimes("Gowalla", "gsasrecjpq", 123.87, 10.11, 4.59),
    ScoringTimes("Gowalla", "gbert4recjpq", 123.24, 9.57, 6.42),
    ScoringTimes("Tmall", "sasrecjpq", 204.18, 16.72, 3.18),
    ScoringTimes("Tmall", "gsasrecjpq", 206.38, 16.75, 5.20),
    ScoringTimes("Tmall", "gbert4recjpq", 205.67, 16.66, 5.11),
)
MODELS = (
    ModelFigures("Gowalla", "sasrecjpq", 0.1142, 24.81, 91),
    ModelFigures("Gowalla", "gsasrecjpq", 0.1667, 24.55, 90),
    ModelFigures("Gowalla", "gbert4recjpq", 0.1718, 37.27, 162),
    ModelFigures("Gowalla", "sasrec", 0.1100, 24.67, 3200),
    ModelFigures("Tmall", "sasrecjpq", 0.0049, 24.67, 185),
    ModelFigures("Tmall", "gsasrecjpq", 0.0134, 24.71, 186),
    ModelFigures("Tmall", "gbert4recjpq", 0.0155, 37.62, 258),
)
