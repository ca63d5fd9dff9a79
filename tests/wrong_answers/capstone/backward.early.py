# says: that of rank r + 1's tokens
def backward(grad_out, q, k, v, out, lse, *, group, layout, mask, seq_len, kv_seq_len):
    P, D, times = group.size, q.shape[3], q.shape[1] // k.shape[1]
    at = positions(seq_len, P, layout)[group.rank][:, None]
    kv_at = positions(kv_seq_len, P, layout)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    delta = (grad_out.to(wide) * out.to(wide)).sum(3, keepdim=True)
    q_wide, grad_wide, block = q.to(wide) / D**0.5, grad_out.to(wide), torch.cat([k, v], 3)
    dq, behind = torch.zeros_like(q_wide), None
    for step in range(P):
        source, following = group.source(step), group.source(step + 1)
        shape = (*k.shape[:2], len(kv_at[following]), block.shape[3])
        if step < P - 1:
            arriving = group.shift(block, shape=shape)
        K, V = block.to(wide).repeat_interleave(times, 1).split([D, v.shape[3]], 3)
        hidden = ~mask.allowed(at, kv_at[source][None])
        p = (q_wide @ K.mT - lse[..., None]).exp().masked_fill(hidden, 0)
        ds = p * (grad_wide @ V.mT - delta)
        dq += ds @ K / D**0.5
        sums = torch.cat([ds.mT @ q_wide, p.mT @ grad_wide], 3)
        sums = sums.unflatten(1, (k.shape[1], times)).sum(2)
        if behind:
            sums += behind.wait()
        behind = group.shift(sums, shape=shape) if step < P - 1 else None
        if step < P - 1:
            block = arriving.wait()
    dk, dv = sums.split([D, v.shape[3]], 3)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
