"""`python -m tpcompile` is the command `tpcompile`."""

import sys

from tpcompile.cli import main

sys.exit(main())
