# says: the final hop home is missing
def ring_backward(group, block, tile):
    arriving, behind = group.shift(block), None
    for step in range(1, group.size):
        held, last = arriving.wait(), step == group.size - 1
        arriving = None if last else group.shift(held)
        grads = tile(held)
        if behind:
            grads = grads + behind.wait()
        behind = None if last else group.shift(grads)
    return tile(block) + grads
