# says: that of ranks that wait for nobody
def idle(pairs):
    work = pairs.sum(1)
    return 1 - work / work.max()
