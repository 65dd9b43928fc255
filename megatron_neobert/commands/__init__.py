"""Commands without a better home: preprocessing, a sample corpus, checks of the environment and of parity."""
