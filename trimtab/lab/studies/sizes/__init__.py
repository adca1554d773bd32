"""Parameters of the study models and of any other, exact and by part, with the formula that is usually quoted."""
