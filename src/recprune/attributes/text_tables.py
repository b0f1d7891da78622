"""Tables of attributes from text: CSV, TSV and JSON lines, compressed or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recprune.types import InputError, needs_extra

with needs_extra("data"):
    import pyarrow as pa
    import pyarrow.csv as pa_csv
    import pyarrow.json as pa_json

    from recprune.data.formats import Source, delimited_head, find_id_column

TEXT_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")  # .gz and .zst may follow
# A row that is longer than two of these is refused.
_BLOCK_BYTES = 16 << 20


def read_delimited(source: Source, item_column: str | None) -> pa.Table:
    """Read CSV or TSV: a column is of the type that all of its fields have, or else text.

    An empty field is no value, and ids stay the text that they are: "007" may be one.
    """
    delimiter, names = delimited_head(source, None, header=True)
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{source.path}: two columns are called {name!r}")
    texts = {find_id_column(source.path, names, item_column, "--item-column")}
    table = _read_delimited(source, delimiter, names, texts)
    for field in table.schema:
        if pa.types.is_binary(field.type):
            raise InputError(f"{source.path}: the column {field.name!r} is no text in UTF-8")
    # Of a time of day, which no column can be of, the text can be asked for.
    hours = {field.name for field in table.schema if pa.types.is_time(field.type)}
    return _read_delimited(source, delimiter, names, texts | hours) if hours else table


def _read_delimited(source: Source, delimiter: str, names: list[str], texts: set[str]) -> pa.Table:
    with source.open() as stream:
        return pa_csv.read_csv(
            stream,
            read_options=pa_csv.ReadOptions(
                column_names=names,
                skip_rows=1,
                block_size=_BLOCK_BYTES,
                use_threads=False,  # else rows have no numbers in messages
            ),
            parse_options=pa_csv.ParseOptions(
                delimiter=delimiter,
                quote_char=False if delimiter == "\t" else '"',
                newlines_in_values=delimiter != "\t",
            ),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict.fromkeys(texts, pa.string()),
                null_values=[""],
                strings_can_be_null=True,
                true_values=["true", "True", "TRUE"],
                false_values=["false", "False", "FALSE"],
            ),
        )


def read_json_lines(source: Source, item_column: str | None) -> pa.Table:
    """Read an object a line, lists among its values; ids that are text stay so."""
    first = _object(source.first_line())
    if first is None:
        raise InputError(f"{source.path}: line 1: not a JSON object")
    item = find_id_column(source.path, list(first), item_column, "--item-column")
    # Else text that looks like a date would become one.
    texts = pa.schema({item: pa.string()}) if isinstance(first[item], str) else None
    try:
        with source.open() as stream:
            return pa_json.read_json(
                stream,
                read_options=pa_json.ReadOptions(block_size=_BLOCK_BYTES),
                parse_options=pa_json.ParseOptions(explicit_schema=texts),
            )
    except pa.ArrowInvalid as error:
        _refuse_line(source)
        if "straddling" in str(error):  # two blocks, and what would help is nothing that is asked
            raise InputError(
                f"{source.path}: a line is longer than {_BLOCK_BYTES >> 20} MiB"
            ) from None
        raise


def _refuse_line(source: Source) -> None:
    """Refuse the first line that is no object, whose number Arrow does not say."""
    with source.open() as stream:
        for number, line in enumerate(bytes(stream.read()).splitlines(), 1):
            if line.strip() and _object(line) is None:
                raise InputError(f"{source.path}: line {number}: not a JSON object")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_text_table(path: Path) -> bool:
    """Say whether a file is one that is read here, by its name."""
    names = [name.lower() for name in path.suffixes]
    if names and names[-1] in (".gz", ".zst"):
        names.pop()
    return bool(names) and names[-1] in TEXT_SUFFIXES
