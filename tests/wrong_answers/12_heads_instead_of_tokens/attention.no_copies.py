# says: heads cannot be dealt to
def attention(q, k, v, ranks, to_heads, to_tokens):
    q, k, v = (to_heads(x) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return to_tokens(out)
