"""One file for each technique that attaches to the model: the idea, the formula, the source."""
