"""What `F.scaled_dot_product_attention` becomes inside `context_parallel`, and what is refused."""

from collections.abc import Callable
from functools import partial
from inspect import signature
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .attention import context_parallel_attention
from .buffers import Buffers
from .comm import Group, GroupLike
from .layout import place
from .mask import Causal, Full


class Intercept(TorchFunctionMode):
    """Turns `F.scaled_dot_product_attention` into the sharded one. Modes belong to their thread."""

    def __init__(
        self,
        mesh: GroupLike,
        group: Group,
        strategy: str,
        layout: str,
        lengths: set[int],
        buffers: Buffers,
    ):
        super().__init__()
        self.buffers = buffers
        self._group, self._layout, self._lengths = group, layout, lengths
        self._attention = partial(
            context_parallel_attention, group=mesh, strategy=strategy, layout=layout
        )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _ATTENTION:
            return self._sharded(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            return self._multihead(*args, **(kwargs or {}))
        if func in _LOCAL:
            raise NotImplementedError(
                f"{func.__name__} would attend within this rank's shard only; under "
                "context_parallel call F.scaled_dot_product_attention, or "
                "cpref.context_parallel_attention with a mask"
            )
        return self.buffers.call(func, args, kwargs or {})

    def _multihead(self, *args, **kwargs) -> tuple[Tensor, None]:
        """F.multi_head_attention_forward, which nn.MultiheadAttention and nn.Transformer* call."""
        given = signature(F.multi_head_attention_forward).bind(*args, **kwargs)
        given.apply_defaults()
        for name, wanted, remedy in _MULTIHEAD:
            value = given.arguments[name]
            if value is not wanted:
                shown = "a tensor" if isinstance(value, Tensor) else value
                raise NotImplementedError(
                    f"{name} is {shown}; under context_parallel it must be {wanted}: {remedy}"
                )
        return _inside_multihead(self._sharded)(*given.args)

    def _sharded(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise NotImplementedError(
                "attn_mask is a tensor of one rank's shard and cannot speak of the others' keys; "
                "call cpref.context_parallel_attention(mask=...) with Documents, SlidingWindow or "
                "a function of global positions"
            )
        if dropout_p:
            raise NotImplementedError(
                f"dropout_p is {dropout_p}; dropout of attention weights is not supported under "
                "context_parallel: use 0, or dropout on the output"
            )
        if not enable_gqa and query.dim() == 4 and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True"
            )
        mask = Causal() if is_causal else Full()
        seq_len = self._global_length(query)
        kv_seq_len = self._global_length(key)
        return self._attention(
            query, key, value, mask=mask, scale=scale, seq_len=seq_len, kv_seq_len=kv_seq_len
        )

    def _global_length(self, x: Tensor) -> int:
        """The length of a buffer of which x may be this rank's shard, else P times its own."""
        local, ranks, rank = x.shape[-2], self._group.size, self._group.rank
        fitting = {n for n in self._lengths if place(n, ranks, self._layout).length(rank) == local}
        return fitting.pop() if len(fitting) == 1 else local * ranks


# Attention that this rank would compute of its own shard alone, and that is not rewritten here.
_LOCAL = {
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
    torch.ops.higher_order.flex_attention,
}
_ATTENTION = {
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
_MULTIHEAD = (  # arguments of F.multi_head_attention_forward: what they must be, and what to do
    ("need_weights", False, "the weights of all keys are on no rank; pass need_weights=False"),
    ("key_padding_mask", None, "leave out padding, or mask its tokens in the loss"),
    ("bias_k", None, "each rank would add a key; use add_bias_kv=False"),
    ("bias_v", None, "each rank would add a value; use add_bias_kv=False"),
    ("add_zero_attn", False, "each rank would add a key; use add_zero_attn=False"),
    ("static_k", None, "pass key"),
    ("static_v", None, "pass value"),
)


def _inside_multihead(attention: Callable[..., Tensor]) -> Callable:
    """F.multi_head_attention_forward with `attention` in place of scaled_dot_product_attention.

    why: while a mode handles a call, the calls within are not shown to it. So the function is made
    again, of the same code, with another meaning of two of the names that it looks up.
    """
    function = F.multi_head_attention_forward
    names = {
        **function.__globals__,
        "has_torch_function": lambda _: False,
        "scaled_dot_product_attention": attention,
    }
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)
