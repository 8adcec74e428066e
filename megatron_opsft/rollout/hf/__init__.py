"""How batches of the Hugging Face engine shrink; its decode loop and the simulation of it agree."""

CHECK_EVERY = 4  # tokens between looks at who has finished: each look waits for the device
COMPACT_AT = 0.25  # share of finished rows from which dropping them pays for copying the cache
