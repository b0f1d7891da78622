"""Conditions on the attributes of items, from their text: `price < 50 and 'red' in colours`.

    condition   = conjunction, {"or", conjunction}
    conjunction = negation, {"and", negation}
    negation    = "not", negation | "(", condition, ")" | test
    test        = column, operator, literal | literal, operator, column
                | column, ["not"], "in", "(", literal, {",", literal}, ")"
                | literal, ["not"], "in", column | column, ["not"], "contains", literal
                | column, "is", ["not"], "null" | column
    operator    = "=" | "==" | "!=" | "<>" | "<" | "<=" | ">" | ">="
    column      = a word | "`", a name, "`"
    literal     = "'", text, "'" | '"', text, '"' | a number | "true" | "false"

A quote inside a text or a name is doubled. Keywords may be in capitals. Which columns there are is
not known here. Nothing is ever evaluated: this makes a tree of frozen values, and no more. A text
may come from a stranger, so its length, its depth and the numbers of its tests and literals are
limited, and reading it takes time in proportion to its length.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn, TypeAlias

from recprune.types import InputError, type_in_words

MOST_CHARACTERS = 16_384
_MOST_LITERALS = 1_000
_MOST_TESTS = 100  # each may be a pass over all items
_MOST_DEPTH = 64  # of parentheses and negations: some 250 frames of Python's 1,000
_MOST_DIGITS = 40  # of a number: more than any int64 or float64 has
_SHOWN = 24  # characters of what was found, in a message

Operator: TypeAlias = Literal["=", "!=", "<", "<=", ">", ">="]
_OPERATORS: dict[str, Operator] = {
    "=": "=", "==": "=", "!=": "!=", "<>": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">=",
}  # fmt: skip
# What `literal operator column` says of the column.
_TURNED: dict[Operator, Operator] = {
    "=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<=",
}  # fmt: skip
_KEYWORDS = frozenset({"and", "or", "not", "in", "is", "null", "contains", "true", "false"})

# Each alternative begins with characters of its own, so that none is tried twice.
_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<text>'(?:[^']|'')*'|"(?:[^"]|"")*")
  | (?P<name>`(?:[^`]|``)*`)
  | (?P<number>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w.]))
  | (?P<word>[^\W\d]\w*)
  | (?P<sign><=|>=|<>|!=|==|[=<>(),])
    """,
    re.VERBOSE,
)
_OPENING = {"'": "a text", '"': "a text", "`": "a name"}


class ConditionError(InputError):
    """A condition that cannot be read, or that does not fit the columns."""

    def __init__(self, place: int, message: str) -> None:
        super().__init__(f"where, character {place + 1}: {message}")
        self.place = place  # in the text, from 0


@dataclass(frozen=True)
class ColumnName:
    """A column, and where in the text it is named."""

    name: str
    place: int


@dataclass(frozen=True)
class Constant:
    """A literal, and where in the text it stands."""

    value: str | int | float | bool
    place: int


@dataclass(frozen=True)
class Compared:
    """A column against a literal."""

    column: ColumnName
    operator: Operator
    constant: Constant


@dataclass(frozen=True)
class OneOf:
    """A column whose value is one of some literals."""

    column: ColumnName
    constants: tuple[Constant, ...]


@dataclass(frozen=True)
class Contains:
    """A column of lists, of which one element is a literal."""

    column: ColumnName
    constant: Constant


@dataclass(frozen=True)
class IsNull:
    """A column without a value."""

    column: ColumnName


@dataclass(frozen=True)
class IsTrue:
    """A column of booleans by its name alone."""

    column: ColumnName


@dataclass(frozen=True)
class Negated:
    """What is true where a condition is false; where that is unknown, so is this."""

    part: Condition


