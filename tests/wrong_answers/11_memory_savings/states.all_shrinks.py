# says: as if parameters and gradients were sharded
def states(model, P, shard_all):
    return 18 * model.parameters / P
