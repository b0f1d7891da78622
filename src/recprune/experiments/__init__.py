"""The evaluation of the paper, and ours: one file for each table or figure."""
