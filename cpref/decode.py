r"""Generation with a key and value cache that is sharded over the ranks.

Prefill works like training: every rank has its shard of the prompt, and context parallel attention
fills the caches on the way. Then comes one token at a time, and with it one query for a long memory
of keys: exactly where the reduce-scatter idea pays. The keys stay. Every rank lets the query attend
to its own part of the cache, and only the partials travel: one vector and one number per head.

    rank 0    q x its keys  ->  partial 0  \
    rank 1    q x its keys  ->  partial 1   >  merged by lse: the attention over all keys
    rank 2    q x its keys  ->  partial 2  /

Source: Yang et al. 2024, Context Parallelism for Scalable Million-Token Inference (arXiv
2411.01783), section 3; the merge is that of `merge.py`.
"""

import hashlib
from functools import partial, reduce

import torch
from torch import Tensor

from .attention import context_parallel_attention
from .block import attend, empty_partial
from .comm import Group, GroupLike, resolve
from .layout import local_positions, place, shard
from .mask import Full
from .merge import Partial, merge
from .model import Decoder
from .tiles import Job, Tile


class ShardedCache:
    """The keys and values of all layers, each rank with its part.

    group: the ranks; layout: how the prompt is dealt out. The key and value of a new token go to
    the rank with the shortest cache, so that parts stay equal within one token.

    Raises ValueError for an unknown layout, or what `resolve` refuses as a group.
    """

    def __init__(self, group: GroupLike = None, layout: str = "zigzag"):
        self.group, self.layout = resolve(group), layout
        place(1, 1, layout)  # why: refuses an unknown layout here, not in the middle of a prompt
        self.length = self._prompt = 0
        self._layers: list[tuple[Tensor, Tensor]] = []

    @property
    def bytes(self) -> int:
        """What this rank holds."""
        return sum(x.nbytes for layer in self._layers for x in layer)

    def prefill(self, seq_len: int):
        """The attention for a forward over the prompt's shards, layer by layer; fills the cache.

        seq_len: tokens of the whole prompt. Returns attention(q, k, v) of this rank's shards,
        (B, H, S_local, D), to be called once for each layer, in order.
        Raises ValueError if the cache is not empty.
        """
        self.require_empty()
        self.length = self._prompt = seq_len
        whole = partial(
            context_parallel_attention, group=self.group, layout=self.layout, seq_len=seq_len
        )

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._layers.append((k, v))
            return whole(q, k, v)

        return attention

    def require_empty(self) -> None:
        """Raises ValueError if the cache holds a prompt already."""
        if self._layers:
            raise ValueError("the cache is not empty; prefill a new ShardedCache")

    def step(self):
        """The attention for a forward over one new token, the same on every rank.

        Returns attention(q, k, v) of that token, (B, H, 1, D), to be called once for each layer, in
        order. Raises ValueError if the cache is empty.
        """
        if not self._layers:
            raise ValueError("the cache is empty; prefill it with the prompt first")
        owner, layers = self._shortest(), iter(range(len(self._layers)))
        self.length += 1

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer = next(layers)
            if owner == self.group.rank:
                held_k, held_v = self._layers[layer]
                self._layers[layer] = torch.cat([held_k, k], 2), torch.cat([held_v, v], 2)
            return _attend_to_all(q, *self._layers[layer], self.group)

        return attention

    def _shortest(self) -> int:
        """The rank that takes the next token: known to all without asking."""
        lengths = place(self._prompt, self.group.size, self.layout).lengths()
        for _ in range(self.length - self._prompt):
            lengths[lengths.index(min(lengths))] += 1
        return lengths.index(min(lengths))


