# says: is right but for rounding
def attention(q, k, v, *, group, layout, mask, seq_len, kv_seq_len):
    P, D, Dv, times = group.size, q.shape[3], v.shape[3], q.shape[1] // k.shape[1]
    at = positions(seq_len, P, layout)[group.rank][:, None]
    kv_at = positions(kv_seq_len, P, layout)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32

    def arriving_shape(step):
        return *k.shape[:2], len(kv_at[group.source(step + 1)]), D + Dv

    def visits(block):  # the mask, K and V of each step, the own one first
        for step in range(P):
            if step < P - 1:
                arriving = group.shift(block, shape=arriving_shape(step))
            hidden = ~mask.allowed(at, kv_at[group.source(step)][None])
            yield step, hidden, *block.to(wide).repeat_interleave(times, 1).split([D, Dv], 3)
            if step < P - 1:
                block = arriving.wait()

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            scaled = q.to(wide) / D**0.5
            out = scaled.new_zeros(*q.shape[:3], Dv)
            lse = scaled.new_full(q.shape[:3], -torch.inf)
            for _, hidden, K, V in visits(torch.cat([k, v], 3)):
                scores = (scaled @ K.mT).masked_fill(hidden, -torch.inf)
                joined = torch.logaddexp(lse, scores.logsumexp(3))
                safe = joined.masked_fill(joined == -torch.inf, 0)[..., None]
                out = (lse[..., None] - safe).exp() * out + (scores - safe).exp() @ V
                lse = joined
            out = out.to(q.dtype)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, grad_out):
            q, k, v, out, lse = ctx.saved_tensors
            scaled, grad = q.to(wide) / D**0.5, grad_out.to(wide)
            delta = (grad * out.to(wide)).sum(3, keepdim=True)
            dq, behind = torch.zeros_like(scaled), None
            for step, hidden, K, V in visits(torch.cat([k, v], 3)):
                p = (scaled @ K.mT - lse[..., None]).exp().masked_fill(hidden, 0)
                ds = p * (grad @ V.mT - delta)
                dq += ds @ K / D**0.5
                sums = torch.cat([ds.mT @ scaled, p.mT @ grad], 3)
                sums = sums.unflatten(1, (k.shape[1], times)).sum(2)
                if behind:
                    sums += behind.wait()
                behind = group.shift(sums.to(torch.bfloat16), shape=arriving_shape(step))
            dk, dv = behind.wait().split([D, Dv], 3)
            return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

    return Ring.apply(q, k, v)
