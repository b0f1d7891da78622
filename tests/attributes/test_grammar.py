"""Conditions as text: what they mean, and that nothing else is read, however it is written."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recprune import InputError
from recprune.attributes.grammar import (
    MOST_CHARACTERS,
    AllOf,
    AnyOf,
    ColumnName,
    Compared,
    ConditionError,
    Constant,
    Contains,
    IsNull,
    IsTrue,
    Negated,
    OneOf,
    parse_condition,
)
from tests.support.attribute_cases import condition


def test_a_condition_as_a_tree() -> None:
    text = "category in ('shoes', 'socks') and price < 50 and in_stock"
    assert parse_condition(text) == AllOf(
        (
            OneOf(ColumnName("category", 0), (Constant("shoes", 13), Constant("socks", 22))),
            Compared(ColumnName("price", 35), "<", Constant(50, 43)),
            IsTrue(ColumnName("in_stock", 50)),
        )
    )


def test_and_binds_closer_than_or_and_not_closer_than_both() -> None:
    a, b, c = (IsTrue(ColumnName(name, place)) for name, place in (("a", 4), ("b", 10), ("c", 15)))
    assert parse_condition("not a and b or c") == AnyOf((AllOf((Negated(a), b)), c))
    first, second, third = (IsTrue(ColumnName(n, p)) for n, p in (("a", 0), ("b", 6), ("c", 11)))
    assert parse_condition("a and(b or c)") == AllOf((first, AnyOf((second, third))))
    assert third.column.place == 11


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("'x' in t", Contains(ColumnName("t", 7), Constant("x", 0))),
        ("t CONTAINS 'x'", Contains(ColumnName("t", 0), Constant("x", 11))),
        ("t not contains 3", Negated(Contains(ColumnName("t", 0), Constant(3, 15)))),
        ("'x' not in t", Negated(Contains(ColumnName("t", 11), Constant("x", 0)))),
        ("p is null", IsNull(ColumnName("p", 0))),
        ("p is not null", Negated(IsNull(ColumnName("p", 0)))),
        ("p not in (1)", Negated(OneOf(ColumnName("p", 0), (Constant(1, 10),)))),
        ("50 >= p", Compared(ColumnName("p", 6), "<=", Constant(50, 0))),
        ("p<>-1.5e3", Compared(ColumnName("p", 0), "!=", Constant(-1500.0, 3))),
        ("p == .5", Compared(ColumnName("p", 0), "=", Constant(0.5, 5))),
        ("p = 'it''s'", Compared(ColumnName("p", 0), "=", Constant("it's", 4))),
        ('p = "a ""b"""', Compared(ColumnName("p", 0), "=", Constant('a "b"', 4))),
        ("p = ''", Compared(ColumnName("p", 0), "=", Constant("", 4))),
        ("`in ``stock` = true", Compared(ColumnName("in `stock", 0), "=", Constant(True, 15))),
        ("größe > 1", Compared(ColumnName("größe", 0), ">", Constant(1, 8))),
        (" \n\tp\u00a0", IsTrue(ColumnName("p", 3))),
    ],
)
def test_every_form(text: str, expected: object) -> None:
    assert parse_condition(text) == expected


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("", 0, "expected a column, a value, not or (, found the end"),
        ("price <", 7, "expected a value, found the end"),
        ("price < and", 8, "expected a value, found 'and'"),
        ("price 5", 6, "expected and, or, or the end, found '5'"),
        ("1 < price < 5", 10, "expected and, or, or the end, found '<'"),
        ("(a or b", 7, "expected ), found the end"),
        ("a in ()", 6, "expected a value, found ')'"),
        ("a in (1 2)", 8, "expected , or ), found '2'"),
        ("a in ('x',)", 10, "expected a value, found ')'"),
        ("a not b", 6, "expected in or contains, found 'b'"),
        ("a is 5", 5, "expected null, found '5'"),
        ("a = null", 4, "nothing equals null: say is null, or is not null"),
        ("a in (1, null)", 9, "nothing equals null"),
        ("a = b", 4, "expected a value (a text stands in quotes), found 'b'"),
        ("'x'", 3, "expected in, found the end"),
        ("'x' in 'y'", 7, "expected the name of a column, found \"'y'\""),
        ("a = 'x", 4, "a text that begins with ' and does not end"),
        ("`a", 0, "a name that begins with ` and does not end"),
        ("a = 1.2.3", 4, "'1.2.3' is not a number"),
        ("a = 12x", 4, "'12x' is not a number"),
        ("a = 1e999", 4, "1e999 is more than a float64 can hold"),
        ("a = " + "9" * 41, 4, "a number of more than 40 characters"),
        ("a; drop", 1, "';' is not expected here"),
        ("__import__('os')", 10, "expected and, or, or the end, found '('"),
        ("(" * 65 + "a" + ")" * 65, 65, "more than 64 conditions in another"),
        ("not " * 65 + "a", 260, "more than 64 conditions in another"),
        (f"a in ({','.join('1' * 1001)})", 2006, "more than 1000 values"),
        (" or ".join("a" * 101), 500, "more than 100 tests"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, place: int, message: str) -> None:
    with pytest.raises(ConditionError) as refused:
        parse_condition(text)
    assert refused.value.place == place
    assert str(refused.value).startswith(f"where, character {place + 1}: ")
    assert message in str(refused.value)


def test_what_is_no_text_or_too_long_is_refused() -> None:
    with pytest.raises(InputError, match="where is an int, expected a condition"):
        parse_condition(5)
    parse_condition("a" * MOST_CHARACTERS)
    with pytest.raises(InputError, match=f"where has {MOST_CHARACTERS + 1} characters, expected"):
        parse_condition("a" * (MOST_CHARACTERS + 1))


PIECES = ["and", "or", "not", "in", "is", "null", "contains", "true", "a", "`b`", "'c'", "1", "-2.5",
          "(", ")", ",", "=", "!=", "<", ">=", "<>", "'", '"', "`", " ", "\n", "é", "\0", ";", "\ud800"]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join) | st.text(max_size=60))
@example("'" * 101)
@example("a in ((((((")
def test_garbage_is_refused_and_nothing_worse(text: str) -> None:
    with suppress(ConditionError):
        parse_condition(text)


@pytest.mark.parametrize("piece", ["'", '"', "`", "(", "not ", "1", "1e", "a ", "''", "1.", "-", "a or ",
                                   "'x' in ", "a in (1", ",", "\ud800", " "])  # fmt: skip
def test_the_longest_texts_are_done_with_at_once(piece: str) -> None:
    """Were time quadratic in the length, or worse, this would not end."""
    text = (piece * MOST_CHARACTERS)[:MOST_CHARACTERS]
    for ending in ("", "'", ")", " x"):
        said = ""
        try:
            parse_condition(text[: MOST_CHARACTERS - len(ending)] + ending)
        except ConditionError as error:
            said = str(error)
        assert len(said) < 200


def test_whatever_is_well_formed_is_read() -> None:
    for seed in range(300):
        text, _ = condition(random.Random(seed))
        parse_condition(text)
