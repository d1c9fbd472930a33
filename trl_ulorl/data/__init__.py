"""Training data: the rules that clean a data set, and the embedded arithmetic task that runs without any download."""
