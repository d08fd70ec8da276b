"""AWD-LSTM on WikiText-2, one embedding beside another."""
