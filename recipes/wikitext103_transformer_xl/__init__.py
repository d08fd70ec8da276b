"""The Transformer-XL language models of DeFINE on WikiText-103."""
