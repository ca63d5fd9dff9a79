# says: it posts when the tile is already over
def ring(group, q, block, tile, join):
    total = tile(q, block)
    for _ in range(1, group.size):
        block = group.shift(block).wait()
        total = join(total, tile(q, block))
    return total
