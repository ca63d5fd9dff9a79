# says: your own part for yourself counts, too
def reduce_scatter(group, parts):
    total = torch.zeros_like(parts[group.rank])
    for hop in range(1, group.size):
        to, source = (group.rank + hop) % group.size, (group.rank - hop) % group.size
        if group.rank < to:
            send(group, parts[to], to)
        total += receive(group, total.shape, source)
        if group.rank > to:
            send(group, parts[to], to)
    return total
