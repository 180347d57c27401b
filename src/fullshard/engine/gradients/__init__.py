"""Gradients: from the full ones that autograd leaves to the sharded ones that optimizers read.

Words that have one meaning here:

    full        what autograd has left on an unsharded parameter: this rank's alone
    unreduced   sums of full gradients that wait for a later backward to reduce them
    lent        such sums, while autograd adds to them in place
    covered     gradients that were reduced before, while unreduced sums are shown as ``.grad``
    owed        parameters of which something waits: they take part in the next reduction, also if
                they were frozen meanwhile
    total       a sum over the shard axis
    partial     a total that waits for its all-reduce over the replicate axis
    present     whether any rank had a gradient; of a flat bucket, ``takers`` get one
    under way   a reduction that still holds memory for its collective or its lane
"""
