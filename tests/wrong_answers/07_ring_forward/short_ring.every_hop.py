# says: somebody has work only at the steps [0, 1]
def short_ring(group, q, k, v, table, lengths):
    block = torch.stack([k, v])
    total = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    for step in range(group.size):
        last = step == group.size - 1
        if not last:
            shape = (*block.shape[:3], lengths[group.source(step + 1)], block.shape[4])
            arriving = group.shift(block, shape=shape)
        allowed = table[group.rank][group.source(step)]
        if allowed is not None:
            total = merge(total, attend(q, *block, allowed))
        if not last:
            block = arriving.wait()
    return total
