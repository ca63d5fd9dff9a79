# says: it stands still 2 times, 1 of which nothing can hide
def ring_backward(group, block, tile):
    arriving, grads = group.shift(block), None
    for step in range(1, group.size):
        held = arriving.wait()
        if step < group.size - 1:
            arriving = group.shift(held)
        grads = tile(held) if grads is None else tile(held) + grads
        grads = group.shift(grads).wait()
    return tile(block) + grads
