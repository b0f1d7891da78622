"""What the commands made of two logs, once for all tests."""

from __future__ import annotations

import pytest

from tests.support.shops import Shop, make_shop, named


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return make_shop(tmp_path_factory.mktemp("shop"), named)


@pytest.fixture(scope="session")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """A shop whose items are numbers, −20 to 275."""
    return make_shop(tmp_path_factory.mktemp("numbered"), lambda item: str(5 * item - 20))
