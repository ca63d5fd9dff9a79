"""A small decoder of the Llama shape, which does not know whether its sequence is sharded.

RMSNorm, rotary positions, grouped-query attention, SwiGLU. Two things alone depend on where a token
lives: its position, which the caller passes, and attention, which the caller passes too. Everything
else works on each token by itself.

Sources: Touvron et al. 2023, Llama 2 (arXiv 2307.09288); Su et al. 2021, RoPE (arXiv 2104.09864);
Zhang and Sennrich 2019, RMSNorm (arXiv 1910.07467); Shazeer 2020, SwiGLU (arXiv 2002.05202).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain causal attention of a sequence that is whole. q: (B, H, S, D); k, v: (B, Hkv, S, D)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@dataclass(frozen=True)
class Config:
    """vocab: tokens known; layers, width: depth and size of a token's vector; heads, kv_heads: of
    attention, heads divisible by kv_heads, width by heads; hidden: width of the feed-forward."""

    vocab: int = 256
    layers: int = 2
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 344
    rope_base: float = 10_000.0

    def __post_init__(self):
        if self.width % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"width={self.width}, heads={self.heads}, kv_heads={self.kv_heads}: the width must "
                "be divisible by the heads, and the heads by the kv_heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"the head dim is {self.head_dim}; rotary positions need an even one")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class Decoder(nn.Module):
    """tokens (B, S_local) and their global positions to logits (B, S_local, vocab).

    The weights follow from `seed` alone, so that ranks have the same ones without sending any.
    recompute: keep only the input of each block for backward, and run the block again there.
    """

    def __init__(self, config: Config, seed: int = 0, *, recompute: bool = False):
        super().__init__()
        self.config, self.recompute = config, recompute
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        draw = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02, generator=draw)

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Attention = causal_attention
    ) -> Tensor:
        """tokens: (B, S_local) int64; positions: (S_local,) or (B, S_local) int64, global, as
        `cpref.local_positions` gives them; attention: (q, k, v) -> out on (B, H, S_local, D)."""
        return self.head(self.features(tokens, positions, attention))  # (B, S_local, vocab)

    def features(
        self, tokens: Tensor, positions: Tensor, attention: Attention = causal_attention
    ) -> Tensor:
        """What the head makes logits of, (B, S_local, width); arguments as of forward."""
        x = self.embedding(tokens)  # (B, S_local, width)
        rotation = rotary(positions, self.config.head_dim, self.config.rope_base)
        for block in self.blocks:
            x = self._run(block, x, rotation, attention)
        return self.norm(x)

    def _run(self, block: nn.Module, *inputs: object) -> Tensor:
        if not self.recompute:
            return block(*inputs)
        # why: a block draws no random number that a second run would have to draw again
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)


class Block(nn.Module):
    """Attention, then feed-forward, each on the normalised sum of all before."""

    def __init__(self, config: Config):
        super().__init__()
        self.norm_attention = nn.RMSNorm(config.width)
        self.mixer = Mixer(config)
        self.norm_feed_forward = nn.RMSNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rotation: Tensor, attention: Attention) -> Tensor:
        x = x + self.mixer(self.norm_attention(x), rotation, attention)
        return x + self.feed_forward(self.norm_feed_forward(x))


class Mixer(nn.Module):
    """The one place where tokens meet."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        kv_width = config.kv_heads * config.head_dim
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, kv_width, bias=False)
        self.v = nn.Linear(config.width, kv_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, attention: Attention) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, S_local, D)
        k = self.k(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)  # (B, Hkv, S_local, D)
        v = self.v(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        out = attention(rotate(q, rotation), rotate(k, rotation), v)
        return self.out(out.transpose(1, 2).flatten(2))  # (B, S_local, width)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def rotary(positions: Tensor, head_dim: int, base: float = 10_000.0) -> Tensor:
    """The cosines and sines of the positions' angles: (2, ..., S, D/2) float32.

    positions: (S,) or (B, S), any integers. Angles are computed in float64: at position 1,000,000
    float32 knows an angle only to a few hundredths.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    angle = positions.unsqueeze(-1) * base**-exponent  # (..., S, D/2)
    return torch.stack([angle.cos(), angle.sin()]).float()


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """x (B, H, S, D) with each pair of features (i, i + D/2) turned by its position's angle."""
    cos, sin = rotation.to(x.dtype)
    if cos.dim() == 3:  # (B, S, D/2): one row of positions for each sequence of the batch
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