@dataclass(frozen=True)
class AllOf:
    """Conditions with `and` between them."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True)
class AnyOf:
    """Conditions with `or` between them."""

    parts: tuple[Condition, ...]


Single: TypeAlias = Compared | OneOf | Contains | IsNull | IsTrue
"""A test of one column."""

Condition: TypeAlias = Single | Negated | AllOf | AnyOf


def parse_condition(text: object) -> Condition:
    """Return the tree of a condition; `ConditionError` says where it cannot be read, and why."""
    if not isinstance(text, str):
        raise InputError(f"where is {type_in_words(text)}, expected a condition as text")
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"where has {len(text)} characters, expected {MOST_CHARACTERS} at most")
    return _Parser(_tokens(text)).whole()


# Tokens ------------------------------------------------------------------------------------------

_Kind: TypeAlias = Literal["text", "name", "number", "word", "keyword", "sign", "end"]


class _Token(NamedTuple):  # as frozen as a dataclass, and made in a fraction of the time
    kind: _Kind
    text: str  # as it is meant: without quotes, keywords in small letters
    written: str
    place: int


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            _refuse_character(text, place)
        kind, written = match.lastgroup or "word", match.group()
        if kind == "space":
            pass
        elif kind in ("text", "name"):
            quote = written[0]
            meant = written[1:-1].replace(quote * 2, quote)
            found.append(_Token("text" if kind == "text" else "name", meant, written, place))
        elif kind == "number":
            found.append(_Token("number", written, written, place))
        elif kind == "sign":
            found.append(_Token("sign", written, written, place))
        elif written.lower() in _KEYWORDS:
            found.append(_Token("keyword", written.lower(), written, place))
        else:
            found.append(_Token("word", written, written, place))
        place = match.end()
    found.append(_Token("end", "", "", len(text)))
    return found


def _refuse_character(text: str, place: int) -> NoReturn:
    character = text[place]
    if character in _OPENING:
        raise ConditionError(
            place, f"{_OPENING[character]} that begins with {character} and does not end"
        )
    if character.isdigit() or character in "+-.":
        raise ConditionError(place, f"{_shown(text[place:])} is not a number")
    raise ConditionError(
        place, f"{_shown(character)} is not expected here: names of columns go in `backticks`"
    )


def _shown(text: str) -> str:
    short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return repr(short)


# The parser: one method for each rule ------------------------------------------------------------


class _Parser:
    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._next = 0
        self._literals = 0
        self._tests = 0

    def whole(self) -> Condition:
        found = self._condition(0)
        if self._now.kind != "end":
            self._expected("and, or, or the end")
        return found

    @property
    def _now(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._now
        self._next += 1
        return token

    def _takes(self, *texts: str) -> bool:
        """Take a keyword or a sign if it comes next."""
        if self._now.kind in ("keyword", "sign") and self._now.text in texts:
            self._next += 1
            return True
        return False

    def _require(self, text: str) -> None:
        if not self._takes(text):
            self._expected(text)

    def _expected(self, what: str) -> NoReturn:
        token = self._now
        found = "the end" if token.kind == "end" else _shown(token.written)
        raise ConditionError(token.place, f"expected {what}, found {found}")

    def _condition(self, depth: int) -> Condition:
        parts = [self._conjunction(depth)]
        while self._takes("or"):
            parts.append(self._conjunction(depth))
        return AnyOf(tuple(parts)) if len(parts) > 1 else parts[0]

    def _conjunction(self, depth: int) -> Condition:
        parts = [self._negation(depth)]
        while self._takes("and"):
            parts.append(self._negation(depth))
        return AllOf(tuple(parts)) if len(parts) > 1 else parts[0]

    def _negation(self, depth: int) -> Condition:
        if depth > _MOST_DEPTH:
            raise ConditionError(self._now.place, f"more than {_MOST_DEPTH} conditions in another")
        if self._takes("not"):
            return Negated(self._negation(depth + 1))
        if self._takes("("):
            found = self._condition(depth + 1)
            self._require(")")
            return found
        return self._test()

    def _test(self) -> Condition:
        self._tests += 1
        if self._tests > _MOST_TESTS:
            raise ConditionError(self._now.place, f"more than {_MOST_TESTS} tests")
        if self._now.kind in ("word", "name"):
            return self._of_column(self._column())
        constant = self._constant("a column, a value, not or (")
        if self._now.kind == "sign" and self._now.text in _OPERATORS:
            turned = _TURNED[_OPERATORS[self._take().text]]
            return Compared(self._column(), turned, constant)
        negated = self._takes("not")
        self._require("in")
        found = Contains(self._column(), constant)
        return Negated(found) if negated else found

    def _of_column(self, column: ColumnName) -> Condition:
        if self._now.kind == "sign" and self._now.text in _OPERATORS:
            return Compared(column, _OPERATORS[self._take().text], self._constant("a value"))
        if self._takes("is"):
            negated = self._takes("not")
            self._require("null")
            return Negated(IsNull(column)) if negated else IsNull(column)
        negated = self._takes("not")
        found: Condition
        if self._takes("in"):
            found = OneOf(column, self._list())
        elif self._takes("contains"):
            found = Contains(column, self._constant("a value"))
        elif negated:
            self._expected("in or contains")
        else:
            return IsTrue(column)
        return Negated(found) if negated else found

    def _list(self) -> tuple[Constant, ...]:
        self._require("(")
        constants = [self._constant("a value")]
        while self._takes(","):
            constants.append(self._constant("a value"))
        if not self._takes(")"):
            self._expected(", or )")
        return tuple(constants)

    def _column(self) -> ColumnName:
        if self._now.kind not in ("word", "name"):
            self._expected("the name of a column")
        token = self._take()
        return ColumnName(token.text, token.place)

    def _constant(self, what: str) -> Constant:
        token = self._now
        if token.kind == "keyword" and token.text == "null":
            raise ConditionError(token.place, "nothing equals null: say is null, or is not null")
        is_truth = token.kind == "keyword" and token.text in ("true", "false")
        if token.kind not in ("text", "number") and not is_truth:
            hint = " (a text stands in quotes)" if token.kind == "word" else ""
            self._expected(f"{what}{hint}")
        self._literals += 1
        if self._literals > _MOST_LITERALS:
            raise ConditionError(token.place, f"more than {_MOST_LITERALS} values")
        self._next += 1
        if token.kind == "number":
            return Constant(_number(token), token.place)
        return Constant(token.text == "true" if is_truth else token.text, token.place)


def _number(token: _Token) -> int | float:
    text = token.text
    if len(text) > _MOST_DIGITS:
        raise ConditionError(token.place, f"a number of more than {_MOST_DIGITS} characters")
    if text.lstrip("+-").isdecimal():
        return int(text)
    number = float(text)
    if not math.isfinite(number):
        raise ConditionError(token.place, f"{text} is more than a float64 can hold")
    return number
