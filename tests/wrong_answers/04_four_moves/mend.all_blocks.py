# says: the sum of all blocks: add only those that are needed
def around(group, block, needs):
    total = torch.zeros_like(block)
    for step in range(group.size):
        total += block
        if step < group.size - 1:
            block = group.shift(block).wait()
    return total
