# says: after 1 it has been everywhere
def around(group, block, needs):
    total = torch.zeros_like(block)
    for step in range(group.size):
        if needs[(group.rank - step) % group.size]:
            total += block
        block = group.shift(block).wait()
    return total
