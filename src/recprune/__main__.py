"""`python -m recprune` is the `recprune` command."""

import sys

from recprune.cli import main

sys.exit(main())
