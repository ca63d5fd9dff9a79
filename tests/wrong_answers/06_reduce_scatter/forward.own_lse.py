# says: the lse over this rank's keys alone
def forward(q, k, v, at, group):
    order = torch.cat(at)
    out, lse = partial(gathered(q, at, group), k, v, order[:, None] >= at[group.rank])
    total = torch.stack(group.all_gather(lse).wait()).logsumexp(0)
    out = scattered(out * (lse - total).exp()[..., None], at, group)
    return out, lse.split([len(a) for a in at], 2)[group.rank]
