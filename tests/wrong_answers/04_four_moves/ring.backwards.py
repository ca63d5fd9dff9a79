# says: the block of the rank after this one: it goes the other way round
def ring_shift(group, block):
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    if group.rank % 2 == 0:
        send(group, block, before)
        return receive(group, block.shape, after)
    arrived = receive(group, block.shape, after)
    send(group, block, before)
    return arrived
