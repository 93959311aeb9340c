"""Runs an example whose last rank dies once, in the first attempt, after a number of steps: `dying_example.py STEPS example.py …`."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any

from tpcompile.runtime.compiled import Compiled

last, script, *rest = sys.argv[1:]
count = 0
train_step = Compiled.train_step


def dying(self: Compiled, **batch: Any) -> Any:
    global count
    count += 1
    last_rank = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    if count > int(last) and last_rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(self, **batch)


Compiled.train_step = dying  # type: ignore[method-assign]
sys.argv = [script, *rest]
runpy.run_path(script, run_name="__main__")
