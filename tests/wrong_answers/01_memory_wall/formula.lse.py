# says: without the lse of attention: one number for each head
def block_bytes_per_token(width, heads, kv_heads, hidden):
    kv_width = kv_heads * (width // heads)
    mixer = width + (width + 2 * kv_width) + width + width
    return 4 * (2 * (2 * width + 1) + mixer + width + 4 * hidden)
