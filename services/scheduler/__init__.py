"""The scheduler: one leader per pool owns every request and every KV block.

`core` is the pure machine, `service` the loop around it.
"""
