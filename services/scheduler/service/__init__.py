"""The loop around the scheduler core: streams in, atomic ticks out, leadership, recovery, upkeep."""
