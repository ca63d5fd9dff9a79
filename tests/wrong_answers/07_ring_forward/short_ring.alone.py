# says: others may need what passes through
def short_ring(group, q, k, v, table, lengths):
    P, block, here = group.size, torch.stack([k, v]), 0
    total = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    needed = [s for s in range(1, P) if table[group.rank][(group.rank - s) % P] is not None]
    for step in [*needed, None]:
        if step:
            shape = (*block.shape[:3], lengths[group.source(step)], block.shape[4])
            arriving = group.shift(block, hops=step - here, shape=shape)
        allowed = table[group.rank][group.source(here)]
        if allowed is not None:
            total = merge(total, attend(q, *block, allowed))
        if step:
            block, here = arriving.wait(), step
    return total
