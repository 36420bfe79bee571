"""What stands where in the arrays that the compiled callback works on: all i64, addresses among them.

The root is what the callback is called with.  A layer has a row of `LAYER` columns, three of `PART` columns and up to three
of `BIAS`.
"""

from __future__ import annotations

# Root: addresses of functions, of tables, and numbers.
(
    TENSOR_GET,
    SET_ASYNC,
    SYNCHRONIZE,
    COPY_ASYNC,
    GRAPH_COMPUTE,
    READ,
    WRITE,
    YIELD,
    CLOCK_GETTIME,
    LAYERS,
    N_LAYERS,
    PARTS,
    BIASES,
    NAME_KEYS,
    NAME_VALUES,
    NAME_BYTES,
    NAME_SIZE,
    COUNTS,
    PHASE,
    IDS,
    IDS_BYTES,
    SHORT,
    HOME_BASE,
    HOME_TENSOR,
    SOURCE_TENSOR,
    TARGET_TENSOR,
    COPY_BACKEND,
    OTHER_BACKEND,
    TURN,
    MODE,
    HAS_CPU,
    REQUEST,
    CPU_INPUT,
    CPU_EXPERTS,
    CPU_BACKEND,
    EVENT_FD,
    SPIN_NS,
    SHARE,
    AT_NAME,
    AT_DATA,
    AT_NE,
    AT_NB,
    AT_TYPE,
    CLOCK_ROOM,
    EVENT_ROOM,
    ERROR,
    ERROR_LAYER,
    ERROR_VALUE,
    GRAPH_BACKEND,
    EVENT_RECORD,
    EVENT_WAIT,
    COPIED_EVENT,
    OTHER_EVENT,
    PICKED,
    NAMED,
    AT_VIEW_SRC,
    AT_VIEW_OFFS,
    AHEAD,
    STAGE_BEGUN,
    SET_2D_ASYNC,
    FIRST_WORDS,
    IN_USE,
    PICKED_BYTES,
    WAIT_AT,
    WAIT_FUNCTION,
    IS_HELD,
    KEPT_EVENT,
) = range(67)
ROOT_SIZE = 67

# Layer.
(
    N_EXPERT,
    TOP_K,
    INTS,
    COLUMNS,
    REALS,
    TABLE,
    TABLE_COLUMNS,
    ASK,
    ROW_ROOM,
    IS_STAGED,
    SERVED,
    TOPK_NODE,
    INPUT_NODE,
    N_BIASES,
    GRAPHS,
    CPU_ROWS,
    ROW_BYTES,
    ABSENT_NOW,
    IDS_DATA,
    IS_PICKED,
    N_EVEN,
    DISTINCT_NOW,
) = range(22)
LAYER = 22

# What is guessed ahead (`pool_ahead.py`): of one layer at a time.  STATE is a number of the request and what became of it.
(
    STATE,
    FOR_LAYER,
    MOST_AHEAD,
    N_BROUGHT,
    GUESSES,
    GUESS_BACKEND,
    FETCH_BACKEND,
    FETCHED_EVENTS,
    INPUT_TENSORS,
    SCORES,
    GUESS_GRAPHS,
    GATE,
    AHEAD_FD,
    AHEAD_ROOM,
    AHEAD_CLOCK,
    AHEAD_STOP,
    AHEAD_STATUS,
    IS_ASLEEP,
    IS_BUSY,
) = range(19)
AHEAD_SIZE = 19
IDLE, REQUESTED, CLAIMED, DONE_AHEAD = range(4)
N_STATES = 4
MOST_GUESSES = 16
MOST_IN_VAIN = 3
"""Experts brought ahead for each that is used: the link is idle meanwhile, so a miss less is worth more than that."""

NAMED_BYTES = 512
"""Of each layer's room for the slots of a row: top-k of 128 at most."""
MOST_SORTED = 1024
"""Experts of a layer that are sorted within a block of threads; of more, ids pass through the result while it is made
(ggml/src/ggml-cuda/argsort.cu of llama.cpp build 11549)."""

# Part.
WEIGHT, STRIDE, HOST_AT, HOST_STRIDE, SLOTS_AT, STAGE_AT = range(6)
PART = 6
N_PARTS = 3

# Bias.
BIAS_TENSOR, BIAS_DATA, BIAS_STRIDE, BIAS_SLOTS_AT, BIAS_ROWS = range(5)
BIAS = 5

# Request to the CPU's thread.
ASKED, DONE, WHICH, HOW_MANY, STOP, STATUS = range(6)
REQUEST_SIZE = 6

# What a name is.
TOPK_NAME, INPUT_NAME, ROUTER_NAME, OUTPUT_NAME = range(4)
NAME_CAPACITY = 64  # GGML_MAX_NAME
MOST_WORDS = 4
"""Different beginnings of names, of 8 bytes each: most nodes have another one, and need not be looked up."""

# Errors.
NO_ERROR, WRONG_IDS, TOO_MANY_IDS, CPU_FAILED = range(4)
