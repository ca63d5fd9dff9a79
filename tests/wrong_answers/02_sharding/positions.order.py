# says: in the wrong order: positions of a rank increase
def positions(S, P, r):
    chunks = torch.arange(S).tensor_split(2 * P)
    return torch.cat([chunks[2 * P - 1 - r], chunks[r]])
