"""Stored steps of a run: files, arrays in chunks, manifests, and which steps are whole.

    files.py     a folder, an object store, or anything fsspec opens
    arrays.py    an array in chunks, each with its crc32c
    manifest.py  what a writer wrote of a step; written last, it is the commit
    parts.py     one writer's slices at one place; which parts are a whole step

Neither JAX nor an engine is needed to read any of it.
"""
