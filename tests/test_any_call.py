"""Whatever is asked for, out and all three gradients are those of float64 on one process."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpref
from cpref.attention import STRATEGIES
from cpref.exactness import judge, relative_error
from cpref.mask import as_mask

from .sharded import draw, for_strategy, sharded

pytestmark = pytest.mark.slow

MOST = 26  # tokens


def every_third(q, kv):
    return (q + kv) % 3 == 0


def early_keys(q, kv):
    return kv < 5


@st.composite
def documents(data, seq_len: int) -> cpref.Documents:
    cuts = data(st.lists(st.integers(0, seq_len), max_size=5)) if seq_len else []
    ends = [*sorted(cuts), seq_len]
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    inner = data(st.sampled_from([cpref.Causal(), cpref.Full()]))
    return cpref.Documents([length for length in lengths if length], inner=inner)


@st.composite
def calls(data) -> dict:
    """All that one call may differ in; lengths are global."""
    seq_len = data(st.integers(1, MOST))
    same_length = st.one_of(
        st.sampled_from([cpref.Causal(), every_third, early_keys]),
        st.integers(1, MOST).map(cpref.SlidingWindow),
        documents(seq_len),
    )
    any_length = st.sampled_from([cpref.Full(), every_third, early_keys])
    crosses = data(st.booleans())
    kv_heads, repeats = data(st.sampled_from([(1, 4), (2, 2), (4, 1), (3, 1), (1, 1), (5, 2)]))
    return {
        "ranks": data(st.integers(1, 5)),
        "strategy": data(st.sampled_from(tuple(STRATEGIES))),
        "layout": data(st.sampled_from(["contiguous", "zigzag", "striped"])),
        "mask": data(any_length if crosses else same_length),
        "overlap": data(st.booleans()),
        "shape": {
            "batch": data(st.integers(1, 2)),
            "heads": kv_heads * repeats,
            "kv_heads": kv_heads,
            "seq_len": seq_len,
            "kv_seq_len": data(st.integers(1, MOST)) if crosses else seq_len,
            "head_dim": data(st.sampled_from([1, 3, 8])),
            "v_head_dim": data(st.sampled_from([1, 3, 8])),
            "seed": data(st.integers(0, 5)),
        },
    }


def splits_heads(call: dict) -> bool:
    """Whether the strategy can deal the heads out: every other call is to be refused."""
    columns = {"ulysses": call["ranks"], "hybrid": 2 if call["ranks"] % 2 == 0 else 1}
    return call["shape"]["heads"] % columns.get(call["strategy"], 1) == 0


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(calls())
def test_any_call_is_exact_or_refused(call):
    tensors = draw(torch.float64, **call["shape"])
    options = {key: call[key] for key in ("layout", "mask", "overlap", "strategy")}

    def each(group):
        return sharded(for_strategy(group, call["strategy"]), *tensors, **options)

    if not splits_heads(call):
        with pytest.raises(ValueError, match="heads"):
            cpref.run_local(each, call["ranks"])
        return
    exact = judge(*tensors, mask=as_mask(call["mask"]))
    for results in cpref.run_local(each, call["ranks"]):
        compared = zip(("out", "dq", "dk", "dv"), results, exact.results, exact.sizes, strict=True)
        for name, got, right, size in compared:
            assert relative_error(got, right, size) < 1e-13, name
