"""The C++ core of recprune. Use the Python modules around it."""

from typing import overload

import numpy
import numpy.typing


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
