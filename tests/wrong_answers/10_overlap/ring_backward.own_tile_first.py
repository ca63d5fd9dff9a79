# says: what hides the last hop?
def ring_backward(group, block, tile):
    own, arriving = tile(block), group.shift(block)
    for step in range(1, group.size):
        held = arriving.wait()
        if step < group.size - 1:
            arriving = group.shift(held)
        grads = tile(held)
        if step > 1:
            grads = grads + behind.wait()
        behind = group.shift(grads)
    return own + behind.wait()
