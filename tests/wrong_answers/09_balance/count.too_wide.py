# says: that of a window one key too wide
def count(at, window):
    P = len(at)
    pairs = torch.zeros(P, P, dtype=torch.int64)
    for rank in range(P):
        for step in range(P):
            age = at[rank][:, None] - at[(rank - step) % P]
            pairs[rank, step] = ((age >= 0) & (age <= window)).sum()
    return pairs
