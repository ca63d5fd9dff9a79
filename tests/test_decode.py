from functools import partial

import pytest
import torch

import cpref
from cpref.decode import ShardedCache, generate
from cpref.model import Config, Decoder

pytestmark = pytest.mark.slow

CONFIG = Config(vocab=40, layers=2, width=32, heads=4, kv_heads=2, hidden=48)


def model():
    return Decoder(CONFIG, seed=3).double()


def prompt(seq_len, batch=2):
    return torch.randint(40, (batch, seq_len), generator=torch.Generator().manual_seed(seq_len))


def without_cache(tokens, new_tokens):
    """The plain definition: the whole sequence again for every token."""
    decoder = model()
    for _ in range(new_tokens):
        logits = decoder(tokens, torch.arange(tokens.shape[1]))
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return tokens


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("seq_len", [1, 2, 17, 32])
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_generated_tokens_are_those_of_one_rank(ranks, seq_len, layout):
    expected = without_cache(prompt(seq_len), 8)
    for tokens in cpref.run_local(
        lambda group: generate(model(), prompt(seq_len), 8, group=group, layout=layout), ranks
    ):
        assert torch.equal(tokens, expected)


@pytest.mark.distributed
@pytest.mark.parametrize("seq_len", [1, 2, 13])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_real_ranks_generate_the_tokens_of_one(processes, ranks, seq_len):
    expected = without_cache(prompt(seq_len), 6)
    for tokens in processes(ranks)(continued, seq_len, 6):
        assert torch.equal(tokens, expected)


def continued(group, seq_len, new_tokens):
    return generate(model(), prompt(seq_len), new_tokens, group=group)


def cache_bytes(group, new_tokens, seq_len=36):
    cache = ShardedCache(group)
    generate(model(), prompt(seq_len), new_tokens, cache=cache)
    return cache.bytes


TOKEN = 2 * 2 * 2 * 2 * 8 * 8  # bytes: k and v, layers, batch, kv_heads, head dim, of a float64


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_rank_holds_its_share_of_the_cache(world, ranks):
    assert world(cache_bytes, ranks, 1) == [36 * TOKEN // ranks] * ranks


def test_new_tokens_are_shared_out_evenly():
    each = cpref.run_local(cache_bytes, 4, 7)  # six of the seven are attended to again
    assert sum(each) == (36 + 6) * TOKEN
    assert max(each) - min(each) <= TOKEN


def test_a_step_sends_a_vector_and_a_number_per_head():
    def sent(group):
        cache = ShardedCache(group)
        generate(model(), prompt(32), 1, group=group, cache=cache)
        group.traffic.reset()
        model()(torch.zeros(2, 1, dtype=torch.int64), torch.tensor([32]), cache.step())
        return group.traffic.bytes

    per_layer = 2 * 4 * (8 + 1) * 8 * 3  # batch, heads, D and the lse, bytes, other ranks
    assert cpref.run_local(sent, 4) == [2 * per_layer] * 4


def test_no_new_token_gives_the_prompt():
    tokens = cpref.run_local(lambda group: generate(model(), prompt(5), 0, group=group), 2)[0]
    assert torch.equal(tokens, prompt(5))


@pytest.mark.parametrize(
    ("tokens", "new", "words"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), 1, "S at least 1"),
        (torch.zeros(4, dtype=torch.int64), 1, "must be"),
        (torch.zeros(1, 4, dtype=torch.int64), -1, "new_tokens is -1"),
        (torch.zeros(1, 4, dtype=torch.int64), 1.5, "new_tokens is 1.5"),
        (torch.zeros(1, 4), 1, "prompt has dtype torch.float32"),
    ],
)
def test_what_cannot_be_continued_is_refused(tokens, new, words):
    with pytest.raises(ValueError, match=words):
        cpref.run_local(lambda group: generate(model(), tokens, new, group=group), 2)


def test_a_cache_is_used_in_order():
    def early(group):
        ShardedCache(group).step()

    def twice(group):
        cache = ShardedCache(group)
        generate(model(), prompt(4), 1, group=group, cache=cache)
        generate(model(), prompt(4), 1, group=group, cache=cache)

    for fn, words in ((early, "is empty"), (twice, "is not empty")):
        with pytest.raises(ValueError, match=words):
            cpref.run_local(fn, 2)


def refused(group, **differs):
    """What this rank hears when rank 1 calls with other arguments."""
    options = {"prompt": prompt(4), "new_tokens": 2, "layout": "zigzag"}
    try:
        generate(model(), group=group, **(options | (differs if group.rank == 1 else {})))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ({"prompt": prompt(5)}, "prompt is (2, 4), digest"),
        ({"prompt": prompt(4) + 1}, "prompt is (2, 4), digest"),
        ({"new_tokens": 3}, "new_tokens is 2 on ranks 0, 2, 3 on rank 1"),
        ({"layout": "striped"}, "layout is zigzag on ranks 0, 2, striped on rank 1"),
        ({"new_tokens": -1}, "new_tokens is -1"),
    ],
    ids=["longer", "other tokens", "new_tokens", "layout", "impossible"],
)
def test_ranks_that_ask_for_different_things_are_all_refused(world, differs, words):
    for said in world(partial(refused, **differs), 3):
        assert said and words in said


def test_a_cache_of_another_group_or_layout_is_refused_on_every_rank():
    def other_group(group):
        cache = ShardedCache(group.subgroup((0, 1)))
        generate(model(), prompt(4), 1, group=group, cache=cache)

    def other_layout(group):
        generate(model(), prompt(4), 1, layout="zigzag", cache=ShardedCache(group, "striped"))

    for fn, words in ((other_group, "not that of the cache"), (other_layout, "that of the cache")):
        with pytest.raises(ValueError, match=words):
            cpref.run_local(fn, 2)


def test_a_cache_refuses_an_unknown_layout():
    with pytest.raises(ValueError, match="layout is 'snake'"):
        cpref.run_local(lambda group: ShardedCache(group, "snake"), 2)
