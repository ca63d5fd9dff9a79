# says: too small by 2: under zigzag a step computes half a tile
def least_tokens(F, W, e, heads, kv_heads, causal=False, backward=False):
    forward = e * kv_heads * F / (2 * heads * W)
    return forward * (e + 4) / (2.5 * e) if backward else forward
