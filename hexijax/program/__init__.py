"""The Program: what happens in which order, as data. Imports no JAX."""
