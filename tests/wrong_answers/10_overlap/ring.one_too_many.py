# says: blocks are posted;
def ring(group, q, block, tile, join):
    total = None
    for _ in range(group.size):
        arriving = group.shift(block)
        part = tile(q, block)
        total = part if total is None else join(total, part)
        block = arriving.wait()
    return total
