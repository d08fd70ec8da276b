"""AWD-LSTM on the Penn Treebank, one embedding beside another."""
