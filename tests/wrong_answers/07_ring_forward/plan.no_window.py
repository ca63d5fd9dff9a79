# says: causal only: is the window used?
def plan(at, rank, step, window):
    sees = at[rank][:, None] >= at[(rank - step) % len(at)]
    return sees if sees.any() else None
