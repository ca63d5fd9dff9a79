# says: that of blocks posted after the tile
def idle(pairs):
    end = pairs[:, 0]
    for step in range(1, len(pairs)):
        end = torch.maximum(end, end.roll(1)) + pairs[:, step]
    return 1 - pairs.sum(1) / end.max()
