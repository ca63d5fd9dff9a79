# says: a copy belongs beside its original
def attention(q, k, v, ranks, to_heads, to_tokens):
    times = ranks // gcd(k.shape[1], ranks)
    q, k, v = (to_heads(x) for x in (q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return to_tokens(out)
