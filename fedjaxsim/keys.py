"""Numbers folded into random keys for streams of their own.

Rounds, clients and minibatches are numbered below 2³¹, so none of these meets them. Two streams of
one key have two numbers here.
"""

# Folded into the key of a run.
STAGE = 2**32 - 2
"""The next stage; the number of rounds done is folded in after it."""
EVALUATION = 2**32 - 3
"""The noise of evaluations that are released."""
EVALUATED = 2**32 - 4
"""The clients whom evaluations before the last one sample, by numpy's generator."""
# Folded into the key of a stage.
NEW_CLIENTS = 2**32 - 3
"""Clients who took no part before: their minibatches differ from those of the same numbers."""
# Folded into the clients' key of a run.
ORDER = 2**32 - 1
"""The orders in which minibatches are consumed over the whole run."""
# Folded, after 0, into the key of a run's noise.
NOISE_OF_ROUNDS, NOISE_OF_RUN = 0, 1
"""Fresh noise of each round, whose number follows; correlated noise, which draws rounds again."""
# Folded into the key of a client in a round; 0 and 1 are its minibatches and its context.
AVAILABILITY = 2
"""Whether the client answers, and with which share of its steps."""
# Folded into the key of a client's context; algorithms fold in small numbers.
EXAMPLE_NOISE = 0x65_78_61_6D
"""Noise of a client that protects its examples."""
# Folded into the key of a client's minibatches in a round; steps are numbered from 0.
EXAMPLES = 2**32 - 5
"""Random layers and augmentation, for each example."""
# Folded into the key of `init`, or of a seed.
COINS = 2**32 - 3
"""The coins of canaries."""
SELECTION = 2**32 - 4
"""The runs among which one is selected privately."""
TUNING = 0x74_75_6E_65
"""The runs of a tuning, and those that test its result."""
HELD_OUT = 0x68_6F_6C_64
"""The clients who are held out, by numpy's generator."""
