"""Objects and blocks as one graph: nodes are rows, references are edges in CSR."""
