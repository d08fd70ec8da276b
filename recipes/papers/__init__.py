"""What the papers print: their tables, which row trains each of their models, and the sizes counted here."""
