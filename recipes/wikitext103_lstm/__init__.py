"""The LSTM language models of DeFINE on WikiText-103."""
