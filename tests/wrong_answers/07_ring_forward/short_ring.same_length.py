# says: numbers of torch.float32 from rank
def short_ring(group, q, k, v, table, lengths):
    P, block, here = group.size, torch.stack([k, v]), 0
    total = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    needed = [s for s in range(1, P) if any(table[r][(r - s) % P] is not None for r in range(P))]
    for step in [*needed, None]:
        if step:
            arriving = group.shift(block, hops=step - here)
        allowed = table[group.rank][group.source(here)]
        if allowed is not None:
            total = merge(total, attend(q, *block, allowed))
        if step:
            block, here = arriving.wait(), step
    return total
