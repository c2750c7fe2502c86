"""The worker process around the engine: lanes, lease, fence, partition of the machine."""
