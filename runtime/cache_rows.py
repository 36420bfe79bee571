"""What stands where in the arrays of a CacheState: compiled code takes two plain arrays, which is several times faster than a
tuple of many.

`ints` (rows, columns) i64 and `reals` (rows, columns) f64 have a column for each item and a few more behind them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NOWHERE = -1
N_LISTS = 4

# Rows of `ints`: a number for each item, but for CONFIG (places below), the rings BEFORE and AFTER, and the last five.
CONFIG, SIZE, RESIDENT, CALLED, STAMP, HEAP, AT, BEFORE, AFTER, IN_LIST, LIST_SIZE, OWN, MISSED, VICTIMS, UPLOADS = range(15)
INT_ROWS = 15
# Places in the row CONFIG.
N_ITEMS, KIND, CAPACITY, USED, KEEP_WHOLE, CALL, CLOCK, HEAP_SIZE, RANDOM_STATE, TOKENS, PERIOD, PICKED = range(12)
MIN_COLUMNS = 12
# Rows of `reals`, and the places in its row NUMBERS.
NUMBERS, COUNT, PRIORITY = range(3)
REAL_ROWS = 3
DECAY, INCREMENT, AGE, TARGET = range(4)
# Lists by policy.
RECENT = 0
PROBATION, PROTECTED = 0, 1
T1, T2, B1, B2 = range(4)
SMALL, MAIN, GHOST = range(3)