def _attend_to_all(q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
    """Attention of q, which every rank has, over the keys of all ranks. (B, H, Sq, Dv)."""
    mine = empty_partial(q, v)
    if k.shape[2]:
        rows, keys = slice(0, q.shape[2]), slice(0, k.shape[2])
        attend(mine, q, k, v, (Tile(rows, keys, "full"),), _job(q, k))
    packed = torch.cat([mine.out, mine.lse.unsqueeze(-1)], -1)  # one message: out and its lse
    arrived = group.all_gather(packed, label="decode partials").wait()
    partials = [Partial(x[..., :-1], x[..., -1]) for x in arrived]
    return reduce(merge, partials).out.to(q.dtype)


def _job(q: Tensor, k: Tensor) -> Job:
    one = place(1, 1, "contiguous")  # why: tiles are given, so no placement is asked for any
    return Job(one, one, Full(), q.shape[-1] ** -0.5, k.shape[1], q.dtype)


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: Tensor,
    new_tokens: int,
    *,
    group: GroupLike = None,
    layout: str | None = None,
    cache: ShardedCache | None = None,
) -> Tensor:
    """The prompt continued by `new_tokens` tokens, each the likeliest; the same on every rank.

    prompt: (B, S) int64, whole, the same on every rank; S may be shorter than P. new_tokens: from 0
    on. cache: pass an empty `ShardedCache` to look at it afterwards; group and layout are then its
    own and may be left out. Otherwise None means the default group, and "zigzag".
    Returns (B, S + new_tokens) int64.
    Raises ValueError, on every rank, if the prompt is empty or new_tokens negative, if the cache is
    not empty or has another group or layout, or if the ranks' arguments differ.

    Moves in prefill what the ring moves, then B·H·(Dv + 1)·4·(P-1) bytes per layer and token.
    """
    cache = ShardedCache(group, layout or "zigzag") if cache is None else cache
    comm = cache.group
    comm.agree("generate", lambda: (_terms(prompt, new_tokens, group, layout, cache), None))
    seq_len = prompt.shape[1]
    positions = local_positions(seq_len, group=comm, layout=cache.layout, device=prompt.device)
    mine = shard(prompt, 1, group=comm, layout=cache.layout)
    logits = model(mine, positions, cache.prefill(seq_len))
    logits = _last(logits, positions, seq_len, comm)
    tokens = prompt
    for position in range(seq_len, seq_len + new_tokens):
        new = logits.argmax(-1)  # (B, 1)
        tokens = torch.cat([tokens, new], 1)
        if position < seq_len + new_tokens - 1:
            at = torch.tensor([position], device=prompt.device)
            logits = model(new, at, cache.step())
    return tokens


def _terms(
    prompt: Tensor, new_tokens: int, group: GroupLike, layout: str | None, cache: ShardedCache
) -> dict[str, object]:
    """What has to be equal on all ranks. Raises ValueError for what no rank could do."""
    if prompt.dim() != 2 or not prompt.shape[1]:
        raise ValueError(f"prompt has shape {tuple(prompt.shape)}; it must be (B, S), S at least 1")
    if prompt.dtype != torch.int64:
        raise ValueError(f"prompt has dtype {prompt.dtype}; it must be torch.int64")
    if not isinstance(new_tokens, int) or new_tokens < 0:
        raise ValueError(f"new_tokens is {new_tokens}; it must be a whole number of at least 0")
    if group is not None and resolve(group) is not cache.group:
        raise ValueError("group is not that of the cache; leave it out, or make the cache with it")
    if layout not in (None, cache.layout):
        raise ValueError(f"layout is {layout!r}; it must be that of the cache, {cache.layout!r}")
    cache.require_empty()
    digest = hashlib.blake2b(prompt.cpu().numpy().tobytes(), digest_size=8).hexdigest()
    shape = f"{tuple(prompt.shape)}, digest {digest}"
    return {"prompt": shape, "new_tokens": new_tokens, "layout": cache.layout}


def _last(logits: Tensor, positions: Tensor, seq_len: int, group: Group) -> Tensor:
    """(B, 1, vocab): the logits of the last token, from the one rank that has it."""
    last = logits.new_zeros(logits.shape[0], 1, logits.shape[2])
    if len(positions) and positions[-1] == seq_len - 1:
        last = logits[:, -1:]
    return sum(group.all_gather(last, label="last logits").wait())
