"""Tables of what `quality` measured, as Markdown, from its records alone."""

from __future__ import annotations

from typing import Any

from benchmarks.quality_plan import LOGS, TABLES

_Figures = dict[str, Any]


def tables(records: dict[str, _Figures]) -> dict[str, list[str]]:
    """Return the lines of each table, by the mark of its place."""
    chosen = {name: records[name] for name in LOGS if name in records}
    return {
        "quality: codes": _codes(chosen),
        "quality: baselines": _baselines(chosen),
        "quality: groups": _groups(chosen),
        "quality: training": _training(chosen),
    }


def _codes(records: dict[str, _Figures]) -> list[str]:
    """NDCG@10 of every kind of item table, and how far it is from a full one."""
    rows = []
    for name, figures in records.items():
        quality, against = figures["quality"], figures["against_full_table"]
        cells = []
        for table in TABLES:
            if table not in quality:
                cells.append("")
                continue
            cell = _interval(quality[table]["all"]["NDCG@10"])
            if table in against:
                full = quality["full table"]["all"]["NDCG@10"][0]
                cell += f" ({_percent(against[table][0] / full)})"
            cells.append(cell)
        rows.append([LOGS[name].title, *cells])
    return _table(["NDCG@10", *TABLES], rows)


def _baselines(records: dict[str, _Figures]) -> list[str]:
    """The model that validated best on every log, and the best way of counting."""
    rows = []
    for name, figures in records.items():
        best = _best(figures)
        counting = figures["best_baseline"]
        quality = figures["quality"]
        rows.append(
            [
                LOGS[name].title,
                f"{figures['users']:,}",
                f"{best}: {_interval(quality[best]['all']['NDCG@10'])}",
                f"{counting}: {_interval(quality[counting]['all']['NDCG@10'])}",
                _interval(figures["against_best_baseline"][best], signed=True),
            ]
        )
    header = ["", "test users", "best on validation users", "best baseline", "difference, paired"]
    return _table(header, rows)


def _groups(records: dict[str, _Figures]) -> list[str]:
    """The same model on targets that repeat, that are new to the user, and that are cold."""
    rows = []
    for name, figures in records.items():
        best = _best(figures)
        for who in (best, figures["best_baseline"]):
            quality = figures["quality"][who]
            cells = []
            for group in ("repeats", "new", "cold", "warm"):
                known = quality.get(group)
                share = figures["shares"][group]
                if known is None or (group in ("cold", "warm") and not figures["shares"]["cold"]):
                    cells.append("")
                else:
                    cells.append(f"{known['NDCG@10'][0]:.4f} ({share:.0%})")
            rows.append([f"{LOGS[name].title}, {who}", *cells])
    return _table(["NDCG@10 (share of users)", "repeats", "new to the user", "cold", "warm"], rows)


def _training(records: dict[str, _Figures]) -> list[str]:
    """How trainings went, and how well learnt codes tell items apart."""
    rows = []
    for name, figures in records.items():
        for model, one in figures["models"].items():
            codes = one["codes"] or {}
            rows.append(
                [
                    f"{LOGS[name].title}, {model}",
                    f"{one['validation_ndcg']:.4f}",
                    f"{figures['quality'][model]['all']['NDCG@10'][0]:.4f}",
                    f"{one['best_epoch']} of {one['epochs']}",
                    f"{one['seconds']:.0f}",
                    f"{codes['items_sharing_a_code']:,}" if codes else "",
                    f"{codes['unused_sub_items']:,}" if codes else "",
                    f"{codes['quantisation_error']:.2f}" if codes else "",
                ]
            )
    header = ["", "validation NDCG@10", "test", "best epoch", "seconds", "items sharing a code",
              "unused sub-items", "quantisation error"]  # fmt: skip
    return _table(header, rows)


def _best(figures: _Figures) -> str:
    """Return the model that validation users liked best."""
    models = figures["models"]
    return str(max(models, key=lambda model: float(models[model]["validation_ndcg"])))


def _interval(values: list[float], *, signed: bool = False) -> str:
    mean, low, high = (f"{value:+.4f}" if signed else f"{value:.4f}" for value in values)
    return f"{mean} [{low}, {high}]"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
