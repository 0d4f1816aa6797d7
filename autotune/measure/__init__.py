"""Compiles and times configs in separate processes; only one config is measured on a GPU at a
time.
"""
