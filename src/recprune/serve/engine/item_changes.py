"""Changes of the catalogue that is served: what is asked for, checked, and made in one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recprune.attributes.attributes import Attributes
from recprune.data.identifiers import ExternalId
from recprune.live.given_changes import KnownItemError
from recprune.live.item_names import is_name
from recprune.live.live_index import LiveIndex
from recprune.live.notes import NoteError
from recprune.recommender.item_notes import amended, check_attributes
from recprune.serve.engine.catalogue import Catalogue
from recprune.types import InputError, Json, RecpruneError, StorageError


class NoLiveError(RecpruneError):
    """The catalogue of this service does not change."""


class NoSuchItemError(RecpruneError):
    """There is no such item."""


class ItemExistsError(RecpruneError):
    """An item is to be added that is there."""


class CatalogueUnavailableError(RecpruneError):
    """The catalogue cannot be changed just now."""


class NewItem(NamedTuple):
    """An item that is added, or whose code is another one from now on."""

    external_id: ExternalId
    code: list[int]
    bias: float | None
    said: Json  # its name and attributes, as far as they are given: what a note says


def put_items(
    live: LiveIndex,
    catalogue: Catalogue,
    attributes: Attributes | None,
    items: Sequence[NewItem],
    *,
    replace: bool,
) -> list[int]:
    """Add items, all of them or none, and return their numbers; `replace` gives others new codes.

    When this returns, the change is on disk.
    """
    snapshot = live.snapshot()
    ids = catalogue.coerce(item.external_id for item in items)
    known: set[ExternalId] = set()
    for place, (item, external_id) in enumerate(zip(items, ids, strict=True)):
        if not is_name(external_id, snapshot.id_kind):
            raise InputError(
                f"items[{place}].id is {external_id!r}, expected one of {snapshot.id_kind}"
            )
        if external_id in known:
            raise InputError(f"items[{place}].id is {external_id!r}, as is an earlier one")
        known.add(external_id)
        if len(item.code) != live.num_splits:
            raise InputError(
                f"items[{place}].code has {len(item.code)} sub-item ids, expected {live.num_splits}"
            )
        for split, sub_item_id in enumerate(item.code):
            if sub_item_id >= live.num_sub_items:
                raise InputError(
                    f"items[{place}].code[{split}] is {sub_item_id}, expected 0 to "
                    f"{live.num_sub_items - 1}"
                )
        if item.bias is not None and not snapshot.has_bias:
            raise InputError(f"items[{place}].bias: items of this catalogue have no biases")
        _check_said(item.said, attributes, f"items[{place}].")
    columns = attributes.columns if attributes is not None else ()
    dtype = np.uint8 if live.num_sub_items <= 256 else np.uint16
    codes: NDArray[Any] = np.array([item.code for item in items], dtype)

    def note(place: int, before: Json | None) -> Json | None:
        said = items[place].said
        return amended(before, said, columns) if said else None  # None leaves what was said

    with _changing():
        try:
            numbers = live.put(
                ids,
                codes,
                [item.bias for item in items],
                replace=replace,
                notes=note if any(item.said for item in items) else None,
            )
        except NoteError as error:
            raise InputError(f"items[{error.place}]: what is said of it {error.reason}") from None
        except KnownItemError as error:
            raise ItemExistsError(
                f"items[{error.place}].id is {error.external_id!r}, which is there already: "
                "replace gives it another code"
            ) from None
    return [int(number) for number in numbers]


def remove_item(live: LiveIndex, catalogue: Catalogue, external_id: ExternalId) -> None:
    """Remove an item; when this returns, the change is on disk."""
    with _changing():
        number = _number_of(live, catalogue, external_id)
        with _still_there():
            live.remove([number])


def amend_item(
    live: LiveIndex,
    catalogue: Catalogue,
    attributes: Attributes | None,
    external_id: ExternalId,
    said: Json,
) -> None:
    """Change the name of an item, or some attributes; when this returns, that is on disk."""
    with _changing():
        number = _number_of(live, catalogue, external_id)
        _check_said(said, attributes, "", live.snapshot().notes.get(number))
        columns = attributes.columns if attributes is not None else ()
        with _still_there():
            live.note([number], lambda _, before: amended(before, said, columns))


def _check_said(
    said: Json, attributes: Attributes | None, where: str, before: Json | None = None
) -> None:
    """Refuse what no column has room for, so that all that is kept can be applied."""
    if "attributes" not in said:
        return
    if attributes is None:
        raise InputError(
            f"{where}attributes: this service has no attributes of its items, whose columns say "
            "what can be said of one: `recprune attributes` makes them of a table"
        )
    try:
        check_attributes(said["attributes"], attributes, before)
    except InputError as error:
        raise InputError(f"{where}{error}") from None


def _number_of(live: LiveIndex, catalogue: Catalogue, external_id: ExternalId) -> int:
    live.refresh()  # another worker may just have added it
    wanted = catalogue.coerce([external_id])
    number = int(catalogue.at(live.snapshot()).find_all(wanted)[0])
    if number < 0:
        raise NoSuchItemError("no such item in the catalogue")
    return number


@contextmanager
def _still_there() -> Iterator[None]:
    """Say that an item is not there if it leaves meanwhile."""
    try:
        yield
    except NoteError as error:
        raise InputError(f"what is said of the item {error.reason}") from None
    except InputError:  # another worker was faster
        raise NoSuchItemError("no such item in the catalogue") from None


@contextmanager
def _changing() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        raise CatalogueUnavailableError(str(error)) from None
