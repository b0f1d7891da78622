"""The C++ core of recprune. Use the Python modules around it."""

import enum
from typing import Annotated, overload

import numpy
import numpy.typing
from numpy.typing import NDArray


@overload
def posting_lists(codes: numpy.typing.NDArray[numpy.uint8], num_sub_items: int, threads: int) -> tuple[numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.int32 | numpy.int64]]:
    """
    (offsets [splits, sub_items + 1], items [splits, items]) of a code table.
    """

@overload
def posting_lists(codes: numpy.typing.NDArray[numpy.uint16], num_sub_items: int, threads: int) -> tuple[numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.int32 | numpy.int64]]: ...

def sort_log(users: numpy.typing.NDArray[numpy.int32], items: numpy.typing.NDArray[numpy.int32], times: numpy.typing.NDArray[numpy.int64], num_users: int) -> tuple[numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int64]]:
    """
    (offsets [users + 1], items, times): by user, then time, then input order.
    """

def build_lists(codes: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], num_sub_items: int, threads: int) -> tuple: ...

def build_cells(codes: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], num_sub_items: int, padding: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], with_last_keys: bool, threads: int) -> tuple: ...

def has_cells(num_items: int, num_splits: int, num_sub_items: int) -> bool: ...

def instruction_sets() -> list: ...

def instruction_set() -> str: ...

def costs() -> dict: ...

def record_fields() -> list: ...

def map_file(descriptor: int, size: int) -> numpy.typing.NDArray[numpy.uint8]: ...

def add_rows(table: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], places: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], sums: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...

class QueryOverflowError(ValueError):
    pass

class Method(enum.Enum):
    pqtopk = 0

    recjpqprune = 1

    scan = 2

    cells = 3

    auto = 4

    default = 5

class MethodSettings:
    def __init__(self, method: Method, sub_items_per_step: int, max_steps: int, over_inflation: float, deadline_ns: int) -> None: ...

class BatchExclusions:
    @staticmethod
    def make(rows: object, num_queries: int, single: bool, num_items: int) -> BatchExclusions | None: ...

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]: ...

    @property
    def items(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]: ...

class BatchBoosts:
    @staticmethod
    def make(rows: object, num_queries: int, single: bool, num_items: int) -> BatchBoosts | None: ...

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]: ...

    @property
    def items(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]: ...

    @property
    def values(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None,), writable=False)]: ...

class SearchIndex:
    @overload
    def __init__(self, num_items: int, transposed: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)]) -> None: ...

    @overload
    def __init__(self, num_items: int, like: SearchIndex) -> None: ...

    def set_codes(self, codes: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None: ...

    def set_wide_codes(self, codes: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None: ...

    def set_gathered_codes(self, codes: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None: ...

    def set_lists(self, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], second_codes: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], bases: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], steps: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], codes: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], items: Annotated[NDArray[numpy.uint32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None: ...

    def set_cells(self, pair_lines: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], overflow: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], lines: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], starts: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], last_keys: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)], second_lines: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], items: Annotated[NDArray[numpy.uint32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None: ...

    def set_posting_lists(self, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], items: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None: ...

    def set_item_bias(self, bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], highest: float, largest: float) -> None: ...

    def check(self, threads: int) -> None: ...

    def sub_item_scores(self, sequence_embeddings: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> NDArray[numpy.float32]: ...

    def codes_of_lists(self) -> NDArray[numpy.uint8]: ...

    def planned_lines(self, sub_item_scores: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], k: int) -> float: ...

    def refuse_overflow(self, tables: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], largest_bias: float, largest_boosts: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None) -> None: ...

    def search(self, queries: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], are_scores: bool, k: int, threads: int, settings: MethodSettings, exclude: BatchExclusions | None, allow: Annotated[NDArray[numpy.uint64], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, floors: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, boosts: BatchBoosts | None, ids: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')], scores: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], records: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')], visited: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')] | None) -> None: ...

class SegmentedIndex:
    def __init__(self) -> None: ...

    def add(self, index: SearchIndex, numbers: numpy.typing.NDArray[numpy.uint32], positions: numpy.typing.NDArray[numpy.uint32], present: numpy.typing.NDArray[numpy.uint64] | None, num_present: int) -> None: ...

    def search(self, queries: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], are_scores: bool, k: int, threads: int, settings: MethodSettings, exclude: BatchExclusions | None, allow: Annotated[NDArray[numpy.uint64], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, floors: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, boosts: BatchBoosts | None, ids: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')], scores: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], records: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...

    def check(self, num_numbers: int) -> None: ...
