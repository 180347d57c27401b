"""Gradients: from the full ones that autograd leaves to the sharded ones that optimizers read.

Words that have one meaning here, beside those of docs/design.md (owed, lent):

    full        what autograd has left on an unsharded parameter: this rank's alone
    unreduced   sums of full gradients that wait for a later backward to reduce them
    covered     gradients that were reduced before, while unreduced sums are shown as ``.grad``
    total       a sum over the shard axis
    partial     a total that waits for its all-reduce over the replicate axis
    present     whether any rank had a gradient; of a flat bucket, ``takers`` get one
    under way   a reduction that still holds memory for its collective or its lane
"""
