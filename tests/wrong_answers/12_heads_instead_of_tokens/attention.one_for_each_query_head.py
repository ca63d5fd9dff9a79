# says: k goes to the exchange with 8 heads; 2 are enough
def attention(q, k, v, ranks, to_heads, to_tokens):
    times = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(times, 1) for x in (k, v))
    q, k, v = (to_heads(x) for x in (q, k, v))
    return to_tokens(F.scaled_dot_product_attention(q, k, v, is_causal=True))
