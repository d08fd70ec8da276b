"""Headlines of news in English (AG News), at a length that is asked for."""
