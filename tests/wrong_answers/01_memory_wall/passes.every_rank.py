# says: where every rank passes; the fullest one is there some tokens earlier
def length_that_passes(bytes_per_token, parameters, P):
    return (16 * parameters // bytes_per_token + 1) * P
