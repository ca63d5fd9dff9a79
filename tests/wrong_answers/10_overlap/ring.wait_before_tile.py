# says: it waits for a block before it computes the tile
def ring(group, q, block, tile, join):
    total = None
    for step in range(group.size):
        held = block
        if step < group.size - 1:
            block = group.shift(block).wait()
        part = tile(q, held)
        total = part if total is None else join(total, part)
    return total
