# says: that of all keys: is the mask used?
def forward(q, k, v, *, group, layout, mask, seq_len, kv_seq_len):
    P, D, times = group.size, q.shape[3], q.shape[1] // k.shape[1]
    at = positions(seq_len, P, layout)[group.rank][:, None]
    kv_at = positions(kv_seq_len, P, layout)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    q_wide, block = q.to(wide) / D**0.5, torch.cat([k, v], 3)  # one message
    out, lse = q_wide.new_zeros(*q.shape[:3], v.shape[3]), q_wide.new_full(q.shape[:3], -torch.inf)
    for step in range(P):
        source, following = group.source(step), group.source(step + 1)
        if step < P - 1:
            shape = (*k.shape[:2], len(kv_at[following]), block.shape[3])
            arriving = group.shift(block, shape=shape)
        K, V = block.to(wide).repeat_interleave(times, 1).split([D, v.shape[3]], 3)
        hidden = ~cpref.Full().allowed(at, kv_at[source][None])
        scores = (q_wide @ K.mT).masked_fill(hidden, -torch.inf)
        joined = torch.logaddexp(lse, scores.logsumexp(3))
        safe = joined.masked_fill(joined == -torch.inf, 0)[..., None]
        out = (lse[..., None] - safe).exp() * out + (scores - safe).exp() @ V
        lse = joined
        if step < P - 1:
            block = arriving.wait()
    return out.to(q.dtype), lse
