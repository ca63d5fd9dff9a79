# says: waits for a message that rank 0 never sends
def around(group, block, needs):
    total = torch.zeros_like(block)
    for step in range(group.size):
        source = (group.rank - step) % group.size
        if not needs[source]:
            continue
        total += block
        block = group.shift(block).wait()
    return total
