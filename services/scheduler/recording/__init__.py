"""What a scheduler was told and decided, kept in files so that it can be derived again and explained.

format.py     what is in a file
recorder.py   `Recorder`: the leader's hook, and the thread that writes
reader.py     files to ticks
verify.py     the same ticks through the same core: the first difference (differences.py), or none
step.py, life.py   one step and one request explained
"""
