"""The data path at the paper's full size: synthetic logs, reading, codebooks.

Writes Gowalla- and Tmall-like logs, turns them into files of exactly the published formats, reads
those beside a bare `polars.read_csv` of the same file in alternation, and assigns codebooks. Every
piece runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.measure import Measurement, measure, write_result
from recprune.commands.console import messages, output, print_table
from recprune.experiments.framework.machine import machine


@dataclass(frozen=True)
class Dataset:
    """One published data set: its format, and what reading and coding it may cost."""

    log_format: str
    to_text: str  # a polars program from the synthetic log to a file of the published format
    csv_options: str  # of the bare polars.read_csv
    read_gigabytes: float
    codebook_seconds: float
    codebook_gigabytes: float


DATASETS = {
    "gowalla-like": Dataset(
        "gowalla",
        """
log.select("user_id", pl.from_epoch("timestamp").dt.strftime("%FT%TZ"),
           (pl.col("item_id") * 0.37 % 180 - 90).round(10).alias("latitude"),
           (pl.col("item_id") * 0.73 % 360 - 180).round(10).alias("longitude"),
           "item_id").write_csv(sys.argv[2], separator="\\t", include_header=False)
""",
        'separator="\\t", has_header=False',
        2.5,
        60,
        4,
    ),
    "tmall-like": Dataset(
        "tmall",
        """
log.select(pl.col("user_id").alias("use_ID"), (pl.col("item_id") % 9_999).alias("sel_ID"),
           pl.col("item_id").alias("ite_ID"), (pl.col("item_id") % 72).alias("cat_ID"),
           (pl.col("timestamp") % 2).alias("act_ID"),
           pl.from_epoch("timestamp").dt.strftime("%Y%m%d").alias("time_stamp")
           ).write_csv(sys.argv[2])
""",
        "",
        9,
        360,
        12,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=sorted(DATASETS), help="one data set instead of both")
    parser.add_argument("--repeats", type=int, default=3, help="of reading; default %(default)s")
    parser.add_argument("--out", type=Path, default=Path("out/bench-data-path.json"))
    parsed = parser.parse_args()
    measurements: list[Measurement] = []
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(prefix="recprune-bench-") as folder:
        for preset in [parsed.only] if parsed.only else list(DATASETS):
            rows += _measure_dataset(preset, Path(folder), parsed.repeats, measurements)
    print_table("The data path", ("", "seconds", "allowed", "peak GB", "allowed"), rows)
    output.print(f"{machine()['cpu']}, {machine()['cores']} cores; all figures in {parsed.out}")
    write_result(parsed.out, {"measurements": [asdict(entry) for entry in measurements]})


def _measure_dataset(
    preset: str, folder: Path, repeats: int, measurements: list[Measurement]
) -> list[tuple[str, ...]]:
    dataset = DATASETS[preset]
    parquet, text = folder / f"{preset}.parquet", folder / f"{preset}.csv"

    def run(name: str, setup: str, work: str, *arguments: str | Path) -> Measurement:
        messages.print(f"[dim]{preset}: {name}[/]")
        measurements.append(measure(f"{preset}: {name}", setup, work, *arguments))
        return measurements[-1]

    synth = run(
        "synthetic log",
        "from recprune import PRESETS, write_synthetic_log\nimport pyarrow.parquet",
        "write_synthetic_log(sys.argv[1], PRESETS[sys.argv[2]])",
        parquet,
        preset,
    )
    run(
        "writing the text file",
        "import polars as pl\nlog = pl.read_parquet(sys.argv[1])",
        dataset.to_text,
        parquet,
        text,
    )
    bare, ours = [], []
    for _ in range(repeats):
        bare.append(
            run(
                "polars.read_csv",
                "import polars as pl",
                f"frame = pl.read_csv(sys.argv[1], {dataset.csv_options})",
                text,
            )
        )
        ours.append(
            run(
                "read_interactions",
                "import recprune.data.readers\nfrom recprune import read_interactions",
                "log = read_interactions(sys.argv[1], log_format=sys.argv[2])",
                text,
                dataset.log_format,
            )
        )
    codebook = run(
        "hold-out and codebook",
        "import scipy.sparse.linalg\n"
        "from recprune import assign_svd, read_interactions, temporal_holdout\n"
        "log = read_interactions(sys.argv[1])",
        "codebook = assign_svd(temporal_holdout(log).train)",
        parquet,
    )
    text.unlink()
    bare_seconds = _median(bare, lambda run: run.seconds)
    our_seconds = _median(ours, lambda run: run.seconds)
    our_memory = max(run.peak_gigabytes for run in ours)
    allowed_synth = ("90", "8") if preset == "tmall-like" else ("", "")
    return [
        _row(
            f"{preset}: synthetic log",
            synth.seconds,
            allowed_synth[0],
            synth.peak_gigabytes,
            allowed_synth[1],
        ),
        _row(
            f"{preset}: bare polars.read_csv",
            bare_seconds,
            "",
            _median(bare, lambda run: run.peak_gigabytes),
            "",
        ),
        _row(
            f"{preset}: read_interactions",
            our_seconds,
            f"{3 * bare_seconds:.2f}",
            our_memory,
            f"{dataset.read_gigabytes:g}",
        ),
        (f"{preset}:   times polars", f"{our_seconds / bare_seconds:.2f}×", "3×", "", ""),
        _row(
            f"{preset}: hold-out and codebook",
            codebook.seconds,
            f"{dataset.codebook_seconds:g}",
            codebook.peak_gigabytes,
            f"{dataset.codebook_gigabytes:g}",
        ),
    ]


def _median(runs: list[Measurement], value: Callable[[Measurement], float]) -> float:
    return statistics.median(value(run) for run in runs)


def _row(
    name: str, seconds: float, most_seconds: str, gigabytes: float, most_gigabytes: str
) -> tuple[str, ...]:
    return (name, f"{seconds:.2f}", most_seconds, f"{gigabytes:.2f}", most_gigabytes)


if __name__ == "__main__":
    main()
