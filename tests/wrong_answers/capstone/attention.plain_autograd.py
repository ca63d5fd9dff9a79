# says: the share of this rank's own queries: it must collect from all ranks
def attention(q, k, v, *, group, layout, mask, seq_len, kv_seq_len):
    P = group.size
    at, kv_at = positions(seq_len, P, layout), positions(kv_seq_len, P, layout)
    shapes = [(*k.shape[:2], len(x), k.shape[3]) for x in kv_at]
    wide = [(*v.shape[:2], len(x), v.shape[3]) for x in kv_at]
    K, V = group.all_gather(k, shapes).wait(), group.all_gather(v, wide).wait()
    K[group.rank], V[group.rank] = k, v  # autograd does not see through a move
    times = q.shape[1] // k.shape[1]
    K, V = (torch.cat(x, 2).repeat_interleave(times, 1) for x in (K, V))
    hidden = ~mask.allowed(at[group.rank][:, None], torch.cat(kv_at)[None])
    scores = (q @ K.mT / q.shape[3] ** 0.5).masked_fill(hidden, -1e30)
    return (scores.softmax(-1) * ~hidden) @ V
