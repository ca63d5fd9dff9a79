# says: deadlock on 4 ranks
def reduce_scatter(group, parts):
    total = parts[group.rank].clone()
    for hop in range(1, group.size):
        to, source = (group.rank + hop) % group.size, (group.rank - hop) % group.size
        if group.rank % 2 == 0:
            send(group, parts[to], to)
        total += receive(group, total.shape, source)
        if group.rank % 2:
            send(group, parts[to], to)
    return total
