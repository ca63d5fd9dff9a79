# says: the mean of the answers: their shares differ from query to query
def forward(q, k, v, at, group):
    order = torch.cat(at)
    out, lse = partial(gathered(q, at, group), k, v, order[:, None] >= at[group.rank])
    total = torch.stack(group.all_gather(lse).wait()).logsumexp(0)
    return scattered(out / group.size, at, group), total.split([len(a) for a in at], 2)[group.rank]
