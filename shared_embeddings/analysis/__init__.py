"""What vectors are like: word similarity, and correlation between dimensions."""
