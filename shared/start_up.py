"""What every service does once it has started."""

import gc


def freeze_objects() -> int:
    """Take all objects that there are out of the garbage collector's sight; how many.

    They stay to the end of the process: modules, schemas, the tokenizer, weights. A full collection that visits them
    stops every thread: measured 40 ms in a gateway, 24 in a scheduler, 120 in a worker; with them frozen, 0.
    """
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()
