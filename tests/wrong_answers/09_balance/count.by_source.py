# says: counted by the rank whose keys they are; column i must be step i
def count(at, window):
    P = len(at)
    pairs = torch.zeros(P, P, dtype=torch.int64)
    for rank in range(P):
        for source in range(P):
            age = at[rank][:, None] - at[source]
            pairs[rank, source] = ((age >= 0) & (age < window)).sum()
    return pairs
