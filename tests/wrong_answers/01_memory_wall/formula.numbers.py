# says: a count of numbers; a float32 has 4 bytes
def block_bytes_per_token(width, heads, kv_heads, hidden):
    kv_width = kv_heads * (width // heads)
    mixer = width + (width + 2 * kv_width) + width + heads + width
    return 2 * (2 * width + 1) + mixer + width + 4 * hidden
