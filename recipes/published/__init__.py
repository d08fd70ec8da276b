"""Translation recipes at the size of the papers: their tables, data, training and scores."""
