# says: the sum is right, but a part has been written into
def reduce_scatter(group, parts):
    total = parts[group.rank]
    for hop in range(1, group.size):
        to, source = (group.rank + hop) % group.size, (group.rank - hop) % group.size
        if group.rank < to:
            send(group, parts[to], to)
        total += receive(group, total.shape, source)
        if group.rank > to:
            send(group, parts[to], to)
    return total
