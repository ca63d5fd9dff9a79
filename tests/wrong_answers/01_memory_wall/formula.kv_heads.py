# says: right but for the heads of k and v: there are kv_heads of them
def block_bytes_per_token(width, heads, kv_heads, hidden):
    mixer = width + 3 * width + width + heads + width
    return 4 * (2 * (2 * width + 1) + mixer + width + 4 * hidden)
