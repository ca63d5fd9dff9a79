# says: short of what is gathered while it is in use
def states(model, P, shard_all):
    N = model.parameters
    return 18 * N / P if shard_all else 6 * N + 12 * N / P
