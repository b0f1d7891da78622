"""Items that have vectors already: quantised, searched, and ranked by the vectors again."""
