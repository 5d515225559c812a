"""Plans whose steps and memory are written down before they are measured.

drawing -> listing -> a list that is committed -> running -> table
"""
