"""Run the tests of the native core against a build with sanitizers: `make sanitize`.

After the build's folder, other tests may be given.
"""

from __future__ import annotations

import sys

import pytest

if __name__ == "__main__":
    # The editable install would put itself before the build that is to be tested.
    sys.meta_path = [
        finder for finder in sys.meta_path if "editable" not in type(finder).__module__
    ]
    sys.path.insert(0, sys.argv[1])
    import recprune

    assert sys.argv[1] in recprune.__file__
    tests = ["tests/test_native.py", "tests/search", "tests/live", "tests/test_strangers.py"]
    sys.exit(pytest.main([*(sys.argv[2:] or tests), "-q", "-p", "no:cacheprovider"]))
