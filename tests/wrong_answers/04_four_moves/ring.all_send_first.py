# says: deadlock on 2 ranks: rank 0 sends to rank 1, which never receives it
def ring_shift(group, block):
    send(group, block, (group.rank + 1) % group.size)
    return receive(group, block.shape, (group.rank - 1) % group.size)
